"""How much may be asked: requests by the second, streams at once, the size of a body."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import HTTPException

if TYPE_CHECKING:
    from starlette.types import Message, Receive

BUCKETS = 10_000  # callers that are remembered: about 2 MB; whoever was forgotten has a full bucket

CLOSE = {"Connection": "close"}  # nobody reads the rest


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float  # when there were so many


class Buckets:
    """A token bucket for each caller.

    Args:
        rate_per_s: Requests of one caller, on average; twice that at once.
        most: Callers that are remembered.
    """

    def __init__(self, rate_per_s: float, most: int = BUCKETS) -> None:
        self._rate_per_s = rate_per_s
        self._size = max(1.0, 2 * rate_per_s)
        self._most = most
        self._buckets = OrderedDict[str, _Bucket]()  # longest unseen first

    def take(self, caller: str, now: float) -> float:
        """Take a token; returns for how many seconds there is none, 0 if one was taken."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = _Bucket(self._size, now)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(caller)
            gained = max(0.0, now - bucket.at_s) * self._rate_per_s
            bucket.tokens, bucket.at_s = min(self._size, bucket.tokens + gained), now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / self._rate_per_s
        bucket.tokens -= 1
        return 0.0

    def __len__(self) -> int:
        return len(self._buckets)


class Streams:
    """Streams of events that are open."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.open = 0

    def begin(self) -> bool:
        """Count one more; False if there are too many."""
        if self.open >= self._most:
            return False
        self.open += 1
        return True

    def end(self) -> None:
        """Count one less."""
        self.open -= 1


def too_large(body_bytes: int) -> str:
    """What to say of a body that is larger than so much."""
    return f"the body is larger than {body_bytes:,} bytes"


def bounded(receive: Receive, body_bytes: int) -> Receive:
    """Receive a body that may not be larger than so much, whatever its length was said to be."""
    taken = 0

    async def receive_some() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > body_bytes:
            raise HTTPException(413, too_large(body_bytes), CLOSE)
        return message

    return receive_some
