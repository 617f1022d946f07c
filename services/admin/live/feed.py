"""Newest events of one job as bytes, encoded once and read by all streams.

Streams read a ring at their own pace, so a slow stream costs no memory. A stream that is overtaken
has lost events and must start again. An event's id names its ring and its number; a client that
reconnects with it continues there as long as the ring still has the next event.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress

# Four minutes of updates at 20 per second; about 2 MB.
EVENTS = 5000
_LONGEST_ID = 64


class Feed:
    """Events of one job. Thread-safe.

    Attributes:
        end: Number of the next event.
        closed: True if no more events will follow.

    Args:
        name: Name of this ring, different from those of other processes and of earlier runs.
        capacity: Number of events kept.
    """

    def __init__(self, name: str, capacity: int = EVENTS) -> None:
        self._name = name
        self._ring = deque[bytes](maxlen=capacity)
        self.end = 0
        self.closed = False
        self._lock = threading.Lock()
        self._waiting = dict[asyncio.Event, asyncio.AbstractEventLoop]()
        # Loops that have a pending `_notify`.
        self._woken = set[asyncio.AbstractEventLoop]()

    @property
    def listeners(self) -> int:
        """Number of open streams."""
        return len(self._waiting)

    def publish(self, kind: str, data: bytes) -> None:
        """Append an event; `data` is JSON on one line."""
        with self._lock:
            if self.closed:
                return
            self._ring.append(self.event(kind, data, self.end))
            self.end += 1
            self._wake()

    def skip(self) -> None:
        """Count an event that no stream needs, and drop all earlier ones."""
        with self._lock:
            self._ring.clear()
            self.end += 1

    def wake(self) -> None:
        """Wake all streams as if there were an event."""
        with self._lock:
            self._wake()

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            self.closed = True
            self._wake()

    def event(self, kind: str, data: bytes, number: int) -> bytes:
        """Return one event in the format of server-sent events."""
        return b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (
            *(self._name.encode(), number, kind.encode(), data),
        )

    def since(self, number: int) -> tuple[bytes, int] | None:
        """Return all events from a number on and the next number, or None if some were dropped."""
        with self._lock:
            gone = self.end - len(self._ring)
            if number < gone:
                return None
            news = [self._ring[index - gone] for index in range(number, self.end)]
            return b"".join(news), self.end

    def after(self, last_event_id: str) -> int | None:
        """Return the number after a client's last event, or None if the client must start again."""
        name, _, number = last_event_id[:_LONGEST_ID].rpartition("-")
        if name != self._name or not (number.isascii() and number.isdigit()):
            return None
        following = int(number) + 1
        with self._lock:
            return following if self.end - len(self._ring) <= following <= self.end else None

    def listen(self, loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
        """Set `news` on its loop whenever there are new events."""
        with self._lock:
            self._waiting[news] = loop
            if self.closed:
                news.set()

    def unlisten(self, news: asyncio.Event) -> None:
        """Undo `listen`."""
        with self._lock:
            self._waiting.pop(news, None)

    def _wake(self) -> None:
        """Schedule one `_notify` on each loop, no matter how many events arrive before it runs."""
        for news in [each for each, loop in self._waiting.items() if loop.is_closed()]:
            self._woken.discard(self._waiting.pop(news))
        for loop in {*self._waiting.values()} - self._woken:
            # The loop may close at this moment.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._notify, loop)
                self._woken.add(loop)

    def _notify(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._woken.discard(loop)
            for news, its_loop in self._waiting.items():
                if its_loop is loop:
                    news.set()
