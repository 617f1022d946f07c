"""Cut a worker's records into batches of b (Algorithm 1), by offsets alone.

Rule 1: the content of a batch is its address, so this module never looks into a record. Rule 2: the
cuts depend on the records and their order, never on the chunks that polls return. Rule 3: each span
of a partition starts where the previous one ended, even if offsets are missing in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import msgspec

from common.core.messages import Skipped
from common.core.spans import Address, LogPosition, Partition, Span, address_of

# Usable size of one Kafka record. Clients refuse to write more than 1,000,000 bytes and brokers
# more than 1,048,588. The difference is for metrics and a traceback.
RECORD_BYTES = 900_000
# Size of a claim's entries for bad records at which the batch is closed.
SKIPPED_BYTES = 200_000
# Number of bad records at which a batch is closed, too, because their dead letters are written
# together. If the batch has samples, but fewer than `min_batch`, only `SKIPPED_BYTES` closes it.
MAX_SKIPPED = 1000
# Maximum length of a reason. The dead letter has the record itself, which shows the rest.
REASON_CHARACTERS = 200
# Size of the addresses of all batches of an update. Each batch may use a K-th part.
ADDRESSES_BYTES = 600_000
# Size of a batch in an update without its address: numbers and the worker's name.
BATCH_BYTES = 200
# Size of a span without its topic: 3 positions and a generation of 19 digits, 2 leader epochs and a
# partition of 10, and punctuation.
_SPAN_BYTES = 120
# Size of one more bad record: the gap to the one before, of at most 19 digits.
_OFFSET_BYTES = 21
# Largest size of a character. JSON writes a control character as a backslash, u and four digits.
_ESCAPED_BYTES = 6


def span_bytes(topic: str) -> int:
    """Return the maximum number of bytes of a topic's span in a record."""
    # Topic names consist of ASCII letters, digits, dot, _ and -.
    return _SPAN_BYTES + len(topic)


def most_group_size(topics: Iterable[str]) -> int:
    """Return the largest K whose update always fits into a Kafka record."""
    return RECORD_BYTES // (BATCH_BYTES + max(map(span_bytes, topics)))


class RowSlice(NamedTuple):
    """A range of the rows of a decoded run. Only the decoder looks into the rows."""

    rows: object
    start: int
    stop: int


class DecodedRun(msgspec.Struct, frozen=True, gc=False):
    """Consecutive records of one partition after decoding."""

    partition: Partition
    # Offsets of the records that decoded, increasing.
    offsets: Sequence[int]
    # One entry per record that did not decode, by increasing offset.
    skipped: tuple[Skipped, ...]
    first_arrival_s: float
    last_arrival_s: float
    # Kafka leader epoch of all records. -1 if unknown.
    epoch: int = -1
    # One decoded row per offset. None if the rows are not needed.
    rows: object = None


class Cut(msgspec.Struct, frozen=True, gc=False):
    """A closed batch: its address, and the number of samples in each span."""

    address: Address
    # Number of samples per span, in the order of the address.
    counts: tuple[int, ...]
    # One entry per span and reason, in the order of the address.
    skipped: tuple[Skipped, ...]
    first_arrival_s: float
    last_arrival_s: float
    # Rows of the samples, in the order of the address.
    rows: tuple[RowSlice, ...] = ()

    @property
    def samples(self) -> int:
        """Number of records that decoded."""
        return sum(self.counts)


@dataclass(slots=True)
class _Reading:
    """Reading state of a partition."""

    position: int  # next offset
    generation: int
    # Offset after the last record that was read.
    known: int
    # Leader epoch of that record. -1 if unknown.
    epoch: int

    def span(self, partition: Partition, start: int, before: int) -> Span:
        """Return the span from `start` to this position."""
        return Span(
            *partition, start, self.position, self.generation, before, self.known, self.epoch
        )


@dataclass(slots=True)
class _Open:
    """The part of the open batch that lies in one partition."""

    start: int
    # Leader epoch of the record before `start`. -1 if unknown.
    before: int
    samples: int = 0
    skipped: dict[str, list[int]] = field(default_factory=dict)  # increasing offsets, by reason
    skipped_records: int = 0
    skipped_bytes: int = 0
    first_arrival_s: float = 0.0
    last_arrival_s: float = 0.0
    rows: list[RowSlice] = field(default_factory=list)

    def skip(self, partition: Partition, records: Iterable[Skipped]) -> None:
        """Add records that did not decode."""
        for record in records:
            reason = record.reason[:REASON_CHARACTERS]
            self.skipped_bytes += _bytes_of(partition, reason, known=reason in self.skipped)
            self.skipped_records += 1
            self.skipped.setdefault(reason, []).append(record.offset)

    def named(self, partition: Partition) -> tuple[Skipped, ...]:
        """Return the skipped records as a claim lists them."""
        return tuple(
            Skipped(*partition, offsets[0], reason, tuple(b - a for a, b in pairwise(offsets)))
            for reason, offsets in self.skipped.items()
        )


