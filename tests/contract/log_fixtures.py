"""The logs of the contract, each with controls for its environment."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from common.core.spans import Partition
from common.errors import UnavailableError
from common.kafka.log import KafkaLog
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic, StreamLog, TransactionalLog
from common.kafka.stream import KafkaStreamLog
from common.kafka.transactions import KafkaTransactionalLog
from tests.servers import configure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.kafka import EmbeddedKafka
    from common.kafka.port import Log, LogRecord, Writer
    from common.kafka.settings import KafkaSettings

_ROOT = Path(__file__).parents[2]
_TRANSACTION_TIMEOUT_S = 10.0
# Short, because tests send requests to a stopped broker.
_REQUEST_TIMEOUT_S = 2.0
# Small, so that some thousand records do not fit.
_PREFETCH_KB = 1_024
_ids = count()


class FullLog(StreamLog, TransactionalLog, Protocol):
    """All methods of a log."""


class KafkaFullLog(KafkaStreamLog, KafkaTransactionalLog):
    """All methods of a Kafka log."""


class Rig(Protocol):
    """A log and external events that happen to it."""

    @property
    def log(self) -> FullLog:
        """The port."""

    @property
    def writer(self) -> Writer:
        """A producer to fill topics with."""

    def append_before_hole(self, partition: Partition, value: bytes) -> int:
        """Append a record and return its offset. The next offset then has no record."""

    def expire(self, partition: Partition, below: int) -> None:
        """Retention deletes the records below an offset."""

    def go_away(self) -> None:
        """Stop the broker from answering."""

    def come_back(self) -> None:
        """Let the broker answer again, with all acknowledged records."""

    def delete_topic(self, topic: str) -> None:
        """Delete a topic; the embedded broker cannot."""

    def add_partition(self, topic: str) -> Partition:
        """Add a partition to a topic; the embedded broker cannot."""

    def cut(self, partition: Partition, end: int) -> None:
        """Make the log lose the records from an offset on; only a real broker can do this.

        Each of these records must have been delivered before the next one was appended.
        """

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Change a topic's settings; the embedded broker cannot."""

    def kill_member(self, group: str, topic: str, survivor: Callable[[], object]) -> None:
        """Let another member join, call `survivor` until it has, and kill it."""


class MemoryRig:
    """The log in memory."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.writer = self.log.writer()

    def append_before_hole(self, partition: Partition, value: bytes) -> int:
        """See `Rig`."""
        offset = self.log.bounds(partition).end
        self.writer.append(partition.topic, value, partition=partition.index)
        self.writer.append(partition.topic, b"punched out", partition=partition.index)
        self.log.punch(partition, offset + 1)
        return offset

    def expire(self, partition: Partition, below: int) -> None:
        """See `Rig`."""
        self.log.expire(partition, below)

    def go_away(self) -> None:
        """See `Rig`."""
        self.log.go_away()

    def come_back(self) -> None:
        """See `Rig`."""
        self.log.come_back()

    def delete_topic(self, topic: str) -> None:
        """See `Rig`."""
        self.log.delete_topics([topic])

    def add_partition(self, topic: str) -> Partition:
        """See `Rig`."""
        added = Partition(topic, len(self.log.partitions(topic)))
        self.log.add_partitions(topic, added.index + 1)
        return added

    def cut(self, partition: Partition, end: int) -> None:
        """See `Rig`."""
        pytest.skip(f"the log in memory cannot cut {partition} at {end}")

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """See `Rig`."""
        self.log.configure(topic, settings)

    def kill_member(self, group: str, topic: str, survivor: Callable[[], object]) -> None:
        """See `Rig`."""
        doomed = self.log.stream(group, [topic], "doomed")

        def joined() -> bool:
            survivor()
            return bool(doomed.poll(1, 0.0))

        eventually(joined)
        doomed.close()


class KafkaRig:
    """Common parts of both kinds of broker."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self.log = KafkaFullLog(settings)
        self.writer = self.log.writer()

    @cached_property
    def _transactions(self) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self._settings.bootstrap,
                "transactional.id": f"holes-{next(_ids)}",
                "log_level": 2,
            }
        )
        producer.init_transactions(_TRANSACTION_TIMEOUT_S)
        return producer

    def append_before_hole(self, partition: Partition, value: bytes) -> int:
        """Commit a transaction, whose marker takes an offset and is no record."""
        offset = self.log.bounds(partition).end
        self._transactions.begin_transaction()
        self._transactions.produce(partition.topic, value, partition=partition.index)
        self._transactions.commit_transaction(_TRANSACTION_TIMEOUT_S)
        eventually(lambda: self.log.bounds(partition).end == offset + 2)
        return offset

    def kill_member(self, group: str, topic: str, survivor: Callable[[], object]) -> None:
        """See `Rig`."""
        doomed = subprocess.Popen(  # noqa: S603 -- our own command line
            [
                *(sys.executable, "-c", _DOOMED, self._settings.bootstrap),
                *(self._settings.group_protocol, group, topic),
            ],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
        )
        with doomed:
            assert doomed.stdout is not None
            said = doomed.stdout

            def joined() -> bool:
                survivor()
                return bool(select.select([said], [], [], 0)[0])

            try:
                eventually(joined)
                assert said.readline() == b"joined\n"
            finally:
                doomed.kill()


