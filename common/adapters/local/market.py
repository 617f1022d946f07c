"""When local machines are taken away: each slot's own chain, or a recorded series for all of them.

The schedule is a function of time: whoever looks, and however often, finds the same, so that a
restart goes on with the same schedule. Times are counted from the birth of the fleet's folder.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.traces.files import starts_of, traced
from common.traces.spec import TraceSpec
from common.traces.trace import Walk

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.market_file import ProcessProvider
    from common.traces.trace import Trace

_BLOCK = 64  # stays drawn at a time; the same whoever asks for how many, or they would differ


class PreemptionSchedule(Protocol):
    """When a slot can have a spot machine, in seconds of at least 0."""

    def next_down_s(self, slot: int, at_s: float) -> float:
        """Tell when it next cannot: `at_s` where it cannot then, inf for never."""
        ...


class Chain:
    """One slot's two states: up for `availability` of the time, once down in a cycle on average.

    The simulator's chain (`common.simulation.experiments.preemption`) with steps of no length: its
    geometric stays become exponential ones. It begins in equilibrium.

    Args:
        availability: Share of the time; 0 is never up, 1 never down.
        cycle_s: Mean time from one loss to the next.
        seed: The same seed, the same times.
    """

    def __init__(self, availability: float, cycle_s: float, seed: tuple[int, ...]) -> None:
        self._rng = np.random.default_rng(seed)
        self._means_s = (1 - availability) * cycle_s, availability * cycle_s  # down, up
        self._first_up = bool(self._rng.random() < availability)
        self._constant = availability in (0, 1)
        self._switches_s = [0.0]  # ascending; the state at time 0 begins at the first

    def up(self, at_s: float) -> bool:
        """Tell whether it is up."""
        return self._up(self._stay(at_s))

    def next_switch_s(self, at_s: float) -> float:
        """Tell when it next is what it is not: later than `at_s`, inf for never."""
        return math.inf if self._constant else self._switches_s[self._stay(at_s)]

    def next_down_s(self, at_s: float) -> float:
        """Tell when it is next down: `at_s` where it is down then, inf for never."""
        return self.next_switch_s(at_s) if self.up(at_s) else at_s

    def _stay(self, at_s: float) -> int:
        """The number of the stay in which a time lies, from 1."""
        while not self._constant and self._switches_s[-1] <= at_s:
            first = len(self._switches_s)
            means_s = [self._means_s[self._up(first + number)] for number in range(_BLOCK)]
            ends_s = self._switches_s[-1] + np.cumsum(self._rng.exponential(means_s))
            self._switches_s += ends_s.tolist()
        return bisect_right(self._switches_s, at_s)

    def _up(self, stay: int) -> bool:
        return self._first_up == (stay % 2 == 1)


class Chains:
    """Each slot its own chain.

    Args:
        availability: Share of the time.
        cycle_s: Mean time from one loss to the next.
        seed: Of all chains.
    """

    def __init__(self, availability: float, cycle_s: float, seed: int) -> None:
        self._availability = availability
        self._cycle_s = cycle_s
        self._seed = seed
        self._chains: dict[int, Chain] = {}

    def next_down_s(self, slot: int, at_s: float) -> float:
        """Tell when the slot next cannot have a machine."""
        if slot not in self._chains:
            seed = self._seed, slot
            self._chains[slot] = Chain(self._availability, self._cycle_s, seed)
        return self._chains[slot].next_down_s(at_s)


class Recorded:
    """A recorded number of machines: the lower slots have them; or yes and no, for all slots.

    Args:
        trace: Machines that can be had, at the speed at which it is gone through.
        start_s: Where in it time 0 is.
    """

    def __init__(self, trace: Trace, start_s: float) -> None:
        self._walk = Walk(trace, np.array([start_s]))
        self._changes = len(trace.values) + 1
        self._counts = trace.values.max() > 1

    def next_down_s(self, slot: int, at_s: float) -> float:
        """Tell when the slot next cannot have a machine."""
        place = slot if self._counts else 0
        for _ in range(self._changes):  # after all of them it begins again
            if at_s == math.inf or self._walk.at(at_s)[0] <= place:
                return at_s
            at_s = float(self._walk.next_change_s(at_s)[0])
        return math.inf


def schedule_of(provider: ProcessProvider, folder: Path) -> PreemptionSchedule:
    """Make the schedule that a market file asks for.

    Args:
        provider: What it says.
        folder: What a trace's file is relative to.

    Raises:
        UserError: If there is no such trace.
    """
    asked = provider.availability
    if not isinstance(asked, TraceSpec):
        return Chains(asked, provider.cycle_s, provider.seed)
    trace = traced(asked, folder)
    start_s = starts_of(asked, trace, (1,), np.random.default_rng(provider.seed))
    return Recorded(trace, float(start_s[0]))
