"""Production state machines in virtual time lose or repeat no record, even if all are preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.synchronisation import SYNCHRONOUS, SynchronisationSpec
from common.core.messages import WorkerId
from common.spot.experiments.by_protocol import HeldStreams, Reassign
from common.spot.experiments.protocol import GradientTimeDraws, VirtualTime
from tests.unit.spot.experiments.protocols import (
    BATCH_SIZE,
    GROUP_SIZE,
    RATE_PER_S,
    Bench,
)

if TYPE_CHECKING:
    from collections import Counter

    import numpy.typing as npt

    from common.spot.experiments.protocol import SimulatedMachine


UPDATE = GROUP_SIZE * BATCH_SIZE


def test_updates_keep_up_with_records_without_preemptions() -> None:
    bench = Bench(streams=4, updates=20)
    group = HeldStreams(bench.time, bench.streams, pause=True)
    for slot in range(4):
        group.join(slot, bench.protocol.join(1.0))

    bench.time.run()

    assert bench.protocol.finished
    assert bench.learner.sums == [UPDATE] * 20
    expected_s = 20 * UPDATE / (4 * RATE_PER_S)
    # Incomplete batches wait at the end, and the last round takes some time, so the last update
    # comes later. It may come one record earlier, because the first records arrive at once.
    first_s = expected_s - 1 / RATE_PER_S
    assert first_s <= bench.protocol.update_times_s[-1] <= expected_s + 1.5
    assert (np.diff(bench.protocol.update_times_s) > 0).all()


@given(
    kind=st.sampled_from(["hold", "keep", "reassign"]),
    flips=st.lists(st.tuples(st.floats(0.1, 6.0), st.integers(0, 2)), max_size=8),
)
@settings(max_examples=40)
def test_records_are_used_at_most_once_under_any_preemptions(
    kind: str, flips: list[tuple[float, int]]
) -> None:
    bench = Bench(streams=3, updates=12, gradient_s=0.1)
    group: HeldStreams | Reassign = Reassign(bench.time, bench.streams)
    if kind != "reassign":
        group = HeldStreams(bench.time, bench.streams, pause=kind == "hold")
    machines: list[SimulatedMachine | None] = [None] * 3

    def flip(slot: int) -> None:
        machine = machines[slot]
        if machine is None:
            machines[slot] = machine = bench.protocol.join(1.0)
            group.join(slot, machine)
        else:
            machines[slot] = None
            bench.protocol.preempt(machine)
            group.leave(slot, machine)

    def come_back() -> None:
        for slot in range(3):
            if machines[slot] is None:
                flip(slot)

    come_back()
    for at, slot in flips:
        bench.time.at(at, flip, slot)
    bench.time.at(8.0, come_back)
    bench.time.at(500.0, bench.time.stop)

    bench.time.run()

    assert bench.protocol.finished
    assert bench.learner.sums == [UPDATE] * 12
    assert set(np.unique(bench.learner.used)) == {0.0, 1.0}


@pytest.mark.parametrize(
    "given",
    [
        SYNCHRONOUS,
        SynchronisationSpec(mode="stale", staleness=2),
        SynchronisationSpec(mode="asynchronous", staleness=4, damped=True),
    ],
    ids=lambda given: given.mode,
)
def test_slots_filled_later_contribute_each_record_once(
    given: SynchronisationSpec,
) -> None:
    """Two of six workers begin. The records of the other streams wait in Kafka for their workers.

    seconds  0      6     8    10    12              60
    workers  2 ─────┴3────┴4───┴5────┴6──────────────┤
    """
    bench = Bench(streams=6, updates=10_000, gradient_s=0.1, synchronisation=given)
    group = HeldStreams(bench.time, bench.streams, pause=False)
    seen: list[tuple[int, Counter[WorkerId], npt.NDArray[np.float32]]] = []

    def join(slot: int) -> None:
        group.join(slot, bench.protocol.join(1.0))

    def look() -> None:
        protocol = bench.protocol
        computed = protocol.computed.copy()
        seen.append((len(protocol.update_times_s), computed, bench.learner.used.copy()))

    for slot, at in enumerate((0.0, 0.0, 6.0, 8.0, 10.0, 12.0)):
        bench.time.at(at, join, slot)
    for at in (5.9, 30.0, 60.0):
        bench.time.at(at, look)
    bench.time.at(60.0, bench.time.stop)

    bench.time.run()

    (early, by_two, used_early), (later, by_six, _), (last, by_all, used) = seen
    # The job learns before the slots are filled, from the records of two streams only.
    assert early >= 4.5 * 2 * RATE_PER_S / UPDATE
    assert not used_early[2:].any()
    assert set(by_two) == {"w1", "w2"}
    # Then it learns from all streams, including the backlog, as fast as records arrive.
    assert last - later >= 28.0 * 6 * RATE_PER_S / UPDATE
    assert set(np.unique(used)) == {0.0, 1.0}
    assert (used[:, : int(55 * RATE_PER_S)] == 1).all()
    # Workers that join later compute, too: at least a third, with four of six workers.
    since = by_all - by_six
    assert since.total() - since[WorkerId("w1")] - since[WorkerId("w2")] > since.total() / 3
    assert bench.protocol.too_stale == 0


def test_held_stream_waits_and_reassigned_stream_continues() -> None:
    used = {}
    for name in ("hold", "reassign"):
        bench = Bench(streams=2, updates=10)
        group: HeldStreams | Reassign = Reassign(bench.time, bench.streams)
        if name == "hold":
            group = HeldStreams(bench.time, bench.streams, pause=True)
        machines = [bench.protocol.join(1.0) for _ in range(2)]
        for slot, machine in enumerate(machines):
            group.join(slot, machine)
        bench.time.at(1.0, bench.protocol.preempt, machines[1])
        bench.time.at(1.0, group.leave, 1, machines[1])
        bench.time.run()
        used[name] = bench.learner.used.sum(axis=1)

    assert used["hold"][1] <= RATE_PER_S
    assert used["reassign"][1] > 3 * RATE_PER_S


def test_slow_worker_reads_no_more_than_its_bound() -> None:
    bench = Bench(streams=1, updates=15, gradient_s=1.0, variation=0.0)  # a batch each 0.4 s
    group = HeldStreams(bench.time, bench.streams, pause=True)
    group.join(0, bench.protocol.join(1.0))

    bench.time.run()

    assert bench.protocol.finished
    leader_status = bench.protocol.leader_status
    assert leader_status is not None
    assert leader_status.waiting <= 2 * GROUP_SIZE + 1
    # The worker is busy all the time.
    assert bench.protocol.update_times_s[-1] == pytest.approx(15 * GROUP_SIZE * 1.0, rel=0.2)


@given(variation=st.sampled_from([0.0, 0.3, 1.0]), batches=st.integers(1, 4))
@settings(max_examples=10)
def test_gradient_times_have_the_requested_mean_and_variation(
    variation: float, batches: int
) -> None:
    times = GradientTimeDraws(0.2, variation, np.random.default_rng(7))

    drawn = np.array([times.draw(batches, 2.0) for _ in range(4000)])

    mean_s, deviation_s = batches * 0.1, np.sqrt(batches) * 0.1 * variation
    assert drawn.mean() == pytest.approx(mean_s, abs=5 * deviation_s / np.sqrt(4000) + 1e-12)
    assert drawn.std() == pytest.approx(deviation_s, rel=0.15, abs=1e-12)


TIMES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]), max_size=20)


@given(TIMES)
def test_virtual_time_runs_events_in_order_of_time_and_scheduling(
    times: list[float],
) -> None:
    time, happened = VirtualTime(), list[tuple[float, int]]()
    for index, at in enumerate(times):
        time.at(at, lambda index=index: happened.append((time.now, index)))

    time.run()

    assert happened == sorted(zip(times, range(len(times)), strict=True))


def test_virtual_time_runs_a_past_event_immediately() -> None:
    time, happened = VirtualTime(), list[float]()
    time.at(2.0, lambda: time.at(1.0, lambda: happened.append(time.now)))

    time.run()

    assert happened == [2.0]


def test_virtual_time_runs_nothing_between_stop_and_run() -> None:
    time, happened = VirtualTime(), list[float]()
    time.at(1.0, time.stop)
    time.at(1.0, happened.append, 1.0)

    time.run()
    stopped = list(happened)
    time.run()

    assert (stopped, happened) == ([], [1.0])
