"""A purge deletes what jobs of a name own and nothing else, and resumes after an interruption."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.config.settings import Settings
from common.core.messages import ModelId
from common.core.spans import Partition
from common.errors import ConflictError, NotFoundError, OutsideError, UnavailableError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.purge import Remains, purge, remains_of
from common.jobs.servers import Outside
from common.kafka.memory import MemoryLog
from common.kafka.names import (
    JOBS,
    control_topic,
    group_name,
    plans_topic,
    positions_topic,
    provisioning_board,
    schemas_topic,
    updates_topic,
)
from common.kafka.port import NewTopic
from common.kafka.table import NUMBER
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from tests.bad_blobs import DyingBlobs
from tests.unit.jobs.test_spec import TEXT

if TYPE_CHECKING:
    from collections.abc import Collection

OTHERS = "digits-2", "digits.i2", "digit"  # jobs whose names look alike


class FailingLog(MemoryLog):
    """A log that becomes unavailable once, when topics are deleted."""

    dies = False
    # Reason to refuse the deletion of topics. Empty: none.
    refuses = ""

    def delete_topics(self, topics: Collection[str]) -> None:
        """Delete topics, refuse, or die after the first topic.

        Raises:
            OutsideError: If it refuses.
            UnavailableError: If it dies.
        """
        if self.refuses:
            raise OutsideError(self.refuses)
        if self.dies:
            self.dies = False
            super().delete_topics(list(topics)[:1])
            raise UnavailableError("Kafka is unavailable")
        super().delete_topics(topics)


class World:
    """Jobs that have everything that a job can have."""

    def __init__(self) -> None:
        self.log, self.redis, self.blobs = FailingLog(), MemoryRedis(), MemoryBlobs()
        self.log.create_topics([NewTopic("clinic-a"), NewTopic("clinic-b")])
        self.job_store = JobOperations(self.log)
        for name in OTHERS:
            self.work(self.submit(name))
        self.others = self.everything()

    def outside(self, blobs: DyingBlobs | None = None, *, stores: bool = True) -> Outside:
        """Return the servers."""
        settings = Settings(blobs="s3://models" if stores else "")
        return Outside(settings, lambda: self.log, self.board, lambda: blobs or self.blobs)

    def board(self, job: str) -> MemoryBoard:
        """Return a job's board."""
        return MemoryBoard(self.redis, job)

    def submit(self, name: str = "digits") -> str:
        """Submit a job. Returns its id."""
        return self.job_store.submit(parse_job(TEXT.replace("digits", name, 1))).id

    def work(self, job: str) -> None:
        """Create everything that a job may own. Existing parts stay as they are."""
        kinds = control_topic, updates_topic, schemas_topic, plans_topic
        names = [*(kind(job) for kind in kinds), positions_topic(job, "clicks", "answers")]
        self.log.create_topics([NewTopic(name) for name in names])
        writer = self.log.writer()
        for name in names:
            writer.append(name, b"a record")
        assert writer.flush(1.0)
        for board in (job, provisioning_board(job)):
            self.board(board).put_unable("c1", "why", 60.0)
        self.board(job).put_model(ModelId(3, 4), b"weights")
        for name in ("checkpoints/3-4/manifest.json", "states/3-4.safetensors", "origin/a"):
            self.blobs.put(f"{job}/{name}", b"bytes")

    def stop(self, name: str = "digits") -> None:
        """Stop a job."""
        self.job_store.patch(name, "enough", wanted="stopped")

    def everything(self) -> tuple[set[str], set[str], set[str]]:
        """Return all topics, boards and objects."""
        boards = {job for job in self.redis.jobs if self.board(job).unable()}
        return set(self.log.topics()), boards, set(self.blobs.content)

    def left(self) -> tuple[set[str], ...]:
        """Return all topics, boards and objects, except those of other jobs."""
        dead_letter_topics = {"clinic-a.dlq", "clinic-b.dlq"}
        return tuple(
            now - before - dead_letter_topics
            for now, before in zip(self.everything(), self.others, strict=True)
        )


@pytest.fixture
def world() -> World:
    return World()


def test_purge_removes_everything_of_a_job_and_nothing_of_others(world: World) -> None:
    world.work(world.submit())
    with closing(world.log.stream(group_name("digits"), ["clinic-a"], "w1")) as reader:
        reader.poll(1, 0.0)
    world.stop()
    known = remains_of("digits", world.job_store, world.outside())
    assert (len(known.topics), set(known.topics.values()), len(known.files)) == (5, {1}, 3)
    assert purge("digits", world.job_store, world.outside()) == known
    assert world.left() == (set(), set(), set())
    assert world.others == world.everything()
    assert world.submit() == "digits.I2"


