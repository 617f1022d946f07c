"""Connections of clients: how many there may be, and how long a request may take to arrive.

uvicorn waits for ever for the rest of a request, and once too many connections wait so, it refuses
everybody. Here a request that is not whole in time is cut off, and where there are too many
connections, of one address or of all, a new one takes the place of another:

    idle or half-open       the one that waits longest is closed
    answered without a key  likewise
    answered with a key     stays: an event stream, a reader of a large model
"""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from starlette.responses import Response

    Refuse: TypeAlias = Callable[[int, str], Response]  # takes a status of HTTP and the reason

CALLER = "doll.caller"  # key of a request's scope: who sent the request, once a key let it in
REQUEST_S = 8.0  # for all of a request: a megabyte at 1 Mbit/s; half-open ones are gone in ten
HEAD_BYTES = 65_536  # of a request line and its headers: eight times what a proxy lets pass
_IPV6_PREFIX = 64  # one subscriber has at least so many addresses


class Closable(Protocol):
    """A connection, as `Connections` sees it."""

    @property
    def address(self) -> str:
        """Of the other end; empty: nobody knows."""

    @property
    def needed(self) -> bool:
        """Whether it answers a request that came with a valid key."""

    def cut(self) -> None:
        """Close it at once; `end` is told soon after."""


class Connections:
    """Those that are open.

    Args:
        most: Of all addresses together.
        most_per_address: Of each; of IPv6 each /64 counts as one.
        proxies: Networks whose addresses speak for many clients: only `most` bounds them.
    """

    def __init__(self, most: int, most_per_address: int, proxies: Iterable[str] = ()) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._proxies = [ip_network(each) for each in proxies]
        self._clients = dict[Closable, str]()  # whoever waits longest first
        self._by_client = Counter[str]()

    def __len__(self) -> int:
        return len(self._clients)

    def begin(self, connection: Closable) -> bool:
        """Take in one more, in place of another if there are too many; False: there is no place."""
        client = self._client(connection.address)
        if client and self._by_client[client] >= self._most_per_address:
            placed = self._make_place(client)
        else:
            placed = len(self._clients) < self._most or self._make_place("")
        if placed:
            self._clients[connection] = client
            self._by_client[client] += 1
        return placed

    def waits(self, connection: Closable) -> None:
        """From now on it waits for its next request."""
        client = self._clients.pop(connection, None)
        if client is not None:
            self._clients[connection] = client

    def end(self, connection: Closable) -> None:
        """It is closed; may be told twice, and of one that was not taken in."""
        client = self._clients.pop(connection, None)
        if client is not None:
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

    def _make_place(self, client: str) -> bool:
        """Close one connection, of this client if one is named; False if all are needed."""
        for connection, other in self._clients.items():
            if (not client or other == client) and not connection.needed:
                self.end(connection)
                connection.cut()
                return True
        return False

    def _client(self, address: str) -> str:
        """Whose connections are counted together; empty: only those of all."""
        try:
            found: IPv4Address | IPv6Address = ip_address(address)
        except ValueError:
            return ""
        if isinstance(found, IPv6Address):
            found = found.ipv4_mapped or found
        if any(found in network for network in self._proxies):
            return ""
        if isinstance(found, IPv6Address):
            return str(ip_network((found, _IPV6_PREFIX), strict=False))
        return str(found)


def limited(
    connections: Connections, refuse: Refuse, request_s: float = REQUEST_S
) -> type[asyncio.Protocol]:
    """The protocol of uvicorn, with limits.

    Args:
        connections: All of a server.
        refuse: Writes the answer to a request that the application never sees.
        request_s: For a whole request, from its first byte or the connection's beginning on.
    """

    class Limited(_LimitedProtocol):
        _connections = connections
        _refusal = staticmethod(refuse)
        _request_s = request_s

    return Limited


class _LimitedProtocol(HttpToolsProtocol):
    """One connection.

        nothing came yet, or some of a request's head     half-open: a timer runs
        its body is on its way, whether or not answered   likewise
        the request is whole                              answered: no timer
        that was answered, and nothing came since         idle: uvicorn's timer of keeping alive

    Of a request that comes before the last one was answered, only the head is read.
    """

    _connections: Connections
    _refusal: Refuse
    _request_s: float

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 -- the library's
        super().__init__(*arguments, **named)
        self.address = ""
        self._coming: Literal["head", "body", ""] = "head"  # of a request that is not whole yet
        self._head_bytes = 0  # since the last piece of a body, or the end of a request
        self._answering = 0  # requests whose head is whole
        self._timer: asyncio.TimerHandle | None = None

    @property
    def needed(self) -> bool:
        """See `Closable`."""
        return not self._waits and self.cycle.scope.get(CALLER) is not None

    @property
    def _waits(self) -> bool:
        """Whether the server waits for bytes of the client."""
        return self._answering <= (self._coming == "body")

    def cut(self) -> None:
        """See `Closable`."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """See the library."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._connections.begin(self):
            self._set_timer()
        else:
            self._refuse(503, "too many connections are open")

    def connection_lost(self, exc: Exception | None) -> None:
        """See the library."""
        self._connections.end(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See the library."""
        if self.transport.is_closing():
            return
        if self._answering == 0:
            self._coming = self._coming or "head"  # be it an empty line: a request has to follow
        self._head_bytes += len(data)
        super().data_received(data)
        if self._coming and self._head_bytes > HEAD_BYTES:
            self._refuse(431, f"the head of the request is larger than {HEAD_BYTES:,} bytes")
        self._set_timer()

    def on_message_begin(self) -> None:
        """See the library."""
        super().on_message_begin()
        self._coming = "head"

    def on_headers_complete(self) -> None:
        """See the library."""
        super().on_headers_complete()
        self._coming = "body"
        self._answering += 1

    def on_body(self, body: bytes) -> None:
        """See the library."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See the library."""
        self._coming, self._head_bytes = "", 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See the library."""
        self._answering -= 1
        super().on_response_complete()
        self._connections.waits(self)
        self._set_timer()

    def _set_timer(self) -> None:
        """Let the timer run exactly while it is for the client to go on with a request."""
        if self.transport.is_closing() or not (self._coming and self._waits):
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._request_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """The request did not come in time."""
        self._timer = None
        self._refuse(408, f"the request took longer than {self._request_s:g} s to arrive")

    def _refuse(self, status: int, detail: str) -> None:
        """Close the connection, and say why unless a response has begun."""
        if self.transport.is_closing():
            return
        begun = self._answering if self._coming == "head" else self.cycle.response_started
        if not begun:
            self.transport.write(_as_sent(self._refusal(status, detail)))
        self.transport.close()


def _as_sent(response: Response) -> bytes:
    """Return the bytes of an answer, after which the connection is closed."""
    response.headers["Connection"] = "close"
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return b"".join((STATUS_LINE[response.status_code], headers, b"\r\n", response.body))
