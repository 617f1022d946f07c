"""Replay of dead letters and quarantined batches: their records are written to a topic again, once.

New records, and notes about them in the dead-letter topics, are one transaction of Kafka. So a
process that is killed leaves both or neither, and the next one continues with records that have no
note. A record is identified by topic id, partition, offset and the topic that it is written to, so
a record that two jobs could not use is written once. All replays use the same transactional id, so
that no two can run at the same time. Before a batch's records are written, a `Replayed` record
makes its quarantine final, so that nobody can requeue the batch as well. If a replay is interrupted
between the two, the batch has a `Replayed` record but no note, and `unfinished` returns it.

A header of a new record has the address of the original. A record that fails again is not written
again unless the operator requests it, so that bad records do not circulate forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from common.core.messages import Batch, Replayed
from common.core.spans import LogPosition, Partition, Span
from common.errors import ExpiredError, UnavailableError, UnknownTopicError
from common.kafka.dead_letters import (
    NOTED,
    DeadLetter,
    DeadLettersRead,
    Note,
    TopicIdPartition,
    offsets_of,
    read_dead_letters,
)
from common.kafka.names import dead_letter_topic
from common.kafka.port import Bounds, Log, LogRecord, NewRecord, NewTopic, Tail, TransactionalLog
from common.kafka.read import identified

if TYPE_CHECKING:
    from common.jobs.quarantine import Quarantine

# Transactional id.
NAME = "doll.replay"
# Header with the address of the original record.
FROM = "replayed_from"
# Maximum number of records, and of their bytes, per transaction.
_RECORDS = 500
_BYTES = 4 << 20
_READ_RECORDS = 1000
_READ_S = 10.0

Outcome: TypeAlias = Literal["again", "cut", "new"]


class ReplayedDeadLetters(NamedTuple):
    """Outcome of a replay of dead letters about records."""

    written: int
    # Number of records skipped because they had been replayed before and failed again.
    again: int
    # Number of records skipped because neither the record nor its complete value exists any more.
    cut: int


class _New(NamedTuple):
    """A record to be written again."""

    # Partition of the original.
    place: TopicIdPartition
    offset: int
    record: NewRecord


class _DeadLetters:
    """Dead letters of some streams, each stream read once."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._read = dict[str, DeadLettersRead]()
        self._jobs = dict[TopicIdPartition, Callable[[int], frozenset[str]]]()

    def of(self, stream: str) -> DeadLettersRead:
        """Return the dead letters of a stream."""
        if stream not in self._read:
            self._read[stream] = read_dead_letters(self._log, stream)
        return self._read[stream]

    def dead_letter(self, job: str, batch: Batch, span: Span) -> tuple[TopicIdPartition, int]:
        """Return the partition of a batch's span, and its dead letter's offset; -1 for none."""
        for each in self.of(span.topic).dead_letters:
            same = each.is_batch and each.job == job and each.span[:4] == span[:4]
            if same and each.batch in {None, batch}:
                return each.place, each.at
        return TopicIdPartition(identified(self._log, span.place, 0).topic_id, span.place), -1

    def missing(
        self, job: str, batch: Batch, to: str | None
    ) -> Iterator[tuple[TopicIdPartition, int]]:
        """Yield the records of a batch that were not written again.

        Args:
            job: Id of the job.
            batch: The batch.
            to: Topic to which they were to be written; empty for their own stream, None for any.
        """
        for span in batch.address:
            place, at = self.dead_letter(job, batch, span)
            covers = self.of(span.topic).notes.covers
            target = to if to is None else to or span.topic
            for offset in offsets_of(span, batch):
                if not covers(place, offset, job, at, target):
                    yield place, offset

    def notes(self, written: Iterable[tuple[TopicIdPartition, int]], to: str) -> list[Note]:
        """Return notes that name each of these records, and count the records as written.

        Args:
            written: Records.
            to: Topic that they are written to; empty for the stream of each.
        """
        notes = list[Note]()
        for place, offset in sorted(written):
            stream = place.partition.topic
            if place not in self._jobs:
                self._jobs[place] = self.of(stream).jobs(place)
            note = Note(place, offset, offset + 1, to or stream, self._jobs[place](offset))
            last = notes[-1] if notes else None
            goes_on = last is not None and last._replace(start=offset, end=offset + 1) == note
            if last is not None and goes_on and last.end == offset < last.start + NOTED:
                notes[-1] = last._replace(end=offset + 1)
            else:
                notes.append(note)
        for note in notes:
            self.of(note.place.partition.topic).notes.add(note)
        return notes


