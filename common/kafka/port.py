"""What the product asks of Kafka, as protocols: a log, its readers and its writers.

One contract suite (tests/contract) holds the client and the log in memory to the same behaviour.
Nothing here is thread-safe unless it says so: each object belongs to the thread that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from common.core.spans import Assigned, Revoked

if TYPE_CHECKING:
    from common.core.messages import (
        Positions,
        Schema,
    )
    from common.core.spans import LogPosition, Partition, Span
    from common.errors import DeliveryError

WRITER_BYTES = 16 << 20  # a topic that takes nothing holds no more memory; a job needs far less


class Bounds(NamedTuple):
    """First retained offset and the offset after the last record that a reader may see."""

    start: int
    end: int


MESSAGE_BYTES = 1_048_588  # that a topic takes by Kafka's default: our largest record and more


class SchemaRegistry(Protocol):
    """Where producers register what their records' bytes mean."""

    def schema(self, number: int) -> Schema | None:
        """The schema of an id, which never names another one; None: it says that there is none.

        Raises:
            UnavailableError: If it does not answer, or gives no answer that can be used.
        """


class NewTopic(NamedTuple):
    """A topic that shall be there."""

    name: str
    partitions: int = 1
    kept_forever: bool = False  # no record expires
    compacted: bool = False  # of each key, the newest record stays
    compaction_lag_s: float = 0.0  # age up to which compaction leaves a record alone

    @property
    def settings(self) -> dict[str, str]:
        """Settings that the topic's users rely on, by Kafka's names; the cluster has the others."""
        if not (self.kept_forever or self.compacted):
            return {}
        lag = {"min.compaction.lag.ms": f"{self.compaction_lag_s * 1000:.0f}"}
        return {
            "cleanup.policy": "compact" if self.compacted else "delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "max.message.bytes": str(MESSAGE_BYTES),
            **(lag if self.compaction_lag_s else {}),
        }


class FoundTopic(NamedTuple):
    """A topic that is there."""

    # In its text form; of one created anew it is another. Empty where the broker gives none (before
    # Kafka 2.8, and the built-in one).
    topic_id: str
    partitions: int  # numbered from 0


class LogRecord(NamedTuple):
    """One record of a topic that is read from a position."""

    offset: int
    key: bytes | None
    value: bytes | None  # None is a tombstone
    timestamp_s: float = 0.0  # Kafka's, since 1970; 0: nobody knows
    epoch: int = -1  # Kafka's leader epoch of the record; -1: not known
    headers: tuple[tuple[str, bytes], ...] = ()


class NewRecord(NamedTuple):
    """One record that shall be written."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None  # None: by the key, or spread evenly without one


@dataclass(frozen=True, slots=True)
class Fetched:
    """Consecutive records of one partition, in offset order (offsets may have holes)."""

    partition: Partition
    offsets: list[int]
    values: list[bytes | None]
    first_arrival_s: float  # Kafka timestamp of the first record
    last_arrival_s: float
    epochs: list[int]  # of each record, Kafka's leader epoch; -1: not known


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """The position lies below the partition's log; nothing is read until placed again."""

    partition: Partition
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class LogTruncated:
    """The log is not any more the one known below the position; nothing is read until placed again.

    Either it lost its last records, or its topic was deleted and created anew. What was read and
    not returned yet is dropped.
    """

    partition: Partition
    divergent_offset: int  # from here on the log is another one; 0 for a topic created anew
    recreated: bool


@dataclass(frozen=True, slots=True)
class LogEndReached:
    """All records were returned, and the log ends above the last one: its last offsets hold none.

    Such are the markers of transactions, and the records of those that were aborted.
    """

    partition: Partition
    position: int  # the log's end: of records that come later, none lies below it


StreamEvent: TypeAlias = Assigned | Revoked | Fetched | OutOfRange | LogTruncated | LogEndReached


