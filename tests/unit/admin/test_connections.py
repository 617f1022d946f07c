"""Connections: half-open ones are closed, and no flood shuts out a client with a key."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from common.config.settings import Settings
from common.runtime.connections import HEAD_BYTES, REQUEST_S, Connections
from services.admin.routes.requests import JOB
from services.admin.server import Server
from services.admin.service import Limits
from tests.unit.admin.conftest import World

if TYPE_CHECKING:
    from collections.abc import Iterator

# A request that is sent at once is read within this time.
SOON_S = 1.0
LONG_S = 30.0
LARGE = "x" * 30_000_000 + " the end"  # no buffer of a system takes it


@dataclass(eq=False)
class Connection:
    """A connection that records if it was cut."""

    address: str
    needed: bool = False
    was_cut: bool = field(default=False, init=False)

    def cut(self) -> None:
        """See `Closable`."""
        self.was_cut = True


# --- which connections make room for new ones ----------------------------------------------------


def begun(connections: Connections, *addresses: str, needed: bool = False) -> list[Connection]:
    opened = [Connection(address, needed) for address in addresses]
    assert all(connections.begin(each) for each in opened)
    return opened


def cut(opened: list[Connection]) -> list[bool]:
    return [each.was_cut for each in opened]


def test_new_connection_closes_the_longest_idle_one_of_its_address() -> None:
    connections = Connections(10, 2)
    opened = begun(connections, "192.0.2.1", "192.0.2.9", "192.0.2.1")
    # The service has answered the request of the first connection.
    connections.waits(opened[0])

    begun(connections, "192.0.2.1")

    assert cut(opened) == [False, False, True]
    assert len(connections) == 3


def test_connections_of_all_addresses_are_limited() -> None:
    connections = Connections(3, 2)
    opened = begun(connections, "192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "192.0.2.4")
    assert cut(opened) == [True, True, False, False, False]


def test_connection_with_an_authorized_request_is_kept_over_a_new_one() -> None:
    connections = Connections(3, 2)
    begun(connections, "192.0.2.1", "192.0.2.1", needed=True)
    other = begun(connections, "192.0.2.2")

    assert not connections.begin(Connection("192.0.2.1"))

    assert cut(other) == [False]
    assert len(connections) == 3


def test_ended_connection_no_longer_counts() -> None:
    connections = Connections(3, 1)
    (opened,) = begun(connections, "192.0.2.1", needed=True)
    for _ in range(2):
        connections.end(opened)
        connections.waits(opened)
    assert len(connections) == 0
    begun(connections, "192.0.2.1")


@pytest.mark.parametrize(
    ("proxies", "addresses", "places"),
    [
        ((), ("2001:db8::1", "2001:db8::ffff:2"), 1),  # no limit for a subscriber
        ((), ("2001:db8::1", "2001:db8:0:1::1"), 2),
        ((), ("::ffff:192.0.2.1", "192.0.2.1"), 1),
        (("192.0.2.0/24",), ("192.0.2.1", "::ffff:192.0.2.1"), 2),  # a proxy speaks for many
        (("2001:db8::/32",), ("2001:db8::1", "2001:db8::1"), 2),
        ((), ("", ""), 2),  # local sockets have no address
    ],
)
def test_addresses_of_one_client_count_together(
    proxies: tuple[str, ...], addresses: tuple[str, ...], places: int
) -> None:
    connections = Connections(10, 1, proxies)
    begun(connections, *addresses)
    assert len(connections) == places


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from(("come", "go")))),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_connections_stay_within_limits_and_needed_ones_are_kept(
    happening: list[tuple[str, bool, str]], most: int, per_address: int
) -> None:
    connections, there = Connections(most, per_address), list[Connection]()
    for needed_by, needed, what in happening:
        address = f"192.0.2.{ord(needed_by)}"
        if what == "go" and there:
            connections.end(there.pop(0))
            continue
        new = Connection(address, needed)
        mine = [each for each in there if each.address == address]
        full = len(mine) >= per_address
        crowd = mine if full else there if len(there) >= most else []
        came = connections.begin(new)
        assert came == (not crowd or not all(each.needed for each in crowd))
        assert sum(each.was_cut for each in there) == (came and bool(crowd))
        assert not any(each.was_cut for each in there if each.needed)
        there = [each for each in there if not each.was_cut] + [new] * came
        assert len(connections) == len(there) <= most


# --- on a socket ---------------------------------------------------------------------------------


class Client:
    """A raw connection to the service.

    Args:
        port: Port of the service.
        said: Bytes to send immediately.
    """

    def __init__(self, port: int, said: bytes = b"") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
        self.socket.sendall(said)

    def say(self, more: bytes) -> None:
        """Send more."""
        self.socket.sendall(more)

    def read_until(self, until: bytes) -> bytes:
        """Read until these bytes."""
        received = bytearray()
        while until not in received[-100_000:]:
            piece = self.socket.recv(65_536)
            assert piece, bytes(received[-1000:])
            received += piece
        return bytes(received)

    def last_words(self) -> bytes:
        """Read until the service closes the connection."""
        received = b""
        try:
            while piece := self.socket.recv(65_536):
                received += piece
        except ConnectionResetError:  # cut before everything was read
            pass
        return received


@contextmanager
def served(world: World, request_s: float = SOON_S) -> Iterator[int]:
    """Serve as the process does. Yields the port."""
    server = Server(world.app, request_s)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.end()
            thread.join(LONG_S)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    made.streams("clinic-a", "clinic-b")
    assert made.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    made.app.add_api_route("/large", lambda: PlainTextResponse(LARGE))
    yield made
    made.close()


@pytest.fixture(scope="module")
def port(world: World) -> Iterator[int]:
    with served(world) as found:
        yield found


def head(world: World, request: str, *headers: str) -> bytes:
    """Return an operator's request without its body."""
    lines = (f"{request} HTTP/1.1", "Host: doll.test", f"Authorization: Bearer {world.operator}")
    return "\r\n".join((*lines, *headers, "", "")).encode()


