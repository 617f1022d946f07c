"""Writes records that could not be used to a topic anew, each once, whatever is killed meanwhile.

New records and notes of them in the dead-letter topics are one transaction of Kafka: a process that
is killed leaves both or neither, and the next one goes on with what has no note. What counts is the
record (topic id, partition, offset) and the topic that it is written to, so a record that two jobs
could not use is written once. All write under one name, so that two cannot work at a time. A
batch's quarantine is made final before: of a requeue and a replay one counts. A batch whose replay
was interrupted between the two is found by its `Replayed` without a note.

A new record says in a header where its first one was. If it fails again, it has gone round once:
it is written no more unless somebody wants that, or records would go round for ever.
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

NAME = "doll.replay"  # the transactional id
FROM = "replayed_from"  # the header that names the address of the first record
_RECORDS = 500  # of one transaction
_BYTES = 4 << 20
_READ_RECORDS = 1000
_READ_S = 10.0

Outcome: TypeAlias = Literal["again", "cut", "new"]


class ReplayedDeadLetters(NamedTuple):
    """What became of letters about records."""

    written: int
    again: int  # left out: they had been written anew once, and failed again
    cut: int  # left out: neither the record nor the whole of its value is there any more


class _New(NamedTuple):
    """A record as it is written anew."""

    place: TopicIdPartition  # where the first one is
    offset: int
    record: NewRecord


class _DeadLetters:
    """Dead letters of some streams, read once."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._read = dict[str, DeadLettersRead]()
        self._jobs = dict[TopicIdPartition, Callable[[int], frozenset[str]]]()

    def of(self, stream: str) -> DeadLettersRead:
        """Return the letters of a stream."""
        if stream not in self._read:
            self._read[stream] = read_dead_letters(self._log, stream)
        return self._read[stream]

    def dead_letter(self, job: str, batch: Batch, span: Span) -> tuple[TopicIdPartition, int]:
        """Return which partition a batch's span is of, and where its letter is; -1: nowhere."""
        for each in self.of(span.topic).dead_letters:
            same = each.is_batch and each.job == job and each.span[:4] == span[:4]
            if same and each.batch in {None, batch}:
                return each.place, each.at
        return TopicIdPartition(identified(self._log, span.place, 0).topic_id, span.place), -1

    def missing(
        self, job: str, batch: Batch, to: str | None
    ) -> Iterator[tuple[TopicIdPartition, int]]:
        """Yield the records of a batch that were not written to a topic; None: to none at all."""
        for span in batch.address:
            place, at = self.dead_letter(job, batch, span)
            covers = self.of(span.topic).notes.covers
            target = to if to is None else to or span.topic
            for offset in offsets_of(span, batch):
                if not covers(place, offset, job, at, target):
                    yield place, offset

    def notes(self, written: Iterable[tuple[TopicIdPartition, int]], to: str) -> list[Note]:
        """Return notes that name each of these records, and count them as written.

        Args:
            written: Records.
            to: Topic; empty: the stream of each.
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
    """Takes the name for itself: what another one had begun is over, or will be no more.

    Args:
        by: Who wants it, for people.
    """

    def __init__(self, log: TransactionalLog, by: str) -> None:
        self._log = log
        self._by = by
        self._transactions = log.transactions(NAME)
        # Read from now on: nobody else writes notes any more.
        self._dead_letters = _DeadLetters(log)

    def close(self) -> None:
        """Let go of the connection."""
        self._transactions.close()

    def dead_letters(self, stream: str) -> DeadLettersRead:
        """Return the letters of a stream, and what was written anew so far."""
        return self._dead_letters.of(stream)

    def records(
        self, dead_letters: Iterable[DeadLetter], to: str, *, again: bool
    ) -> ReplayedDeadLetters:
        """Write the records anew that letters are about, each once.

        Args:
            dead_letters: Letters about records of one stream that were not written to the topic.
            to: The topic; in the stream itself each goes to its partition.
            again: Also those that were written anew before.

        Raises:
            OutsideError: If they cannot be written; those that are will not be again.
        """
        counts = dict[Outcome, int].fromkeys(("new", "again", "cut"), 0)
        waiting, size = list[_New](), 0
        for new in _anew(self._log, dead_letters, to, again=again):
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
        """Write the records of a quarantined batch anew, and make its quarantine final before.

        Args:
            quarantine: Of its job.
            batch: One that may be replayed, or of which that was begun.
            at_s: When, since 1970.
            to: The topic; empty: the streams that they are of.

        Returns:
            Number of records written, without those that were written for another job before; None
            if the batch was taken back meanwhile, and nothing was done.

        Raises:
            ExpiredError: If some are gone; nothing was done.
            OutsideError: If they cannot be written now; whoever tries again goes on.
        """
        # First: what cannot be read must not be sealed.
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
            if (place.partition, offset) in records  # else compaction left none there
        ]
        notes = self._dead_letters.notes(missing, to)
        self._transactions.write([*new, *(note.record for note in notes)])
        return len(new)


def unfinished(log: Log, quarantine: Quarantine) -> list[Batch]:
    """Batches whose quarantine is final, and whose records were not written anew yet."""
    dead_letters, job = _DeadLetters(log), quarantine.job
    return [each for each in quarantine.replayed() if any(dead_letters.missing(job, each, None))]


def _anew(
    log: Log, dead_letters: Iterable[DeadLetter], to: str, *, again: bool
) -> Iterator[_New | Outcome]:
    """Yield each record that letters are about as it is written anew, or why it is not."""
    by_record = dict[tuple[TopicIdPartition, int], DeadLetter]()  # of several jobs, perhaps
    for dead_letter in dead_letters:
        at = dead_letter.place, dead_letter.span.start
        if at not in by_record or dead_letter.is_whole:
            by_record[at] = dead_letter
    readers = dict[TopicIdPartition, _Reader]()
    for (place, offset), dead_letter in sorted(by_record.items(), key=lambda item: item[0]):
        if place not in readers:
            readers[place] = _Reader(log, place)
        record = readers[place].at(offset)
        if record is None or not dead_letter.is_of(record):  # retention, or records that Kafka lost
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
    """Reads single records of a partition by their offsets, which only grow.

    A topic that was made anew since holds none of them.
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
        """The record there; None if there is none.

        Raises:
            UnavailableError: If Kafka does not give it in time.
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
                raise UnavailableError(f"{self.place} cannot be read beyond {position} now")

    def close(self) -> None:
        """Read no more."""
        if self._tail is not None:
            self._tail.close()


def _records_of(
    log: Log, batch: Batch, dead_letters: _DeadLetters, job: str
) -> dict[tuple[Partition, int], LogRecord]:
    """Return the records that a batch was to be trained on, in the order of its spans.

    Raises:
        ExpiredError: If some are gone.
        UnavailableError: If Kafka does not give them in time.
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
            f"batch {batch.offset} had {batch.samples} records, only {len(found)} are there"
        )
    return found
