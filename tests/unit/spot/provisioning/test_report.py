"""Reports of a job's machines: records that count by the ledger, and time-dependent values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from common.spot.provisioning.records import EstimateRecord, Reviewed, Settled
from common.spot.provisioning.report import FleetReport, report_of
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

HOUR_S = 3600.0


def reviewed(at_s: float) -> Reviewed:
    believed = {"gradient_s": EstimateRecord(2.0, 0.1, 1.8, 2.2)}
    return Reviewed(0, at_s, 10, 990.0, 2, 4, 0.5, 4.0, 1.25, believed)


def report(
    *records: PlanRecord, updates: int = 0, samples: int = 0, now_s: float = T0
) -> FleetReport:
    return report_of(fold([lead(), *records]), SETTINGS, updates, samples, now_s)


def test_report_without_records_has_no_values() -> None:
    shown = report()
    assert (shown.running, shown.prices, shown.spot) == ({"on-demand": 0, "spot": 0}, {}, None)
    assert (shown.stability, shown.done_at_s, shown.on_demand_only_usd) == (None, None, None)
    assert shown.usd_per_update(T0) is shown.usd_per_million(T0) is None


def test_running_machines_add_to_the_cost_over_time() -> None:
    # launch   1 spot   2 spot      3 on demand   4 spot
    #          runs     preempted   runs          ordered
    shown = report(
        *(priced(), planned()),
        *(ordered(1), ordered(2), ordered(3, pool="on-demand"), ordered(4)),
        *(started(1), started(2), started(3)),
        ended(2, T0 + HOUR_S, "preempted"),
        now_s=T0 + HOUR_S,
    )
    assert shown.running == {"spot": 1, "on-demand": 1}
    assert (shown.spot, shown.on_demand) == (3, 1)
    assert shown.usd_per_hour == 1.25
    assert shown.spent_usd(T0 + HOUR_S) == pytest.approx(0.25 + 0.25 + 1.0)
    assert shown.spent_usd(T0 + 3 * HOUR_S) == pytest.approx(1.5 + 2 * 1.25)


def test_cost_per_update_and_million_records_is_spent_over_done() -> None:
    shown = report(
        *(priced(), ordered(1, pool="on-demand"), started(1)),
        updates=100,
        samples=4000,
        now_s=T0 + 2 * HOUR_S,
    )
    assert shown.usd_per_update(T0 + 2 * HOUR_S) == pytest.approx(0.02)
    assert shown.usd_per_million(T0 + 2 * HOUR_S) == pytest.approx(500.0)


def test_repeated_ends_and_records_of_other_terms_are_not_counted() -> None:
    shown = report(
        *(ordered(1), ordered(2), started(1)),
        ended(1, T0, "preempted"),
        ended(1, T0, "failed"),
        ended(2, T0, "released", term=7),
        planned(1, term=7),
        planned(1),
        planned(1),
        msgspec.structs.replace(planned(2), feasible=False),
    )
    assert {cause: count for cause, count in shown.ended.items() if count} == {"preempted": 1}
    assert shown.planned == {True: 1, False: 1}


def test_estimates_are_of_the_later_of_review_and_plan() -> None:
    assert set(report(planned(), reviewed(T0 + 5)).believed) == {"gradient_s"}
    assert report(planned(), reviewed(T0 + 5)).stability == 1.25
    assert set(report(planned(), reviewed(T0 - 5)).believed) == {"arrivals_per_s"}
    assert report(planned(), reviewed(T0 - 5)).stability == 1.5
    assert report(planned(), reviewed(T0 - 5)).on_demand_only_usd == 4.0


def test_planned_time_left_stops_at_0_and_deadline_left_goes_negative() -> None:
    shown = report(planned())
    assert shown.planned_left_s(T0 + 1000) == 7000
    assert shown.planned_left_s(T0 + 9000) == 0
    assert shown.deadline_left_s(T0 + 1000) == 9000
    assert shown.deadline_left_s(T0 + 10_001) == -1
    endless = report_of(fold([lead()]), replace(SETTINGS, deadline_at_s=None), 0, 0, T0)
    assert endless.deadline_left_s(T0) is None


def test_settled_job_costs_no_more_and_has_no_time_left() -> None:
    shown = report(
        *(priced(), planned(), ordered(1), started(1), ended(1, T0 + HOUR_S)),
        Settled(0, T0 + HOUR_S, "done", 0.25, 3.0, None),
        now_s=T0 + HOUR_S,
    )
    assert shown.spent_usd(T0 + 9 * HOUR_S) == pytest.approx(0.25)
    assert (shown.on_demand_only_usd, shown.planned_left_s(T0)) == (3.0, None)
