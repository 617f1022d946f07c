"""The whole road of a record, on processes and servers: nothing lost, nothing twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from confluent_kafka import Consumer, TopicPartition

from common.core.messages import Gradient, ModelId, WorkerId
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]


def test_every_record_is_used_once_though_a_worker_and_a_leader_die(
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


def test_records_that_do_not_decode_are_dead_letters_that_say_where_they_were(
    make: Make,
) -> None:
    cluster = make(name="garbage", records=200)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(200, garbage_every=20)
    await_condition(cluster.drained, "everything is settled")

    letters = dead_letters(cluster, expected=10)
    assert len(letters) == 10
    for value, headers in letters:
        assert value == b"no record"
        assert headers["reason"]
        assert headers["topic"].decode() in cluster.streams
        assert int(headers["partition"]) in (0, 1)
        assert int(headers["offset"]) >= 0
    assert cluster.audit().trained == 200


def test_a_poison_batch_is_quarantined_and_stops_nothing(make: Make) -> None:
    cluster = make(name="poison", records=400, options="strikes: 1", poison=137)
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


def test_a_job_ends_at_its_number_of_updates_with_a_checkpoint(make: Make) -> None:
    cluster = make(name="ending", records=1000, options="stop: {updates: 5}")
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(1000)
    await_condition(lambda: cluster.wanted() == "stopped", "the job is stopped")

    assert cluster.version() == 5
    assert any(name.endswith("manifest.json") for name in cluster.blobs())
    await_condition(lambda: "worker_left" in cluster.said("w1"), "the worker has left")


def test_a_stopped_job_resumes_exactly_where_it_was(make: Make) -> None:
    cluster = make(name="resumed", records=1200)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(600)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    cluster.want("stopped")
    await_condition(lambda: "worker_left" in cluster.said("w1"), "the worker has left")
    await_condition(lambda: "job_finished" in cluster.said("c1"), "the last checkpoint is there")
    cluster.board.wipe()
    cluster.produce(600)
    cluster.want("running")
    await_condition(cluster.drained, "everything is settled")

    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert cluster.audit().flaws == ()


def test_nonsense_on_the_board_is_dropped_and_changes_nothing(make: Make) -> None:
    cluster = make(name="nonsense", records=800)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    await_condition(lambda: cluster.standing() is not None, "somebody leads")
    standing = cluster.standing()
    assert standing is not None
    for version in range(20):
        model = ModelId(standing.epoch, version)
        vector = np.ones(3, np.float32)
        ghost = WorkerId("ghost")
        cluster.board.push_reply(Gradient(ghost, model, (0, 1, 2, 3), 32, 1.0, {}, 0.1, vector))
    cluster.produce(800)
    await_condition(cluster.drained, "everything is settled")

    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert "gradient_malformed" in cluster.said("c1")


def dead_letters(cluster: Cluster, expected: int) -> list[tuple[bytes, dict[str, bytes]]]:
    """Value and headers of every dead letter, read by a plain consumer, as an operator would."""
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
