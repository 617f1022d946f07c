"""Faults without a crash, and faults of shared servers: freezes, empty fleets, server restarts."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.core.messages import Lead, ModelId
from common.core.snapshots import Snapshot
from common.core.spans import Partition
from common.kafka.names import control_topic, updates_topic
from common.kafka.read import read_decoded
from common.redis.exchange import open_leader_boards
from common.storage.snapshot_file import SnapshotFile, to_bytes
from common.wire import messages as wire
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.embedded.apache_kafka import ApacheKafka
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]


@pytest.fixture
def settings(likest_to_production: Settings) -> Settings:
    return likest_to_production


def assert_each_record_counts_once(cluster: Cluster, records: int) -> None:
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), records, 0)


def test_frozen_worker_changes_nothing_when_it_wakes(make: Make) -> None:
    # w1   ████████ frozen ░░░░░░░░░░░░░░░░ thaws ██████   with outdated claims and gradients
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


def test_training_resumes_when_a_worker_joins_the_empty_fleet(make: Make) -> None:
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


def test_frozen_leader_changes_nothing_when_it_wakes(make: Make) -> None:
    # c1   leads ██████ frozen ░░░░░░░░░░░░░░░░░░░ thaws, steps down
    # c2   standby             leads ███████████████████████████████
    cluster = make(name="frozen-leader", records=3000)
    cluster.start("coordinator", "c1")
    await_condition(lambda: cluster.leader_status() is not None, "c1 leads")
    for name in ("c2", "w1", "w2"):
        cluster.start("coordinator" if name == "c2" else "worker", name)
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.freeze("c1")
    cluster.produce(1000)
    await_condition(lambda: cluster.has_led("c2"), "c2 leads")
    cluster.thaw("c1")
    await_condition(lambda: "leadership_lost" in cluster.said("c1"), "c1 has lost its leadership")
    cluster.produce(1000)
    assert_each_record_counts_once(cluster, 3000)
    assert cluster.audit().takeovers == 2


def test_leader_and_worker_frozen_during_a_purge_are_ignored_afterwards(
    make: Make, likest_to_production: Settings
) -> None:
    # c1, w1   first job ███ frozen ░░░░░░░░░░░░░░░░░░░░░░░░░░░ thaw ███ take part in the second
    # c2, w2   first job ███████████ stopped, purged   second job ███████████████████████████████
    cluster = make(name="purged", records=2000)
    cluster.start("coordinator", "c1")
    await_condition(lambda: cluster.leader_status() is not None, "c1 leads")
    for name in ("c2", "w1", "w2"):
        cluster.start("coordinator" if name == "c2" else "worker", name)
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.freeze("w1")
    cluster.freeze("c1")
    await_condition(
        lambda: cluster.has_led("c2") and cluster.drained(), "c2 leads and the job is drained"
    )
    cluster.want("stopped")
    await_condition(lambda: not cluster.board.is_leased(), "its last leader has released the lease")
    own = [topic for topic in cluster.log.topics() if topic.startswith("doll.purged.")]
    removed = cluster.purge()
    if not likest_to_production.embedded_kafka:
        assert sorted(removed.topics) == own
        await_condition(lambda: not {*own} & {*cluster.log.topics()}, "the topics are deleted")

    assert cluster.submit_again() == "purged.I2"
    await_condition(lambda: cluster.version() >= 3, "three updates of the second job")
    for name in ("c1", "w1"):
        cluster.thaw(name)
    await_condition(lambda: "w1" in cluster.board.heartbeats(), "w1 works for the second job")
    cluster.produce(1000)
    assert_each_record_counts_once(cluster, 2000)
    assert cluster.ended() == []


def test_empty_redis_is_refilled_from_memory_of_the_leader(
    make: Make, request: pytest.FixtureRequest, settings: Settings
) -> None:
    server = "embedded_redis" if settings.embedded_kafka else "system_redis"
    cluster = make(name="empty-redis", records=3000)
    cluster.start("coordinator", "c1")
    await_condition(lambda: cluster.leader_status() is not None, "c1 leads")
    for name in ("c2", "w1", "w2"):
        cluster.start("coordinator" if name == "c2" else "worker", name)
    cluster.produce(1500)
    await_condition(lambda: cluster.version() >= 10, "ten updates")
    request.getfixturevalue(server).kill()
    version = cluster.version()
    request.getfixturevalue(server).restart()
    cluster.produce(1500)
    await_condition(lambda: cluster.version() > version + 10, "training continues")
    assert_each_record_counts_once(cluster, 3000)


@pytest.mark.kafka
@pytest.mark.redis
def test_services_wait_for_restarting_broker_and_resume(
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


@pytest.mark.kafka
@pytest.mark.redis
def test_on_preemption_hold_keeps_streams_for_the_killed_worker(
    make: Make, settings: Settings
) -> None:
    # w1   ████████ killed                   restarted: its streams continue
    # w2   ████████████████ its own streams only ███████████████████
    if settings.embedded_kafka:
        pytest.skip("the embedded broker knows no static members")
    cluster = make(name="held-streams", records=3000, options="on_preemption: hold")
    for name in ("c1", "w1", "w2"):
        cluster.start("coordinator" if name == "c1" else "worker", name)
    cluster.produce(1000)
    have_shares = lambda: all("reading_from" in cluster.said(name) for name in ("w1", "w2"))  # noqa: E731 -- short
    await_condition(have_shares, "each worker has its share")
    await_condition(cluster.drained, "both workers read")
    before = cluster.said("w2").count("partitions_assigned")
    cluster.kill("w1")
    cluster.produce(1000)

    def own_streams_are_read() -> bool:
        leader_status = cluster.leader_status()
        if leader_status is None:
            return False
        read = [p for p, at in leader_status.claimed.items() if at == cluster.log.bounds(p).end]
        return len(read) == 2

    await_condition(own_streams_are_read, "w2 has read its own two partitions")
    assert cluster.said("w2").count("partitions_assigned") == before
    cluster.start("worker", "w1")
    cluster.produce(1000)
    assert_each_record_counts_once(cluster, 3000)


def test_control_record_of_later_format_holds_the_job(make: Make) -> None:
    cluster = make(name="later-format", records=1000)
    for name in ("c1", "c2", "w1"):
        cluster.start("coordinator" if name.startswith("c") else "worker", name)
    cluster.produce(500)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    writer = cluster.log.writer()
    writer.append(control_topic(cluster.job), b'{"type":"merged","format":2}')
    assert writer.flush(30.0)
    writer.close()
    await_condition(lambda: cluster.wanted() == "paused", "the job is held")

    reason = cluster.record().reason
    assert control_topic(cluster.job) in reason
    assert "'merged' of format 2, expected at most 1" in reason
    assert "start a newer version of the coordinator" in reason
    held = lambda: any("job_held" in cluster.said(name) for name in ("c1", "c2"))  # noqa: E731 -- short
    await_condition(held, "the hold is logged")
    updates = read_decoded(cluster.log, updates_topic(cluster.job), wire.decode_audit)
    leads = [record for _, record in updates if isinstance(record, Lead)]
    # No leader repeats the same failure for many terms.
    assert len(leads) <= 2


def test_control_topic_shorter_than_snapshot_holds_the_job(make: Make) -> None:
    cluster = make(name="lost-records", records=100)
    known = Snapshot(4, ModelId(4, 9), updates_position=14, control_position=3, claimed={})
    sealed = to_bytes(SnapshotFile(known, b""), cluster.record().seal)
    with closing(open_leader_boards(cluster.settings)) as boards:
        boards.board(cluster.job).put_snapshot(4, sealed, "c1")
    cluster.start("coordinator", "c1")
    await_condition(lambda: cluster.wanted() == "paused", "the job is held")

    reason = cluster.record().reason
    assert (
        "the control topic lost records that Kafka had acknowledged: it ends at offset 0" in reason
    )
    assert "the hot snapshot 4-9 needs it up to offset 3" in reason
    assert "--after-loss" in reason
    assert (
        cluster.log.bounds(Partition(updates_topic(cluster.job), 0)).end == 0
    )  # no coordinator led
