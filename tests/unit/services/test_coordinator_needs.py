"""The demand that a leader publishes so that workers can choose a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.messages import LeaderStatus
from common.core.spans import Partition
from common.jobs.job_file import parse_job
from services.coordinator.needs import DemandMeter, backlog_of
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

PLACES = (Partition("clinic-a", 0), Partition("clinic-a", 1))
FIRST = {PLACES[0]: 100, PLACES[1]: 0}


def spec(**changes: object) -> JobSpec:
    """Return a job with two records per batch and two batches per group."""
    return parse_job(JOB).model_copy(update={"group_size": 2, **changes})


def leader_status(claimed: int, waiting: int = 0, live: int = 1) -> LeaderStatus:
    """Return a status with this many claimed records in the first partition."""
    positions = {PLACES[0]: 100 + claimed, PLACES[1]: 0}
    return LeaderStatus(3, 8, positions, 8, waiting, live, positions)


def ends(arrived: int) -> dict[Partition, int]:
    """Return log ends with this many records in the first partition."""
    return {PLACES[0]: 100 + arrived, PLACES[1]: 0}


def test_demand_contains_the_job_its_backlog_and_its_limits() -> None:
    job = spec(weight=2.5)
    demand = DemandMeter(FIRST).demand(job, leader_status(40), ends(100), 7.0, 2, runs=True)

    assert (demand.job, demand.backlog, demand.weight, demand.runs) == ("digits", 60, 2.5, True)
    assert (demand.most_workers, demand.target, demand.task) == (2, 0, "image-classifier")
    assert (demand.arrivals_per_s, demand.worker_records_per_s) == (0.0, 0.0)  # still unknown


def test_demand_has_a_new_number_in_each_publication() -> None:
    meter = DemandMeter(FIRST)
    numbers = [
        meter.demand(spec(), leader_status(0), ends(0), now, 2, runs=True).number
        for now in (0.0, 1.0)
    ]

    assert numbers == [1, 2]


@pytest.mark.parametrize(
    ("unclaimed", "waiting", "lingers", "backlog"),
    [
        (10, 0, (None, None), 10),
        # A group takes four records, so these wait for more.
        (3, 0, (None, None), 0),
        (1, 1, (None, None), 0),
        # The worker that claimed these batches may have left.
        (0, 2, (None, None), 4),
        (1, 0, (None, 0.5), 0),  # one record makes no batch
        (2, 0, (None, 0.5), 2),
        (1, 0, (0.5, 0.5), 1),
    ],
)
def test_backlog_excludes_records_that_cannot_fill_an_update(
    unclaimed: int, waiting: int, lingers: tuple[float | None, float | None], backlog: int
) -> None:
    batch_linger_s, group_linger_s = lingers
    job = spec(batch_linger_s=batch_linger_s, group_linger_s=group_linger_s)

    assert backlog_of(job, unclaimed, waiting, 2) == backlog


def test_backlog_uses_the_group_size_in_force() -> None:
    job = spec(group_size=24)

    assert backlog_of(job, unclaimed=0, waiting=4, group_size=24) == 0
    assert backlog_of(job, unclaimed=0, waiting=4, group_size=4) == 8


def test_arrival_rate_covers_only_the_last_seconds() -> None:
    # second   0   1    2..12
    # arrived  0   500  500      a burst, and then nothing
    meter = DemandMeter(FIRST)
    rates = [
        meter.demand(spec(), leader_status(0), ends(arrived), now, 2, runs=True).arrivals_per_s
        for now, arrived in [(0.0, 0), (1.0, 500), *((float(n), 500) for n in range(2, 13))]
    ]

    assert rates[1] == 500.0
    assert rates[5] == 100.0
    assert rates[11] == rates[12] == 0.0


def test_worker_rate_is_measured_while_records_wait() -> None:
    meter = DemandMeter(FIRST)
    demands = [
        meter.demand(
            spec(), leader_status(200 * now, live=2), ends(100_000), float(now), 2, runs=True
        )
        for now in range(6)
    ]

    assert [demand.worker_records_per_s for demand in demands] == pytest.approx([0.0, *[100.0] * 5])


def test_worker_rate_is_not_measured_while_workers_wait_for_records() -> None:
    # 50 records/s arrive. Twelve are always unclaimed: an open batch of each worker, and one group.
    meter = DemandMeter(FIRST)
    for now in range(10):
        demand = meter.demand(
            spec(), leader_status(50 * now, live=4), ends(50 * now + 12), float(now), 2, runs=True
        )

    assert demand.worker_records_per_s == 0.0


def test_unserved_time_counts_while_a_running_job_has_work_but_no_workers() -> None:
    # second   0     1     2     3     4     5
    # live     1     0     0     0     1     0
    # runs     yes   yes   yes   yes   yes   no
    meter = DemandMeter(FIRST)
    unserved_s = [
        meter.demand(
            spec(), leader_status(0, live=live), ends(100), float(now), 2, runs=runs
        ).unserved_s
        for now, (live, runs) in enumerate(
            [(1, True), (0, True), (0, True), (0, True), (1, True), (0, False)]
        )
    ]

    assert unserved_s == [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    drained = meter.demand(spec(), leader_status(100, live=0), ends(100), 9.0, 2, runs=True)
    assert drained.unserved_s == 0.0


def test_demand_of_provisioned_job_contains_its_target_of_workers() -> None:
    text = JOB + "provisioning: {workers: 3}\nstop: {updates: 9, deadline_s: 60}\n"
    demand = DemandMeter(FIRST).demand(
        parse_job(text), leader_status(0), ends(9), 0.0, 2, runs=True
    )

    assert demand.target == 3
