"""A compacted topic as a dictionary: the newest record of a name counts, a tombstone removes it.

A record that does not parse is left out and logged: it may be of a later version, and must not stop
others.

Whoever writes reads back what else was written since it last read. The first of several counts: who
came later puts back what it overwrote, and is told.

    offset        7             8              9             10
    writer        -             a person       the leader    the leader
    record        running       K = 8          paused        K = 8, put back: tried again later
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, NamedTuple, TypeVar

from common.core.spans import Partition
from common.errors import (
    BrokenWriterError,
    ConflictError,
    ExpiredError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
    WireError,
)
from common.ports.servers import Bounds, Log, LogRecord, NewTopic, Tail
from common.telemetry.logging import event_logger
from common.topics.names import differences, remedy
from common.topics.read import identified

T = TypeVar("T")

_log = event_logger(__name__)
_READ_RECORDS = 1000
_READ_S = 0.2
_PATIENCE_S = 15.0  # a broker's election of a leader takes some seconds


class Unreadable(NamedTuple):
    """The newest record of a name, where it does not parse."""

    offset: int
    reason: str


class CompactedTable(Generic[T]):
    """Reads and writes one such topic. May be shared between threads.

    `lock` is for whoever writes what depends on what was read: nobody else reads or writes with
    this book meanwhile, so that what `write` finds to be new is new to its caller, too.

    Args:
        log: Where the topic is; it is made when it is first wanted.
        topic: Its first partition is all of it.
        decode: Reads an entry from key and value; raises WireError on what does not parse.
        noun: What one entry is called, in messages, in the log and by the command `doll`.
        closed: Whether a name whose newest record does not parse is gone, rather than what it was.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        decode: Callable[[bytes | None, bytes], T],
        noun: str,
        *,
        closed: bool,
    ) -> None:
        self._log = log
        self._partition = Partition(topic, 0)
        self._decode = decode
        self._noun = noun
        self._closed = closed
        self.lock = threading.RLock()  # guards all that follows
        self._open: Tail | None = None
        self._whole = False  # read to the topic's end since it was opened
        self._looked = False  # at the topic's settings
        self._entries = dict[str, T]()
        self._unreadable = dict[str, Unreadable]()
        self.rejected = 0  # records so far that did not parse
        self._arrived = threading.Condition()
        self._arrivals = 0  # times that there was something to read, or that somebody read it

    def read(self) -> dict[str, T]:
        """All entries as of now, by name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        with self.lock:
            self._catch_up()
            return dict(self._entries)

    @property
    def unreadable(self) -> dict[str, Unreadable]:
        """Names whose newest record, as last read, does not parse."""
        with self.lock:
            return dict(self._unreadable)

    def refresh(self, timeout_s: float) -> dict[str, T]:
        """Wait up to `timeout_s` for news, then return all entries as known by then.

        Where the topic has to be read anew, it is read to its end first: by a part of it, entries
        would seem to be gone, or to be what they were once.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        seen = self._arrivals
        with self.lock:
            news = self._take(0.0)
        if not news and timeout_s > 0 and self._whole:
            with self._arrived:
                self._arrived.wait_for(lambda: self._arrivals != seen, timeout_s)
        with self.lock:
            self._take(0.0)
            if not self._whole:
                self._catch_up()
            return dict(self._entries)

    def write(self, name: str, value: bytes | None) -> None:
        """Replace the value of a name as this book last read it; None removes it.

        Raises:
            ConflictError: If somebody else wrote the name in the same moment.
            UnavailableError: If Kafka is unavailable for long.
        """
        with self.lock:
            key, own = name.encode(), self._append(name, value)
            news = [new for new in self._catch_up() if new.key == key]
            if own is None:  # what says the same is as good as it
                own = next((new.offset for new in news if new.value == value), None)
            others = [new for new in news if new.offset != own]
            # Where it cannot be read yet, all that can be came earlier.
            earlier = [other for other in others if own is None or other.offset < own]
            if not earlier:
                return  # whoever came later read this one, or puts it back
            if len(earlier) == len(others):
                self._append(name, earlier[-1].value)
                self._catch_up()
        raise ConflictError(
            f'somebody else wrote the {self._noun} "{name}" in the same moment, and theirs counts;'
            f" look with `doll {self._noun} list`, and try again"
        )

    def close(self) -> None:
        """Let go of the reader."""
        with self.lock:
            if self._open is not None:
                self._open.close()
                self._open = None
                self._whole = False

    def _append(self, name: str, value: bytes | None) -> int | None:
        """Append a record; returns its offset, None where Kafka has not said it."""
        delivered, writer = list[int | None](), self._log.writer()
        try:
            writer.append(
                self._partition.topic, value, key=name.encode(), on_delivered=delivered.append
            )
            if not writer.flush(_PATIENCE_S):
                raise self._unknown_fate(name)
        except BrokenWriterError as error:
            raise self._unknown_fate(name) from error
        finally:
            writer.close()
        (own,) = delivered
        return own

    def _unknown_fate(self, name: str) -> UnavailableError:
        return UnavailableError(
            f'Kafka did not answer; whether it took the {self._noun} "{name}" shows'
            f" `doll {self._noun} list`"
        )

    def _catch_up(self) -> list[LogRecord]:
        """Fold to what is now the end; return what was new."""
        tail, news, until = self._tail(), list[LogRecord](), monotonic() + _PATIENCE_S
        end = self._bounds().end
        if tail.position() > end:  # it lost records, and all that was read is in doubt
            self._begin_anew()
            tail = self._tail()
        while tail.position() < end:
            if monotonic() > until:
                raise UnavailableError(
                    f"{self._partition.topic} could not be read to its end at {end}"
                )
            news += self._take(_READ_S)
            tail = self._tail()
        self._whole = True
        return news

    def _take(self, timeout_s: float) -> list[LogRecord]:
        try:
            records = self._tail().read(_READ_RECORDS, timeout_s)
        except (ExpiredError, TruncatedError):  # it is not the topic any more that was read
            self._begin_anew()
            return []
        except UnknownTopicError as error:  # deleted: what was read counts until there is more
            self.close()
            raise UnavailableError(str(error)) from error
        for record in records:
            self._fold(record)
        if records:
            self._tell()
        return records

    def _begin_anew(self) -> None:
        """Forget what was read: what counts is what is there."""
        self.close()
        self._entries.clear()
        self._unreadable.clear()

    def _tell(self) -> None:
        """Wake whoever waits for news."""
        with self._arrived:
            self._arrivals += 1
            self._arrived.notify_all()

    def _tail(self) -> Tail:
        if self._open is None:
            topic = NewTopic(self._partition.topic, compacted=True)
            self._log.create_topics([topic])
            self._look_at_settings(topic)
            known = identified(self._log, self._partition, self._bounds().start)
            self._open = self._log.tail(self._partition, known, self._tell)
        return self._open

    def _look_at_settings(self, topic: NewTopic) -> None:
        """Say once what is not as we would have made the topic."""
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
        """What the topic holds.

        Raises:
            UnavailableError: If Kafka is, or has not told all brokers of the new topic yet.
        """
        try:
            return self._log.bounds(self._partition)
        except UnknownTopicError as error:
            raise UnavailableError(str(error)) from error

    def _fold(self, record: LogRecord) -> None:
        name = (record.key or b"").decode(errors="replace")
        self._unreadable.pop(name, None)
        if record.value is None:
            self._entries.pop(name, None)
            return
        try:
            self._entries[name] = self._decode(record.key, record.value)
        except WireError as error:
            self.rejected += 1
            self._unreadable[name] = Unreadable(record.offset, str(error))
            _log.warning(f"{self._noun}_rejected", offset=record.offset, reason=str(error))
            if self._closed:
                self._entries.pop(name, None)
