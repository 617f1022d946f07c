"""Counts a worker's traffic: the bytes of weights and gradients that it sends and receives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from secrets import randbits
from typing import TYPE_CHECKING

from common.core.messages import Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from common.collectives.port import Group, Groups, Peer
    from common.telemetry.metrics.worker import WorkerMetrics

LIFE_BITS = 53


class TrafficCounter:
    """Counts bytes from its creation on. Safe to use from several threads."""

    def __init__(self, measures: WorkerMetrics) -> None:
        self._measures = measures
        self._lock = threading.Lock()
        self._total = 0
        self._life = randbits(LIFE_BITS)

    @property
    def traffic(self) -> Traffic:
        """The current count."""
        return Traffic(self._life, self._total)

    def moved(self, sent: int = 0, received: int = 0) -> None:
        """Count transferred bytes."""
        with self._lock:
            self._total += sent + received
        self._measures.moved_bytes.labels("sent").inc(sent)
        self._measures.moved_bytes.labels("received").inc(received)


class CountedGroup:
    """A member's part in a group. Counts each collective once it is over.

    A library's traffic is not visible. So each collective counts as the bytes of a ring, which is
    the minimum for all members together: each sends as much as it receives.

    Args:
        group: The group.
        members: Number of members.
        rank: Rank of this member.
        count: Receives the bytes.
    """

    def __init__(self, group: Group, members: int, rank: int, count: TrafficCounter) -> None:
        self._group = group
        self._members, self._rank = members, rank
        self._count = count
        self.form, self.abort = group.form, group.abort

    def all_reduce(self, vector: Tensor) -> None:
        """Sum the vectors of all members in place. Each part goes round twice."""
        self._group.all_reduce(vector)
        each = 2 * vector.nbytes * (self._members - 1) // self._members
        self._count.moved(each, each)

    def exchange(
        self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]
    ) -> None:
        """Send a part of a vector to each member, and receive one from each."""
        self._group.exchange(outgoing, sent, incoming, received)
        away, here = sum(sent) - sent[self._rank], sum(received) - received[self._rank]
        self._count.moved(away * outgoing.itemsize, here * incoming.itemsize)

    def gather(self, vector: Tensor, lengths: Sequence[int]) -> None:
        """Give every member the parts of all, in place. Each member passes on all parts but one."""
        self._group.gather(vector, lengths)
        following = (self._rank + 1) % self._members
        size, total = vector.itemsize, sum(lengths)
        self._count.moved((total - lengths[following]) * size, (total - lengths[self._rank]) * size)

    def copy(self, vectors: Sequence[Tensor]) -> None:
        """Send rank 0's vectors to all others, and return once all members have them."""
        self._group.copy(vectors)
        size = sum(vector.nbytes for vector in vectors)
        if self._rank == 0:
            self._count.moved(sent=size * (self._members - 1))
        else:
            self._count.moved(received=size)


def counted(groups: Groups, count: TrafficCounter) -> Callable[[str, Sequence[Peer], int], Group]:
    """Return a function that makes groups whose traffic is counted."""

    def group(name: str, members: Sequence[Peer], rank: int) -> Group:
        return CountedGroup(groups.group(name, members, rank), len(members), rank, count)

    return group
