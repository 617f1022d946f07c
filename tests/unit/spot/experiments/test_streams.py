"""Datastreams with a clock that can stop."""

from __future__ import annotations

import math

from common.core.spans import Partition
from common.spot.experiments.arrivals import SimulatedStream, even

PLACE = Partition("s", 0)


def a_stream() -> SimulatedStream:
    """A stream with a record each second, from second 0 on."""
    return SimulatedStream(PLACE, even(1.0, 0.0))


def test_running_stream_has_its_records_when_they_arrive() -> None:
    stream = a_stream()

    assert [stream.full_at(offset, 1) for offset in range(3)] == [0.0, 1.0, 2.0]
    assert stream.full_at(1, 4) == 4.0


def test_stopped_stream_shifts_later_arrivals_by_the_stop() -> None:
    stream = a_stream()

    # arrivals  0   1   2   3 |                 | 14  15 ...
    #                         | stop at 3.5     | resume at 13.5
    stream.stop(3.5)
    before, after = stream.full_at(3, 1), stream.full_at(4, 1)
    stream.go_on(13.5)

    assert (before, after) == (3.0, math.inf)
    assert stream.full_at(4, 1) == 14.0
    assert stream.observed(15.2) == (6, 15.2 - 10.0)


def test_repeated_stops_and_starts_of_a_stream_count_once() -> None:
    stream = a_stream()
    stream.go_on(1.0)
    stream.stop(2.5)
    stream.stop(4.0)
    stream.go_on(5.5)
    stream.go_on(9.0)

    assert stream.full_at(3, 1) == 6.0
    assert stream.observed(6.0) == (4, 3.0)


def test_read_returns_offsets_and_first_and_last_arrival() -> None:
    stream = a_stream()

    run = stream.read(2, 3)

    assert (run.partition, list(run.offsets)) == (PLACE, [2, 3, 4])
    assert (run.first_arrival_s, run.last_arrival_s) == (2.0, 4.0)


def test_read_of_unclaimed_records_can_be_repeated() -> None:
    stream = a_stream()
    before = [stream.read(start, 4) for start in range(0, 4000, 4)]

    assert stream.read(3600, 4) == before[900]
    assert stream.read(3602, 2).last_arrival_s == 3603.0
