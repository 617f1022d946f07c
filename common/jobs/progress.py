"""State and progress of a job: one view, folded from its history, for every program that shows it.

The page, the API, its metrics and the command line all use this fold, so they cannot disagree, not
even while one leader takes over from another. It is pure: events (records of the control and the
updates topic) are fed, the current situation (the board, the ends of the logs) is observed, and
times are arguments. The two topics are folded separately, so their relative order does not matter.

    first             settled                claimed              end
      |-- in updates that -|-- batches accepted,  -|-- nobody has -----|
      |   count, or given  |   in no update yet    |   claimed it      |
      |   up               |<-------------- lag ---------------------->|

`common.core.history` decides which updates count, `common.core.ledger` which claims. If the
beginning of a topic is missing (retention, the small log of an embedded broker) or was not read,
counts cover only the rest, `whole` is False, and the lag comes from the leader's status.

`docs/reference/job-states.md` defines the names of a job's states, and when each applies.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET
from pydantic import BaseModel, Field

from common.core.ledger import Ledger
from common.core.liveness import (
    EVALUATOR,
    MISSING_SCHEMA,
    OUTAGE,
    TURN,
    WORKER,
    Device,
    OutageNotice,
)
from common.core.messages import (
    AuditRecord,
    Batch,
    BatchReady,
    ControlRecord,
    Drifted,
    Evaluated,
    Lead,
    LeaderStatus,
    Opened,
    Positions,
    Quarantined,
    Requeued,
    Skipped,
    SpanExpired,
    SynchronisationMode,
    Synchrony,
    UpdateApplied,
)
from common.core.partial_history import PartialHistory
from common.core.scores import WINDOWED
from common.core.settings import slices_of
from common.core.snapshots import genesis
from common.core.spans import LogPosition, Partition, Span
from common.core.thinned_samples import Thinned
from common.jobs.notes import window_note

if TYPE_CHECKING:
    from common.jobs.store import JobRecord

# Fields of the API's responses.
Count = Annotated[int, Field(ge=0)]
Stream = Annotated[str, Field(description="Kafka topic of the data stream.", examples=["clinic-a"])]

# --- states --------------------------------------------------------------------------------------

Word: TypeAlias = Literal[
    "running",
    "waiting for a server",
    "waiting for a coordinator",
    "waiting for workers",
    "waiting for records",
    "paused",
    "held",
    "degraded",
    "drained",
    "finished",
    "stopped",
]
# Time without an update after which a job counts as idle. A shorter time would make the state
# flicker if a stream is slow; a longer time would leave the state outdated.
QUIET_S = 3.0
# Number of the last records over which the share of skipped or quarantined ones is computed.
RECENT_RECORDS = 10_000
# The same for a single stream, because a slow stream would not show among all records.
TOPIC_RECORDS = 1_000
# Number of reasons that are shown, the most frequent ones.
_REASONS = 3
# A larger share of skipped or quarantined records is more than stray bad records.
DEGRADED_SHARE = 0.01
_REASON_CHARACTERS = 100
_SERVERS = {
    "kafka": "Kafka",
    "redis": "Redis",
    "storage": "object storage",
    "schema_registry": "the schema registry",
}
# Servers without which nothing is learned.
_NEEDED = ("kafka", "redis")
# Maximum number of digits of a time: enough until the year 5138.
_MOST_DIGITS = 11


class State(NamedTuple):
    """State of a job, in the words of `docs/reference/job-states.md`."""

    word: Word
    # One line.
    why: str


def _outage_sentence(server: str, met: Sequence[tuple[str, OutageNotice]]) -> str:
    """Return a sentence about a server that some processes cannot use.

    Args:
        server: Key of `_SERVERS`.
        met: These processes by name, "" for this one, each with its notice.
    """
    names = [process for process, _ in met]
    who = "" if "" in names else f" to {', '.join(names)}"
    name = _SERVERS.get(server, server)
    return f"{name} is unavailable{who} since {_since(met)}: {_bare(name, met[0][1].reason)}"


def _is_time(text: str) -> bool:
    """True for whole seconds since 1970; a writer to Redis may have sent other text."""
    return len(text) <= _MOST_DIGITS and text.isascii() and text.isdecimal()


def _bare(name: str, reason: str) -> str:
    return reason.removeprefix(f"{name} is unavailable: ")


def _since(met: Sequence[tuple[str, OutageNotice]]) -> str:
    at = datetime.fromtimestamp(min(notice.since_s for _, notice in met), UTC)
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


UNREAD = State("running", "its history is still being read")


def resting(record: JobRecord) -> State | None:
    """Return the state of a job that is not to run, from its record alone; None if it is to run."""
    match record.wanted:
        case "stopped":
            return State("finished" if record.finished else "stopped", record.reason)
        case "paused":
            return State("held" if record.held else "paused", record.reason)
        case "running":
            return None


# --- observations --------------------------------------------------------------------------------


class JobObservation(NamedTuple):
    """State of the board and the streams at one time; None if not known."""

    at_s: float
    # Status by worker, of workers that send heartbeats.
    statuses: Mapping[str, str] | None = None
    leader_status: LeaderStatus | None = None
    # True if a coordinator has the leader's lease.
    led: bool | None = None
    # Why the board did not answer.
    board_away: str = ""
    # Outages of the observing process, by server.
    outages: Mapping[str, OutageNotice] = {}
    # High watermarks of the streams' partitions.
    ends: Mapping[Partition, int] | None = None
    # Last stable offsets of the same partitions. If one is missing, it is the high watermark.
    stable: Mapping[Partition, int] = {}
    # First available offsets of the same partitions.
    starts: Mapping[Partition, int] | None = None
    # Workers that wait for a schema, each with its status, a key of `MISSING_SCHEMA`.
    waiting: Mapping[str, str] = {}
    # Workers that have fewer records than `min_batch`.
    too_few: tuple[str, ...] = ()
    # Reasons why processes cannot do their part of the job, by name of the process.
    unable: Mapping[str, str] = {}
    # Devices of workers that report one.
    devices: Mapping[str, Device] = {}


# --- effective updates ----------------------------------------------------------------------------

# Number of updates that are kept individually, for pages of updates: five times the points of a
# curve. A rollback goes back far less. Each takes about 150 bytes.
KEPT = 10_000
KEPT_SWITCHES = 200
# Number of points of a curve: as wide as a page, more could not be distinguished.
POINTS = 2_000


class UpdateRow(msgspec.Struct, frozen=True, array_like=True):
    """An effective update."""

    version: int
    epoch: int
    at_s: float | None
    samples: int
    batches: int
    loss: float
    gradient_s: float | None
    revision: int
    short: str
    metrics: dict[str, float]
    # See `UpdateApplied`.
    measured: dict[str, int]
    mode: SynchronisationMode
    # Number of updates between the weights of its oldest gradient and itself.
    stale: int
    # Progress up to this update, in updates of the job's own K.
    progress: float
    # Sums over this update and all before it.
    all_samples: int
    all_batches: int
    # Number of offsets in the spans of all these batches, by stream.
    all_offsets: tuple[int, ...]
    # Number of gradients that were computed in parts for lack of memory.
    all_cut: int


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(UpdateRow).decode


class Updates:
    """Effective updates, by version.

    version        41  42  43  44          a Lead takes back what is above 42
    kept           [0] [1] [2] [3]         then [2] and [3] are gone, and so are their samples

    Versions have no gaps, so a version is an index. Sums also cover effective updates that are no
    longer kept.

    Attributes:
        version: The last version that was made.
        newest: Update of the last version. After a rollback to a version that is no longer kept,
            the newest earlier one on the curve, or None.
        switches: The last updates whose mode differs from that of the update before.

    Args:
        streams: Streams of the job.
    """

    def __init__(self, streams: Sequence[str]) -> None:
        self._streams = streams
        self._kept = deque[bytes](maxlen=KEPT)
        self.clear(0)

    def clear(self, version: int) -> None:
        """Reset; the next update is the one after `version`."""
        self.version = version
        self.newest: UpdateRow | None = None
        self._kept.clear()
        self._curve = Thinned[bytes](POINTS)
        self.switches = deque[UpdateRow](maxlen=KEPT_SWITCHES)

    @property
    def oldest(self) -> int | None:
        """First version that is still kept; None without one."""
        return self.version - len(self._kept) + 1 if self._kept else None

    @property
    def last_at_s(self) -> float | None:
        """Time at which the newest update was written, in seconds since 1970."""
        return self.newest.at_s if self.newest else None

    @property
    def samples(self) -> int:
        """Number of samples in all effective updates."""
        return self.newest.all_samples if self.newest else 0

    @property
    def batches(self) -> int:
        """Number of batches in all effective updates."""
        return self.newest.all_batches if self.newest else 0

    @property
    def cut(self) -> int:
        """Number of gradients in all effective updates that were computed in parts."""
        return self.newest.all_cut if self.newest else 0

    @property
    def offsets(self) -> Counter[str]:
        """Number of offsets in the spans of all these batches, by stream."""
        known = self.newest.all_offsets if self.newest else ()
        return Counter(dict(zip(self._streams, known, strict=False)))

    def append(self, update: UpdateApplied, at_s: float | None) -> None:
        """Add the next version.

        Args:
            update: An effective update.
            at_s: Time at which it was written, in seconds since 1970; None if not known.
        """
        before = self.newest
        lengths = _lengths(span for batch in update.batches for span in batch.address)
        self.version = update.version
        self.newest = UpdateRow(
            *(update.version, update.epoch, at_s, update.samples, len(update.batches)),
            *(update.loss, update.gradient_s or None, update.revision, update.short),
            *(update.metrics, update.measured or {}, update.mode, update.staleness),
            update.progress,
            self.samples + update.samples,
            self.batches + len(update.batches),
            tuple(self.offsets[stream] + lengths[stream] for stream in self._streams),
            self.cut + (update.cut or 0),
        )
        if before and before.mode != update.mode:
            self.switches.append(self.newest)
        self._kept.append(packed := _pack(self.newest))
        self._curve.add(packed)

    def take_back(self, version: int) -> bool:
        """Drop all updates above a version.

        Returns:
            False if the update of this version is no longer kept, so that sums end before it.
        """
        while self.switches and self.switches[-1].version > version:
            self.switches.pop()
        for _ in range(min(self.version - version, len(self._kept))):
            self._kept.pop()
        self._curve.take_back(lambda row: _unpack(row).version <= version)
        left = self._kept or self._curve.samples()
        self.newest, self.version = _unpack(left[-1]) if left else None, version
        return self.newest is None or self.newest.version == version

    def rows(self, first: int, last: int) -> list[UpdateRow]:
        """Return updates from one version to another, both included, as far as they are kept."""
        before = self.version - len(self._kept)
        places = range(max(0, first - before - 1), min(len(self._kept), last - before))
        return [_unpack(self._kept[place]) for place in places]

    def curve(self) -> list[UpdateRow]:
        """Return the first update, the newest, and others at equal steps in between."""
        return [*map(_unpack, self._curve.samples())]


def _lengths(spans: Iterable[Span]) -> Counter[str]:
    """Return the number of offsets in spans, by stream."""
    lengths = Counter[str]()
    for span in spans:
        lengths[span.topic] += span.end - span.start
    return lengths


# --- rates ----------------------------------------------------------------------------------------

# Window of rates: long enough to contain some updates, short enough to show a change.
WINDOW_S = 10.0
# A rate over a shorter time would be noise.
_LEAST_S = 1.0


class RecentRates:
    """Updates of the last `WINDOW_S` seconds, without those that were taken back."""

    def __init__(self) -> None:
        self._made = deque[tuple[float, UpdateApplied]]()
        # Time of the first update ever.
        self._first_s: float | None = None

    def add(self, update: UpdateApplied, at_s: float) -> None:
        """Add an update that was made, or first seen, at this time."""
        self._first_s = at_s if self._first_s is None else min(self._first_s, at_s)
        self._forget(at_s)
        self._made.append((at_s, update))

    def take_back(self, version: int) -> None:
        """Drop all updates above a version."""
        while self._made and self._made[-1][1].version > version:
            self._made.pop()

    def rates(self, now: float) -> tuple[float | None, float | None]:
        """Return updates and samples per second, over the window or since the first update."""
        self._forget(now)
        if self._first_s is None:
            return None, None
        span_s = min(WINDOW_S, max(_LEAST_S, now - self._first_s))
        samples = sum(update.samples for _, update in self._made)
        return len(self._made) / span_s, samples / span_s

    def samples_of(self, now: float) -> Counter[str]:
        """Return samples in the window, by worker."""
        self._forget(now)
        samples = Counter[str]()
        for _, update in self._made:
            for batch in update.batches:
                samples[batch.worker] += batch.samples
        return samples

    def _forget(self, now: float) -> None:
        while self._made and self._made[-1][0] > now + WINDOW_S:
            # The clock was set back, so these updates would stay in the window for long.
            self._made.pop()
        while self._made and self._made[0][0] < now - WINDOW_S:
            self._made.popleft()


# --- claims ---------------------------------------------------------------------------------------


_NONE = Counter[str]()


class RecentSkips:
    """Number of the last records that did not decode, and why.

    Args:
        records: Number of records to look back at. Only whole batches are kept: the newest ones
            that together have at least this many records.
    """

    def __init__(self, records: int) -> None:
        self._kept = records
        self._batches = deque[tuple[int, Counter[str]]]()
        self.records = self.skipped = 0
        self._reasons = Counter[str]()

    def add(self, records: int, reasons: Counter[str]) -> None:
        """Add a batch: its number of records, and the reasons of those that did not decode."""
        self._batches.append((records, reasons))
        self.records += records
        if reasons:
            self.skipped += reasons.total()
            self._reasons.update(reasons)
        while self.records - self._batches[0][0] >= self._kept:
            records, reasons = self._batches.popleft()
            self.records -= records
            self.skipped -= sum(reasons.values())
            for reason, count in reasons.items():
                self._reasons[reason] -= count
                if not self._reasons[reason]:
                    del self._reasons[reason]

    def summary(self) -> str:
        """Return the most frequent reasons in one line; empty if none is known."""
        found = [(why, count) for why, count in self._reasons.most_common() if why][:_REASONS]
        return "; ".join(f"{count:,} {_one_line(why)}" for why, count in found)


def _one_line(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= _REASON_CHARACTERS else f"{text[: _REASON_CHARACTERS - 3]}..."


class Claims:
    """Fold of the control topic: how far the streams are claimed, and in how many batches.

    Args:
        first: First position of every partition of the job.
        known: Known state of their logs at these positions, at the job's submission.
        whole: True if all claims are fed. Otherwise no claim can be decided, and skipped records
            are known from updates alone.
    """

    def __init__(
        self,
        first: Positions,
        known: Mapping[Partition, LogPosition] | None = None,
        *,
        whole: bool,
    ) -> None:
        self._ledger = Ledger.of(genesis(first, known)) if whole else None
        # Number of accepted batches that need an update.
        self.batches = 0
        # Number of offsets in the spans of these batches, by stream.
        self.offsets = Counter[str]()
        # Number of records of accepted batches that did not decode, by stream.
        self.skipped = Counter[str]()
        # Number of records that were deleted before any worker read them.
        self.expired = 0
        # Number of offsets that the log had when they were claimed for batches, and then lost.
        self._lost = 0
        # First claimed offset of each partition, in the topic that exists now.
        self._begun = dict(first)
        # Spans that were claimed without a batch, as far as the log still has them.
        self._unread = dict[Partition, list[Span]]()
        self.recent = RecentSkips(RECENT_RECORDS)
        # Recent skips of each stream.
        self.recent_of = dict[str, RecentSkips]()
        # Offsets of batches in the last updates. After a rollback, a batch comes again in another
        # update.
        self._used = dict[int, None]()

    @property
    def known(self) -> bool:
        """True if claims can be decided."""
        return self._ledger is not None

    @property
    def claimed(self) -> Positions:
        """Positions below which every record is in exactly one accepted batch or has expired."""
        return {} if self._ledger is None else self._ledger.claimed

    def lost(self, given_up: Iterable[Batch]) -> int:
        """Return the number of records that Kafka lost after training, as `doll audit` counts them.

        A waiting batch whose records are lost is counted, too, until the leader quarantines it as
        expired, which it does at once.

        Args:
            given_up: Quarantined batches, which were not trained.
        """
        if self._ledger is None or not self._lost:
            return 0
        parts = (self._ledger.lost_part(span) for batch in given_up for span in batch.address)
        return self._lost - _lengths(part for part in parts if part is not None).total()

    def feed(self, offset: int, record: ControlRecord | None) -> None:
        """Fold the record at `offset` (None if it does not parse).

        Raises:
            ValueError: If `offset` was fed before.
        """
        if self._ledger is None:
            return
        if isinstance(record, Opened):
            self._open(self._ledger, offset, record)
            return
        decision = self._ledger.decide(offset, record)
        if not decision.accepted:
            return
        if isinstance(record, SpanExpired):
            self.expired += _lengths(record.address).total()
        if isinstance(record, BatchReady | SpanExpired) and decision.batch is None:
            for span in record.address:
                self._unread.setdefault(span.place, []).append(span)
        if not isinstance(record, BatchReady):
            return
        lengths = _lengths(record.address)
        if decision.batch is not None:
            self.batches += 1
            self.offsets += lengths
        self._take(record.samples, _skips(record.skipped), lengths)

    def use(self, update: UpdateApplied) -> None:
        """Count skipped records from an update, if claims cannot be decided."""
        if self._ledger is not None:
            return
        seen = [batch.offset in self._used for batch in update.batches]
        self._used |= dict.fromkeys(batch.offset for batch in update.batches)
        while len(self._used) > RECENT_RECORDS:
            del self._used[next(iter(self._used))]
        if any(seen):
            # After a rollback, this update was made again from the same records.
            return
        # An update does not have the reasons.
        skipped = {stream: Counter({"": count}) for stream, count in update.skipped.items()}
        spans = (span for batch in update.batches for span in batch.address)
        self._take(update.samples, skipped, _lengths(spans))

    def _open(self, ledger: Ledger, offset: int, opened: Opened) -> None:
        """Count the claimed offsets that a partition's new log no longer has."""
        place, start = opened.partition, opened.start
        known = ledger.known.get(place, LogPosition(ledger.claimed.get(place, start)))
        if not ledger.decide(offset, opened).accepted:
            return
        begun = self._begun.get(place, start)
        recreated = "" != known.topic_id != opened.topic_id != ""
        since = begun if recreated else max(start, begun)
        unread = self._unread.pop(place, [])
        self._lost += max(known.offset - since, 0) - sum(
            max(min(span.end, known.offset) - max(span.start, since), 0) for span in unread
        )
        self._unread[place] = [
            span._replace(end=min(span.end, since)) for span in unread if span.start < since
        ]
        self._begun[place] = start if recreated else min(start, begun)

    def _take(self, samples: int, skipped: dict[str, Counter[str]], offsets: Counter[str]) -> None:
        """Add a batch, or all batches of an update.

        Args:
            samples: Number of records that decoded.
            skipped: Records that did not decode, by stream and reason.
            offsets: Number of offsets in the spans, by stream.
        """
        of_all = sum(reasons.total() for reasons in skipped.values())
        records = samples + of_all
        self.recent.add(records, Counter({"": of_all}) if of_all else _NONE)
        for stream, bad in skipped.items():
            self.skipped[stream] += bad.total()
        for stream, count in offsets.items():
            if stream not in self.recent_of:
                self.recent_of[stream] = RecentSkips(TOPIC_RECORDS)
            # An offset may have no record. With a single stream the number of records is known.
            of_stream = records if len(offsets) == 1 else count
            self.recent_of[stream].add(of_stream, skipped.get(stream, _NONE))


