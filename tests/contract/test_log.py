"""The `Log` port: topics, bounds, positions, and the writer. Held by memory, embedded and real."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Partition
from common.errors import DeliveryError, RecordTooLargeError, UnknownTopicError
from common.kafka.names import Difference, differences
from common.kafka.port import Bounds, NewTopic
from tests.contract.log_fixtures import PATIENCE_S, eventually, everything, filled, on_kafka

if TYPE_CHECKING:
    from tests.contract.log_fixtures import Rig

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]

# --- topics --------------------------------------------------------------------------------------


def test_created_topic_is_usable_at_once(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh, 3, kept_forever=True, compacted=True)])
    assert rig.log.partitions(fresh) == tuple(Partition(fresh, index) for index in range(3))
    assert [rig.log.bounds(each) for each in rig.log.partitions(fresh)] == [Bounds(0, 0)] * 3


def test_listing_returns_all_topics(rig: Rig, fresh: str) -> None:
    assert fresh not in rig.log.topics()
    rig.log.create_topics([NewTopic(fresh)])
    assert fresh in rig.log.topics()


def test_deleted_topics_lose_their_records(owned_rig: Rig, fresh: str) -> None:
    other = f"{fresh}-other"
    for topic in (fresh, other):
        filled(owned_rig, topic, 5)
    owned_rig.log.delete_topics([fresh, f"{fresh}-absent", other])
    eventually(lambda: not {fresh, other} & set(owned_rig.log.topics()))
    owned_rig.log.delete_topics([fresh, other])
    owned_rig.log.delete_topics([])
    with pytest.raises(UnknownTopicError):
        owned_rig.log.partitions(fresh)
    owned_rig.log.create_topics([NewTopic(fresh)])
    assert owned_rig.log.bounds(Partition(fresh, 0)) == Bounds(0, 0)


def test_creating_existing_topic_changes_nothing(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 5)
    rig.log.create_topics([NewTopic(fresh, 7)])
    assert rig.log.partitions(fresh) == (partition,)
    assert rig.log.bounds(partition) == Bounds(0, 5)


def test_creating_many_topics_keeps_existing_ones(rig: Rig, fresh: str) -> None:
    old = filled(rig, fresh, 5)
    new = [NewTopic(f"{fresh}-{number}", number + 1, compacted=True) for number in range(3)]
    rig.log.create_topics([*new, NewTopic(fresh, 7)])
    rig.log.create_topics(new)
    places = [place for topic in new for place in rig.log.partitions(topic.name)]
    assert [place.index for place in places] == [0, 0, 1, 0, 1, 2]
    assert rig.log.partitions(fresh) == (old,)
    assert rig.log.ends([*places, old]) == {**dict.fromkeys(places, 0), old: 5}


def test_topic_settings_are_compared_with_those_it_needs(owned_rig: Rig, fresh: str) -> None:
    kept = NewTopic(f"{fresh}-kept", kept_forever=True)
    compacted = NewTopic(f"{fresh}-compacted", compacted=True)
    plain = NewTopic(f"{fresh}-plain")
    owned_rig.log.create_topics([kept, compacted, plain])
    absent = f"{fresh}-absent"
    found = owned_rig.log.settings([kept.name, compacted.name, plain.name, absent])
    assert found.keys() == {kept.name, compacted.name, plain.name}
    assert differences([kept, compacted, plain], found) == ()
    assert found[kept.name].items() >= kept.settings.items()
    assert found[compacted.name].items() >= compacted.settings.items()
    assert owned_rig.log.settings([]) == {}

    owned_rig.configure(kept.name, {"cleanup.policy": "compact", "retention.ms": "5000"})
    found = owned_rig.log.settings([kept.name, compacted.name])
    assert differences([kept, compacted], found) == (
        Difference(kept.name, "cleanup.policy", "compact", "delete", loses=True),
    )
    owned_rig.configure(kept.name, {"cleanup.policy": "delete"})
    found = owned_rig.log.settings([kept.name])
    assert differences([kept], found) == (
        Difference(kept.name, "retention.ms", "5000", "-1", loses=True),
    )


@on_kafka
def test_compacted_topic_rejects_record_without_key(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh, compacted=True)])
    failed: list[DeliveryError] = []
    with closing(rig.log.writer()) as writer:
        writer.append(fresh, b"without", on_failed=failed.append)
        assert writer.flush(PATIENCE_S)
        assert [type(error) for error in failed] == [DeliveryError]
        writer.append(fresh, b"with", key=b"key", on_failed=failed.append)
        assert writer.flush(PATIENCE_S)
    assert len(failed) == 1
    found = [record.value for record in everything(rig.log, Partition(fresh, 0))]
    assert found == [b"with"]
    with closing(rig.log.writer()) as writer:
        writer.append(fresh, b"without")
        with pytest.raises(DeliveryError, match="accepts no record without a key"):
            writer.flush(PATIENCE_S)


def test_ends_omit_missing_partitions(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 3)
    absent = [Partition(fresh, 7), Partition(f"{fresh}-absent", 0)]
    # If the first pass created the topic, the second one would find it.
    for _ in range(2):
        assert rig.log.ends([*absent, partition]) == {partition: 3}
        assert rig.log.ends(absent) == {}
        assert rig.log.high_watermarks([*absent, partition]) == {partition: 3}
    assert rig.log.ends([]) == rig.log.high_watermarks([]) == {}


def test_end_counts_holes_at_the_end_of_the_log(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 3)
    rig.append_before_hole(partition, b"3")
    eventually(lambda: rig.log.ends([partition]) == {partition: 5})
    assert rig.log.high_watermarks([partition]) == {partition: 5}
    assert rig.log.bounds(partition) == Bounds(0, 5)


def test_reads_and_writes_do_not_create_unknown_topic(rig: Rig, fresh: str) -> None:
    absent = Partition(fresh, 0)
    # If the first pass created the topic, the second one would find it.
    for _ in range(2):
        with pytest.raises(UnknownTopicError):
            rig.log.partitions(fresh)
        with pytest.raises(UnknownTopicError):
            rig.log.bounds(absent)
        with pytest.raises(UnknownTopicError):
            rig.log.position_at(absent, 0.0)
        with closing(rig.log.writer()) as writer, pytest.raises(UnknownTopicError):
            writer.append(fresh, b"lost")
        with closing(rig.log.tail(absent, 0)) as tail, suppress(UnknownTopicError):
            assert tail.read(1, 0.05) == []


def test_partition_index_above_the_last_is_unknown(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh, 2)])
    with pytest.raises(UnknownTopicError):
        rig.log.bounds(Partition(fresh, 2))


# --- bounds and positions ------------------------------------------------------------------------


def test_bounds_follow_appends_and_retention(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    assert rig.log.bounds(partition) == Bounds(0, 10)
    rig.expire(partition, 4)
    assert rig.log.bounds(partition) == Bounds(4, 10)
    assert rig.log.starts([partition]) == {partition: 4}
    assert rig.log.ends([partition]) == {partition: 10}


def test_position_at_returns_first_record_not_older_than_the_time(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 3)
    between = time.time() + 0.002
    eventually(lambda: time.time() > between + 0.002)
    rig.writer.append(fresh, b"young")
    assert rig.writer.flush(PATIENCE_S)
    assert rig.log.position_at(partition, 0.0) == 0
    assert rig.log.position_at(partition, between) == 3
    assert rig.log.position_at(partition, time.time() + 60) == 4


# --- the writer ----------------------------------------------------------------------------------


def test_records_arrive_in_order_and_report_their_offsets(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh)])
    offsets: list[int | None] = []
    for i in range(1_000):
        rig.writer.append(fresh, b"%d" % i, on_delivered=offsets.append)
    assert rig.writer.flush(PATIENCE_S)
    assert offsets == list(range(1_000))
    records = everything(rig.log, Partition(fresh, 0))
    assert [record.value for record in records] == [b"%d" % i for i in range(1_000)]


def test_delivery_callback_runs_inside_poll_of_the_caller(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh)])
    threads: list[int] = []
    rig.writer.append(fresh, b"one", on_delivered=lambda _: threads.append(threading.get_ident()))
    eventually(lambda: rig.log.bounds(Partition(fresh, 0)).end == 1)
    # The record is there, but the test has not polled.
    assert threads == []

    def reported() -> list[int]:
        rig.writer.poll()
        return threads

    eventually(reported)
    assert threads == [threading.get_ident()]


def test_keys_and_tombstones_are_read_back_unchanged(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh, compacted=True)])
    rig.writer.append(fresh, b"", key=b"job", headers=[("why", b"test")])
    rig.writer.append(fresh, None, key=b"job")
    assert rig.writer.flush(PATIENCE_S)
    records = everything(rig.log, Partition(fresh, 0))
    assert [(each.offset, each.key, each.value) for each in records] == [
        (0, b"job", b""),
        (1, b"job", None),
    ]


def test_partition_is_chosen_by_key_or_spread_evenly(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh, 3)])
    # The client only uses partitions whose leader it knows.
    for partition in range(3):
        rig.writer.append(fresh, b"first", partition=partition)
    assert rig.writer.flush(PATIENCE_S)
    for _ in range(50):
        rig.writer.append(fresh, b"keyed", partition=None, key=b"same")
    for _ in range(300):
        rig.writer.append(fresh, b"keyless", partition=None)
    assert rig.writer.flush(PATIENCE_S)
    found = [[each.value for each in everything(rig.log, p)] for p in rig.log.partitions(fresh)]
    assert sorted(values.count(b"keyed") for values in found) == [0, 0, 50]
    assert all(values.count(b"keyless") > 50 for values in found)


def test_record_too_large_for_the_client_is_refused_and_writer_works(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh)])
    with closing(rig.log.writer()) as writer:
        with pytest.raises(RecordTooLargeError):
            writer.append(fresh, bytes(5_000_000))
        writer.append(fresh, b"small")
        assert writer.flush(PATIENCE_S)
    assert [record.value for record in everything(rig.log, Partition(fresh, 0))] == [b"small"]


def test_record_too_large_for_its_topic_fails_and_writer_works(owned_rig: Rig, fresh: str) -> None:
    owned_rig.log.create_topics([NewTopic(fresh)])
    owned_rig.configure(fresh, {"max.message.bytes": "1000"})
    failed: list[DeliveryError] = []
    with closing(owned_rig.log.writer()) as writer:
        writer.append(fresh, bytes(5_000), on_failed=failed.append)
        assert writer.flush(PATIENCE_S)
        assert [type(error) for error in failed] == [RecordTooLargeError]
        writer.append(fresh, b"small", on_failed=failed.append)
        assert writer.flush(PATIENCE_S)
    assert len(failed) == 1
    assert [record.value for record in everything(owned_rig.log, Partition(fresh, 0))] == [b"small"]


def test_lost_record_stops_its_writer_but_no_other(owned_rig: Rig, fresh: str) -> None:
    partition = filled(owned_rig, fresh, 1)
    small = Partition(f"{fresh}-small", 0)
    owned_rig.log.create_topics([NewTopic(small.topic)])
    owned_rig.configure(small.topic, {"max.message.bytes": "1000"})
    with closing(owned_rig.log.writer()) as writer:
        writer.append(small.topic, bytes(5_000))
        for i in range(1, 100):
            owned_rig.writer.append(fresh, b"%d" % i)
        for _ in range(2):  # it stays so
            with pytest.raises(DeliveryError):
                writer.flush(PATIENCE_S)
        with pytest.raises(DeliveryError):
            writer.append(fresh, b"too late")
    assert owned_rig.writer.flush(PATIENCE_S)
    found = [record.value for record in everything(owned_rig.log, partition)]
    assert found == [b"%d" % i for i in range(100)]
    assert owned_rig.log.ends([small]) == {small: 0}


def test_writers_run_their_callbacks_in_their_own_threads(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh)])
    threads: list[tuple[str, int]] = []

    def write(name: str) -> None:
        with closing(rig.log.writer()) as writer:
            for _ in range(50):
                writer.append(
                    fresh,
                    name.encode(),
                    on_delivered=lambda _: threads.append((name, threading.get_ident())),
                )
            assert writer.flush(PATIENCE_S)
            assert threads.count((name, threading.get_ident())) == 50

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert len(threads) == 150
    assert len(set(threads)) == 3
    assert rig.log.ends([Partition(fresh, 0)]) == {Partition(fresh, 0): 150}


def test_writer_notifies_when_a_delivery_can_be_polled(rig: Rig, fresh: str) -> None:
    rig.log.create_topics([NewTopic(fresh)])
    ready, offsets = threading.Event(), list[int | None]()
    with closing(rig.log.writer(on_ready=ready.set)) as writer:
        for i in range(3):
            writer.append(fresh, b"", on_delivered=offsets.append)

            def is_polled(count: int = i + 1) -> bool:
                assert ready.wait(PATIENCE_S)
                ready.clear()
                writer.poll()
                return len(offsets) == count

            eventually(is_polled)
    assert offsets == [0, 1, 2]
