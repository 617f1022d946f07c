"""Jobs resume from their newest checkpoint despite wrong answers of object storage; on processes.

Redis         full             empty: both coordinators start again
storage       right            mistyped | wrong in eight ways | right
three jobs    train            wait, and say for what         | resume from the newest
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import boto3
import numpy as np
import pytest

from common.core.history import History
from common.core.messages import GENESIS
from common.core.snapshot_search import AWAITED
from common.kafka import names as topics
from common.kafka.read import read_decoded
from common.storage.port import open_blobs
from common.storage.store import CheckpointStore, folder_of
from common.wire.messages import decode_audit
from load.harness.s3_servers import LyingServer
from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from common.config.settings import Settings
    from common.core.messages import ModelId
    from load.harness.s3_servers import Lie
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

BUCKET = "models"
JOBS = ("lied-a", "lied-b", "lied-c")
OFTEN = "checkpoint: {every_updates: 2, keep: 3}"
# Each row is one turn, with one lie per job. Coordinators retry every ten seconds.
TURNS: tuple[tuple[Lie, Lie, Lie], ...] = (
    ("empty", "cut", "half"),
    ("stale", "late", "page"),
    ("other", "empty", "cut"),
)
SAID: dict[Lie, str] = {
    "empty": "has 0 readable checkpoints",
    "cut": "readable checkpoint",
    "half": "its weights are damaged",
    "stale": "readable checkpoint",
    "late": "readable checkpoint",
    "page": "that is not a list",
    "other": "of the bucket 'another'",
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingServer]:
    """A server of the S3 protocol with an empty bucket."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    server = LyingServer()
    boto3.client("s3", endpoint_url=server.url).create_bucket(Bucket=BUCKET)
    yield server
    server.close()


@pytest.fixture
def settings(
    likest_to_production: Settings, store: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.url)
    return likest_to_production.model_copy(update={"blobs": f"s3://{BUCKET}/doll"})


def named(cluster: Cluster) -> ModelId | None:
    """Return the name of the newest checkpoint in the job's history."""
    history = History()
    for offset, record in read_decoded(
        cluster.log, topics.updates_topic(cluster.job), decode_audit
    ):
        history.feed(offset, record)
    return history.checkpoint


def newest(cluster: Cluster) -> ModelId | None:
    """Return the name of the newest checkpoint in storage."""
    finished = CheckpointStore(open_blobs(cluster.settings), cluster.job).finished()
    return finished[0] if finished else None


def is_named(cluster: Cluster) -> bool:
    """Return True if the history's newest checkpoint is the newest in storage."""
    return newest(cluster) == named(cluster) is not None


def waits(cluster: Cluster, text: str) -> bool:
    """Return True if a coordinator logs that the job waits for its checkpoint, and why."""
    name = named(cluster)
    reasons = [why for why in cluster.board.unable().values() if why.startswith(AWAITED)]
    expected = "" if name is None else f"{AWAITED}{name.epoch}-{name.version}, but "
    return any(expected in why and text in why for why in reasons)


def began_with(said: str, job: str) -> int:
    """Return the version that the last leader of a job began with."""
    found = re.findall(rf" leader_elected .*\bjob={job} .*\bversion=(\d+)", said)
    found += re.findall(rf" leader_elected .*\bversion=(\d+).*\bjob={job}\b", said)
    return int(found[-1]) if found else -1


def trained(make: Make) -> list[Cluster]:
    """Three jobs with checkpoints. Their coordinators are killed, and Redis is empty."""
    jobs = [make(name, 240, OFTEN) for name in JOBS]
    for name in ("c1", "c2"):
        jobs[0].start("coordinator", name)
    for cluster in jobs:
        cluster.start("worker", f"w-{cluster.job}")
        cluster.produce(200)
    for cluster in jobs:
        await_condition(cluster.drained, "the first records are settled")
        await_condition(partial(is_named, cluster), "the newest checkpoint was read back")
    for name in ("c1", "c2"):
        jobs[0].kill(name)
    for cluster in jobs:
        cluster.board.wipe()
    return jobs


def await_all(jobs: list[Cluster], texts: Iterable[str]) -> None:
    """Wait until each job reports that it waits, with this reason."""
    for cluster, text in zip(jobs, texts, strict=True):
        await_condition(partial(waits, cluster, text), f"{text}: waits")


def test_jobs_wait_for_their_newest_checkpoint_and_resume_from_it(
    make: Make, store: LyingServer
) -> None:
    jobs = trained(make)
    first = jobs[0]
    names = {cluster.job: named(cluster) or GENESIS for cluster in jobs}
    before = set(open_blobs(first.settings).names(""))
    store.newest = {job: folder_of(name) for job, name in names.items()}
    store.deleted.clear()

    # Both start with a mistyped address, then with the right one while the store answers wrongly.
    for name in ("typo-1", "typo-2"):
        first.start("coordinator", name, blobs=f"s3://{BUCKET}/dol")
    await_all(jobs, [f"s3://{BUCKET}/dol/"] * len(jobs))
    for name in ("typo-1", "typo-2"):
        first.kill(name)
    store.lies = dict(zip(JOBS, TURNS[0], strict=True))
    for name in ("c3", "c4"):
        first.start("coordinator", name)
    for turn in TURNS:
        store.lies = dict(zip(JOBS, turn, strict=True))
        await_all(jobs, [SAID[lie] for lie in turn])
    # This lie delays no job.
    store.lies = dict.fromkeys(JOBS, "latest")
    for cluster in jobs:
        await_condition(cluster.board.is_leased, "a coordinator leads the job")
    assert store.deleted == []
    assert before <= set(open_blobs(first.settings).names(""))
    assert first.ended() == []

    for cluster in jobs:
        cluster.produce(40)
        await_condition(cluster.drained, "the other records are settled")
    said = first.said("c3") + first.said("c4")
    for cluster in jobs:
        assert began_with(said, cluster.job) == names[cluster.job].version > 0
        assert cluster.audit().restarts == ()
        assert cluster.audit().flaws == ()
        assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert said.count("checkpoint_awaited") >= len(JOBS)