class StreamReader(Protocol):
    """One member of the job's consumer group."""

    def poll(
        self, max_records: int, timeout_s: float, run: int | None = None
    ) -> tuple[StreamEvent, ...]:
        """Wait for something to happen; order of events, and within a partition, is the broker's.

        Rebalances happen inside this call alone. Records of a partition that is revoked, or not yet
        placed, are never returned after the event that says so. Partitions that wait with records
        are returned in turn, by what each lags: see `common.core.weighted_turns`.

        Args:
            max_records: Return no more than these, over all partitions.
            timeout_s: Wait no longer.
            run: Records of one partition in a row, at most, while others wait with some; where it
                is not said, as many as fit.

        Raises:
            UnavailableError: If the broker is unavailable; call again.
        """

    def place(self, positions: Mapping[Partition, int | LogPosition]) -> None:
        """Read these partitions from these positions on, whatever was read or fetched before.

        The first record returned of each is the first one that exists at or after its position.
        What a `LogPosition` knows of the log below is checked before that. Later on, a log that
        loses records is noticed before one of those is returned that took their place; a topic
        that is created anew, where the position names its id, within some seconds.
        """

    def pause(self) -> None:
        """Return no records of any partition until `resume`; `poll` keeps the membership."""

    def resume(self) -> None:
        """Undo `pause`; nothing that was fetched is lost."""

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """Commit offsets of partitions that this member owns: lag tools alone read them.

        Returns at once and never raises. The next commit repeats what the broker refused.
        """

    def lag(self) -> dict[Partition, int]:
        """Records between this member's position and the end, by the client's latest statistics."""

    def close(self) -> None:
        """Leave the group at once."""


class SpanReader(Protocol):
    """Reads addresses back, apart from the group; for gradients that another worker announced."""

    def read(self, span: Span, timeout_s: float) -> Fetched:
        """All records of a span that exist, in order.

        Raises:
            ExpiredError: If the log starts above `span.start`.
            UnavailableError: If they did not come within `timeout_s`.
        """

    def close(self) -> None:
        """Let go of the connection."""


class Tail(Protocol):
    """Reads one partition from a position on: the control, updates and jobs topics."""

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """Wait up to `timeout_s` for at least one record; empty when none came.

        Also empty, and at once, where the position moved over offsets that hold no record.

        Raises:
            ExpiredError: If the position is below the log's start.
            TruncatedError: If the log ends below the position, or has lost records below it; if it
                lost them after they were read, before one is returned that took their place.
            RecreatedError: If the position names the id of another topic than has the name now;
                if it was created anew after reading began, within some seconds.
            UnknownTopicError: If there is no such partition, or it was deleted; so it stays.
            UnavailableError: If the broker is unavailable; call again.
        """

    def position(self) -> int:
        """Where it stands: no record lies between the last one returned and this offset.

        A log may end with offsets that hold none, such as the marker of a transaction, so the end
        of a log is reached where this is it; the last record may lie far below.
        """

    def close(self) -> None:
        """Read no more; other tails of the log go on."""


