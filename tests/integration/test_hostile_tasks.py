"""A task damages or ends the process that runs it, and the worker's next job is not affected.

One worker process serves all jobs here. A built-in job after each hostile one must end with the
same weights, bit for bit, as on the fresh worker:

worker   reference │ hostile job ███ │ the same built-in job │ hostile job ███ │ ...
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from common.config.settings import Settings
from common.core.messages import ModelId
from common.data.codecs import codec_of
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.store import JobStore
from common.learning.checkpoint import unpack
from common.storage.snapshot_file import from_bytes, in_hand
from load.harness.counting import CountingJob
from tests.integration.cluster import Cluster, await_condition
from tests.integration.hostile_tasks import ENTRYPOINT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from common.data.records import Records
    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.redis import EmbeddedRedis
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.kafka.port import Log

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = pytest.mark.kafka

IMAGES, BATCH = 128, 16
RECORDS = 16
PATIENCE_S = 240.0
# Hostilities that the process survives, some of them at once.
SURVIVED = {
    "defaults": {"build": "defaults"},
    "handlers": {"build": "handlers"},
    "files": {"forward": "files"},
    "patches": {"build": "patches"},
    "left behind": {"forward": "thread daemon"},
    "flood": {"forward": "flood"},
    "garbage": {"forward": "garbage"},
}
# Hostilities that end the process, and the words for it in the job's state.
FATAL: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "exit-0": ({"forward": "exit-0"}, ("ended with exit status 0",)),
    "exit-3": ({"forward": "exit-3"}, ("ended with exit status 3",)),
    "exit-in-build": ({"build": "exit-in-order"}, ("build() of the task raised SystemExit: 0",)),
    # The quoted stack begins with the thread that died.
    "segfault": ({"forward": "segfault"}, ("died of SIGSEGV", "in segfault")),
    "closed": ({"forward": "closed"}, ("ended with exit status 1",)),
}
LOST_GPU = "CUDA error: device-side assert triggered"
# Exceptions, and the words for them in the reason why the job is held or a batch is quarantined.
RAISED = {
    "memory": ({"forward": "memory"}, "one record does not fit"),
    "runtime": ({"forward": "runtime"}, LOST_GPU),
    "exit-in-forward": ({"forward": "exit-in-order"}, "SystemExit: 0"),
}


class World:
    """One coordinator and one worker for all jobs."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._count = 0
        cluster.want("stopped")
        cluster.start("coordinator", "c1", tasks=(ENTRYPOINT,))
        cluster.start_free_worker("w1", tasks=(ENTRYPOINT,), leave_s=2.0)
        # The worker has done nothing before.
        self.reference = self.weights()

    def hostile(
        self, name: str, options: Mapping[str, str], records: int = RECORDS, group_size: int = 1
    ) -> Hostile:
        """Submit a job with a hostile task and records for it."""
        self._count += 1
        name = f"{name.replace(' ', '-')}-{self._count}"
        folder = self._folder / name
        folder.mkdir()
        more = "".join(f', {key}: "{value}"' for key, value in options.items())
        spec = parse_job(
            f"name: {name}\n"
            f"streams: [{name}-a]\n"
            "records: {codec: tensor, fields: {id: {dtype: int64}}}\n"
            f'task: {{entrypoint: "{ENTRYPOINT}", records: {records}, folder: "{folder}"{more}}}\n'
            "batch_size: 8\n"
            f"group_size: {group_size}\n"
            "max_failures: 1\n"
            "optimizer: {name: sgd, learning_rate: 1.0}\n"
        )
        job = self._submitted(spec, {"id": np.arange(records)})
        return Hostile(job, folder, self.cluster.log)

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """Run a built-in job from its start to its end, and return its weights."""
        self._count += 1
        name = f"built-in-{self._count}"
        spec = parse_job(
            f"name: {name}\n"
            f"streams: [{name}-a]\n"
            "records:\n"
            "  codec: tensor\n"
            "  fields: {image: {dtype: uint8, shape: [1, 8, 8]}, label: {dtype: int64}}\n"
            "task: {name: image-classifier, classes: 10}\n"
            f"batch_size: {BATCH}\n"
            # One batch makes one update, so the order of sums does not depend on the time.
            "group_size: 1\n"
            "optimizer: {name: adam, learning_rate: 1.0e-2}\n"
            "hot_snapshot: {every_s: 0.2}\n"
        )
        chance = np.random.default_rng(0)
        images = chance.integers(0, 255, (IMAGES, 1, 8, 8), np.uint8)
        labels = chance.integers(0, 10, IMAGES)
        job = self._submitted(spec, {"image": images, "label": labels})
        found: list[dict[str, npt.NDArray[np.float32]]] = []

        def drained() -> bool:
            updates = job.audit().updates
            if not job.drained() or not updates:
                return False
            newest = ModelId(updates[-1].epoch, updates[-1].version)
            saved = [in_hand(from_bytes(data)) for data in job.board.snapshots()]
            found.extend(unpack(it.trainer())[0] for it in saved if it.snapshot.made == newest)
            return bool(found)

        await_condition(drained, "the built-in job is drained", PATIENCE_S)
        assert job.audit().trained == IMAGES
        self.stop(job)
        return found[-1]

    def stop(self, job: CountingJob) -> None:
        """Stop a job, so that the worker must leave it."""
        with closing(JobOperations(self.cluster.log)) as job_store:
            job_store.patch(job.name, "the test says so", wanted="stopped")
        job.board.close()

    def assert_unharmed(self) -> None:
        """Check that a built-in job learns on the same worker what it learned on a fresh one."""
        weights = self.weights()
        assert weights.keys() == self.reference.keys()
        assert all(np.array_equal(weights[name], self.reference[name]) for name in weights)
        assert self.cluster.ended() == []

    def _submitted(self, spec: JobSpec, records: Records) -> CountingJob:
        job = CountingJob(spec, self.cluster.settings, self.cluster.log, partitions=1)
        writer = self.cluster.log.writer()
        for value in codec_of(spec.records).encode(records):
            writer.append(f"{spec.name}-a", value, partition=0)
        assert writer.flush(30.0)
        writer.close()
        return job


