"""Jobs that cannot work and records that cannot be decoded do not harm other jobs.

One innocent job and one job for each kind of problem run at once on the same coordinators and
workers. The coordinator that leads them is killed.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from common.config.settings import Settings
from common.data.codecs import codec_of
from common.jobs.job_file import parse_job
from common.jobs.store import JobRecord, JobStore
from common.kafka.names import control_topic, dead_letter_topic, updates_topic
from common.testing.counting import ENTRYPOINT
from load.harness.counting import CountingJob
from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = pytest.mark.kafka

BAD = "tests.integration.bad_tasks"
# Tasks that every process may import. The submitter may import one more.
TASKS = {
    "imports": "tests.integration.bad_import:Task",
    "options": f"{BAD}:RefusesOptions",
    "builds": f"{BAD}:RaisesInBuild",
    "too-large": f"{BAD}:TooLarge",
}
UNLISTED = f"{BAD}:Unlisted"
# Expected text in the reason or its detail.
HELD = {
    "imports": "the task's package needs a licence file",
    "options": "100 records are odd",
    "builds": "KeyError: 'layers'",
    "too-large": "MiB, more than 16,384",
    "no-stream": "no-stream-a",
    "no-control": control_topic("no-control"),
    "no-updates": updates_topic("no-updates"),
}
# Size of a record that Java's producer writes by default, and ours do not.
LARGE_BYTES = 1_040_000
# Batches of an update, and the number of bad records at which a worker closes a batch.
GROUP, SKIPPED = 30, 1_000
INNOCENT_RECORDS = 3_000


class World:
    """A cluster with one innocent job and all others."""

    def __init__(self, kafka: str, cluster: Cluster) -> None:
        self.kafka = kafka
        self.cluster = cluster
        self.jobs = dict[str, CountingJob]()
        for name, task in TASKS.items():
            self.submit(name, task)
        self.submit("unlisted", UNLISTED, records=16)
        for name in ("no-stream", "no-control", "no-updates"):
            self.submit(name, ENTRYPOINT)
        lingers = "batch_linger_s: 0.3\ngroup_linger_s: 0.5"
        self.submit("large-record", ENTRYPOINT, records=16, options=lingers)
        self.submit("skips", ENTRYPOINT, records=GROUP, group_size=GROUP)

    def submit(
        self, name: str, task: str, records: int = 100, group_size: int = 2, options: str = ""
    ) -> None:
        """Submit a job with one stream of one partition."""
        spec = parse_job(
            f"name: {name}\n"
            f"streams: [{name}-a]\n"
            "records: {codec: tensor, fields: {id: {dtype: int64}}}\n"
            f'task: {{entrypoint: "{task}", records: {records}}}\n'
            "batch_size: 8\n"
            f"group_size: {group_size}\n"
            "reduction: sum\n"
            "optimizer: {name: sgd, learning_rate: 1.0}\n"
            "hot_snapshot: {every_s: 0.2}\n"
            f"{options}\n"
        )
        settings, log = self.cluster.settings, self.cluster.log
        self.jobs[name] = CountingJob(spec, settings, log, partitions=1)

    def record(self, name: str) -> JobRecord:
        """Return a job's current record."""
        with closing(JobStore(self.cluster.log)) as job_store:
            return job_store.get(name)

    def values(self, name: str, count: int) -> list[bytes]:
        """Write the first records of a job."""
        return codec_of(self.jobs[name].record.spec.records).encode({"id": np.arange(count)})

    def produce(self, name: str, values: list[bytes]) -> None:
        """Write to a job's stream as a foreign producer does."""
        client = Producer({"bootstrap.servers": self.kafka, "message.max.bytes": 2_000_000})
        for value in values:
            client.produce(f"{name}-a", value, partition=0)
            client.poll(0)
        assert client.flush(30.0) == 0

    def delete(self, topic: str) -> None:
        """Delete a topic that is in use."""
        client = AdminClient({"bootstrap.servers": self.kafka})
        client.delete_topics([topic])[topic].result(30.0)

    def first_dead_letter(self, stream: str) -> tuple[bytes, dict[str, bytes]]:
        """Return value and headers of dead letters, read by a plain consumer."""
        found = list[tuple[bytes, dict[str, bytes]]]()
        consumer = Consumer({"bootstrap.servers": self.kafka, "group.id": "operator"})
        consumer.assign([TopicPartition(dead_letter_topic(stream), 0, 0)])

        def there() -> bool:
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                headers = cast("list[tuple[str, bytes]]", message.headers())
                found.append((message.value() or b"", dict(headers)))
            return bool(found)

        await_condition(there, f"a dead letter of {stream}")
        consumer.close()
        return found[0]

    def leader(self) -> str:
        """Return the replica that leads the innocent job."""
        await_condition(
            lambda: any(map(self.cluster.has_led, ("c1", "c2"))),
            "a coordinator leads the innocent job",
        )
        return next(name for name in ("c1", "c2") if self.cluster.has_led(name))

    def begin(self) -> None:
        """Start all processes, and write records to all streams."""
        cluster, tasks = self.cluster, (ENTRYPOINT, *TASKS.values())
        for name in ("c1", "c2"):
            cluster.start("coordinator", name, tasks=tasks)
        pinned = {"w1": "innocent", "w2": "large-record", "w3": "skips", "w4": "no-stream"}
        for name, job in pinned.items():
            cluster.start("worker", name, job, tasks=tasks)
        cluster.start_free_worker("w5", tasks=tasks)

        cluster.produce(INNOCENT_RECORDS // 2)
        around = self.values("large-record", 16)
        self.produce("large-record", [*around[:8], b"x" * LARGE_BYTES, *around[8:]])
        bad = [b"x" * (9 + number % 100) for number in range(SKIPPED)]  # an id is of 8 bytes
        good = self.values("skips", GROUP)
        self.produce("skips", [value for each in good for value in (each, *bad)])
        for name in ("unlisted", "no-stream"):
            self.produce(name, self.values(name, 16))

    def go_wrong(self) -> None:
        """Delete topics, and kill the leader.

        c1   ███████ leads ████ killed
        c2   ███████ stands by ███████████ leads, and finds what was deleted
        """
        cluster = self.cluster
        for name in ("no-stream", "no-control", "no-updates"):
            await_condition(self.jobs[name].is_led, f"a coordinator leads {name}")
        await_condition(lambda: cluster.version() >= 3, "three updates of the innocent job")
        for topic in ("no-stream-a", control_topic("no-control"), updates_topic("no-updates")):
            self.delete(topic)
        cluster.kill(self.leader())
        cluster.produce(INNOCENT_RECORDS - INNOCENT_RECORDS // 2)


@pytest.fixture(scope="module")
def world(
    # Embedded Kafka deletes no topics.
    apache_kafka: ApacheKafka,
    likest_redis: EmbeddedRedis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("bad-jobs")
    settings = Settings(
        kafka=apache_kafka.settings.bootstrap,
        kafka_group_protocol="consumer",
        redis=likest_redis.url,
        blobs=f"file://{folder}/blobs",
    )
    cluster = Cluster(settings, folder, "innocent", INNOCENT_RECORDS)
    try:
        world = World(apache_kafka.settings.bootstrap, cluster)
        world.begin()
        world.go_wrong()
        yield world
    finally:
        cluster.close()


def test_job_beside_bad_jobs_drains(world: World) -> None:
    cluster = world.cluster
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), INNOCENT_RECORDS, 0)
    assert audit.takeovers >= 2


@pytest.mark.parametrize("name", HELD)
def test_impossible_job_is_held_with_the_reason(world: World, name: str) -> None:
    await_condition(lambda: world.record(name).held, f"{name} is held")
    record = world.record(name)
    assert record.wanted == "paused"
    assert HELD[name] in f"{record.reason}\n{record.detail}"
    if name in TASKS and name != "too-large":
        assert "Traceback" in record.detail
        assert "tests/integration/bad_" in record.detail


def test_job_with_unlisted_task_waits_for_a_replica_that_allows_it(
    world: World,
) -> None:
    job = world.jobs["unlisted"]
    record = world.record("unlisted")
    assert (record.wanted, record.held) == ("running", False)
    assert not job.is_led()

    tasks = (ENTRYPOINT, UNLISTED)
    world.cluster.start("coordinator", "c3", tasks=tasks)
    world.cluster.start("worker", "w6", "unlisted", tasks=tasks)
    await_condition(job.drained, "its records are trained")
    assert job.unlearned(job.audit(), 16) == []
    assert not world.record("unlisted").held


def test_dead_letter_of_too_large_record_is_truncated(world: World) -> None:
    job = world.jobs["large-record"]
    await_condition(job.drained, "the records beside it are trained")
    assert job.unlearned(job.audit(), 16) == []
    value, headers = world.first_dead_letter("large-record-a")
    assert headers["truncated"] == str(LARGE_BYTES).encode()
    assert headers["offset"] == b"8"
    assert LARGE_BYTES // 2 < len(value) < LARGE_BYTES
    assert value == b"x" * len(value)


def test_update_of_batches_with_thousands_of_bad_records_is_written(world: World) -> None:
    job = world.jobs["skips"]
    await_condition(lambda: bool(job.audit().updates), "the update is made")
    audit = job.audit()
    assert (audit.flaws, audit.trained, audit.skipped) == ((), GROUP, GROUP * SKIPPED)
    assert [len(update.batches) for update in audit.updates] == [GROUP]
    assert job.unlearned(audit, GROUP) == []


def test_bad_jobs_end_no_process(world: World) -> None:
    assert world.cluster.ended() == []
    assert not world.record("innocent").held
