"""The product's use of Kafka, as protocols: a log, its readers and its writers.

One contract suite (tests/contract) holds the client and the in-memory log to the same behaviour. An
object belongs to the thread that made it, unless its docstring says otherwise.
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

# Limits the memory of a writer whose topic accepts nothing; a job needs far less.
WRITER_BYTES = 16 << 20


class Bounds(NamedTuple):
    """First retained offset and the offset after the last record that a reader may see."""

    start: int
    end: int


# Kafka's default limit of a topic, which is above our largest record.
MESSAGE_BYTES = 1_048_588


class SchemaRegistry(Protocol):
    """The registry where producers register the schemas of their records."""

    def schema(self, number: int) -> Schema | None:
        """Return the schema of an id, which never changes; None if the registry has none.

        Raises:
            UnavailableError: If the registry gives no answer, or an unusable one.
        """


class NewTopic(NamedTuple):
    """A topic to create."""

    name: str
    partitions: int = 1
    # True if no record expires.
    kept_forever: bool = False
    # True if only the newest record of each key is kept.
    compacted: bool = False
    # Age up to which compaction leaves a record alone.
    compaction_lag_s: float = 0.0

    @property
    def settings(self) -> dict[str, str]:
        """Settings that the topic's users rely on, by Kafka's names. Others are the cluster's."""
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
    """A topic that exists."""

    # The id as text. A recreated topic has another id. Empty if the broker has no ids (before Kafka
    # 2.8, and the built-in broker).
    topic_id: str
    # Number of partitions. Their indexes start at 0.
    partitions: int


class LogRecord(NamedTuple):
    """A record of a topic that is read from a position."""

    offset: int
    key: bytes | None
    # None is a tombstone.
    value: bytes | None
    # Kafka's timestamp in seconds since 1970; 0 if unknown.
    timestamp_s: float = 0.0
    # Kafka's leader epoch of the record; -1 if unknown.
    epoch: int = -1
    headers: tuple[tuple[str, bytes], ...] = ()


class NewRecord(NamedTuple):
    """A record to be written."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    # If None, the key decides, or records are spread evenly without a key.
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Consecutive records of one partition, in offset order (offsets may have holes)."""

    partition: Partition
    offsets: list[int]
    values: list[bytes | None]
    # Kafka's timestamp of the first record.
    first_arrival_s: float
    last_arrival_s: float
    # Kafka's leader epoch of each record; -1 if unknown.
    epochs: list[int]


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """The position is below the log's start. Nothing is read until it is placed again."""

    partition: Partition
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class LogTruncated:
    """The log below the position has changed. Nothing is read until it is placed again.

    Either the log lost its last records, or its topic was deleted and recreated. Records that were
    fetched but not returned yet are dropped.
    """

    partition: Partition
    # First offset of the other log; 0 for a recreated topic.
    divergent_offset: int
    recreated: bool


@dataclass(frozen=True, slots=True)
class LogEndReached:
    """All records were returned, and the log ends above the last one.

    Its last offsets hold no record: they are transaction markers, or records of aborted
    transactions.
    """

    partition: Partition
    # The log's end. All later records are at or above it.
    position: int


StreamEvent: TypeAlias = Assigned | Revoked | Fetched | OutOfRange | LogTruncated | LogEndReached


class StreamReader(Protocol):
    """One member of the job's consumer group."""

    def poll(
        self, max_records: int, timeout_s: float, run: int | None = None
    ) -> tuple[StreamEvent, ...]:
        """Wait for events. They have the broker's order, and so have the records of a partition.

        Rebalances happen only inside this call. Once an event says that a partition is revoked or
        not yet placed, its records are never returned. Partitions with waiting records take turns,
        weighted by their lag: see `common.core.weighted_turns`.

        Args:
            max_records: Maximum number of records over all partitions.
            timeout_s: Longest wait.
            run: Maximum number of consecutive records of one partition while others have some, too.
                If None, there is no limit.

        Raises:
            UnavailableError: If the broker is unavailable. Call again.
        """

    def place(self, positions: Mapping[Partition, int | LogPosition]) -> None:
        """Read these partitions from these positions, and drop records that were fetched before.

        The first returned record of a partition is the first existing one at or after its position.
        Before that, the log is compared with the `LogPosition`. If a log loses records later, this
        is noticed before any record in their place is returned. If a topic is recreated, and the
        position has its id, this is noticed within seconds.
        """

    def pause(self) -> None:
        """Return no records until `resume`. `poll` keeps the membership."""

    def resume(self) -> None:
        """Undo `pause`. No fetched records are lost."""

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """Commit offsets of this member's partitions. Only tools that show consumer lag read them.

        Returns at once and never raises. The next commit repeats refused offsets.
        """

    def lag(self) -> dict[Partition, int]:
        """Return the number of records between position and end, as the client last knew it."""

    def close(self) -> None:
        """Leave the group at once."""


