"""How far a job is behind its datastreams, from looks at their ends and at the leader's standing.

    first          settled           claimed            end
      |----in updates that a----|--in updates, or-----|---nobody has----|
           checkpoint covers       in batches that        claimed it
                                   wait for one

The lag is what nobody has claimed and what waits. How many batches wait is known of the job alone;
they are counted to its streams in proportion to what no checkpoint covers of each.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from services.admin.following.thinned import Thinned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.core.messages import Positions, Standing
    from common.core.spans import Partition

RATE_S = 10.0  # of arrivals
_LEAST_S = 1.0  # a rate over less would be noise
_STALE_S = 10.0  # after so long without an answer the ends count as unknown


class StreamState(NamedTuple):
    """One stream, now; None is what nobody knows."""

    stream: str
    partitions: int
    rate_per_s: float | None
    lag: int | None
    settled: int | None


class LagSample(NamedTuple):
    """All streams at one time, in their order."""

    at_s: float
    lag: tuple[int | None, ...]


class Streams:
    """The streams of one job.

    Args:
        names: In the order of the job's specification.
        first: Where each partition of the job begins.
    """

    def __init__(self, names: Sequence[str], first: Positions) -> None:
        self.names = tuple(names)
        self._first = dict(first)
        self._places: dict[str, list[Partition]] = {name: [] for name in names}
        for place in sorted(first):
            self._places[place.topic].append(place)
        self._ends: Positions = {}
        self._ends_at_s: float | None = None
        self._grown = deque[tuple[float, tuple[int, ...]]]()  # when, the sum of ends by stream
        self._lag: tuple[int | None, ...] = (None,) * len(self.names)
        self._settled: tuple[int | None, ...] = (None,) * len(self.names)
        self._samples = Thinned[LagSample]()

    @property
    def lag(self) -> int | None:
        """Of all streams together."""
        known = [lag for lag in self._lag if lag is not None]
        return sum(known) if len(known) == len(self._lag) else None

    def look(
        self,
        now: float,
        ends: Mapping[Partition, int] | None,
        standing: Standing | None,
        batch_size: int,
        version: int,
    ) -> None:
        """Take in a look.

        Args:
            now: Seconds since 1970.
            ends: Of all partitions; None: Kafka did not answer.
            standing: The leader's; None: there is none.
            batch_size: Samples of a batch.
            version: J; where it is 0 and nobody has led, nothing has been claimed.
        """
        if ends is not None:
            self._ends, self._ends_at_s = dict(ends), now
            sums = [sum(self._ends.get(p, 0) for p in self._places[name]) for name in self.names]
            self._grown.append((now, tuple(sums)))
            while len(self._grown) > 2 and self._grown[1][0] <= now - RATE_S:
                self._grown.popleft()
        if self._ends_at_s is None or now - self._ends_at_s > _STALE_S:
            self._ends, self._ends_at_s = {}, None
        self._settled = self._all_settled(standing)
        self._lag = self._all_lag(standing, batch_size, version)
        self._samples.add(LagSample(now, self._lag))

    def states(self) -> list[StreamState]:
        """Each stream as of the last look."""
        rates = self._rates()
        return [
            StreamState(
                name, len(self._places[name]), rates[index], self._lag[index], self._settled[index]
            )
            for index, name in enumerate(self.names)
        ]

    def samples(self) -> list[LagSample]:
        """The lag over time, thinned."""
        return self._samples.samples()

    def _all_lag(
        self, standing: Standing | None, batch_size: int, version: int
    ) -> tuple[int | None, ...]:
        if self._ends_at_s is None or (standing is None and version > 0):
            return (None,) * len(self.names)
        claimed = standing.claimed if standing is not None else {}
        waiting = standing.waiting * batch_size if standing is not None else 0
        unread = [
            sum(
                max(0, self._ends.get(place, 0) - claimed.get(place, self._first[place]))
                for place in self._places[name]
            )
            for name in self.names
        ]
        apart = _spread(waiting, self._uncovered(standing))
        return tuple(there + here for there, here in zip(unread, apart, strict=True))

    def _rates(self) -> list[float | None]:
        if self._ends_at_s is None or len(self._grown) < 2:
            return [None] * len(self.names)
        (since_s, before), (until_s, after) = self._grown[0], self._grown[-1]
        if until_s - since_s < _LEAST_S:
            return [None] * len(self.names)
        pairs = zip(before, after, strict=True)
        return [max(0, last - first) / (until_s - since_s) for first, last in pairs]

    def _all_settled(self, standing: Standing | None) -> tuple[int | None, ...]:
        if standing is None:
            return (None,) * len(self.names)
        return tuple(
            sum(
                max(0, standing.settled.get(place, self._first[place]) - self._first[place])
                for place in self._places[name]
            )
            for name in self.names
        )

    def _uncovered(self, standing: Standing | None) -> list[int]:
        """Records by stream that are claimed, and that no checkpoint covers."""
        if standing is None:
            return [0] * len(self.names)
        return [
            sum(
                max(0, standing.claimed.get(place, 0) - standing.settled.get(place, 0))
                for place in self._places[name]
            )
            for name in self.names
        ]


def _spread(count: int, room: Sequence[int]) -> list[int]:
    """Spread a count over places in proportion to their room, and never more than there is."""
    total = sum(room)
    count = min(count, total)
    parts, before = list[int](), 0
    seen = 0
    for each in room:
        seen += each
        until = count * seen // total if total else 0
        parts.append(until - before)
        before = until
    return parts