def _skips(skipped: Iterable[Skipped]) -> dict[str, Counter[str]]:
    """Return the number of records that did not decode, by stream and reason."""
    found = dict[str, Counter[str]]()
    for each in skipped:
        found.setdefault(each.topic, Counter())[each.reason] += each.records
    return found


# --- the datastreams ------------------------------------------------------------------------------

# Time without an answer after which the ends count as unknown.
_STALE_S = 10.0


class StreamAnswer(BaseModel):
    """A data stream of a job, and the job's progress in it."""

    stream: Stream
    partitions: Count = Field(description="Number of partitions of the stream that the job reads.")
    rate_per_s: float | None = Field(
        description="Rate at which records arrive in the stream, in records per second; null if"
        " unknown."
    )
    lag: Count | None = Field(
        description="Number of records in the stream that no update of the model contains yet;"
        " null if unknown."
    )
    settled: Count | None = Field(
        description="Number of records of the stream that are finished (trained, skipped, deleted"
        " by Kafka, or in quarantine) and covered by a checkpoint; null if unknown."
    )
    dead_lettered: Count = Field(
        description="Number of records of the stream that the model was not trained on, because"
        " they could not be decoded or their batch is in quarantine."
    )


def partitions_of(record: JobRecord, claimed: Positions) -> set[Partition]:
    """Return the partitions of a job: those at its submission, and those added since.

    Args:
        record: The job.
        claimed: Positions from its leader's status or the control topic; may be empty.
    """
    return {*record.first, *(each for each in claimed if each.topic in record.spec.streams)}


