"""Finds the schemas of a worker's records, and delays records with unknown schemas.

The stream thread never waits for a schema.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from common.core.liveness import (
    REGISTRY_LATE,
    REGISTRY_REFUSES,
    REGISTRY_UNREACHABLE,
    WAITING,
)
from common.errors import DollError, LateError, RefusedError, UnavailableError, UnreachableError
from common.kafka.port import Fetched, LogEndReached, LogTruncated, OutOfRange
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.core.spans import Partition
    from common.data.registered import RegisteredCodec
    from common.kafka.schemas import JobSchemas
    from common.telemetry.logging import EventLogger

RETRY_S = 1.0
# Time until a schema that the registry did not have is looked up again.
ABSENT_S = 30.0
_STATUSES: dict[type[Exception], str] = {
    LateError: REGISTRY_LATE,
    RefusedError: REGISTRY_REFUSES,
    UnreachableError: REGISTRY_UNREACHABLE,
}


OfPartition: TypeAlias = Fetched | LogEndReached | OutOfRange | LogTruncated


class SchemaFinder:
    """Teaches the codec the schemas that records need.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        codec: RegisteredCodec,
        schemas: JobSchemas,
        logger: EventLogger,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._codec = codec
        self._schemas = schemas
        self._outage = Outage(logger, "schema_registry")
        # Heartbeat status that says why the last schema is missing. Empty if none is.
        self.missing = ""
        self._clock = clock
        self._closed = threading.Event()
        # Guards the fields below.
        self._lock = threading.Lock()
        self._wanted = set[int]()
        # Deadlines until which ids count as absent.
        self._absent = dict[int, float]()
        self._asking = False

    def ready(self, values: Sequence[bytes | None]) -> bool:
        """Return True if these records' schemas were looked up; otherwise start the lookup."""
        now = self._clock()
        with self._lock:
            unknown = self._codec.unknown(values)
            self._wanted = {each for each in unknown if self._absent.get(each, now) <= now}
            if self._wanted and not self._asking:
                self._asking = True
                threading.Thread(target=self._ask, name="schemas", daemon=True).start()
            return not self._wanted

    def find(self, values: Sequence[bytes | None]) -> None:
        """Find the schemas of these records, which the claiming worker has found before.

        Raises:
            UnavailableError: If a schema is not in the job's topic, and Kafka or the registry is
                unavailable.
        """
        self._schemas.teach(self._codec, values)

    def close(self) -> None:
        """Stop looking for schemas."""
        self._closed.set()

    def _learn(self, number: int) -> None:
        schema = self._schemas.get(number)
        if schema is not None:
            self._codec.learn(number, schema)
        with self._lock:
            self._wanted.discard(number)
            if schema is None:
                self._absent[number] = self._clock() + ABSENT_S

    def _ask(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                wanted = sorted(self._wanted)
                self._asking = bool(wanted)
            if not wanted:
                return
            try:
                for number in wanted:
                    self._learn(number)
                    self._outage.over()
                    self.missing = ""
            except Exception as error:  # noqa: BLE001 -- without this thread, the worker would wait for ever
                fault = UnavailableError(f"{type(error).__name__}: {error}")
                self._outage.met(error if isinstance(error, DollError) else fault)
                self.missing = _STATUSES.get(type(error), WAITING)
                self._closed.wait(RETRY_S)


class SchemaGate:
    """Delays records with an unknown schema, and all later ones, in order.

    Args:
        finder: Finds the schemas. None if records need none.
    """

    def __init__(self, finder: SchemaFinder | None) -> None:
        self._finder = finder
        # The first one waits for a schema.
        self._held = deque[OfPartition]()

    @property
    def is_closed(self) -> bool:
        """True while records are delayed."""
        return bool(self._held)

    @property
    def missing(self) -> str:
        """Heartbeat status that says why a schema is missing. Empty if none is."""
        return "" if self._finder is None else self._finder.missing

    def add(self, event: OfPartition) -> None:
        """Add an event of a partition."""
        self._held.append(event)

    def ready(self) -> Iterator[OfPartition]:
        """Yield, one by one, the events that are ready."""
        while self._held:
            first = self._held[0]
            if isinstance(first, Fetched) and self._finder and not self._finder.ready(first.values):
                return
            yield self._held.popleft()

    def drop(self, partitions: Collection[Partition]) -> None:
        """Drop the events of these partitions, because their positions have changed."""
        self._held = deque(each for each in self._held if each.partition not in partitions)

    def clear(self) -> None:
        """Drop all events."""
        self._held.clear()

    def close(self) -> None:
        """Stop looking for schemas."""
        if self._finder is not None:
            self._finder.close()
