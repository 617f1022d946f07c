"""Numbers about a job's machines, for the metrics of the provisioner in charge.

A report is of one moment, and frozen. Scrapes use the last one while decisions continue. Values
that depend only on time are calculated at the scrape.
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
    """State of one job's machines. Values that are unknown are None."""

    # Seconds since 1970, as all times here.
    at_s: float
    # Machines that are paid for, by pool.
    running: Mapping[str, int]
    # Slots on spot machines, by the plan in force.
    spot: int | None
    # On-demand machines, by the plan in force.
    on_demand: int | None
    # Ended machines since the job began.
    ended: Mapping[EndedBecause, int]
    # Machines whose workers never sent a heartbeat since the job began, by pool.
    never_reported: Mapping[str, int]
    # Plans since the job began, by feasibility.
    planned: Mapping[bool, int]
    # USD per hour of one machine, by pool.
    prices: Mapping[str, float]
    usd_per_hour: float  # all running machines
    spent_until_usd: float  # cost until `at_s`
    # On-demand cost of the updates so far.
    on_demand_only_usd: float | None
    updates: int  # J, made so far
    records: int  # records in these updates
    believed: Mapping[str, EstimateRecord]
    stability: float | None  # capacity over arrivals, Proposition 1
    deadline_at_s: float | None
    done_at_s: float | None  # time by the plan in force

    def spent_usd(self, now_s: float) -> float:
        """Return the cost of all machines; running ones continue at their price."""
        return self.spent_until_usd + self.usd_per_hour * max(now_s - self.at_s, 0.0) / HOUR_S

    def usd_per_update(self, now_s: float) -> float | None:
        """Return the mean cost of an update so far; None before the first."""
        return self.spent_usd(now_s) / self.updates if self.updates > 0 else None

    def usd_per_million(self, now_s: float) -> float | None:
        """Return the mean cost of a million records in updates so far; None before the first."""
        return self.spent_usd(now_s) / self.records * MILLION if self.records > 0 else None

    def deadline_left_s(self, now_s: float) -> float | None:
        """Return the time until the deadline; negative when it is over."""
        return None if self.deadline_at_s is None else self.deadline_at_s - now_s

    def planned_left_s(self, now_s: float) -> float | None:
        """Return the time until the job is done by the plan; 0 if it takes longer."""
        return None if self.done_at_s is None else max(self.done_at_s - now_s, 0.0)


def report_of(
    ledger: FleetLedger, settings: ProvisionerSettings, updates: int, records: int, now_s: float
) -> FleetReport:
    """Make the report.

    Args:
        ledger: The fold of the plans topic.
        settings: Settings of the job.
        updates: J, made so far.
        records: Records in these updates.
        now_s: Seconds since 1970.
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
        never_reported={pool: ledger.never_reported[pool] for pool in settings.pool_names},
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
