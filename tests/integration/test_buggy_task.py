"""A task has a bug, with a backlog of records: few are quarantined, and all of them are requeued.

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
from common.data.codecs import codec_of
from common.jobs.job_file import parse_job
from common.jobs.store import JobStore
from common.testing.counting import ENTRYPOINT
from load.harness.counting import CountingJob
from tests.integration.cluster import Cluster, await_condition, served

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
DETACHED = "tests.integration.bad_tasks:Detached"
NAMES_LOSS = "tests.integration.bad_tasks:NamesLoss"
NO_VALUES = "tests.integration.bad_tasks:NoValues"
NORMALISED = "tests.integration.bad_tasks:Normalised"
LEVEL = "tests.integration.plain_module:Level"
TASKS = (ENTRYPOINT, MENDED, AVERAGES, DETACHED, NAMES_LOSS, NO_VALUES, NORMALISED, LEVEL)
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


@pytest.fixture(scope="module")
def environ(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return environment variables for commands."""
    with served(cluster.settings, tmp_path_factory.mktemp("admin")) as settings:
        yield {**os.environ, **settings.environ()}


def submitted(
    cluster: Cluster, name: str, task: str, records: int, options: str = ""
) -> CountingJob:
    """Submit a job with a backlog of `records`."""
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
        {options}
        """.replace("\n        ", "\n")
    )
    job = CountingJob(spec, cluster.settings, cluster.log, partitions=min(records, 2))
    produce(cluster, job, 0, records)
    return job


def produce(cluster: Cluster, job: CountingJob, begin: int, end: int) -> None:
    """Write records with ids from `begin` to `end`."""
    writer = cluster.log.writer()
    values = codec_of(job.record.spec.records).encode({"id": np.arange(begin, end)})
    for number, value in enumerate(values):
        writer.append(f"{job.name}-a", value, partition=number % len(job.places))
    assert writer.flush(30.0)
    writer.close()


def held(cluster: Cluster, job: CountingJob) -> JobRecord:
    """Return the job's record, once it is held."""
    with closing(JobStore(cluster.log)) as job_store:
        await_condition(lambda: job_store.get(job.name).held, f"{job.name} is held")
        return job_store.get(job.name)


def doll(environ: dict[str, str], *arguments: str) -> str:
    """Return the complete output of a command."""
    done = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-m", "services.cli", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def test_backlog_survives_task_bug_and_quarantined_batches_are_requeued(
    cluster: Cluster, environ: dict[str, str], tmp_path: Path
) -> None:
    bug = tmp_path / "bug"
    bug.touch()
    task = f'{{entrypoint: "{MENDED}", records: {RECORDS}, bug: "{bug}"}}'
    job = submitted(cluster, "backlog", task, RECORDS)
    cluster.produce(400)

    record = held(cluster, job)
    await_condition(cluster.drained, "the other job is drained")
    before = job.audit()
    bug.unlink()
    said = doll(environ, "job", "requeue", job.name, "--all")
    doll(environ, "job", "resume", job.name)

    assert "KeyError: 'lable' (bad_tasks.py, line" in record.reason
    assert 'bad_tasks.py", line' in record.detail
    count = len(before.quarantined)
    assert 1 <= count <= MOST_QUARANTINED
    assert f"{count} of {count} batches of {job.name} were requeued" in said
    await_condition(job.drained, "everything is trained")
    proof = job.audit()
    assert (proof.flaws, proof.quarantined, proof.trained) == ((), (), RECORDS)
    assert np.flatnonzero(job.weights(proof) != -1.0).tolist() == []


@pytest.mark.parametrize(
    ("name", "task", "reason"),
    [
        ("averages", AVERAGES, "one value per sample"),
        ("detached", DETACHED, "the loss has no gradient: losses cut it off"),
        ("names-loss", NAMES_LOSS, "metric 'loss' has a reserved name"),
    ],
)
def test_task_wrong_for_any_data_is_held_without_quarantine(
    cluster: Cluster, name: str, task: str, reason: str
) -> None:
    job = submitted(cluster, name, f'{{entrypoint: "{task}", records: 1000}}', 1000)

    record = held(cluster, job)

    assert reason in record.reason
    assert job.audit().quarantined == ()


def test_metric_without_value_is_omitted_and_does_not_hold_the_job(
    cluster: Cluster,
) -> None:
    task = f'{{entrypoint: "{NO_VALUES}", records: 400}}'
    job = submitted(cluster, "no-values", task, 400)
    await_condition(job.drained, "everything is trained")
    audit = job.audit()
    assert (audit.flaws, audit.quarantined, audit.trained) == ((), (), 400)
    # The records of a partition are all even or all odd, so an update may have no even one.
    some = [update for update in audit.updates if update.metrics]
    assert all(update.metrics == {"even": 1.0} for update in some)
    assert sum(update.samples_with("even") for update in some) == 200


def test_torch_module_learns_from_each_record_once(cluster: Cluster) -> None:
    # The gradient of an absolute error is -1 for each record, because all ids are above the level.
    task = f'{{module: "{LEVEL}", loss: l1_loss, inputs: [id], target: id, start: -1000.0}}'
    job = submitted(cluster, "level", task, 400)
    await_condition(job.drained, "everything is trained")
    audit = job.audit()
    assert (audit.flaws, audit.quarantined, audit.trained) == ((), (), 400)
    assert all(update.metrics.keys() == {"absolute_error"} for update in audit.updates)
    assert job.weights(audit).tolist() == [-600.0]


def test_single_record_waits_for_another_with_batch_norm(
    cluster: Cluster, environ: dict[str, str]
) -> None:
    # records   1 waits: batch norm needs two    | 1 more
    # batches                                     | 2
    task = f'{{entrypoint: "{NORMALISED}", records: 2}}'
    lingers = "batch_linger_s: 0.3\n        group_linger_s: 0.3"
    job = submitted(cluster, "normalised", task, 1, lingers)
    why = f"{job.name}: waiting for records: 1 record waits: batch normalization needs two"
    await_condition(lambda: why in doll(environ, "job", "show", job.name), "the rest waits")

    produce(cluster, job, 1, 2)
    await_condition(job.drained, "everything is trained")
    audit = job.audit()
    assert (audit.flaws, audit.quarantined, audit.trained) == ((), (), 2)
    with closing(JobStore(cluster.log)) as job_store:
        assert not job_store.get(job.name).held
