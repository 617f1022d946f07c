"""The `Tail` and `SpanReader` ports: one partition from a position on, and addresses read back."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Partition, Span
from common.errors import (
    ExpiredError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.kafka.port import NewTopic
from tests.contract.log_fixtures import PATIENCE_S, eventually, everything, filled

if TYPE_CHECKING:
    from common.kafka.port import LogRecord, Tail
    from tests.contract.log_fixtures import Rig

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]


def next_records(tail: Tail, count: int) -> list[LogRecord]:
    records: list[LogRecord] = []

    def complete() -> bool:
        records.extend(tail.read(count - len(records), 0.1))
        return len(records) >= count

    eventually(complete)
    return records


# --- tails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 57, 99])
def test_tail_begins_at_its_position(rig: Rig, fresh: str, position: int) -> None:
    partition = filled(rig, fresh, 100)
    with closing(rig.log.tail(partition, position)) as tail:
        assert tail.position() == position
        records = next_records(tail, 100 - position)
        assert [record.offset for record in records] == list(range(position, 100))
        assert [record.value for record in records] == [b"%d" % i for i in range(position, 100)]
        assert tail.position() == 100


def test_tail_records_have_their_write_time(rig: Rig, fresh: str) -> None:
    before_s = time.time()
    partition = filled(rig, fresh, 3)
    with closing(rig.log.tail(partition, 0)) as tail:
        written_s = [record.timestamp_s for record in next_records(tail, 3)]
    assert written_s == sorted(written_s)
    assert before_s - 1 <= written_s[0] <= written_s[-1] <= time.time() + 1


def test_tail_returns_at_most_the_requested_records(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    with closing(rig.log.tail(partition, 0)) as tail:
        sizes = [len(next_records(tail, 3)) for _ in range(3)]
        assert sizes == [3, 3, 3]
        assert tail.position() == 9


def test_tail_at_the_end_waits_for_the_next_append(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 5)
    with closing(rig.log.tail(partition, 5)) as tail:
        assert tail.read(10, 0.05) == []
        assert tail.position() == 5
        appender = threading.Thread(target=lambda: rig.writer.append(fresh, b"new"))
        appender.start()
        assert [record.value for record in tail.read(10, PATIENCE_S)] == [b"new"]
        appender.join()


def test_tail_steps_over_holes(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 3)
    before = [rig.append_before_hole(partition, b"%d" % i) for i in range(3)]
    with closing(rig.log.tail(partition, 0)) as tail:
        assert [each.offset for each in next_records(tail, 6)] == [0, 1, 2, *before]
    with closing(rig.log.tail(partition, before[0] + 1)) as tail:  # begins in a hole
        assert [each.offset for each in next_records(tail, 2)] == before[1:]


def test_tail_reaches_end_of_log_with_trailing_holes(rig: Rig, fresh: str) -> None:
    """3 records, one more, a hole: the end lies above the last record, and is reached."""
    partition = filled(rig, fresh, 3)
    last = rig.append_before_hole(partition, b"3")
    ready = threading.Event()
    with closing(rig.log.tail(partition, 0, ready.set)) as tail:
        assert [each.offset for each in next_records(tail, 4)] == [0, 1, 2, last]
        end = rig.log.bounds(partition).end
        assert end == last + 2
        # A reader that only reads after a wake-up gets there, too.
        while tail.position() < end:
            assert ready.wait(PATIENCE_S)
            ready.clear()
            assert tail.read(10, 0.0) == []
        rig.append_before_hole(partition, b"5")
        assert [each.value for each in next_records(tail, 1)] == [b"5"]
        eventually(lambda: not tail.read(10, 0.1) and tail.position() == end + 2)
    with closing(rig.log.tail(partition, end + 1)) as tail:  # begins in the last hole
        eventually(lambda: not tail.read(10, 0.1) and tail.position() == end + 2)


def test_tail_below_the_start_raises_expired(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    rig.expire(partition, 6)
    with closing(rig.log.tail(partition, 5)) as tail:
        for _ in range(2):  # it stays so
            with pytest.raises(ExpiredError):
                eventually(lambda: tail.read(10, 0.1))
        assert tail.position() == 5
    with closing(rig.log.tail(partition, 6)) as tail:
        assert [each.offset for each in next_records(tail, 4)] == [6, 7, 8, 9]


def test_tail_above_the_end_raises_truncated(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    with closing(rig.log.tail(partition, 11)) as tail, pytest.raises(TruncatedError):
        eventually(lambda: tail.read(10, 0.1))


def test_tail_notifies_when_there_is_something_to_read(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 2)
    ready, offsets = threading.Event(), list[int]()

    def is_read(tail: Tail, end: int) -> bool:
        assert ready.wait(PATIENCE_S)
        ready.clear()
        while records := tail.read(1, 0.0):
            offsets.extend(record.offset for record in records)
        return offsets == list(range(end))

    with closing(rig.log.tail(partition, 0, ready.set)) as tail:
        # These records were there before.
        eventually(lambda: is_read(tail, 2))
        rig.writer.append(fresh, b"new")
        assert rig.writer.flush(PATIENCE_S)
        eventually(lambda: is_read(tail, 3))


def test_tail_notifies_when_there_is_something_to_raise(rig: Rig, fresh: str) -> None:
    partition, ready = filled(rig, fresh, 10), threading.Event()
    rig.expire(partition, 6)

    def expired() -> bool:
        assert ready.wait(PATIENCE_S)
        ready.clear()
        try:
            return bool(tail.read(1, 0.0))
        except ExpiredError:
            return True

    with closing(rig.log.tail(partition, 5, ready.set)) as tail:
        eventually(expired)


def test_tails_of_one_partition_have_independent_positions(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    with (
        closing(rig.log.tail(partition, 0)) as first,
        closing(rig.log.tail(partition, 7)) as second,
        closing(rig.log.tail(partition, 10)) as third,
    ):
        assert [each.offset for each in next_records(second, 3)] == [7, 8, 9]
        assert [each.offset for each in next_records(first, 4)] == [0, 1, 2, 3]
        rig.writer.append(fresh, b"10")
        assert rig.writer.flush(PATIENCE_S)
        assert [each.offset for each in next_records(third, 1)] == [10]
        assert [each.offset for each in next_records(first, 7)] == list(range(4, 11))
        assert [each.offset for each in next_records(second, 1)] == [10]


def test_new_tail_ignores_records_fetched_for_the_previous_one(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 1_000)
    dice = random.Random(7)  # noqa: S311 -- not for secrets
    for _ in range(30):
        position, count = dice.randrange(1_000), dice.randrange(1, 20)
        with closing(rig.log.tail(partition, position)) as tail:
            run = range(position, min(position + count, 1_000))
            assert [each.offset for each in next_records(tail, len(run))] == list(run)


def test_many_tails_of_one_log_read_their_own_topics(rig: Rig, fresh: str) -> None:
    topics = [NewTopic(f"{fresh}-{number}") for number in range(20)]
    rig.log.create_topics(topics)
    tails = [rig.log.tail(Partition(topic.name, 0), 0) for topic in topics]
    for i in range(50):
        for topic in topics:
            rig.writer.append(topic.name, f"{topic.name} {i}".encode())
    assert rig.writer.flush(PATIENCE_S)
    for topic, tail in zip(topics, tails, strict=True):
        wanted = [f"{topic.name} {i}".encode() for i in range(50)]
        assert [each.value for each in next_records(tail, 50)] == wanted
        tail.close()


def test_unread_tail_does_not_delay_others_and_loses_nothing(rig: Rig, fresh: str) -> None:
    heavy, light = filled(rig, fresh, 0), filled(rig, f"{fresh}-light", 0)
    # The embedded broker keeps no more records than these.
    count, size = 4_000, 1_000
    with closing(rig.log.tail(heavy, 0)) as unread, closing(rig.log.tail(light, 0)) as tail:
        for i in range(count):
            rig.writer.append(heavy.topic, b"%d" % i + bytes(size))
            if i % 100 == 0:
                rig.writer.append(light.topic, b"%d" % i)
                assert rig.writer.flush(PATIENCE_S)
                assert [each.value for each in next_records(tail, 1)] == [b"%d" % i]
        assert rig.writer.flush(PATIENCE_S)
        offsets = [each.offset for each in next_records(unread, count)]
    assert offsets == list(range(count))


def test_only_users_of_a_deleted_topic_get_an_error(owned_rig: Rig, fresh: str) -> None:
    doomed, kept = filled(owned_rig, fresh, 3), filled(owned_rig, f"{fresh}-kept", 1)
    never, notified = Partition(f"{fresh}-never", 0), threading.Event()
    with (
        closing(owned_rig.log.writer()) as writer,
        closing(owned_rig.log.tail(doomed, 0, notified.set)) as tail,
        closing(owned_rig.log.tail(kept, 0)) as other,
        closing(owned_rig.log.tail(never, 0)) as idle,
        closing(owned_rig.log.spans()) as spans,
    ):
        assert spans.read(Span(*doomed, 0, 3), PATIENCE_S).offsets == [0, 1, 2]
        writer.append(doomed.topic, b"3")
        assert writer.flush(PATIENCE_S)
        assert len(next_records(tail, 4)) == 4
        assert len(next_records(other, 1)) == 1
        notified.clear()
        owned_rig.delete_topic(doomed.topic)
        with suppress(UnknownTopicError):  # or later, when it is sent
            writer.append(doomed.topic, b"too late", on_failed=lambda _: notified.set())

        def span_is_gone() -> bool:
            try:
                # The span is readable while the broker keeps it.
                return not spans.read(Span(*doomed, 0, 3), 0.5)
            except UnavailableError:
                return False

        def appended_nowhere() -> bool:
            # The broker may have accepted the first record before it deleted the topic. Then the
            # writer learns of the deletion when it sends another one.
            writer.append(doomed.topic, b"nowhere")
            return not writer.flush(PATIENCE_S)

        with pytest.raises(UnknownTopicError):
            eventually(span_is_gone)
        assert notified.wait(PATIENCE_S)
        for gone in (tail, tail, idle):  # it stays so
            with pytest.raises(UnknownTopicError):
                gone.read(1, PATIENCE_S)
        assert owned_rig.log.ends([doomed, kept]) == {kept: 1}
        assert writer.flush(PATIENCE_S)
        for each in (owned_rig.writer, writer):
            each.append(kept.topic, b"more")
            assert each.flush(PATIENCE_S)
        assert [each.offset for each in next_records(other, 2)] == [1, 2]
        with pytest.raises(UnknownTopicError):
            eventually(appended_nowhere)
        owned_rig.log.create_topics([NewTopic(doomed.topic)])
        writer.append(doomed.topic, b"again")
        assert writer.flush(PATIENCE_S)
    assert [each.value for each in everything(owned_rig.log, doomed)] == [b"again"]


# --- spans ---------------------------------------------------------------------------------------


def test_span_is_read_exactly_in_any_order(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 500)
    dice = random.Random(7)  # noqa: S311 -- not for secrets
    with closing(rig.log.spans()) as spans:
        for _ in range(60):
            start, end = sorted(dice.sample(range(501), 2))
            fetched = spans.read(Span(*partition, start, end), PATIENCE_S)
            assert fetched.partition == partition
            assert fetched.offsets == list(range(start, end))
            assert fetched.values == [b"%d" % i for i in range(start, end)]
            assert 0 < fetched.first_arrival_s <= fetched.last_arrival_s


def test_span_of_large_records_is_read_complete(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh)])
    values = [bytes([number]) * 600_000 for number in range(4)]
    for value in values:
        rig.writer.append(fresh, value)
    assert rig.writer.flush(PATIENCE_S)
    with closing(rig.log.spans()) as spans:
        assert spans.read(Span(fresh, 0, 0, 4), PATIENCE_S).values == values
        assert spans.read(Span(fresh, 0, 2, 3), PATIENCE_S).values == values[2:3]


def test_span_read_skips_holes_without_waiting(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 3)
    first = rig.append_before_hole(partition, b"first")  # 3, and 4 is a hole
    # The record has offset 5, and 6 is a hole at the end of the log.
    last = rig.append_before_hole(partition, b"last")
    with closing(rig.log.spans()) as spans:

        def read(start: int, end: int) -> list[int]:
            return spans.read(Span(*partition, start, end), PATIENCE_S).offsets

        assert read(0, 7) == [0, 1, 2, first, last]
        assert read(2, 5) == [2, first]
        assert read(4, 7) == [last]
        assert read(4, 5) == []
        assert read(6, 7) == []


def test_span_with_deleted_records_raises_expired(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    rig.expire(partition, 4)
    with closing(rig.log.spans()) as spans:
        for span in (Span(*partition, 0, 10), Span(*partition, 0, 2), Span(*partition, 3, 5)):
            with pytest.raises(ExpiredError):
                spans.read(span, PATIENCE_S)
        assert spans.read(Span(*partition, 4, 10), PATIENCE_S).offsets == list(range(4, 10))


def test_span_above_the_end_raises_unavailable(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    with closing(rig.log.spans()) as spans:
        for span in (Span(*partition, 5, 11), Span(*partition, 10, 12), Span(*partition, 20, 30)):
            with pytest.raises(UnavailableError):
                spans.read(span, 0.2)
        assert spans.read(Span(*partition, 5, 10), PATIENCE_S).offsets == list(range(5, 10))
