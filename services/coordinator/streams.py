"""Watches the ends of all jobs' logs: how much arrives and waits, and whether workers keep up.

Nothing here decides anything: where Kafka is away, there is nothing to tell until it is back.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from common.errors import DollError
from common.metrics.leading import StreamFigures
from common.telemetry import Outage
from common.theory.updates import spread_stability, stability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.core.messages import Positions
    from common.core.spans import Partition
    from common.ports import Log
    from common.telemetry import EventLogger
    from services.coordinator.measuring import Measuring

LOOK_S = 5.0  # scrapes are further apart
SOON_S = 1.0  # where a job has only just begun to be led
WINDOW_S = 60.0  # over which arrivals are averaged


class Arrivals:
    """How fast records arrive, from totals seen now and then."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, int]]()  # when and how many; the first may be too old

    def add(self, records: int, now: float) -> float | None:
        """Take in the total as of now; returns the mean of the last minute, None at first.

        Args:
            records: Arrived so far.
            now: Seconds that never go back.
        """
        self._seen.append((now, records))
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return max(records - before, 0) / (now - since) if now > since else None


def by_stream(first: Positions, positions: Mapping[Partition, int]) -> dict[str, int]:
    """How many records lie between the first position and these, by stream."""
    records = dict[str, int]()
    for partition, begin in first.items():
        count = max(positions.get(partition, begin) - begin, 0)
        records[partition.topic] = records.get(partition.topic, 0) + count
    return records


def ratios(
    arrivals_per_s: float | None,
    live: int,
    sizes: tuple[int, int],
    gradient_s: float | None,
) -> tuple[float | None, float | None]:
    """Give both bounds of Proposition 1, sufficient and necessary; None where they are not known.

    Args:
        arrivals_per_s: Of all streams, shared evenly by the workers.
        live: Workers, N.
        sizes: b and K.
        gradient_s: mu_C; what is not measured is 0 in an update.
    """
    if not arrivals_per_s or not live or not gradient_s:
        return None, None
    batch_size, group_size = sizes
    rates = np.full(live, arrivals_per_s / live)
    return (
        stability(rates, batch_size, gradient_s).ratio,
        spread_stability(rates, group_size, batch_size, gradient_s).ratio,
    )


class _Watched:
    """A job that is led.

    Args:
        epoch: The leader's.
        first: Where every partition of the job begins.
        measuring: Knows the rest, and hears of it.
    """

    def __init__(self, epoch: int, first: Positions, measuring: Measuring) -> None:
        self.first = first
        self._epoch = epoch
        self._measuring = measuring
        self._arrivals = Arrivals()

    def tell(self, ends: Positions, now: float) -> bool:
        """Tell what is to be seen; whether the leader leads already."""
        known = self.first.keys() <= ends.keys()  # else one of its streams is gone
        figures = self._figures(ends, now) if known else None
        return self._measuring.saw_streams(self._epoch, figures)

    def _figures(self, ends: Positions, now: float) -> StreamFigures:
        spec, standing = self._measuring.spec, self._measuring.standing
        records = by_stream(self.first, ends)
        arrivals_per_s = self._arrivals.add(sum(records.values()), now)
        if standing is None:
            return StreamFigures(records, {}, arrivals_per_s)
        claimed = by_stream(self.first, standing.claimed)
        sufficient, necessary = ratios(
            arrivals_per_s,
            standing.live,
            (spec.batch_size, spec.group_size),
            self._measuring.gradient_s,
        )
        lag = {stream: max(count - claimed[stream], 0) for stream, count in records.items()}
        return StreamFigures(records, lag, arrivals_per_s, sufficient, necessary)


class StreamWatch:
    """Looks at the ends of the logs of all jobs that are led, in one request: an actor of its own.

    Args:
        log: Kafka.
        logger: Of the process.
        clock: Seconds that never go back.
    """

    def __init__(
        self, log: Log, logger: EventLogger, clock: Callable[[], float] = monotonic
    ) -> None:
        self._source = log
        self._outage = Outage(logger, "streams")
        self._clock = clock
        self._lock = threading.Lock()
        self._watched = dict[str, _Watched]()

    def follow(self, job: str, epoch: int, first: Positions, measuring: Measuring) -> None:
        """Look after a job from its next turn on, until `forget`."""
        with self._lock:
            self._watched[job] = _Watched(epoch, first, measuring)

    def forget(self, job: str) -> None:
        """It is led no longer."""
        with self._lock:
            self._watched.pop(job, None)

    def turn(self) -> float:
        """Look, and tell each job; returns when to look again."""
        with self._lock:
            watched = list(self._watched.values())
        if not watched:
            return self._clock() + SOON_S
        partitions = {partition for each in watched for partition in each.first}
        try:
            ends = self._source.ends(partitions)
            self._outage.over()
        except DollError as error:
            self._outage.met(error)
            ends = {}
        now = self._clock()
        led = [each.tell(ends, now) for each in watched]
        return now + (LOOK_S if all(led) else SOON_S)

    def close(self) -> None:
        """There is nothing of its own."""
