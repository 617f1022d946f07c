"""The `StreamReader` port, alone in its group: reads start exactly at the placed position."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Assigned, LogPosition, Partition
from common.kafka.epochs import TopicsQuestion
from common.kafka.port import Bounds, Fetched, LogEndReached, LogTruncated, NewTopic, OutOfRange
from tests.contract.log_fixtures import PATIENCE_S, eventually, filled

if TYPE_CHECKING:
    from common.kafka.port import StreamEvent, StreamLog, StreamReader
    from tests.contract.log_fixtures import Rig

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]


def joined(log: StreamLog, topic: str) -> StreamReader:
    """Return the only member of a new group, with all partitions of a topic, none placed."""
    reader = log.stream(f"{topic}-group", [topic], "alone")
    owned: set[Partition] = set()

    def complete() -> bool:
        for event in reader.poll(100, 0.1):
            assert isinstance(event, Assigned)
            owned.update(event.partitions)
        return owned == set(log.partitions(topic))

    eventually(complete)
    return reader


def next_event(reader: StreamReader, max_records: int = 100) -> StreamEvent:
    events: list[StreamEvent] = []

    def happened() -> bool:
        events.extend(reader.poll(max_records, 0.1))
        return bool(events)

    eventually(happened)
    assert len(events) == 1, events
    return events[0]


def read(reader: StreamReader, partition: Partition, count: int) -> list[int]:
    """Return this many further offsets of the only placed partition."""
    offsets: list[int] = []

    def complete() -> bool:
        for event in reader.poll(count - len(offsets), 0.1):
            assert isinstance(event, Fetched)
            assert event.partition == partition
            assert event.values == [b"%d" % offset for offset in event.offsets]
            offsets.extend(event.offsets)
        return len(offsets) >= count

    eventually(complete)
    return offsets


def test_joined_partition_is_silent_until_placed(group_rig: Rig, fresh: str) -> None:
    partition = filled(group_rig, fresh, 10)
    with closing(joined(group_rig.log, fresh)) as reader:
        assert [reader.poll(100, 0.05) for _ in range(4)] == [()] * 4
        reader.place({partition: 4})
        assert read(reader, partition, 6) == list(range(4, 10))


def test_records_are_fetched_in_runs_with_arrival_times(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({partition: 0})
        event = next_event(reader, max_records=1)
        assert isinstance(event, Fetched)
        assert (event.partition, event.offsets, event.values) == (partition, [0], [b"0"])
        assert event.first_arrival_s == event.last_arrival_s
        assert rig.log.position_at(partition, event.first_arrival_s) == 0


def test_poll_returns_at_most_the_requested_records(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh, 3)])
    for i in range(300):
        rig.writer.append(fresh, b"%d" % i, partition=i % 3)
    assert rig.writer.flush(PATIENCE_S)
    with closing(joined(rig.log, fresh)) as reader:
        reader.place(dict.fromkeys(rig.log.partitions(fresh), 0))
        offsets: dict[Partition, list[int]] = {each: [] for each in rig.log.partitions(fresh)}

        def complete() -> bool:
            runs = [event for event in reader.poll(7, 0.1) if isinstance(event, Fetched)]
            assert sum(len(run.offsets) for run in runs) <= 7
            for run in runs:
                offsets[run.partition] += run.offsets
            return all(len(each) >= 100 for each in offsets.values())

        eventually(complete)
        assert all(each == list(range(100)) for each in offsets.values())


def test_last_placement_discards_records_fetched_before(group_rig: Rig, fresh: str) -> None:
    """Placements go back and forth: no record of an earlier placement is ever returned."""
    partition = filled(group_rig, fresh, 3_000)
    dice = random.Random(11)  # noqa: S311 -- not for secrets
    with closing(joined(group_rig.log, fresh)) as reader:
        for _ in range(150):
            position = dice.randrange(3_000)
            reader.place({partition: position})
            if dice.random() < 0.3:
                # The reader is placed again before it has read anything.
                continue
            count = min(dice.choice([1, 5, 400]), 3_000 - position)
            assert read(reader, partition, count) == list(range(position, position + count))


def test_placing_one_partition_does_not_affect_others(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh, 2)])
    for i in range(2_000):
        rig.writer.append(fresh, b"%d" % i, partition=i % 2)
    assert rig.writer.flush(PATIENCE_S)
    moved, still = rig.log.partitions(fresh)
    seen: list[int] = []
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({moved: 0, still: 0})

        def complete() -> bool:
            for event in reader.poll(50, 0.1):
                assert isinstance(event, Fetched)
                if event.partition == still:
                    seen.extend(event.offsets)
            reader.place({moved: 0})
            return len(seen) >= 1_000

        eventually(complete)
    assert seen == list(range(1_000))


def test_placement_in_a_hole_begins_after_it(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 2)
    records = [rig.append_before_hole(partition, b"%d" % (2 + 2 * i)) for i in range(4)]
    with closing(joined(rig.log, fresh)) as reader:
        for _ in range(3):
            reader.place({partition: 0})
            assert read(reader, partition, 6) == [0, 1, *records]
            reader.place({partition: records[1] + 1})
            assert read(reader, partition, 2) == records[2:]


def test_end_of_log_with_trailing_holes_is_reported_once(group_rig: Rig, fresh: str) -> None:
    """Records 0 to 2, another one, and a hole; then another record, and a hole again."""
    partition = filled(group_rig, fresh, 3)
    group_rig.append_before_hole(partition, b"3")
    with closing(joined(group_rig.log, fresh)) as reader:
        reader.place({partition: 0})
        assert read(reader, partition, 4) == [0, 1, 2, 3]
        assert next_event(reader) == LogEndReached(partition, 5)
        eventually(lambda: reader.lag() == {partition: 0})
        assert reader.poll(100, 0.1) == ()
        group_rig.append_before_hole(partition, b"5")
        assert read(reader, partition, 1) == [5]
        assert next_event(reader) == LogEndReached(partition, 7)
        reader.place({partition: 4})
        assert read(reader, partition, 1) == [5]
        assert next_event(reader) == LogEndReached(partition, 7)


def test_out_of_range_is_reported_once_until_placed_again(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    rig.expire(partition, 4)
    with closing(joined(rig.log, fresh)) as reader:
        for wrong, expected in (
            (3, OutOfRange(partition, Bounds(4, 10))),
            (11, LogTruncated(partition, 10, recreated=False)),
        ):
            reader.place({partition: wrong})
            assert next_event(reader) == expected
            assert [reader.poll(100, 0.05) for _ in range(3)] == [()] * 3
        reader.place({partition: 4})
        assert read(reader, partition, 6) == list(range(4, 10))


def test_reader_overtaken_by_retention_reports_out_of_range(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh)])
    for _ in range(20):  # more than any reader holds
        rig.writer.append(fresh, bytes(200_000))
    assert rig.writer.flush(PATIENCE_S)
    [partition] = rig.log.partitions(fresh)
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({partition: 2})
        reader.pause()
        assert reader.poll(100, 0.3) == ()
        rig.expire(partition, 17)
        reader.resume()
        position, event = 2, next_event(reader)
        # The reader had fetched these records before.
        while isinstance(event, Fetched):
            assert event.offsets == list(range(position, event.offsets[-1] + 1))
            position, event = event.offsets[-1] + 1, next_event(reader)
        assert event == OutOfRange(partition, Bounds(17, 20))


@pytest.mark.parametrize("sizes", [(6_000, 6_000), (9_000, 3_000)])
def test_backlog_is_read_in_turns_weighted_by_partition_lag(
    rig: Rig, fresh: str, sizes: tuple[int, int]
) -> None:
    # The records are written partition by partition, so the broker returns them in this order.
    rig.log.create_topics([NewTopic(fresh, 2)])
    places = rig.log.partitions(fresh)
    for place, size in zip(places, sizes, strict=True):
        for i in range(size):
            rig.writer.append(fresh, b"%d" % i, partition=place.index)
        assert rig.writer.flush(PATIENCE_S)
    runs = list[Fetched]()
    with closing(joined(rig.log, fresh)) as reader:
        reader.place(dict.fromkeys(places, 0))

        def complete() -> bool:
            for event in reader.poll(100, 0.1, run=32):
                assert isinstance(event, Fetched)
                runs.append(event)
            return sum(len(run.offsets) for run in runs) == 12_000

        eventually(complete)
    for place, size in zip(places, sizes, strict=True):
        found = [offset for run in runs if run.partition == place for offset in run.offsets]
        assert found == list(range(size))
    order = [run.partition for run in runs for _ in run.offsets]
    both = order[: min(order[::-1].index(place) * -1 + len(order) for place in places)]
    assert len(both) > 8_000
    share = sizes[1] / 12_000
    for start in range(0, len(both) - 1_000, 1_000):
        assert abs(order[start : start + 1_000].count(places[1]) / 1_000 - share) < 0.15
    # Longer runs occur only if the other partition's next fetch took too long.
    long = sum(len(run.offsets) for run in runs if len(run.offsets) > 32) - (12_000 - len(both))
    assert long < 0.1 * len(both)


def test_empty_partition_does_not_delay_other_partitions(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh, 2)])
    full, empty = rig.log.partitions(fresh)
    rig.writer.append(fresh, b"0", partition=full.index)
    assert rig.writer.flush(PATIENCE_S)
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({full: 0, empty: 0})
        assert read(reader, full, 1) == [0]


def test_trickling_records_of_many_partitions_arrive_without_delay(
    rig: Rig, fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.log.create_topics([NewTopic(fresh, 40)])
    answered, looks = TopicsQuestion.is_answered, Counter[int]()

    def late(question: TopicsQuestion) -> bool:
        # The answer is late, as in topics with a thousand partitions.
        looks[id(question)] += 1
        return looks[id(question)] > 100 and answered(question)

    over, given = threading.Event(), 0

    def produce() -> int:
        written = 0
        while not over.wait(0.004):
            rig.writer.append(fresh, b"0", partition=written % 40)
            rig.writer.poll()
            written += 1
        return written

    with closing(joined(rig.log, fresh)) as reader, ThreadPoolExecutor() as pool:
        topic_id = rig.log.describe([fresh])[fresh].topic_id
        monkeypatch.setattr(TopicsQuestion, "is_answered", late)
        reader.place({place: LogPosition(0, topic_id) for place in rig.log.partitions(fresh)})
        producing = pool.submit(produce)
        while given < 400:
            given += sum(len(e.offsets) for e in reader.poll(100, 0.05) if isinstance(e, Fetched))
        over.set()
        assert producing.result() < 1000


def test_placing_unowned_partition_does_nothing(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 5)
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({Partition(fresh, 5): 0, Partition(f"{fresh}-other", 0): 0, partition: 3})
        assert read(reader, partition, 2) == [3, 4]


def test_paused_reader_returns_nothing_and_loses_nothing(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 1_000)
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({partition: 0})
        for start in range(0, 1_000, 100):
            assert read(reader, partition, 100) == list(range(start, start + 100))
            reader.pause()
            assert reader.poll(100, 0.02) == ()
            assert reader.poll(100, 0.0) == ()
            reader.resume()


def test_poll_for_zero_records_returns_none_and_loses_none(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 20)
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({partition: 0})
        assert read(reader, partition, 10) == list(range(10))
        assert [reader.poll(0, 0.05) for _ in range(3)] == [()] * 3
        assert read(reader, partition, 10) == list(range(10, 20))


def test_placement_during_a_pause_takes_effect_on_resume(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 20)
    with closing(joined(rig.log, fresh)) as reader:
        reader.place({partition: 0})
        read(reader, partition, 5)
        reader.pause()
        reader.place({partition: 12})
        assert [reader.poll(100, 0.05) for _ in range(3)] == [()] * 3
        reader.resume()
        assert read(reader, partition, 8) == list(range(12, 20))


def test_lag_is_the_number_of_unread_records(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 100)
    with closing(joined(rig.log, fresh)) as reader:
        assert reader.lag() == {}
        reader.place({partition: 30})
        read(reader, partition, 20)
        assert reader.lag() == {partition: 50}


def test_commit_neither_waits_nor_raises(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    with closing(joined(rig.log, fresh)) as reader:
        reader.commit({})
        reader.commit({partition: 5})
        reader.commit({Partition(fresh, 9): 5})  # not owned, does not even exist
        reader.place({partition: 0})
        assert read(reader, partition, 10) == list(range(10))
