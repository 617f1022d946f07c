"""How a job's provisioning stands, as the API and `doll provisioning` tell it.

What is not known is None: no plan was made yet, nothing was reviewed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from common.provisioning.records import Believed  # noqa: TC001 -- msgspec reads it when run

if TYPE_CHECKING:
    from common.provisioning.ledger import FleetLedger
    from common.provisioning.records import Planned

NOWHERE = "none"  # what slots without a machine are counted under


class ToldPlanned(msgspec.Struct, frozen=True):
    """One decision of a job's policy, for people."""

    number: int
    at_s: float
    policy: str
    why: str
    reason: str
    feasible: bool
    binding: str
    spot: int
    on_demand: int
    places: dict[str, int]  # slots by pool
    updates_left: float
    deadline_left_s: float | None
    spent_usd: float
    expected_cost_usd: float
    expected_runtime_s: float
    on_demand_only_usd: float
    predicted_usd: float
    stability: float
    usd_per_hour: dict[str, float]
    believed: dict[str, Believed]
    warning: str


class ToldCost(msgspec.Struct, frozen=True):
    """What a job has cost so far, and against what."""

    at_s: float
    spent_usd: float
    on_demand_only_usd: float
    ratio_to_on_demand: float | None
    predicted_usd: float | None
    ratio_to_prediction: float | None
    usd_per_hour: float


class ToldProvisioning(msgspec.Struct, frozen=True):
    """How a job's machines are rented."""

    policy: str
    workers: int
    plan: ToldPlanned | None
    plans: tuple[ToldPlanned, ...]  # newest first
    cost: ToldCost | None
    believed: dict[str, Believed]
    stability: float | None
    warning: str
    running: int
    settled: str  # why it is over; empty while it is not


def provisioning_told(
    ledger: FleetLedger, policy: str, workers: int, now_s: float, limit: int
) -> ToldProvisioning:
    """Tell what the fold of a job's plans topic says.

    Args:
        ledger: The fold.
        policy: What the job asks for.
        workers: N_tot, likewise.
        now_s: Since 1970; a job that is over costs what it cost when it was settled.
        limit: Plans of its history.
    """
    plan, review, settled = ledger.plan, ledger.review, ledger.settled
    latest = review if plan is None or (review and review.at_s >= plan.at_s) else plan
    return ToldProvisioning(
        policy=policy,
        workers=workers,
        plan=None if plan is None else planned_told(plan),
        plans=tuple(planned_told(each) for each in islice(reversed(ledger.plans), limit)),
        cost=_cost(ledger, now_s),
        believed={} if latest is None else latest.believed,
        stability=None if latest is None else latest.stability,
        warning="" if latest is None else latest.warning,
        running=len(ledger.running),
        settled="" if settled is None else settled.why,
    )


def planned_told(plan: Planned) -> ToldPlanned:
    """Tell one decision."""
    places = dict[str, int]()
    for place in plan.places:
        pool = plan.pools[place] if 0 <= place < len(plan.pools) else NOWHERE
        places[pool] = places.get(pool, 0) + 1
    same = {name: getattr(plan, name) for name in _SAME}
    return ToldPlanned(places=places, predicted_usd=plan.predicted_usd, **same)


_SAME = tuple(
    name for name in ToldPlanned.__struct_fields__ if name not in ("places", "predicted_usd")
)


def _cost(ledger: FleetLedger, now_s: float) -> ToldCost | None:
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
    return ToldCost(
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
