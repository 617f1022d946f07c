"""Sending at a pace: late records are caught up, a full backlog holds back, nothing is lost.

A schedule keeps its rate, no matter when it is polled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.messages import LeaderStatus
from common.core.spans import Partition
from common.errors import UnavailableError
from common.kafka.memory import MemoryLog, MemoryWriter
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoard, MemoryRedis
from services.cli.commands.producing import (
    ArrivalSchedule,
    BacklogLimit,
    RetryingWriter,
    Sent,
    send_all,
    unbounded,
)
from tests.fakes.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable


def run(
    count: int,
    clock: ManualClock,
    schedule: ArrivalSchedule | None = None,
    *,
    room: Callable[[int], int] = unbounded,
    send: Callable[[bytes], None] = lambda _: None,
) -> list[Sent]:
    records = (b"%d" % number for number in range(count))
    return list(
        send_all(records, send, schedule=schedule, room=room, clock=clock, wait=clock.advance)
    )


def test_records_without_a_schedule_are_sent_at_once_and_in_order() -> None:
    clock, sent = ManualClock(), list[bytes]()
    reports = run(2500, clock, send=sent.append)
    assert sent == [b"%d" % number for number in range(2500)]
    assert reports[-1] == Sent(2500, 0)
    assert clock() == 0.0


def test_rate_is_kept_over_time() -> None:
    clock = ManualClock()
    run(1001, clock, ArrivalSchedule(100))
    assert clock() == pytest.approx(10.0, abs=0.06)


def test_records_delayed_by_a_stall_are_sent_at_once() -> None:
    clock, times = ManualClock(), list[float]()

    def send(_: bytes) -> None:
        if len(times) == 10:
            # The broker is unavailable for 3 s.
            clock.advance(3.0)
        times.append(clock())

    run(601, clock, ArrivalSchedule(100), send=send)
    #   sends    stall, 0.11 to 3.11 s   catches up   sends
    #   |------|///////////////////////|============|------------| 6.0 s
    assert times[-2] == pytest.approx(6.0, abs=0.06)
    assert sum(1 for time in times if time < 3.2) >= 310


def test_reports_contain_the_number_of_late_records() -> None:
    clock = ManualClock()
    reports = run(5000, clock, ArrivalSchedule(100_000), send=lambda _: clock.advance(0.0001))
    assert max(report.behind for report in reports) > 1000


def test_sending_stops_when_the_backlog_is_full() -> None:
    clock, most = ManualClock(), 0

    def settled() -> int:
        return int(1000 * clock())

    def room(sent: int) -> int:
        nonlocal most
        most = max(most, sent - settled())
        return 100 - (sent - settled())

    reports = run(300, clock, room=room)
    assert reports[-1].records == 300
    assert most == 100
    assert settled() >= 200


PLACE = Partition("clinic-a", 0)


def leader_status(settled: int) -> LeaderStatus:
    return LeaderStatus(0, 0, {PLACE: 9}, 0, 0, 1, {PLACE: settled})


def test_backlog_counts_records_that_the_job_has_not_settled() -> None:
    log, redis = MemoryLog(), MemoryRedis()
    log.create_topics([NewTopic("clinic-a")])
    board = MemoryBoard(redis, "digits")
    writer = log.writer()
    for _ in range(4):
        writer.append("clinic-a", b"of somebody else")
    writer.flush(1.0)
    backlog = BacklogLimit(log, board, "clinic-a", limit=10)
    # There is no leader yet, so all retained records count as backlog.
    assert backlog.room(0) == 6
    # Five of this producer's records are in flight.
    assert backlog.room(5) == 1
    board.put_leader_status(leader_status(settled=3))
    assert backlog.room(5) == 4
    redis.kill()
    assert backlog.room(5) == 0


class SmallWriter(MemoryWriter):
    """A writer whose queue has room for one record."""

    def append(self, topic: str, value: bytes | None, **options: Any) -> None:  # noqa: ANN401 -- passed on
        """Append a record.

        Raises:
            UnavailableError: If a record waits already.
        """
        if self._queue:
            raise UnavailableError("the queue is full")
        super().append(topic, value, **options)


def test_each_long_pause_of_kafka_is_reported_once() -> None:
    # Kafka: 0 s: away, a record is queued | 1 s: back, away again | 7 s: reported | 9 s: back
    log, clock, said = MemoryLog(), ManualClock(), list[str]()
    log.create_topics([NewTopic("a")])
    back_s = [1.0, 9.0]

    def wait(seconds: float) -> None:
        clock.advance(seconds)
        if clock() >= back_s[0]:
            log.come_back()

    writer = SmallWriter(log)
    retrying = RetryingWriter(writer, "a", clock, wait, said.append)
    for count in (0, 1):
        log.go_away()
        retrying.send(b"queued")
        retrying.send(b"waits")
        assert len(said) == count
        assert writer.flush(1.0)
        del back_s[0]
    assert said[0].startswith("waiting: ")
    assert log.bounds(Partition("a", 0)).end == 4


def test_steady_schedule_is_due_at_its_rate() -> None:
    schedule = ArrivalSchedule(100)
    assert [schedule.due(at) for at in (0.0, 0.0101, 0.1001, 1.0001, 100.00001)] == [
        0,
        1,
        10,
        100,
        10_000,
    ]
    assert schedule.next_s(100.00001) == pytest.approx(100.01)


def test_poisson_schedule_has_the_mean_and_variance_of_its_rate() -> None:
    schedule = ArrivalSchedule(1000, np.random.default_rng(0))
    counts = np.diff([schedule.due(second) for second in range(201)])
    assert counts.mean() == pytest.approx(1000, rel=0.01)
    assert counts.var() == pytest.approx(1000, rel=0.3)  # variance = mean


@given(
    st.floats(0.01, 1e5),
    st.one_of(st.none(), st.integers(0, 9)),
    st.lists(st.floats(0, 2), max_size=20),
)
def test_polling_a_schedule_more_often_changes_nothing(
    rate: float, seed: int | None, looks: list[float]
) -> None:
    def make() -> ArrivalSchedule:
        return ArrivalSchedule(rate, None if seed is None else np.random.default_rng(seed))

    looked, once = make(), make()
    seen = [looked.due(at) for at in sorted(looks)]
    assert seen == sorted(seen)
    assert looked.due(2.0) == once.due(2.0)
    assert once.next_s(2.0) > 2.0


def test_next_arrival_is_the_one_after_those_due() -> None:
    schedule = ArrivalSchedule(10, np.random.default_rng(3))
    for at in np.arange(0.0, 5.0, 0.37):
        due, following = schedule.due(at), schedule.next_s(at)
        assert schedule.due(following) == due + 1
