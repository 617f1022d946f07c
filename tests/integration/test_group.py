"""Workers that hold the weights, as processes: whatever is killed, each record counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from common.config.settings import Settings
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

GROUP = """
            aggregation: {mode: group}
            checkpoint: {every_s: 0.5}
"""


@pytest.fixture
def settings(embedded: Settings) -> Settings:
    return embedded


def assert_each_record_counts_once(cluster: Cluster, records: int) -> None:
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), records, 0)


def started(make: Make, name: str, records: int, *names: str) -> Cluster:
    cluster = make(name, records, GROUP, seconds=0.01)
    for each in names:
        cluster.start("coordinator" if each.startswith("c") else "worker", each)
    cluster.produce(records)
    return cluster


def test_who_dies_takes_its_own_part_of_an_update_alone(make: Make) -> None:
    # w1..w3   ██████████████████████████
    # w4       ████ killed    ████ another under its name
    # c1       ██████████ killed
    # c2       ░░░░░░░░░░███████████████
    cluster = started(make, "group", 3000, "c1", "w1", "w2", "w3", "w4")
    await_condition(lambda: cluster.version() >= 10, "ten updates")
    cluster.start("coordinator", "c2")
    cluster.kill("w4")
    before = cluster.version()
    await_condition(lambda: cluster.version() >= before + 10, "ten more without w4")
    cluster.start("worker", "w4")
    cluster.kill("c1")
    assert_each_record_counts_once(cluster, 3000)
    assert cluster.audit().taken_back == 0


def test_with_all_workers_goes_what_was_not_stored_and_is_learned_again(make: Make) -> None:
    cluster = started(make, "all-die", 2000, "c1", "w1", "w2")
    await_condition(lambda: cluster.version() >= 20, "twenty updates")
    for name in ("w1", "w2"):
        cluster.kill(name)
    for name in ("w3", "w4"):
        cluster.start("worker", name)
    assert_each_record_counts_once(cluster, 2000)
