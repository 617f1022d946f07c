"""Dead letters have the position of their record, and as much of it as Kafka accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.commands import DeadLetterRecords
from common.core.messages import Batch, Quarantined, Skipped, WorkerId
from common.core.spans import Partition, Span
from common.errors import (
    DeliveryError,
    ForbiddenError,
    RecordTooLargeError,
    UnknownTopicError,
)
from common.kafka.dead_letters import EncodedDeadLetter, encode_dead_letter, encode_dead_letters
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import event_logger
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.metrics.serving import Watchdogs
from services.coordinator import dead_letters
from services.coordinator.dead_letters import (
    READ_RECORDS,
    RETRY_S,
    DeadLetters,
    write,
    written,
)
from tests.unit.services.replicas import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.kafka.port import Fetched, LogRecord

STREAM = Partition("clicks", 0)
DEAD_LETTERS = Partition("clicks.dlq", 0)
TORN = Skipped("clicks", 0, 7, "torn", (1, 5))
WAIT_S = 5.0


def kafka(limit: int | None = None) -> MemoryLog:
    log = MemoryLog()
    log.create_topics([NewTopic("clicks", 1), NewTopic("clicks.dlq", 1)])
    if limit is not None:
        log.configure("clicks.dlq", {"max.message.bytes": str(limit)})
    return log


def delivered(log: MemoryLog) -> list[LogRecord]:
    return log.tail(DEAD_LETTERS, 0).read(10_000, 0.0)


def test_dead_letter_contains_position_and_reason() -> None:
    dead_letter = encode_dead_letter("j", TORN, 8, b"value", "ID")
    key = b"j/ID/clicks[0]@8"
    assert (dead_letter.topic, dead_letter.key, dead_letter.value) == ("clicks.dlq", key, b"value")
    assert dict(dead_letter.headers) == {
        "reason": b"torn",
        "job": b"j",
        "topic": b"clicks",
        "partition": b"0",
        "offset": b"8",
        "topic_id": b"ID",
    }


def test_dead_letters_of_a_batch_are_one_per_span() -> None:
    batch = Batch(4, WorkerId("w"), (Span("clicks", 0, 0, 9), Span("views", 2, 5, 6)), 10)
    record = Quarantined(0, batch, "poison: " + "x" * 10**6)
    encoded = list(encode_dead_letters("j", record, {Partition("views", 2): "ID"}))
    assert [dead_letter.topic for dead_letter in encoded] == ["clicks.dlq", "views.dlq"]
    assert [dead_letter.key for dead_letter in encoded] == [
        b"j//clicks[0]@0:9",
        b"j/ID/views[2]@5:6",
    ]
    assert [dict(dead_letter.headers)["end"] for dead_letter in encoded] == [b"9", b"6"]
    assert all(len(dict(dead_letter.headers)["reason"]) < 10_000 for dead_letter in encoded)


@given(st.binary(max_size=300))
def test_shortened_dead_letter_keeps_a_prefix_and_the_original_size(
    value: bytes,
) -> None:
    dead_letter: EncodedDeadLetter | None = encode_dead_letter("j", TORN, 7, value)
    before = len(value) + 1
    while dead_letter is not None:
        assert dead_letter.value is not None
        assert value.startswith(dead_letter.value)
        assert len(dead_letter.value) < before
        headers = dict(dead_letter.headers)
        whole = len(dead_letter.value) == len(value)
        assert headers.get("truncated") == (None if whole else str(len(value)).encode())
        assert headers["offset"] == b"7"
        before, dead_letter = len(dead_letter.value), dead_letter.shortened()
    assert before == 0


@pytest.mark.parametrize(
    ("limit", "least"),
    [(None, 700_000), (600_000, 450_000), (1_000, 750), (10, 0)],
    ids=["the client's limit", "the topic's limit", "a small limit", "no room but for the address"],
)
def test_too_large_dead_letter_is_shortened_to_the_limit(limit: int | None, least: int) -> None:
    # Java producers write up to 1,048,576 bytes; this project's clients write at most 1,000,000.
    log, value = kafka(limit), bytes(range(256)) * 4062  # 1,039,872 bytes
    encoded = [
        encode_dead_letter("j", TORN, 7, b"small"),
        encode_dead_letter("j", TORN, 8, value),
        encode_dead_letter("j", TORN, 13, None),
    ]
    assert write(encoded, log.writer(), WAIT_S)

    small, empty, cut = delivered(log)
    assert (small.value, empty.value) == (b"small", None)
    assert cut.value is not None
    assert least <= len(cut.value) <= (limit or 1_000_000)
    assert value.startswith(cut.value)


def test_dead_letter_to_a_deleted_topic_raises() -> None:
    log, encoded = kafka(), [encode_dead_letter("j", TORN, 7, b"value")]
    log.delete_topics(["clicks.dlq"])
    with pytest.raises((DeliveryError, UnknownTopicError)) as raised:
        write(encoded, log.writer(), WAIT_S)
    assert not isinstance(raised.value, RecordTooLargeError)


def test_dead_letters_not_delivered_in_time_are_not_reported_as_delivered() -> None:
    log = kafka()
    writer = log.writer()
    log.go_away()
    assert not write([encode_dead_letter("j", TORN, 7, b"value")], writer, 0.0)
    log.come_back()
    assert writer.flush(WAIT_S)
    # The record is delivered late. A caller that retries delivers it once more.
    assert [record.value for record in delivered(log)] == [b"value"]


class CountingSpans:
    """A reader that records the requested spans."""

    def __init__(self, log: MemoryLog) -> None:
        self._spans = log.spans()
        self.asked = list[Span]()

    def read(self, span: Span, timeout_s: float) -> Fetched:
        """See the port."""
        self.asked.append(span)
        return self._spans.read(span, timeout_s)

    def close(self) -> None:
        """See the port."""


@given(st.dictionaries(st.integers(0, 5 * READ_RECORDS), st.sampled_from("abc"), min_size=1))
def test_bad_records_are_read_back_in_few_reads_regardless_of_reason(
    bad: dict[int, str],
) -> None:
    log = kafka()
    writer = log.writer()
    for offset in range(5 * READ_RECORDS + 1):
        writer.append("clicks", str(offset).encode())
    assert writer.flush(WAIT_S)
    skipped = tuple(Skipped(*STREAM, offset, reason) for offset, reason in bad.items())
    spans = CountingSpans(log)
    encoded = list(written("j", DeadLetterRecords(skipped), spans))

    assert [dead_letter.value for dead_letter in encoded] == [
        str(offset).encode() for offset in sorted(bad)
    ]
    found = [dict(dead_letter.headers) for dead_letter in encoded]
    assert {int(each["offset"]): each["reason"].decode() for each in found} == bad
    assert all(span.end - span.start <= READ_RECORDS for span in spans.asked)
    assert len(spans.asked) <= 6


def test_dead_letter_of_an_expired_record_contains_only_its_address() -> None:
    log = kafka()
    writer = log.writer()
    for _ in range(20):
        writer.append("clicks", b"value")
    assert writer.flush(WAIT_S)
    log.expire(STREAM, 10)
    encoded = list(
        written("j", DeadLetterRecords((Skipped(*STREAM, 3, "torn", (12,)),)), log.spans())
    )
    assert [int(dict(dead_letter.headers)["offset"]) for dead_letter in encoded] == [3, 15]
    assert encoded[0].value is None


def test_deleted_dead_letter_topic_is_recreated_by_the_next_write() -> None:
    # clicks.dlq   @1   deleted   @2
    log, logger, faults = kafka(), event_logger("test"), list[BaseException]()
    writer = log.writer()
    for _ in range(3):
        writer.append("clicks", b"value")
    assert writer.flush(WAIT_S)
    steps = Supervisor(None, Watchdogs(), logger, threads=1)
    queue = DeadLetters(
        "job",
        log=log,
        spans=log.spans(),
        steps=steps,
        metrics=CoordinatorMetrics(),
        logger=logger,
        wake=lambda: None,
        fail=faults.append,
    )
    for offset in (1, 2):
        queue.add(DeadLetterRecords((Skipped(*STREAM, offset, "torn"),), {STREAM: "ID"}))
        until(lambda: bool(faults) or queue.all_delivered, "the dead letter is delivered")
        assert [record.key for record in delivered(log)] == [f"job/ID/clicks[0]@{offset}".encode()]
        log.delete_topics(["clicks.dlq"])
    assert faults == []
    assert steps.close(WAIT_S)


class ForbiddenTopics(MemoryLog):
    """A log that refuses to create topics, and counts the attempts."""

    # The first call creates the test's own topics, and is not refused.
    refusals = -1

    def create_topics(self, wanted: Sequence[NewTopic]) -> None:
        """See the port."""
        self.refusals += 1
        if self.refusals:
            raise ForbiddenError("Kafka refuses create")
        super().create_topics(wanted)


def test_queued_dead_letters_do_not_shorten_the_retry_delay_of_topic_creation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, logger, faults = [7.0], event_logger("test"), list[BaseException]()
    steps = Supervisor(None, Watchdogs(), logger, threads=1)
    monkeypatch.setattr(dead_letters, "monotonic", lambda: now[0])
    log = ForbiddenTopics()
    log.create_topics([NewTopic("clicks", 1)])
    writer = log.writer()
    writer.append("clicks", b"value")
    assert writer.flush(WAIT_S)
    # The test itself runs the turns.
    assert steps.close(WAIT_S)
    queue = DeadLetters(
        "job",
        log=log,
        spans=log.spans(),
        steps=steps,
        metrics=CoordinatorMetrics(),
        logger=logger,
        wake=lambda: None,
        fail=faults.append,
    )
    for _ in range(3):
        queue.add(DeadLetterRecords((Skipped(*STREAM, 0, "torn"),), {STREAM: "ID"}))
        assert queue.turn() == now[0] + RETRY_S
    assert log.refusals == 1
    now[0] += RETRY_S
    queue.turn()
    assert (log.refusals, faults) == (2, [])
    assert [each.msg for each in caplog.records] == ["kafka_unavailable"]
