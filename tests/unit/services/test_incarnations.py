"""Leftovers of a purged job do not affect the next job of the same name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.messages import (
    GENESIS,
    Failed,
    Lead,
    LeaderStatus,
    ModelId,
    Reply,
    WorkerId,
)
from common.core.spans import Partition
from common.errors import NotFoundError
from common.kafka.names import control_topic, updates_topic
from common.kafka.read import read_decoded
from common.redis.memory import MemoryBoards
from common.telemetry.logging import event_logger
from common.wire.messages import decode_audit
from services.coordinator.replies import ReplyReader
from tests.unit.services.replicas import until
from tests.unit.services.test_coordinator_jobs import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.core.messages import AuditRecord
    from common.redis.memory import MemoryBoard

NAME = "digits"
FIRST, SECOND = "digits", "digits.I2"


class Lives(Bench):
    """A name whose first job was purged while the process that led it was paused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.first = self.submit(NAME)
        self.zombie = self.replica("zombie")
        self.zombie.look()
        until(lambda: self.zombie.leads(NAME), "the first job is led")
        until(lambda: bool(self.board(FIRST).snapshots()), "the leader has a snapshot")
        self.job_store.patch(NAME, "enough", wanted="stopped")
        self.job_store.free(NAME)
        self.submit(NAME)

    def decided(self, job: str) -> list[AuditRecord | None]:
        """Return the records of a job's updates topic."""
        return [each for _, each in read_decoded(self.log, updates_topic(job), decode_audit)]

    def leads_of(self, job: str) -> list[Lead]:
        """Return the Lead records of a job."""
        return [each for each in self.decided(job) if isinstance(each, Lead)]


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lives]:
    lives = Lives(monkeypatch)
    yield lives
    lives.close()


def test_next_job_of_a_purged_name_starts_empty(lives: Lives) -> None:
    """The first job's decisions, snapshots and lease, which a zombie holds, have no effect."""
    fresh = lives.replica("fresh")
    fresh.look()
    until(lambda: fresh.leads(NAME), "the second job is led while the zombie still leads")
    assert lives.zombie.leads(NAME)
    (lead,) = lives.leads_of(SECOND)
    assert (lead.candidate, lead.after, lead.base) == ("fresh#1", -1, GENESIS)
    assert [each.candidate for each in lives.leads_of(FIRST)] == ["zombie#1"]
    assert lives.board(FIRST).is_leased()
    assert lives.board(SECOND).is_leased()
    begun = lives.log.ends([Partition(control_topic(SECOND), 0)])
    assert set(begun.values()) == {0}, "no record is claimed"


def test_frozen_leader_of_a_purged_job_cannot_hold_or_end_the_next_one(lives: Lives) -> None:
    job_store = lives.zombie.job_store
    acts: tuple[Callable[[], object], ...] = (
        lambda: job_store.hold(lives.first, "it has found something"),
        lambda: job_store.finish(FIRST, "it has found something", 0),
    )
    for act in acts:
        with pytest.raises(NotFoundError, match="was purged"):
            act()
    assert lives.job_store.get(NAME).wanted == "running"


def test_replica_that_wakes_leaves_the_purged_job_and_joins_the_next_one(
    lives: Lives,
) -> None:
    lives.zombie.look_until(
        lambda: bool(lives.leads_of(SECOND)), "the replica leads the second job"
    )
    (lead,) = lives.leads_of(SECOND)
    assert (lead.candidate, lead.base) == ("zombie#1", GENESIS)
    until(lambda: not lives.board(FIRST).is_leased(), "the first job has no leader")


def test_replies_of_workers_of_a_purged_job_do_not_reach_the_next_leader(
    lives: Lives,
) -> None:
    boards, received = MemoryBoards(lives.redis), list[Reply]()
    reader = ReplyReader(boards.replies("fresh"), event_logger("test"))
    reader.follow(SECOND, 0, received.extend)

    def speaks(board: MemoryBoard, worker: str) -> None:
        board.beat(WorkerId(worker), "alive", 60.0)
        failed = Failed(WorkerId(worker), ModelId(0, 7), (3,), "raised")
        # The replies of both jobs' workers have the same epoch and version.
        board.push_reply(failed, "fresh")
        board.put_snapshot(10**6, b"of a later leader", "c1")
        board.put_leader_status(LeaderStatus(10**6, 10**6, {}, 0, 0, 0, {}))

    speaks(lives.board(FIRST), "of the first")
    before = lives.board(SECOND).snapshots(), lives.board(SECOND).get_leader_status()
    speaks(boards.board(SECOND), "of the second")
    while not received:
        reader.turn()
    assert [each.worker for each in received] == ["of the second"]
    assert set(lives.board(SECOND).heartbeats()) == {"of the second"}
    assert before == ([], None)
