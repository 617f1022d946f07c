"""How a job's provisioning stands, as answers of the API: for admin services and the command line.

What is not known is None: no plan was made yet, nothing was reviewed.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from common.api.answers import CostAnswer, PlanInForce, ProvisioningAnswer

if TYPE_CHECKING:
    from common.provisioning.ledger import FleetLedger
    from common.provisioning.records import Planned

NOWHERE = "none"  # what slots without a machine are counted under


def provisioning_answer(
    ledger: FleetLedger, policy: str, workers: int, now_s: float, limit: int
) -> ProvisioningAnswer:
    """Answer with what the fold of a job's plans topic says.

    Args:
        ledger: The fold.
        policy: What the job asks for.
        workers: N_tot, likewise.
        now_s: Since 1970; a job that is over costs what it cost when it was settled.
        limit: Plans of its history.
    """
    plan, review, settled = ledger.plan, ledger.review, ledger.settled
    latest = review if plan is None or (review and review.at_s >= plan.at_s) else plan
    return ProvisioningAnswer.model_validate(
        {
            "policy": policy,
            "workers": workers,
            "plan": None if plan is None else plan_answer(plan),
            "plans": [plan_answer(each) for each in islice(reversed(ledger.plans), limit)],
            "cost": _cost(ledger, now_s),
            "believed": {} if latest is None else latest.believed,
            "stability": None if latest is None else latest.stability,
            "warning": "" if latest is None else latest.warning,
            "running": len(ledger.running),
            "settled": "" if settled is None else settled.why,
        }
    )


def plan_answer(plan: Planned) -> PlanInForce:
    """Answer with one decision."""
    pools = [plan.pools[each] if 0 <= each < len(plan.pools) else NOWHERE for each in plan.places]
    derived = {"places": Counter(pools), "predicted_usd": plan.predicted_usd}
    return PlanInForce.model_validate(msgspec.structs.asdict(plan) | derived)


def _cost(ledger: FleetLedger, now_s: float) -> CostAnswer | None:
    """None before the first word of what it costs."""
    plan, review, settled = ledger.plan, ledger.review, ledger.settled
    predicted_usd = None if plan is None else plan.predicted_usd
    if settled is not None:
        at_s, spent_usd = settled.at_s, settled.spent_usd
        on_demand_only_usd, predicted_usd = settled.on_demand_only_usd, settled.predicted_usd
    elif review is not None:
        # Both at one time: what was spent since has no counterpart yet.
        at_s, spent_usd = review.at_s, review.spent_usd
        on_demand_only_usd = review.on_demand_only_usd
    elif plan is not None:
        at_s, spent_usd, on_demand_only_usd = now_s, ledger.spent_usd(now_s), 0.0
    else:
        return None
    over = settled is not None
    return CostAnswer(
        at_s=at_s,
        spent_usd=spent_usd,
        on_demand_only_usd=on_demand_only_usd,
        ratio_to_on_demand=_ratio(spent_usd, on_demand_only_usd),
        predicted_usd=predicted_usd,
        ratio_to_prediction=_ratio(spent_usd, predicted_usd) if over else None,
        usd_per_hour=0.0 if over else ledger.usd_per_hour,
    )


def _ratio(spent_usd: float, other_usd: float | None) -> float | None:
    return spent_usd / other_usd if other_usd else None