class Ends:
    """Ends of a job's streams, from polls.

    Args:
        names: Streams in the order of the job's specification.
        first: First position of each partition of the job.
    """

    def __init__(self, names: Sequence[str], first: Positions) -> None:
        self.names = tuple(names)
        self.first = dict(first)
        self.places: dict[str, list[Partition]] = {name: [] for name in names}
        for place in sorted(first):
            self.places[place.topic].append(place)
        # None if not known.
        self.ends: Positions | None = None
        # Starts in the last answer. They never decrease.
        self.starts: Positions = {}
        self._at_s = 0.0
        # Recent polls: the time, and for each stream the sum of its partitions' ends.
        self._grown = deque[tuple[float, tuple[int, ...]]]()

    def look(
        self,
        now: float,
        ends: Mapping[Partition, int] | None,
        starts: Mapping[Partition, int] | None = None,
    ) -> None:
        """Add the result of a poll, in which new partitions may appear.

        Args:
            now: Seconds since 1970.
            ends: High watermarks; None if Kafka did not answer.
            starts: First available offsets; None if they were not polled.
        """
        if starts is not None:
            self.starts = dict(starts)
        if ends is not None:
            for place in sorted(ends.keys() - self.first.keys()):
                self.first[place] = 0
                insort(self.places[place.topic], place)
            self.ends, self._at_s = dict(ends), now
            sums = [sum(ends.get(place, 0) for place in self.places[name]) for name in self.names]
            self._grown.append((now, tuple(sums)))
            while len(self._grown) > 2 and self._grown[1][0] <= now - WINDOW_S:
                self._grown.popleft()
        elif now - self._at_s > _STALE_S:
            self.ends = None

    def beyond(self, positions: Mapping[Partition, int]) -> list[int] | None:
        """Return the number of records from positions on, by stream, without deleted ones.

        A partition without a position counts from its first one.
        """
        ends = self.ends
        if ends is None:
            return None
        there = {place: max(self.starts.get(place, 0), at) for place, at in self.first.items()}
        for place, at in positions.items():
            there[place] = max(self.starts.get(place, 0), at)
        return [
            sum(max(0, ends.get(place, 0) - there[place]) for place in self.places[name])
            for name in self.names
        ]

    def between(self, lower: Mapping[Partition, int], upper: Mapping[Partition, int]) -> list[int]:
        """Return the number of records between two sets of positions, by stream."""
        return [
            sum(
                max(0, upper.get(place, 0) - lower.get(place, self.first[place]))
                for place in self.places[name]
            )
            for name in self.names
        ]

    def rates(self) -> list[float | None]:
        """Return arrivals per second over the last `WINDOW_S` seconds, by stream."""
        if self.ends is None or len(self._grown) < 2:
            return [None] * len(self.names)
        (since_s, before), (until_s, after) = self._grown[0], self._grown[-1]
        if until_s - since_s < _LEAST_S:
            return [None] * len(self.names)
        pairs = zip(before, after, strict=True)
        return [max(0, last - first) / (until_s - since_s) for first, last in pairs]


