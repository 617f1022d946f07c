"""The servers of the boards' contract: memory, embedded Redis, and the system's Redis."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pytest
import redis

from common.core.liveness import Heartbeat
from common.core.messages import LeaderStatus, TriggerId, WorkerId
from common.core.spans import Partition
from common.redis.exchange import RedisLeaderBoard, RedisLeaderBoards
from common.redis.memory import MemoryBoard, MemoryBoards, MemoryRedis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.embedded.redis import EmbeddedRedis
    from common.redis.port import LeaderBoard, LeaderBoards, Replies

WORKER = WorkerId("w1")
REPLICA = "c1-4711"
PARTITION = Partition("clicks", 0)
# Time limit for each expected event.
LONG_S = 20.0


class Server(Protocol):
    """Control over a server behind the board's back."""

    job: str

    def board(self) -> LeaderBoard:
        """Another process's view of the same job."""

    def boards(self) -> LeaderBoards:
        """Another process's view of all jobs."""

    def litter(self, garbage: bytes) -> None:
        """Write garbage to each key that the job reads."""

    def lease_to(self, holder: str, lasts_s: float | None) -> None:
        """Write a holder's lease. It never expires if `lasts_s` is None."""

    def kill(self) -> None:
        """Kill the server."""

    def restart(self) -> None:
        """Start it again without data."""


@dataclass
class _InMemory:
    redis: MemoryRedis
    job: str

    def board(self) -> LeaderBoard:
        return MemoryBoard(self.redis, self.job)

    def boards(self) -> LeaderBoards:
        return MemoryBoards(self.redis)

    def litter(self, garbage: bytes) -> None:
        notices = self.redis.jobs[self.job]
        notices.leader_status = garbage
        self.redis.replies[REPLICA] = [garbage]
        notices.triggers.setdefault("", {})[TriggerId(2**60, 1)] = garbage
        notices.heartbeats[WORKER] = Heartbeat(garbage.decode("latin-1")), float("inf")
        notices.offered = garbage

    def lease_to(self, holder: str, lasts_s: float | None) -> None:
        lasts_s = float("inf") if lasts_s is None else lasts_s
        self.redis.jobs[self.job].lease = (holder, self.redis.clock() + lasts_s)

    def kill(self) -> None:
        self.redis.kill()

    def restart(self) -> None:
        self.redis.restart()


@dataclass
class _InRedis:
    redis: EmbeddedRedis
    job: str

    def board(self) -> LeaderBoard:
        return RedisLeaderBoard(self.redis.url, self.job)

    def boards(self) -> LeaderBoards:
        return RedisLeaderBoards(self.redis.url)

    def litter(self, garbage: bytes) -> None:
        with redis.Redis.from_url(self.redis.url) as client:
            client.set(f"doll:{{{self.job}}}:leader-status", garbage)
            client.rpush(f"doll:{{{REPLICA}}}:replies", garbage)
            client.xadd(f"doll:{{{self.job}}}:triggers", {"trigger": garbage}, f"{2**60}-1")
            client.sadd(f"doll:{{{self.job}}}:workers", WORKER, garbage)
            client.set(f"doll:{{{self.job}}}:alive:{WORKER}", garbage)
            client.set(f"doll:{{{self.job}}}:offered", garbage)

    def lease_to(self, holder: str, lasts_s: float | None) -> None:
        with redis.Redis.from_url(self.redis.url) as client:
            px = None if lasts_s is None else round(1000 * lasts_s)
            client.set(f"doll:{{{self.job}}}:lease", holder, px=px)

    def kill(self) -> None:
        self.redis.kill()

    def restart(self) -> None:
        self.redis.restart()


@pytest.fixture(params=["memory", "embedded", pytest.param("system", marks=pytest.mark.redis)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    job = f"job-{request.node.name}"
    if request.param == "memory":
        yield _InMemory(MemoryRedis(), job)
    else:
        running: EmbeddedRedis = request.getfixturevalue(f"{request.param}_redis")
        yield _InRedis(running, job)
        running.restart()


@pytest.fixture
def board(server: Server) -> LeaderBoard:
    return server.board()


@pytest.fixture
def boards(server: Server) -> Iterator[LeaderBoards]:
    boards = server.boards()
    yield boards
    boards.close()


@pytest.fixture
def replies(boards: LeaderBoards) -> Replies:
    return boards.replies(REPLICA)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until the condition is true; fail if it never is."""
    deadline = time.monotonic() + LONG_S
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.005)


def leader_status(control_position: int) -> LeaderStatus:
    return LeaderStatus(
        3, control_position, {PARTITION: 80}, control_position, 0, 2, {PARTITION: 70}
    )


def statuses(board: LeaderBoard) -> dict[WorkerId, str]:
    """Return the statuses of the workers that send heartbeats."""
    return {worker: beat.status for worker, beat in board.heartbeats().items()}
