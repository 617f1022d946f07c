"""The newest events of one job as bytes, ready to be sent: made once, read by all streams.

A ring that every stream reads at its own pace, so a slow one costs no memory: whoever is overtaken
has lost events and must begin anew. An event's id says of which ring it is and which number it has;
with it a reader that comes back goes on where it was, as long as that is still in the ring.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress

EVENTS = 5000  # four minutes of updates at 20 per second; about 2 MB
_LONGEST_ID = 64


class Feed:
    """Events of one job. May be shared between threads.

    Attributes:
        end: Number of the event that comes next.
        closed: Whether there will be no more.

    Args:
        name: Of this ring, unlike those of other processes and other lives.
        capacity: Events kept.
    """

    def __init__(self, name: str, capacity: int = EVENTS) -> None:
        self._name = name
        self._ring = deque[bytes](maxlen=capacity)
        self.end = 0
        self.closed = False
        self._lock = threading.Lock()
        self._waiting = dict[asyncio.Event, asyncio.AbstractEventLoop]()
        self._woken = set[asyncio.AbstractEventLoop]()  # that will look anyway

    @property
    def listeners(self) -> int:
        """Number of streams that are open."""
        return len(self._waiting)

    def publish(self, kind: str, data: bytes) -> None:
        """Append an event; its data are JSON on one line."""
        with self._lock:
            if self.closed:
                return
            self._ring.append(self.event(kind, data, self.end))
            self.end += 1
            self._wake()

    def skip(self) -> None:
        """Count an event that nobody wants, and forget all before it."""
        with self._lock:
            self._ring.clear()
            self.end += 1

    def wake(self) -> None:
        """Have all streams look, as if there were an event."""
        with self._lock:
            self._wake()

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            self.closed = True
            self._wake()

    def event(self, kind: str, data: bytes, number: int) -> bytes:
        """One event as it is sent."""
        return b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (
            *(self._name.encode(), number, kind.encode(), data),
        )

    def since(self, number: int) -> tuple[bytes, int] | None:
        """All events from a number on, and the number after them; None: some of them are gone."""
        with self._lock:
            gone = self.end - len(self._ring)
            if number < gone:
                return None
            news = [self._ring[index - gone] for index in range(number, self.end)]
            return b"".join(news), self.end

    def after(self, last_event_id: str) -> int | None:
        """The number after an event that a reader had; None: it has to begin anew."""
        name, _, number = last_event_id[:_LONGEST_ID].rpartition("-")
        if name != self._name or not (number.isascii() and number.isdigit()):
            return None
        following = int(number) + 1
        with self._lock:
            return following if self.end - len(self._ring) <= following <= self.end else None

    def listen(self, loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
        """Set `news` on its loop whenever there are some."""
        with self._lock:
            self._waiting[news] = loop
            if self.closed:
                news.set()

    def unlisten(self, news: asyncio.Event) -> None:
        """Undo `listen`."""
        with self._lock:
            self._waiting.pop(news, None)

    def _wake(self) -> None:
        """Have each loop tell its streams, once however much comes before it does."""
        for news in [each for each, loop in self._waiting.items() if loop.is_closed()]:
            self._woken.discard(self._waiting.pop(news))
        for loop in {*self._waiting.values()} - self._woken:
            with suppress(RuntimeError):  # closed in this moment
                loop.call_soon_threadsafe(self._notify, loop)
                self._woken.add(loop)

    def _notify(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._woken.discard(loop)
            for news, its_loop in self._waiting.items():
                if its_loop is loop:
                    news.set()
