"""Metrics of a provisioner: jobs in its charge, and the owners of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.spot.provisioning.records import EstimateRecord, Left, Reviewed
from common.spot.provisioning.report import report_of
from common.telemetry.metrics.__main__ import sections
from common.telemetry.metrics.provisioner import ProvisionerMetrics
from tests.fakes.clock import ManualClock
from tests.unit.spot.provisioning.examples import (
    SETTINGS,
    T0,
    ended,
    fold,
    lead,
    ordered,
    planned,
    priced,
    started,
)

if TYPE_CHECKING:
    from common.spot.provisioning.records import PlanRecord

OWN = [metric.name for metric in sections()["Provisioners"]]
BELIEVED = {
    "gradient_s": EstimateRecord(2.0, 0.1, 1.5, 2.5),
    "arrivals_per_s": EstimateRecord(20.0, 1.0, 15.0, 25.0),
    "availability.spot": EstimateRecord(0.5, 0.1, 0.25, 0.75),
    "cycle_s.spot": EstimateRecord(600.0, 10.0, 500.0, 700.0),
}
RECORDS: list[PlanRecord] = [
    *(lead(), priced(), planned(), ordered(1), ordered(2), ordered(3, pool="on-demand")),
    *(started(1), started(2), started(3), ended(2, T0 + 1800, "preempted")),
    Left(0, T0, 1, never_reported=True),
    Reviewed(0, T0 + 1800, 10, 990.0, 2, 4, 0.0, 4.0, 1.25, BELIEVED),
]


class Bench:
    """A provisioner's metrics on a manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.clock.advance(T0 + 3600)
        self.metrics = ProvisionerMetrics(self.clock)

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Return values of a metric by its labels."""
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        }

    def take_charge(self) -> None:
        """Report these records, with a time half an hour before now."""
        ledger = fold(RECORDS)
        self.metrics.report = report_of(ledger, SETTINGS, 20, 800, T0 + 1800)


def test_provisioner_not_in_charge_reports_only_that() -> None:
    bench = Bench()
    bench.take_charge()
    bench.metrics.report = None
    assert bench.values("doll_provisioning") == {(): 0.0}
    assert not any(bench.values(name) for name in OWN if name != "doll_provisioning")


def test_provisioner_in_charge_reports_every_metric() -> None:
    bench = Bench()
    bench.take_charge()
    assert [name for name in OWN if not bench.values(name)] == []
    assert bench.values("doll_provisioning") == {(): 1.0}


def test_values_are_those_of_the_ledger_at_the_time_of_the_scrape() -> None:
    # Machines in the 3600 s since T0: a spot machine at 0.25 $/h for the whole time, another one
    # for 1800 s, and an on-demand machine at 1 $/h.
    bench = Bench()
    bench.take_charge()
    spent_usd = 0.25 + 0.125 + 1.0
    expected = {
        "doll_machines_running": {("on-demand",): 1.0, ("spot",): 1.0},
        "doll_machines_wanted": {("spot",): 3.0, ("on_demand",): 1.0},
        "doll_plans_total": {("yes",): 1.0, ("no",): 0.0},
        "doll_price_usd_per_hour": {("on-demand",): 1.0, ("spot",): 0.25},
        "doll_cost_usd_per_hour": {(): 1.25},
        "doll_spent_usd_total": {(): pytest.approx(spent_usd)},
        "doll_on_demand_only_usd": {(): 4.0},
        "doll_cost_usd_per_update": {(): pytest.approx(spent_usd / 20)},
        "doll_cost_usd_per_million_records": {(): pytest.approx(spent_usd / 800 * 1e6)},
        "doll_fleet_capacity_ratio": {(): 1.25},
        "doll_deadline_left_seconds": {(): 6400.0},
        "doll_planned_time_left_seconds": {(): 4400.0},
        "doll_estimated_gradient_seconds": {("value",): 2.0, ("low",): 1.5, ("high",): 2.5},
        "doll_estimated_arrival_records_per_second": {
            ("value",): 20.0,
            ("low",): 15.0,
            ("high",): 25.0,
        },
        "doll_estimated_availability_ratio": {
            ("spot", "value"): 0.5,
            ("spot", "low"): 0.25,
            ("spot", "high"): 0.75,
        },
    }
    assert {name: bench.values(name) for name in expected} == expected
    never_reported = bench.values("doll_machines_never_reported_total")
    assert never_reported == {("on-demand",): 0.0, ("spot",): 1.0}
    ended_by = bench.values("doll_machines_ended_total")
    assert {cause: count for cause, count in ended_by.items() if count} == {("preempted",): 1.0}
    assert len(ended_by) == 5  # the others count from zero