class Writer(Protocol):
    """An idempotent producer, acks from all in-sync replicas; order per partition is kept.

    All writers of a log share one connection, yet each waits for its own records only, fails by
    its own only, and runs its own callbacks, in its own thread.
    """

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        partition: int | None = 0,  # None: by the key, or spread evenly without one
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        on_delivered: Callable[[int | None], None] | None = None,
        on_failed: Callable[[DeliveryError], None] | None = None,
    ) -> None:
        """Queue one record; asks about a topic at its first use.

        Args:
            topic: Where to.
            value: None is a tombstone.
            partition: None: by the key, or spread evenly without one.
            key: Its key.
            headers: Its headers.
            on_delivered: Gets the record's offset; None: it is there, and nobody has said where. So
                a broker answers what it is sent again and has taken already.
            on_failed: Gets to know why this record's delivery failed for good, and the writer goes
                on; without it the writer fails.

        Raises:
            RecordTooLargeError: If no topic takes so large a record; nothing was queued, and the
                writer may go on. What only this topic does not take is told to `on_failed` later.
            DeliveryError: If an earlier record's delivery failed for good; a `BrokenWriterError`
                where another writer of the log can go on.
            UnknownTopicError: If there is no such topic.
            UnavailableError: If the broker is unavailable and the topic has never been seen, or if
                the writer does not wait and its queue is full. Nothing was queued.
        """

    @property
    def waiting_s(self) -> float:
        """Time for which records have waited, and the broker has taken none; 0 if none waits."""

    def poll(self) -> None:
        """Run the delivery callbacks that are due, in this thread, without waiting.

        Raises:
            DeliveryError: If a record's delivery failed for good.
        """

    def flush(self, timeout_s: float) -> bool:
        """Wait until all of its own is delivered and its callbacks ran; False if it took too long.

        Raises:
            DeliveryError: If a record's delivery failed for good.
        """

    def close(self) -> None:
        """Flush, and forget what does not arrive soon: it may arrive later, or never."""


class Transactions(Protocol):
    """Writes records by transactions, under a name that one process has at a time."""

    def write(self, records: Sequence[NewRecord]) -> None:
        """Write all of these or, if this process dies or fails, none; readers see them soon.

        Raises:
            UnknownTopicError: If there is no such topic; none was written.
            RecordTooLargeError: If no topic takes so large a record; none was written.
            DeliveryError: If they cannot be written, or somebody else has the name now.
            UnavailableError: If the broker is unavailable; all may have been written, or none.
        """

    def close(self) -> None:
        """Let go of the connection."""


