"""The topics of jobs and keys are deleted while jobs train, and restored from a backup."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import httpx2
import pytest

from common.api.keys import KeyStore
from common.embedded.process import free_port
from common.errors import ConflictError
from common.jobs.operations import JobOperations
from common.kafka.names import JOBS, KEYS
from common.kafka.opening import open_log
from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.config.settings import Settings
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.redis, pytest.mark.timeout(600)]

NAMES = ("lost-0", "lost-1", "lost-2")
EACH = 400  # records


@pytest.fixture
def settings(real: Settings) -> Settings:
    return real


@pytest.fixture
def api(settings: Settings) -> Iterator[httpx2.Client]:
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_log(settings)))
        with closing(KeyStore(log)) as keys:
            key, _ = keys.create("restorer", "operator")
            stack.callback(KeyStore(log).revoke, "restorer")
        yield stack.enter_context(
            httpx2.Client(
                base_url=f"http://127.0.0.1:{free_port()}",
                headers={"Authorization": f"Bearer {key}"},
                timeout=60.0,
            )
        )


def doll(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 -- ours
        [sys.executable, "-m", "services.cli", *arguments],
        env=settings.environ(),
        capture_output=True,
        text=True,
        check=False,
    )


def readiness(api: httpx2.Client) -> str:
    """Return the problem of Kafka in `/readyz`. Empty if there is none."""
    try:
        answer = api.get("/readyz")
    except httpx2.TransportError as error:
        return str(error) or type(error).__name__
    return "" if answer.status_code == 200 else str(answer.json()["kafka"].get("reason"))


def test_jobs_and_keys_lost_by_kafka_are_restored_from_backup(
    make: Make, settings: Settings, api: httpx2.Client, tmp_path: Path
) -> None:
    # doll.jobs, doll.keys   saved   deleted            restored
    # three jobs             train   train from memory  the same versions, a new coordinator
    jobs = [make(name=name, records=3 * EACH) for name in NAMES]
    first = jobs[0]
    port = api.base_url.port
    first.start("admin", "a1", api_host="127.0.0.1", api_port=port)
    first.start("coordinator", "c1")
    for job in jobs:
        first.start("worker", f"worker-{job.job}", job.job)
        job.produce(EACH)
    await_condition(lambda: readiness(api) == "", "the admin service is ready")
    await_condition(lambda: all(job.version() > 0 for job in jobs), "all jobs train")
    file = str(tmp_path / "backup.json")
    saved = doll(settings, "backup", file)
    assert saved.returncode == 0, saved.stderr
    records = [job.record() for job in jobs]

    with closing(open_log(settings)) as log:
        log.delete_topics([JOBS, KEYS])
        await_condition(lambda: "lost records" in readiness(api), "it reports what is lost")
        missing = f'doll_records_missing{{topic="{JOBS}"}} '
        lines = api.get("/metrics").text.splitlines()
        # Earlier tests on this broker left other jobs.
        assert [float(each.split()[1]) >= len(NAMES) for each in lines if missing in each] == [True]
        await_condition(
            lambda: "job_records_missing" in first.said("c1"), "the coordinator reports it, too"
        )
        versions = [job.version() for job in jobs]
        for job in jobs:
            job.produce(EACH)
        await_condition(
            lambda: all(job.version() > before for job, before in zip(jobs, versions, strict=True)),
            "running services continue",
        )
        with closing(JobOperations(log)) as job_store, pytest.raises(ConflictError) as refused:
            job_store.submit(first.spec)
        assert "restore the records with `doll restore FILE`" in str(refused.value)
        assert "--purge" not in str(refused.value)

        restored = doll(settings, "restore", file)
        assert restored.returncode == 0, restored.stderr
        await_condition(lambda: readiness(api) == "", "the admin service is ready again")
        with closing(JobOperations(log)) as job_store:
            assert [job_store.get(name) for name in NAMES] == records

    answer = api.patch(f"/v1/jobs/{first.job}", json={"group_size": 3, "reason": "a test"})
    assert answer.status_code == 200, answer.text
    first.kill("c1")
    first.start("coordinator", "c2")
    for job in jobs:
        job.produce(EACH)
    await_condition(lambda: all(map(Cluster.drained, jobs)), "all jobs are drained")
    for job in jobs:
        await_condition(partial(is_trained, job), f"{job.job} has a snapshot of all updates")
    assert [job.audit().flaws for job in jobs] == [()] * len(jobs)
    assert first.ended() == []


def is_trained(job: Cluster) -> bool:
    """True if each record of a job was used once."""
    return bool((job.weights() == -1).all())
