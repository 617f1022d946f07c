"""Watches the ends of a job's logs: how much arrives, how much waits, and whether workers keep up.

Nothing here decides anything: where Kafka is away, there is nothing to tell until it is back.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from common.errors import DollError, UnavailableError
from common.metrics.leading import StreamFigures
from common.theory.updates import spread_stability, stability
from services.coordinator.readers import WAIT_S, Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.core.messages import Positions
    from common.core.spans import Partition
    from common.ports import Log
    from services.coordinator.measuring import Measuring
    from services.coordinator.readers import Ear

LOOK_S = 5.0  # two requests for each partition; scrapes are further apart
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


class StreamWatch(Reader):
    """Looks at the ends of a job's logs for as long as it is led.

    Args:
        log: Kafka.
        epoch: The leader's.
        first: Where every partition of the job begins.
        measuring: Knows the rest, and hears of it.
        ear: For a fault.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        log: Log,
        epoch: int,
        first: Positions,
        measuring: Measuring,
        ear: Ear,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__("streams", ear)
        self._source = log
        self._epoch = epoch
        self._first = first
        self._measuring = measuring
        self._clock = clock
        self._arrivals = Arrivals()

    def _read(self) -> bool:
        """Look, and wait for the next time.

        Raises:
            UnavailableError: If Kafka does not tell, whyever: readers of its records will know.
        """
        try:
            ends = {partition: self._source.bounds(partition).end for partition in self._first}
        except DollError as error:
            self._measuring.saw_streams(self._epoch, None)
            raise UnavailableError(str(error)) from error
        leads = self._measuring.saw_streams(self._epoch, self._figures(ends))
        self.stopped.wait(LOOK_S if leads else WAIT_S)  # or not yet: it is just beginning
        return True

    def _figures(self, ends: Positions) -> StreamFigures:
        spec, standing = self._measuring.spec, self._measuring.standing
        records = by_stream(self._first, ends)
        arrivals_per_s = self._arrivals.add(sum(records.values()), self._clock())
        if standing is None:
            return StreamFigures(records, {}, arrivals_per_s)
        claimed = by_stream(self._first, standing.claimed)
        sufficient, necessary = ratios(
            arrivals_per_s,
            standing.live,
            (spec.batch_size, spec.group_size),
            self._measuring.gradient_s,
        )
        lag = {stream: max(count - claimed[stream], 0) for stream, count in records.items()}
        return StreamFigures(records, lag, arrivals_per_s, sufficient, necessary)
