"""The rate of a worker's stream, from its batch indicators alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

from common.spot.theory.estimates import JEFFREYS, Estimate, RatePrior, rate_from_counts
from common.spot.theory.tallies import Sums

REMEMBERED = 1000  # keys of batches: a repetition comes soon after the first, or never


class StreamTally:
    """The rate of one worker's stream, from its batch indicators alone.

    An indicator says how many records came and when the first and the last did. All records count,
    and all time from the first record ever to the last: so the records are one more than the gaps
    between them, and a batch alone gives (b - 1) / (last - first).

    The time between two batches has to count: where a batch is closed early because nothing came,
    all silence lies there. Batches that overlap, as those of several partitions do, add up: the
    time that they share counts once. A late batch lies in time that counts already and adds its
    records, and a repeated one nothing. So no order matters. The time in which a record came is
    what its timestamp says, so a worker that catches up does not look busy.

    Args:
        since_s: When the stream began to be watched.
        half_life_s: After which a contribution counts half; infinite to forget nothing.
    """

    def __init__(self, since_s: float, half_life_s: float = math.inf) -> None:
        self._sums = Sums(2, half_life_s)
        self._span: tuple[float, float] | None = None  # from the first record to the last
        self._gone_s: float | None = None  # since when the worker is away
        self._silent_since_s = since_s  # since when it was there and said nothing
        self._keys = deque[object]()
        self._known = set[object]()

    def batch(
        self, key: Hashable, samples: int, first_s: float, last_s: float, now_s: float
    ) -> None:
        """Take in an indicator, at the time that it is heard.

        Args:
            key: What makes it this batch and no other: its address.
            samples: Records in it that decoded; others are no work.
            first_s: Arrival of the first. Of producers whose clocks differ either may be larger.
            last_s: Arrival of the last. One after now is taken for now; 0 says that nobody knows,
                and then the batch is heard of, but not counted.
            now_s: When it is heard.
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
        """The worker went; that nothing is heard of it from now on says nothing of its stream."""
        if self._gone_s is None:
            self._gone_s = at_s

    def returned(self, at_s: float) -> None:
        """The worker, or another one, reads the stream again.

        Its records came to the broker all the same, and are read late.
        """
        if self._gone_s is not None:
            self._gone_s = None
            self._silent_since_s = max(self._silent_since_s, at_s)

    def counts(self, now_s: float) -> tuple[float, float]:
        """Records and seconds, as they count now: for `pooled_prior`."""
        records, seconds = (max(total, 0.0) for total in self._sums.at(now_s))
        return records, seconds

    def rate(self, now_s: float, unreported: int = 0, prior: RatePrior = JEFFREYS) -> Estimate:
        """Estimate lambda_A,n.

        Silence is evidence only as far as it is longer than an open batch explains: up to
        `unreported` records may have come since the last indicator. Where more should have, they
        count as come and the silence as time. So a stream that stops fades from the rate.

        Args:
            now_s: The time.
            unreported: b - 1, or less where a batch is closed early.
            prior: What is believed beforehand.

        Raises:
            ParameterError: If nothing has been counted and the prior says nothing.
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
