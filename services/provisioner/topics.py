"""What a provisioner reads of its job in Kafka: plans, updates and claims, as events."""

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
RECENT = 50_000  # claims from before it began: rates are those of late
CAUGHT_UP_S = 0.5  # between questions where the plans end: a request to the broker each


class TopicFollower:
    """One topic of the job, from a position on; what does not parse is None."""

    def __init__(
        self, log: Log, topic: str, on_ready: Callable[[], None], recent: int | None = None
    ) -> None:
        self._log = log
        self._on_ready = on_ready
        self.drained = False  # the last read gave nothing, and `on_ready` will tell of more
        self.partition = Partition(topic, 0)
        bounds = log.bounds(self.partition)
        start = bounds.start if recent is None else max(bounds.start, bounds.end - recent)
        self._tail = self._opened(start)

    def read(self, decode: Callable[[bytes], T]) -> tuple[tuple[int, T | None], ...]:
        """Read what is new, without waiting.

        Raises:
            UnavailableError: If Kafka is unavailable.
            TruncatedError: If the topic lost records, or was created anew: what was read of it is
                worth nothing any more.
            FutureFormatError: If a newer program wrote a record.
        """
        try:
            records = self._tail.read(READ_RECORDS, 0.0)
        except ExpiredError:  # only newer ones are kept (the embedded Kafka): go on with those
            self._tail.close()
            self._tail = self._opened(self._log.bounds(self.partition).start)
            return ()
        self.drained = not records
        return tuple((record.offset, decoded(decode, record)) for record in records)

    def _opened(self, start: int) -> Tail:
        position = identified(self._log, self.partition, start)
        return self._log.tail(self.partition, position, self._on_ready)

    def at_end(self) -> bool:
        """Whether there was nothing more to read just now."""
        return self._tail.position() >= self._log.bounds(self.partition).end

    def close(self) -> None:
        """Let go of the connection."""
        self._tail.close()


class JobTopics:
    """The three topics of one job, and how much its streams hold.

    Args:
        log: Where they are; the plans topic is made if it is not there.
        first: Where the job begins in each partition of its streams.
        streams_s: Between looks at the streams.
        on_ready: Called when there may be something new.

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
        """What is new.

        Raises:
            UnavailableError: If Kafka is unavailable.
            TruncatedError: If one of them lost records, or was created anew: begin afresh.
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
            if len(ends) == len(self._first):  # else nobody can tell just now
                yield events.RecordsCounted(sum(ends.values()) - sum(self._first.values()))

    @property
    def drained(self) -> bool:
        """Whether there was nothing more to read just now."""
        return self._plans.drained and self._updates.drained and self._claims.drained

    def close(self) -> None:
        """Let go of the connections."""
        for topic in (self._plans, self._updates, self._claims):
            topic.close()
