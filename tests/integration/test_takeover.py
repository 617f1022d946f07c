"""A new coordinator leads several jobs at once, each in its own thread.

TEST_STARTS=200 pytest tests/integration/test_takeover.py -k few -n0 --timeout=3600
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from common.config.settings import Settings
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

JOBS = 10


@pytest.fixture
def settings(likest_to_production: Settings) -> Settings:
    return likest_to_production


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(int(os.environ.get("TEST_STARTS", "3")), id="few"),
        pytest.param(20, id="many", marks=pytest.mark.nightly),
    ],
)
def test_new_coordinator_leads_ten_jobs_at_once(starts: int, make: Make) -> None:
    # c0         ████ one update of each job
    # c1, c2 ...      █ █ █ all ten from their hot snapshots
    jobs = [make(name=f"taken-{number}", records=40) for number in range(JOBS)]
    first = jobs[0]
    first.start("coordinator", "c0")
    for job in jobs:
        first.start("worker", f"worker-{job.job}", job.job)
        job.produce(40)
    await_condition(lambda: all(job.drained() for job in jobs), "each job has its updates")
    await_condition(lambda: all(map(has_snapshot, jobs)), "each job has a hot snapshot")
    first.stop("c0")
    for job in jobs:
        first.kill(f"worker-{job.job}")

    for number in range(1, starts + 1):
        name = f"c{number}"
        first.start("coordinator", name)
        await_condition(partial(ended_or_leads_all, first, name, jobs), f"{name} leads all jobs")
        assert first.ended() == [], first.said(name)
        first.stop(name)

    assert [job.audit().flaws for job in jobs] == [()] * JOBS


def has_snapshot(job: Cluster) -> bool:
    return bool(list(job.board.snapshots()))


def ended_or_leads_all(first: Cluster, coordinator: str, jobs: list[Cluster]) -> bool:
    """Return True if a coordinator's log says that it leads each job, from different versions."""
    if first.ended():
        return True
    lines = [line for line in first.said(coordinator).splitlines() if " leader_elected " in line]
    return all(
        any(f" job={job.job} " in line and "version=0" not in line for line in lines)
        for job in jobs
    )
