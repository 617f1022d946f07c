"""A real schema registry with its serializers, and a job that trains during its outages.

The server has Confluent's API. It keeps schemas in memory, so a restart loses them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.schema_registry import Schema as Registered
from confluent_kafka.schema_registry import SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.type_pb2 import Type

from common.config.settings import read_settings
from common.core.messages import UpdateApplied
from common.data.codecs import codec_of
from common.data.registered import RegisteredCodec
from common.data.tables import row_records
from common.embedded.apache_kafka import resolve
from common.embedded.process import Child, free_port
from common.errors import UnavailableError, UserError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.dead_letters import read_dead_letters
from common.kafka.names import schemas_topic, updates_topic
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded
from common.kafka.schemas import open_registry
from common.redis.board import open_board
from common.wire.messages import decode_audit, decode_schema
from tests.integration.cluster import await_condition
from tests.integration.looking import progress_of
from tests.integration.token_issuer import answers
from tests.servers import lacking
from tests.tables import job_file, needs_tables, table
from tests.unit.data.test_registered import message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.config.settings import Settings
    from common.jobs.spec import JobSpec

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.nightly]

FIELDS = [{"name": "a", "type": ["null", "double"]}, {"name": "label", "type": "boolean"}]
ROW = {"type": "record", "name": "shop.Row", "fields": FIELDS}
LATER = {**ROW, "fields": [*FIELDS, {"name": "new", "type": ["null", "string"], "default": None}]}
ROWS = 1_400  # rows of that table
# Same bound as for JSON, in tests/integration/test_table_examples.py.
LOSS = 0.55
VALUE = SerializationContext("rows", MessageField.VALUE)


class RegistryProcess:
    """The registry, at the same address after each start."""

    def __init__(self, jars: Path, folder: Path) -> None:
        self._port, self._folder = free_port(), folder
        self._jar = next(jars.glob("*-runner.jar"))
        self.url = f"http://127.0.0.1:{self._port}/apis/ccompat/v7"
        self._child: Child | None = None

    def start(self) -> SchemaRegistryClient:
        """Start the registry. Returns a producer's client."""
        listen = (f"-Dquarkus.http.port={self._port}", "-Dquarkus.http.host=127.0.0.1")
        small = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
        command = ["java", *small, *listen, "-jar", str(self._jar)]
        self._child = Child(command, self._folder / "log", dict(os.environ))
        self._child.await_ready(lambda: answers(f"{self.url}/subjects"), 60.0)
        return SchemaRegistryClient({"url": self.url})

    def kill(self) -> None:
        """Kill the registry, which loses all schemas."""
        if self._child is not None:
            self._child.kill()
            self._child = None


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryProcess]:
    try:
        jars = resolve(folder=Path(__file__).parent / "registry")
    except UserError as error:
        lacking(str(error))
    process = RegistryProcess(jars, tmp_path)
    yield process
    process.kill()


BOTH = "{a: {dtype: float32, default: 0}, label: {dtype: int64}}"


def job(name: str, codec: str, fields: str = BOTH) -> JobSpec:
    return parse_job(
        f"""
name: {name}
streams: [{name}-rows]
records:
  codec: {codec}
  fields: {fields}
task: {{name: logistic-regression, classes: 2, inputs: [a]}}
batch_size: 16
group_size: 2
optimizer: {{name: sgd, learning_rate: 0.1}}
batch_linger_s: 0.3
group_linger_s: 0.3
"""
    )


