"""Who is slow gets fewer batches, and who is as fast as others keeps its own: in virtual time."""

from __future__ import annotations

import heapq
import random
from itertools import count
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace as with_

from common.core import commands as do
from common.core import events
from common.core.assignments import Assignments
from common.core.messages import WorkerId
from common.core.rounds import READ_BACK_S
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import gradient, of_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.commands import CoordinatorCommand
    from common.core.settings import CoordinatorSettings

WORKERS = [WorkerId(f"w{number}") for number in range(8)]
GRADIENT_S = 0.05
JITTER = 0.2  # of what an order takes, exponential: the standard deviation over the mean
UPDATES = 100


class Fleet:
    """Eight workers, each with a backlog, and a leader; only gradients take time.

    Args:
        settings: The job's.
        slowness: How many times longer the last worker takes.
        gradient_s: Mean time of the others.
    """

    def __init__(
        self, settings: CoordinatorSettings, slowness: float, gradient_s: float = GRADIENT_S
    ) -> None:
        self.bench = Bench(settings)
        self.batches = self.read_back = self.stalest = 0
        self.hiccups_s: list[float] = []  # by which its next gradients take longer, then no more
        self._mean_s = dict.fromkeys(WORKERS, gradient_s)
        self._mean_s[WORKERS[-1]] = slowness * gradient_s
        self._draw = random.Random(1)  # noqa: S311 -- reproducible, not secret
        self._orders = {worker: Assignments(worker) for worker in WORKERS}
        self._idle = set(WORKERS)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting = dict.fromkeys(WORKERS, 0)
        self.bench.lead()
        self.bench.see(*WORKERS)

    def run(self, updates: int) -> float:
        """Make so many updates; returns batches per second."""
        self._claim()
        while self.bench.model.version < updates:
            due = self.bench.machine.due()
            if due <= self._events[0][0]:
                self.bench.now = max(due, self.bench.now)
                self._heed(self.bench.tick(self.bench.now))
            else:
                self.bench.now, _, action = heapq.heappop(self._events)
                action()
        return self.batches / self.bench.now

    def _claim(self) -> None:
        """Each has two groups of its own waiting, in turn."""
        lacking = [w for _ in range(16) for w in WORKERS if self._waiting[w] < 16]
        for worker in lacking:
            if self._waiting[worker] < 16:
                self._waiting[worker] += 1
                self._heed(self.bench.announce(worker))

    def _heed(self, said: tuple[CoordinatorCommand, ...]) -> None:
        for apply in of_kind(said, do.Apply):
            self.batches += len(apply.update.batches)
            self.stalest = max(self.stalest, apply.update.staleness)
            for each in apply.update.batches:
                self._waiting[each.worker] -= 1
        for post in of_kind(said, do.PostTrigger):
            for orders in self._orders.values():
                orders.hear([post.trigger])
        for worker in sorted(self._idle):
            self._compute(worker)
        if of_kind(said, do.Apply):
            self.bench.read_updates()
            self._claim()

    def _compute(self, worker: WorkerId) -> None:
        compute = self._orders[worker].next()
        if compute is None:
            self._idle.add(worker)
            return
        self._idle.discard(worker)
        jitter = JITTER * (self._draw.expovariate(1.0) - 1)
        took_s = len(compute.batches) * self._mean_s[worker] * (1 + jitter)
        if worker == WORKERS[-1] and self.hiccups_s:
            took_s += self.hiccups_s.pop()
        foreign = sum(batch.worker != worker for batch in compute.batches)
        self.read_back += foreign
        reply = with_(gradient(worker, compute.model, compute.batches), seconds=took_s)

        def answer() -> None:
            self._orders[worker].done()
            self._idle.add(worker)
            self._heed(self.bench.feed(events.RepliesRead((reply,))))

        at = self.bench.now + took_s + foreign * READ_BACK_S
        heapq.heappush(self._events, (at, next(self._numbers), answer))


def settings(staleness: int) -> CoordinatorSettings:
    return changed(
        QUIET,
        group_size=8,
        bound=16,
        staleness=staleness,
        leader_status_s=10.0,
        deadline_floor_s=5.0,  # nothing is asked for twice
    )


# Where each computes its own batch and all wait for the slow one: 8 batches in 0.2 s.
HELD_UP = 8 / (4 * GRADIENT_S)


@pytest.mark.parametrize(("staleness", "gain"), [(0, 1.7), (1, 2.7)])
def test_one_slow_worker_of_eight_does_not_hold_up_the_others(staleness: int, gain: float) -> None:
    fleet = Fleet(settings(staleness), slowness=4.0)

    assert fleet.run(UPDATES) >= gain * HELD_UP
    assert fleet.stalest <= staleness


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("gradient_s", [0.002, GRADIENT_S, 1.0])
def test_equal_workers_keep_their_own_batches(staleness: int, gradient_s: float) -> None:
    fleet = Fleet(settings(staleness), slowness=1.0, gradient_s=gradient_s)

    fleet.run(UPDATES)

    assert fleet.read_back <= fleet.batches / 100


@pytest.mark.parametrize("hiccups", [1, 3])
def test_who_was_slow_for_a_while_has_its_own_batches_again(hiccups: int) -> None:
    """The first gradient of a process warms it up; later its machine may do something else."""
    fleet = Fleet(settings(0), slowness=1.0)
    fleet.hiccups_s = [20 * GRADIENT_S] * hiccups

    fleet.run(2 * UPDATES)
    before = fleet.read_back
    fleet.run(4 * UPDATES)

    assert fleet.read_back - before <= fleet.batches / 200