class Replayer:
    """Replays records. It takes over the transactional id, so any earlier replayer is stopped.

    Args:
        by: Name of the operator, for people.
    """

    def __init__(self, log: TransactionalLog, by: str) -> None:
        self._log = log
        self._by = by
        self._transactions = log.transactions(NAME)
        # Created last: from now on no other process writes notes.
        self._dead_letters = _DeadLetters(log)

    def close(self) -> None:
        """Close the connection."""
        self._transactions.close()

    def dead_letters(self, stream: str) -> DeadLettersRead:
        """Return the dead letters of a stream, and what has been replayed so far."""
        return self._dead_letters.of(stream)

    def records(
        self, dead_letters: Iterable[DeadLetter], to: str, *, again: bool
    ) -> ReplayedDeadLetters:
        """Write the records of dead letters again, each once.

        Args:
            dead_letters: Dead letters about records of one stream that were not written to the
                topic.
            to: Topic to write to. In the stream itself, each record goes to its own partition.
            again: True to include records that were replayed before.

        Raises:
            OutsideError: If not all records can be written. Those that are will not be written
                again.
        """
        counts = dict[Outcome, int].fromkeys(("new", "again", "cut"), 0)
        waiting, size = list[_New](), 0
        for new in _rewritten(self._log, dead_letters, to, again=again):
            if not isinstance(new, _New):
                counts[new] += 1
                continue
            counts["new"] += 1
            waiting.append(new)
            size += len(new.record.value or b"")
            if len(waiting) >= _RECORDS or size >= _BYTES:
                self._write(waiting, to)
                waiting, size = [], 0
        if waiting:
            self._write(waiting, to)
        return ReplayedDeadLetters(counts["new"], counts["again"], counts["cut"])

    def _write(self, new: list[_New], to: str) -> None:
        notes = self._dead_letters.notes(((each.place, each.offset) for each in new), to)
        self._transactions.write([each.record for each in new] + [each.record for each in notes])

    def batch(self, quarantine: Quarantine, batch: Batch, at_s: float, to: str = "") -> int | None:
        """Write the records of a quarantined batch again, after making its quarantine final.

        Args:
            quarantine: Quarantine of the batch's job.
            batch: A batch that may be replayed, or whose replay was interrupted.
            at_s: Time of the request, in seconds since 1970.
            to: Topic to write to; empty for the records' own streams.

        Returns:
            Number of records written, without those already written for another job; None if the
            batch was requeued in the meantime and nothing was done.

        Raises:
            ExpiredError: If some records are deleted. Nothing was done.
            OutsideError: If the records cannot be written now. Another try continues.
        """
        # Read before the quarantine is made final: if that fails, the batch stays as it is.
        records = _records_of(self._log, batch, self._dead_letters, quarantine.job)
        if batch not in quarantine.replayed():
            (counted,) = quarantine.write([Replayed(batch, self._by, at_s)])
            if not counted:
                return None
        missing = list(self._dead_letters.missing(quarantine.job, batch, to))
        if not missing:
            return 0
        dead_letters = {dead_letter_topic(span.topic) for span in batch.address}
        self._log.create_topics(
            [NewTopic(each, kept_forever=True) for each in sorted(dead_letters)]
        )
        new = [
            _new(place.partition, records[place.partition, offset], to or place.partition.topic)
            for place, offset in missing
            # Compaction may have left no record at an offset.
            if (place.partition, offset) in records
        ]
        notes = self._dead_letters.notes(missing, to)
        self._transactions.write([*new, *(note.record for note in notes)])
        return len(new)


