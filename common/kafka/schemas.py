"""The schemas of a job's records, in a topic of the job: who reads its records needs no registry.

Who meets an id first asks the registry, writes what it has into the topic and reads that back: of
two records of an id the first counts, whoever wrote it and whenever, so all read records alike. A
claim follows the schemas of its records, which are acknowledged before it is made.

    worker 1   asks for 7, is frozen                       writes 7 -> A'    reads 7 -> A, uses it
    worker 2                    asks for 7   writes 7 -> A   claims records of 7
    topic                                    0: 7 -> A       1: 7 -> A', without effect

That the registry has no schema of an id is not written down: it may come to have it, for records
that come later. Which of those that came before were skipped their claims say.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from common.core.messages import Schema, SchemaFound
from common.core.spans import Partition
from common.errors import (
    BrokenWriterError,
    UnavailableError,
    UnknownTopicError,
    UserError,
    WireError,
)
from common.kafka.names import schemas_topic
from common.kafka.port import Log, NewTopic, SchemaRegistry
from common.kafka.read import records_of
from common.telemetry.logging import event_logger
from common.wire.messages import decode_schema, encode_schema

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.data.registered import RegisteredCodec

_log = event_logger(__name__)
_PATIENCE_S = 15.0  # a broker's election of a leader takes some seconds


def open_registry(settings: Settings) -> SchemaRegistry | None:
    """The schema registry, None where the settings name none; it is not asked before it is needed.

    Raises:
        UserError: If the settings make no sense, or what asks it is not installed.
    """
    if not settings.schema_registry:
        return None
    try:
        from common.kafka.registry import ConfluentRegistry  # noqa: PLC0415 -- its client is optional
    except ModuleNotFoundError as error:
        raise UserError(
            "DOLL_SCHEMA_REGISTRY_URL: what asks a registry is not installed here:"
            " pip install 'doll[registry]'"
        ) from error
    return ConfluentRegistry(settings.schema_registry)


class JobSchemas:
    """Finds them; for any thread.

    Args:
        job: Its id.
        registry: Asked for what the topic has not; None: there is none to ask.
    """

    def __init__(self, log: Log, job: str, registry: SchemaRegistry | None) -> None:
        self._log = log
        self._place = Partition(schemas_topic(job), 0)
        self._registry = registry
        self._lock = threading.Lock()  # guards what follows
        self._found = dict[int, Schema]()
        self._next = 0  # offset

    def get(self, number: int) -> Schema | None:
        """The schema of an id, once it is in the topic; None: the registry says there is none.

        Raises:
            UnavailableError: If the topic has it not, and Kafka or the registry is unavailable.
        """
        with self._lock:
            if number not in self._found:
                self._read()
            if number not in self._found:
                if self._registry is None:
                    raise UnavailableError(
                        f"schema {number} is not known, and no registry to ask:"
                        " set DOLL_SCHEMA_REGISTRY_URL"
                    )
                schema = self._registry.schema(number)
                if schema is None:
                    return None
                self._write(SchemaFound(number, schema))
                self._read()
            if number not in self._found:
                self._next = 0  # the topic may be another one by now
                raise UnavailableError(f"{self._place.topic} does not give back schema {number}")
            return self._found[number]

    def teach(self, codec: RegisteredCodec, values: Sequence[bytes | None]) -> None:
        """Give a codec the schemas that these records need, as far as there are any.

        Raises:
            UnavailableError: As `get`.
        """
        for number in codec.unknown(values):
            if (schema := self.get(number)) is not None:
                codec.learn(number, schema)

    def _read(self) -> None:
        try:
            for record in records_of(self._log, self._place, start=self._next):
                self._next = record.offset + 1
                try:
                    found = decode_schema(record.value or b"")
                except WireError as error:
                    _log.warning("schema_rejected", offset=record.offset, reason=str(error))
                else:
                    self._found.setdefault(found.id, found.schema)
        except UnknownTopicError:
            return  # nobody has met one yet

    def _write(self, found: SchemaFound) -> None:
        topic = NewTopic(self._place.topic, kept_forever=True)
        self._log.create_topics([topic])
        try:
            with closing(self._log.writer()) as writer:
                writer.append(topic.name, encode_schema(found))
                if not writer.flush(_PATIENCE_S):
                    raise UnavailableError(f"Kafka has not taken schema {found.id} yet")
        except BrokenWriterError as error:
            raise UnavailableError(f"Kafka has not taken schema {found.id}: {error}") from error
