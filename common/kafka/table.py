"""A compacted topic as a dictionary that several processes change by compare-and-set.

Each record carries a *number*: one more than the number of the record in force that its
writer started from. A reader takes the first record of a name, then each record with a higher
number than the one in force. It ignores all others: they are *lost*. So of two records that were
made from the same one, the first counts.

    offset   7         8          9          10
    number   4         5          5          6
    record   running   K = 8      paused     paused, K = 8
             counts    counts     is lost    counts: its writer has read offsets 8 and 9

For a reader of every record, a higher number is always exactly one more, because a writer of a
higher number has read all records in force. Compaction makes gaps: in the part of the log that it
has cleaned, it keeps only the last record of each name, even a lost one. The next record that
counts puts such a reader right, since its number is higher than all before it. Until then the
reader takes the lost record for the one in force. Therefore `repair` writes the value in force once
more if a lost record stays the last one of its name. Compaction leaves each record alone for an
hour, and the repair is done long before.

No name is ever removed, because its numbers must not begin again. A record without a number or a
value comes from another program and counts for nothing. A record that does not parse counts by its
number and is logged: a later version may have written it, and it must not stop other names.

If somebody deletes the topic, a table keeps the entries that it has read, so that jobs continue. It
reads the new topic from its first record. Entries without a record in the new topic are
*missing* until a restore (`common.kafka.backup`) or `update` writes them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from time import monotonic, time
from typing import Generic, NamedTuple, TypeVar, cast

from common.core.spans import Partition
from common.errors import (
    BrokenWriterError,
    ConflictError,
    ExpiredError,
    OutsideError,
    TruncatedError,
    UnavailableError,
    UnknownOutcomeError,
    UnknownTopicError,
    WireError,
)
from common.kafka.names import differences, remedy
from common.kafka.port import Bounds, Log, LogRecord, NewTopic, Tail, Writer
from common.kafka.read import identified
from common.telemetry.logging import event_logger

T = TypeVar("T")
R = TypeVar("R")

# Names of headers: a decimal number, and a random id, so that a writer finds its own record.
NUMBER = "number"
WRITE = "write"
# Time that a lost record may stay the last one. Its writer needs milliseconds to write again.
REPAIR_S = 5.0
# Age up to which compaction leaves a record alone: many times the time of a repair.
COMPACTION_LAG_S = 3600.0

_log = event_logger(__name__)
_READ_RECORDS = 1000
_READ_S = 0.2
# A broker's election of a leader takes some seconds.
PATIENCE_S = 15.0
# Maximum number of digits of a record's number. Writers count by one, so they never reach it.
_MOST_DIGITS = 15
# Remedy if the topic has lost records.
RESTORE = "restore the records with `doll restore FILE`"
# Each lost race has another winner: 20 in a row mean that some program writes in a loop.
_ATTEMPTS = 20


def table_topic(name: str) -> NewTopic:
    """Return the topic of a table, to be created."""
    return NewTopic(name, compacted=True, compaction_lag_s=COMPACTION_LAG_S)


class Unreadable(NamedTuple):
    """The record in force of a name, if it does not parse."""

    offset: int
    reason: str


class InForce(NamedTuple):
    """The record in force of a name."""

    number: int
    value: bytes


class CompactedTable(Generic[T]):
    """Reads and writes one compacted topic. Threads may share a table.

    Threads write side by side: no lock is held while a broker confirms a record, and whichever
    thread reads on finds the outcomes of all records that wait for theirs.

    Args:
        log: Log that has the topic. The table creates the topic when it first needs it.
        topic: Name of the topic; the table uses partition 0 only.
        decode: Reads an entry from key and value; raises WireError if they do not parse.
        noun: Word for an entry in messages and log events. It is also the name of the `doll`
            command for these entries.
        closed: True if an entry is removed when its record in force does not parse. Otherwise the
            previous entry stays.
        clock: Returns seconds since 1970.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        decode: Callable[[bytes | None, bytes], T],
        noun: str,
        *,
        closed: bool,
        clock: Callable[[], float] = time,
    ) -> None:
        self._log = log
        self._partition = Partition(topic, 0)
        self._decode = decode
        self._noun = noun
        self._closed = closed
        self._clock = clock
        # The lock guards all that follows.
        self._lock = threading.RLock()
        self._open: Tail | None = None
        # True once the topic was read to its end since it was opened.
        self._whole = False
        # True once the topic's settings were checked.
        self._looked = False
        self._entries = dict[str, T]()
        # A copy for `refresh`; None if an entry has changed since it was made.
        self._shown: Mapping[str, T] | None = None
        self._in_force = dict[str, InForce]()
        # Names that were entries before the topic was opened again, until a record of them is read.
        self._remembered = set[str]()
        # Names of entries without a record in the topic, as last read.
        self._missing = frozenset[str]()
        # Names whose last record is a lost one, with the time at which it was written or read.
        self._lost_since = dict[str, float]()
        self._unreadable = dict[str, Unreadable]()
        # Writes of this process whose writer waits: True if the record counts, False if it lost,
        # None if it was not read back yet.
        self._outcomes = dict[bytes, bool | None]()
        self._arrived = threading.Condition()
        # Number of times that records arrived or that a thread read some.
        self._arrivals = 0

    def read(self) -> dict[str, T]:
        """Return all entries as of now, by name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        with self._lock:
            self._catch_up()
            return dict(self._entries)

    @property
    def unreadable(self) -> dict[str, Unreadable]:
        """Names whose newest record, as last read, does not parse."""
        with self._lock:
            return dict(self._unreadable)

    @property
    def missing(self) -> frozenset[str]:
        """Names of entries without a record in the topic, as last read."""
        with self._lock:
            return self._missing

    def refresh(self, timeout_s: float) -> Mapping[str, T]:
        """Wait up to `timeout_s` for news, then return all entries as known by then.

        The result is the same object until an entry changes. If the topic must be read again, it is
        first read to its end: in a part of it, entries would seem to be missing or outdated.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        seen = self._arrivals
        with self._lock:
            news = self._take(0.0)
        if not news and timeout_s > 0 and self._whole:
            with self._arrived:
                self._arrived.wait_for(lambda: self._arrivals != seen, timeout_s)
        with self._lock:
            self._take(0.0)
            if not self._whole:
                self._catch_up()
            if self._shown is None:
                self._shown = dict(self._entries)
            return self._shown

    def update(self, name: str, change: Callable[[T | None], R], encode: Callable[[R], bytes]) -> R:
        """Change an entry, and return once the change is known to be made.

        Args:
            name: Name of the entry.
            change: Receives the current entry, or None, and returns the new one, or
                the very same object to change nothing. It is called again if somebody else changed
                the entry meanwhile. It may raise to refuse the change.
            encode: Writes the new entry.

        Returns:
            The last result of `change`.

        Raises:
            ConflictError: If others changed the entry each time that this was tried.
            UnknownOutcomeError: If the change may have been made, or may still be made.
            UnavailableError: If Kafka is unavailable for long; nothing was sent.
        """
        lost, until = False, monotonic() + PATIENCE_S
        with self._lock:
            self._catch_up()
            self.repair()
        try:
            for _ in range(_ATTEMPTS):
                with self._lock:
                    entry, in_force = self._entries.get(name), self._in_force.get(name)
                new, before = change(entry), cast("object", entry)
                if new is before:
                    return new
                # Stays false if `_put` raises: the outcome of a repair would be unknown, too.
                lost = False
                lost = not self._put(name, in_force, encode(new))
                if not lost:
                    return new
                if monotonic() > until:
                    break
        finally:
            # Repair at once: this process may be the only one that writes, and may end now.
            if lost:
                with self._lock:
                    self._repair(name)
        raise ConflictError(
            f'other programs changed the {self._noun} "{name}" during every attempt, so this'
            " change was not made; try again"
        )

    def repair(self) -> None:
        """Write the value in force once more if a lost record has been the last one for 5 s.

        Only a process that may write the topic calls this. A failure is logged, and the next call
        after 5 s tries again.
        """
        with self._lock:
            now = self._clock()
            for name in [each for each, s in self._lost_since.items() if now - s >= REPAIR_S]:
                self._repair(name)

    def close(self) -> None:
        """Close the reader."""
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None
                self._whole = False

    def _put(self, name: str, made_from: InForce | None, value: bytes) -> bool:
        """Append a record made from the one in force; True if it counts, False if it lost.

        Raises:
            UnknownOutcomeError: If that is not known.
        """
        write = secrets.token_hex(8).encode()
        number = 1 if made_from is None else made_from.number + 1
        writer = self._log.writer()
        self._outcomes[write] = None
        try:
            self._append(writer, name, number, write, value)
            if not writer.flush(PATIENCE_S):
                raise self._unknown_fate(name, "Kafka did not confirm the change")
            with self._lock:
                if self._outcomes[write] is None:
                    self._catch_up()
                counts = self._outcomes[write]
        except (BrokenWriterError, UnavailableError) as error:
            raise self._unknown_fate(name, str(error)) from error
        finally:
            with self._lock:
                del self._outcomes[write]
            writer.close()
        if counts is None:
            raise self._unknown_fate(name, "the change cannot be read back")
        return counts

    def _append(self, writer: Writer, name: str, number: int, write: bytes, value: bytes) -> None:
        headers = ((NUMBER, b"%d" % number), (WRITE, write))
        writer.append(self._partition.topic, value, key=name.encode(), headers=headers)

    def _repair(self, name: str) -> None:
        """Write the value in force of a name once more, unless its last record counts by now.

        The lock must be held.
        """
        try:
            self._catch_up()
            if name in self._lost_since:
                in_force = self._in_force[name]
                self._put(name, in_force, in_force.value)
                _log.info(f"{self._noun}_repaired", name=name)
        except OutsideError as error:
            self._lost_since[name] = self._clock()
            _log.warning(f"{self._noun}_not_repaired", name=name, reason=str(error))

    def _unknown_fate(self, name: str, reason: str) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f'the change of the {self._noun} "{name}" may have been made, or may still be made:'
            f" {reason}; check with `doll {self._noun} list`"
        )

    def _catch_up(self) -> None:
        """Read the topic to its current end."""
        tail, until = self._tail(), monotonic() + PATIENCE_S
        end = self._bounds().end
        # The topic lost records, so all that was read is in doubt.
        if tail.position() > end:
            self._read_again()
            tail = self._tail()
        while tail.position() < end:
            if monotonic() > until:
                raise UnavailableError(
                    f"{self._partition.topic} could not be read to its end at {end}"
                )
            self._take(_READ_S)
            tail = self._tail()
        self._whole = True
        self._look_for_missing()

    def _take(self, timeout_s: float) -> bool:
        """Apply the available records; return True if there were any."""
        try:
            records = self._tail().read(_READ_RECORDS, timeout_s)
        # The topic is not the one that was read: it was recreated, or has lost records.
        except (ExpiredError, TruncatedError):
            self._read_again()
            return False
        except UnknownTopicError as error:
            self._read_again()
            raise UnavailableError(str(error)) from error
        for record in records:
            counts, write = self._fold(record), dict(record.headers).get(WRITE, b"")
            # A second record of one write is a copy, which never counts.
            if self._outcomes.get(write, False) is None:
                self._outcomes[write] = counts
        if records:
            self._look_for_missing()
            self._notify()
        return bool(records)

    def _read_again(self) -> None:
        """Read the topic from its first record again; an entry stays until its record is read."""
        self.close()
        self._remembered |= self._entries.keys()
        self._in_force.clear()
        self._lost_since.clear()
        self._unreadable.clear()
        for write in tuple(self._outcomes):
            self._outcomes[write] = None

    def _look_for_missing(self) -> None:
        """Log once which entries the topic has no records of, when that changes."""
        missing = frozenset(self._remembered) if self._whole else self._missing
        if missing == self._missing:
            return
        self._missing = missing
        topic = self._partition.topic
        if missing:
            _log.error(
                f"{self._noun}_records_missing",
                topic=topic,
                names=sorted(missing),
                remedy=RESTORE,
            )
        else:
            _log.info(f"{self._noun}_records_found", topic=topic)

    def _notify(self) -> None:
        """Wake threads that wait for news."""
        with self._arrived:
            self._arrivals += 1
            self._arrived.notify_all()

    def _tail(self) -> Tail:
        if self._open is None:
            topic = table_topic(self._partition.topic)
            self._log.create_topics([topic])
            self._look_at_settings(topic)
            known = identified(self._log, self._partition, self._bounds().start)
            self._open = self._log.tail(self._partition, known, self._notify)
        return self._open

    def _look_at_settings(self, topic: NewTopic) -> None:
        """Log once which settings differ from those that we would have chosen."""
        differing = differences([topic], self._log.settings([topic.name]))
        if differing and not self._looked:
            _log.warning(
                "topic_settings_differ",
                topic=topic.name,
                reason="; ".join(map(str, differing)),
                remedy=remedy(differing),
            )
        self._looked = True

    def _bounds(self) -> Bounds:
        """Return the topic's bounds.

        Raises:
            UnavailableError: If Kafka is unavailable, or not all brokers know the new topic yet.
        """
        try:
            return self._log.bounds(self._partition)
        except UnknownTopicError as error:
            raise UnavailableError(str(error)) from error

    def _fold(self, record: LogRecord) -> bool:
        """Apply one record; return True if it counts."""
        name = (record.key or b"").decode(errors="replace")
        in_force, number = self._in_force.get(name), _number_of(record)
        if record.value is None or number is None:
            self._reject(
                record, "the record has no number or no value, so another program wrote it"
            )
        elif in_force is None or number > in_force.number:
            self._in_force[name] = InForce(number, record.value)
            self._remembered.discard(name)
            self._lost_since.pop(name, None)
            self._enter(name, record, record.value)
            return True
        elif (number, record.value) == in_force:
            # A copy, or the same repair by another process: compaction may keep either.
            self._lost_since.pop(name, None)
            return False
        if in_force is not None:
            # If the broker's clock is ahead of ours, the record counts as written now.
            self._lost_since[name] = min(record.timestamp_s, self._clock())
        return False

    def _enter(self, name: str, record: LogRecord, value: bytes) -> None:
        """Make a record the entry of its name."""
        self._shown = None
        self._unreadable.pop(name, None)
        try:
            self._entries[name] = self._decode(record.key, value)
        except WireError as error:
            self._unreadable[name] = Unreadable(record.offset, str(error))
            self._reject(record, str(error))
            if self._closed:
                self._entries.pop(name, None)

    def _reject(self, record: LogRecord, reason: str) -> None:
        _log.warning(f"{self._noun}_rejected", offset=record.offset, reason=reason)


def _number_of(record: LogRecord) -> int | None:
    """Return a record's number; None if it has no number."""
    text = dict(record.headers).get(NUMBER, b"")
    return int(text) if len(text) <= _MOST_DIGITS and text.isdigit() else None
