"""Who may add gradients up together: members that reach each other, as far as is known.

Whoever cannot reach a peer says so; nobody learns that links work again. So accusations fade, and
then those two are put together once more.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from common.core.messages import Member, WorkerId

_LOOPBACK = ("127.", "[::1]")
ACCUSED_S = 60.0  # that two are kept apart: a link that was cut may be mended


class Accusations:
    """Pairs of members of which one could not reach the other lately."""

    def __init__(self) -> None:
        self._until = dict[frozenset["Member"], float]()

    def add(self, member: Member, unreachable: Iterable[Member], now: float) -> None:
        """A member could not reach these."""
        for other in unreachable:
            self._until[frozenset((member, other))] = now + ACCUSED_S

    def between(self, one: Member, other: Member, now: float) -> bool:
        """Whether these two are kept apart."""
        return self._until.get(frozenset((one, other)), now) > now

    def clique(
        self, members: Iterable[Member], needed: Collection[Member], now: float
    ) -> frozenset[Member]:
        """Members of which no two are kept apart: the most accused are left out first.

        Args:
            members: Of whom.
            needed: To be left out last: they have gradients that count.
            now: The time.
        """
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        left = set(members)
        while pairs := [pair for pair in self._until if pair <= left]:
            count = Counter(member for pair in pairs for member in pair)
            left.remove(max(sorted(count), key=lambda m: (count[m], m not in needed)))
        return frozenset(left)


def why_cramped(room: int, count: int) -> str:
    """Why slices are owned by nobody, and no update is made."""
    return (
        f"it has memory for {room} of the {count} slices of the optimizer's state, and all workers"
        " together for too few: take larger machines or more of them"
    )


def why_double(worker: WorkerId) -> str:
    """Return why a second process of a worker's name takes no part."""
    return (
        f"two processes run as {worker}: the one that was heard first is believed, the other one"
        " takes no part; stop one of them, or give it another --name"
    )


def why_odd(numbers: int, of_most: int) -> str:
    """Return why a worker takes no part whose model is not as large as the others'."""
    return (
        f"its model has {numbers:,} numbers, that of most workers {of_most:,}: it runs another"
        " version of the task, or what it is said to have said was forged"
    )


def why_apart(worker: WorkerId, others: list[WorkerId], addresses: Mapping[WorkerId, str]) -> str:
    """Why a worker is left out that some members do not reach, or that does not reach them."""
    named = {each: f"{each} ({addresses.get(each, 'no address')})" for each in (worker, *others)}
    reason = f"{named[worker]} and {', '.join(named[o] for o in others)} do not reach each other"
    loopback = [each for each in named if addresses.get(each, "").startswith(_LOOPBACK)]
    if len(loopback) == len(named):  # by tunnels each may have Redis at one, wherever it runs
        return (
            f"{reason}: loopback addresses serve one machine alone; on several, set DOLL_ADVERTISE"
            " on each"
        )
    if loopback:
        which = ", ".join(loopback)
        return f"{reason}: set DOLL_ADVERTISE where {which} runs: others reach no loopback address"
    return f"{reason}: members need a private network on which all reach all, at any TCP port"
