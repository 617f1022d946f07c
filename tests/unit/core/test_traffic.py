"""Traffic of an update, even if the messages that report it are lost or repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from common.core import commands as do
from common.core import events
from common.core.gradient_counting import VERSIONS_KEPT, UpdateTraffic
from common.core.messages import Traffic, UpdateApplied
from tests.unit.core.bench import Bench, changed
from tests.unit.core.examples import A, B, answer, of_kind

EACH = 1000  # bytes per worker and update


def traffic_of(*counts: tuple[int, int], life: int = 1) -> UpdateTraffic:
    """Return the traffic after these versions and totals of one worker."""
    traffic = UpdateTraffic()
    for version, total in counts:
        traffic.observe(A, Traffic(life, total), version)
    return traffic


def test_difference_of_two_counts_is_the_traffic_of_updates_between() -> None:
    traffic = traffic_of((3, 500))
    assert traffic.take() is UNSET
    traffic.observe(A, Traffic(1, 500 + 4 * EACH), 7)
    traffic.observe(B, Traffic(9, 10), 7)
    assert traffic.take() == EACH
    assert traffic.take() is UNSET
    traffic.observe(B, Traffic(9, 10 + EACH), 8)
    traffic.observe(A, Traffic(1, 500 + 7 * EACH), 8)
    assert traffic.take() == 2 * EACH


def test_count_of_another_process_of_the_same_name_starts_again() -> None:
    traffic = traffic_of((1, 0), (2, EACH))
    traffic.observe(A, Traffic(2, 5), 3)
    assert traffic.take() == EACH
    traffic.observe(A, Traffic(2, 5 + EACH), 4)
    assert traffic.take() == EACH


def test_member_that_is_silent_for_long_is_forgotten() -> None:
    traffic = traffic_of((1, 0))
    traffic.observe(B, Traffic(2, 0), VERSIONS_KEPT + 2)
    traffic.observe(A, Traffic(1, EACH), VERSIONS_KEPT + 3)
    assert traffic.take() is UNSET


@given(
    received=st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 30)), max_size=60),
    takes=st.sets(st.integers(0, 60)),
)
def test_late_repeated_or_lost_messages_only_delay_the_result(
    received: list[tuple[str, int]], takes: set[int]
) -> None:
    # Messages may arrive in any order. Each update took EACH per worker, so every report says EACH.
    traffic, said = UpdateTraffic(), list[object]()
    for place, (worker, version) in enumerate(received):
        traffic.observe(A if worker == A else B, Traffic(1, EACH * version), version)
        if place in takes:
            said.append(traffic.take())
    said.append(traffic.take())
    assert set(said) <= {EACH, UNSET}
    ahead = {worker: [version for who, version in received if who == worker] for worker in (A, B)}
    known = any(max(each) > each[0] for each in ahead.values() if each)
    assert (EACH in said) == known


@pytest.mark.parametrize("counts", [True, False])
def test_update_records_the_traffic_that_its_workers_counted(*, counts: bool) -> None:
    bench = Bench(changed(group_size=1))
    bench.lead()
    bench.see(A)
    said = list[object]()
    for moved in (0, EACH, 2 * EACH):
        bench.announce(A)
        [order] = bench.orders
        traffic = Traffic(1, moved) if counts else UNSET
        reply = replace(answer(order, bench.model), traffic=traffic)
        commands = bench.feed(events.RepliesRead((reply,)))
        said += [
            append.record.moved
            for append in of_kind(commands, do.AppendAudit)
            if isinstance(append.record, UpdateApplied)
        ]
    assert said == ([UNSET, EACH, EACH] if counts else [UNSET] * 3)
