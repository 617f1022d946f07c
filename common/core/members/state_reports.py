"""State of the members: the newest report of each since the leader last requested one.

A report carries the newest trigger that its member had received, so a late report never overrides a
newer one. A worker's name is not enough: a restarted process no longer holds what the old one held.

If two living processes use one name, the leader believes the first that it received a message from.
The other one is a rival. The leader believes it once the first one has not answered for
`LIFETIME_S`. Every figure of a report is checked against what the job and this leader can have
(`why_wrong`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET

from common.core.members.stages import MemberMachine
from common.core.messages import GENESIS, Member, ModelId, Slices, TriggerId, WorkerId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from common.core.messages import StateReport


# Silence after which a process counts as gone if another one answers under its name. A living
# process answers within a second, and pauses of a garbage collector or a disk are shorter, too.
LIFETIME_S = 5.0
# Largest model: four TiB of float32, more than any machine has in memory.
MOST_NUMBERS = 2**40
# Maximum number of members that one report may name.
MOST_ACCUSED = 10_000


class MemberProcess(NamedTuple):
    """A process with a worker's name."""

    life: int
    # Time of its last message.
    last_seen_s: float


class Holding(NamedTuple):
    """State of a member as reported."""

    life: int
    last_trigger: TriggerId
    made: ModelId | None
    origin: int
    slices: Slices


