"""Policies that decide once: on-demand machines alone, and the paper's static split (section V-B).

Both use the first spot pool if there are several; `common.spot.policies.adaptive` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from common.spot.policies.policy import ON_DEMAND, Decision, Policy, Situation, by_slot
from common.spot.theory.errors import ParameterError
from common.spot.theory.provisioning import Plan, plan, plan_of
from common.spot.theory.work import PaperMarket, Pool

# Index of the first pool that may be preempted.
FIRST_SPOT = 1


def market_of(pools: tuple[Pool, ...], spot: int = FIRST_SPOT) -> PaperMarket:
    """Return the paper's market of on-demand machines and one of the spot pools.

    Raises:
        ParameterError: If the pool does not exist.
    """
    if not ON_DEMAND < spot < len(pools):
        problem = f"must have the on-demand pool and at least one spot pool, got {len(pools)} pools"
        raise ParameterError("pools", problem)
    return PaperMarket(pools[ON_DEMAND], pools[spot])


def decision(situation: Situation, best: Plan, pool: int, reason: str) -> Decision:
    """Convert a plan to a decision: its spot workers in a pool, all others on demand."""
    places = np.full(situation.work.workers, ON_DEMAND, np.int8)
    places[best.spot_workers] = pool
    return by_slot(places, best, reason, situation)


@dataclass(frozen=True, slots=True)
class OnDemandOnly(Policy):
    """Every worker on demand: the reference for all costs."""

    name: ClassVar[str] = "on-demand"

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Put every worker on demand, even if the deadline is missed."""
        if last is not None:
            return last
        alone = situation.pools[ON_DEMAND]
        best = plan_of(situation.work, PaperMarket(alone, alone), 0)
        return decision(situation, best, ON_DEMAND, "every worker on demand, as asked")


@dataclass(frozen=True, slots=True)
class Static(Policy):
    """The paper's a-priori split: N_s by Theorems 4 and 5, or as given, and never changed.

    If the deadline cannot be met, all workers run on demand, which comes closest.
    """

    name: ClassVar[str] = "static"
    spot: int | None = None  # N_s; None: the optimum

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Plan once.

        Raises:
            ParameterError: If there is no spot pool, or fewer workers than the given number.
        """
        if last is not None:
            return last
        market = market_of(situation.pools)
        if self.spot is None:
            best = plan(situation.work, market)
        else:
            best = plan_of(situation.work, market, self.spot)
        return decision(situation, best, FIRST_SPOT, f"planned once: {best.reason}")
