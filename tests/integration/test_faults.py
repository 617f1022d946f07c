"""What fails without dying, and what all depend on: freezes, empty fleets, restarting servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from common.config import Settings
    from common.embedded.apache_kafka import ApacheKafka
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]


def assert_each_record_counts_once(cluster: Cluster, records: int) -> None:
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), records, 0)


def test_a_worker_that_was_only_frozen_changes_nothing_when_it_wakes(make: Make) -> None:
    # w1   ████████ frozen ░░░░░░░░░░░░░░░░ thaws ██████   with claims and gradients in mind
    # w2   ████████████████████████████████████████████
    cluster = make(name="frozen-worker", records=3000)
    for name in ("c1", "w1", "w2"):
        cluster.start("coordinator" if name == "c1" else "worker", name)
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.freeze("w1")
    cluster.produce(1000)
    await_condition(cluster.drained, "w2 has taken over all partitions")
    cluster.thaw("w1")
    cluster.produce(1000)
    assert_each_record_counts_once(cluster, 3000)


def test_training_goes_on_by_itself_when_one_of_no_workers_comes_back(make: Make) -> None:
    cluster = make(name="no-workers", records=2000)
    for name in ("c1", "w1", "w2"):
        cluster.start("coordinator" if name == "c1" else "worker", name)
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.kill("w1")
    cluster.kill("w2")
    cluster.produce(1000)
    cluster.start("worker", "w3")
    assert_each_record_counts_once(cluster, 2000)


def test_a_leader_that_was_only_frozen_changes_nothing_when_it_wakes(make: Make) -> None:
    # c1   leads ██████ frozen ░░░░░░░░░░░░░░░░░░░ thaws, steps down
    # c2   standby             leads ███████████████████████████████
    cluster = make(name="frozen-leader", records=3000)
    cluster.start("coordinator", "c1")
    await_condition(lambda: cluster.standing() is not None, "c1 leads")
    for name in ("c2", "w1", "w2"):
        cluster.start("coordinator" if name == "c2" else "worker", name)
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.freeze("c1")
    cluster.produce(1000)
    await_condition(lambda: " leads " in cluster.said("c2"), "c2 leads")
    cluster.thaw("c1")
    await_condition(lambda: "steps_down" in cluster.said("c1"), "c1 has noticed")
    cluster.produce(1000)
    assert_each_record_counts_once(cluster, 3000)
    assert cluster.audit().takeovers == 2


def test_redis_that_comes_back_empty_is_filled_again_from_the_leaders_memory(
    make: Make, request: pytest.FixtureRequest, settings: Settings
) -> None:
    server = "embedded_redis" if settings.embedded_kafka else "system_redis"
    cluster = make(name="empty-redis", records=3000)
    cluster.start("coordinator", "c1")
    await_condition(lambda: cluster.standing() is not None, "c1 leads")
    for name in ("c2", "w1", "w2"):
        cluster.start("coordinator" if name == "c2" else "worker", name)
    cluster.produce(1500)
    await_condition(lambda: cluster.version() >= 10, "ten updates")
    request.getfixturevalue(server).kill()
    version = cluster.version()
    request.getfixturevalue(server).restart()
    cluster.produce(1500)
    await_condition(lambda: cluster.version() > version + 10, "it goes on where it was")
    assert_each_record_counts_once(cluster, 3000)


@pytest.mark.kafka
@pytest.mark.redis
def test_everything_waits_for_a_broker_that_restarts_and_goes_on(
    make: Make, settings: Settings, apache_kafka: ApacheKafka
) -> None:
    if settings.embedded_kafka:
        pytest.skip("the embedded broker keeps nothing on disk")
    cluster = make(name="restarted-broker", records=3000)
    for name in ("c1", "c2", "w1", "w2"):
        cluster.start("coordinator" if name.startswith("c") else "worker", name)
    cluster.produce(1500)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    apache_kafka.kill()
    apache_kafka.restart()
    cluster.produce(1500)
    assert_each_record_counts_once(cluster, 3000)