class EmbeddedRig(KafkaRig):
    """The mock broker of the client library."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        super().__init__(
            replace(kafka.settings, request_timeout_s=_REQUEST_TIMEOUT_S, prefetch_kb=_PREFETCH_KB)
        )
        self._control = kafka.control

    def expire(self, partition: Partition, below: int) -> None:
        """See `Rig`."""
        self._control.expire(partition.topic, partition.index, below)

    def go_away(self) -> None:
        """See `Rig`."""
        self._control.set_up(up=False)

    def come_back(self) -> None:
        """See `Rig`."""
        self._control.set_up(up=True)

    def delete_topic(self, topic: str) -> None:
        """See `Rig`."""
        pytest.skip(f"the embedded broker cannot delete {topic}")

    def add_partition(self, topic: str) -> Partition:
        """See `Rig`."""
        pytest.skip(f"the embedded broker cannot add a partition to {topic}")

    def cut(self, partition: Partition, end: int) -> None:
        """See `Rig`."""
        pytest.skip(f"the embedded broker cannot cut {partition} at {end}")

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """See `Rig`."""
        pytest.skip(f"the embedded broker has no settings of {topic}: {settings}")


class ApacheRig(KafkaRig):
    """A real Apache Kafka broker."""

    def __init__(self, kafka: ApacheKafka, protocol: Literal["classic", "consumer"]) -> None:
        super().__init__(
            replace(
                kafka.settings,
                group_protocol=protocol,
                session_timeout_ms=1_500,
                hold_timeout_ms=60_000,
                fetch_wait_ms=20,
                request_timeout_s=_REQUEST_TIMEOUT_S,
                prefetch_kb=_PREFETCH_KB,
            )
        )
        self._kafka = kafka

    def expire(self, partition: Partition, below: int) -> None:
        """See `Rig`."""
        for done in self._admin.delete_records([TopicPartition(*partition, below)]).values():
            done.result()

    def go_away(self) -> None:
        """See `Rig`."""
        self._kafka.kill()

    def come_back(self) -> None:
        """See `Rig`."""
        self._kafka.restart()

    def delete_topic(self, topic: str) -> None:
        """See `Rig`."""
        self._admin.delete_topics([topic])[topic].result()

    def add_partition(self, topic: str) -> Partition:
        """See `Rig`."""
        found = self._admin.list_topics(topic, timeout=_REQUEST_TIMEOUT_S).topics[topic]
        added = Partition(topic, len(found.partitions))
        total = NewPartitions(topic, added.index + 1)
        self._admin.create_partitions([total])[topic].result()
        return added

    def cut(self, partition: Partition, end: int) -> None:
        """See `Rig`."""
        # A producer cannot continue in a log that lost its records, and may abort the process.
        self.writer.close()
        self._kafka.kill()
        assert self._kafka.cut(*partition, end) == end
        self._kafka.restart()
        self.writer = KafkaLog(self._settings).writer()

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """See `Rig`."""
        configure(self._settings.bootstrap, topic, settings)

    @cached_property
    def _admin(self) -> AdminClient:
        # The client answers only while a reference to it exists.
        return AdminClient({"bootstrap.servers": self._settings.bootstrap, "log_level": 2})


# A member in a process of its own, because only a process can die without leaving its group.
_DOOMED = """\
import sys
from common.kafka.stream import KafkaStreamLog
from common.kafka.settings import KafkaSettings
from common.core.spans import Assigned
bootstrap, protocol, group, topic = sys.argv[1:]
settings = KafkaSettings(bootstrap, group_protocol=protocol, session_timeout_ms=1500)
reader = KafkaStreamLog(settings).stream(group, [topic], "doomed")
while True:
    if any(isinstance(event, Assigned) for event in reader.poll(1, 0.1)):
        print("joined", flush=True)
