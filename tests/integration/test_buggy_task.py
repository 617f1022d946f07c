"""A task with a bug before a backlog: little is quarantined, and all of that is taken back.

bug       ████████████████████████ mended
job       running │ held           │ requeue, resume │ drained: each record trained once
batches   1 2 3 quarantined        │ wait again
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.config.settings import Settings
from common.jobs.build import codec_of
from common.jobs.spec import parse_job
from common.jobs.store import JobStore
from common.testing.counting import ENTRYPOINT
from load.harness.counting import CountingJob
from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.redis import EmbeddedRedis
    from common.jobs.store import JobRecord

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = pytest.mark.kafka

MENDED = "tests.integration.bad_tasks:Mended"
AVERAGES = "tests.integration.bad_tasks:Averages"
TASKS = (ENTRYPOINT, MENDED, AVERAGES)
RECORDS = 25_000
MOST_QUARANTINED = 20


@pytest.fixture(scope="module")
def cluster(
    apache_kafka: ApacheKafka,
    likest_redis: EmbeddedRedis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    settings = Settings(
        kafka=apache_kafka.settings.bootstrap,
        kafka_group_protocol="consumer",
        redis=likest_redis.url,
    )
    made = Cluster(settings, tmp_path_factory.mktemp("buggy"), "beside-a-bug", 400)
    try:
        made.start("coordinator", "c1", tasks=TASKS)
        for name in ("w1", "w2"):
            made.start_free_worker(name, tasks=TASKS)
        yield made
    finally:
        made.close()


def submitted(cluster: Cluster, name: str, task: str, records: int) -> CountingJob:
    """A job with a backlog of so many records."""
    spec = parse_job(
        f"""
        name: {name}
        streams: [{name}-a]
        records: {{codec: tensor, fields: {{id: {{dtype: int64}}}}}}
        task: {task}
        batch_size: 50
        group_size: 4
        reduction: sum
        optimizer: {{name: sgd, learning_rate: 1.0}}
        hot_snapshot: {{every_s: 0.2}}
        """.replace("\n        ", "\n"),
        TASKS,
    )
    job = CountingJob(spec, cluster.settings, cluster.log, partitions=2)
    writer = cluster.log.writer()
    for number, value in enumerate(codec_of(spec).encode({"id": np.arange(records)})):
        writer.append(f"{name}-a", value, partition=number % 2)
    assert writer.flush(30.0)
    writer.close()
    return job


def held(cluster: Cluster, job: CountingJob) -> JobRecord:
    """The job's record, once it is held."""
    with closing(JobStore(cluster.log)) as book:
        await_condition(lambda: book.get(job.name).held, f"{job.name} is held", patience_s=60.0)
        return book.get(job.name)


def doll(cluster: Cluster, *arguments: str) -> str:
    """What the command says."""
    return subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-m", "services.cli", *arguments],
        env={**os.environ, **cluster.settings.environ()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_backlog_outlives_a_bug_and_what_was_quarantined_is_taken_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    bug = tmp_path / "bug"
    bug.touch()
    task = f'{{entrypoint: "{MENDED}", records: {RECORDS}, bug: "{bug}"}}'
    job = submitted(cluster, "backlog", task, RECORDS)
    cluster.produce(400)

    record = held(cluster, job)
    await_condition(cluster.drained, "the job beside it goes on", patience_s=60.0)
    before = job.audit()
    bug.unlink()
    said = doll(cluster, "job", "requeue", job.name, "--all")
    doll(cluster, "job", "resume", job.name)

    assert "KeyError: 'lable' (bad_tasks.py, line" in record.reason
    assert 'bad_tasks.py", line' in record.detail
    count = len(before.quarantined)
    assert 1 <= count <= MOST_QUARANTINED
    assert f"{count} of {count} batches of {job.name} wait for an update again" in said
    await_condition(job.drained, "everything is trained", patience_s=120.0)
    proof = job.audit()
    assert (proof.flaws, proof.quarantined, proof.trained) == ((), (), RECORDS)
    assert np.flatnonzero(job.weights(proof) != -1.0).tolist() == []


def test_a_task_that_gives_a_mean_is_held_at_once_and_no_batch_is_blamed(cluster: Cluster) -> None:
    task = f'{{entrypoint: "{AVERAGES}", records: 1000}}'
    job = submitted(cluster, "averages", task, 1000)

    record = held(cluster, job)

    assert "one value per sample" in record.reason or "losses" in record.reason
    assert job.audit().quarantined == ()
