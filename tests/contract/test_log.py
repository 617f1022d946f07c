"""The `Log` port: topics, bounds, positions, and the writer. Held by memory, embedded and real."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Partition
from common.errors import DeliveryError, UnknownTopicError
from common.ports import Bounds
from tests.contract.log_helpers import PATIENCE_S, eventually, everything, filled

if TYPE_CHECKING:
    from tests.contract.log_fixtures import Rig

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]

# --- topics --------------------------------------------------------------------------------------


def test_a_topic_can_be_used_as_soon_as_it_is_created(rig: Rig, fresh: str) -> None:
    rig.log.create_topic(fresh, 3, kept_forever=True, compacted=True)
    assert rig.log.partitions(fresh) == tuple(Partition(fresh, index) for index in range(3))
    assert [rig.log.bounds(each) for each in rig.log.partitions(fresh)] == [Bounds(0, 0)] * 3


def test_creating_a_topic_again_changes_nothing(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 5)
    rig.log.create_topic(fresh, 7)
    assert rig.log.partitions(fresh) == (partition,)
    assert rig.log.bounds(partition) == Bounds(0, 5)


def test_nothing_creates_an_unknown_topic_by_asking(rig: Rig, fresh: str) -> None:
    absent = Partition(fresh, 0)
    for _ in range(2):  # the second time it would be there, had the first created it
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


def test_a_partition_beyond_the_last_is_unknown(rig: Rig, fresh: str) -> None:
    rig.log.create_topic(fresh, 2)
    with pytest.raises(UnknownTopicError):
        rig.log.bounds(Partition(fresh, 2))


# --- bounds and positions ------------------------------------------------------------------------


def test_bounds_follow_what_is_appended_and_what_expires(rig: Rig, fresh: str) -> None:
    partition = filled(rig, fresh, 10)
    assert rig.log.bounds(partition) == Bounds(0, 10)
    rig.expire(partition, 4)
    assert rig.log.bounds(partition) == Bounds(4, 10)


def test_a_position_by_time_is_the_first_record_that_is_not_older(rig: Rig, fresh: str) -> None:
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
    rig.log.create_topic(fresh, 1)
    offsets: list[int] = []
    for i in range(1_000):
        rig.writer.append(fresh, b"%d" % i, on_delivered=offsets.append)
    assert rig.writer.flush(PATIENCE_S)
    assert offsets == list(range(1_000))
    records = everything(rig.log, Partition(fresh, 0))
    assert [record.value for record in records] == [b"%d" % i for i in range(1_000)]


def test_delivery_is_reported_inside_poll_in_the_callers_thread(rig: Rig, fresh: str) -> None:
    rig.log.create_topic(fresh, 1)
    threads: list[int] = []
    rig.writer.append(fresh, b"one", on_delivered=lambda _: threads.append(threading.get_ident()))
    eventually(lambda: rig.log.bounds(Partition(fresh, 0)).end == 1)
    assert threads == []  # it is there, but nobody has polled

    def reported() -> list[int]:
        rig.writer.poll()
        return threads

    eventually(reported)
    assert threads == [threading.get_ident()]


def test_keys_and_tombstones_come_back_as_they_were(rig: Rig, fresh: str) -> None:
    rig.log.create_topic(fresh, 1, compacted=True)
    rig.writer.append(fresh, b"", key=b"job", headers=[("why", b"test")])
    rig.writer.append(fresh, None, key=b"job")
    assert rig.writer.flush(PATIENCE_S)
    records = everything(rig.log, Partition(fresh, 0))
    assert [(each.offset, each.key, each.value) for each in records] == [
        (0, b"job", b""),
        (1, b"job", None),
    ]


def test_a_partition_is_chosen_by_key_or_spread_evenly_without_one(rig: Rig, fresh: str) -> None:
    rig.log.create_topic(fresh, 3)
    for partition in range(3):  # a client spreads over partitions whose leader it has learned
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


def test_a_record_that_no_broker_takes_stops_its_writer(rig: Rig, fresh: str) -> None:
    rig.log.create_topic(fresh, 1)
    with closing(rig.log.writer()) as writer, pytest.raises(DeliveryError):
        writer.append(fresh, bytes(5_000_000))