# --- open transactions ----------------------------------------------------------------------------

# Age from which an open transaction is shown. Every transactional producer has short ones.
_LASTING_S = 10.0
# Number of partitions that are shown, those with the oldest open transactions.
_SHOWN_PARTITIONS = 3


class HeldBack(NamedTuple):
    """Offsets of a partition that no reader receives until a transaction ends."""

    # The last stable offset, which is the first of these offsets.
    stable: int
    # Number of offsets from there to the high watermark.
    offsets: int
    # Time of the first poll that found the last stable offset at this value.
    since_s: float


def held_back(
    look: JobObservation, before: Mapping[Partition, HeldBack]
) -> dict[Partition, HeldBack]:
    """Return the partitions whose last stable offset is below the high watermark."""
    found = dict[Partition, HeldBack]()
    for place, end in (look.ends or {}).items():
        stable, known = look.stable.get(place, end), before.get(place)
        if stable < end:
            since_s = look.at_s if known is None or known.stable != stable else known.since_s
            found[place] = HeldBack(stable, end - stable, since_s)
    return found


def lasting(held: Mapping[Partition, HeldBack], now: float) -> str:
    """Return a text about lasting open transactions, oldest first; empty without one."""
    parts = list[str]()
    oldest = sorted(held.items(), key=lambda each: (each[1].since_s, each[0]))
    for place, (stable, offsets, since_s) in oldest:
        if (age_s := now - since_s) >= _LASTING_S:
            age = f"{int(age_s)} seconds" if age_s < 120 else f"{int(age_s / 60):,} minutes"
            what = f"holds back {_counted(offsets, 'offset')}, for {age}"
            parts.append(f"an open transaction at {place}@{stable} {what}")
    if (more := len(parts) - _SHOWN_PARTITIONS) > 0:
        parts[_SHOWN_PARTITIONS:] = [_counted(more, "more partition")]
    return "; ".join(parts)


