"""BidBrain (Proteus, section 4): bids in spot markets where it makes a unit of work cheaper.

An allocation is some machines of one market under one bid. It is paid hour by hour, each at the
price at its beginning, and goes where the price passes the bid: then that hour is refunded. So work
may be free; but an eviction stops the whole footprint for a while. How likely one is, and when to
expect it, is counted in past prices, by how far the bid lies above the price.

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

# Of a bid above the price, USD an hour: the range in which the paper simulates, in equal ratios.
BID_DELTAS = np.geomspace(1e-5, 0.4, 12)
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class EvictionOdds:
    """How likely machines are evicted within some time, and when those are that are.

    Counted in past prices: a bid is made at each of their steps, `delta` above the price.
    """

    deltas: Array  # (D,) ascending, USD per hour
    step_s: float  # of the prices
    hour_s: float  # L steps
    probability: Array  # (M, D, L) beta, of each market, before 1 to L steps are over
    median_s: Array  # (M, D, L) until the eviction of those that are evicted before that

    def within(
        self, markets: npt.ArrayLike, deltas: npt.ArrayLike, left_s: npt.ArrayLike
    ) -> tuple[Array, Array]:
        """Look up probability and median; arguments of one shape, which the answers have too."""
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
        prices: (M, T) USD per hour of each market, at T times, more than an hour.
        step_s: Between those times; an hour is a multiple of it.
        deltas: (D,) of bids above the price, ascending.
        hour_s: Length of an hour: less where prices are replayed faster than they were recorded.

    Raises:
        ParameterError: If the prices are too few to see an hour.
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
        first = np.full(begins.shape, steps)  # step that evicts; who outlasts the hour has paid it
        for step in range(steps - 1, 0, -1):
            first[prices[:, step : step + begins.shape[1]] > bids] = step
        for market in range(markets):
            evicted = np.cumsum(np.bincount(first[market], minlength=steps)[:steps])
            probability[market, d] = evicted / begins.shape[1]
            median_s[market, d] = np.searchsorted(evicted, evicted / 2) * step_s
    return EvictionOdds(deltas, step_s, hour_s, probability, median_s)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Machines of one market that came together, under one bid."""

    market: int
    machines: int  # k
    bid_usd: float  # per hour, as is every price here
    price_usd: float  # at the beginning of the hour that runs
    ends_s: float  # that hour


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Allocations as equations 1 to 3 see them; arrays are of one shape, or scalars."""

    usd: Array  # P k t_r: what the time left costs unless it is refunded
    refunded: Array  # 1 where it is at an eviction, else 0
    work_per_s: Array  # k nu
    probability: Array  # beta
    useful_s: Array  # omega: time left, reduced by an eviction that is to be expected


class _Choice(NamedTuple):
    cost_per_work: float
    allocation: Allocation | None  # None: none is better


def expected_cost_usd(terms: Terms) -> Array:
    """Equation 1 of each allocation: of an hour that is refunded nothing is paid."""
    return (1 - terms.refunded * terms.probability) * terms.usd


def overhead_s(kept: Array, eviction_s: float, change_s: float) -> Array:
    """Give what equation 2 takes off each allocation's useful time.

    Args:
        kept: Product of 1 - beta over the footprint: that no allocation is evicted.
        eviction_s: lambda, for which the application stands still after one.
        change_s: sigma, for which it does when machines are added or removed.
    """
    return (1 - kept) * eviction_s + change_s


@dataclass(frozen=True, slots=True, eq=False)
class BidBrain:
    """Decides what to bid and what to renew; pure.

    The scalability phi of equation 3 is one number for all footprints in the paper, so it does not
    change which is cheaper; who simulates it scales the work.
    """

    odds: EvictionOdds
    work_per_s: Array  # (M,) nu: what a machine of each market does; virtual cores will do
    most_per_s: float  # of all allocations together
    reliable_usd_per_hour: float = 0.0  # of machines that do no work and are always there
    eviction_s: float = 30.0  # lambda
    change_s: float = 0.0  # sigma
    refunded: npt.ArrayLike = 1.0  # (M,) or one: whether an evicted hour is not paid

    def renews(
        self,
        footprint: Sequence[Allocation],
        ending: Allocation,
        now_s: float,
        prices: Array,
        room: Array | None = None,
    ) -> bool:
        """Say whether one more hour of an allocation makes work cheaper than another one or none.

        Its odds are those of the bid above the price of now: that it was made further above an
        earlier price does not count.

        Args:
            footprint: The other allocations.
            ending: Its hour ends now.
            now_s: The time.
            prices: (M,) of now.
            room: (M,) how many more machines each market has; None: as many as anybody wants.
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
        """Give the allocation that makes work cheapest, if one makes it cheaper than none does.

        Args:
            footprint: What there is.
            now_s: The time; the allocation begins now.
            prices: (M,) of now.
            room: (M,) how many more machines each market has; None: as many as anybody wants.
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
        """Compare what there is with what there could be besides.

        Args:
            footprint: What there is.
            now_s: The time.
            prices: (M,) of now.
            room: (M,) how many more machines each market has, or None.
            unchanged_s: For which all stands still if nothing is acquired.
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
        """(n,) what is left of each allocation's hour."""
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
        """Give the whole next hour of allocations."""
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
        """(c,) equation 4 of the footprint with each of c candidates; (1,) without any."""
        if more is None:
            zero = np.zeros(1)
            more = Terms(zero, zero, zero, zero, zero)
        usd = expected_cost_usd(there).sum() + expected_cost_usd(more)
        usd = usd + self.reliable_usd_per_hour  # for the hour that a bid is for
        kept = np.prod(1 - there.probability) * (1 - more.probability)
        lost_s = overhead_s(kept, self.eviction_s, change_s)
        useful_s = np.maximum(there.useful_s[:, None] - lost_s, 0.0)  # equation 2, (n, c)
        work = there.work_per_s @ useful_s  # equation 3
        work = work + more.work_per_s * np.maximum(more.useful_s - lost_s, 0.0)
        found: Array = np.divide(usd, work, out=np.full(usd.shape, np.inf), where=work > 0)
        return found
