"""The wait of a producer's thread for delivery reports."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from confluent_kafka import Message

from common.kafka.settings import KafkaSettings
from common.kafka.writer import KafkaWriter, SharedProducer
from tests.unit.services.replicas import until

if TYPE_CHECKING:
    from confluent_kafka import Producer


class Poll(NamedTuple):
    """One wait for delivery reports."""

    wait_s: float
    reported: int


class Client:
    """A client whose broker accepts each record at once."""

    def __init__(self, _: dict[str, Any]) -> None:
        self.polls = list[Poll]()
        self._produced = deque[tuple[str, Any]]()

    def produce(self, topic: str, _: bytes, *others: object, **__: object) -> None:
        """Accept a record."""
        self._produced.append((topic, others[-1]))

    def poll(self, wait_s: float) -> None:
        """Report the accepted records."""
        reported = 0
        while self._produced:
            topic, report = self._produced.popleft()
            report(None, Message(topic, 0, 0))
            reported += 1
        self.polls.append(Poll(wait_s, reported))

    def flush(self, _: float) -> int:
        """Return 0, because all records are reported."""
        return 0

    def __len__(self) -> int:
        return len(self._produced)


class SlowClient(Client):
    """A client whose broker accepts nothing until `takes`."""

    takes = False

    def poll(self, wait_s: float) -> None:
        """Report the accepted records."""
        if self.takes:
            super().poll(wait_s)
        else:
            sleep(wait_s)


def test_writer_reports_how_long_no_record_was_accepted() -> None:
    settings = KafkaSettings("127.0.0.1:1")
    client = SlowClient({})
    producer = SharedProducer(settings, lambda _: cast("Producer", client))
    writer = KafkaWriter(
        producer, settings, lambda _: None, waits=True, max_bytes=1 << 20, on_ready=None
    )
    producer.add(writer)
    assert writer.waiting_s == 0.0
    writer.append("t", b"a record")
    until(lambda: writer.waiting_s > 0.05, "the record waits")
    client.takes = True
    until(lambda: writer.waiting_s == 0.0, "the record was accepted")
    producer.close()


def test_producer_waits_inside_the_client_after_each_report() -> None:
    #  append ── woken ── waits for the report ── and for another ── in vain: waits to be woken
    settings, made = KafkaSettings("127.0.0.1:1"), list[Client]()

    def make(properties: dict[str, Any]) -> Producer:
        made.append(Client(properties))
        return cast("Producer", made[-1])

    producer = SharedProducer(settings, make)
    writer = KafkaWriter(
        producer, settings, lambda _: None, waits=True, max_bytes=1 << 20, on_ready=None
    )
    producer.add(writer)
    [client] = made
    for count in (1, 2):
        writer.append("t", b"a record")

        def looked_for_more(count: int = count) -> bool:
            polls = client.polls
            return sum(poll.reported for poll in polls) == count and not polls[-1].reported

        until(looked_for_more, "the producer polls for another report")
    producer.close()
    for before, after in pairwise(client.polls):
        if before.reported:
            assert after.wait_s > 0
        elif not after.reported:
            assert after.wait_s == 0
