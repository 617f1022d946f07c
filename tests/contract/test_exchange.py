"""The contract of requests to the boards of many jobs at once, on the boards' three servers."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import redis

from common.core.liveness import Heartbeat
from common.errors import UnavailableError
from common.redis.board import RedisBoard
from common.redis.exchange import LOOK_S, RedisLeaderBoards
from common.redis.port import LiveStatus
from tests.contract.board_fixtures import LONG_S, WORKER, eventually, leader_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.embedded.redis import EmbeddedRedis
    from common.redis.port import Exchange, LeaderBoards
    from tests.contract.board_fixtures import Server

pytest_plugins = ["tests.redis_servers", "tests.contract.board_fixtures"]

DIGEST = "0123456789abcdef"
JOBS = [f"job-{number}" for number in range(20)]


on_redis = pytest.mark.parametrize(
    "server", ["embedded", pytest.param("system", marks=pytest.mark.redis)], indirect=True
)


@pytest.fixture
def exchange(boards: LeaderBoards) -> Iterator[Exchange]:
    exchange = boards.exchange()
    yield exchange
    exchange.close()


class _Answers(SimpleQueue[Any]):
    """Answers in order."""

    def next(self) -> object:
        return self.get(timeout=LONG_S)


@pytest.mark.parametrize("soon", [True, False])
def test_exchange_answers_match_those_of_the_board(
    boards: LeaderBoards,
    exchange: Exchange,
    *,
    soon: bool,
) -> None:
    for job in JOBS[::2]:
        boards.board(job).beat(WORKER, "alive", LONG_S, DIGEST)
        boards.board(job).put_leader_status(leader_status(3))
        boards.board(job).hold_lease("another", LONG_S)
    queues = {job: [_Answers(), _Answers(), _Answers()] for job in JOBS}

    for job, (lease, stood, seen) in queues.items():
        exchange.hold_lease(job, "one", LONG_S, lease.put, soon=soon)
        exchange.put_leader_status(job, leader_status(4), stood.put, soon=soon)
        exchange.alive(job, seen.put, soon=soon)

    for number, job in enumerate(JOBS):
        there = number % 2 == 0
        expected = [not there, there, {WORKER: Heartbeat("alive", DIGEST)} if there else {}]
        assert [each.next() for each in queues[job]] == expected
        assert boards.board(job).get_leader_status() == leader_status(4)


def test_live_statuses_match_those_of_each_board(boards: LeaderBoards) -> None:
    seen = [boards.board(job) for job in JOBS]
    for board in seen[::2]:
        board.beat(WORKER, "alive", LONG_S, DIGEST)
        board.put_leader_status(leader_status(3))
        board.hold_lease("another", LONG_S)
        board.put_unable("w9", "no task", LONG_S)

    # The second call already knows the workers that the first one found.
    for _ in range(2):
        found = boards.live_statuses(seen)
        assert found[::2] == [
            LiveStatus(True, leader_status(3), {WORKER: "alive"}, {"w9": "no task"})  # noqa: FBT003
        ] * len(seen[::2])
        assert found[1::2] == [LiveStatus(False, None, {}, {})] * len(seen[1::2])  # noqa: FBT003
    assert boards.live_statuses([]) == []


def test_live_statuses_of_unreachable_server_are_errors(server: Server) -> None:
    boards = server.boards()
    seen = [boards.board(job) for job in JOBS[:2]]
    server.kill()
    assert [isinstance(each, UnavailableError) for each in boards.live_statuses(seen)] == [
        True,
        True,
    ]


def test_exchange_acquires_renews_and_releases_lease(
    boards: LeaderBoards,
    exchange: Exchange,
) -> None:
    queue = _Answers()
    for _ in range(2):
        exchange.hold_lease("digits", "one", LONG_S, queue.put, soon=True)
        assert queue.next() is True
    other = boards.board("digits")
    assert not other.hold_lease("two", LONG_S)

    exchange.release_lease("digits", "one")
    exchange.put_leader_status("digits", leader_status(1), queue.put, soon=True)
    queue.next()

    eventually(lambda: other.hold_lease("two", LONG_S))  # the release takes two packets


@on_redis
def test_lease_of_ended_process_is_taken_over_at_once(server: Server) -> None:
    #  one    holds the lease ─── ends
    #  two        refused            notified that it holds the lease, without another request
    one, two = server.boards().exchange(), server.boards().exchange()
    held, queue = _Answers(), _Answers()
    _hold(one, held, "digits")
    _see(two, "two", queue)

    one.close()

    assert queue.next() is True
    assert not server.boards().board("digits").hold_lease("one", LONG_S)
    two.close()


@on_redis
def test_holder_that_released_the_lease_is_not_notified_of_an_end(server: Server) -> None:
    one, two = server.boards().exchange(), server.boards().exchange()
    held, queue = _Answers(), _Answers()
    _hold(one, held, "digits")
    _see(two, "two", queue)

    two.release_lease("digits", "two")
    one.close()
    two.alive("digits", queue.put, soon=True)

    assert queue.next() == {}
    # Only a wait can show that nothing happens.
    time.sleep(4 * LOOK_S)
    assert queue.empty()
    two.close()


@on_redis
def test_one_of_many_observers_takes_lease_of_ended_holder(server: Server) -> None:
    one, queues = server.boards().exchange(), {f"c{number}": _Answers() for number in range(5)}
    held = _Answers()
    others = [server.boards().exchange() for _ in queues]
    _hold(one, held, "digits")
    for other, (name, answers) in zip(others, queues.items(), strict=True):
        _see(other, name, answers)

    one.close()

    board = server.boards().board("digits")
    eventually(lambda: sum(_holds(answers) for answers in queues.values()) == 1)
    time.sleep(4 * LOOK_S)
    assert sum(_holds(answers) for answers in queues.values()) == 0
    assert not board.hold_lease("another", LONG_S)
    for other in others:
        other.close()


def test_holder_that_never_subscribed_keeps_its_lease(
    boards: LeaderBoards, exchange: Exchange
) -> None:
    boards.board("digits").hold_lease("older program", LONG_S * 10)
    queue = _Answers()
    exchange.hold_lease("digits", "two", LONG_S, queue.put, soon=True)
    assert queue.next() is False
    time.sleep(4 * LOOK_S)
    assert queue.empty()


def test_holder_whose_connection_breaks_keeps_its_lease(embedded_redis: EmbeddedRedis) -> None:
    one, two = (RedisLeaderBoards(embedded_redis.url).exchange() for _ in range(2))
    held, queue = _Answers(), _Answers()
    _hold(one, held, "broken")
    _see(two, "two", queue, "broken")
    with redis.Redis.from_url(embedded_redis.url) as client:
        # Closes every subscription, as a failover does.
        client.client_kill_filter(_type="pubsub")
        _hold(one, held, "broken")
        eventually(lambda: _listeners(client, "one") == 1)
    time.sleep(4 * LOOK_S)
    assert queue.empty()
    one.close()
    assert queue.next() is True
    two.close()


def test_restarted_holder_is_not_deposed_again(embedded_redis: EmbeddedRedis) -> None:
    boards = RedisLeaderBoards(embedded_redis.url)
    one, two = boards.exchange(), RedisLeaderBoards(embedded_redis.url).exchange()
    held, queue = _Answers(), _Answers()
    for seems in (True, False):
        _hold(one, held, "twice")
        _see(two, "two", queue, "twice")
        # The process continues with a new exchange.
        one.close()
        if seems:
            assert queue.next() is True
            two.release_lease("twice", "two")
            eventually(lambda: not boards.board("twice").is_leased())
        one = boards.exchange()
    assert boards.board("twice").hold_lease("one", LONG_S)
    one.close()
    two.close()


def _hold(exchange: Exchange, queue: _Answers, job: str) -> None:
    """Acquire the lease for long, and wait until every later request sees that it is held."""
    exchange.hold_lease(job, "one", LONG_S * 10, queue.put, soon=True)
    assert queue.next() is True
    _await_turn(exchange, queue, job)


def _see(exchange: Exchange, name: str, queue: _Answers, job: str = "digits") -> None:
    """Request a lease that another process holds, and wait until the refusal has arrived."""
    exchange.hold_lease(job, name, LONG_S, queue.put, soon=True)
    assert queue.next() is False
    _await_turn(exchange, queue, job)


def _await_turn(exchange: Exchange, queue: _Answers, job: str) -> None:
    """Wait until earlier requests are done; a refused lease may be reported again."""
    exchange.alive(job, queue.put, soon=True)
    while (answer := queue.next()) is False:
        pass
    assert answer == {}


def _holds(queue: _Answers) -> bool:
    answers = [queue.get_nowait() for _ in range(queue.qsize())]
    return True in answers


def _listeners(client: redis.Redis, name: str) -> int:
    return client.pubsub_numsub(f"doll:{{{name}}}:alive")[0][1]


def test_last_put_leader_status_wins(
    boards: LeaderBoards,
    exchange: Exchange,
) -> None:
    queue = _Answers()
    for number in range(50):
        exchange.put_leader_status("digits", leader_status(number), queue.put, soon=False)
    exchange.alive("digits", queue.put, soon=True)
    while queue.next() != {}:
        pass
    assert boards.board("digits").get_leader_status() == leader_status(49)


def test_outage_reaches_each_caller_and_later_calls_succeed(
    server: Server,
    exchange: Exchange,
) -> None:
    queue = _Answers()
    exchange.alive("digits", queue.put, soon=True)
    assert queue.next() == {}
    server.kill()
    for job in JOBS:
        exchange.alive(job, queue.put, soon=True)
    assert all(isinstance(queue.next(), UnavailableError) for _ in JOBS)
    server.restart()
    exchange.alive("digits", queue.put, soon=True)
    assert queue.next() == {}


def test_invalid_keys_of_one_job_do_not_affect_others(
    embedded_redis: EmbeddedRedis,
) -> None:
    with redis.Redis.from_url(embedded_redis.url) as client:
        client.rpush("doll:{strange}:workers", "of another type")
        client.rpush("doll:{strange}:leader-status", "of another type")
        client.sadd("doll:{other}:workers", b"\xff")
    shared = RedisLeaderBoards(embedded_redis.url)
    exchange = shared.exchange()
    queue = _Answers()

    for job in ("strange", "other", "digits"):
        exchange.alive(job, queue.put, soon=False)
        exchange.put_leader_status(job, leader_status(4), queue.put, soon=False)

    assert [queue.next() for _ in range(6)].count({}) == 3
    assert RedisBoard(embedded_redis.url, "strange").get_leader_status() == leader_status(4)
    exchange.close()
    shared.close()


def test_close_sends_waiting_requests_first(boards: LeaderBoards) -> None:
    exchange = boards.exchange()
    queue = _Answers()
    exchange.put_leader_status("closing", leader_status(4), queue.put, soon=False)

    exchange.close()

    assert queue.get_nowait() is False


def test_lease_that_expires_between_two_steps_is_acquired_again() -> None:
    board = RedisBoard("redis://localhost:1", "digits")
    steps = board.holding_lease("one", 1.0)
    next(steps)

    # GET returns the process's own name.
    (prolong,) = steps.send([b"one"])
    # PEXPIRE finds no lease, because it has expired.
    (take,) = steps.send([0])

    assert (prolong[0], take[:2], take[3]) == ("PEXPIRE", ("SET", "doll:{digits}:lease"), "NX")
    with pytest.raises(StopIteration) as done:
        # SET NX succeeds: no other process holds the lease, either.
        steps.send([True])
    assert done.value.value == b"one"