def unfinished(log: Log, quarantine: Quarantine) -> list[Batch]:
    """Return batches whose quarantine is final and whose records were not all written again."""
    dead_letters, job = _DeadLetters(log), quarantine.job
    return [each for each in quarantine.replayed() if any(dead_letters.missing(job, each, None))]


def _rewritten(
    log: Log, dead_letters: Iterable[DeadLetter], to: str, *, again: bool
) -> Iterator[_New | Outcome]:
    """Yield each record of the dead letters as it is to be written, or why it is skipped."""
    # Several jobs may have a dead letter about the same record.
    by_record = dict[tuple[TopicIdPartition, int], DeadLetter]()
    for dead_letter in dead_letters:
        at = dead_letter.place, dead_letter.span.start
        if at not in by_record or dead_letter.is_whole:
            by_record[at] = dead_letter
    readers = dict[TopicIdPartition, _Reader]()
    for (place, offset), dead_letter in sorted(by_record.items(), key=lambda item: item[0]):
        if place not in readers:
            readers[place] = _Reader(log, place)
        record = readers[place].at(offset)
        # The record is gone by retention, or because Kafka lost it.
        if record is None or not dead_letter.is_of(record):
            if not dead_letter.is_whole:
                yield "cut"
                continue
            record = LogRecord(offset, None, dead_letter.value)
        if FROM in dict(record.headers) and not again:
            yield "again"
        else:
            yield _New(place, offset, _new(place.partition, record, to))
    for reader in readers.values():
        reader.close()


def _new(place: Partition, record: LogRecord, to: str) -> NewRecord:
    first = f"{place}@{record.offset}".encode()
    headers = record.headers if FROM in dict(record.headers) else (*record.headers, (FROM, first))
    return NewRecord(
        to, record.value, record.key, headers, place.index if to == place.topic else None
    )


class _Reader:
    """Reads single records of a partition by ascending offsets.

    If the topic was created again, it has none of these records.
    """

    def __init__(self, log: Log, place: TopicIdPartition) -> None:
        self.place = place.partition
        self._log = log
        try:
            self._bounds = log.bounds(self.place)
        except UnknownTopicError:
            self._bounds = Bounds(0, 0)
        self._topic_id = identified(log, self.place, 0).topic_id
        if "" != place.topic_id != self._topic_id != "":
            self._bounds = Bounds(0, 0)
        self._tail: Tail | None = None
        self._read = deque["LogRecord"]()

    def at(self, offset: int) -> LogRecord | None:
        """Return the record at an offset; None if the log has no record there.

        Raises:
            UnavailableError: If Kafka does not deliver it in time.
        """
        if not self._bounds.start <= offset < self._bounds.end:
            return None
        tail = self._tail
        if tail is None or offset > tail.position() + _READ_RECORDS:
            self.close()
            self._read.clear()
            known = LogPosition(offset, self._topic_id)
            tail = self._tail = self._log.tail(self.place, known)
        while True:
            while self._read and self._read[0].offset < offset:
                self._read.popleft()
            if self._read:
                return self._read[0] if self._read[0].offset == offset else None
            if (position := tail.position()) > offset:
                return None
            self._read.extend(tail.read(_READ_RECORDS, _READ_S))
            if tail.position() == position:
                raise UnavailableError(f"{self.place} cannot be read beyond offset {position} now")

    def close(self) -> None:
        """Close the connection."""
        if self._tail is not None:
            self._tail.close()


def _records_of(
    log: Log, batch: Batch, dead_letters: _DeadLetters, job: str
) -> dict[tuple[Partition, int], LogRecord]:
    """Return the records of a batch, in the order of its spans.

    Raises:
        ExpiredError: If some are gone.
        UnavailableError: If Kafka does not deliver them in time.
    """
    found = dict[tuple[Partition, int], LogRecord]()
    for span in batch.address:
        place, _ = dead_letters.dead_letter(job, batch, span)
        with closing(_Reader(log, place)) as reader:
            for offset in offsets_of(span, batch):
                if (record := reader.at(offset)) is not None:
                    found[span.place, offset] = record
    if len(found) < batch.samples:
        raise ExpiredError(
            f"batch {batch.offset} had {batch.samples} records, but Kafka has only {len(found)}"
        )
    return found