class SpanReader(Protocol):
    """Reads spans back without a group, for batches that another worker announced."""

    def read(self, span: Span, timeout_s: float) -> Fetched:
        """Return all existing records of a span, in order.

        Raises:
            ExpiredError: If the log starts above `span.start`.
            UnavailableError: If they did not arrive within `timeout_s`.
        """

    def close(self) -> None:
        """Close the connection."""


class Tail(Protocol):
    """Reads one partition from a position on, such as the control, updates and jobs topics."""

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """Wait up to `timeout_s` for records; return an empty list if none arrived.

        The list is empty at once if the position moved over offsets without records.

        Raises:
            ExpiredError: If the position is below the log's start.
            TruncatedError: If the log ends below the position, or has lost records below it. If it
                loses them after they were read, the error comes before any record in their place.
            RecreatedError: If the position has the id of another topic than the name has now. If
                the topic is recreated after reading began, the error comes within seconds.
            UnknownTopicError: If the partition does not exist or was deleted. This is final.
            UnavailableError: If the broker is unavailable. Call again.
        """

    def position(self) -> int:
        """Return the position: no record lies between the last returned one and this offset.

        A log may end with offsets that hold no record, such as a transaction's marker. So its end
        is reached when the position is the end; the last record may be far below.
        """

    def close(self) -> None:
        """Stop reading. Other tails of the log continue."""


class Writer(Protocol):
    """An idempotent producer with acks from all in-sync replicas. Keeps order per partition.

    All writers of a log share one connection. Each writer waits only for its own records, fails
    only by them, and runs its own callbacks in its own thread.
    """

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        partition: int | None = 0,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        on_delivered: Callable[[int | None], None] | None = None,
        on_failed: Callable[[DeliveryError], None] | None = None,
    ) -> None:
        """Queue one record. The topic is checked at its first use.

        Args:
            topic: Topic to write to.
            value: None is a tombstone.
            partition: If None, the key decides, or records are spread evenly without a key.
            key: Key of the record.
            headers: Headers of the record.
            on_delivered: Called with the record's offset. None means that the record arrived at an
                unknown offset, which is a broker's answer to a repeated record.
            on_failed: Called with the error if this record's delivery failed for good; the writer
                continues. Without it, the writer fails.

        Raises:
            RecordTooLargeError: If no topic accepts a record of this size. Nothing was queued, and
                the writer may continue. If only this topic refuses it, `on_failed` is called later.
            DeliveryError: If an earlier record's delivery failed for good. It is a
                `BrokenWriterError` if another writer of the log can continue.
            UnknownTopicError: If the topic does not exist.
            UnavailableError: If the broker is unavailable and the topic has never been seen, or if
                the writer does not wait and its queue is full. Nothing was queued.
        """

    @property
    def waiting_s(self) -> float:
        """Time that records have waited while the broker accepted none; 0 if no record waits."""

    def poll(self) -> None:
        """Run due delivery callbacks in this thread, without waiting.

        Raises:
            DeliveryError: If a record's delivery failed for good.
        """

    def flush(self, timeout_s: float) -> bool:
        """Wait until all records are delivered and callbacks have run; False on timeout.

        Raises:
            DeliveryError: If a record's delivery failed for good.
        """

    def close(self) -> None:
        """Flush, and abandon records that do not arrive soon: they may arrive later, or never."""


class Transactions(Protocol):
    """Writes records in transactions, under a name that one process has at a time."""

    def write(self, records: Sequence[NewRecord]) -> None:
        """Write all of these records or, if this process dies or fails, none.

        Raises:
            UnknownTopicError: If a topic does not exist. Nothing was written.
            RecordTooLargeError: If no topic accepts a record of this size. Nothing was written.
            DeliveryError: If the records cannot be written, or another process has the name now.
            UnavailableError: If the broker is unavailable. All records may have been written, or
                none.
        """

    def close(self) -> None:
        """Close the connection."""