class Training:
    """A coordinator, workers that come and go, and a topic."""

    def __init__(self, spec: JobSpec, settings: Settings, folder: Path) -> None:
        self.spec, self._settings, self._folder = spec, settings, folder
        self._environ = {**os.environ, **settings.environ()}
        self._children = dict[str, Child]()
        self.log = open_log(settings)
        [self._topic] = spec.streams
        self.log.create_topics([NewTopic(self._topic)])
        with closing(JobOperations(self.log)) as jobs:
            jobs.submit(spec)

    def start(self, service: str, name: str) -> None:
        """Start a process."""
        command = [sys.executable, "-m", f"services.{service}", "--name", name]
        command += ["--job", self.spec.name] * (service == "worker")
        log = self._folder / f"{name}.log"
        self._children[name] = Child(command, log, self._environ, forks=True)

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        self._children.pop(name).kill()

    def close(self) -> None:
        """Stop everything."""
        with closing(JobOperations(self.log)) as jobs:
            jobs.patch(self.spec.name, "the test is over", wanted="stopped")
        for child in self._children.values():
            child.kill()
        self.log.close()

    def said(self, name: str) -> str:
        """Return the log of a process."""
        return (self._folder / f"{name}.log").read_text()

    def state(self) -> str:
        """Return the job's state as `doll job list` shows it."""
        with closing(JobOperations(self.log)) as jobs:
            record = jobs.read()[self.spec.name]
        board = partial(open_board, self._settings)
        word, why = progress_of(record, self.log, board, time.time()).state(time.time())
        return f"{word}: {why}"

    def produce(self, *values: bytes) -> None:
        """Write records."""
        with closing(self.log.writer()) as writer:
            for value in values:
                writer.append(self._topic, value)
            assert writer.flush(20.0)

    def _updates(self) -> list[UpdateApplied]:
        topic = updates_topic(self.spec.name)
        records = [record for _, record in read_decoded(self.log, topic, decode_audit)]
        return [record for record in records if isinstance(record, UpdateApplied)]

    def samples(self) -> int:
        """Return the number of records in all updates."""
        return sum(update.samples for update in self._updates())

    def losses(self) -> list[float]:
        """Return the losses of the updates."""
        return [update.loss for update in self._updates()]

    def await_samples(self, count: int) -> None:
        """Wait until the model was trained on this number of records."""
        await_condition(lambda: self.samples() >= count, f"{count} samples, not {self.samples()}")
        assert self.samples() == count


def rows(count: int) -> list[dict[str, object]]:
    return [{"a": None if n % 5 == 0 else n / count, "label": n % 2 == 1} for n in range(count)]


def test_job_trains_on_avro_during_outages_of_the_registry(
    registry: RegistryProcess, likest_to_production: Settings, tmp_path: Path
) -> None:
    client = registry.start()
    settings = likest_to_production.model_copy(update={"schema_registry": {"url": registry.url}})
    with closing(Training(job("avro", "avro"), settings, tmp_path)) as training:
        training.start("coordinator", "c1")
        training.start("worker", "w1")
        first, later = (AvroSerializer(client, json.dumps(each)) for each in (ROW, LATER))
        known = [first(row, VALUE) for row in rows(96)]
        training.produce(*known)
        training.produce(*(later({**row, "new": "!"}, VALUE) for row in rows(32)))
        training.await_samples(128)
        schemas = read_decoded(training.log, schemas_topic("avro"), decode_schema)
        assert len(schemas) == 2

        # During the outage, known schemas are enough, even for a new worker.
        registry.kill()
        training.kill("w1")
        training.start("worker", "w2")
        training.produce(*known)
        training.await_samples(224)
        training.produce(*(b"\0\0\0\0\x63" + value[5:] for value in known[:32]))
        await_condition(
            lambda: "schema_registry_unavailable" in training.said("w2"), "the outage is logged"
        )
        await_condition(lambda: training.state().startswith("degraded: w2: records wait"), "so")
        assert read_dead_letters(training.log, "avro-rows").dead_letters == []

        # The registry is available again, but does not have the schema.
        registry.start()
        await_condition(
            lambda: len(read_dead_letters(training.log, "avro-rows").dead_letters) == 32,
            "dead letters",
        )
        [reason] = {
            each.reason for each in read_dead_letters(training.log, "avro-rows").dead_letters
        }
        assert reason == "the schema registry has no schema with the record's id"
        training.produce(*known)
        training.await_samples(320)


