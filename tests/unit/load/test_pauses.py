"""Times of updates and of outages become pauses and their parts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from load.faults.pauses import (
    CarriedOut,
    Event,
    length,
    limit,
    longest,
    next_after,
    outages,
    parts,
    pauses,
    read_events,
)
from load.faults.report import by_kind
from load.faults.schedule import KINDS, LOSSES, Fault

if TYPE_CHECKING:
    from pathlib import Path

    from load.faults.pauses import Span

#        updates   0    1    2         4    5
TIMES = [0.0, 1.0, 2.0, 4.0, 5.0]
RAW = list(pairwise(TIMES))
FAMILIES = {kind.name: kind.family for kind in (*KINDS, *LOSSES)}
GOES_ON = [
    "partition added",
    "Redis evicting",
    "Redis flushed",
    "highest trigger forged",
    "epoch of a trigger forged",
    "storage cut off",
    "storage refuses",
    "worker-Redis slow",
    "worker-Kafka slow",
]


def struck(kind: str, begin: float, end: float, number: int = 0) -> CarriedOut:
    fault = Fault(begin, kind, FAMILIES[kind], number, end - begin)
    return CarriedOut(fault, begin, end)


def away(*carried_out: CarriedOut, workers: int = 2, coordinators: int = 2) -> list[Span]:
    return outages(carried_out, workers, coordinators)


@pytest.mark.parametrize(("at", "found"), [(-1.0, 0.0), (0.0, 1.0), (2.5, 4.0), (5.0, None)])
def test_next_after_returns_the_first_later_update(at: float, found: float | None) -> None:
    assert next_after(TIMES, at) == found


def test_longest_pause_is_between_consecutive_updates() -> None:
    assert longest(RAW) == (2.0, 4.0)


def test_pause_that_overlaps_an_interval_counts_for_it() -> None:
    assert longest(RAW, 3.9, 4.5) == (2.0, 4.0)
    assert longest(RAW, 4.0, 4.5) == (4.0, 5.0)


def test_longest_pause_without_two_updates_is_zero() -> None:
    assert length(longest([])) == 0.0
    assert length(longest(RAW, 6.0, 7.0)) == 0.0


def test_pause_starts_when_every_required_component_works_again() -> None:
    #   updates  2 ............................ 12
    #   broker        4 ////// 8
    #   Redis              6 ///////// 9
    lasting = away(struck("broker killed", 4.0, 8.0), struck("Redis frozen", 6.0, 9.0))
    assert lasting == [(4.0, 9.0)]
    assert pauses([2.0, 12.0], lasting) == [(9.0, 12.0)]


def test_quiet_time_before_an_outage_is_a_pause() -> None:
    assert pauses([2.0, 12.0], [(8.0, 11.0)]) == [(2.0, 8.0)]


def test_update_during_an_outage_does_not_end_it() -> None:
    #   updates  2 ...... 5 ............... 12
    #   broker        4 /////////// 9
    assert pauses([2.0, 5.0, 12.0], [(4.0, 9.0)]) == [(2.0, 4.0), (9.0, 12.0)]


def test_gap_covered_by_an_outage_is_a_pause_of_zero() -> None:
    assert [length(each) for each in pauses([2.0, 12.0], [(1.0, 13.0)])] == [0.0]


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_single_process_and_storage_faults_are_not_outages(kind: str) -> None:
    goes_on = kind in GOES_ON or FAMILIES[kind].startswith(("worker", "coordinator"))
    assert away(struck(kind, 1.0, 2.0)) == ([] if goes_on else [(1.0, 2.0)])


def test_overlapping_faults_of_both_coordinators_are_an_outage() -> None:
    both = struck("coordinator frozen", 1.0, 4.0), struck("coordinator killed", 3.0, 6.0, 1)
    assert away(*both) == [(3.0, 4.0)]


def test_worker_needs_both_redis_and_kafka() -> None:
    #   worker 0           1 ////////////// 6
    #   worker 1, Redis        2 /// 3
    #   worker 1, Kafka           2.5 /// 5
    lasting = away(
        struck("worker killed", 1.0, 6.0),
        struck("worker-Redis cut", 2.0, 3.0, 1),
        struck("worker-Kafka reset", 2.5, 5.0, 1),
    )
    assert lasting == [(2.0, 5.0)]


def test_slow_connection_is_not_an_outage() -> None:
    assert away(struck("worker-Kafka slow", 1.0, 4.0), workers=1) == []


def test_limit_excludes_outage_time_of_each_worker() -> None:
    #   worker 0    0 ///// 2                      9.5 // 10, the end of the run
    #   worker 1              3 ////// 5
    #   Redis                    4 /////// 6       stops both workers
    # One of two coordinators, a transaction or a slow connection stops no worker.
    lasting = [
        struck("worker killed", 0.0, 2.0),
        struck("worker-Redis cut", 3.0, 5.0, 1),
        struck("Redis frozen", 4.0, 6.0),
        struck("coordinator killed", 7.0, 8.0),
        struck("transaction committed", 7.0, 8.0),
        struck("worker-Kafka slow", 8.0, 9.0),
        struck("worker frozen", 9.5, 14.5),
    ]
    assert limit(lasting, 2, 2, 10.0) == pytest.approx(1 - (4.5 + 3.0) / 20)
    assert limit([], 2, 2, 10.0) == 1.0


def test_pause_is_split_by_the_events_within_it() -> None:
    events = [
        Event(0.5, "c1", "leader_elected"),  # before
        Event(2.0, "c1", "redis_unavailable"),
        Event(2.5, "c2", "checkpoint_written"),  # says nothing about a pause
        Event(3.0, "c2", "stands_to_lead"),
        Event(3.2, "c2", "leader_elected"),
        Event(3.7, "w1", "kafka_recovered"),
        Event(4.0, "w1", "reading_from"),
        Event(9.0, "w1", "partitions_assigned"),  # later than the pause
    ]
    found = parts((1.0, 4.5), events)
    assert found == pytest.approx(
        {"detect": 1.0, "decide": 1.2, "reconnect": 0.5, "replay": 0.3, "first update": 0.5}
    )
    assert sum(found.values()) == pytest.approx(3.5)


def test_pause_without_events_is_all_first_update() -> None:
    assert parts((1.0, 4.0), []) == {"first update": 3.0}


def test_events_are_read_from_all_logs_by_time(tmp_path: Path) -> None:
    def line(at_s: float, event: str) -> str:
        time = datetime.fromtimestamp(1000.0 + at_s, UTC).isoformat()
        return json.dumps({"time": time, "event": event})

    (tmp_path / "w1.log").write_text(f'{line(3.0, "worker_joins")}\n{{"time": "2026-')
    (tmp_path / "c1.log").write_text(f"not of ours\n{line(2.0, 'leader_elected')}\n")
    assert read_events(tmp_path, 1000.0) == [
        Event(2.0, "c1", "leader_elected"),
        Event(3.0, "w1", "worker_joins"),
    ]


def test_times_are_summarized_by_kind_of_fault() -> None:
    carried_out = struck("worker killed", 0.0, 1.0)
    times_s = [(carried_out, float(number)) for number in range(100, -1, -1)]
    assert by_kind(times_s) == {
        "worker killed": {"times": 101, "median_s": 50.0, "p95_s": 95.0, "max_s": 100.0}
    }
    assert by_kind(times_s[:1]) == {
        "worker killed": {"times": 1, "median_s": 100.0, "p95_s": 100.0, "max_s": 100.0}
    }