def _bytes_of(partition: Partition, reason: str, *, known: bool) -> int:
    """Return the maximum number of bytes that a bad record adds to a claim."""
    named = 0 if known else span_bytes(partition.topic) + _ESCAPED_BYTES * len(reason)
    return named + _OFFSET_BYTES


class Batcher:
    """The batch that a worker is filling, over all partitions that it reads.

    Args:
        batch_size: b >= 1, the number of samples in a batch.
        linger_s: Time after the first record at which a partial batch is closed, or None for never.
        group_size: K >= 1, the number of batches whose addresses must fit into one update record.
        min_batch: Samples that a partial batch needs before the linger closes it, at most b. Only
            the size limits of Kafka records close a batch with fewer samples, and never one without
            samples.

    Raises:
        ValueError: If `batch_size` or `group_size` is less than 1.
    """

    def __init__(
        self,
        batch_size: int,
        linger_s: float | None = None,
        group_size: int = 1,
        min_batch: int = 1,
    ) -> None:
        self._linger_s = linger_s
        self._min_batch = min_batch
        self._set_sizes(batch_size, group_size)
        self._reading = dict[Partition, _Reading]()
        self._open = dict[Partition, _Open]()
        # Totals of the open batch: its samples, its bad records, their bytes in its claim, and the
        # bytes of its address.
        self.samples = 0
        self._skipped = 0
        self._skipped_bytes = 0
        self._spans_bytes = 0
        self._opened_at = 0.0

    def position(self, partition: Partition) -> int | None:
        """Return the offset of the next record of a partition, or None if it is not read."""
        reading = self._reading.get(partition)
        return None if reading is None else reading.position

    def epoch(self, partition: Partition) -> int:
        """Return the leader epoch of the last known record below the position. -1 if unknown."""
        reading = self._reading.get(partition)
        return -1 if reading is None else reading.epoch

    def has_open(self, partition: Partition) -> bool:
        """True if the open batch holds records of this partition."""
        return partition in self._open

    def place(
        self,
        partition: Partition,
        position: int,
        generation: int = 0,
        known: LogPosition | None = None,
    ) -> None:
        """Begin a partition's next span at `position`, and drop its part of the open batch.

        Args:
            partition: The partition.
            position: Offset of the next record.
            generation: The generation in force.
            known: Position after the last record below `position`, if known.
        """
        self.drop(partition)
        offset, _, epoch = LogPosition(position) if known is None else known
        self._reading[partition] = _Reading(position, generation, offset, epoch)

    def pass_over(self, partition: Partition, end: int) -> Span:
        """Continue at `end` and return the span up to there, which has no record that was read.

        Raises:
            ValueError: If the open batch holds records of the partition, which must be claimed
                first.
        """
        if partition in self._open:
            raise ValueError(f"the open batch holds records of {partition}")
        reading = self._reading[partition]
        start, reading.position = reading.position, end
        return reading.span(partition, start, reading.epoch)

    def reach(self, partition: Partition, position: int) -> bool:
        """Add offsets without records, up to `position`, to the open batch.

        Returns:
            False if the open batch holds no records of the partition. Nothing is added then.

        Raises:
            ValueError: If the partition's position is above `position`, or the partition is not
                read.
        """
        reading = self._reading[partition]
        if reading.position > position:
            raise ValueError(f"{partition} stands above {position}")
        if partition not in self._open:
            return False
        reading.position = position
        return True

    def drop(self, partition: Partition) -> None:
        """Remove a partition: its position and its part of the open batch."""
        self._reading.pop(partition, None)
        self._drop_part(partition)

    def expire(self, partition: Partition, end: int) -> Span:
        """Continue at `end`, and return the span up to there.

        The partition's part of the open batch is dropped, and its offsets belong to the span.
        """
        reading, part = self._reading[partition], self._drop_part(partition)
        start, before = reading.position, reading.epoch
        if part is not None:
            start, before = part.start, part.before
        reading.position = end
        return reading.span(partition, start, before)

    def _drop_part(self, partition: Partition) -> _Open | None:
        part = self._open.pop(partition, None)
        if part is not None:
            self.samples -= part.samples
            self._skipped -= part.skipped_records
            self._skipped_bytes -= part.skipped_bytes
            self._spans_bytes -= span_bytes(partition.topic)
        return part

    def add(self, run: DecodedRun, now: float) -> tuple[Cut, ...]:
        """Add a run and return the batches that it completes, oldest first.

        Raises:
            ValueError: If the partition has no position, or the run begins below it.
        """
        reading = self._reading.get(run.partition)
        if reading is None:
            raise ValueError(f"{run.partition} was read before it was placed")
        position = reading.position
        offsets, skipped = run.offsets, run.skipped
        begin = offsets[0] if offsets else position
        if skipped:
            begin = min(begin, skipped[0].offset) if offsets else skipped[0].offset
        if begin < position:
            raise ValueError(f"{run.partition} gave offset {begin} below its position {position}")
        if not (self._open or skipped) and len(offsets) == self._batch_size:
            return (self._whole(run, reading),)
        cuts = list[Cut]()
        if self._open and self._is_too_wide_with(run):
            cuts.append(self._close())
        # Number of samples and skipped records of the run that were added.
        i = j = 0
        while i < len(offsets) or j < len(skipped):
            end, i_next, j_next = self._next_end(run, i, j)
            self._extend(run, (i, i_next), (j, j_next), end, now)
            i, j = i_next, j_next
            skipped_full = self._is_full(self._skipped, self._skipped_bytes, self.samples)
            if self.samples >= self._batch_size or skipped_full:
                cuts.append(self._close())
        return tuple(cuts)

    def resize(self, batch_size: int, group_size: int = 1) -> Cut | None:
        """Change the size of batches and groups from now on.

        Returns:
            The open batch, closed, if it already has enough samples.

        Raises:
            ValueError: If `batch_size` or `group_size` is less than 1.
        """
        self._set_sizes(batch_size, group_size)
        return self._close() if self.samples >= batch_size else None

    def due(self) -> float | None:
        """Return when the linger closes the open batch, or None if it does not."""
        if self._linger_s is None or not self._open or self.is_too_small:
            return None
        return self._opened_at + self._linger_s

    @property
    def is_too_small(self) -> bool:
        """True if the open batch has samples, but fewer than `min_batch`."""
        return 0 < self.samples < self._least

    def waits_for_more(self, now: float) -> bool:
        """Return True if the linger would have closed the open batch, were it large enough."""
        lingers = self._linger_s is not None and now >= self._opened_at + self._linger_s
        return lingers and self.is_too_small

    def close(self) -> Cut | None:
        """Close the open batch, or return None if it is empty."""
        return self._close() if self._open else None

    def _next_end(self, run: DecodedRun, i: int, j: int) -> tuple[int, int, int]:
        """Return the end of the part of the run that fits into the open batch: (position, i, j)."""
        offsets, skipped = run.offsets, run.skipped
        # A batch that is too small may exceed the number of bad records. Then the `min_batch`-th
        # sample closes it.
        full = self._batch_size if self._skipped < MAX_SKIPPED else self._least
        # The sample that would fill the batch.
        last_good = i + full - self.samples - 1
        full_at = offsets[last_good] if last_good < len(offsets) else None
        # The usual case.
        if not skipped:
            end = offsets[-1] + 1 if full_at is None else full_at + 1
            return end, min(last_good + 1, len(offsets)), 0
        bad_at = self._full_of_skipped_at(run, i, j)
        ends = [x for x in (full_at, bad_at) if x is not None]
        end = min(ends) + 1 if ends else max([*offsets[-1:], skipped[-1].offset]) + 1
        return end, bisect_left(offsets, end), bisect_left(skipped, end, key=lambda s: s.offset)

    def _set_sizes(self, batch_size: int, group_size: int) -> None:
        if batch_size < 1 or group_size < 1:
            raise ValueError(
                f"batch_size and group_size must be at least 1, got {batch_size} and {group_size}"
            )
        self._batch_size = batch_size
        self._least = min(self._min_batch, batch_size)
        self._address_bytes = ADDRESSES_BYTES // group_size

    def _is_too_wide_with(self, run: DecodedRun) -> bool:
        """True if one more partition would make the open batch's address too long for a record."""
        if run.partition in self._open or not (run.offsets or run.skipped):
            return False
        return self._spans_bytes + span_bytes(run.partition.topic) > self._address_bytes

    def _is_full(self, records: int, size: int, samples: int) -> bool:
        """Return True if bad records of this number and size close a batch with these samples."""
        too_small = 0 < samples < self._least
        return size >= SKIPPED_BYTES or (records >= MAX_SKIPPED and not too_small)

    def _full_of_skipped_at(self, run: DecodedRun, i: int, j: int) -> int | None:
        """Return the offset at which bad records close the open batch, or None if they do not.

        Args:
            run: The run.
            i: Number of its samples that were added.
            j: Number of its bad records that were added.
        """
        records, size = self._skipped, self._skipped_bytes
        part = self._open.get(run.partition)
        reasons = set(part.skipped) if part is not None else set[str]()
        for record in run.skipped[j:]:
            samples = self.samples + bisect_left(run.offsets, record.offset) - i
            if samples >= (self._batch_size if records < MAX_SKIPPED else self._least):
                # A sample has closed the batch before.
                break
            reason = record.reason[:REASON_CHARACTERS]
            size += _bytes_of(run.partition, reason, known=reason in reasons)
            records += 1
            reasons.add(reason)
            if self._is_full(records, size, samples):
                return record.offset
        # The sample that makes the batch large enough.
        enough = i + self._least - self.samples - 1
        return run.offsets[enough] if records >= MAX_SKIPPED and enough < len(run.offsets) else None

    def _extend(
        self, run: DecodedRun, good: tuple[int, int], bad: tuple[int, int], end: int, now: float
    ) -> None:
        if not self._open:
            self._opened_at = now
        part = self._open.get(run.partition)
        # Only the ends of a run have arrival times. The others are interpolated.
        n = max(len(run.offsets) - 1, 1)
        slope_s = (run.last_arrival_s - run.first_arrival_s) / n
        reading = self._reading[run.partition]
        if part is None:
            first_s = run.first_arrival_s + slope_s * good[0]
            part = _Open(reading.position, reading.epoch, first_arrival_s=first_s)
            self._open[run.partition] = part
            self._spans_bytes += span_bytes(run.partition.topic)
        # `end` is the offset after a record, so the log is known up to there.
        reading.position = reading.known = end
        reading.epoch = run.epoch
        part.samples += good[1] - good[0]
        if run.rows is not None and good[1] > good[0]:
            part.rows.append(RowSlice(run.rows, *good))
        if bad[1] > bad[0]:
            before = part.skipped_bytes
            part.skip(run.partition, run.skipped[bad[0] : bad[1]])
            self._skipped += bad[1] - bad[0]
            self._skipped_bytes += part.skipped_bytes - before
        part.last_arrival_s = run.first_arrival_s + slope_s * max(good[1] - 1, 0)
        self.samples += good[1] - good[0]

    def _whole(self, run: DecodedRun, reading: _Reading) -> Cut:
        """Make a batch of exactly one run, a shortcut for `_extend` and `_close`."""
        start, before, samples = reading.position, reading.epoch, len(run.offsets)
        reading.position = reading.known = run.offsets[-1] + 1
        reading.epoch = run.epoch
        first_s = run.first_arrival_s
        slope_s = (run.last_arrival_s - first_s) / max(samples - 1, 1)
        address = (reading.span(run.partition, start, before),)
        rows = () if run.rows is None else (RowSlice(run.rows, 0, samples),)
        return Cut(address, (samples,), (), first_s, first_s + slope_s * (samples - 1), rows)

    def _close(self) -> Cut:
        # The usual case.
        if len(self._open) == 1:
            ((place, part),) = self._open.items()
            self._empty()
            address = (self._reading[place].span(place, part.start, part.before),)
            counts, skipped = (part.samples,), part.named(place) if part.skipped else ()
            times = part.first_arrival_s, part.last_arrival_s
            return Cut(address, counts, skipped, *times, tuple(part.rows))
        parts = sorted(self._open.items())
        self._empty()
        return Cut(
            address=address_of(
                self._reading[p].span(p, part.start, part.before) for p, part in parts
            ),
            counts=tuple(part.samples for _, part in parts),
            skipped=tuple(named for place, part in parts for named in part.named(place)),
            first_arrival_s=min(part.first_arrival_s for _, part in parts),
            last_arrival_s=max(part.last_arrival_s for _, part in parts),
            rows=tuple(each for _, part in parts for each in part.rows),
        )

    def _empty(self) -> None:
        self._open = {}
        self.samples = self._skipped = self._skipped_bytes = self._spans_bytes = 0
