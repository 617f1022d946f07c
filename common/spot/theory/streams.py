"""The rate of a worker's stream, from its batch indicators alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

from common.spot.theory.estimates import JEFFREYS, Estimate, RatePrior, rate_from_counts
from common.spot.theory.tallies import Sums

# Number of batch keys that are remembered. A batch is repeated soon after the first time, or never.
REMEMBERED = 1000


class StreamTally:
    """The rate of one worker's stream, from its batch indicators alone.

    An indicator has the number of records and the arrival times of the first and the last. The rate
    is the number of all records but the very first, over the time from the first record ever to the
    last. So a single batch gives (b - 1) / (last - first).

    The time between two batches counts, too: if a batch is closed early because nothing arrived,
    all silence lies after it. The records of overlapping batches, as from several partitions, add
    up, and their shared time counts once. A late batch lies within time that counts already, and
    only adds its records. A repeated batch adds nothing. So the order is irrelevant. A record's
    time is its timestamp, so a worker that processes a backlog does not raise the rate.

    Args:
        since_s: Beginning of the observation.
        half_life_s: Time after which a contribution counts half; infinite for no decay.
    """

    def __init__(self, since_s: float, half_life_s: float = math.inf) -> None:
        self._sums = Sums(2, half_life_s)
        # Times of the first record and the last.
        self._span: tuple[float, float] | None = None
        # Time since which the worker is gone.
        self._gone_s: float | None = None
        # Beginning of the current silence: the last indicator, or the worker's return.
        self._silent_since_s = since_s
        self._keys = deque[object]()
        self._known = set[object]()

    def batch(
        self, key: Hashable, samples: int, first_s: float, last_s: float, now_s: float
    ) -> None:
        """Add an indicator at the time of its receipt.

        Args:
            key: Identifies the batch: its address.
            samples: Number of its records that were decoded; others are no work.
            first_s: Arrival of the first. If producers' clocks differ, it may be the larger time.
            last_s: Arrival of the last. Future times count as now. 0 if unknown: the batch then
                ends the silence, but its records are not counted.
            now_s: Time of receipt.
        """
        if key in self._known:
            return
        self._remember(key)
        self._silent_since_s = max(self._silent_since_s, now_s)
        if not samples or last_s <= 0:
            return
        first_s, last_s = sorted((min(first_s, now_s), min(last_s, now_s)))
        if self._span is None:
            self._span = (first_s, first_s)
            samples -= 1
        begin_s, end_s = self._span
        self._span = (min(begin_s, first_s), max(end_s, last_s))
        self._sums.add(first_s, last_s, samples, 0.0)
        if last_s > end_s:
            self._sums.add(end_s, last_s, 0.0, last_s - end_s)
        if first_s < begin_s:
            self._sums.add(first_s, begin_s, 0.0, begin_s - first_s)

    def gone(self, at_s: float) -> None:
        """Record that the worker is gone, so that silence says nothing about its stream."""
        if self._gone_s is None:
            self._gone_s = at_s

    def returned(self, at_s: float) -> None:
        """Record that this or another worker reads the stream again.

        The stream's records have arrived at the broker meanwhile, and are read late.
        """
        if self._gone_s is not None:
            self._gone_s = None
            self._silent_since_s = max(self._silent_since_s, at_s)

    def counts(self, now_s: float) -> tuple[float, float]:
        """Return the records and seconds after decay, for `pooled_prior`."""
        records, seconds = (max(total, 0.0) for total in self._sums.at(now_s))
        return records, seconds

    def rate(self, now_s: float, unreported: int = 0, prior: RatePrior = JEFFREYS) -> Estimate:
        """Estimate lambda_A,n.

        Silence is evidence only if it is longer than an open batch explains: up to `unreported`
        records may have come since the last indicator. If more were expected, `unreported` records
        and the silence are counted. So the rate of a stream that stopped falls.

        Args:
            now_s: The time.
            unreported: Most records of an open batch: b - 1, or fewer if it is closed early.
            prior: Prior of the rate.

        Raises:
            ParameterError: If nothing has been counted and the prior has no time.
        """
        records, seconds = self.counts(now_s)
        believed = rate_from_counts(records, seconds, prior)
        quiet_s = (
            now_s if self._gone_s is None else min(now_s, self._gone_s)
        ) - self._silent_since_s
        if not float(believed.value) * quiet_s > unreported:
            return believed
        return rate_from_counts(records + unreported, seconds + quiet_s, prior)

    def _remember(self, key: Hashable) -> None:
        self._keys.append(key)
        self._known.add(key)
        if len(self._keys) > REMEMBERED:
            self._known.discard(self._keys.popleft())