"""


@pytest.fixture(scope="session")
def rigs(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Rig]]:
    """Yield a function that makes each rig once. A producer takes half a second to get its id."""
    made: dict[str, Rig] = {}

    def rig_of(kind: str) -> Rig:
        if kind not in made:
            made[kind] = _make(kind, request)
        return made[kind]

    yield rig_of
    for rig in made.values():
        rig.writer.close()


@pytest.fixture(params=["memory", "embedded", pytest.param("apache", marks=pytest.mark.kafka)])
def rig(request: pytest.FixtureRequest, rigs: Callable[[str], Rig]) -> Rig:
    return rigs(request.param)


@pytest.fixture(
    params=[
        "memory",
        "embedded",
        pytest.param("apache", marks=pytest.mark.kafka),
        pytest.param("apache-consumer", marks=pytest.mark.kafka),
    ],
)
def group_rig(request: pytest.FixtureRequest, rigs: Callable[[str], Rig]) -> Rig:
    """Return each log, with each protocol that its groups have."""
    return rigs(request.param)


@pytest.fixture(params=["memory", pytest.param("apache", marks=pytest.mark.kafka)])
def owned_rig(request: pytest.FixtureRequest, rigs: Callable[[str], Rig]) -> Rig:
    """Return each log whose topics can be deleted and limited, so not the embedded broker's."""
    return rigs(request.param)


on_servers = pytest.mark.parametrize(
    "rig", ["embedded", pytest.param("apache", marks=pytest.mark.kafka)], indirect=True
)
on_kafka = pytest.mark.parametrize(
    "rig", [pytest.param("apache", marks=pytest.mark.kafka)], indirect=True
)


@pytest.fixture
def fresh() -> str:
    """Return a new name for a topic and a group."""
    return f"test-{next(_ids)}"


def _make(kind: str, request: pytest.FixtureRequest) -> Rig:
    match kind:
        case "memory":
            return MemoryRig()
        case "embedded":
            return EmbeddedRig(request.getfixturevalue("embedded_kafka"))
        case "apache":
            return ApacheRig(request.getfixturevalue("apache_kafka"), "classic")
        case _:
            return ApacheRig(request.getfixturevalue("apache_kafka"), "consumer")


PATIENCE_S = 20.0


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Call a condition until it is true. The condition itself should wait a little.

    UnavailableError counts as false until the timeout. A broker that has just come back may need
    longer than the short timeout of a request here, above all on a busy machine.
    """
    deadline = time.monotonic() + timeout_s

    def holds() -> object:
        try:
            return condition()
        except UnavailableError:
            if time.monotonic() >= deadline:
                raise
            return False

    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"


def filled(rig: Rig, topic: str, count: int) -> Partition:
    """Return a partition of a topic with records 0, 1, 2, ..., each with its offset as value."""

    def is_there() -> bool:
        rig.log.create_topics([NewTopic(topic)])
        return topic in rig.log.describe([topic])

    eventually(is_there)
    for i in range(count):
        rig.writer.append(topic, b"%d" % i)
    assert rig.writer.flush(PATIENCE_S)
    return Partition(topic, 0)


def one_by_one(rig: Rig, topic: str, values: Iterable[bytes]) -> None:
    """Append records, each in a batch of its own."""
    for value in values:
        rig.writer.append(topic, value)
        assert rig.writer.flush(PATIENCE_S)


def everything(log: Log, partition: Partition) -> list[LogRecord]:
    """Return all records from the start, read by a tail."""
    bounds, records = log.bounds(partition), []
    with closing(log.tail(partition, bounds.start)) as tail:
        while tail.position() < bounds.end:
            records += tail.read(1_000, PATIENCE_S)
    return records
