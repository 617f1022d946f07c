"""Who holds what: the newest word of each member, since the leader last asked.

A word is dated by the newest trigger that its member had heard, so one that comes late undoes none
that is newer. A worker's name is not enough: who comes back under it holds nothing of what it held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET

from common.core.group.stages import Machine
from common.core.messages import GENESIS, Member, ModelId, Slices, TriggerId, WorkerId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from common.core.messages import StateReport


class Holding(NamedTuple):
    """What a member said."""

    life: int
    heard: TriggerId
    made: ModelId | None
    origin: int
    slices: Slices


class StateReports:
    """A leader's knowledge of its members' state."""

    def __init__(self) -> None:
        self._of = dict[WorkerId, Holding]()
        self._since: TriggerId | None = None  # that must have been heard; None: the next trigger
        self._addresses = dict[Member, str]()  # of all that ever said one
        self._machines = dict[Member, Machine]()  # likewise
        self.numbers = 0  # of the weights that they hold

    def posted(self, trigger: TriggerId) -> None:
        """A trigger is posted: where all begins anew, words of earlier ones count no more."""
        if self._since is None:
            self._since = trigger
            self._of = {w: holding._replace(heard=trigger) for w, holding in self._of.items()}

    @property
    def known(self) -> frozenset[WorkerId]:
        """Of whom something is known."""
        return frozenset(self._of)

    def hear(self, report: StateReport) -> bool:
        """Take in what a member says.

        Returns:
            Whether it is another process than the one that was known by its name.
        """
        known = self._of.get(report.worker)
        if self._since is None or report.heard < self._since:
            return False
        if known is not None and report.heard < known.heard:
            return False
        if known is not None and known.life != report.life and known.heard == report.heard:
            del self._of[report.worker]  # one of the two is dead: who answers the next question?
            return False
        member = Member(report.worker, report.life)
        self._of[report.worker] = Holding(
            report.life, report.heard, report.made, report.origin, report.slices
        )
        self._addresses[member] = report.address
        room = None if report.room is UNSET else report.room
        self._machines[member] = Machine(member, report.tier or "spot", report.began_s or 0.0, room)
        self.numbers = max(self.numbers, report.numbers)
        return known is not None and known.life != report.life

    def commit(
        self, finished: Iterable[Member], made: ModelId, owned: Callable[[Member], Slices]
    ) -> None:
        """A version counts: who finished it can apply it; of all others nothing is known."""
        self._since = None
        self._of = {
            member.worker: Holding(member.life, TriggerId(-1, 0), made, 0, owned(member))
            for member in finished
        }

    def addresses(self, members: Iterable[Member]) -> dict[WorkerId, str]:
        """Where these are reached, as far as they said it."""
        known = ((each.worker, self._addresses.get(each, "")) for each in members)
        return {worker: address for worker, address in known if address}

    def machines(self, members: Iterable[Member]) -> list[Machine]:
        """What these run on."""
        return [self._machines.get(each, Machine(each, "spot", 0.0)) for each in members]

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """These are gone, or silent: what they hold, they must say anew."""
        for worker in workers:
            self._of.pop(worker, None)

    def unknown(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Of whom nothing is known."""
        return frozenset(workers) - self._of.keys()

    def is_gone(self, there: Collection[WorkerId]) -> Callable[[Member], bool]:
        """Tells of a member whether it lives no more, where these workers do."""
        known = {worker: held.life for worker, held in self._of.items()}
        return lambda m: m.worker not in there or known.get(m.worker, m.life) != m.life

    def members(self, workers: Collection[WorkerId]) -> frozenset[Member]:
        """Those of these that are known."""
        return frozenset(Member(w, held.life) for w, held in self._of.items() if w in workers)

    def whole(self, workers: Collection[WorkerId], made: ModelId, origin: int) -> frozenset[Member]:
        """Those of these that hold a version."""
        name = (made, origin if made == GENESIS else 0)
        return frozenset(
            Member(worker, held.life)
            for worker, held in self._of.items()
            if worker in workers and (held.made, held.origin) == name
        )

    def origins(self, workers: Collection[WorkerId]) -> frozenset[int]:
        """Lives of the members that made the weights of version 0 that are held."""
        held = (holding for worker, holding in self._of.items() if worker in workers)
        return frozenset(each.origin for each in held if each.made == GENESIS)

    def slices(self, member: Member, count: int) -> frozenset[int]:
        """Of so many, those whose optimizer state a member holds, at the version that it holds."""
        held = self._of.get(member.worker)
        if held is None or held.life != member.life:
            return frozenset()
        return frozenset(range(count) if held.slices is UNSET else held.slices)

    def holders(self, members: Iterable[Member], count: int) -> tuple[tuple[Member, ...], ...]:
        """Of so many slices, those of these members that hold each, in order."""
        found = tuple(list[Member]() for _ in range(count))
        for member in sorted(members):
            for number in self.slices(member, count):
                found[number].append(member)
        return tuple(map(tuple, found))

    def versions(self, workers: Collection[WorkerId], count: int) -> frozenset[ModelId]:
        """Versions of which the weights are held, and the optimizer's state of so many slices."""
        held = [(w, self._of[w]) for w in workers if w in self._of]
        found = dict[ModelId, set[int]]()
        for worker, holding in held:
            if holding.made is not None:
                slices = self.slices(Member(worker, holding.life), count)
                found.setdefault(holding.made, set()).update(slices)
        return frozenset(made for made, slices in found.items() if len(slices) == count)
