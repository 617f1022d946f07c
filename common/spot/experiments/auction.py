"""A job on spot machines of the old market: bids, evictions, hours paid at their beginning.

One amount of work is done by as many machines as are there; they come in allocations, as
`bidbrain` has them. Of the last hours only what was used is charged: the next job
has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.policies.bidbrain import Allocation
from common.spot.theory.billing import HOUR_S
from common.spot.theory.errors import ParameterError, not_negative, positive, share

Array: TypeAlias = npt.NDArray[np.float64]

ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Auctions:
    """Spot prices of some markets, on one grid of time.

    Raises:
        ParameterError: If the sizes differ, or an hour is no multiple of the step.
    """

    names: tuple[str, ...]  # M of them
    prices: Array  # (M, T) USD per hour; after the last they begin again
    step_s: float
    on_demand_usd: Array  # (M,) USD per hour
    work_per_s: Array  # (M,) of a machine

    def __post_init__(self) -> None:
        positive("step_s", self.step_s)
        if HOUR_S % self.step_s:
            raise ParameterError("step_s", f"an hour must be a multiple of it, got {self.step_s:g}")
        count = len(self.names)
        if len(self.prices) != count or {self.on_demand_usd.shape, self.work_per_s.shape} != {
            (count,)
        }:
            raise ParameterError("prices", f"must be of {count} markets, as the names are")

    @property
    def yardstick(self) -> float:
        """USD per hour of a unit of work per second, of the cheapest type on demand."""
        return float((self.on_demand_usd / self.work_per_s).min())

    def between(self, first: int, last: int) -> Auctions:
        """Cut out the steps from `first` to before `last`."""
        return replace(self, prices=self.prices[:, first:last])

    def from_step(self, step: int, steps: int) -> Array:
        """(M, steps) prices from a step on."""
        return self.prices[:, np.arange(step, step + steps) % self.prices.shape[1]]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done, and what changes of its machines cost it.

    Raises:
        ParameterError: If a number is out of range.
    """

    work: float
    reliable_usd_per_hour: float = 0.0  # of machines that do no work and are always there
    eviction_s: float = 30.0  # for which all stand still after an eviction
    start_s: float = 0.0  # from an allocation to its first work
    checkpoint_share: float = 0.0  # of the time, in which no work is done

    def __post_init__(self) -> None:
        positive("work", self.work)
        for name in ("reliable_usd_per_hour", "eviction_s", "start_s"):
            not_negative(name, getattr(self, name))
        share("checkpoint_share", self.checkpoint_share)


