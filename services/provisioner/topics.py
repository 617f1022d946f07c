"""A provisioner's topics of its job in Kafka: plans, updates and claims, as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from common.core.spans import Partition
from common.errors import ExpiredError
from common.kafka.names import control_topic, plans_topic, updates_topic
from common.kafka.port import Log, NewTopic, Tail
from common.kafka.read import decoded, identified
from common.spot.plans import decode_plan
from common.spot.provisioning import events
from common.wire import messages as wire

if TYPE_CHECKING:
    from common.core.messages import Positions

T = TypeVar("T")

READ_RECORDS = 2000
# Maximum number of claims from before the start that are read. Older ones do not affect rates.
RECENT = 50_000
# Time between checks for the end of the plans. Each check is a request to the broker.
CAUGHT_UP_S = 0.5


class TopicFollower:
    """Reads one topic of the job from a position on. Decoding errors give None."""

    def __init__(
        self, log: Log, topic: str, on_ready: Callable[[], None], recent: int | None = None
    ) -> None:
        self._log = log
        self._on_ready = on_ready
        # True if the last read returned nothing, so that `on_ready` reports the next record.
        self.drained = False
        self.partition = Partition(topic, 0)
        bounds = log.bounds(self.partition)
        start = bounds.start if recent is None else max(bounds.start, bounds.end - recent)
        self._tail = self._opened(start)

    def read(self, decode: Callable[[bytes], T]) -> tuple[tuple[int, T | None], ...]:
        """Read new records, without waiting.

        Raises:
            UnavailableError: If Kafka is unavailable.
            TruncatedError: If the topic lost records, or was recreated. Everything read from it is
                void.
            FutureFormatError: If a newer program wrote a record.
        """
        try:
            records = self._tail.read(READ_RECORDS, 0.0)
        # The embedded Kafka keeps only newer records. Reading continues with the first of them.
        except ExpiredError:
            self._tail.close()
            self._tail = self._opened(self._log.bounds(self.partition).start)
            return ()
        self.drained = not records
        return tuple((record.offset, decoded(decode, record)) for record in records)

    def _opened(self, start: int) -> Tail:
        position = identified(self._log, self.partition, start)
        return self._log.tail(self.partition, position, self._on_ready)

    def at_end(self) -> bool:
        """Return True if there was nothing more to read just now."""
        return self._tail.position() >= self._log.bounds(self.partition).end

    def close(self) -> None:
        """Close the connection."""
        self._tail.close()


class JobTopics:
    """The three topics of one job, and the number of records in its streams.

    Args:
        log: Kafka. The plans topic is created if it is missing.
        first: The job's beginning in each partition of its streams.
        streams_s: Time between polls of the streams.
        on_ready: Called when there may be a new record.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(
        self,
        log: Log,
        job: str,
        first: Positions,
        streams_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        log.create_topics([NewTopic(plans_topic(job), 1, kept_forever=True)])
        self._plans = TopicFollower(log, plans_topic(job), on_ready)
        self._updates = TopicFollower(log, updates_topic(job), on_ready)
        self._claims = TopicFollower(log, control_topic(job), on_ready, RECENT)
        self._asked_at = 0.0
        self._log = log
        self._first = first
        self._streams_s = streams_s
        self._streams_at = 0.0

    def read(self) -> Iterator[events.ProvisionerEvent]:
        """Read new records as events.

        Raises:
            UnavailableError: If Kafka is unavailable.
            TruncatedError: If a topic lost records, or was recreated. Start again with another
                object.
            FutureFormatError: If a newer program wrote a record.
        """
        plans = self._plans.read(decode_plan)
        caught_up = False
        if not plans and monotonic() >= self._asked_at + CAUGHT_UP_S:
            self._asked_at = monotonic()
            caught_up = self._plans.at_end()
        if plans or caught_up:
            yield events.PlansRead(plans, caught_up)
        updates = self._updates.read(wire.decode_audit)
        if updates:
            yield events.UpdateRecordsRead(updates)
        claims = self._claims.read(wire.decode_claim)
        if claims:
            yield events.ClaimsRead(tuple(claim for _, claim in claims))

        if monotonic() >= self._streams_at + self._streams_s:
            self._streams_at = monotonic()
            ends = self._log.ends(self._first)
            # If an end is unknown at the moment, records are counted at the next poll.
            if len(ends) == len(self._first):
                yield events.RecordsCounted(sum(ends.values()) - sum(self._first.values()))

    @property
    def drained(self) -> bool:
        """True if the last read of each topic returned nothing."""
        return self._plans.drained and self._updates.drained and self._claims.drained

    def close(self) -> None:
        """Close the connections."""
        for topic in (self._plans, self._updates, self._claims):
            topic.close()
