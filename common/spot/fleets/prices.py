"""Prices without a provider: constant ones, and replayed recordings.

A replay is a function of the clock: with the same origin, every process sees the same price at the
same time, before and after a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.spot.machines import Offer, PriceHistory
from common.spot.theory.billing import HOUR_S
from common.spot.traces.files import starts_of, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from common.spot.machines import Prices
    from common.spot.traces.spec import TraceSpec

# Minimum share of a recording that must be in the past to show how prices move.
KNOWN_SHARE = 0.1


class FixedPrices:
    """Prices that never change.

    Args:
        usd_per_hour: The prices.
    """

    def __init__(self, usd_per_hour: Mapping[Offer, float]) -> None:
        self._usd_per_hour = dict(usd_per_hour)

    def look(self) -> dict[Offer, float]:
        """Return USD per hour of one machine now."""
        return dict(self._usd_per_hour)

    def past(self) -> dict[str, PriceHistory]:
        """Return the same price for an hour until now."""
        return {
            offer.pool: PriceHistory((0.0,), (usd,), HOUR_S)
            for offer, usd in self._usd_per_hour.items()
            if not offer.type
        }


class ReplayedPrices:
    """Pools with recorded prices, each series replayed at its own speed, over and over.

    Args:
        specs: Series by pool. A series without a start begins at its beginning.
        folder: Folder of their files.
        origin_s: Beginning of the replay on the clock. Before it, the first prices hold.
        clock: Returns seconds since 1970.

    Raises:
        UserError: If a series does not exist.
    """

    def __init__(
        self,
        specs: Mapping[str, TraceSpec],
        folder: Path,
        origin_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._origin_s = origin_s
        self._clock = clock
        self._series = {}
        for pool, spec in specs.items():
            trace = traced(spec, folder)
            begun = spec.model_copy(update={"start_s": spec.start_s or 0.0})
            start_s = starts_of(begun, trace, (1,), np.random.default_rng())
            self._series[pool] = trace, float(start_s[0])

    def look(self) -> dict[Offer, float]:
        """Return USD per hour of one machine now."""
        past_s = max(self._clock() - self._origin_s, 0.0)
        return {
            Offer(pool): float(trace.value_at(start_s + past_s))
            for pool, (trace, start_s) in self._series.items()
        }

    def past(self) -> dict[str, PriceHistory]:
        """Return past prices: the recording before now.

        If that is less than a tenth of the recording, return all of it, including future prices.
        """
        past_s = max(self._clock() - self._origin_s, 0.0)
        found = {}
        for pool, (trace, start_s) in self._series.items():
            until_s = min(start_s + past_s, trace.end_s)
            if until_s < trace.end_s * KNOWN_SHARE:
                until_s = trace.end_s
            known = trace.times_s < until_s
            times_s, usd_per_hour = trace.times_s[known].tolist(), trace.values[known].tolist()
            found[pool] = PriceHistory(times_s, usd_per_hour, until_s)
        return found


class PricesTogether:
    """The pools of several sources. If one of them is unavailable, there are no prices.

    Args:
        sources: Sources, each with its own pools.
    """

    def __init__(self, sources: Sequence[Prices]) -> None:
        self._sources = sources

    def look(self) -> dict[Offer, float]:
        """Return USD per hour of one machine now.

        Raises:
            UnavailableError: If a source is unavailable.
            OutsideError: If a source refuses.
        """
        return {offer: usd for source in self._sources for offer, usd in source.look().items()}

    def past(self) -> dict[str, PriceHistory]:
        """Return past prices of each pool's machines.

        Raises:
            UnavailableError: If a source is unavailable.
            OutsideError: If a source refuses.
        """
        return {pool: past for source in self._sources for pool, past in source.past().items()}
