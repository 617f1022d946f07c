"""How a job's machines stand, in numbers: what the provisioner in charge tells who measures it.

A report is of one moment, and frozen: whoever answers scrapes holds the last one while decisions go
on. What time alone changes until the next one, it works out when it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from common.spot.provisioning.records import EndedBecause, EstimateRecord
from common.spot.theory.billing import HOUR_S

if TYPE_CHECKING:
    from common.spot.provisioning.fleet_ledger import FleetLedger
    from common.spot.provisioning.settings import ProvisionerSettings

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What is known of one job; None: nothing yet."""

    at_s: float  # since 1970, as all times here
    running: Mapping[str, int]  # machines paid for, by pool
    spot: int | None  # slots on spot machines, by the plan that stands
    on_demand: int | None  # machines on demand, likewise
    ended: Mapping[EndedBecause, int]  # machines, since the job began
    planned: Mapping[bool, int]  # plans, since the job began, by whether they were feasible
    prices: Mapping[str, float]  # USD per hour of one machine, by pool
    usd_per_hour: float  # of all machines that run
    spent_until_usd: float  # until `at_s`
    on_demand_only_usd: float | None  # what the updates made would have cost that way
    updates: int  # J, made so far
    records: int  # in them
    believed: Mapping[str, EstimateRecord]
    stability: float | None  # capacity over arrivals, Proposition 1
    deadline_at_s: float | None
    done_at_s: float | None  # by the plan that stands

    def spent_usd(self, now_s: float) -> float:
        """What all machines have cost; those that run go on costing what they cost."""
        return self.spent_until_usd + self.usd_per_hour * max(now_s - self.at_s, 0.0) / HOUR_S

    def usd_per_update(self, now_s: float) -> float | None:
        """What an update has cost so far."""
        return self.spent_usd(now_s) / self.updates if self.updates > 0 else None

    def usd_per_million(self, now_s: float) -> float | None:
        """What a million records in updates have cost so far."""
        return self.spent_usd(now_s) / self.records * MILLION if self.records > 0 else None

    def deadline_left_s(self, now_s: float) -> float | None:
        """Until the deadline; below 0 when it is over."""
        return None if self.deadline_at_s is None else self.deadline_at_s - now_s

    def planned_left_s(self, now_s: float) -> float | None:
        """Until the job is done, if it comes as the plan expected; 0 where it takes longer."""
        return None if self.done_at_s is None else max(self.done_at_s - now_s, 0.0)


def report_of(
    ledger: FleetLedger, settings: ProvisionerSettings, updates: int, records: int, now_s: float
) -> FleetReport:
    """Say how things stand.

    Args:
        ledger: What counts in the plans topic.
        settings: The job's.
        updates: J, made so far.
        records: In them.
        now_s: Since 1970.
    """
    plan, review, settled = ledger.plan, ledger.review, ledger.settled
    latest = review if plan is None or (review and review.at_s >= plan.at_s) else plan
    reviewed = settled or review
    running = dict.fromkeys(settings.pool_names, 0)
    for instance in ledger.running:
        running[instance.pool] = running.get(instance.pool, 0) + 1
    return FleetReport(
        at_s=now_s,
        running=running,
        spot=None if plan is None else plan.spot,
        on_demand=None if plan is None else plan.on_demand,
        ended={cause: ledger.ended[cause] for cause in get_args(EndedBecause)},
        planned={feasible: ledger.planned[feasible] for feasible in (True, False)},
        prices=dict(ledger.prices),
        usd_per_hour=ledger.usd_per_hour,
        spent_until_usd=ledger.spent_usd(now_s),
        on_demand_only_usd=None if reviewed is None else reviewed.on_demand_only_usd,
        updates=updates,
        records=records,
        believed={} if latest is None else latest.believed,
        stability=None if latest is None else latest.stability,
        deadline_at_s=settings.deadline_at_s,
        done_at_s=None if plan is None or settled else plan.at_s + plan.expected_runtime_s,
    )
