"""Outages: one log line each, in metrics while they last, and reported to their job."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from common.core.liveness import OUTAGE
from common.errors import ForbiddenError, UnavailableError
from common.kafka.memory import MemoryLog, MemoryWriter
from common.redis.memory import MemoryBoards, MemoryRedis
from common.telemetry import outages
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.outages import (
    FORGOTTEN_S,
    KAFKA_SETTLED_S,
    NOTICE_TTL_S,
    NOTIFY_S,
    SETTLED_S,
    UNWRITTEN_S,
    Outage,
    OutageNotifier,
    ongoing,
)
from tests.fakes.clock import ManualClock
from tests.unit.telemetry.test_logging import logger_to

if TYPE_CHECKING:
    import io

    import pytest

REFUSED = OSError("refused")


def said(stream: io.StringIO) -> list[str]:
    """Return the events with their reasons."""
    lines = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    return [line.partition(" after_s=")[0] for line in lines]


def test_outage_is_logged_once_at_its_start_and_end() -> None:
    log, stream = logger_to()
    outage = Outage(log, "redis")
    outage.over()
    for reason in ("refused", "refused", "timeout"):
        outage.met(OSError(reason))
    outage.over()
    outage.over()
    assert said(stream) == ["redis_unavailable reason=refused", "redis_recovered"]


def test_quiet_period_ends_an_outage() -> None:
    log, stream = logger_to()
    clock = ManualClock()
    outage = Outage(log, "redis", clock)
    for _ in range(3):
        outage.met(REFUSED)
        # The reader finds nothing new, as expected.
        outage.quiet()
        clock.advance(SETTLED_S / 2)
        outage.quiet()
    clock.advance(SETTLED_S / 2)
    outage.quiet()
    outage.quiet()
    assert said(stream) == ["redis_unavailable reason=refused", "redis_recovered"]


def test_frozen_broker_with_repeated_complaints_is_one_outage() -> None:
    log, stream = logger_to()
    clock = ManualClock()
    outage = Outage(log, "kafka", clock)
    for _ in range(4):
        outage.met(REFUSED)
        for _ in range(5):
            clock.advance(1.0)
            outage.quiet()
    clock.advance(KAFKA_SETTLED_S)
    outage.quiet()
    assert said(stream) == ["kafka_unavailable reason=refused", "kafka_recovered"]


def test_records_that_kafka_does_not_accept_are_an_outage() -> None:
    class LateWriter(MemoryWriter):
        late_s = UNWRITTEN_S

        @property
        def waiting_s(self) -> float:
            return self.late_s

    log, stream = logger_to()
    clock = ManualClock()
    outage = Outage(log, "redis", clock)
    writer = LateWriter(MemoryLog())
    outage.watch(writer)
    assert ongoing() == {}
    writer.late_s += 1.0
    outage.watch(writer)
    reason = "Kafka has not confirmed a record for 5 s"
    assert ongoing()["kafka"].reason == reason
    writer.late_s = 0.0
    clock.advance(KAFKA_SETTLED_S)
    outage.watch(writer)
    outage.quiet()
    assert said(stream) == [f'kafka_unavailable reason="{reason}"', "kafka_recovered"]


def test_parts_of_a_process_log_an_outage_once_until_all_of_them_have_an_answer() -> None:
    log, stream = logger_to()
    first, second = Outage(log.bind(job="a"), "redis"), Outage(log.bind(job="b"), "redis")
    first.met(REFUSED)
    second.met(OSError("timeout"))
    first.over()
    assert ongoing()["redis"].reason == "timeout"
    second.over()
    assert said(stream) == ["redis_unavailable reason=refused", "redis_recovered"]
    assert ongoing() == {}


def test_outage_that_begins_while_another_process_logs_it_is_not_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # child    runs ─────────── ended
    # outage     1 ───── over      2 ───── over
    monkeypatch.setattr(outages, "_others", [])
    runs = [True]
    outages.leave_log_to(lambda: runs[0])
    log, stream = logger_to()
    outage = Outage(log, "redis")
    outage.met(REFUSED)
    assert outages.ongoing()["redis"].reason == "refused"
    outage.over()
    runs[0] = False
    outage.met(OSError("timeout"))
    outage.over()
    assert said(stream) == ["redis_unavailable reason=timeout", "redis_recovered"]


def test_each_missing_right_is_logged_once_in_an_outage() -> None:
    log, stream = logger_to()
    outages = [Outage(log, "kafka") for _ in range(3)]
    for right in ("read a", "read b", "read a", "read b"):
        for outage in outages:
            outage.met(ForbiddenError(right, "kafka"))
            outage.met(OSError("timeout"))
    assert said(stream) == [f'kafka_unavailable reason="{right}"' for right in ("read a", "read b")]


def test_part_that_ends_in_an_outage_leaves_it_to_its_successor() -> None:
    log, stream = logger_to()
    Outage(log, "redis").met(REFUSED)
    gc.collect()
    assert ongoing()["redis"].reason == "refused"
    successor = Outage(log, "redis")
    successor.met(OSError("timeout"))
    successor.over()
    assert said(stream) == ["redis_unavailable reason=refused", "redis_recovered"]


def test_outage_without_new_failures_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    log, stream = logger_to()
    clock = ManualClock()
    monkeypatch.setattr(outages, "monotonic", clock)
    outage = Outage(log, "kafka")
    outage.met(REFUSED)
    clock.advance(FORGOTTEN_S + 1.0)
    assert ongoing() == {}
    outage.met(REFUSED)
    assert said(stream) == 2 * ["kafka_unavailable reason=refused"]


def test_error_names_its_server() -> None:
    log, stream = logger_to()
    outage = Outage(log, "redis")
    outage.met(UnavailableError("no bucket", "storage"))
    assert list(ongoing()) == ["storage"]
    outage.over()
    assert said(stream) == ['storage_unavailable reason="no bucket"', "storage_recovered"]


def test_metric_reports_the_duration_of_an_outage_or_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(outages, "time", clock)
    log, _ = logger_to()
    kafka, redis = Outage(log, "kafka"), Outage(log, "redis")
    redis.met(REFUSED)
    clock.advance(90.0)
    lines = ProcessMetrics("worker").exposed().decode().splitlines()
    assert 'doll_outage_seconds{server="kafka"} 0.0' in lines
    assert 'doll_outage_seconds{server="redis"} 90.0' in lines
    del kafka


def test_job_is_notified_of_outages_of_its_own_parts() -> None:
    log, _ = logger_to()
    clock = ManualClock()
    board = MemoryBoards(MemoryRedis(clock)).board("digits")
    own, other = Outage(log.bind(job="digits"), "storage"), Outage(log.bind(job="letters"), "kafka")
    notifier = OutageNotifier(board, "c1", "digits", clock)
    notifier.notify()
    assert board.unable() == {}
    own.met(OSError("no\nbucket"))
    other.met(REFUSED)
    for _ in range(4):
        notifier.notify()
        clock.advance(NOTIFY_S)
        (name, text), *others = board.unable().items()
        assert (name, others) == (f"{OUTAGE}storage c1", [])
        since_s, _, reason = text.partition(" ")
        assert (since_s.isdecimal(), reason) == (True, "no bucket")
    own.over()
    notifier.notify()
    clock.advance(NOTICE_TTL_S)
    assert board.unable() == {}
