"""Writes records that could not be used to a topic anew, each once, whatever is killed meanwhile.

A new record and a note of it in the dead-letter topic are one transaction of Kafka: who is killed
leaves both or neither, and the next one goes on with what has no note. All write under one name, so
that two cannot work at a time. A batch's quarantine is made final before: of a requeue and a replay
one counts. One that was killed between the two is found by its `Replayed` without a note.

A new record says in a header where its first one was. If it fails again, it has gone round once:
it is written no more unless somebody wants that, or records would go round for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from common.core.messages import Batch, Replayed
from common.core.spans import Partition, Span
from common.errors import ExpiredError, UnavailableError, UnknownTopicError
from common.ports.servers import Bounds, Log, LogRecord, NewRecord, NewTopic, Tail
from common.topics.dead_letters import DeadLetter, note_of, read_letters
from common.topics.names import dead_letter_topic

if TYPE_CHECKING:
    from common.jobs.quarantine import Quarantine

NAME = "doll.replay"  # the transactional id
FROM = "replayed_from"  # the header that names the address of the first record
_RECORDS = 500  # of one transaction
_BYTES = 4 << 20
_READ_RECORDS = 1000
_READ_S = 10.0

Outcome: TypeAlias = Literal["again", "cut", "new"]


class ReplayedLetters(NamedTuple):
    """What became of letters about records."""

    written: int
    again: int  # left out: they had been written anew once, and failed again
    cut: int  # left out: neither the record nor the whole of its value is there any more


class Replayer:
    """Takes the name for itself: what another one had begun is over, or will be no more.

    Args:
        by: Who wants it, for people.
    """

    def __init__(self, log: Log, by: str) -> None:
        self._log = log
        self._by = by
        self._transactions = log.transactions(NAME)

    def close(self) -> None:
        """Let go of the connection."""
        self._transactions.close()

    def records(self, letters: Iterable[DeadLetter], to: str, *, again: bool) -> ReplayedLetters:
        """Write the records anew that letters are about, whoever of several jobs wrote those.

        Args:
            letters: About records, and without a note.
            to: The topic; in the stream itself each goes to its partition.
            again: Also those that were written anew before.

        Raises:
            OutsideError: If they cannot be written; those that are will not be again.
        """
        counts = dict[Outcome, int].fromkeys(("new", "again", "cut"), 0)
        waiting, size = list[NewRecord](), 0
        for letter, new in _anew(self._log, letters, to, again=again):
            if not isinstance(new, NewRecord):
                counts[new] += 1
                continue
            waiting += new, note_of(letter.span, letter.key, to)
            size += len(new.value or b"")
            if len(waiting) >= 2 * _RECORDS or size >= _BYTES:
                self._transactions.write(waiting)
                counts["new"] += len(waiting) // 2
                waiting, size = [], 0
        if waiting:
            self._transactions.write(waiting)
        return ReplayedLetters(counts["new"] + len(waiting) // 2, counts["again"], counts["cut"])

    def batch(self, quarantine: Quarantine, batch: Batch, at_s: float, to: str = "") -> int | None:
        """Write the records of a quarantined batch anew, and make its quarantine final before.

        Args:
            quarantine: Of its job.
            batch: One that may be replayed, or of which that was begun.
            at_s: When, since 1970.
            to: The topic; empty: the streams that they are of.

        Returns:
            How many; None if it was taken back meanwhile, and nothing was done.

        Raises:
            ExpiredError: If some are gone; nothing was done.
            OutsideError: If they cannot be written now; whoever tries again goes on.
        """
        records = _records_of(self._log, batch)  # first: what cannot be read must not be sealed
        if batch not in quarantine.replayed():
            (counted,) = quarantine.write([Replayed(batch, self._by, at_s)])
            if not counted:
                return None
        letters = {dead_letter_topic(span.topic) for span in batch.address}
        self._log.create_topics([NewTopic(each, kept_forever=True) for each in sorted(letters)])
        self._transactions.write(
            [
                *(_new(span, record, to or span.topic) for span, record in records),
                *(note_of(span, str(span).encode(), to or span.topic) for span in batch.address),
            ]
        )
        return len(records)


def unfinished(log: Log, quarantine: Quarantine) -> list[Batch]:
    """Batches whose quarantine is final, and whose records were not written anew yet."""
    batches = quarantine.replayed()
    streams = {span.topic for batch in batches for span in batch.address}
    notes = {key for stream in streams for key in read_letters(log, stream).replayed}
    return [each for each in batches if str(each.address[0]).encode() not in notes]


def _anew(
    log: Log, letters: Iterable[DeadLetter], to: str, *, again: bool
) -> Iterator[tuple[DeadLetter, NewRecord | Outcome]]:
    """Each letter with its record as it is written anew, or why it is not."""
    by_key = {letter.key: letter for letter in letters}  # of several jobs, perhaps
    readers = dict[Partition, _Reader]()
    for letter in sorted(by_key.values(), key=lambda each: each.span):
        if letter.span.place not in readers:
            readers[letter.span.place] = _Reader(log, letter.span.place)
        record = readers[letter.span.place].at(letter.span.start)
        if record is None or not letter.is_of(record):  # retention, or a topic made anew
            if not letter.is_whole:
                yield letter, "cut"
                continue
            partition = letter.span.partition if to == letter.span.topic else None
            headers = ((FROM, letter.key),)
            yield letter, NewRecord(to, letter.value, None, headers, partition)
        elif FROM in dict(record.headers) and not again:
            yield letter, "again"
        else:
            yield letter, _new(letter.span, record, to)
    for reader in readers.values():
        reader.close()


def _new(span: Span, record: LogRecord, to: str) -> NewRecord:
    first = f"{span.topic}[{span.partition}]@{record.offset}".encode()
    headers = record.headers if FROM in dict(record.headers) else (*record.headers, (FROM, first))
    partition = span.partition if to == span.topic else None
    return NewRecord(to, record.value, record.key, headers, partition)


class _Reader:
    """Reads single records of a partition by their offsets, which only grow."""

    def __init__(self, log: Log, place: Partition) -> None:
        self.place = place
        self._log = log
        try:
            self._bounds = log.bounds(place)
        except UnknownTopicError:
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
            tail = self._tail = self._log.tail(self.place, offset)
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


def _records_of(log: Log, batch: Batch) -> list[tuple[Span, LogRecord]]:
    """The records that a batch was to be trained on, each with the span that it is of.

    Raises:
        ExpiredError: If some are gone.
        UnavailableError: If Kafka does not give them in time.
    """
    bad = {(s.topic, s.partition, offset) for s in batch.skipped for offset in s.offsets}
    found: list[tuple[Span, LogRecord]] = []
    for span in batch.address:
        reader = _Reader(log, span.place)
        try:
            found += [
                (span, record)
                for offset in range(span.start, span.end)
                if (*span.place, offset) not in bad and (record := reader.at(offset)) is not None
            ]
        finally:
            reader.close()
    if len(found) < batch.samples:
        raise ExpiredError(
            f"batch {batch.offset} had {batch.samples} records, only {len(found)} are there"
        )
    return found
