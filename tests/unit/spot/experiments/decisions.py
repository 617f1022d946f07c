"""Decisions and policies for tests, which follow a script in every situation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.spot.machines import Offer
from common.spot.policies.policy import Decision, Policy, Situation, by_slot
from common.spot.theory.provisioning import Plan
from common.spot.theory.work import Pool, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ON_DEMAND, SPOT, OTHER, NOWHERE = 0, 1, 2, -1


def decide(
    places: Sequence[int],
    situation: Situation | None = None,
    reason: str = "scripted decision",
) -> Decision:
    """Return a decision with the index of a pool, or -1, for each slot."""
    count = len(places)
    if situation is None:
        work = Work(np.ones(count), 1, 1, 1.0, 1.0)
        pools = tuple(Pool(name, 1.0) for name in ("on-demand", "spot", "other", "fourth"))
        situation = Situation(0.0, work, pools, 1.0, np.ones(count, np.bool_))
    spot = np.flatnonzero(np.array(places) > ON_DEMAND)
    plan = Plan(
        feasible=True,
        spot=len(spot),
        on_demand=count - len(spot),
        spot_workers=spot,
        expected_cost_usd=0.0,
        expected_runtime_s=0.0,
        cost_ratio_to_on_demand=1.0,
        binding="deadline",
        reason=reason,
    )
    return by_slot(np.array(places, np.int8), plan, reason, situation)


def count(situation: Situation | None = None, **machines: int) -> Decision:
    """Return a decision with numbers of machines by pool."""
    decided = decide([ON_DEMAND], situation=situation)
    offers = {Offer(pool.replace("_", "-")): number for pool, number in machines.items()}
    return Decision(offers, decided.plan, decided.reason, decided.basis)


@dataclass
class Scripted(Policy):
    """Calls a function to decide, and records the situations."""

    answer: Callable[[Situation, Decision | None], Decision]
    name: ClassVar[str] = "scripted"
    review_s: float | None = None
    watches_outages: bool = False
    plans_backlog: bool = False
    asked: list[Situation] = field(default_factory=list)

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Return the function's decision."""
        self.asked.append(situation)
        return self.answer(situation, last)


def always(places: Sequence[int]) -> Callable[[Situation, Decision | None], Decision]:
    """Return a function that decides on these places, and keeps its decision."""

    def answer(situation: Situation, last: Decision | None) -> Decision:
        return last or decide(places, situation=situation)

    return answer