class Strategy(Protocol):
    """Who bids; see `common.spot.policies.bidbrain`."""

    def renews(
        self, footprint: Sequence[Allocation], ending: Allocation, now_s: float, prices: Array
    ) -> bool:
        """Say whether an allocation whose hour ends gets another."""
        ...

    def acquire(
        self, footprint: Sequence[Allocation], now_s: float, prices: Array
    ) -> Allocation | None:
        """Give one more allocation, or None."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Standard:
    """What Spot Fleet did: the cheapest market now, bid at its on-demand price, until evicted."""

    on_demand_usd: Array  # (M,) USD per hour
    work_per_s: Array  # (M,)
    wanted_per_s: float  # work of all machines

    def renews(
        self, footprint: Sequence[Allocation], ending: Allocation, now_s: float, prices: Array
    ) -> bool:
        """Keep it: it is used until it is evicted."""
        del footprint, ending, now_s, prices
        return True

    def acquire(
        self, footprint: Sequence[Allocation], now_s: float, prices: Array
    ) -> Allocation | None:
        """Take all machines from the cheapest market, where none are left."""
        offered = prices <= self.on_demand_usd
        if footprint or not offered.any():
            return None
        market = int(np.argmin(np.where(offered, prices / self.work_per_s, np.inf)))
        return Allocation(
            market=market,
            machines=int(self.wanted_per_s // self.work_per_s[market]),
            bid_usd=float(self.on_demand_usd[market]),
            price_usd=float(prices[market]),
            ends_s=now_s + HOUR_S,
        )


@dataclass(slots=True)
class Bill:
    """What a job cost and how long it took."""

    usd: float = 0.0
    runtime_s: float = 0.0
    free: float = 0.0  # work per second times seconds of machines in hours that were refunded
    paid: float = 0.0  # the same in hours that were paid
    evictions: int = 0


class _Run:
    """A job under way."""

    def __init__(self, auctions: Auctions, job: Job, strategy: Strategy) -> None:
        self._auctions, self._job, self._strategy = auctions, job, strategy
        self._running: list[tuple[Allocation, float]] = []  # and from when on it works
        self._stands_still_s = 0.0
        self._left = job.work
        self.bill = Bill()

    def step(self, now_s: float, prices: Array) -> bool:
        """Go through the step that begins now; say whether the job ended in it."""
        self._evict_and_renew(now_s, prices)
        while (more := self._strategy.acquire(self._footprint(), now_s, prices)) is not None:
            self._begin_hour(more, now_s + self._job.start_s)
        step_s = self._auctions.step_s
        still_s = min(self._stands_still_s, step_s)
        self._stands_still_s -= still_s
        done = (1 - self._job.checkpoint_share) * sum(
            self._capacity(each) * min(step_s - still_s, max(now_s + step_s - ready_s, 0.0))
            for each, ready_s in self._running
        )
        if done < self._left or not done:
            self._left -= done
            return False
        self._end(now_s + step_s * self._left / done)
        return True

    def _evict_and_renew(self, now_s: float, prices: Array) -> None:
        """Take away what bid too little, pay hours that are over, and begin the next ones."""
        before, self._running = self._running, []
        ending = list[tuple[Allocation, float]]()
        for each, ready_s in before:
            over = each.ends_s <= now_s + ROUNDING_S
            evicted = prices[each.market] > each.bid_usd
            if over:
                self.bill.paid += self._capacity(each) * HOUR_S
            elif evicted:
                self.bill.usd -= each.machines * each.price_usd
                self.bill.free += self._capacity(each) * (now_s + HOUR_S - each.ends_s)
            if evicted:
                self.bill.evictions += 1
                self._stands_still_s = self._job.eviction_s
            else:
                (ending if over else self._running).append((each, ready_s))
        for each, ready_s in ending:
            if self._strategy.renews(self._footprint(), each, now_s, prices):
                price_usd = float(prices[each.market])
                again = replace(each, price_usd=price_usd, ends_s=now_s + HOUR_S)
                self._begin_hour(again, ready_s)

    def _footprint(self) -> list[Allocation]:
        return [each for each, _ in self._running]

    def _begin_hour(self, allocation: Allocation, ready_s: float) -> None:
        self._running.append((allocation, ready_s))
        self.bill.usd += allocation.machines * allocation.price_usd

    def _end(self, now_s: float) -> None:
        for each, _ in self._running:
            unused_s = each.ends_s - now_s
            self.bill.usd -= each.machines * each.price_usd * unused_s / HOUR_S
            self.bill.paid += self._capacity(each) * (HOUR_S - unused_s)
        self.bill.usd += self._job.reliable_usd_per_hour * now_s / HOUR_S
        self.bill.runtime_s = now_s

    def _capacity(self, allocation: Allocation) -> float:
        return allocation.machines * float(self._auctions.work_per_s[allocation.market])


def run_auction(auctions: Auctions, job: Job, strategy: Strategy, first: int) -> Bill:
    """Do a job from one step of the prices on.

    Raises:
        ParameterError: If it is not done when the prices have been gone through twice.
    """
    run = _Run(auctions, job, strategy)
    times = auctions.prices.shape[1]
    for step in range(2 * times):
        if run.step(step * auctions.step_s, auctions.prices[:, (first + step) % times]):
            return run.bill
    raise ParameterError("prices", f"at them nobody does {job.work:g} in {times} steps, twice")


def clairvoyant_usd(prices: Array, step_s: float) -> float:
    """Give the least that one unit of each market may cost which runs all the time.

    A shortest path through time, for somebody who knows all prices: an hour is paid at its
    beginning, unless the price rises within it above all that it was since then; a bid just below
    makes it free. Evictions cost no time.

    Args:
        prices: (M, T) USD per hour of a unit of work per second.
        step_s: Between them.
    """
    steps = prices.shape[1]
    hour = round(HOUR_S / step_s)
    least = np.full(steps + 1, np.inf)
    least[0] = 0.0
    for begin in range(steps):
        end = min(begin + hour, steps)
        paid = least[begin] + prices[:, begin].min() * (end - begin) / hour
        least[end] = min(least[end], paid)
        so_far = np.maximum.accumulate(prices[:, begin:end], axis=1)
        rises = (prices[:, begin + 1 : end] > so_far[:, :-1]).any(axis=0)
        free = begin + 1 + np.flatnonzero(rises)
        least[free] = np.minimum(least[free], least[begin])
    return float(least[steps])
