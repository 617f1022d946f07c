"""The contract of the rendezvous of group members, on the three servers of the boards."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import redis

from common.errors import UnavailableError
from common.redis.boards import RedisBoards
from tests.contract.board_fixtures import LONG_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.embedded.redis import EmbeddedRedis
    from common.redis.port import Rendezvous
    from tests.contract.board_fixtures import Server

pytest_plugins = ["tests.redis_servers", "tests.contract.board_fixtures"]


@pytest.fixture
def rendezvous(server: Server) -> Iterator[Rendezvous]:
    boards = server.boards()
    yield boards.rendezvous(server.job)
    boards.close()


def test_rendezvous_entries_are_ordered_and_readable_from_any_position(
    rendezvous: Rendezvous,
) -> None:
    for value in (b"one", b"two\x00\xff", b""):
        rendezvous.leave("view-1", f"key {value!r}", value)
    rendezvous.leave("view-2", "other", b"")

    found = rendezvous.entries("view-1", "", LONG_S)
    assert [value for _, _, value in found] == [b"one", b"two\x00\xff", b""]
    assert rendezvous.entries("view-1", found[0][0], LONG_S) == found[1:]
    assert rendezvous.entries("view-1", found[-1][0], 0.0) == []
    assert rendezvous.entries("none", "", 0.01) == []


def test_waiting_caller_is_notified_at_once(rendezvous: Rendezvous) -> None:
    later = threading.Timer(0.02, rendezvous.leave, ("view-1", "key", b"value"))
    later.start()

    [(_, key, value)] = rendezvous.entries("view-1", "", LONG_S)
    assert (key, value) == ("key", b"value")
    later.join()


def test_killed_server_raises_unavailable(server: Server, rendezvous: Rendezvous) -> None:
    server.kill()

    with pytest.raises(UnavailableError):
        rendezvous.leave("view-1", "key", b"")
    with pytest.raises(UnavailableError):
        rendezvous.entries("view-1", "", 0.0)


def test_redis_rendezvous_expires(embedded_redis: EmbeddedRedis) -> None:
    boards = RedisBoards(embedded_redis.url)
    boards.rendezvous("job").leave("view-1", "key", b"value")
    boards.close()

    with redis.Redis.from_url(embedded_redis.url) as client:
        assert 50_000 < client.pttl("doll:{job}:group:view-1") <= 60_000
