"""Policy that wants as many machines as its script says, for tests of code that acts on plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.spot.policies.policy import Decision, Policy, Situation
from common.spot.theory.provisioning import Plan

if TYPE_CHECKING:
    from common.spot.machines import Offer


@dataclass(frozen=True, slots=True)
class Counting(Policy):
    """Wants the machines of each line of its script for `every_s`, in an endless loop."""

    script: tuple[Mapping[Offer, int], ...]
    every_s: float = 10.0
    name: ClassVar[str] = "counting"
    watches_outages: ClassVar[bool] = True

    @property
    def review_s(self) -> float | None:
        """Return when the next line of the script begins."""
        return self.every_s if len(self.script) > 1 else None

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Return the decision of the script's current line."""
        machines = self.script[int(situation.now_s / self.every_s) % len(self.script)]
        if last is not None and last.machines == machines:
            return last
        spot = sum(count for offer, count in machines.items() if offer.pool != "on-demand")
        plan = Plan(
            feasible=True,
            spot=spot,
            on_demand=sum(machines.values()) - spot,
            spot_workers=np.zeros(0, np.int64),
            expected_cost_usd=1.0,
            expected_runtime_s=1.0,
            cost_ratio_to_on_demand=1.0,
            binding="deadline",
            reason="so it is written",
        )
        return Decision(machines, plan, "so it is written", situation)
