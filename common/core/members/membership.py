"""Choice of members that reach each other, as far as is known.

A member reports a peer that it cannot reach, but nobody reports that a link works again. So reports
expire, and the two members are tried together again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from common.core.messages import Member, WorkerId

_LOOPBACK = ("127.", "[::1]")
# Time that two members are kept apart. Afterwards the link may work again.
ACCUSED_S = 60.0


class Accusations:
    """Pairs of members with a recent report that one could not reach the other."""

    def __init__(self) -> None:
        self._until = dict[frozenset["Member"], float]()

    def add(self, member: Member, unreachable: Iterable[Member], now: float) -> None:
        """Record that a member could not reach these."""
        for other in unreachable:
            self._until[frozenset((member, other))] = now + ACCUSED_S

    def between(self, one: Member, other: Member, now: float) -> bool:
        """True if two members are kept apart."""
        return self._until.get(frozenset((one, other)), now) > now

    def clique(
        self, members: Iterable[Member], needed: Collection[Member], now: float
    ) -> frozenset[Member]:
        """Return members without any pair that is kept apart. The most reported ones are left out.

        Args:
            members: Candidates.
            needed: Members with gradients that count, which are left out last.
            now: Current time.
        """
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        left = set(members)
        while pairs := [pair for pair in self._until if pair <= left]:
            count = Counter(member for pair in pairs for member in pair)
            left.remove(max(sorted(count), key=lambda m: (count[m], m not in needed)))
        return frozenset(left)


def memory_shortage(room: int, count: int) -> str:
    """Return why some slices have no owner, so that no update is made."""
    return (
        f"the worker has memory for {room} of the {count} slices of the optimizer's state, and all"
        " workers together do not have enough; use larger machines or more of them"
    )


def why_double(worker: WorkerId) -> str:
    """Return why a second process of a worker's name takes no part."""
    return (
        f"two processes run as worker {worker}, and the leader accepts only the first; stop one of"
        " them, or give it another --name"
    )


def why_odd(numbers: int, of_most: int) -> str:
    """Return why a worker takes no part: its model has another size than those of most."""
    return (
        f"the worker's model has {numbers:,} parameters, but those of most workers have"
        f" {of_most:,}; it runs another version of the task, or a message in its name was forged"
    )


def why_apart(worker: WorkerId, others: list[WorkerId], addresses: Mapping[WorkerId, str]) -> str:
    """Return why a worker is excluded: it cannot reach some members, or they cannot reach it."""
    named = {each: f"{each} ({addresses.get(each, 'no address')})" for each in (worker, *others)}
    reason = (
        f"{named[worker]} and {', '.join(named[o] for o in others)} cannot connect to each other"
    )
    loopback = [each for each in named if addresses.get(each, "").startswith(_LOOPBACK)]
    # If tunnels are used, each worker may reach Redis at a loopback address on any machine.
    if len(loopback) == len(named):
        return (
            f"{reason}: loopback addresses work only on one machine; with several machines, set"
            " DOLL_ADVERTISE on each"
        )
    if loopback:
        which = ", ".join(loopback)
        return (
            f"{reason}: {which} must not advertise a loopback address, which other machines cannot"
            " reach; set DOLL_ADVERTISE there"
        )
    return (
        f"{reason}: members need a private network on which each reaches all others at any TCP port"
    )
