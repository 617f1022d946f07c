"""Records, settings and batches that many tests of provisioning share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.messages import BatchReady, WorkerId
from common.core.spans import Span
from common.spot.provisioning.fleet_ledger import FleetLedger, Instance
from common.spot.provisioning.records import (
    Ended,
    EstimateRecord,
    LaunchRequested,
    Planned,
    Priced,
    ProvisionerLead,
    Started,
)
from common.spot.provisioning.settings import ProvisionerSettings
from common.spot.theory.billing import Billing
from common.spot.theory.work import Pool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.spot.provisioning.records import EndedBecause, PlanRecord

T0 = 1_000_000.0  # when the job was submitted
ON_DEMAND, SPOT = (
    Pool("on-demand", 1.0, billing=Billing(minimum_s=60.0)),
    Pool("spot", 0.25, 0.9, 100.0),
)
PRICES = {"on-demand": 1.0, "spot": 0.25}

SETTINGS = ProvisionerSettings(
    job="digits",
    workers=4,
    group_size=4,
    batch_size=10,
    submitted_s=T0,
    pools=(ON_DEMAND, SPOT),
    updates=1000,
    deadline_at_s=T0 + 10_000,
)


def lead(after: int = -1, candidate: str = "c1") -> ProvisionerLead:
    """Return a Lead record."""
    return ProvisionerLead(after, candidate, T0)


def ordered(launch: int, term: int = 0, slot: int = 0, pool: str = "spot") -> LaunchRequested:
    """Return an order for a slot."""
    return LaunchRequested(term, launch, T0, slot, pool, f"digits-w{slot}-{launch}")


def started(launch: int, at_s: float = T0, term: int = 0) -> Started:
    """Return the record that an order's machine started."""
    return Started(term, launch, at_s, f"m-{launch}")


def ended(launch: int, at_s: float = T0, cause: EndedBecause = "released", term: int = 0) -> Ended:
    """Return the record that an order's machine ended."""
    return Ended(term, launch, at_s, cause)


def planned(number: int = 1, term: int = 0, places: tuple[int, ...] = (1, 1, 1, 0)) -> Planned:
    """Return a plan for four slots, the number of workers in `SETTINGS`."""
    return Planned(
        term=term,
        number=number,
        at_s=T0,
        policy="adaptive",
        why="first plan",
        reason="because",
        feasible=True,
        binding="deadline",
        pools=("on-demand", "spot"),
        places=places,
        spot=sum(place > 0 for place in places),
        on_demand=places.count(0),
        updates_left=1000.0,
        deadline_left_s=10_000.0,
        spent_usd=1.0,
        expected_cost_usd=2.0,
        expected_runtime_s=8000.0,
        on_demand_only_usd=9.0,
        stability=1.5,
        usd_per_hour=PRICES,
        believed={"arrivals_per_s": EstimateRecord(5.0, 0.1, 4.8, 5.2)},
    )


def priced(term: int = 0, at_s: float = T0, **usd_per_hour: float) -> Priced:
    """Return a record of prices, by default of both pools."""
    return Priced(term, at_s, usd_per_hour or PRICES)


def fold(records: Iterable[PlanRecord | None]) -> FleetLedger:
    """Return a ledger that has read these records."""
    ledger = FleetLedger({"on-demand": Billing(minimum_s=60.0)})
    for offset, record in enumerate(records):
        ledger.feed(offset, record)
    return ledger


def machine(
    launch: int,
    slot: int | None = 0,
    pool: str = "spot",
    *,
    runs: bool = True,
) -> Instance:
    """Return a running machine in the ledger's form."""
    since_s = T0 if runs else None
    return Instance(launch, slot, pool, f"w{slot}", T0, f"m-{launch}", since_s)


def batches(
    count: int, rate_per_s: float, size: int = 10, worker: str = "digits-w0-1", partition: int = 0
) -> list[BatchReady]:
    """Return full batches of one stream with this rate, from T0 on."""
    claims = []
    for number in range(count):
        first = number * size
        span = Span("s", partition, first, first + size)
        first_s, last_s = T0 + first / rate_per_s, T0 + (first + size - 1) / rate_per_s
        claims.append(BatchReady(WorkerId(worker), (span,), size, (), first_s, last_s))
    return claims
