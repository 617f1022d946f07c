"""Groups in memory (`common.collectives.port`): members are threads, and a test breaks the network.

A group breaks as a whole, as with gloo: a member that raises or leaves breaks it for all others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

import torch

from common.collectives.port import TIMEOUT_S, Peer
from common.errors import GroupError

if TYPE_CHECKING:
    from torch import Tensor

_Parts: TypeAlias = "Sequence[Tensor]"


@dataclass
class _Meeting:
    """State that the members of one group share."""

    joined: set[int] = field(default_factory=set)  # ranks
    broken: bool = False
    # Keyed by call and rank.
    parts: dict[tuple[int, int], _Parts] = field(default_factory=dict)


class MemoryNetwork:
    """Connects members, which it knows by their addresses. A test can break it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards all that follows
        self.meetings = dict[str, _Meeting]()
        self.dead = set[str]()
        self.frozen = set[str]()
        self.cuts = set[frozenset[str]]()
        self._members = 0

    def groups(self) -> MemoryGroups:
        """Return a transport for a member."""
        with self.changed:
            self._members += 1
            return MemoryGroups(self, f"127.0.0.1:{self._members}")

    def kill(self, address: str) -> None:
        """Crash a member."""
        with self.changed:
            self.dead.add(address)
            self.changed.notify_all()

    def freeze(self, address: str) -> None:
        """Freeze a member for ever. Its machine still answers."""
        with self.changed:
            self.frozen.add(address)

    def cut(self, one: str, other: str) -> None:
        """Cut the connection between two members."""
        with self.changed:
            self.cuts.add(frozenset((one, other)))
            self.changed.notify_all()


class MemoryGroups:
    """A member's transport, which creates its groups. Threads may share it."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self.address = address

    def group(
        self, name: str, members: Sequence[Peer], rank: int, timeout_s: float = TIMEOUT_S
    ) -> MemoryGroup:
        return MemoryGroup(self._network, name, members, rank, timeout_s)

    def close(self) -> None:
        self._network.kill(self.address)


class MemoryGroup:
    """A member's part in a group. All methods but `abort` belong to one thread."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        members: Sequence[Peer],
        rank: int,
        timeout_s: float,
    ) -> None:
        self._network = network
        self._name = name
        self._members = tuple(members)
        self._rank = rank
        self._timeout_s = timeout_s
        self._calls = 0
        with network.changed:
            self._meeting = network.meetings.setdefault(name, _Meeting())

    def form(self) -> None:
        with self._network.changed:
            meeting = self._meeting
            if self._rank in meeting.joined:
                raise self._broken("its name was used before")
            if meeting.broken:
                raise self._broken("it was aborted")
            meeting.joined.add(self._rank)
            self._await(lambda: len(meeting.joined) == len(self._members))

    def all_reduce(self, vector: Tensor) -> None:
        first, *others = [part for [part] in self._met([vector.clone()])]
        vector.copy_(first)
        for part in others:
            vector += part

    def exchange(
        self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]
    ) -> None:
        parts = self._met(torch.split(outgoing.clone(), [*sent]))
        for into, theirs in zip(torch.split(incoming, [*received]), parts, strict=True):
            into.copy_(theirs[self._rank])

    def gather(self, vector: Tensor, lengths: Sequence[int]) -> None:
        own = torch.split(vector, [*lengths])[self._rank].clone()
        vector.copy_(torch.cat([part for [part] in self._met([own])]))

    def copy(self, vectors: Sequence[Tensor]) -> None:
        for vector, sent in zip(vectors, self._met(vectors)[0], strict=True):
            vector.copy_(sent)
        self._met([])

    def abort(self) -> None:
        with self._network.changed:
            self._meeting.broken = True
            self._network.changed.notify_all()

    def _met(self, parts: _Parts) -> list[_Parts]:
        """Meet all others in their call of this number. Returns what each contributed, by rank."""
        self._calls += 1
        with self._network.changed:
            if self._meeting.broken or self._rank not in self._meeting.joined:
                raise self._broken("it broke before, or was never formed")
            met = self._meeting.parts
            met[self._calls, self._rank] = parts
            keys = [(self._calls, rank) for rank in range(len(self._members))]
            self._await(lambda: all(key in met for key in keys))
            return [met[key] for key in keys]

    def _await(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition while holding the lock.

        Raises:
            GroupError: If the group breaks first, or the wait takes too long.
        """
        network, deadline = self._network, monotonic() + self._timeout_s
        own = self._members[self._rank].address
        network.changed.notify_all()
        while own in network.frozen or not holds():
            left_s = deadline - monotonic()
            if own not in network.frozen and (self._meeting.broken or self._unreachable()):
                raise self._broken("it was aborted, or a member left it")
            if own in network.dead or (own not in network.frozen and left_s <= 0):
                raise self._broken("a member took too long")
            network.changed.wait(max(left_s, 0.01))

    def _unreachable(self) -> frozenset[str]:
        own = self._members[self._rank].address
        return frozenset(
            each.name
            for each in self._members
            if each.address in self._network.dead
            or frozenset((own, each.address)) in self._network.cuts
        )

    def _broken(self, why: str) -> GroupError:
        self._meeting.broken = True
        self._network.changed.notify_all()
        names = self._unreachable()
        whom = f"; cannot reach {', '.join(sorted(names))}" if names else ""
        return GroupError(f"group {self._name}: {why}{whom}", names)
