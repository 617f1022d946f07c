"""What becomes of connections to a host that says nothing any more, as one without power."""

from __future__ import annotations

import re
import socketserver
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from common.adapters.redis.access import RedisAccess
from common.adapters.redis.server import RedisServer, connect
from common.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 0.3


class _Host(socketserver.ThreadingTCPServer):
    """Says OK to whatever it is asked, but never again on connections of before `lose_power`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.life = 0

    def lose_power(self) -> None:
        """Come back at once, and know no connection any more."""
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


def test_connections_that_lie_idle_are_not_waited_for_one_after_the_other(host: _Host) -> None:
    with closing(
        connect(f"redis://127.0.0.1:{host.server_address[1]}", TIMEOUT_S, RedisAccess())
    ) as client:
        server = RedisServer(client, "doll:", lambda _: None)
        with ExitStack() as at_once:
            for _ in range(3):
                at_once.enter_context(client.lend()).connect()
        assert server.ask(("ECHO", "")) == [b"OK"]
        host.lose_power()
        with pytest.raises(UnavailableError):
            server.ask(("ECHO", ""))
        assert server.ask(("ECHO", "")) == [b"OK"]


def test_a_host_that_does_not_take_a_connection_is_asked_anew_within_a_second() -> None:
    for timeout_s, expected_s in ((5.0, 1.0), (0.3, 0.3)):
        with closing(connect("redis://127.0.0.1:1", timeout_s, RedisAccess())) as client:
            options = client.connection_pool.connection_kwargs
            assert (options["socket_connect_timeout"], options["socket_timeout"]) == (
                expected_s,
                timeout_s,
            )
