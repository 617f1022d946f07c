"""A stopped job resumes from the checkpoints in storage, or is held until an operator acts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest

from common.core.snapshot_search import TORN_S
from common.learning.checkpoint import unpack
from common.learning.optimizers import OptimizerSettings
from common.learning.trainer import Trainer
from common.redis.board import open_board
from common.storage.port import open_blobs
from common.storage.snapshot_file import from_bytes
from common.storage.store import CheckpointStore
from tests.integration.cluster import PATIENCE_S, Cluster, await_condition, served

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.config.settings import Settings
    from common.storage.port import Blobs
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

OFTEN = "checkpoint: {every_updates: 4, keep: 3}"
TRAINER = "trainer.safetensors"
# Retries of a torn checkpoint take some time.
TORN_PATIENCE_S = PATIENCE_S + TORN_S


@pytest.fixture
def settings(likest_to_production: Settings) -> Settings:
    return likest_to_production


def stopped_half_way(make: Make, name: str) -> Cluster:
    """A job that was stopped after 400 of 800 records. Its Redis is empty since then."""
    cluster = make(name, 800, OFTEN)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(400)
    await_condition(cluster.drained, "the first half is settled")
    cluster.want("stopped")
    await_condition(lambda: "job_finished" in cluster.said("c1"), "the last checkpoint is stored")
    await_condition(lambda: "worker_left" in cluster.said("w1"), "the worker has left")
    cluster.board.wipe()
    return cluster


def content(blobs: Blobs) -> dict[str, bytes]:
    return {name: blobs.get(name) or b"" for name in blobs.names("")}


def finish(cluster: Cluster) -> None:
    """Produce the other half, and check that every record counts once."""
    cluster.produce(400)
    cluster.want("running")
    await_condition(cluster.drained, "everything is settled", TORN_PATIENCE_S)
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert cluster.audit().flaws == ()


def test_stopped_job_resumes_from_previous_checkpoint_if_newest_is_torn(
    make: Make,
) -> None:
    # checkpoints   4    8    12   last
    # torn                         ✗
    # resumes                 12 ──────────▶
    cluster = stopped_half_way(make, "torn")
    blobs = open_blobs(cluster.settings)
    newest, before, *_ = CheckpointStore(blobs, "torn").finished()
    (part,) = [n for n in blobs.names("") if n.endswith(f"{newest.version:012}/{TRAINER}")]
    blobs.put(part, (blobs.get(part) or b"")[:-1])

    finish(cluster)

    said = cluster.said("c1")
    assert f'reason="{TRAINER} has' in said
    last_lead = [line for line in said.splitlines() if " leader_elected " in line][-1]
    assert f"version={before.version}" in last_lead
    assert cluster.audit().taken_back >= newest.version - before.version


def tear_all(blobs: Blobs, _job: str) -> str:
    for name in blobs.names(""):
        if name.endswith("manifest.json"):
            blobs.put(name, b"{")
    return "there are checkpoints, but none can be used to continue"


def exchange_model(blobs: Blobs, job: str) -> str:
    store = CheckpointStore(blobs, job)
    other = Trainer(np.zeros(7, np.float32), 7, OptimizerSettings("adam", 0.1)).snapshot()
    for name in store.finished():
        checkpoint = store.open(name)
        parts = {part: checkpoint.read(part) for part in checkpoint.manifest.parts}
        blobs.delete(f"{checkpoint.folder}manifest.json")
        store.save(name, {**parts, TRAINER: other}, checkpoint.manifest.created_s)
    return (
        "the snapshot contains adam, 7 parameters, 0 buffers, but this job's model has sgd, 800"
        " parameters, 0"
    )


def write_by_newer_program(blobs: Blobs, job: str) -> str:
    newest = CheckpointStore(blobs, job).finished()[0]
    (manifest,) = [n for n in blobs.names("") if f"{newest.version:012}/manifest" in n]
    blobs.put(manifest, b'{"format":2,"secrets":["of a later time"]}')
    return f"the checkpoint {newest.epoch}-{newest.version} has format 2, expected at most 1"


@pytest.mark.parametrize("damage", [tear_all, exchange_model, write_by_newer_program])
def test_job_with_unusable_checkpoints_is_held_and_keeps_them(
    make: Make, damage: Callable[[Blobs, str], str]
) -> None:
    job = f"held-{damage.__name__}"
    cluster = stopped_half_way(make, job)
    blobs = open_blobs(cluster.settings)
    whole = content(blobs)
    reason = damage(blobs, job)
    damaged = content(blobs)

    cluster.want("running")
    await_condition(lambda: cluster.wanted() == "paused", "the job is held", TORN_PATIENCE_S)

    assert reason in cluster.record().reason
    assert content(blobs) == damaged
    for name, data in whole.items():
        blobs.put(name, data)
    finish(cluster)


def test_job_starts_with_weights_of_another_job(make: Make) -> None:
    first = make("first", 400)
    first.start("coordinator", "c1")
    first.start("worker", "w1")
    first.produce(400)
    await_condition(first.drained, "everything is settled")
    first.want("stopped")
    await_condition(lambda: "job_finished" in first.said("c1"), "the last checkpoint is stored")
    board = open_board(first.settings, "second")

    def weights() -> list[set[float]]:
        """Return the distinct weights of the hot snapshots of the second job."""
        saved = [from_bytes(data) for data in board.snapshots()]
        return [set(unpack(each.trainer)[0]["weights"].tolist()) for each in saved if each.trainer]

    output = submit(first, "second", "first@best")
    assert "the job starts from the checkpoint" in output
    assert "of first: weights and optimizer state (sgd)" in output
    await_condition(lambda: {-1.0} in weights(), "version 0 has the weights of the first job")
    first.start("worker", "w2", "second")
    await_condition(lambda: {-2.0} in weights(), "it has trained on every record once more")


def submit(cluster: Cluster, name: str, source: str) -> str:
    """Submit the same job under another name. Returns the command's output."""
    with served(cluster.settings, cluster.folder) as settings:
        return subprocess.run(  # noqa: S603 -- our own command line, no shell
            [sys.executable, "-m", "services.cli", "job", "submit", "-", "--from", source],
            input=cluster.spec.model_copy(update={"name": name}).model_dump_json(),
            env={**os.environ, **settings.environ()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def test_only_leader_reports_age_of_newest_checkpoint(make: Make) -> None:
    cluster = make("scraped", 100, OFTEN)
    ports = {name: free_port() for name in ("c1", "c2")}
    for name, port in ports.items():
        cluster.start("coordinator", name, metrics_port=port)
    metric = 'doll_checkpoint_age_seconds{job_name="scraped"}'
    counts = 'doll_checkpoint_failures_total{job_name="scraped"} 0.0'

    def leaders() -> list[str]:
        return [name for name, port in ports.items() if metric in scraped(port)]

    await_condition(
        lambda: all(counts in scraped(port) for port in ports.values()),
        "both coordinators serve metrics",
    )
    await_condition(lambda: len(leaders()) == 1, "the leader reports an age")
    (leader,) = leaders()
    cluster.kill(leader)
    del ports[leader]
    await_condition(lambda: len(leaders()) == 1, "the other coordinator leads and reports an age")


def scraped(port: int) -> str:
    """Return the metrics of a process. Empty while it does not answer."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as answer:
            return str(answer.read().decode())
    except URLError:
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
