"""Readers notice logs that lost acknowledged records, and topics that were recreated."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Assigned, LogPosition, Partition, Span
from common.errors import RecreatedError, TruncatedError, UnavailableError, UnknownTopicError
from common.kafka.log import KafkaLog
from common.kafka.port import Fetched, FoundTopic, LogRecord, LogTruncated, NewTopic, StreamEvent
from tests.contract.log_fixtures import PATIENCE_S, eventually, filled, on_kafka, one_by_one
from tests.contract.test_log_placement import joined, next_event, read
from tests.contract.test_log_readers import next_records

if TYPE_CHECKING:
    from common.embedded.apache_kafka import ApacheKafka
    from common.kafka.port import StreamReader, Tail
    from tests.contract.log_fixtures import Rig

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]


def ten(rig: Rig, topic: str) -> tuple[Partition, LogPosition]:
    """Return a partition of ten records, and the position of a reader of all of them."""
    partition = filled(rig, topic, 0)
    one_by_one(rig, topic, (b"%d" % i for i in range(10)))
    return partition, known_at(rig, partition, 10)


def known_at(rig: Rig, partition: Partition, end: int) -> LogPosition:
    """Return the position of a reader of all records up to an end."""
    found = rig.log.describe([partition.topic])
    with closing(rig.log.tail(partition, end - 1)) as tail:
        (last,) = next_records(tail, 1)
    return LogPosition(end, found[partition.topic].topic_id, last.epoch)


def recreate(rig: Rig, topic: str, count: int) -> None:
    """Delete a topic and recreate it with this many records."""
    old = rig.log.describe([topic])[topic]
    rig.delete_topic(topic)

    def is_new() -> bool:
        try:
            rig.log.create_topics([NewTopic(topic)])
        except UnavailableError:
            return False
        return rig.log.describe([topic]).get(topic, old).topic_id != old.topic_id

    eventually(is_new)
    for i in range(count):
        rig.writer.append(topic, b"%d" % i)
    assert rig.writer.flush(PATIENCE_S)


def failure(tail: Tail) -> tuple[type[TruncatedError], int | None, list[LogRecord]]:
    """Return a tail's final error, its divergent offset, and the records before it."""
    records = list[LogRecord]()

    def fails() -> bool:
        try:
            records.extend(tail.read(100, 0.1))
        except UnavailableError:  # the broker restarts
            return False
        except TruncatedError as error:
            raised.append(error)
        return bool(raised)

    raised = list[TruncatedError]()
    eventually(fails)
    with pytest.raises(type(raised[0])):  # it stays so
        tail.read(100, 0.1)
    return type(raised[0]), raised[0].divergent_offset, records


def next_events(member: StreamReader) -> list[StreamEvent]:
    """Return a member's next events; the broker may be down meanwhile."""
    events = list[StreamEvent]()

    def happened() -> bool:
        with suppress(UnavailableError):
            events.extend(member.poll(100, 0.1))
        return bool(events)

    eventually(happened)
    return events


def next_of(member: StreamReader, known: LogPosition) -> Fetched | LogTruncated:
    """Return a member's next data or loss; the group may reassign its only partition meanwhile."""
    while True:
        for event in next_events(member):
            if isinstance(event, Fetched | LogTruncated):
                return event
            if isinstance(event, Assigned):
                member.place(dict.fromkeys(event.partitions, known))


def read_recreated(rig: Rig, member: StreamReader, partition: Partition, count: int) -> None:
    """Read all records of a recreated topic with a tail and with a member."""
    known = LogPosition(0, rig.log.describe([partition.topic])[partition.topic].topic_id)
    with closing(rig.log.tail(partition, known)) as tail:
        assert [each.offset for each in next_records(tail, count)] == list(range(count))
    member.place({partition: known})
    assert all_offsets(member, known, count) == list(range(count))


def all_offsets(member: StreamReader, known: LogPosition, count: int) -> list[int]:
    """Return the offsets of this many records from the placed position."""
    offsets = list[int]()
    while len(offsets) < count:
        event = next_of(member, known)
        assert isinstance(event, Fetched)
        offsets += event.offsets
    return offsets


# --- ids and epochs ------------------------------------------------------------------------------


def test_describe_returns_ids_of_existing_topics(rig: Rig, fresh: str) -> None:
    partition, known = ten(rig, fresh)
    found = rig.log.describe([fresh, f"{fresh}-absent"])
    assert found == {fresh: FoundTopic(known.topic_id, len(rig.log.partitions(fresh)))}
    assert rig.log.describe([]) == {}
    assert rig.log.agrees({partition: known}) == {}
    assert rig.log.agrees({}) == {}