class Log(Protocol):
    """Kafka. Safe to use from several threads, but each object it makes belongs to one thread."""

    def create_topics(self, wanted: Sequence[NewTopic]) -> None:
        """Create missing topics, and wait until all are usable.

        Raises:
            UnavailableError: If the broker is unavailable.
            OutsideError: If it refuses. The message says how to create them by hand.
        """

    def delete_topics(self, topics: Collection[str]) -> None:
        """Delete topics and their records. Missing topics are no error.

        Raises:
            UnavailableError: If the broker is unavailable.
            OutsideError: If it refuses to delete one. The others are deleted.
        """

    def delete_groups(self, groups: Collection[str]) -> None:
        """Delete consumer groups. Missing groups are no error.

        Raises:
            UnavailableError: If the broker is unavailable.
            OutsideError: If it refuses to delete one, because it has members.
        """

    def topics(self) -> list[str]:
        """Return the names of all topics that we may see.

        Raises:
            UnavailableError: If the broker is unavailable.
        """

    def settings(
        self, topics: Collection[str], refused: list[str] | None = None
    ) -> dict[str, dict[str, str]]:
        """Return all settings of topics, by Kafka's names, in one request.

        Topics are left out if they do not exist, or if the broker does not return their settings,
        to us or at all.

        Args:
            topics: Names of the topics.
            refused: Optional. Receives a sentence for each topic whose settings we may not read.

        Raises:
            UnavailableError: If the broker is unavailable.
        """

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        """Return all partitions of a topic.

        Raises:
            UnknownTopicError: If the topic does not exist. The request never creates it.
            UnavailableError: If the broker is unavailable.
        """

    def bounds(self, partition: Partition) -> Bounds:
        """Return the current bounds of a partition's log.

        Raises:
            UnknownTopicError: If the partition does not exist.
            UnavailableError: If the broker is unavailable.
        """

    def ends(self, partitions: Collection[Partition]) -> Positions:
        """Return the offset after the last visible record, for all partitions at once.

        A partition is left out if its end is unknown, or if it does not exist, so that the ends of
        the others are still returned. Use `partitions` to see if it exists.

        Raises:
            UnavailableError: If the broker is unavailable.
        """

    def high_watermarks(self, partitions: Collection[Partition]) -> Positions:
        """Return the offset after the last record, even of an open transaction; else as `ends`."""

    def end_positions(
        self, partitions: Collection[Partition], topics: Mapping[str, FoundTopic] | None = None
    ) -> dict[Partition, LogPosition]:
        """Return the ends with topic ids and epochs, as positions that agree with the logs now.

        Args:
            partitions: The partitions.
            topics: Optional. Result of `describe`. If unset, it is requested. A position has no id
                if its topic is not in the result.
        """

    def starts(self, partitions: Collection[Partition]) -> Positions:
        """Return the first retained offset of all partitions at once; otherwise as `ends`."""

    def describe(self, topics: Collection[str]) -> dict[str, FoundTopic]:
        """Return ids and sizes of topics, in one request; missing topics are left out.

        Raises:
            UnavailableError: If the broker is unavailable.
        """

    def agrees(
        self,
        positions: Mapping[Partition, LogPosition],
        ends: Mapping[Partition, LogPosition] | None = None,
    ) -> dict[Partition, int]:
        """Compare logs with positions, and return where they diverge.

        A position agrees if the topic has its id, and if records of leader epochs no later than its
        own reach at least up to its offset. Parts of a position that are unknown are not checked. A
        position also agrees if retention has deleted everything up to it and beyond.

        Args:
            positions: The positions to compare.
            ends: Optional. Result of `end_positions`. If unset, it is requested.

        Returns:
            For each position that does not agree, the offset at which the log diverges from it: 0
            for another topic, otherwise the beginning of later leader epochs, or the log's end.

        Raises:
            UnknownTopicError: If a partition does not exist.
            UnavailableError: If one of the answers is not available now.
        """

    def position_at(self, partition: Partition, timestamp_s: float) -> int:
        """Return the first offset whose record is not older than `timestamp_s`; else the end.

        Raises:
            UnknownTopicError: If the partition does not exist.
            UnavailableError: If the broker is unavailable.
        """

    def spans(self) -> SpanReader:
        """Make a reader of spans."""

    def tail(
        self,
        partition: Partition,
        position: int | LogPosition,
        on_ready: Callable[[], None] | None = None,
        *,
        prompt: bool = False,
    ) -> Tail:
        """Make a reader of one partition from a position on. All tails share a connection.

        Args:
            partition: The partition.
            position: The first offset to read, and what is known of the log below.
            on_ready: Called by a thread of the log, perhaps before this returns, whenever `read(n,
                0.0)` has something to return or raise after it had nothing, and perhaps more often.
                So read until nothing comes. The callback must be quick, and must not raise.
            prompt: True if a caller waits for the first records. The tail then shares a connection
                with other prompt tails only. So its first request seldom waits behind one that
                waits for another tail's records.
        """

    def writer(
        self,
        *,
        waits: bool = True,
        max_bytes: int = WRITER_BYTES,
        on_ready: Callable[[], None] | None = None,
    ) -> Writer:
        """Make a writer. All writers share a connection.

        Args:
            waits: True if `append` waits while the writer's queue is full. Otherwise it raises.
            max_bytes: Limit of undelivered bytes. If no record is queued, one of any size is
                accepted.
            on_ready: As for `tail`: called whenever `poll` has something to do.
        """

    def close(self) -> None:
        """Close all connections of its tails and writers, and drop unsent records."""


class StreamLog(Log, Protocol):
    """A `Log` whose user joins consumer groups."""

    def stream(
        self, group: str, topics: Sequence[str], member: str, *, hold: bool = False
    ) -> StreamReader:
        """Join a consumer group.

        Args:
            group: Name of the group.
            topics: The datastreams.
            member: Stable name of this member.
            hold: True for a static member: its partitions wait for its return (`on_preemption:
                hold`).
        """


class TransactionalLog(Log, Protocol):
    """A `Log` whose user writes in transactions."""

    def transactions(self, name: str) -> Transactions:
        """Write in transactions under a name.

        The name's previous owner can write no more, and its open transaction is aborted: once this
        returns, readers see everything that was ever written under the name.

        Raises:
            UnavailableError: If the broker is unavailable.
            OutsideError: If it refuses.
        """