class Log(Protocol):
    """Kafka. May be shared between threads; what it makes belongs to one thread each."""

    def create_topics(self, wanted: Sequence[NewTopic]) -> None:
        """Create those that are not there, and wait until all can be used.

        Raises:
            UnavailableError: If the broker is unavailable.
            OutsideError: If it refuses; the message says how to make them by hand.
        """

    def delete_topics(self, topics: Collection[str]) -> None:
        """Delete topics with all that they hold; those that are not there are no matter.

        Raises:
            UnavailableError: If the broker is unavailable.
            OutsideError: If it refuses one; the others are deleted.
        """

    def delete_groups(self, groups: Collection[str]) -> None:
        """Delete consumer groups, likewise.

        Raises:
            UnavailableError: If the broker is unavailable.
            OutsideError: If it refuses one, which has members.
        """

    def topics(self) -> list[str]:
        """The names of all topics that the broker tells us of.

        Raises:
            UnavailableError: If the broker is unavailable.
        """

    def settings(
        self, topics: Collection[str], refused: list[str] | None = None
    ) -> dict[str, dict[str, str]]:
        """All settings of topics, by Kafka's names, in one request.

        Topics that do not exist, or of which the broker tells nobody or not us, are missing.

        Args:
            topics: Names of the topics.
            refused: Optional. Gets a sentence for each topic whose settings we may not read.

        Raises:
            UnavailableError: If the broker is unavailable.
        """

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        """All partitions of a topic.

        Raises:
            UnknownTopicError: If there is no such topic. It is never created by asking.
            UnavailableError: If the broker is unavailable.
        """

    def bounds(self, partition: Partition) -> Bounds:
        """What the log of a partition holds now.

        Raises:
            UnknownTopicError: If there is no such partition.
            UnavailableError: If the broker is unavailable.
        """

    def ends(self, partitions: Collection[Partition]) -> Positions:
        """The offset after the last record that a reader may see, of all partitions at once.

        Those of which nobody can tell it now, or that do not exist, are missing: `partitions` of
        their topic says which. So none of them keeps the others from being known.

        Raises:
            UnavailableError: If the broker is unavailable.
        """

    def high_watermarks(self, partitions: Collection[Partition]) -> Positions:
        """The offset after the last record, of open transactions as well; otherwise as `ends`."""

    def end_positions(
        self, partitions: Collection[Partition], topics: Mapping[str, FoundTopic] | None = None
    ) -> dict[Partition, LogPosition]:
        """The same, and what is known of the logs below: such positions agree now.

        Args:
            partitions: Whose ends.
            topics: What `describe` just found; asked for by default. Positions in others have no
                id.
        """

    def starts(self, partitions: Collection[Partition]) -> Positions:
        """The first retained offset of all partitions at once; otherwise as `ends`."""

    def describe(self, topics: Collection[str]) -> dict[str, FoundTopic]:
        """What topics are, in one request; those that do not exist are missing.

        Raises:
            UnavailableError: If the broker is unavailable.
        """

    def agrees(
        self,
        positions: Mapping[Partition, LogPosition],
        ends: Mapping[Partition, LogPosition] | None = None,
    ) -> dict[Partition, int]:
        """Where logs are not any more what these positions know of them.

        A position agrees if the topic has its id, and if records of leader epochs no later than
        its own reach up to its offset, at least. What it does not know is not checked. A log that
        has expired above a position agrees.

        Args:
            positions: To compare.
            ends: What `end_positions` just found; asked for by default.

        Returns:
            For each that does not agree the offset where both part: 0 if it is another topic;
            where later leader epochs begin; the log's end. Missing are those that agree.

        Raises:
            UnknownTopicError: If there is no such partition.
            UnavailableError: If it cannot be told now of all of them.
        """

    def position_at(self, partition: Partition, timestamp_s: float) -> int:
        """The first offset whose record is not older than `timestamp_s`; the end if none is.

        Raises:
            UnknownTopicError: If there is no such partition.
            UnavailableError: If the broker is unavailable.
        """

    def spans(self) -> SpanReader:
        """Make a reader of addresses."""

    def tail(
        self,
        partition: Partition,
        position: int | LogPosition,
        on_ready: Callable[[], None] | None = None,
        *,
        prompt: bool = False,
    ) -> Tail:
        """Make a reader of one partition from a position on; all of them share a connection.

        Args:
            partition: Which.
            position: The first offset to read, and what is known of the log below.
            on_ready: Called by a thread of the log's, perhaps before this returns, each time that
                `read(n, 0.0)` comes to have something to return or to raise after it had nothing;
                perhaps more often. So whoever is called reads until nothing comes. It must be
                quick, and must not raise.
            prompt: Somebody waits for the first records: share a connection with such tails alone,
                on which fewer requests wait for news of others.
        """

    def writer(
        self,
        *,
        waits: bool = True,
        max_bytes: int = WRITER_BYTES,
        on_ready: Callable[[], None] | None = None,
    ) -> Writer:
        """Make a writer; all of them share a connection.

        Args:
            waits: Whether `append` waits while the writer's queue is full; else it raises.
            max_bytes: Records that are not delivered yet, however many, take no more; a single
                record may always be queued.
            on_ready: As of `tail`: each time that `poll` comes to have something to do.
        """

    def close(self) -> None:
        """Let go of all connections that its tails and writers share, and of what is not sent."""


class StreamLog(Log, Protocol):
    """A `Log` whose user joins consumer groups."""

    def stream(
        self, group: str, topics: Sequence[str], member: str, *, hold: bool = False
    ) -> StreamReader:
        """Join a consumer group.

        Args:
            group: The consumer group's name.
            topics: The datastreams.
            member: This member's stable name.
            hold: A static member: its partitions wait for its return (`on_preemption: hold`).
        """


class TransactionalLog(Log, Protocol):
    """A `Log` whose user writes by transactions."""

    def transactions(self, name: str) -> Transactions:
        """Write by transactions under a name.

        Whoever had the name before writes no more, and what it had begun is gone: once this
        returns, a reader sees all that was ever written under the name.

        Raises:
            UnavailableError: If the broker is unavailable.
            OutsideError: If it refuses.
        """