def test_records_have_the_same_leader_epochs_in_every_reader(rig: Rig, fresh: str) -> None:
    partition, known = ten(rig, fresh)
    with closing(rig.log.tail(partition, 0)) as tail:
        epochs = [record.epoch for record in next_records(tail, 10)]
    assert set(epochs) == {known.epoch}
    with closing(rig.log.spans()) as spans:
        assert spans.read(Span(*partition, 0, 10), PATIENCE_S).epochs == epochs
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({partition: 0})
        event = next_event(reader)
        assert isinstance(event, Fetched)
        assert event.epochs == epochs[: len(event.offsets)]


@on_kafka
def test_end_position_from_before_a_cut_disagrees(rig: Rig, fresh: str) -> None:
    partition, known = ten(rig, fresh)
    before = rig.log.end_positions([partition, Partition(fresh, 7)])
    assert before == {partition: known}

    one_by_one(rig, fresh, [b"10"])
    assert rig.log.agrees(before) == {}
    rig.cut(partition, 6)
    one_by_one(rig, fresh, (b"%d" % i for i in range(6, 12)))
    eventually(lambda: rig.log.agrees(before) == {partition: 6})
    assert rig.log.agrees(rig.log.end_positions([partition])) == {}


def test_position_above_the_end_disagrees(rig: Rig, fresh: str) -> None:
    partition, known = ten(rig, fresh)
    for wrong in (LogPosition(11), known._replace(offset=11)):
        assert rig.log.agrees({partition: wrong}) == {partition: 10}
    with pytest.raises(UnknownTopicError):
        rig.log.agrees({partition: known, Partition(fresh, 1): LogPosition(0)})


def test_position_of_expired_record_agrees(rig: Rig, fresh: str) -> None:
    partition, known = ten(rig, fresh)
    rig.expire(partition, 10)
    assert rig.log.agrees({partition: known}) == {}
    assert rig.log.agrees({partition: known._replace(offset=3)}) == {}


def test_reader_resumed_at_its_position_reads_on(rig: Rig, fresh: str) -> None:
    partition, known = ten(rig, fresh)
    with (
        closing(rig.log.tail(partition, known)) as tail,
        closing(joined(rig.log, fresh)) as reader,
    ):
        reader.place({partition: known})
        one_by_one(rig, fresh, [b"10", b"11"])
        assert [record.offset for record in next_records(tail, 2)] == [10, 11]
        assert read(reader, partition, 2) == [10, 11]


# --- a log is cut --------------------------------------------------------------------------------


@on_kafka
def test_cut_log_disagrees_before_and_after_it_grows_again(rig: Rig, fresh: str) -> None:
    """Ten records, the last four lost; then six others in their places.

    offset    0 1 2 3 4 5 | 6 7 8 9 | 10 11
    before    a a a a a a   a a a a
    after     a a a a a a   b b b b   b  b
    """
    partition, known = ten(rig, fresh)
    other, others = ten(rig, f"{fresh}-other")
    positions = {partition: known, other: others}
    rig.cut(partition, 6)
    eventually(lambda: rig.log.agrees(positions) == {partition: 6})
    one_by_one(rig, fresh, (b"%d" % i for i in range(6, 12)))
    assert rig.log.agrees(positions) == {partition: 6}
    below = known._replace(offset=6)
    assert rig.log.agrees({partition: below, other: others}) == {}
    with closing(rig.log.tail(partition, below)) as tail:
        later = next_records(tail, 6)[-1].epoch
    assert later > known.epoch
    assert rig.log.agrees({partition: LogPosition(12, known.topic_id, later)}) == {}
    assert rig.log.agrees({partition: LogPosition(8, known.topic_id, later + 9)}) == {partition: 0}


