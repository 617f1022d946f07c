"""A job of real processes continues when Redis fails over, refuses, loses data or answers wrong."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import redis

from common.core.messages import LeaderStatus, ModelId, TriggerId, UpdateTrigger
from common.errors import UnavailableError
from common.kafka.opening import open_log
from common.runtime.connect import connect
from common.wire import messages as wire
from services.admin.checks import Servers
from services.admin.stores import Stores
from tests.contract.test_board_failover import REFUSALS
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.config.settings import Settings
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

PROCESSES = {"c1": "coordinator", "c2": "coordinator", "w1": "worker", "w2": "worker"}
FORGED_S = 1.0
HIGHEST = 2**64 - 1
NOBODY = ("127.0.0.1", "1")  # no server listens there


@pytest.fixture
def settings(likest_to_production: Settings) -> Settings:
    return likest_to_production


@pytest.fixture
def admin(settings: Settings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.redis) as client:
        yield client


def started(make: Make, name: str, records: int) -> Cluster:
    cluster = make(name=name, records=records)
    for process, service in PROCESSES.items():
        cluster.start(service, process)
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    return cluster


def assert_updates_continue(cluster: Cluster, what: str) -> None:
    """Produce more records, and wait until they are trained."""
    version = cluster.version()
    cluster.produce(500)
    await_condition(lambda: cluster.version() >= version + 5, f"five updates after {what}")
    assert cluster.ended() == []


def assert_each_record_counts_once(cluster: Cluster, records: int) -> None:
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), records, 0)


def test_job_continues_after_redis_refused_requests(make: Make, admin: redis.Redis) -> None:
    cluster = started(make, "refusing-redis", 3500)

    def refused(begin: Callable[[], object], end: Callable[[], object], what: str) -> None:
        def logged(event: str) -> list[int]:
            return [cluster.said(worker).count(event) for worker in ("w1", "w2")]

        number = logged("redis_unavailable")[0] + 1
        begin()
        await_condition(
            lambda: logged("redis_unavailable") == [number, number],
            f"both workers report a server that is {what}",
        )
        end()
        assert_updates_continue(cluster, what)
        await_condition(
            lambda: logged("redis_recovered") == [number, number],
            f"both workers report that it is no longer {what}",
        )

    refused(lambda: admin.replicaof(*NOBODY), lambda: admin.replicaof("NO", "ONE"), "a replica")
    refused(
        lambda: admin.config_set("maxmemory", "1"),
        lambda: admin.config_set("maxmemory", "0"),
        "out of memory",
    )
    admin.flushall()
    assert_updates_continue(cluster, "emptied")
    admin.config_set("maxmemory-policy", "allkeys-lru")
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 100_000)
    assert_updates_continue(cluster, "evicting")
    admin.config_set("maxmemory", "0")
    admin.config_set("maxmemory-policy", "noeviction")
    assert_updates_continue(cluster, "no longer evicting")
    assert_each_record_counts_once(cluster, 3500)


def test_job_continues_after_forged_entries_in_redis(make: Make, admin: redis.Redis) -> None:
    cluster = started(make, "forged-redis", 3000)
    keys = f"doll:{{{cluster.job}}}:"

    admin.xadd(keys + "triggers", {"x": b""}, f"{HIGHEST}-{HIGHEST}")
    assert_updates_continue(cluster, "the highest id of all")

    leader_status = cluster.leader_status()
    assert leader_status is not None
    epoch = 2**60
    trigger = UpdateTrigger(TriggerId(epoch, 1), ModelId(epoch, 2**40), ())
    admin.delete(keys + "triggers", f"{keys}triggers:{leader_status.triggers}")
    for stream in ("triggers", f"triggers:{leader_status.triggers}"):
        admin.xadd(keys + stream, {"trigger": wire.encode_trigger(trigger)}, f"{epoch}-1")
    assert_updates_continue(cluster, "a trigger of an epoch without a leader")

    far = dict.fromkeys(leader_status.claimed, 2**40)
    forged = [
        LeaderStatus(epoch, 2**40, far, 2**40, 0, 2, far, "forged"),
        LeaderStatus(leader_status.epoch, 2**41, far, 2**41, 0, 2, far),
    ]
    until = time.monotonic() + FORGED_S
    while time.monotonic() < until:
        for each in forged:
            admin.set(keys + "leader-status", wire.encode_leader_status(each))
    assert_updates_continue(cluster, "forged leader statuses")

    admin.set(keys + "lease", "a holder that never releases it")
    assert_updates_continue(cluster, "a lease that does not expire")
    assert_each_record_counts_once(cluster, 3000)


@pytest.mark.parametrize("refusal", ["a replica", "out of memory", "too few replicas"])
def test_readiness_reports_a_redis_that_refuses_writes(
    settings: Settings, admin: redis.Redis, refusal: str
) -> None:
    stores = Stores(lambda: open_log(settings), time.time)
    servers = Servers(connect(settings), lambda: open_log(settings), stores)
    ask = servers.asked()["redis"]
    try:
        assert ask() == ""
        REFUSALS[refusal].begin(admin)
        with pytest.raises(UnavailableError):
            ask()
    finally:
        REFUSALS[refusal].end(admin)
    await_condition(lambda: ask() == "", "Redis is healthy again")
    servers.close()