def test_purge_of_a_running_or_led_job_is_rejected(world: World) -> None:
    world.work(world.submit())
    before = world.everything()
    with pytest.raises(ConflictError, match="is running; stop it first"):
        purge("digits", world.job_store, world.outside())
    world.stop()
    assert world.board("digits").hold_lease("c1", 60.0)
    with pytest.raises(ConflictError, match="its leader writes a last checkpoint; try again"):
        purge("digits", world.job_store, world.outside())
    assert world.everything() == before
    with pytest.raises(NotFoundError, match='no job "digts", and nothing is left of one'):
        purge("digts", world.job_store, world.outside())


def test_purge_of_a_job_of_a_newer_format_is_rejected(world: World) -> None:
    world.work("digits")
    writer = world.log.writer()
    # Higher than the numbers of all existing records.
    number = str(world.log.bounds(Partition(JOBS, 0)).end + 1)
    writer.append(JOBS, b'{"format":99}', key=b"digits", headers=[(NUMBER, number.encode())])
    assert writer.flush(1.0)
    before = world.everything()
    with pytest.raises(ConflictError, match="may be of a newer program: job record"):
        purge("digits", JobOperations(world.log), world.outside())
    assert world.everything() == before


def test_deleted_job_can_be_purged_later(world: World) -> None:
    for job in ("digits", "digits.I2"):
        assert world.submit() == job
        world.work(job)
        world.stop()
        world.job_store.delete("digits")
        with pytest.raises(ConflictError, match="has records of an earlier job"):
            world.submit()
        assert len(purge("digits", world.job_store, world.outside()).topics) == 5
        assert world.left() == (set(), set(), set())
        assert remains_of("digits", world.job_store, world.outside()) == Remains({}, ())


@pytest.mark.parametrize("calls", range(6))
def test_interrupted_purge_is_completed_by_the_next_purge(world: World, calls: int) -> None:
    world.work(world.submit())
    world.stop()
    world.log.dies = True
    cut = purge("digits", world.job_store, world.outside(DyingBlobs(world.blobs, calls)))
    assert any("Kafka is unavailable" in why for why in cut.kept)
    assert world.submit() == "digits.I2", "the name is free although the purge is incomplete"
    world.work("digits.I2")
    world.stop()
    assert not purge("digits", world.job_store, world.outside()).kept
    assert world.left() == (set(), set(), set())


def test_repeated_purge_completes_after_the_job_record_is_removed(world: World) -> None:
    world.work(world.submit())
    world.stop()
    world.log.refuses = "no right to delete"
    cut = purge("digits", world.job_store, world.outside())
    assert cut.kept == ("topics: no right to delete",)
    assert not cut.topics
    world.log.refuses = ""
    assert len(purge("digits", world.job_store, world.outside()).topics) == 5
    assert not purge("digits", world.job_store, world.outside()), "a repeated purge has no effect"
    assert world.job_store.id_of("digits") == "digits.I2", "the incarnation stays"


def test_concurrent_purges_remove_everything_once(world: World) -> None:
    world.work(world.submit())
    world.stop()
    other = JobOperations(world.log)
    other.read()
    purge("digits", world.job_store, world.outside())
    assert not purge("digits", other, world.outside())
    assert world.submit() == "digits.I2"
    with pytest.raises(ConflictError, match="is running"):
        purge("digits", other, world.outside())
    assert set(world.log.topics()) >= {control_topic("digits.I2"), updates_topic("digits.I2")}


def test_topics_recreated_by_a_frozen_process_go_with_the_next_purge(world: World) -> None:
    world.submit()
    world.stop()
    purge("digits", world.job_store, world.outside())
    # A process that was frozen until now creates the purged job's topics again.
    world.work("digits")
    world.work(world.submit())
    world.stop()
    known = remains_of("digits", world.job_store, world.outside())
    assert len(known.topics) == 10
    purge("digits", world.job_store, world.outside())
    assert world.left() == (set(), set(), set())


def test_purge_reports_what_it_cannot_find_or_remove(world: World) -> None:
    world.work(world.submit())
    world.stop()
    reader = world.log.stream(group_name("digits"), ["clinic-a"], "w1")
    reader.poll(1, 0.0)
    world.redis.kill()
    found = purge("digits", world.job_store, world.outside(stores=False))
    assert found.kept == (
        "files: DOLL_BLOBS names no object storage",
        "consumer group: deleting consumer group doll.digits: it has members",
        "keys in Redis: the server is unavailable",
    )
    reader.close()
    world.redis.restart()
    assert not purge("digits", world.job_store, world.outside()).kept
    assert world.left()[2] == set()