@on_kafka
@pytest.mark.parametrize("grown", [0, 9])
def test_tails_and_members_report_a_cut_before_they_read_on(
    rig: Rig, fresh: str, grown: int
) -> None:
    partition, known = ten(rig, fresh)
    with (
        closing(rig.log.tail(partition, known)) as idle,
        closing(rig.log.tail(partition, 8)) as reading,
        closing(joined(rig.log, fresh)) as member,
    ):
        assert len(next_records(reading, 2)) == 2
        assert idle.read(1, 0.05) == []
        member.place({partition: 5})
        assert read(member, partition, 5) == [5, 6, 7, 8, 9]
        rig.cut(partition, 6)
        one_by_one(rig, fresh, [b"new"] * grown)
        for tail in (idle, reading):
            assert failure(tail) == (TruncatedError, 6, [])
        lost = LogTruncated(partition, 6, recreated=False)
        assert next_of(member, known) == lost
        # A reader that starts with the old position is notified, too.
        member.place({partition: known})
        assert next_of(member, known) == lost
        with closing(rig.log.tail(partition, known)) as tail:
            assert failure(tail) == (TruncatedError, 6, [])
        # Reading continues at the divergent offset.
        one_by_one(rig, fresh, [b"last"])
        below, left = known._replace(offset=6), list(range(6, 6 + grown + 1))
        member.place({partition: below})
        assert all_offsets(member, below, len(left)) == left
        with closing(rig.log.tail(partition, below)) as tail:
            assert [each.offset for each in next_records(tail, len(left))] == left


@pytest.mark.kafka
def test_stopped_broker_can_be_cut_and_loses_whole_batches(
    apache_kafka: ApacheKafka, fresh: str
) -> None:
    partition = Partition(fresh, 0)
    with closing(KafkaLog(apache_kafka.settings)) as log:
        log.create_topics([NewTopic(fresh)])
        with closing(log.writer()) as writer:
            for i in range(20):  # at once, so in few batches
                writer.append(fresh, b"%d" % i)
            assert writer.flush(PATIENCE_S)
        with pytest.raises(ValueError, match="stop the broker first"):
            apache_kafka.cut(*partition, 5)
        apache_kafka.kill()
        with pytest.raises(ValueError, match="no records from 20 on"):
            apache_kafka.cut(*partition, 20)
        end = apache_kafka.cut(*partition, 19)
        assert 0 <= end <= 19
        apache_kafka.restart()

        def ended() -> bool:
            try:
                return log.ends([partition]) == {partition: end}
            except UnavailableError:  # no leader yet
                return False

        eventually(ended)
        assert log.agrees({partition: LogPosition(20)}) == {partition: end}


# --- a partition is added -------------------------------------------------------------------------


def test_end_of_a_partition_added_after_the_first_request_is_found(
    owned_rig: Rig, fresh: str
) -> None:
    partition, known = ten(owned_rig, fresh)
    assert owned_rig.log.ends([partition]) == {partition: 10}
    added = owned_rig.add_partition(fresh)
    eventually(lambda: owned_rig.log.ends([added]) == {added: 0})
    another = owned_rig.add_partition(fresh)
    eventually(lambda: owned_rig.log.ends([partition, another]) == {partition: 10, another: 0})
    both = {partition: known, another: known._replace(offset=0)}
    assert owned_rig.log.agrees(both) == {}


# --- a topic is recreated ------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "lower"), [(3, False), (30, False), (30, True)])
def test_readers_report_recreated_topic_and_read_the_new_one(
    owned_rig: Rig, fresh: str, count: int, *, lower: bool
) -> None:
    """The new topic has fewer records than were read, or more, and perhaps a lower epoch."""
    partition, known = ten(owned_rig, fresh)
    if lower:
        # The old topic's next record gets a higher epoch than the new topic's records.
        owned_rig.cut(partition, 9)
        one_by_one(owned_rig, fresh, [b"9"])
        known = known_at(owned_rig, partition, 10)
        assert known.epoch > 0
    with (
        closing(owned_rig.log.tail(partition, known)) as idle,
        closing(joined(owned_rig.log, fresh)) as member,
        closing(owned_rig.log.spans()) as spans,
    ):
        assert idle.read(1, 0.05) == []
        assert spans.read(Span(*partition, 0, 10), PATIENCE_S).offsets == list(range(10))
        member.place({partition: known._replace(offset=5)})
        assert read(member, partition, 5) == [5, 6, 7, 8, 9]
        recreate(owned_rig, fresh, count)
        assert owned_rig.log.agrees({partition: known}) == {partition: 0}
        assert failure(idle)[:2] == (RecreatedError, 0)
        # No record of the new topic is returned as one of the old topic.
        assert next_of(member, known) == LogTruncated(partition, 0, recreated=True)
        with closing(owned_rig.log.tail(partition, known)) as tail:
            assert failure(tail) == (RecreatedError, 0, [])
        read_recreated(owned_rig, member, partition, count)

        def span_is_read() -> bool:
            try:
                return spans.read(Span(*partition, 0, count), 1.0).offsets == list(range(count))
            except UnavailableError:
                return False

        eventually(span_is_read)
