"""API answers about a job's machines and their prices.

An unknown value is None, as before the first plan or review.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.api.answers import (
    CostAnswer,
    PlanInForce,
    PoolAnswer,
    PricesAnswer,
    ProvisioningAnswer,
)
from common.errors import GivenError, NotFoundError, OutsideError, UserError
from common.spot.market.market_file import Market

if TYPE_CHECKING:
    from common.api.answers import MachineKind
    from common.config.settings import Settings
    from common.jobs.spec import JobSpec
    from common.spot.provisioning.fleet_ledger import FleetLedger
    from common.spot.provisioning.records import Planned
    from common.spot.theory.billing import Billing

# Name under which slots without a machine are counted.
NOWHERE = "none"


def provisioning_answer(
    ledger: FleetLedger, policy: str, workers: int, now_s: float, limit: int
) -> ProvisioningAnswer:
    """Make the answer from the fold of a job's plans topic.

    Args:
        ledger: The fold.
        policy: The job's policy.
        workers: N_tot.
        now_s: Seconds since 1970. A job that is over costs what it cost when it was settled.
        limit: Maximum number of plans to list.
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
    """Make the answer for one decision."""
    places = Counter(plan.pools[each] if each >= 0 else NOWHERE for each in plan.places)
    for wanted in plan.machines:
        places[wanted.pool] += wanted.count
    derived = {"places": places, "predicted_usd": plan.predicted_usd}
    return PlanInForce.model_validate(msgspec.structs.asdict(plan) | derived)


def _cost(ledger: FleetLedger, now_s: float) -> CostAnswer | None:
    """Return the cost; None before the first plan or review."""
    plan, settled = ledger.plan, ledger.settled
    reviewed = settled or ledger.review
    # All numbers are of the time of the last review, which alone has an on-demand cost.
    if reviewed is not None:
        at_s, spent_usd = reviewed.at_s, reviewed.spent_usd
        on_demand_only_usd = reviewed.on_demand_only_usd
    elif plan is not None:
        at_s, spent_usd, on_demand_only_usd = now_s, ledger.spent_usd(now_s), 0.0
    else:
        return None
    latest = settled or plan
    predicted_usd = None if latest is None else latest.predicted_usd
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


# --- the market ----------------------------------------------------------------------------------


def market_of(settings: Settings) -> Market:
    """Load the market of the settings.

    Raises:
        NotFoundError: If they name no market.
        UserError: If it is invalid.
    """
    if not settings.market:
        raise NotFoundError("this service has no market; set DOLL_MARKET to a market file")
    return Market.load(Path(settings.market))


def check_market(spec: JobSpec, settings: Settings) -> None:
    """Reject a job whose market cannot give what it requests, if the market is known here.

    Raises:
        GivenError: If it cannot, by the field.
    """
    asked = spec.provisioning
    if asked is None or asked.max_lag_s is None or not settings.market:
        return
    try:
        market = market_of(settings)
    except (UserError, OutsideError):
        # A request for prices reports the reason.
        return
    if problem := market.lag_problem(asked.max_lag_s):
        raise GivenError(("provisioning", "max_lag_s"), problem)


def prices_answer(market: Market, usd_per_hour: Mapping[str, float], at_s: float) -> PricesAnswer:
    """Make the answer with the prices that were found."""

    def answer(name: str, kind: MachineKind) -> PoolAnswer:
        reason = "" if name in usd_per_hour else "its source has no current price"
        return PoolAnswer(name=name, kind=kind, usd_per_hour=usd_per_hour.get(name), reason=reason)

    on_demand = answer(market.on_demand.name, "on-demand")
    spot = [answer(pool.name, "spot") for pool in market.spot]
    return PricesAnswer(at_s=at_s, pools=(on_demand, *spot))


def billing_of(market: Market) -> dict[str, Billing]:
    """Return the billing of each pool."""
    return {pool.name: market.billing(pool) for pool in market.pools}
