"""A while in which nobody wants records, too short to tell the client.

A pause at the client is dear: it throws away what it has fetched, and to seek and wake five
partitions again took 80-200 ms. A worker that is full mostly has room again within tens of
milliseconds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from common.adapters.kafka_log.client import Record

_LONG_S = 0.5  # from then on the client is paused; a rebalance may wait as long behind records
_MANY_RECORDS = 100  # likewise, whatever their size: each poll may bring one while callbacks run


class Lull:
    """How long nobody has wanted records, and what came nevertheless."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._lasts = False
        self._aside: list[Record] = []

    def lasts(self, wanted: int) -> bool:
        """Whether nobody has wanted records for long, given how many are wanted now."""
        if wanted > 0:
            self._since, self._lasts = None, False
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now >= self._since + _LONG_S or len(self._aside) >= _MANY_RECORDS:
            self._lasts = True
        return self._lasts

    def put(self, records: list[Record]) -> None:
        """Put aside what came."""
        self._aside += records

    def take(self, count: int) -> list[Record]:
        """Take the oldest of what was put aside."""
        taken, self._aside = self._aside[:count], self._aside[count:]
        return taken

    def take_all(self) -> list[Record]:
        """Take all that was put aside."""
        return self.take(len(self._aside))

    def forget(self, places: Collection[tuple[str, int]]) -> None:
        """Forget records of these partitions; what the client said of them stays said."""
        self._aside = [
            record
            for record in self._aside
            if record.error() is not None or (record.topic(), record.partition()) not in places
        ]
