"""A fleet with two builds of a task: workers of the job's build learn, others are left out."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.integration.cluster import Cluster, await_condition
from tests.integration.mixed_builds import ENTRYPOINT, FROZEN, ORDER, ROUNDING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.config.settings import Settings

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

RECORDS = 1600
GROUP = "\n            aggregation: {mode: group}\n            checkpoint: {every_s: 0.5}\n"
DIFFERENCE = (
    "first difference: at place 1 it has the parameter 'low' (800,) float32, but the task's"
    " model has the parameter 'high' (800,) float32"
)


@pytest.fixture(params=["", GROUP], ids=["board", "group"])
def cluster(
    request: pytest.FixtureRequest, likest_to_production: Settings, tmp_path: Path
) -> Iterator[Cluster]:
    name = f"mixed-{request.node.callspec.id}"
    parts = likest_to_production, tmp_path, name, RECORDS, request.param
    with closing(Cluster(*parts, seconds=0.01, entrypoint=ENTRYPOINT)) as cluster:
        yield cluster


def test_worker_of_another_build_is_left_out_and_all_records_count_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # w1   the job's build    ██████████████████
    # w2   the other one           ░░░░░░░░░░░░░  claims batches, computes none
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(RECORDS // 4)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    with monkeypatch.context() as patch:
        patch.setenv(ORDER, "high,low")
        cluster.start("worker", "w2")

    def left_out() -> dict[str, str]:
        status = cluster.leader_status()
        return {} if status is None else {str(w): why for w, why in status.left_out.items()}

    await_condition(lambda: "w2" in left_out(), "the leader leaves the other build out")
    assert "its task builds another model than the job's" in left_out()["w2"]
    assert left_out().keys() == {"w2"}
    await_condition(
        lambda: DIFFERENCE in cluster.board.unable().get("worker w2", ""),
        "the worker reports the reason",
    )
    cluster.produce(3 * RECORDS // 4)
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained) == ((), RECORDS)
    assert cluster.wanted() == "running"
    lines = [line for line in cluster.said("w2").splitlines() if " worker_left_out " in line]
    assert len(lines) == 1
    assert DIFFERENCE in lines[0]
    assert sum(" worker_left_out " in line for line in cluster.said("c1").splitlines()) == 1


@pytest.mark.parametrize("options", ["", GROUP], ids=["board", "group"])
def test_worker_that_draws_other_frozen_tensors_computes_with_those_of_the_job(
    likest_to_production: Settings,
    tmp_path: Path,
    options: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # w1   ██████████ stops
    # w2        ░░░░░░██████████   its own frozen tensor would make each step 1.5 times as long
    name = f"frozen-{'group' if options else 'board'}"
    parts = likest_to_production, tmp_path, name, RECORDS, options
    with closing(Cluster(*parts, seconds=0.01, entrypoint=FROZEN)) as cluster:
        cluster.start("coordinator", "c1")
        cluster.start("worker", "w1")
        cluster.produce(RECORDS // 4)
        await_condition(lambda: cluster.version() >= 3, "three updates")
        with monkeypatch.context() as patch:
            patch.setenv(ROUNDING, "0.5")
            cluster.start("worker", "w2")
        await_condition(lambda: live(cluster) == 2, "the leader sees both workers")
        cluster.stop("w1")
        cluster.produce(3 * RECORDS // 4)
        await_condition(cluster.drained, "everything is settled")
        assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
        audit = cluster.audit()
        assert (audit.flaws, audit.trained) == ((), RECORDS)
        assert len([blob for blob in cluster.blobs() if "/base/" in blob]) == 2


def live(cluster: Cluster) -> int:
    """Return the number of live workers in the leader's status."""
    status = cluster.leader_status()
    return 0 if status is None else status.live
