"""Observations of jobs: from boards and streams, and which servers are not usable."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from common.errors import UnavailableError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.watching import Looker, ObservedJob, one_by_one
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoard, MemoryRedis
from common.telemetry.logging import event_logger
from tests.unit.jobs.test_spec import TEXT


class FullBoard(MemoryBoard):
    """Board of a full Redis, which answers reads and refuses writes."""

    def put_unable(self, *_: object) -> None:
        """Refuse the write."""
        raise UnavailableError("Redis refused SET: OOM", "redis")


@dataclass
class Bench:
    """A running job, and its observer."""

    log: MemoryLog = field(default_factory=MemoryLog)
    redis: MemoryRedis = field(default_factory=MemoryRedis)

    def __post_init__(self) -> None:
        self.log.create_topics([NewTopic("clinic-a"), NewTopic("clinic-b")])
        self.record = JobOperations(self.log).submit(parse_job(TEXT))
        self.looker = Looker(lambda: self.log, one_by_one, event_logger("looker"))

    def outages(self, *boards: MemoryBoard) -> dict[str, str]:
        """Return the reasons of outages by server. Checks that every observation has them."""
        jobs = [ObservedJob(self.record, board) for board in boards]
        first, *others = self.looker.look(jobs, 1000.0, 0.0)
        assert all(look.outages == first.outages for look in others)
        return {server: notice.reason for server, notice in first.outages.items()}


@pytest.fixture
def bench() -> Bench:
    """An observer with a job."""
    return Bench()


def test_redis_that_rejects_writes_is_an_outage_of_leaderless_jobs(bench: Bench) -> None:
    board = MemoryBoard(bench.redis, "digits")
    full = FullBoard(bench.redis, "letters")
    assert bench.outages(full, board) == {"redis": "Redis refused SET: OOM"}
    assert bench.outages(board, full) == {}  # one write is enough
    (look,) = bench.looker.look([ObservedJob(bench.record, board)], 1000.0, 0.0)
    # The probe's own write is no outage.
    assert look.unable == {}
    full.hold_lease("c1", 60.0)
    assert bench.outages(full) == {}  # the leader has written


def test_unreachable_kafka_and_redis_are_outages_until_they_answer(bench: Bench) -> None:
    board = MemoryBoard(bench.redis, "digits")
    bench.log.go_away()
    bench.redis.kill()
    assert bench.outages(board, board).keys() == {"kafka", "redis"}
    bench.log.come_back()
    bench.redis.restart()
    assert bench.outages(board, board) == {}
