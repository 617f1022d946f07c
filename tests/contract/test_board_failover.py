"""A board on servers of Redis that fail over, refuse for a while, or forget."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import pytest
import redis

from common.core.messages import ModelId, TriggerId, UpdateTrigger
from common.embedded.redis import EmbeddedRedis
from common.errors import OutsideError, UnavailableError
from common.redis.exchange import RedisLeaderBoard
from load.harness.proxy import Network
from tests.contract.board_fixtures import WORKER, leader_status, statuses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest_plugins = ["tests.redis_servers"]

JOB = "failing-over"
# A port without a server.
NOBODY = ("127.0.0.1", "1")
WEIGHTS = bytes(1 << 18)


class _Refusal(NamedTuple):
    """Functions that make a server refuse, and that undo it."""

    begin: Callable[[redis.Redis], object]
    end: Callable[[redis.Redis], object]


def _ask_for_a_password(admin: redis.Redis) -> None:
    admin.config_set("requirepass", "secret")
    # Connections from before would not need the password, so close them.
    admin.client_kill_filter(_type="normal", skipme=True)


REFUSALS = {
    "a replica": _Refusal(
        lambda admin: admin.replicaof(*NOBODY), lambda admin: admin.replicaof("NO", "ONE")
    ),
    "a replica without its master": _Refusal(
        lambda admin: (
            admin.config_set("replica-serve-stale-data", "no"),
            admin.replicaof(*NOBODY),
        ),
        lambda admin: admin.replicaof("NO", "ONE"),
    ),
    "out of memory": _Refusal(
        lambda admin: admin.config_set("maxmemory", "1"),
        lambda admin: admin.config_set("maxmemory", "0"),
    ),
    "too few replicas": _Refusal(
        lambda admin: admin.config_set("min-replicas-to-write", "1"),
        lambda admin: admin.config_set("min-replicas-to-write", "0"),
    ),
    "wants a password": _Refusal(
        _ask_for_a_password, lambda admin: admin.config_set("requirepass", "")
    ),
    "takes rights away": _Refusal(
        lambda admin: admin.acl_setuser("default", enabled=True, commands=["-set"]),
        lambda admin: admin.acl_setuser("default", enabled=True, categories=["+all"]),
    ),
}


@pytest.fixture
def server(likest_redis: EmbeddedRedis) -> Iterator[EmbeddedRedis]:
    likest_redis.restart()
    yield likest_redis
    likest_redis.restart()


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, single_connection_client=True) as client:
        client.ping()
        yield client


@pytest.fixture
def board(server: EmbeddedRedis) -> Iterator[RedisLeaderBoard]:
    board = RedisLeaderBoard(server.url, JOB)
    yield board
    board.close()


@pytest.mark.redis
@pytest.mark.parametrize("name", REFUSALS)
def test_server_that_refuses_is_unavailable_and_works_afterwards(
    board: RedisLeaderBoard, admin: redis.Redis, name: str
) -> None:
    board.put_leader_status(leader_status(1))
    REFUSALS[name].begin(admin)
    for attempt in (
        lambda: board.put_leader_status(leader_status(2)),
        lambda: board.beat(WORKER, "alive", 60.0),
    ):
        with pytest.raises(UnavailableError, match="Redis"):
            attempt()
    REFUSALS[name].end(admin)
    board.beat(WORKER, "alive", 60.0)
    assert statuses(board) == {WORKER: "alive"}
    board.put_leader_status(leader_status(3))
    found = board.get_leader_status()
    assert found is not None
    assert found.control_position == 3


@pytest.mark.redis
def test_waiting_caller_gets_an_error_when_the_server_becomes_a_replica(
    board: RedisLeaderBoard, admin: redis.Redis
) -> None:
    errors = list[BaseException]()

    def wait() -> None:
        try:
            board.triggers(TriggerId(-1, 0), 30.0)
        except OutsideError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not admin.info("clients")["blocked_clients"]:
        pass
    admin.replicaof(*NOBODY)
    waiting.join()
    assert [type(error) for error in errors] == [UnavailableError]
    admin.replicaof("NO", "ONE")
    trigger = UpdateTrigger(TriggerId(3, 1), ModelId(3, 0), ())
    assert board.post_trigger(trigger)
    assert board.triggers(TriggerId(-1, 0), 1.0) == [trigger]


@pytest.mark.redis
def test_client_finds_new_primary_behind_the_same_address() -> None:
    #   address ──▶ first  ····· becomes a replica, and keeps its connections
    #           ──▶ second ····· is written to from now on
    with EmbeddedRedis(tcp=True) as second, EmbeddedRedis(tcp=True) as first, Network() as network:
        link = network.proxy()
        link.pass_on_to(_port(first))
        board = RedisLeaderBoard(f"redis://127.0.0.1:{link.port}/0", JOB)
        board.beat(WORKER, "alive", 60.0)
        with redis.Redis.from_url(first.url) as admin:
            admin.replicaof("127.0.0.1", str(_port(second)))
            link.pass_on_to(_port(second))
            with pytest.raises(UnavailableError):
                board.beat(WORKER, "alive", 60.0)
            board.beat(WORKER, "alive", 60.0)
            other = RedisLeaderBoard(second.url, JOB)
            assert statuses(other) == {WORKER: "alive"}  # its connection moved, too
            other.close()
        board.close()


@pytest.mark.redis
def test_server_that_evicts_any_key_still_accepts_writes(
    board: RedisLeaderBoard, admin: redis.Redis
) -> None:
    admin.config_set("maxmemory-policy", "allkeys-lru")
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 16 * len(WEIGHTS))
    for version in range(40):
        board.put_model(ModelId(version, version), WEIGHTS)
        board.put_snapshot(version, WEIGHTS, "c1")
        board.beat(WORKER, "alive", 60.0)
        assert board.post_trigger(UpdateTrigger(TriggerId(3, version + 1), ModelId(3, version), ()))
        board.put_leader_status(leader_status(version))
    assert admin.info("stats")["evicted_keys"] > 0
    admin.config_set("maxmemory", "0")
    board.put_model(ModelId(3, 40), WEIGHTS)
    assert board.get_model(ModelId(3, 40)) == WEIGHTS


@pytest.mark.redis
def test_flushed_server_is_empty_and_usable(board: RedisLeaderBoard, admin: redis.Redis) -> None:
    board.put_leader_status(leader_status(1))
    board.beat(WORKER, "alive", 60.0)
    admin.flushall()
    assert statuses(board) == {}
    assert not board.put_leader_status(leader_status(2))
    board.beat(WORKER, "alive", 60.0)
    assert statuses(board) == {WORKER: "alive"}


@pytest.mark.redis
def test_rejected_password_is_not_retriable(server: EmbeddedRedis, admin: redis.Redis) -> None:
    _ask_for_a_password(admin)
    board = RedisLeaderBoard(server.url, JOB)
    with pytest.raises(OutsideError, match="DOLL_REDIS_PASSWORD") as raised:
        board.get_leader_status()
    assert not raised.value.retriable
    admin.config_set("requirepass", "")


def _port(server: EmbeddedRedis) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port
