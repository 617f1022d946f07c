"""A record's complete path, on processes and servers: no record is lost or used twice."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from confluent_kafka import Consumer, TopicPartition

from common.core.messages import Gradient, ModelId, TriggerId, WorkerId
from common.jobs.operations import JobOperations
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from common.jobs.edit import Value
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]


def test_every_record_is_used_once_if_worker_and_leader_die(
    make: Make,
) -> None:
    # time     ──────────────────────────────────────────────▶
    # w1       ████████ killed
    # w2, w3   ████████████████████████████████████████████████
    # w4                  ██████████████████████████████████████
    # c1       █████████████████████ killed
    # c2       standby                ██████ leads ████████████
    cluster = make(name="chaos", records=4000)
    for name in ("c1", "w1", "w2", "w3"):
        cluster.start("coordinator" if name.startswith("c") else "worker", name)
    cluster.produce(1500)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.start("coordinator", "c2")
    cluster.kill("w1")
    cluster.start("worker", "w4")
    cluster.produce(1500, garbage_every=100)
    await_condition(lambda: cluster.version() >= 30, "updates after the kill of a worker")
    cluster.kill("c1")
    cluster.produce(1000)
    await_condition(cluster.drained, "everything is settled")

    weights = cluster.weights()
    assert np.flatnonzero(weights != -1.0).tolist() == []
    audit = cluster.audit()
    assert audit.flaws == ()
    assert (audit.trained, audit.skipped, audit.unsettled) == (4000, 15, 0)
    assert audit.takeovers >= 2
    assert cluster.has_led("c2")


def train_through_deaths(cluster: Cluster) -> None:
    """Train 3,000 records, while a worker and then the leader die."""
    # w1       ████████ killed
    # w2, w3   ████████████████████████████████████████████████
    # c1       ██████████████████████████ killed
    # c2       standby                      leads █████████████
    for each in ("c1", "c2", "w1", "w2", "w3"):
        cluster.start("coordinator" if each.startswith("c") else "worker", each)
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    leader = "c1" if cluster.has_led("c1") else "c2"
    cluster.kill("w1")
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 30, "updates after the kill of a worker")
    cluster.kill(leader)
    cluster.produce(1000)
    await_condition(cluster.drained, "everything is settled")


@pytest.mark.parametrize(
    ("block", "staleness"),
    # On every change, another test switches one job between all three modes and kills its leader.
    [
        pytest.param("{mode: stale, staleness: 2}", 2, id="stale", marks=pytest.mark.nightly),
        pytest.param("{mode: asynchronous, staleness: 8, local_rate: 0.5}", 8, id="asynchronous"),
        pytest.param(
            "{mode: averaging, local_rate: 0.5}", 0, id="averaging", marks=pytest.mark.nightly
        ),
    ],
)
def test_every_record_is_used_once_in_each_synchronisation_mode(
    make: Make, block: str, staleness: int
) -> None:
    name = block[1:].partition(",")[0].rpartition(" ")[2]
    cluster = make(name, 3000, f"synchronisation: {block}", seconds=0.01)
    train_through_deaths(cluster)

    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), 3000, 0)
    found = [update.staleness for update in audit.updates]
    assert max(found) <= staleness
    assert (max(found) > 0) == (staleness > 0)
    assert {len(update.batches) for update in audit.updates if not update.short} == {4}
    if "local_rate" in block:
        assert any(max(update.parts or (1,)) > 1 for update in audit.updates)


def test_every_record_is_used_once_if_a_rule_holds_for_a_while(make: Make) -> None:
    # workers   w1 ██████████████████████████
    #           w2 w3 ██████████████ killed, and the leader
    # updates   K=2, stale               K=4, synchronous
    block = "{rules: [{when: {workers_from: 2}, mode: stale, group_size: 2}]}"
    cluster = make("rules", 3000, f"synchronisation: {block}", seconds=0.01)
    for each in ("c1", "c2", "w1", "w2", "w3"):
        cluster.start("coordinator" if each.startswith("c") else "worker", each)
    cluster.produce(1500)
    await_condition(lambda: cluster.version() >= 40, "updates, most by the rule")
    for each in ("c1" if cluster.has_led("c1") else "c2", "w2", "w3"):
        cluster.kill(each)
    cluster.produce(1500)
    await_condition(cluster.drained, "everything is settled")

    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), 3000, 0)
    whole = [update for update in audit.updates if not update.short]
    made = {(len(each.batches), bool(each.synchrony)) for each in whole}
    assert made == {(2, True), (4, False)}
    counted = sum(0.5 if update.synchrony else 1 for update in audit.updates)
    assert audit.updates[-1].progress == counted


def test_every_record_is_used_once_if_workers_get_only_changes(make: Make) -> None:
    cluster = make("changes", 20_000, "compression: {significance: 1.5}")
    train_through_deaths(cluster)

    weights = cluster.weights()
    assert (weights[:3000] == -1.0).all()
    assert not weights[3000:].any()
    leader_status = cluster.leader_status()
    assert leader_status is not None
    posted = cluster.board.triggers(TriggerId(0, 0), 1.0, leader_status.triggers)
    assert any(trigger.since for trigger in posted)
    assert all(trigger.weights is None for trigger in posted)


def test_every_record_is_used_once_if_synchronisation_changes_at_run_time(
    make: Make,
) -> None:
    # mode          synchronous   stale   averaging   asynchronous   synchronous
    # compression                 significant changes         1 % of changes
    # leader        █████████████████████████████████████████ killed
    # other         stands by                                   leads ██████████
    cluster = make("switched", 20_000, seconds=0.01)
    for each in ("c1", "c2", "w1", "w2", "w3"):
        cluster.start("coordinator" if each.startswith("c") else "worker", each)
    compression: dict[str, Value] = {"significance": 1.5}
    changes: list[dict[str, Value]] = [
        {"synchronisation": {"mode": "stale", "staleness": 2}, "compression": compression},
        {"synchronisation": {"mode": "averaging", "local_rate": 0.5}},
        {
            "synchronisation": {"mode": "asynchronous", "staleness": 6, "local_rate": 0.5},
            "compression": {"changes": 0.01},
        },
        {"synchronisation": None, "compression": None},
    ]
    # Keyed by revision. A successor may roll updates back.
    allowed: dict[int, set[int | None]] = {}
    for revision, change in enumerate([{}, *changes]):
        if change:
            cluster.change(**change)
        cluster.produce(600)
        await_revision(cluster, revision)
        note_staleness(cluster, allowed)
        if revision == len(changes) - 1:
            leader, other = ("c1", "c2") if cluster.has_led("c1") else ("c2", "c1")
            cluster.kill(leader)
            await_condition(partial(cluster.has_led, other), "the other coordinator leads")
            await_revision(cluster, revision)
    await_condition(cluster.drained, "everything is settled")

    weights = cluster.weights()
    assert (weights[:3000] == -1.0).all()
    assert not weights[3000:].any()
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), 3000, 0)
    note_staleness(cluster, allowed)
    assert allowed == {0: {None}, 1: {2}, 2: {0}, 3: {6}, 4: {None}}


def note_staleness(cluster: Cluster, found: dict[int, set[int | None]]) -> None:
    """Add the staleness that updates were allowed, by revision. None if they were synchronous."""
    for each in cluster.audit().updates:
        synchrony = each.synchrony
        found.setdefault(each.revision, set()).add(synchrony.staleness if synchrony else None)


def await_revision(cluster: Cluster, revision: int) -> None:
    await_condition(lambda: revision in revisions(cluster), f"an update of revision {revision}")


def test_undecodable_records_become_dead_letters_with_their_address(
    make: Make,
) -> None:
    cluster = make(name="garbage", records=200)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(200, garbage_every=20)
    await_condition(cluster.drained, "everything is settled")

    found = dead_letters(cluster, expected=10)
    assert len(found) == 10
    for value, headers in found:
        assert value == b"no record"
        assert headers["reason"]
        assert headers["topic"].decode() in cluster.streams
        assert int(headers["partition"]) in (0, 1)
        assert int(headers["offset"]) >= 0
    assert cluster.audit().trained == 200


def test_poison_batch_is_quarantined_and_training_continues(make: Make) -> None:
    cluster = make(name="poison", records=400, options="max_failures: 1", poison=137)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.start("worker", "w2")
    cluster.produce(400)
    await_condition(cluster.drained, "everything is settled")

    audit = cluster.audit()
    weights = cluster.weights()
    assert [record.reason.split(":")[0] for record in audit.quarantined] == ["poison"]
    untrained = np.flatnonzero(weights == 0.0).tolist()
    assert 137 in untrained
    assert len(untrained) == audit.quarantined[0].batch.samples
    assert np.flatnonzero(weights == -1.0).size == 400 - len(untrained)
    assert audit.flaws == ()


def test_job_ends_at_its_number_of_updates_with_a_checkpoint(make: Make) -> None:
    cluster = make(name="ending", records=1000, options="stop: {updates: 5}")
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(1000)
    await_condition(lambda: cluster.wanted() == "stopped", "the job is stopped")

    assert cluster.version() == 5
    assert any(name.endswith("manifest.json") for name in cluster.blobs())
    await_condition(lambda: "worker_left" in cluster.said("w1"), "the worker has left")


def test_stopped_job_resumes_exactly_where_it_stopped(make: Make) -> None:
    cluster = make(name="resumed", records=1200)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(600)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.want("stopped")
    await_condition(lambda: "worker_left" in cluster.said("w1"), "the worker has left")
    await_condition(lambda: "job_finished" in cluster.said("c1"), "the last checkpoint is stored")
    cluster.board.wipe()
    cluster.produce(600)
    cluster.want("running")
    await_condition(cluster.drained, "everything is settled")

    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert cluster.audit().flaws == ()


def test_job_changed_at_run_time_loses_no_record(make: Make) -> None:
    # revision  0: K=4 b=8, steps of 1   1: K=2 b=16                2: steps of 1/2
    # leader    ████████████████████████████████████████████████████████████ killed
    # other     stands by                                                       leads ████████
    cluster = make(name="changed", records=3000)
    for name in ("c1", "c2", "w1", "w2"):
        cluster.start("coordinator" if name.startswith("c") else "worker", name)
    cluster.produce(800)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    leader, other = ("c1", "c2") if cluster.has_led("c1") else ("c2", "c1")
    await_condition(lambda: "standby" in cluster.said(other), "there are two replicas")
    cluster.change(group_size=2, batch_size=16)
    cluster.produce(700)
    await_condition(lambda: "job_changed" in cluster.said(leader), "the leader knows the change")
    await_condition(lambda: "batches_resized" in cluster.said("w1"), "w1 knows the change")
    await_condition(lambda: "batches_resized" in cluster.said("w2"), "w2 knows the change")
    cluster.produce(500)
    await_condition(lambda: 1 in revisions(cluster), "an update of the first change")
    cluster.change(learning_rate=0.5)
    await_condition(
        lambda: cluster.said(leader).count("job_changed") == 2, "the leader knows the second change"
    )
    cluster.produce(500)
    await_condition(lambda: 2 in revisions(cluster), "an update of the second change")
    await_condition(
        lambda: cluster.said(other).count("job_changed") == 2,
        "the other coordinator knows both changes",
    )
    cluster.kill(leader)
    cluster.produce(500)
    await_condition(cluster.drained, "everything is settled")

    audit = cluster.audit()
    assert audit.flaws == ()
    assert cluster.has_led(other)
    of_size = {0: 4, 1: 2, 2: 2}
    odd = [u for u in audit.updates if len(u.batches) != of_size[u.revision] and not u.short]
    assert odd == []
    assert audit.updates[-1].revision == 2
    assert all(update.gradient_s > 0 for update in audit.updates)
    late = [batch.samples for u in audit.updates if u.revision == 2 for batch in u.batches]
    assert max(late) == 16
    weights = cluster.weights()
    assert np.flatnonzero(weights == -0.5).size == sum(late)
    assert np.flatnonzero(weights == -1.0).size == 3000 - sum(late)


def test_deleted_job_is_removed_and_its_worker_leaves(make: Make) -> None:
    cluster = make(name="deleted", records=200)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(200)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.want("stopped")
    with closing(JobOperations(cluster.log)) as job_store:
        # No process has read that the job is stopped.
        job_store.delete("deleted")
        await_condition(lambda: "worker_left" in cluster.said("w1"), "the worker has left")
        await_condition(
            lambda: "job_finished" in cluster.said("c1"), "no coordinator leads the job"
        )
        cluster.stop("c1")
        assert "coordinator_failed" not in cluster.said("c1")
        assert "deleted" not in job_store.read()


def test_invalid_gradients_on_the_board_are_dropped(make: Make) -> None:
    cluster = make(name="nonsense", records=800)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    await_condition(lambda: cluster.leader_status() is not None, "a coordinator leads")
    leader_status = cluster.leader_status()
    assert leader_status is not None
    cluster.produce(400)
    trigger, *_ = cluster.board.triggers(TriggerId(-1, 0), 30.0)
    for version in range(200):
        model = ModelId(leader_status.epoch, version)
        vector = np.ones(3, np.float32)
        ghost = WorkerId("ghost")
        torn = Gradient(ghost, model, (0, 1, 2, 3), 32, 1.0, {}, 0.1, vector=vector)
        cluster.board.push_reply(torn, trigger.reply_to)
    cluster.produce(400)
    await_condition(cluster.drained, "everything is settled")

    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert "gradient_malformed" in cluster.said("c1")


def revisions(cluster: Cluster) -> set[int]:
    """Return the job's revisions that have updates."""
    return {update.revision for update in cluster.audit().updates}


def dead_letters(cluster: Cluster, expected: int) -> list[tuple[bytes, dict[str, bytes]]]:
    """Return value and headers of every dead letter, read by a plain consumer."""
    found = list[tuple[bytes, dict[str, bytes]]]()
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap(),
            "group.id": "operator",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([TopicPartition(f"{stream}.dlq", 0, 0) for stream in cluster.streams])

    def all_there() -> bool:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            headers = cast("list[tuple[str, bytes]]", message.headers())
            found.append((message.value() or b"", dict(headers)))
        return len(found) >= expected

    await_condition(all_there, f"{expected} dead letters")
    consumer.close()
    return found
