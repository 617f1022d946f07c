"""The contract of the worker registry, on memory, embedded and system's Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pytest
import redis

from common.core.job_placement import JobDemand, WorkerPlacement
from common.errors import UnavailableError
from common.redis.boards import RedisBoards
from common.redis.memory import MemoryBoards, MemoryRedis
from common.wire import messages as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.embedded.redis import EmbeddedRedis
    from common.redis.port import Roster

pytest_plugins = ["tests.redis_servers"]

KEY = "doll:spread"
DIGITS = JobDemand("digits", number=7, backlog=120, worker_records_per_s=80.5, task="mine:Task")
CLICKS = JobDemand("clicks", runs=False, weight=2.5)
FIRST = WorkerPlacement("w1", job="digits", stay_s=31.5, tasks=("a", "b"), avoided=("clicks",))
SECOND = WorkerPlacement("w2", pinned=True, goes="clicks")


class Server(Protocol):
    """Control over a server behind the roster's back."""

    def roster(self) -> Roster:
        """Another process's view."""

    def put_raw(self, field: str, value: bytes) -> None:
        """Put bytes where a record should be."""

    def kill(self) -> None:
        """Kill the server."""

    def restart(self) -> None:
        """Start it again without data."""


@dataclass
class _InMemory:
    redis: MemoryRedis

    def roster(self) -> Roster:
        return MemoryBoards(self.redis).roster()

    def put_raw(self, field: str, value: bytes) -> None:
        self.redis.spread[field] = value

    def kill(self) -> None:
        self.redis.kill()

    def restart(self) -> None:
        self.redis.restart()


@dataclass
class _InRedis:
    redis: EmbeddedRedis

    def roster(self) -> Roster:
        return RedisBoards(self.redis.url).roster()

    def put_raw(self, field: str, value: bytes) -> None:
        with redis.Redis.from_url(self.redis.url) as client:
            client.hset(KEY, field, value)

    def kill(self) -> None:
        self.redis.kill()

    def restart(self) -> None:
        self.redis.restart()


@pytest.fixture(params=["memory", "embedded", pytest.param("system", marks=pytest.mark.redis)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "memory":
        yield _InMemory(MemoryRedis())
    else:
        running: EmbeddedRedis = request.getfixturevalue(f"{request.param}_redis")
        running.restart()
        yield _InRedis(running)
        running.restart()


def by_name(roster: Roster) -> dict[str, JobDemand | WorkerPlacement]:
    return {it.job if isinstance(it, JobDemand) else it.worker: it for it in roster.read()}


def test_roster_returns_records_of_all_writers(server: Server) -> None:
    server.roster().put([DIGITS, CLICKS])
    server.roster().put([FIRST])
    server.roster().put([SECOND])
    server.roster().put([])

    assert by_name(server.roster()) == {
        "digits": DIGITS,
        "clicks": CLICKS,
        "w1": FIRST,
        "w2": SECOND,
    }


def test_put_replaces_earlier_record_of_the_same_name(server: Server) -> None:
    roster = server.roster()
    roster.put([FIRST, CLICKS])
    later = WorkerPlacement("w1", number=1)
    roster.put([later])

    assert by_name(roster) == {"w1": later, "clicks": CLICKS}


def test_job_and_worker_of_same_name_are_separate(server: Server) -> None:
    roster = server.roster()
    roster.put([JobDemand("same"), WorkerPlacement("same")])
    roster.remove(jobs=["same"])

    assert roster.read() == [WorkerPlacement("same")]


def test_remove_deletes_records_and_can_be_repeated(server: Server) -> None:
    roster = server.roster()
    roster.put([DIGITS, CLICKS, FIRST, SECOND])
    roster.remove(jobs=["digits", "never"], workers=["w2"])
    roster.remove(jobs=["digits"])
    roster.remove()

    assert by_name(roster) == {"clicks": CLICKS, "w1": FIRST}


@pytest.mark.parametrize("field", ["job:digits", "worker:w1", "what:is:this", "none"])
@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80", b"{}", b"\xff" * 50])
def test_garbage_is_skipped_and_logged(
    server: Server, field: str, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    roster = server.roster()
    roster.put([CLICKS, SECOND])
    server.put_raw(field, garbage)

    assert by_name(roster) == {"clicks": CLICKS, "w2": SECOND}
    assert caplog.text.count("rejected kind=") == 1


def test_record_under_another_name_is_skipped(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    roster = server.roster()
    server.put_raw("job:clicks", wire.encode_demand(DIGITS))
    server.put_raw("worker:w2", wire.encode_placement(FIRST))

    assert roster.read() == []
    assert "has the record of another" in caplog.text


def test_killed_server_is_unavailable_and_empty_after_restart(server: Server) -> None:
    roster = server.roster()
    roster.put([DIGITS])
    server.kill()
    for call in (lambda: roster.put([FIRST]), roster.read, lambda: roster.remove(["digits"])):
        with pytest.raises(UnavailableError):
            call()
    server.restart()

    assert roster.read() == []
    roster.put([FIRST])
    assert roster.read() == [FIRST]


def test_key_of_another_type_is_treated_as_garbage(embedded_redis: EmbeddedRedis) -> None:
    roster = RedisBoards(embedded_redis.url).roster()
    with redis.Redis.from_url(embedded_redis.url) as client:
        client.set(KEY, b"garbage")

    assert roster.read() == []
    roster.put([FIRST])
    assert roster.read() == [FIRST]
    roster.remove(workers=["w1"])