class StateReports:
    """A leader's knowledge of its members' state."""

    def __init__(self) -> None:
        self._of = dict[WorkerId, Holding]()
        # A report counts only if its member had received this trigger or a later one. None between
        # a commit and the next trigger.
        self._since: TriggerId | None = None
        # Newest trigger of this leader.
        self._newest: TriggerId | None = None
        self._believed = dict[WorkerId, MemberProcess]()
        # Other processes with these names.
        self._rivals = dict[WorkerId, MemberProcess]()
        # Time since which the believed process is silent although a rival sends messages.
        self._silent_since = dict[WorkerId, float]()
        self._restarted = set[WorkerId]()
        # Addresses of the believed processes.
        self._addresses = dict[Member, str]()
        # Machines of the believed processes.
        self._machines = dict[Member, MemberMachine]()
        # Number of weights of the believed processes.
        self._numbers = dict[Member, int]()
        # Number of weights reported most often. If two are as frequent, the smaller one.
        self.numbers = 0

    def posted(self, trigger: TriggerId) -> None:
        """Record a posted trigger. The first one after a commit makes earlier reports obsolete."""
        self._newest = trigger
        if self._since is None:
            self._since = trigger
            self._of = {
                w: holding._replace(last_trigger=trigger) for w, holding in self._of.items()
            }

    @property
    def known(self) -> frozenset[WorkerId]:
        """Workers with any known state."""
        return frozenset(self._of) | self._believed.keys()

    def why_wrong(self, report: StateReport, made: ModelId, count: int) -> str:
        """Return why a report cannot be true. Empty if it can.

        Args:
            report: The report.
            made: The newest version that members were ordered to apply.
            count: Number of slices of the job. 0 if members hold everything.
        """
        last_trigger, held, newest = report.last_trigger, report.made, self._newest
        if newest is None or last_trigger.epoch != report.model.epoch or last_trigger > newest:
            return "heard: the report names a trigger that the leader has not posted"
        if held is not None and held.epoch == newest.epoch and held.version > made.version:
            return (
                f"made: the report names version {held.version}, but the newest is {made.version}"
            )
        if any(number >= count for number in report.slices or ()):
            return (
                f"slices: the report names slice {max(report.slices or ())}, but the job has"
                f" {count} slices"
            )
        if report.numbers > MOST_NUMBERS:
            return f"numbers: the reported model has more than {MOST_NUMBERS} parameters"
        if len(report.unreachable) > MOST_ACCUSED:
            return f"unreachable: the report names more than {MOST_ACCUSED} members"
        return ""

    def believes(self, member: Member, now: float) -> bool:
        """Record a message of a process. Return True if it is the believed one of its name."""
        worker, life = member
        believed = self._believed.get(worker)
        if believed is not None and believed.life != life:
            self._rivals[worker] = MemberProcess(life, now)
            if now < self._silent_since.setdefault(worker, now) + LIFETIME_S:
                return False
            self.gone([worker])
            self._restarted.add(worker)
        if worker in self._of and self._of[worker].life != life:
            # An earlier process of the name finished the newest version, and was gone before it was
            # committed. This one must say what it holds.
            del self._of[worker]
        self._believed[worker] = MemberProcess(life, now)
        self._silent_since.pop(worker, None)
        return True

    def is_rival(self, member: Member) -> bool:
        """True if another process of its name is believed."""
        believed = self._believed.get(member.worker)
        return believed is not None and believed.life != member.life

    def rivals(self, now: float) -> list[WorkerId]:
        """Return the names with two active processes."""
        lately = now - 2 * LIFETIME_S
        self._rivals = {w: each for w, each in self._rivals.items() if each.last_seen_s > lately}
        return sorted(self._rivals)

    def take_restarted(self) -> frozenset[WorkerId]:
        """Return the names whose rival became the believed process since the last call."""
        restarted, self._restarted = frozenset(self._restarted), set()
        return restarted

    def last_seen_s(self, member: Member) -> float:
        """Return the time of the last message of a believed process."""
        return self._believed.get(member.worker, MemberProcess(0, float("-inf"))).last_seen_s

    def stood_still(self, pause_s: float) -> None:
        """Exclude the leader's own delay from the silence of all members."""
        self._silent_since = {w: since + pause_s for w, since in self._silent_since.items()}

    def gone(self, workers: Iterable[WorkerId]) -> None:
        """Forget dead workers. The next process that answers under their names is believed."""
        for worker in workers:
            self._of.pop(worker, None)
            self._believed.pop(worker, None)
            self._rivals.pop(worker, None)
            self._silent_since.pop(worker, None)
        lives = {(worker, process.life) for worker, process in self._believed.items()}
        for known in (self._addresses, self._machines, self._numbers):
            for member in [each for each in known if each not in lives]:
                del known[member]
        self._count_numbers()

    def _count_numbers(self) -> None:
        counts = Counter(number for number in self._numbers.values() if number)
        self.numbers = max(counts, key=lambda number: (counts[number], -number), default=0)

    def is_odd(self, member: Member) -> bool:
        """True if its number of weights differs from that of most members."""
        return self._numbers.get(member, 0) not in {0, self.numbers}

    def receive(self, report: StateReport) -> None:
        """Process a report of a believed process."""
        known = self._of.get(report.worker)
        if self._since is None or report.last_trigger < self._since:
            return
        if known is not None and report.last_trigger < known.last_trigger:
            return
        member = Member(report.worker, report.life)
        self._of[report.worker] = Holding(
            report.life, report.last_trigger, report.made, report.origin, report.slices
        )
        self._addresses[member] = report.address
        room = None if report.room is UNSET else report.room
        self._machines[member] = MemberMachine(
            member, report.tier or "spot", report.began_s or 0.0, room
        )
        if self._numbers.get(member) != report.numbers:
            self._numbers[member] = report.numbers
            self._count_numbers()

    def commit(
        self, finished: Iterable[Member], made: ModelId, owned: Callable[[Member], Slices]
    ) -> None:
        """Forget all reports at a commit. Only members that finished the version certainly hold it.

        Args:
            finished: Members that have the result of the committed attempt.
            made: The committed version.
            owned: Returns the slices that a member owns in it.
        """
        self._since = None
        self._of = {
            member.worker: Holding(member.life, TriggerId(-1, 0), made, 0, owned(member))
            for member in finished
            if not self.is_rival(member)
        }

    def addresses(self, members: Iterable[Member]) -> dict[WorkerId, str]:
        """Return the known addresses of these members."""
        known = ((each.worker, self._addresses.get(each, "")) for each in members)
        return {worker: address for worker, address in known if address}

    def machines(self, members: Iterable[Member]) -> list[MemberMachine]:
        """Return the machines of these members."""
        return [self._machines.get(each, MemberMachine(each, "spot", 0.0)) for each in members]

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """Forget the state of workers that are gone or silent. They must report again."""
        for worker in workers:
            self._of.pop(worker, None)

    def unknown(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Return the workers without a known state."""
        return frozenset(workers) - self._of.keys()

    def is_gone(self, there: Collection[WorkerId]) -> Callable[[Member], bool]:
        """Return a predicate that is True for a dead member, given the living workers."""
        return lambda member: member.worker not in there or self.is_rival(member)

    def members(self, workers: Collection[WorkerId]) -> frozenset[Member]:
        """Return the known members among these workers, without those whose weights do not fit."""
        found = (Member(w, held.life) for w, held in self._of.items() if w in workers)
        return frozenset(each for each in found if not self.is_odd(each))

    def odd(self, workers: Collection[WorkerId]) -> list[Member]:
        """Return the members among these workers whose number of weights differs from most."""
        found = (Member(w, held.life) for w, held in self._of.items() if w in workers)
        return sorted(each for each in found if self.is_odd(each))

    def numbers_of(self, member: Member) -> int:
        """Return the number of weights that a member reported."""
        return self._numbers.get(member, 0)

    def whole(self, workers: Collection[WorkerId], made: ModelId, origin: int) -> frozenset[Member]:
        """Return the members among these workers that hold a version."""
        name = (made, origin if made == GENESIS else 0)
        found = ((each, self._of[each.worker]) for each in self.members(workers))
        return frozenset(member for member, held in found if (held.made, held.origin) == name)

    def origins(self, workers: Collection[WorkerId]) -> frozenset[int]:
        """Return the origins of version 0 that members among these workers hold."""
        held = (self._of[each.worker] for each in self.members(workers))
        return frozenset(each.origin for each in held if each.made == GENESIS)

    def slices(self, member: Member, count: int) -> frozenset[int]:
        """Return the slices, of `count`, whose optimizer state a member holds."""
        held = self._of.get(member.worker)
        if held is None or held.life != member.life:
            return frozenset()
        return frozenset(range(count) if held.slices is UNSET else held.slices)

    def holders(self, members: Iterable[Member], count: int) -> tuple[tuple[Member, ...], ...]:
        """Return the holders of each of `count` slices among these members, sorted."""
        found = tuple(list[Member]() for _ in range(count))
        for member in sorted(members):
            for number in self.slices(member, count):
                found[number].append(member)
        return tuple(map(tuple, found))

    def versions(self, workers: Collection[WorkerId], count: int) -> frozenset[ModelId]:
        """Return the versions whose weights, and the optimizer state of all slices, are held."""
        found = dict[ModelId, set[int]]()
        for member in self.members(workers):
            if (made := self._of[member.worker].made) is not None:
                found.setdefault(made, set()).update(self.slices(member, count))
        return frozenset(made for made, slices in found.items() if len(slices) == count)
