"""The proxy breaks connections as requested, and works again after `heal`."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from load.harness.proxy import Network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from load.harness.proxy import Proxy

# Maximum wait for what must arrive.
PATIENCE_S = 120.0
# Nothing may arrive during this wait.
SILENCE_S = 0.1


class Echo:
    """An echo server with a thread per connection."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                return


@pytest.fixture
def echo() -> Iterator[Echo]:
    with closing(Echo()) as server:
        yield server


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Network() as network:
        made = network.proxy()
        made.pass_on_to(echo.port)
        yield made


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S)


def read_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := connection.recv(1 << 16)):
        data += more
    return data


def silent(connection: socket.socket) -> bool:
    connection.settimeout(SILENCE_S)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(PATIENCE_S)
    return False


def is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def refused(proxy: Proxy) -> bool:
    try:
        with connected(proxy) as connection:
            return is_over(connection)
    except ConnectionResetError:
        return True


def test_proxy_passes_bytes_in_both_directions_in_order(proxy: Proxy) -> None:
    message = bytes(range(256)) * 4096
    with connected(proxy) as connection:
        threading.Thread(target=connection.sendall, args=(message,), daemon=True).start()
        assert read_exactly(connection, len(message)) == message


def test_proxy_passes_the_end_of_one_side_to_the_other(proxy: Proxy) -> None:
    with connected(proxy) as connection:
        connection.sendall(b"last")
        connection.shutdown(socket.SHUT_WR)
        assert read_exactly(connection, 5) == b"last"


def test_cut_proxy_holds_bytes_without_closing_connections(proxy: Proxy) -> None:
    with connected(proxy) as old:
        old.sendall(b"before")
        assert read_exactly(old, 6) == b"before"
        proxy.cut()
        with connected(proxy) as new:
            old.sendall(b"held")
            new.sendall(b"new")
            assert silent(old)
            assert silent(new)
            proxy.heal()
            assert read_exactly(old, 4) == b"held"
            assert read_exactly(new, 3) == b"new"


def test_refusing_proxy_ends_open_and_new_connections(proxy: Proxy) -> None:
    with connected(proxy) as old:
        old.sendall(b"before")
        assert read_exactly(old, 6) == b"before"
        proxy.refuse()
        assert is_over(old)
    assert refused(proxy)


def test_refusing_proxy_ends_connections_that_were_cut(proxy: Proxy) -> None:
    with connected(proxy) as connection:
        connection.sendall(b"before")
        assert read_exactly(connection, 6) == b"before"
        proxy.cut()
        connection.sendall(b"held")
        proxy.refuse()
        assert is_over(connection)


def test_slow_proxy_delivers_bytes_late(proxy: Proxy) -> None:
    with connected(proxy) as connection:
        proxy.slow(SILENCE_S)
        connection.sendall(b"late")
        assert silent(connection)
        assert read_exactly(connection, 4) == b"late"


def test_healed_proxy_accepts_new_connections(proxy: Proxy) -> None:
    for hurt in (proxy.cut, proxy.refuse, lambda: proxy.slow(60.0)):
        hurt()
        proxy.heal()
        with connected(proxy) as connection:
            connection.sendall(b"well")
            assert read_exactly(connection, 4) == b"well"


def test_proxy_of_an_unreachable_server_refuses_connections(proxy: Proxy, echo: Echo) -> None:
    with connected(proxy) as connection:
        connection.sendall(b"before")
        assert read_exactly(connection, 6) == b"before"
    echo.close()
    proxy.pass_on_to(1)  # no server listens there
    assert refused(proxy)
