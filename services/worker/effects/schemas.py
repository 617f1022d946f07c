"""Finds the schemas of a worker's records, and keeps records back whose schema is not known yet.

The stream thread never waits for one.
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
# So long an id of which the registry had no schema counts as none, before it is asked again.
ABSENT_S = 30.0
_STATUSES: dict[type[Exception], str] = {
    LateError: REGISTRY_LATE,
    RefusedError: REGISTRY_REFUSES,
    UnreachableError: REGISTRY_UNREACHABLE,
}


OfPartition: TypeAlias = Fetched | LogEndReached | OutOfRange | LogTruncated


class SchemaFinder:
    """Gives the codec the schemas that records need.

    Args:
        clock: Seconds that never go back.
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
        # Heartbeat status that says why the last schema is missing. Empty: none is missing.
        self.missing = ""
        self._clock = clock
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards what follows
        self._wanted = set[int]()
        self._absent = dict[int, float]()  # until when
        self._asking = False

    def ready(self, values: Sequence[bytes | None]) -> bool:
        """Whether what these records need was looked for; if not, that begins now."""
        now = self._clock()
        with self._lock:
            unknown = self._codec.unknown(values)
            self._wanted = {each for each in unknown if self._absent.get(each, now) <= now}
            if self._wanted and not self._asking:
                self._asking = True
                threading.Thread(target=self._ask, name="schemas", daemon=True).start()
            return not self._wanted

    def find(self, values: Sequence[bytes | None]) -> None:
        """Find what these records need, which somebody has claimed and so found before.

        Raises:
            UnavailableError: If it is not in the job's topic, and Kafka or the registry is away.
        """
        self._schemas.teach(self._codec, values)

    def close(self) -> None:
        """Look for nothing any more."""
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
    """Keeps back what a worker read until its schema is known, and all that comes after, in order.

    Args:
        finder: Finds the schemas; None: records need none.
    """

    def __init__(self, finder: SchemaFinder | None) -> None:
        self._finder = finder
        self._held = deque[OfPartition]()  # the first awaits a schema

    @property
    def is_closed(self) -> bool:
        """True while something is kept back."""
        return bool(self._held)

    @property
    def missing(self) -> str:
        """Heartbeat status that says why a schema is missing; empty: none is."""
        return "" if self._finder is None else self._finder.missing

    def add(self, event: OfPartition) -> None:
        """Take in what was read of a partition."""
        self._held.append(event)

    def ready(self) -> Iterator[OfPartition]:
        """Take out, one by one, what nothing is missing for."""
        while self._held:
            first = self._held[0]
            if isinstance(first, Fetched) and self._finder and not self._finder.ready(first.values):
                return
            yield self._held.popleft()

    def drop(self, partitions: Collection[Partition]) -> None:
        """Forget what waits of these partitions: it was read from where they do not stand now."""
        self._held = deque(each for each in self._held if each.partition not in partitions)

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()

    def close(self) -> None:
        """Look for no schema any more."""
        if self._finder is not None:
            self._finder.close()
