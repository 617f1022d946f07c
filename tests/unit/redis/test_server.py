"""Connections to a host that does not respond any more, such as one without power."""

from __future__ import annotations

import re
import socketserver
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from common.redis.access import RedisAccess
from common.redis.server import RedisServer, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Host(socketserver.ThreadingTCPServer):
    """Says OK to every command, but ignores connections from before `lose_power`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.life = 0

    @property
    def url(self) -> str:
        """Its address, with the timeout of clients."""
        return f"redis://127.0.0.1:{self.server_address[1]}?socket_timeout=0.3"

    def lose_power(self) -> None:
        """Restart at once, without the old connections."""
        self.life += 1


class _Connection(socketserver.BaseRequestHandler):
    server: _Host

    def handle(self) -> None:
        life = self.server.life
        while data := self.request.recv(1 << 16):
            if life == self.server.life:
                self.request.sendall(b"+OK\r\n" * len(re.findall(rb"\*\d+\r\n\$", data)))


@pytest.fixture
def host() -> Iterator[_Host]:
    with _Host() as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        yield host
        host.shutdown()


def test_dead_idle_connections_are_dropped_after_one_error(host: _Host) -> None:
    with closing(connect(host.url, RedisAccess())) as client:
        server = RedisServer(client, "doll:", lambda _: None)
        pool, at_once = client.connection_pool, [client.borrow() for _ in range(3)]
        for connection in at_once:
            connection.connect()
            client.take_back(connection, pool)
        assert server.ask(("ECHO", "")) == [b"OK"]
        host.lose_power()
        with pytest.raises(UnavailableError):
            server.ask(("ECHO", ""))
        assert server.ask(("ECHO", "")) == [b"OK"]


def test_connect_timeout_is_one_second() -> None:
    with closing(connect("redis://127.0.0.1:1", RedisAccess())) as client:
        options = client.connection_pool.connection_kwargs
        assert (options["socket_connect_timeout"], options["socket_timeout"]) == (1.0, 5.0)


def test_connection_lent_before_a_renewal_is_not_reused(host: _Host) -> None:
    with closing(connect(host.url, RedisAccess())) as client:
        pool, lent = client.connection_pool, client.borrow()
        client.renew(pool)
        client.take_back(lent, pool)
        again = client.borrow()
        client.take_back(again, client.connection_pool)
        assert again is not lent
        assert client.borrow() is again


@pytest.mark.parametrize("size", [0, 6_000, 6_001, 100_000])
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_commands_are_encoded_the_same_for_any_size(
    size: int, kind: Callable[[bytes], bytes | memoryview]
) -> None:
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with closing(connect("redis://127.0.0.1:1", RedisAccess())) as client:
        connection = client.borrow()
        sent = b"".join(connection.pack_commands([("SET", "ké", kind(value), "PX", 12)]))
    parts = (b"SET", "ké".encode(), value, b"PX", b"12")
    assert sent == b"*5\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)
