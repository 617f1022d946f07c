"""Numbers and lifetimes of the clients and threads of a Kafka log."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING
from weakref import WeakSet

import pytest

from common.core.spans import Partition
from common.errors import BrokenWriterError, DeliveryError, OutsideError
from common.kafka.log import KafkaLog
from common.kafka.port import NewTopic
from tests.contract.log_fixtures import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.embedded.kafka import EmbeddedKafka

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]

_PRODUCE, _INIT_PRODUCER_ID = 0, 22  # API keys of Kafka's protocol
_DUPLICATE_SEQUENCE_NUMBER = 46
_CLUSTER_AUTHORIZATION_FAILED = 31
_PRODUCE = 0
_OUT_OF_ORDER = 45
_OLD_PRODUCER_EPOCH = 47


_others = WeakSet[threading.Thread]()


@pytest.fixture
def log(embedded_kafka: EmbeddedKafka) -> Iterator[KafkaLog]:
    """Yield a log that no other test uses."""
    _others.update(threading.enumerate())
    with closing(KafkaLog(embedded_kafka.settings)) as log:
        yield log


def ours() -> int:
    """Return the number of threads that read tails, without those of earlier tests."""
    threads = set(threading.enumerate()) - set(_others)
    return sum(thread.name == "kafka-tails" for thread in threads)


def test_tails_share_a_thread_that_ends_with_the_last_tail(log: KafkaLog, fresh: str) -> None:
    topics = [NewTopic(f"{fresh}-{number}") for number in range(20)]
    log.create_topics(topics)
    tails = [log.tail(Partition(topic.name, 0), 0) for topic in topics]
    assert ours() == 1
    # A client has only one position per partition, so this tail needs a second client.
    again = log.tail(Partition(topics[0].name, 0), 0)
    assert ours() == 2
    again.close()
    eventually(lambda: ours() == 1)
    for tail in tails:
        tail.close()
        tail.close()  # twice does no harm
    eventually(lambda: ours() == 0)
    with closing(log.tail(Partition(topics[0].name, 0), 0)) as tail:
        assert tail.read(1, 0.01) == []
        assert ours() == 1


def test_prompt_tails_share_another_thread(log: KafkaLog, fresh: str) -> None:
    topics = [NewTopic(f"{fresh}-{number}") for number in range(4)]
    log.create_topics(topics)
    tails = [log.tail(Partition(topic.name, 0), 0) for topic in topics[:2]]
    tails += [log.tail(Partition(topic.name, 0), 0, prompt=True) for topic in topics[2:]]
    assert ours() == 2
    for tail in tails:
        tail.close()
    eventually(lambda: ours() == 0)


def test_users_of_a_closed_log_get_an_error(log: KafkaLog, fresh: str) -> None:
    log.create_topics([NewTopic(fresh)])
    tail, writer = log.tail(Partition(fresh, 0), 0), log.writer()
    assert tail.read(1, 0.01) == []
    log.close()
    assert ours() == 0
    with pytest.raises(OutsideError):
        tail.read(1, PATIENCE_S)
    with pytest.raises(DeliveryError):
        writer.append(fresh, b"too late")
    # The log opens a new producer for later writers.
    with closing(log.writer()) as again:
        again.append(fresh, b"in time")
        assert again.flush(PATIENCE_S)


@pytest.mark.parametrize("code", [_OUT_OF_ORDER, _OLD_PRODUCER_EPOCH])
def test_writer_with_broken_sequence_stops_and_next_writer_works(
    log: KafkaLog, embedded_kafka: EmbeddedKafka, fresh: str, code: int
) -> None:
    log.create_topics([NewTopic(fresh)])
    notified, arrived = threading.Event(), list[int | None]()
    writer = log.writer(on_ready=notified.set)
    writer.append(fresh, b"arrives", on_delivered=arrived.append)
    assert writer.flush(PATIENCE_S)
    notified.clear()
    embedded_kafka.control.refuse(_PRODUCE, code)
    writer.append(fresh, b"nobody knows", on_delivered=arrived.append)
    assert notified.wait(PATIENCE_S)
    for call in (writer.poll, lambda: writer.append(fresh, b"lost")):
        with pytest.raises(BrokenWriterError) as error:
            call()
        assert error.value.retriable
    writer.close()
    with closing(log.writer()) as another:
        another.append(fresh, b"arrives", on_delivered=arrived.append)
        assert another.flush(PATIENCE_S)
    assert arrived == [0, 1]


def test_producer_fault_stops_its_writers_and_next_writer_gets_new_producer(
    log: KafkaLog, embedded_kafka: EmbeddedKafka, fresh: str
) -> None:
    log.create_topics([NewTopic(fresh)])
    embedded_kafka.control.refuse(_INIT_PRODUCER_ID, _CLUSTER_AUTHORIZATION_FAILED)
    notified = threading.Event()
    first, second = log.writer(on_ready=notified.set), log.writer()
    first.append(fresh, b"lost")
    assert notified.wait(PATIENCE_S)
    with pytest.raises(DeliveryError):
        first.poll()
    for writer in (first, second):
        with pytest.raises(DeliveryError):
            writer.append(fresh, b"lost")
    with closing(log.writer()) as third:
        third.append(fresh, b"arrives")
        assert third.flush(PATIENCE_S)
    assert log.ends([Partition(fresh, 0)]) == {Partition(fresh, 0): 1}
    for writer in (first, second):
        writer.close()


def test_record_that_broker_already_has_is_delivered_without_offset(
    log: KafkaLog, embedded_kafka: EmbeddedKafka, fresh: str
) -> None:
    log.create_topics([NewTopic(fresh)])
    offsets = list[int | None]()
    with closing(log.writer()) as writer:
        writer.append(fresh, b"first", on_delivered=offsets.append)
        assert writer.flush(PATIENCE_S)
        embedded_kafka.control.refuse(_PRODUCE, _DUPLICATE_SEQUENCE_NUMBER)
        writer.append(fresh, b"sent twice", on_delivered=offsets.append)
        assert writer.flush(PATIENCE_S)
    assert offsets == [0, None]
