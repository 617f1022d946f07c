"""The schemas of a job's records, in a topic of the job, so that its readers need no registry.

The first process that finds an unknown id requests the schema from the registry, writes it to the
topic and reads it back. If the topic has two schemas for an id, the first one counts, so all
processes decode records alike. A worker claims records only after Kafka has confirmed their
schemas.

    worker 1   requests 7, freezes                        writes 7 -> A'    reads 7 -> A, uses it
    worker 2                  requests 7  writes 7 -> A   claims records of 7
    topic                                 0: 7 -> A       1: 7 -> A', without effect

A schema that the registry lacks is not recorded: it may be added later, for later records. Claims
say which records were skipped until then.
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
# A broker's election of a leader takes some seconds.
_PATIENCE_S = 15.0


def open_registry(settings: Settings) -> SchemaRegistry | None:
    """Open the schema registry without connecting; None if the settings name no registry.

    Raises:
        UserError: If the settings make no sense, or the registry's client is not installed.
    """
    if not settings.schema_registry:
        return None
    try:
        from common.kafka.registry import ConfluentRegistry  # noqa: PLC0415 -- its client is optional
    except ModuleNotFoundError as error:
        raise UserError(
            "DOLL_SCHEMA_REGISTRY_URL: the schema registry's client is not installed; run pip"
            " install 'doll[registry]'"
        ) from error
    return ConfluentRegistry(settings.schema_registry)


class JobSchemas:
    """Finds a job's schemas. Safe to use from several threads.

    Args:
        job: Identifier of the job.
        registry: Has the schemas that the topic lacks. None if there is no registry.
    """

    def __init__(self, log: Log, job: str, registry: SchemaRegistry | None) -> None:
        self._log = log
        self._place = Partition(schemas_topic(job), 0)
        self._registry = registry
        # Guards the fields below.
        self._lock = threading.Lock()
        self._found = dict[int, Schema]()
        # Offset of the next record to read.
        self._next = 0

    def get(self, number: int) -> Schema | None:
        """Return an id's schema once it is in the topic; None if the registry lacks it.

        Raises:
            UnavailableError: If the topic lacks it, and Kafka or the registry is unavailable.
        """
        with self._lock:
            if number not in self._found:
                self._read()
            if number not in self._found:
                if self._registry is None:
                    raise UnavailableError(
                        f"schema {number} is unknown, and no schema registry is configured; set"
                        " DOLL_SCHEMA_REGISTRY_URL"
                    )
                schema = self._registry.schema(number)
                if schema is None:
                    return None
                self._write(SchemaFound(number, schema))
                self._read()
            if number not in self._found:
                # The topic may have been recreated.
                self._next = 0
                raise UnavailableError(f"{self._place.topic} does not return schema {number}")
            return self._found[number]

    def teach(self, codec: RegisteredCodec, values: Sequence[bytes | None]) -> None:
        """Give a codec the existing schemas that these records need.

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
            # No process has written a schema yet.
            return

    def _write(self, found: SchemaFound) -> None:
        topic = NewTopic(self._place.topic, kept_forever=True)
        self._log.create_topics([topic])
        try:
            with closing(self._log.writer()) as writer:
                writer.append(topic.name, encode_schema(found))
                if not writer.flush(_PATIENCE_S):
                    raise UnavailableError(f"Kafka has not confirmed schema {found.id} yet")
        except BrokenWriterError as error:
            raise UnavailableError(f"Kafka refused schema {found.id}: {error}") from error