@needs_tables
@pytest.mark.parametrize("codec", ["avro", "protobuf"])
def test_connections_example_trains_with_avro_and_protobuf(
    registry: RegistryProcess, likest_to_production: Settings, tmp_path: Path, codec: str
) -> None:
    client = registry.start()
    found = row_records(table("connections", ROWS), "connections", ())["row"].tolist()
    connections = [json.loads(row) for row in found]
    serialize: Callable[[dict[str, Any]], bytes]
    if codec == "avro":
        fields = [
            {"name": name, "type": "string" if isinstance(cell, str) else ["null", "double"]}
            for name, cell in connections[0].items()
        ]
        schema = {"type": "record", "name": "Connection", "fields": fields}
        write_avro = AvroSerializer(client, json.dumps(schema))
        serialize = partial(write_avro, ctx=VALUE)
    else:
        _, message = message_of(connections[0])
        write_message = ProtobufSerializer(message, client, {"use.deprecated.format": False})

        def serialize(row: dict[str, Any]) -> bytes:
            return bytes(write_message(message(**row), VALUE))

    text = job_file("connections").read_text().replace("codec: json", f"codec: {codec}")
    text = text.replace("connections", f"{codec}-connections")
    settings = likest_to_production.model_copy(update={"schema_registry": {"url": registry.url}})
    with closing(Training(parse_job(text), settings, tmp_path)) as training:
        training.produce(*map(serialize, connections))
        training.start("coordinator", "c1")
        training.start("worker", "w1")
        training.await_samples(ROWS)
        assert sum(training.losses()[-5:]) / 5 < LOSS


def test_values_of_confluent_serializers_are_read(registry: RegistryProcess) -> None:
    client = registry.start()
    port = open_registry(read_settings({"DOLL_SCHEMA_REGISTRY_URL": registry.url}))
    assert port is not None
    assert port.schema(99) is None
    value = AvroSerializer(client, json.dumps(ROW))(rows(2)[1], VALUE)
    number = int.from_bytes(value[1:5])
    schema = port.schema(number)
    assert schema is not None
    assert (schema.kind, json.loads(schema.text)["fields"], schema.references) == (
        "AVRO",
        FIELDS,
        (),
    )

    inner, holder = json.dumps(ROW), {"type": "record", "name": "H"}
    client.register_schema("inner", Registered(inner, "AVRO"))
    text = json.dumps({**holder, "fields": [{"name": "row", "type": "shop.Row"}]})
    uses = [SchemaReference("shop.Row", "inner", 1)]
    held = port.schema(client.register_schema("held", Registered(text, "AVRO", uses)))
    assert held is not None
    assert [(each.name, json.loads(each.text)) for each in held.references] == [("shop.Row", ROW)]

    options = {"use.deprecated.format": False, "skip.known.types": False}
    uses_others = ProtobufSerializer(Type, client, options)(Type(), VALUE)
    written = port.schema(int.from_bytes(uses_others[1:5]))
    assert written is not None
    assert "google/protobuf/any.proto" in {each.name for each in written.references}
    stamped = ProtobufSerializer(Timestamp, client, options)(Timestamp(seconds=7), VALUE)
    fields = "{a: {dtype: float32, from: seconds}, label: {dtype: int64, from: nanos}}"
    codec = codec_of(job("message", "protobuf", fields).records)
    assert isinstance(codec, RegisteredCodec)
    [number] = codec.unknown([stamped])
    found = port.schema(number)
    assert found is not None
    codec.learn(number, found)
    decoded = codec.decode([stamped])
    assert (decoded.skipped, decoded.records["a"].tolist()) == ([], [7.0])

    described = {"title": "row", "type": "object", "properties": {"a": {"type": "number"}}}
    serialize = JSONSerializer(json.dumps(described), client)
    decoded = codec_of(job("plain", "json").records).decode(
        [serialize({"a": 2.5, "label": 1}, VALUE)]
    )
    assert (decoded.skipped, decoded.records["a"].tolist()) == ([], [2.5])

    registry.kill()
    with pytest.raises(UnavailableError, match=f"the schema registry at {registry.url}: "):
        port.schema(99)
