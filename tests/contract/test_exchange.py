"""The contract of what asks the boards of many jobs at once, on the three servers of the boards."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import redis

from common.adapters.redis.board import RedisBoard
from common.adapters.redis.exchange import RedisBoards
from common.errors import UnavailableError
from tests.contract.board_fixtures import WORKER, leader_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.embedded.redis import EmbeddedRedis
    from common.ports.servers import Boards, Exchange
    from tests.contract.board_fixtures import Server

pytest_plugins = ["tests.redis_servers", "tests.contract.board_fixtures"]

LONG_S = 20.0
JOBS = [f"job-{number}" for number in range(20)]


@pytest.fixture
def exchange(boards: Boards) -> Iterator[Exchange]:
    exchange = boards.exchange()
    yield exchange
    exchange.close()


class _Told(SimpleQueue[Any]):
    """What was told, in order."""

    def next(self) -> object:
        return self.get(timeout=LONG_S)


@pytest.mark.parametrize("soon", [True, False])
def test_every_call_is_answered_as_the_board_answers_it(
    boards: Boards,
    exchange: Exchange,
    *,
    soon: bool,
) -> None:
    for job in JOBS[::2]:
        boards.board(job).beat(WORKER, "alive", LONG_S)
        boards.board(job).put_leader_status(leader_status(3))
        boards.board(job).hold_lease("another", LONG_S)
    told = {job: [_Told(), _Told(), _Told()] for job in JOBS}

    for job, (lease, stood, seen) in told.items():
        exchange.hold_lease(job, "one", LONG_S, lease.put, soon=soon)
        exchange.put_leader_status(job, leader_status(4), stood.put, soon=soon)
        exchange.alive(job, seen.put, soon=soon)

    for number, job in enumerate(JOBS):
        there = number % 2 == 0
        expected = [not there, there, {WORKER: "alive"} if there else {}]
        assert [each.next() for each in told[job]] == expected
        assert boards.board(job).get_leader_status() == leader_status(4)


def test_a_lease_is_held_prolonged_and_given_back(
    boards: Boards,
    exchange: Exchange,
) -> None:
    told = _Told()
    for _ in range(2):
        exchange.hold_lease("digits", "one", LONG_S, told.put, soon=True)
        assert told.next() is True
    other = boards.board("digits")
    assert not other.hold_lease("two", LONG_S)

    exchange.release_lease("digits", "one")
    exchange.put_leader_status("digits", leader_status(1), told.put, soon=True)
    told.next()

    assert other.hold_lease("two", LONG_S)


def test_what_was_asked_last_is_what_stands_there_in_the_end(
    boards: Boards,
    exchange: Exchange,
) -> None:
    told = _Told()
    for number in range(50):
        exchange.put_leader_status("digits", leader_status(number), told.put, soon=False)
    exchange.alive("digits", told.put, soon=True)
    while told.next() != {}:
        pass
    assert boards.board("digits").get_leader_status() == leader_status(49)


def test_a_server_that_is_away_is_told_to_each_and_it_goes_on_afterwards(
    server: Server,
    exchange: Exchange,
) -> None:
    told = _Told()
    exchange.alive("digits", told.put, soon=True)
    assert told.next() == {}
    server.kill()
    for job in JOBS:
        exchange.alive(job, told.put, soon=True)
    assert all(isinstance(told.next(), UnavailableError) for _ in JOBS)
    server.restart()
    exchange.alive("digits", told.put, soon=True)
    assert told.next() == {}


def test_what_is_strange_in_one_job_is_nothing_to_the_others(
    embedded_redis: EmbeddedRedis,
) -> None:
    with redis.Redis.from_url(embedded_redis.url) as client:
        client.rpush("doll:{strange}:workers", "of another type")
        client.rpush("doll:{strange}:standing", "likewise")
        client.sadd("doll:{other}:workers", b"\xff")
    shared = RedisBoards(embedded_redis.url)
    exchange = shared.exchange()
    told = _Told()

    for job in ("strange", "other", "digits"):
        exchange.alive(job, told.put, soon=False)
        exchange.put_leader_status(job, leader_status(4), told.put, soon=False)

    assert [told.next() for _ in range(6)].count({}) == 3
    assert RedisBoard(embedded_redis.url, "strange").get_leader_status() == leader_status(4)
    exchange.close()
    shared.close()


def test_what_waits_is_sent_before_it_ends(boards: Boards) -> None:
    exchange = boards.exchange()
    told = _Told()
    exchange.put_leader_status("closing", leader_status(4), told.put, soon=False)

    exchange.close()

    assert told.get_nowait() is False


def test_a_lease_that_runs_out_between_two_steps_is_taken_again() -> None:
    board = RedisBoard("redis://localhost:1", "digits")
    steps = board.holding_lease("one", 1.0)
    next(steps)

    (prolong,) = steps.send([b"one"])  # ours, it says
    (take,) = steps.send([0])  # it is not any more

    assert (prolong[0], take[:2], take[3]) == ("PEXPIRE", ("SET", "doll:{digits}:lease"), "NX")
    with pytest.raises(StopIteration) as done:
        steps.send([True])  # and nobody else's either
    assert done.value.value is True
