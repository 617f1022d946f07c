"""A fleet small enough for a test: two-state chains sampled every 2 s, start-ups, bills by second.

It shares nothing with the policies but their types, so it can tell whether they keep a promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.policies.policy import ON_DEMAND, Situation
from common.theory.work import Work

if TYPE_CHECKING:
    from common.policies.policy import Decision, Policy
    from common.theory.work import Pool, Rates

STEP_S = 2.0
K, B, J = 20, 256, 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What came of each run, (R,)."""

    cost_shares: npt.NDArray[np.float64]  # of what on-demand machines alone cost in theta_0
    met: npt.NDArray[np.bool_]


class Fleet:
    """Many runs side by side, each with a policy's decisions of its own."""

    def __init__(
        self, policy: Policy, pools: tuple[Pool, Pool], rates: Rates, factor: float, runs: int
    ) -> None:
        self._policy, self._pools, self._rates = policy, pools, rates
        self._undisturbed_s = J * K * B / float(rates.sum())
        self._deadline_s = factor * self._undisturbed_s
        shape = (runs, len(rates))
        self._decisions: list[Decision | None] = [None] * runs
        self._places = np.ones(shape, np.int8)
        self._launched_s = np.full(shape, -np.inf)  # own machines; in the first step all are up
        self._has = np.zeros(shape, np.bool_)
        self._up = np.zeros(shape, np.bool_)
        self._stands_s = np.full(shape, np.nan)  # when a stand-in was launched
        self._cost_usd = np.zeros(runs)
        self._left = np.full(runs, J)

    def run(self, rng: np.random.Generator) -> Outcome:
        """Go on until all runs are done or 5 % too late."""
        on_demand, spot = self._pools
        lost = STEP_S / (spot.availability * spot.cycle_s)
        back = STEP_S / ((1 - spot.availability) * spot.cycle_s)
        offered = rng.random(self._up.shape) < spot.availability
        records = np.zeros(self._up.shape)
        finished_s = np.full(len(self._left), np.inf)
        for now_s in np.arange(0.0, 1.05 * self._deadline_s, STEP_S):
            going = np.isinf(finished_s)
            if not going.any():
                break
            before = self._up.copy()
            self._settle(offered, now_s)
            events = (before != self._up).any(axis=1) | (now_s % 30.0 == 0)
            for run in np.flatnonzero(going & events):
                self._ask(int(run), now_s)
            self._settle(offered, now_s)
            stands_in = ~np.isnan(self._stands_s)
            delivers = self._up | (now_s - self._stands_s >= on_demand.start_up_s)
            dear = stands_in.sum(axis=1) + (self._has & (self._places == ON_DEMAND)).sum(axis=1)
            cheap = (self._has & (self._places != ON_DEMAND)).sum(axis=1)
            usd_per_s = dear * on_demand.usd_per_s + cheap * spot.usd_per_s
            self._cost_usd += going * usd_per_s * STEP_S
            mean = self._rates * STEP_S
            arrived = mean + np.sqrt(mean) * rng.standard_normal(records.shape)
            records += np.where(delivers, arrived, 0.0)
            self._left = J - (records // B).sum(axis=1).astype(np.int64) // K
            finished_s[going & (self._left <= 0)] = now_s + STEP_S
            flips = rng.random(offered.shape) < np.where(offered, lost, back)
            offered ^= flips
        alone_usd = len(self._rates) * self._undisturbed_s * on_demand.usd_per_s
        return Outcome(self._cost_usd / alone_usd, finished_s <= self._deadline_s)

    def _settle(self, offered: npt.NDArray[np.bool_], now_s: float) -> None:
        has = offered | (self._places == ON_DEMAND)
        started = has & ~self._has
        self._launched_s[started] = now_s or -np.inf
        self._has = has
        start_up_s = np.array([pool.start_up_s for pool in self._pools])[self._places]
        self._up = has & (now_s - self._launched_s >= start_up_s)

    def _ask(self, run: int, now_s: float) -> None:
        left_s = max(self._deadline_s - now_s, 0.0)
        work = Work(self._rates, K, B, max(int(self._left[run]), 0), left_s)
        stood_s = now_s - self._stands_s[run]
        situation = Situation(now_s, work, self._pools, 0.01, self._up[run].copy(), stood_s)
        last = self._decisions[run]
        decision = self._policy.reconsider(situation, last)
        if decision is last:
            return
        self._decisions[run] = decision
        moved = decision.places != self._places[run]
        self._has[run, moved] = False
        self._places[run] = decision.places
        stood = ~np.isnan(stood_s)
        unused_s = self._pools[0].billing.minimum_s - stood_s[stood & ~decision.stand_ins]
        self._cost_usd[run] += np.maximum(unused_s, 0.0).sum() * self._pools[0].usd_per_s
        self._stands_s[run, decision.stand_ins & ~stood] = now_s or -np.inf
        self._stands_s[run, ~decision.stand_ins] = np.nan
