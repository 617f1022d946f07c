"""Schedules of local preemptions: by random chains, recorded series, or recorded prices.

A schedule is a function of time, so that every caller gets the same result and a restart continues
the same schedule. Chains, and a series for all pools, begin when the fleet's folder is created.
Series of single pools and prices begin together, with the market's replay.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.spot.traces.files import starts_of, traced
from common.spot.traces.spec import TraceSpec
from common.spot.traces.trace import TraceCursor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from common.spot.market.market_file import Market
    from common.spot.traces.trace import Trace

# Number of stays (times in one state) that are drawn at once. It must not depend on the caller, or
# results would differ.
_BLOCK = 64


class PreemptionSchedule(Protocol):
    """Times at which a slot can have a machine of a spot pool."""

    def next_down_s(
        self,
        pool: str,
        slot: int,
        at_s: float,
        born_s: float,
        bid_usd_per_hour: float | None = None,
    ) -> float:
        """Return the slot's next time without a machine: at least `at_s`, inf for never.

        Args:
            pool: Name of the pool.
            slot: Slot of the job.
            at_s: Seconds since 1970.
            born_s: Beginning of the job's fleet, in seconds since 1970.
            bid_usd_per_hour: Optional. Highest price of its machine. If unset, the pool's bid
                counts.
        """
        ...


class SlotSchedule(Protocol):
    """The schedule of one pool, in seconds since its beginning."""

    def next_down_s(self, slot: int, at_s: float) -> float:
        """Return the slot's next time without a machine: at least `at_s`, inf for never."""
        ...


class SlotChain:
    """One slot that is up and down in turn: up for `availability` of the time.

    It is the simulator's chain (`common.spot.experiments.preemption`) in continuous time, with
    exponential instead of geometric stays. It begins in equilibrium.

    Args:
        availability: Share of the time; 0 is never up, 1 never down.
        cycle_s: Mean time from one loss to the next.
        seed: The same seed gives the same times.
    """

    def __init__(self, availability: float, cycle_s: float, seed: tuple[int, ...]) -> None:
        self._rng = np.random.default_rng(seed)
        self._means_s = (1 - availability) * cycle_s, availability * cycle_s  # down, up
        self._first_up = bool(self._rng.random() < availability)
        self._constant = availability in (0, 1)
        # Ascending. The state at time 0 begins at the first.
        self._switches_s = [0.0]

    def up(self, at_s: float) -> bool:
        """Return True if the slot is up."""
        return self._up(self._stay(at_s))

    def next_switch_s(self, at_s: float) -> float:
        """Return the next change of the state: later than `at_s`, inf for never."""
        return math.inf if self._constant else self._switches_s[self._stay(at_s)]

    def next_down_s(self, at_s: float) -> float:
        """Return the next time at which the slot is down: at least `at_s`, inf for never."""
        return self.next_switch_s(at_s) if self.up(at_s) else at_s

    def _stay(self, at_s: float) -> int:
        """Return the number, from 1, of the stay that contains a time."""
        while not self._constant and self._switches_s[-1] <= at_s:
            first = len(self._switches_s)
            means_s = [self._means_s[self._up(first + number)] for number in range(_BLOCK)]
            ends_s = self._switches_s[-1] + np.cumsum(self._rng.exponential(means_s))
            self._switches_s += ends_s.tolist()
        return bisect_right(self._switches_s, at_s)

    def _up(self, stay: int) -> bool:
        return self._first_up == (stay % 2 == 1)


class Chains:
    """One chain for each slot.

    Args:
        availability: Share of the time.
        cycle_s: Mean time from one loss to the next.
        seed: Seed of all chains.
        pool: Number of the pool. Each pool has its own chains.
    """

    def __init__(self, availability: float, cycle_s: float, seed: int, pool: int = 0) -> None:
        self._availability = availability
        self._cycle_s = cycle_s
        self._seed = seed
        self._pool = (pool,) if pool else ()
        self._chains: dict[int, SlotChain] = {}

    def next_down_s(self, slot: int, at_s: float) -> float:
        """Return the slot's next time without a machine."""
        if slot not in self._chains:
            seed = self._seed, slot, *self._pool
            self._chains[slot] = SlotChain(self._availability, self._cycle_s, seed)
        return self._chains[slot].next_down_s(at_s)


