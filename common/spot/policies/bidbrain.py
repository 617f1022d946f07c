"""BidBrain (Proteus, section 4): bids in spot markets if that makes a unit of work cheaper.

An allocation is a number of machines of one market under one bid, and the footprint is the set of
all allocations. Each hour costs the price at its beginning. If the price passes the bid, the
machines are evicted and that hour is refunded. So work may be free, but an eviction stops all
machines of the footprint for a while. Past prices give the probability and the time of evictions,
for each distance of a bid above the price.

    past prices ──▶ odds ─┐
    prices ───────────────┼──▶ acquire, renew ──▶ bids
    footprint ────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.theory.billing import HOUR_S
from common.spot.theory.errors import ParameterError

Array: TypeAlias = npt.NDArray[np.float64]

# Distances of a bid above the price, USD an hour, in equal ratios over the range of the paper's
# simulation.
BID_DELTAS = np.geomspace(1e-5, 0.4, 12)
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class EvictionOdds:
    """Probability of an eviction within some time, and its median time.

    They are counted in past prices, as if a bid `delta` above the price were made at each step.
    """

    deltas: Array  # (D,) ascending, USD per hour
    step_s: float  # seconds between prices
    hour_s: float  # L steps
    # (M, D, L) beta: probability of an eviction in each market within 1 to L steps.
    probability: Array
    # (M, D, L) median time of these evictions.
    median_s: Array

    def within(
        self, markets: npt.ArrayLike, deltas: npt.ArrayLike, left_s: npt.ArrayLike
    ) -> tuple[Array, Array]:
        """Look up probability and median. Arguments and results have one shape."""
        delta = np.searchsorted(self.deltas, deltas, side="right") - 1
        steps = np.ceil(np.divide(left_s, self.step_s) - ROUNDING).astype(int) - 1
        last = self.probability.shape[2] - 1
        at = (np.asarray(markets), np.maximum(delta, 0), np.clip(steps, 0, last))
        return self.probability[at], self.median_s[at]


def eviction_odds(
    prices: Array, step_s: float, deltas: Array = BID_DELTAS, hour_s: float = HOUR_S
) -> EvictionOdds:
    """Count evictions in past prices.

    Args:
        prices: (M, T) USD per hour of each market, at T times over more than an hour.
        step_s: Time between prices. An hour is a multiple of it.
        deltas: (D,) distances of bids above the price, ascending.
        hour_s: Length of an hour; less if prices are replayed faster than they were recorded.

    Raises:
        ParameterError: If the prices cover less than an hour.
    """
    steps = round(hour_s / step_s)
    markets, times = prices.shape
    if times <= steps:
        problem = f"are {times} of {step_s:g} s; odds of an hour need {steps + 1} or more"
        raise ParameterError("prices", problem)
    shape = (markets, len(deltas), steps)
    probability, median_s = np.zeros(shape), np.zeros(shape)
    begins = prices[:, : times - steps]
    for d, delta in enumerate(deltas):
        bids = begins + delta
        # Step of the eviction; `steps` if the machine outlasts the hour and so pays for it.
        first = np.full(begins.shape, steps)
        for step in range(steps - 1, 0, -1):
            first[prices[:, step : step + begins.shape[1]] > bids] = step
        for market in range(markets):
            evicted = np.cumsum(np.bincount(first[market], minlength=steps)[:steps])
            probability[market, d] = evicted / begins.shape[1]
            median_s[market, d] = np.searchsorted(evicted, evicted / 2) * step_s
    return EvictionOdds(deltas, step_s, hour_s, probability, median_s)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Machines of one market that were launched together under one bid."""

    market: int
    machines: int  # k
    bid_usd: float  # USD per hour
    # Price at the beginning of the current hour, in USD per hour.
    price_usd: float
    # End of the current hour.
    ends_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Allocations in the terms of equations 1 to 3. Arrays have one shape, or are scalars."""

    # P k t_r, the cost of the remaining time unless it is refunded.
    usd: Array
    # 1 if it is refunded at an eviction, else 0.
    refunded: Array
    work_per_s: Array  # k nu
    probability: Array  # beta
    # omega: remaining time, reduced by an expected eviction.
    useful_s: Array


class _Choice(NamedTuple):
    cost_per_work: float
    # None if no allocation is better.
    allocation: Allocation | None


def expected_cost_usd(terms: Terms) -> Array:
    """Return equation 1 for each allocation: a refunded hour costs nothing."""
    return (1 - terms.refunded * terms.probability) * terms.usd


def overhead_s(kept: Array, eviction_s: float, change_s: float) -> Array:
    """Return the time that equation 2 subtracts from each allocation's useful time.

    Args:
        kept: Product of 1 - beta over the footprint: the probability of no eviction.
        eviction_s: lambda, time that the application stands still after an eviction.
        change_s: sigma, time that it stands still when machines are added or removed.
    """
    return (1 - kept) * eviction_s + change_s


@dataclass(frozen=True, slots=True, eq=False)
class BidBrain:
    """Decides what to bid and what to renew, without state of its own.

    In the paper, the scalability phi of equation 3 is the same for all footprints, so it does not
    change which one is cheapest. A simulation scales the work by it.
    """

    odds: EvictionOdds
    # (M,) nu: work of a machine of each market, for example its virtual cores.
    work_per_s: Array
    # Maximum work per second of all allocations together.
    most_per_s: float
    # Price of machines that do no work and always run.
    reliable_usd_per_hour: float = 0.0
    eviction_s: float = 30.0  # lambda
    change_s: float = 0.0  # sigma
    # (M,) or scalar; 1 if an evicted hour is not paid.
    refunded: npt.ArrayLike = 1.0

    def renews(
        self,
        footprint: Sequence[Allocation],
        ending: Allocation,
        now_s: float,
        prices: Array,
        room: Array | None = None,
    ) -> bool:
        """Return True if one more hour of an allocation makes work cheaper than any alternative.

        The alternatives are another allocation or none. The allocation's odds are those of its bid
        above the current price, not above the earlier price at which the bid was made.

        Args:
            footprint: The other allocations.
            ending: The allocation whose hour ends now.
            now_s: The time.
            prices: (M,) current prices.
            room: (M,) number of machines that each market still has; None if unlimited.
        """
        price = float(prices[ending.market])
        market, delta = np.array([ending.market]), ending.bid_usd - price
        again = self._hour(market, delta, ending.machines, price)
        renewed = self._cost_per_work(self._terms(footprint, now_s, prices), again, 0.0)
        instead = self._best(footprint, now_s, prices, room, self.change_s)
        return bool(renewed[0] <= instead.cost_per_work)

    def acquire(
        self,
        footprint: Sequence[Allocation],
        now_s: float,
        prices: Array,
        room: Array | None = None,
    ) -> Allocation | None:
        """Return the allocation that makes work cheapest, if it is cheaper than without one.

        Args:
            footprint: The current allocations.
            now_s: The time, at which the allocation begins.
            prices: (M,) current prices.
            room: (M,) number of machines that each market still has; None if unlimited.
        """
        return self._best(footprint, now_s, prices, room, 0.0).allocation

    def _best(
        self,
        footprint: Sequence[Allocation],
        now_s: float,
        prices: Array,
        room: Array | None,
        unchanged_s: float,
    ) -> _Choice:
        """Compare the footprint with each possible addition to it.

        Args:
            footprint: The current allocations.
            now_s: The time.
            prices: (M,) current prices.
            room: (M,) number of machines that each market still has, or None.
            unchanged_s: Time that all machines stand still if nothing is acquired.
        """
        there = self._terms(footprint, now_s, prices)
        least = float(self._cost_per_work(there, None, unchanged_s)[0])
        has = sum(each.machines * self.work_per_s[each.market] for each in footprint)
        machines = np.floor((self.most_per_s - has) / self.work_per_s + ROUNDING)
        machines = (machines if room is None else np.minimum(machines, room)).astype(int)
        markets, deltas = np.meshgrid(np.flatnonzero(machines > 0), self.odds.deltas, indexing="ij")
        market, delta = markets.ravel(), deltas.ravel()
        if not market.size:
            return _Choice(least, None)
        candidates = self._hour(market, delta, machines[market], prices[market])
        costs = self._cost_per_work(there, candidates, self.change_s)
        best = int(np.argmin(costs))
        if not costs[best] < least:
            return _Choice(least, None)
        price = float(prices[market[best]])
        found = Allocation(
            market=int(market[best]),
            machines=int(machines[market[best]]),
            bid_usd=price + float(delta[best]),
            price_usd=price,
            ends_s=now_s + self.odds.hour_s,
        )
        return _Choice(float(costs[best]), found)

    def _terms(self, footprint: Sequence[Allocation], now_s: float, prices: Array) -> Terms:
        """Return (n,) terms for the rest of each allocation's hour."""
        market = np.array([each.market for each in footprint], int)
        machines = np.array([each.machines for each in footprint], float)
        left_s = np.array([each.ends_s - now_s for each in footprint])
        bids = np.array([each.bid_usd for each in footprint])
        paid = np.array([each.price_usd for each in footprint])
        return self._of(market, bids - prices[market], machines, paid, left_s)

    def _hour(
        self,
        market: npt.NDArray[np.intp],
        delta: npt.ArrayLike,
        machines: npt.ArrayLike,
        price: npt.ArrayLike,
    ) -> Terms:
        """Return terms for the whole next hour of allocations."""
        shape = market.shape
        return self._of(
            market,
            np.broadcast_to(delta, shape),
            np.broadcast_to(machines, shape),
            np.broadcast_to(price, shape),
            np.full(shape, self.odds.hour_s),
        )

    def _of(
        self,
        market: npt.NDArray[np.intp],
        delta: Array,
        machines: Array,
        price: Array,
        left_s: Array,
    ) -> Terms:
        probability, median_s = self.odds.within(market, delta, left_s)
        useful_s = (1 - probability) * left_s + probability * np.minimum(median_s, left_s)
        usd = price * machines * left_s / HOUR_S
        refunded = np.broadcast_to(self.refunded, self.work_per_s.shape)[market]
        return Terms(usd, refunded, machines * self.work_per_s[market], probability, useful_s)

    def _cost_per_work(self, there: Terms, more: Terms | None, change_s: float) -> Array:
        """Return (c,) costs per work (equation 4) of the footprint with each of c candidates.

        Without candidates, the result is (1,), the cost per work of the footprint alone.
        """
        if more is None:
            zero = np.zeros(1)
            more = Terms(zero, zero, zero, zero, zero)
        usd = expected_cost_usd(there).sum() + expected_cost_usd(more)
        # Reliable machines are paid for one hour, as candidates are.
        usd = usd + self.reliable_usd_per_hour
        kept = np.prod(1 - there.probability) * (1 - more.probability)
        lost_s = overhead_s(kept, self.eviction_s, change_s)
        useful_s = np.maximum(there.useful_s[:, None] - lost_s, 0.0)  # equation 2, (n, c)
        work = there.work_per_s @ useful_s  # equation 3
        work = work + more.work_per_s * np.maximum(more.useful_s - lost_s, 0.0)
        found: Array = np.divide(usd, work, out=np.full(usd.shape, np.inf), where=work > 0)
        return found