def asked(port: int, path: str, key: str, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}", **headers})
        return connection.getresponse().status
    finally:
        connection.close()


NO_KEY = b"POST /v1/jobs HTTP/1.1\r\nHost: doll.test\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("said", "first", "times"),
    [
        (b"", b"HTTP/1.1 408 ", 1),
        (b"\r\n", b"HTTP/1.1 408 ", 1),
        (b"GET /v1/jobs HTTP/1.1\r\nHost: doll.test\r\nX-Slow: ", b"HTTP/1.1 408 ", 1),
        (NO_KEY + b"Content-Length: 9\r\n\r\n{", b"HTTP/1.1 401 ", 1),
        (NO_KEY + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"HTTP/1.1 401 ", 1),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET", b"HTTP/1.1 200 ", 2),
    ],
)
def test_incomplete_request_is_closed_after_a_timeout(
    port: int, said: bytes, first: bytes, times: int
) -> None:
    answer = Client(port, said).last_words()
    assert answer.startswith(first)
    assert answer.count(b"HTTP/1.1 ") == times


def test_incomplete_second_request_is_closed_after_a_timeout(port: int) -> None:
    client = Client(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    client.read_until(b'{"ok":true}')
    # No request starts with these bytes.
    client.say(b"\r\n")
    assert client.last_words().startswith(b"HTTP/1.1 408 ")


def test_body_sent_byte_by_byte_is_closed_after_a_timeout(world: World, port: int) -> None:
    chunked = "Content-Type: application/json", "Transfer-Encoding: chunked"
    client = Client(port, head(world, "POST /v1/jobs", *chunked))
    try:
        while True:
            client.say(b"1\r\n \r\n")
    except ConnectionError:
        # The connection is closed. pytest's timeout limits the wait.
        pass


def test_incomplete_body_with_a_key_returns_408(world: World, port: int) -> None:
    length = "Content-Type: application/json", "Content-Length: 9"
    answer = Client(port, head(world, "POST /v1/jobs", *length) + b"{").last_words()
    status, _, body = answer.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 408 ")
    assert b"content-type: application/problem+json" in status
    assert b"connection: close" in status.lower()
    assert b"the request took longer than 1 s to arrive" in body


def test_endless_header_returns_431(port: int) -> None:
    client = Client(port, b"GET /healthz HTTP/1.1\r\n")
    line = b"X-More: %b\r\n" % (b"x" * 1000)
    try:
        for _ in range(2 * HEAD_BYTES // len(line)):
            client.say(line)
    except ConnectionError:
        # The connection is closed already.
        return
    assert client.last_words().startswith(b"HTTP/1.1 431 ")


def test_endless_header_does_not_interrupt_another_response(world: World, port: int) -> None:
    client = Client(port, head(world, "GET /v1/jobs/digits/events"))
    client.read_until(b"event: job")
    with suppress(ConnectionError):
        client.say(b"GET /healthz HTTP/1.1\r\nX-More: " + b"y" * HEAD_BYTES)
    assert b"431" not in client.last_words()


def test_event_stream_slow_reader_and_idle_client_are_not_closed(world: World, port: int) -> None:
    events = Client(port, head(world, "GET /v1/jobs/digits/events"))
    assert b"event: job" in events.read_until(b"\n\n")
    slow = Client(port, head(world, "GET /large"))
    idle = Client(port, head(world, "GET /healthz"))
    idle.read_until(b'{"ok":true}')

    # When this connection times out, the idle one has been silent for longer than that.
    assert Client(port).last_words()

    idle.say(head(world, "GET /healthz"))
    assert b"200 OK" in idle.read_until(b'{"ok":true}')
    assert slow.read_until(b"the end").endswith(b"x the end")
    world.ask("PATCH", "/v1/jobs/digits", json={"reason": "again", "wanted": "paused"})
    assert b"paused" in events.read_until(b"paused")


def test_pipelined_requests_are_answered() -> None:
    world = World()
    with served(world, LONG_S) as port:
        two = head(world, "GET /v1/jobs") + head(world, "GET /healthz")
        client = Client(port, two + b"GET /heal")
        assert client.read_until(b'{"ok":true}').count(b"HTTP/1.1 200 OK") == 2
        client.say(b"thz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in client.read_until(b'{"ok":true}')
    world.close()


def test_flood_of_half_open_requests_does_not_block_other_clients() -> None:
    world = World(limits=Limits(connections=20))
    with served(world, LONG_S) as port, ExitStack() as stack:
        flood = [stack.enter_context(Client(port, NO_KEY).socket) for _ in range(100)]
        assert asked(port, "/healthz", "") == 200
        assert asked(port, "/v1/jobs", world.operator) == 200
        flood[0].settimeout(LONG_S)
        # The service closed it for another connection.
        assert not _rest(flood[0])
    world.close()


def test_new_connection_returns_503_if_all_others_are_needed() -> None:
    world = World(limits=Limits(connections=2))
    world.streams("clinic-a", "clinic-b")
    assert world.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    with served(world, LONG_S) as port:
        events = [Client(port, head(world, "GET /v1/jobs/digits/events")) for _ in range(2)]
        for each in events:
            each.read_until(b"event: job")
        answer = Client(port).last_words()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too many connections are open" in answer
        events[0].socket.close()
        while asked(port, "/healthz", "") != 200:
            pass  # pytest's timeout is the limit
    world.close()


@pytest.mark.parametrize(("proxies", "status"), [((), 429), (("127.0.0.0/8",), 401)])
def test_forwarded_address_is_trusted_only_from_proxies(
    proxies: tuple[str, ...], status: int
) -> None:
    world = World(
        Settings(blobs="s3://memory", api_proxies=proxies), limits=Limits(requests_per_s=0.001)
    )
    with served(world) as port:
        found = [
            asked(port, "/v1/jobs", "doll_guess", **{"X-Forwarded-For": f"192.0.2.{number}"})
            for number in range(3)
        ]
    assert found == [401, status, status]
    world.close()


def test_half_open_requests_are_closed_within_ten_seconds() -> None:
    assert REQUEST_S < 10


def _rest(client: socket.socket) -> bytes:
    try:
        return client.recv(65_536)
    except ConnectionResetError:
        return b""