class Recorded:
    """A schedule from a recorded number of machines: the slots below the number have one.

    If the recording has no value above 1, it is one state for all slots. With a bid, the recording
    has prices, and all slots have machines while the price is at most the bid.

    Args:
        trace: The series at its replay speed.
        start_s: Position of time 0 in the trace.
        bid_usd_per_hour: Set if the trace has prices.
    """

    def __init__(self, trace: Trace, start_s: float, bid_usd_per_hour: float | None = None) -> None:
        self._cursor = TraceCursor(trace, np.array([start_s]))
        self._changes = len(trace.values) + 1
        self._counts = trace.values.max() > 1
        self._bid_usd_per_hour = bid_usd_per_hour

    def next_down_s(self, slot: int, at_s: float) -> float:
        """Return the slot's next time without a machine."""
        # The trace starts again after all of its changes.
        for _ in range(self._changes):
            if at_s == math.inf or not self._there(float(self._cursor.at(at_s)[0]), slot):
                return at_s
            at_s = float(self._cursor.next_change_s(at_s)[0])
        return math.inf

    def _there(self, value: float, slot: int) -> bool:
        if self._bid_usd_per_hour is not None:
            return value <= self._bid_usd_per_hour
        return value > (slot if self._counts else 0)


class PoolSchedules:
    """Schedules of each pool. A pool is down if one of its schedules is.

    Args:
        born: Schedule of each pool that begins with the fleet.
        replayed: Schedules of each pool that begin with the market's replay.
        origin_s: Beginning of the replay, in seconds since 1970.
        price_of: Makes the schedule of a pool's price: down while it is above a bid.
    """

    def __init__(
        self,
        born: Mapping[str, SlotSchedule],
        replayed: Mapping[str, Sequence[SlotSchedule]],
        origin_s: float,
        price_of: Callable[[str, float], SlotSchedule],
    ) -> None:
        self._born, self._replayed, self._origin_s = born, replayed, origin_s
        self._under = cache(price_of)

    def next_down_s(
        self,
        pool: str,
        slot: int,
        at_s: float,
        born_s: float,
        bid_usd_per_hour: float | None = None,
    ) -> float:
        """Return the slot's next time without a machine."""
        bid = [] if bid_usd_per_hour is None else [self._under(pool, bid_usd_per_hour)]
        downs_s = [
            self._origin_s + each.next_down_s(slot, max(at_s - self._origin_s, 0.0))
            for each in (*self._replayed.get(pool, ()), *bid)
        ]
        if pool in self._born:
            since_s = max(at_s - born_s, 0.0)
            downs_s.append(born_s + self._born[pool].next_down_s(slot, since_s))
        return max(min(downs_s, default=math.inf), at_s)


def schedule_of(market: Market, folder: Path, origin_s: float) -> PoolSchedules:
    """Make the schedule of a market file.

    Args:
        market: The market file, with the places at which its series begin.
        folder: Folder of the traces' files.
        origin_s: Beginning of its replay, in seconds since 1970.

    Raises:
        UserError: If a trace does not exist.
    """

    def recorded(spec: TraceSpec, bid_usd_per_hour: float | None = None) -> Recorded:
        trace = traced(spec, folder)
        start_s = starts_of(spec, trace, (1,), np.random.default_rng(provider.seed))
        return Recorded(trace, float(start_s[0]), bid_usd_per_hour)

    def under(pool: str, bid_usd_per_hour: float) -> SlotSchedule:
        price = prices[pool]
        if isinstance(price, TraceSpec):
            return recorded(price, bid_usd_per_hour)
        dear = isinstance(price, float) and price > bid_usd_per_hour
        return Chains(0.0 if dear else 1.0, 1.0, 0)

    prices = {pool.name: pool.usd_per_hour for pool in market.spot}
    provider, born, replayed = market.process, dict[str, SlotSchedule](), {}
    asked = provider.availability
    shared = recorded(asked) if isinstance(asked, TraceSpec) else None
    for number, pool in enumerate(market.spot):
        price, bid = pool.usd_per_hour, pool.bid_usd_per_hour
        if pool.trace is None and shared is not None:
            born[pool.name] = shared
        elif pool.trace is None and not isinstance(asked, TraceSpec):
            born[pool.name] = Chains(asked, provider.cycle_s, provider.seed, number)
        series = [] if pool.trace is None else [recorded(pool.trace)]
        if bid is not None and isinstance(price, TraceSpec):
            series.append(recorded(price, bid))
        replayed[pool.name] = series
    return PoolSchedules(born, replayed, origin_s, under)