class Hostile(NamedTuple):
    """A job whose task is hostile."""

    job: CountingJob
    # Folder for files of its task.
    folder: Path
    log: Log

    def has(self, name: str) -> bool:
        """Return True if the task has made a file."""
        return (self.folder / name).exists()

    def says(self, words: str) -> bool:
        """Return True if a process reports these words in the state of the job."""
        return any(words in reason for reason in self.job.board.unable().values())

    def is_given_up(self, words: str) -> bool:
        """Return True if the job or one of its batches was given up for a reason of these words."""
        reasons = [each.reason for each in self.job.audit().quarantined]
        return any(words in each for each in (*reasons, self.record().reason))

    def record(self) -> JobRecord:
        """Return the job's record in the jobs topic."""
        with closing(JobStore(self.log)) as job_store:
            return job_store.get(self.job.name)


@pytest.fixture(scope="module")
def world(
    apache_kafka: ApacheKafka,
    likest_redis: EmbeddedRedis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("hostile")
    settings = Settings(
        kafka=apache_kafka.settings.bootstrap,
        kafka_group_protocol="consumer",
        redis=likest_redis.url,
    )
    cluster = Cluster(settings, folder, "beside-hostile", 1)
    try:
        yield World(cluster, folder)
    finally:
        cluster.close()


@pytest.mark.parametrize("name", SURVIVED)
def test_harm_that_a_task_does_to_its_process_does_not_reach_the_next_job(
    world: World, name: str
) -> None:
    hostile = world.hostile(name, SURVIVED[name])
    await_condition(lambda: hostile.has("done"), "the task has done harm", PATIENCE_S)
    world.stop(hostile.job)

    world.assert_unharmed()

    left = [int(each.name.partition("-")[2]) for each in hostile.folder.glob("pid-*")]
    assert len(left) == (2 if name == "left behind" else 0)
    await_condition(lambda: not any(map(runs, left)), "what the task left behind has ended", 10.0)


@pytest.mark.timeout(400)
def test_state_of_a_job_says_how_its_process_died_and_the_next_job_works(world: World) -> None:
    for name, (options, words) in FATAL.items():
        hostile = world.hostile(name, options)
        for each in words:
            await_condition(
                partial(hostile.says, each), f"the state of {name} says {each!r}", PATIENCE_S
            )
        world.stop(hostile.job)

    world.assert_unharmed()


@pytest.mark.timeout(400)
def test_job_whose_task_raises_is_given_up_with_the_reason_and_the_next_job_works(
    world: World,
) -> None:
    for name, (options, words) in RAISED.items():
        hostile = world.hostile(name, options)
        await_condition(
            partial(hostile.is_given_up, words), f"{name} is given up: {words!r}", PATIENCE_S
        )
        world.stop(hostile.job)

    world.assert_unharmed()


def test_state_of_a_job_says_that_its_process_lost_the_gpu_and_the_next_job_works(
    world: World,
) -> None:
    hostile = world.hostile("accelerator", {"forward": "accelerator"})
    await_condition(lambda: hostile.says(LOST_GPU), "the state of the job says so", PATIENCE_S)
    await_condition(
        lambda: bool(hostile.job.audit().quarantined), "the batch is quarantined", PATIENCE_S
    )
    world.stop(hostile.job)

    world.assert_unharmed()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["accelerator", "exit-3"])
def test_only_the_batch_that_ends_its_process_is_quarantined(world: World, how: str) -> None:
    # Of nine batches, the one with record 41 ends each process. Each update needs four others.
    hostile = world.hostile(f"only-{how}", {"forward": how, "only": "41"}, 72, group_size=4)
    job = hostile.job
    await_condition(lambda: bool(job.audit().quarantined), "a batch is quarantined", PATIENCE_S)
    await_condition(job.drained, "all others are trained", PATIENCE_S)
    proof = job.audit()
    [found] = proof.quarantined
    assert any(span.start <= 41 < span.end for span in found.batch.address)
    assert (proof.trained, proof.unsettled, proof.flaws) == (64, 0, ())
    world.stop(job)


def runs(pid: int) -> bool:
    """Return True if a process runs."""
    return Path(f"/proc/{pid}").exists()