def _spread(count: int, room: Sequence[int]) -> list[int]:
    """Distribute a count over places in proportion to their room, and never beyond it."""
    total = sum(room)
    count = min(count, total)
    ends = [count * seen // max(total, 1) for seen in accumulate(room, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


# --- evaluations ----------------------------------------------------------------------------------

KEPT_TESTS = POINTS
# Number of evaluations on new records that are kept for each stream.
KEPT_PREDICTIONS = 400
KEPT_DRIFTS = 200


class Evaluations:
    """Evaluations of effective versions, by version."""

    def __init__(self, streams: Iterable[str]) -> None:
        self._tests = Thinned[Evaluated](KEPT_TESTS)
        self._predictions = {stream: Thinned[Evaluated](KEPT_PREDICTIONS) for stream in streams}
        self.drifts = deque[Drifted](maxlen=KEPT_DRIFTS)

    @property
    def tests(self) -> list[Evaluated]:
        """Evaluations on the test set."""
        return self._tests.samples()

    @property
    def predictions(self) -> dict[str, list[Evaluated]]:
        """Evaluations on new records, by stream."""
        return {
            name: found for name, each in self._predictions.items() if (found := each.samples())
        }

    def feed(self, record: Evaluated | Drifted) -> None:
        """Add an evaluation of an effective version."""
        if isinstance(record, Drifted):
            self.drifts.append(record)
            return
        parts = [self._predictions[each] for each in record.prequential.keys() & self._predictions]
        for series in (*([self._tests] if record.test else ()), *parts):
            # Several evaluators may report the same version.
            if not (known := series.samples()) or known[-1].model.version < record.model.version:
                series.add(record)

    def take_back(self, version: int) -> None:
        """Drop all evaluations of later versions."""
        for series in (self._tests, *self._predictions.values()):
            series.take_back(lambda record: record.model.version <= version)
        while self.drifts and self.drifts[-1].model.version > version:
            self.drifts.pop()


# --- one job --------------------------------------------------------------------------------------

# Number of updates over which the current loss and metrics are averaged.
SHOWN_UPDATES = 20


class SynchronyAnswer(BaseModel):
    """Synchronisation between workers: batches per update, and age of their gradients."""

    mode: SynchronisationMode = Field(
        description="Mode of synchronisation between workers: one of the values of"
        " `synchronisation.mode` in a job file."
    )
    group_size: Count = Field(description="Number of batches per update of the model (K).")
    staleness: Count = Field(
        description="Maximum staleness (s): number of updates that may lie between the weights"
        " that a gradient was computed with and the update that contains the gradient."
    )


class Numbers(BaseModel):
    """Progress of a job; values that are not known are null."""

    version: Count = Field(
        description="Newest version of the model (J): number of updates so far.", examples=[412]
    )
    updates: float = Field(
        description="Number of updates of the model so far, as `stop.updates` in the job file"
        " counts them: an update with another number of batches than the job's `group_size` (K)"
        " counts in proportion.",
        examples=[412.0],
    )
    samples: Count = Field(
        description="Number of records that the model was trained on so far.", examples=[2109440]
    )
    loss: float | None = Field(
        description="Mean loss per record over the last 20 updates; null before the first update."
    )
    metrics: dict[str, float] = Field(
        description="Metrics of the model by name, on records before the model learned from them:"
        " auc, calibration_error, f1, precision and recall over the records of the last minute;"
        " others, such as accuracy, as means per record over the last 20 updates."
    )
    updates_per_s: float | None = Field(
        description="Updates of the model per second over the last 10 seconds; null before the"
        " first update."
    )
    samples_per_s: float | None = Field(
        description="Records that the model was trained on per second, over the last 10 seconds;"
        " null before the first update."
    )
    lag: Count | None = Field(
        description="Number of records in the job's streams that no update of the model contains"
        " yet; null if unknown."
    )
    workers: Count | None = Field(
        description="Number of the job's workers that send heartbeats; null if Redis is"
        " unavailable."
    )
    synchrony: SynchronyAnswer = Field(
        description="Synchronisation between workers in the newest update; if the job's settings"
        " were changed since then, the one in the next update."
    )
    learning_rate: float | None = Field(
        description="Learning rate of the newest update, with its schedule and synchronisation"
        " applied; null if an old version of DOLL made the update and did not record it.",
        examples=[0.002],
    )
    stale: Count | None = Field(
        description="Staleness of the newest update: number of updates between the weights that"
        " its oldest gradient was computed with and the update itself; null before the first"
        " update."
    )
    note: str = Field(
        description="Warning that the job's settings prevent several updates from being in"
        " progress at the same time, as its `synchronisation` mode intends; empty if they do not.",
        examples=[""],
    )
    waiting: Count | None = Field(
        description="Number of batches that workers have read and that wait for an update of the"
        " model; null if unknown."
    )
    skipped: Count = Field(
        description="Number of records of the job's streams that could not be decoded and were"
        " skipped."
    )
    quarantined: Count = Field(
        description="Number of batches that were given up without training (quarantined), for"
        " example because the task fails on them."
    )
    requeueable: Count = Field(
        description="Number of quarantined batches that an operator can requeue, so that the model"
        " is trained on them after all."
    )
    expired: Count = Field(
        description="Number of records that Kafka deleted before the model was trained on them."
    )
    lost: Count = Field(
        description="Number of records that the model was trained on and that Kafka lost"
        " afterwards."
    )
    cut_gradients: Count = Field(
        description="Number of gradients in the model's updates that a worker computed in smaller"
        " parts, because its memory did not suffice for a whole batch."
    )
    whole: bool = Field(
        description="True if `samples`, `skipped`, `quarantined`, `expired`, `lost` and"
        " `cut_gradients` cover the job's entire history. False if Kafka no longer has the"
        " beginning of that history; the numbers then cover the rest."
    )
    led: bool | None = Field(
        description="True if a coordinator currently leads the job; null if Redis is unavailable."
    )
    last_update_s: float | None = Field(
        description="Time of the newest update of the model, in seconds since 1970; null if"
        " unknown."
    )


class JobProgress:
    """State and progress of one job. For one thread at a time.

    Args:
        updates_start: Offset of the first record of the updates topic that is fed.
        control_start: Offset of the first record of the control topic that is fed.
    """

    def __init__(self, record: JobRecord, updates_start: int = 0, control_start: int = 0) -> None:
        self.record = record
        self.whole = updates_start == control_start == 0
        self.updates = Updates(record.spec.streams)
        self.evaluations = Evaluations(record.spec.streams)
        # Lags of all streams over time.
        self.lags = Thinned[tuple[float, Sequence[int | None]]](POINTS)
        self.seen = JobObservation(0.0)
        self._history = PartialHistory(updates_start)
        self.claims = Claims(record.first, record.known, whole=self.whole)
        self.recent = RecentRates()
        # Newest update that counted when it was fed. After a rollback, it may be void.
        self._newest: UpdateApplied | None = None
        self._ends = Ends(record.spec.streams, record.first)
        self._held_back: Mapping[Partition, HeldBack] = {}
        self._quarantined = 0
        # Number of records in batches that expired before their gradient was computed.
        self._expired = 0
        # Number of offsets in quarantined batches, by stream.
        self._dead = Counter[str]()
        # Last `RECENT_RECORDS` quarantines by the batch's offset in the control topic, each with
        # the number of samples trained before it. They have at least `RECENT_RECORDS` samples,
        # because each batch has at least one.
        self._quarantines = dict[int, tuple[int, Quarantined]]()

    @property
    def version(self) -> int:
        """J: number of updates so far."""
        return self._history.version

    # --- events ----------------------------------------------------------------------------------

    def feed_update(
        self, offset: int, record: AuditRecord | None, written_s: float | None, seen_s: float
    ) -> bool:
        """Fold a record of the updates topic (None if it does not parse); return True if it counts.

        Args:
            offset: Offset of the record.
            record: The decoded record.
            written_s: Its timestamp; None if not known.
            seen_s: Time at which it was received or, for records from before observation began,
                written.

        Raises:
            ValueError: If `offset` was fed before.
        """
        if isinstance(record, Evaluated | Drifted):
            self._history.feed(offset, record)
            if counts := self._history.holds(record.model):
                self.evaluations.feed(record)
            return counts
        if not self._history.feed(offset, record):
            return False
        self._newest = record if isinstance(record, UpdateApplied) else self._newest
        match record:
            case Lead() if self._history.version < self.updates.version:
                if not self.updates.take_back(self._history.version):
                    # The sums are too small, so waiting batches cannot be counted.
                    self.whole = False
                    self.claims = Claims(self.record.first, whole=False)
                self.recent.take_back(self._history.version)
                self.evaluations.take_back(self._history.version)
            case UpdateApplied():
                if record.version != self.updates.version + 1:
                    # The first records implied a wrong leader: see `PartialHistory`.
                    self.updates.clear(record.version - 1)
                    self.recent = RecentRates()
                self.updates.append(record, written_s)
                self.recent.add(record, seen_s)
                self.claims.use(record)
            case Quarantined():
                self._quarantine(record)
            case Requeued():
                self._release(record.batch)
        return True

    def _quarantine(self, record: Quarantined) -> None:
        # Kafka lost the claim of an earlier batch with this offset.
        if record.batch.offset in self._quarantines:
            _, lost = self._quarantines[record.batch.offset]
            self._expired -= lost.batch.samples if lost.expired else 0
            self._release(lost.batch)
        self._quarantined += 1
        self._expired += record.batch.samples if record.expired else 0
        self._dead += _lengths(record.batch.address)
        self._quarantines[record.batch.offset] = self.updates.samples, record
        while len(self._quarantines) > RECENT_RECORDS:
            del self._quarantines[next(iter(self._quarantines))]

    def _release(self, batch: Batch) -> None:
        """Remove a batch from the quarantined ones."""
        self._quarantined -= 1
        self._dead.subtract(_lengths(batch.address))
        self._quarantines.pop(batch.offset, None)

    def look(self, look: JobObservation) -> bool:
        """Add an observation of the board and the streams; return True if something is new."""
        before, starts = self.seen, self._ends.starts
        self.seen = look
        self._ends.look(look.at_s, look.ends, look.starts)
        if look.ends is not None:
            self._held_back = held_back(look, self._held_back)
        self.lags.add((look.at_s, self._lags() or [None] * len(self._ends.names)))
        # If Kafka does not answer, ends become unknown after a while. A lasting problem is shown
        # together with its age, which grows.
        is_same = look.ends is not None and starts == self._ends.starts
        lasts = (
            self._held_back or look.outages or any(who.startswith(OUTAGE) for who in look.unable)
        )
        return (
            bool(lasts)
            or not is_same
            or look != before._replace(at_s=look.at_s, starts=look.starts)
        )

    # --- what is shown ---------------------------------------------------------------------------

    def numbers(self, now: float) -> Numbers:
        """Return the progress of the job."""
        updates_per_s, samples_per_s = self.recent.rates(now)
        loss, metrics = self._means()
        look, newest = self.seen, self.updates.newest
        workers = None if look.statuses is None else len(look.statuses)
        return Numbers.model_construct(
            version=self.version,
            updates=float(self.version) if newest is None else newest.progress,
            samples=self.updates.samples,
            loss=loss,
            metrics=metrics,
            updates_per_s=updates_per_s,
            samples_per_s=samples_per_s,
            lag=self.lag,
            waiting=self.waiting,
            skipped=self.claims.skipped.total(),
            quarantined=self._quarantined,
            requeueable=len(self._history.poison),
            expired=self.claims.expired + self._expired + self._unread(),
            lost=self.claims.lost(record.batch for _, record in self._quarantines.values()),
            cut_gradients=self.updates.cut,
            whole=self.whole,
            workers=workers,
            synchrony=SynchronyAnswer.model_validate(self._synchrony(), from_attributes=True),
            learning_rate=self._learning_rate(),
            stale=None if newest is None else newest.stale,
            note=window_note(self.record.spec, workers),
            led=look.led,
            last_update_s=self.updates.last_at_s,
        )

    @property
    def waiting(self) -> int | None:
        """Number of accepted batches in no update yet; None if not known."""
        if self.claims.known:
            settled = self.updates.batches + self._quarantined
            return max(0, self.claims.batches - settled)
        return self.seen.leader_status.waiting if self.seen.leader_status is not None else None

    @property
    def lag(self) -> int | None:
        """Number of records in the streams and in no update yet; None if not known."""
        lags = self._lags()
        return None if lags is None else sum(lags)

    @property
    def held_back(self) -> Mapping[Partition, HeldBack]:
        """Partitions with an open transaction; empty if Kafka does not answer."""
        return self._held_back if self._ends.ends is not None else {}

    def open_transactions_s(self, now: float) -> dict[str, float]:
        """Return the age of the oldest open transaction by stream, or 0; empty if not known."""
        if self._ends.ends is None:
            return {}
        ages = dict.fromkeys(self._ends.names, 0.0)
        for place, held in self._held_back.items():
            ages[place.topic] = max(ages[place.topic], now - held.since_s)
        return ages

    def streams(self) -> list[StreamAnswer]:
        """Return each stream as of the last poll."""
        ends, leader_status = self._ends, self.seen.leader_status
        rates, lags, skipped = ends.rates(), self._lags(), self.claims.skipped
        settled = None if leader_status is None else ends.between({}, leader_status.settled)
        return [
            StreamAnswer(
                stream=name,
                partitions=len(ends.places[name]),
                rate_per_s=rates[index],
                lag=None if lags is None else lags[index],
                settled=None if settled is None else settled[index],
                dead_lettered=self._dead[name] + skipped[name],
            )
            for index, name in enumerate(ends.names)
        ]

    def state(self, now: float) -> State:
        """Return the state of the job."""
        return resting(self.record) or self.state_at_work(now)

    def state_at_work(self, now: float) -> State:
        """Return the state of a job that is to run: the first of these states that applies."""
        return (
            self._serverless(now)
            or self._leaderless(now)
            or self._workerless()
            or self._handing_over(now)
            or self._degradation(now)
            or self._without_records(now)
            or State("running", "")
        )

    # --- parts of the state ----------------------------------------------------------------------

    def outages(self) -> dict[str, list[tuple[str, OutageNotice]]]:
        """Return the processes that cannot use a server, by server; "" is this process."""
        met = {server: [("", notice)] for server, notice in self.seen.outages.items()}
        for name, text in sorted(self.seen.unable.items()):
            server, _, process = name.removeprefix(OUTAGE).partition(" ")
            since_s, _, reason = text.partition(" ")
            if name.startswith(OUTAGE) and _is_time(since_s):
                met.setdefault(server, []).append((process, OutageNotice(int(since_s), reason)))
        return met

    def _serverless(self, now: float) -> State | None:
        """Return a state if nothing is learned because a required server is unavailable."""
        if not self.seen.at_s or not self._quiet(now):
            return None
        outages = self.outages()
        sentences = [
            _outage_sentence(server, met)
            for server in _NEEDED
            if (met := outages.get(server))
            # Ignore shorter outages, or the state would flicker after a slow answer.
            and min(notice.since_s for _, notice in met) < now - QUIET_S
        ]
        return State("waiting for a server", "; ".join(sentences)) if sentences else None

    def _outage_sentences(self, *but: str) -> list[str]:
        """Return a sentence for each server that some process cannot use."""
        outages = self.outages()
        return [_outage_sentence(each, met) for each, met in outages.items() if each not in but]

    def _leaderless(self, now: float) -> State | None:
        look, spec = self.seen, self.record.spec
        if not look.at_s:
            return State("waiting for a coordinator", "its state has not been read yet")
        if look.led is None:
            if not self._quiet(now):
                # Updates come, so a coordinator leads, although Redis cannot show it.
                return None
            away = f": {_bare('Redis', look.board_away)}" if look.board_away else ""
            return State("waiting for a server", f"Redis is unavailable{away}")
        unable = "; ".join(filter(None, [self._unable(""), *self._outage_sentences()]))
        if look.led:
            if look.leader_status is None and self._quiet(now):
                return State("waiting for a coordinator", unable or "a coordinator is taking over")
            return None
        if why := unable:
            pass
        elif self.version:
            why = "no coordinator leads the job; if another one runs, it takes over within seconds"
        else:
            why = f"no coordinator leads {spec.name} yet; `doll coordinator` starts one"
        return State("waiting for a coordinator", why)

    def _workerless(self) -> State | None:
        statuses, lag = self.seen.statuses, self.lag
        lag = None if lag is None else max(lag - self._unreadable(), 0)
        if statuses is None or lag == 0:
            return None
        if any(s == "alive" and w not in self._left_out for w, s in statuses.items()):
            return None
        records = "records wait" if lag is None else f"{_counted(lag, 'record')} wait"
        unable = self._unable(WORKER) or self._left_out_sentences()
        why = unable or self.seen.unable.get(TURN) or "no worker runs"
        return State("waiting for workers", f"{records} and {why}")

    def _unable(self, kind: str) -> str:
        """Return why processes of a kind cannot do their part; "" means coordinators."""
        # A process that has joined since can do its part, unless it was left out.
        working = (self.seen.statuses or {}).keys() - self._left_out.keys()
        joined = {WORKER + worker for worker in working}
        return "; ".join(
            f"{who}: {why}"
            for who, why in sorted(self.seen.unable.items())
            if next((k for k in (WORKER, EVALUATOR) if who.startswith(k)), "") == kind
            and who not in joined
            and who != TURN
            and not who.startswith(OUTAGE)
        )

    @property
    def _left_out(self) -> Mapping[str, str]:
        """Workers that get no work because their model differs, each with the reason."""
        status = self.seen.leader_status
        return {} if status is None else {str(w): why for w, why in status.left_out.items()}

    def _left_out_sentences(self) -> str:
        """Return which workers are left out and why, except those that give a more exact reason."""
        group = UNSET if self.seen.leader_status is None else self.seen.leader_status.group
        left_out = {str(w): why for w, why in group.left_out.items()} if group else {}
        left_out.update(self._left_out)
        return "; ".join(
            f"{worker} is left out: {why}"
            for worker, why in sorted(left_out.items())
            if WORKER + worker not in self.seen.unable
        )

    def _copying(self) -> str:
        """Return a text about updates that wait while workers copy the weights; empty for none."""
        group = UNSET if self.seen.leader_status is None else self.seen.leader_status.group
        return "; ".join(
            f"updates wait up to {most_s:g} s for {worker}, which copies the weights"
            for worker, most_s in (sorted(group.waits.items()) if group else ())
            if most_s > QUIET_S
        )

    def _handing_over(self, now: float) -> State | None:
        """Return a state if a changed `aggregation` holds up training.

        Training then waits until the newest version is stored, so that its weights can be handed
        over.
        """
        holds = self._history.known_slices
        if holds is None or holds == slices_of(self.record.spec.among) or not self._quiet(now):
            return None
        why = "`aggregation` was changed, and training waits until the newest version is stored"
        return State("degraded", f"{why}; if that takes long, check object storage")

    def _degradation(self, now: float) -> State | None:
        degraded = self._degraded()
        whys = (lasting(self.held_back, now), degraded.why if degraded else "")
        return State("degraded", "; ".join(filter(None, whys))) if any(whys) else None

    def _unreadable(self) -> int:
        """Return the number of offsets behind open transactions, over all partitions."""
        return sum(each.offsets for each in self.held_back.values())

    def _degraded(self) -> State | None:
        unable = (self._unable(WORKER), self._unable(EVALUATOR))
        # The schema registry is left out here: `_awaited_schemas` says more exactly why workers
        # wait for schemas.
        away = self._outage_sentences(*_NEEDED, "schema_registry")
        schemas = self._awaited_schemas()
        problems = (self._left_out_sentences(), self._copying(), *unable, *away, *schemas)
        if parts := [*filter(None, problems)]:
            return State("degraded", "; ".join(parts))
        recent = self.claims.recent
        for stream, of_stream in self.claims.recent_of.items():
            if of_stream.skipped / max(of_stream.records, 1) > DEGRADED_SHARE:
                why = f"{of_stream.skipped:,} of the last {of_stream.records:,} records of {stream}"
                why += " could not be decoded"
                reasons = of_stream.summary()
                return State("degraded", f"{why}: {reasons}" if reasons else why)
        quarantined, settled = self._quarantined_share()
        skipped, claimed = recent.skipped, recent.records
        if skipped / max(claimed, 1) + quarantined / max(settled, 1) <= DEGRADED_SHARE:
            return None
        parts = [
            f"{count:,} {what}"
            for count, what in (
                (skipped, "could not be decoded"),
                (quarantined, "were quarantined"),
            )
            if count
        ]
        return State(
            "degraded", f"of the last {max(claimed, settled):,} records {' and '.join(parts)}"
        )

    def _awaited_schemas(self) -> Iterator[str]:
        """Yield sentences about workers whose records wait for a schema, with the reason."""
        waiting, met = self.seen.waiting, self.outages().get("schema_registry")
        since = f" since {_since(met)}" if met else ""
        for status, why in MISSING_SCHEMA.items():
            if workers := sorted(w for w in waiting if waiting[w] == status):
                yield f"{', '.join(workers)}: records wait for a schema{since}: {why}"

    def _without_records(self, now: float) -> State | None:
        """Return the state of a job that has no records left, or too few for an update."""
        spec, lag, waiting = self.record.spec, self.lag, self.waiting
        if lag is None or waiting is None or not self._quiet(now):
            return None
        if lag == 0:
            if self._ends.between({}, self._ends.ends or {}) == [0] * len(self._ends.names):
                return State("waiting for records", "no record has arrived yet")
            return State("drained", "all records are settled, and no new ones arrive")
        group_size = self._synchrony().group_size
        missing, too_few = group_size - waiting, len(self.seen.too_few)
        unreadable = self._unreadable()
        unclaimed = max(sum(self._unclaimed() or [0]) - unreadable, 0)
        # Each worker fills its own batch, so all but one may be short of a single record.
        apart = max(0, len(self.seen.statuses or ()) - 1) * (spec.batch_size - 1)
        enough = unclaimed >= missing * spec.batch_size + apart
        if missing <= 0 or (enough and not too_few):
            return None
        records = _counted(unclaimed, "record")
        if too_few:
            waits = "waits" if unclaimed == 1 else "wait"
            where = f" at each of {too_few} workers" if too_few > 1 else ""
            why = f"{records} {waits}: batch normalization needs two{where}"
        else:
            why = (
                f"an update needs {_counted(group_size, 'batch')} of {spec.batch_size:,} records;"
                f" {_counted(waiting, 'batch')} and {records} are waiting"
            )
        if unreadable:
            why += f"; not readable yet: {_counted(unreadable, 'offset')}"
        return State("waiting for records", why)

    def _quiet(self, now: float) -> bool:
        last_s = self.updates.last_at_s
        return last_s is None or now - last_s >= QUIET_S

    def _quarantined_share(self) -> tuple[int, int]:
        """Return the number of recently quarantined samples, and of recently settled ones.

        Settled samples are trained or quarantined; at most `RECENT_RECORDS` of them are counted.
        Without quarantined samples, both numbers are 0.
        """
        trained = self.updates.samples
        quarantined = 0
        for before, record in reversed(self._quarantines.values()):
            if trained - before + quarantined >= RECENT_RECORDS:
                break
            quarantined += record.batch.samples
        if not quarantined:
            return 0, 0
        return quarantined, min(quarantined + trained, RECENT_RECORDS)

    # --- parts of the progress -------------------------------------------------------------------

    def _claimed(self) -> Positions | None:
        """Return the positions below which records are claimed; None if not known."""
        if self.claims.known:
            return self.claims.claimed
        return None if self.seen.leader_status is None else self.seen.leader_status.claimed

    def _unclaimed(self) -> list[int] | None:
        """Return the number of unclaimed records by stream; None if not known."""
        claimed = self._claimed()
        return None if claimed is None else self._ends.beyond(claimed)

    def _unread(self) -> int:
        """Return the number of records that were deleted before they were claimed."""
        return sum(self._ends.between(self._claimed() or self._ends.starts, self._ends.starts))

    def _lags(self) -> list[int] | None:
        """Return the number of records in no update yet, by stream; None if not known."""
        unclaimed = self._unclaimed()
        if unclaimed is None:
            return None
        names, claims, settled = self._ends.names, self.claims, self.updates.offsets
        if claims.known:
            apart = [max(0, claims.offsets[n] - settled[n] - self._dead[n]) for n in names]
        else:
            # The number of waiting batches is only known for the whole job. It is distributed over
            # the streams in proportion to the part of each that no checkpoint covers.
            leader_status = self.seen.leader_status
            waiting = leader_status.waiting * self.record.spec.batch_size if leader_status else 0
            uncovered = (
                self._ends.between(leader_status.settled, leader_status.claimed)
                if leader_status
                else [0] * len(names)
            )
            apart = _spread(waiting, uncovered)
        return [there + here for there, here in zip(unclaimed, apart, strict=True)]

    def _synchrony(self) -> Synchrony:
        """Return how updates are made: like the newest, unless the job was changed since."""
        spec, newest = self.record.spec, self._newest
        if newest is not None and newest.revision == self.record.revision:
            return newest.synchrony or Synchrony(spec.group_size)
        workers = len(self.seen.statuses or ())
        return spec.synchronised.core_mode(spec.group_size).synchrony(workers)

    def _learning_rate(self) -> float | None:
        """Return the learning rate of the newest update; None if the update does not say."""
        if self._newest is None:
            optimizer = self.record.spec.optimizer
            return optimizer.learning_rate * optimizer.scheduled.share(0)
        return self._newest.rate or None

    def _means(self) -> tuple[float | None, dict[str, float]]:
        newest = self.updates.version
        rows = self.updates.rows(newest - SHOWN_UPDATES + 1, newest)
        if not rows:
            return None, {}
        metrics = dict[str, float]()
        for name in sorted({name for row in rows for name in row.metrics}):
            having = [row for row in rows if name in row.metrics]
            metrics[name] = _mean(
                [(row.metrics[name], row.measured.get(name, row.samples)) for row in having]
            )
        metrics |= {name: rows[-1].metrics[name] for name in WINDOWED if name in rows[-1].metrics}
        return _mean([(row.loss, row.samples) for row in rows]), metrics


def _mean(means: Sequence[tuple[float, int]]) -> float:
    """Return the mean over all samples, from means and their numbers of samples."""
    weights = [max(samples, 1) for _, samples in means]
    pairs = zip(means, weights, strict=True)
    return sum(mean * weight for (mean, _), weight in pairs) / sum(weights)


def _counted(count: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"
