"""Traffic of a group's collectives: over all members, sent and received bytes are equal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from common.collectives.port import Peer
from common.errors import GroupError
from common.telemetry.metrics.worker import WorkerMetrics
from services.worker.traffic import TrafficCounter, counted
from tests.fakes.group import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.collectives.port import Group

NUMBER = 4  # bytes
LENGTHS = [3, 0, 7]  # lengths of parts by rank


class Members:
    """Members of one group, each with its own count."""

    def __init__(self, members: int) -> None:
        network = MemoryNetwork()
        ways = [network.groups() for _ in range(members)]
        self.peers = [Peer(f"w{rank}", way.address) for rank, way in enumerate(ways)]
        self.metrics = [WorkerMetrics(()) for _ in ways]
        self.counts = [TrafficCounter(each) for each in self.metrics]
        makers = [counted(way, count) for way, count in zip(ways, self.counts, strict=True)]
        self.groups = [make("g", self.peers, rank) for rank, make in enumerate(makers)]

    def all(self, call: Callable[[Group, int], None]) -> None:
        """Let all members call at once."""
        with ThreadPoolExecutor(len(self.groups)) as pool:
            list(pool.map(call, self.groups, range(len(self.groups))))

    def sample(self, direction: str) -> list[float | None]:
        """Return the sample of each member."""
        labels = {"direction": direction}
        name = "doll_worker_moved_bytes_total"
        return [each.registry.get_sample_value(name, labels) for each in self.metrics]


def _sum(group: Group, rank: int) -> None:  # noqa: ARG001
    group.all_reduce(torch.ones(12))


def _exchange(group: Group, rank: int) -> None:
    outgoing = torch.ones(3 * LENGTHS[rank])
    incoming = torch.empty(sum(LENGTHS))
    group.exchange(outgoing, [LENGTHS[rank]] * 3, incoming, LENGTHS)


def _gather(group: Group, rank: int) -> None:  # noqa: ARG001
    group.gather(torch.ones(sum(LENGTHS)), LENGTHS)


def _copy(group: Group, rank: int) -> None:  # noqa: ARG001
    group.copy([torch.ones(5), torch.ones(1)])


@pytest.mark.parametrize(
    ("call", "sent", "received"),
    [
        (_sum, [16, 16, 16], [16, 16, 16]),  # 2 (p - 1) / p of the vector
        (_exchange, [6, 0, 14], [7, 10, 3]),
        (_gather, [10, 3, 7], [7, 10, 3]),
        (_copy, [12, 0, 0], [0, 6, 6]),
    ],
)
def test_collective_counts_the_bytes_of_a_ring(
    call: Callable[[Group, int], None], sent: list[int], received: list[int]
) -> None:
    members = Members(3)
    members.all(lambda group, _: group.form())
    members.all(call)
    assert members.sample("sent") == [NUMBER * each for each in sent]
    assert members.sample("received") == [NUMBER * each for each in received]
    assert sum(sent) == sum(received)
    totals = [NUMBER * sum(both) for both in zip(sent, received, strict=True)]
    assert [count.traffic.total for count in members.counts] == totals


def test_single_member_or_failed_collective_counts_no_bytes() -> None:
    alone = Members(1)
    alone.all(lambda group, _: group.form())
    alone.all(_sum)
    two = Members(2)
    two.all(lambda group, _: group.form())
    two.groups[1].abort()
    with pytest.raises(GroupError):
        two.groups[0].all_reduce(torch.ones(12))
    assert [count.traffic.total for count in (*alone.counts, *two.counts)] == [0, 0, 0]
