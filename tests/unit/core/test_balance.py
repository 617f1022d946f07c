"""Slow workers get fewer batches, and equally fast ones keep theirs, in virtual time."""

from __future__ import annotations

import heapq
import random
from itertools import count
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace as with_

from common.core import commands as do
from common.core import events
from common.core.batch_assignment import READ_BACK_S
from common.core.messages import WorkerId
from common.core.order_queue import Assignments
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import gradient, of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from common.core.commands import CoordinatorCommand
    from common.core.settings import CoordinatorSettings

GRADIENT_S = 0.05
# Standard deviation of a gradient's time, divided by its mean. The time is a constant plus an
# exponential variable.
JITTER = 0.2
UPDATES = 100


class Fleet:
    """Workers with a backlog each, and a leader; only gradients take time.

    Args:
        settings: Settings of the job.
        mean_s: Mean time of a batch's gradient, by worker.
        extra_s: Extra times of first gradients, by the worker's index. The last one of a list is
            for the worker's first gradient.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        mean_s: Sequence[float],
        extra_s: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        self.bench = Bench(settings)
        self.workers = [WorkerId(f"w{number}") for number in range(len(mean_s))]
        self.batches = self.read_back = self.stalest = 0
        self.extra_s = {w: [*(extra_s or {}).get(n, ())] for n, w in enumerate(self.workers)}
        self.idle_s = dict.fromkeys(self.workers, 0.0)  # longest time without an order
        self._mean_s = dict(zip(self.workers, mean_s, strict=True))
        self._draw = random.Random(1)  # noqa: S311 -- reproducible, not secret
        self._orders = {worker: Assignments(worker) for worker in self.workers}
        self._idle = dict.fromkeys(self.workers, 0.0)  # start of the idle time
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting = dict.fromkeys(self.workers, 0)
        self.bench.lead()
        self.bench.see(*self.workers)

    def run(self, updates: int) -> float:
        """Apply this many updates and return the batches per second."""
        self._claim()
        while self.bench.model.version < updates:
            due = self.bench.machine.due()
            if not self._events or due <= self._events[0][0]:
                self.bench.now = max(due, self.bench.now)
                self._carry_out(self.bench.tick(self.bench.now))
            else:
                self.bench.now, _, action = heapq.heappop(self._events)
                action()
        for worker, since in self._idle.items():
            self._was_idle(worker, since)
        return self.batches / self.bench.now

    def _was_idle(self, worker: WorkerId, since: float) -> None:
        self.idle_s[worker] = max(self.idle_s[worker], self.bench.now - since)

    def _claim(self) -> None:
        """Let the workers claim in turn, until 16 batches of each of them wait."""
        for _ in range(16):
            for worker in self.workers:
                if self._waiting[worker] < 16:
                    self._waiting[worker] += 1
                    self._carry_out(self.bench.announce(worker))

    def _carry_out(self, said: tuple[CoordinatorCommand, ...]) -> None:
        for apply in of_kind(said, do.Apply):
            self.batches += len(apply.update.batches)
            self.stalest = max(self.stalest, apply.update.staleness)
            for each in apply.update.batches:
                self._waiting[each.worker] -= 1
        for post in of_kind(said, do.PostTrigger):
            for orders in self._orders.values():
                orders.receive([post.trigger])
        for worker in sorted(self._idle):
            self._compute(worker)
        if of_kind(said, do.Apply):
            self.bench.read_updates()
            self._claim()

    def _compute(self, worker: WorkerId) -> None:
        compute = self._orders[worker].next()
        if compute is None:
            self._idle.setdefault(worker, self.bench.now)
            return
        if worker in self._idle:
            self._was_idle(worker, self._idle.pop(worker))
        jitter = JITTER * (self._draw.expovariate(1.0) - 1)
        took_s = len(compute.batches) * self._mean_s[worker] * (1 + jitter)
        if self.extra_s[worker]:
            took_s += self.extra_s[worker].pop()
        foreign = sum(batch.worker != worker for batch in compute.batches)
        self.read_back += foreign
        reply = with_(gradient(worker, compute.model, compute.batches), seconds=took_s)

        def answer() -> None:
            self._orders[worker].done()
            self._idle[worker] = self.bench.now
            self._carry_out(self.bench.feed(events.RepliesRead((reply,))))

        at = self.bench.now + took_s + foreign * READ_BACK_S
        heapq.heappush(self._events, (at, next(self._numbers), answer))


def settings(
    staleness: int = 0, group_size: int = 8, deadline_floor_s: float = 5.0
) -> CoordinatorSettings:
    """Return settings of a job whose deadlines, by default, never pass."""
    return changed(
        QUIET,
        group_size=group_size,
        bound=16,
        staleness=staleness,
        leader_status_s=10.0,
        deadline_floor_s=deadline_floor_s,
    )


def equal(gradient_s: float, count: int = 8) -> list[float]:
    return [gradient_s] * count


# Rate if each worker computes its own batch and all wait for the slow one: 8 batches in 0.2 s.
HELD_UP = 8 / (4 * GRADIENT_S)


@pytest.mark.parametrize(("staleness", "gain"), [(0, 1.7), (1, 3.0)])
def test_slow_worker_of_eight_does_not_delay_the_others(staleness: int, gain: float) -> None:
    fleet = Fleet(settings(staleness), [*equal(GRADIENT_S, 7), 4 * GRADIENT_S])

    assert fleet.run(UPDATES) >= gain * HELD_UP
    assert fleet.stalest <= staleness


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("gradient_s", [0.002, GRADIENT_S, 1.0])
def test_equally_fast_workers_keep_their_own_batches(staleness: int, gradient_s: float) -> None:
    fleet = Fleet(settings(staleness), equal(gradient_s))

    fleet.run(UPDATES)

    assert fleet.read_back <= fleet.batches / 100


@pytest.mark.parametrize("hiccups", [1, 3])
def test_temporarily_slow_worker_gets_its_own_batches_back(hiccups: int) -> None:
    """A process warms up during its first gradient; later its machine may be busy."""
    fleet = Fleet(settings(), equal(GRADIENT_S), {7: [20 * GRADIENT_S] * hiccups})

    fleet.run(2 * UPDATES)
    before = fleet.read_back
    fleet.run(UPDATES)

    assert fleet.read_back - before <= fleet.batches / 200


# --- one gradient, or one worker, that takes much longer ------------------------------------

LONGEST_IDLE_S = 5.0
# Allowed idle time, in mean gradient times of the worker, if that is longer than LONGEST_IDLE_S.
LONGEST_IDLE = 3


def assert_all_have_orders(fleet: Fleet, mean_s: Sequence[float]) -> None:
    for worker, each_s in zip(fleet.workers, mean_s, strict=True):
        assert fleet.idle_s[worker] <= max(LONGEST_IDLE_S, LONGEST_IDLE * each_s), worker


@pytest.mark.parametrize("deadline_floor_s", [0.5, 30.0])
@pytest.mark.parametrize(
    ("workers", "slow", "group_size", "gradient_s", "after"),
    [
        (2, 1, 4, 0.25, 10),  # 40 times as long
        (2, 2, 4, 0.25, 10),  # all processes paused
        (2, 1, 2, 1.0, 0),  # first gradient of a process
        (8, 1, 8, 1.0, 0),
        (8, 1, 8, 1.0, 5),
        (8, 8, 8, 1.0, 5),
    ],
)
def test_one_gradient_of_ten_seconds_leaves_no_worker_without_orders(
    workers: int, slow: int, group_size: int, gradient_s: float, after: int, deadline_floor_s: float
) -> None:
    mean_s = equal(gradient_s, workers)
    extra_s = {workers - 1 - n: [10.0, *[0.0] * after] for n in range(slow)}
    fleet = Fleet(settings(0, group_size, deadline_floor_s), mean_s, extra_s)

    fleet.run(60)

    assert_all_have_orders(fleet, mean_s)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("workers", "group_size", "gradient_s"),
    [(2, 4, 0.25), (8, 8, 0.25), (8, 8, 1.0), (4, 12, 0.05)],
)
def test_worker_that_stays_forty_times_slower_costs_little_and_has_orders(
    workers: int, group_size: int, gradient_s: float, staleness: int
) -> None:
    given = settings(staleness, group_size, deadline_floor_s=0.5)
    without = Fleet(given, equal(gradient_s, workers - 1)).run(UPDATES)
    mean_s = [*equal(gradient_s, workers - 1), 40 * gradient_s]
    fleet = Fleet(given, mean_s)

    assert fleet.run(UPDATES) >= 0.9 * without
    assert_all_have_orders(fleet, mean_s)
