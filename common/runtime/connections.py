"""Limits the number of client connections and the time that a request may take to arrive.

uvicorn waits for ever for the rest of a request, and refuses every client once too many connections
wait. Here a request that is incomplete after its time limit closes its connection. If there are too
many connections, from one address or from all, a new connection replaces an existing one:

    idle or half-open       may be closed, the one that has waited longest first
    answered without a key  may be closed, in the same order
    answered with a key     stays, such as an event stream or a download of a large model
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

    # Makes a response from an HTTP status and the reason.
    Refuse: TypeAlias = Callable[[int, str], Response]

# Key in a request's scope that holds the author of the request, once a key was accepted.
CALLER = "doll.caller"
# Time for a complete request: a megabyte at 1 Mbit/s. It closes half-open connections within 10 s.
REQUEST_S = 8.0
# Longest request line with headers: eight times the limit of common proxies.
HEAD_BYTES = 65_536
# Length of the prefix of the smallest network that a subscriber gets.
_IPV6_PREFIX = 64


class Closable(Protocol):
    """A connection as `Connections` uses it."""

    @property
    def address(self) -> str:
        """Address of the client; empty if unknown."""

    @property
    def needed(self) -> bool:
        """True while a request with a valid key is being answered."""

    def cut(self) -> None:
        """Close the connection immediately. `Connections.end` is called soon after."""


class Connections:
    """The open connections of a server.

    Args:
        most: Maximum number of connections of all addresses.
        most_per_address: Maximum number of connections of one address. An IPv6 /64 counts as one.
        proxies: Networks whose addresses stand for many clients; only `most` limits them.
    """

    def __init__(self, most: int, most_per_address: int, proxies: Iterable[str] = ()) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._proxies = [ip_network(each) for each in proxies]
        # The client of each connection, the connection that has waited longest first.
        self._clients = dict[Closable, str]()
        self._by_client = Counter[str]()

    def __len__(self) -> int:
        return len(self._clients)

    def begin(self, connection: Closable) -> bool:
        """Add a connection; if there are too many, close another. False if all are needed."""
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
        """Record that a connection now waits for its next request."""
        client = self._clients.pop(connection, None)
        if client is not None:
            self._clients[connection] = client

    def end(self, connection: Closable) -> None:
        """Remove a connection that was closed; do nothing if it is not known."""
        client = self._clients.pop(connection, None)
        if client is not None:
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

    def _make_place(self, client: str) -> bool:
        """Close one connection, of this client unless empty; False if all are needed."""
        for connection, other in self._clients.items():
            if (not client or other == client) and not connection.needed:
                self.end(connection)
                connection.cut()
                return True
        return False

    def _client(self, address: str) -> str:
        """Return the client that an address counts for; empty if only `most` applies."""
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
    """Return uvicorn's HTTP protocol with limits.

    Args:
        connections: Connections of the server.
        refuse: Makes the response to a request that never reaches the application.
        request_s: Time for a complete request, from its first byte or the start of the connection.
    """

    class Limited(_LimitedProtocol):
        _connections = connections
        _refusal = staticmethod(refuse)
        _request_s = request_s

    return Limited


class _LimitedProtocol(HttpToolsProtocol):
    """One connection.

        no byte yet, or a part of a request's head          half-open: the timer runs
        the body is arriving, whether or not answered yet   half-open: the timer runs
        the request is complete                             answering: no timer
        the response was sent, and no byte came since       idle: uvicorn's keep-alive timer

    If another request arrives before the last one was answered, only its head is read.
    """

    _connections: Connections
    _refusal: Refuse
    _request_s: float

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 -- uvicorn's
        super().__init__(*arguments, **named)
        self.address = ""
        # Part of the incomplete request that is arriving.
        self._coming: Literal["head", "body", ""] = "head"
        # Bytes since the last piece of a body, or the end of a request.
        self._head_bytes = 0
        # Number of requests whose head is complete and whose response is not.
        self._answering = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def needed(self) -> bool:
        """See `Closable`."""
        return not self._waits and self.cycle.scope.get(CALLER) is not None

    @property
    def _waits(self) -> bool:
        """True if the server waits for bytes from the client."""
        return self._answering <= (self._coming == "body")

    def cut(self) -> None:
        """See `Closable`."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """See `HttpToolsProtocol`."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._connections.begin(self):
            self._set_timer()
        else:
            self._refuse(503, "too many connections are open")

    def connection_lost(self, exc: Exception | None) -> None:
        """See `HttpToolsProtocol`."""
        self._connections.end(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `HttpToolsProtocol`."""
        if self.transport.is_closing():
            return
        if self._answering == 0:
            # Any byte, even an empty line, begins a request.
            self._coming = self._coming or "head"
        self._head_bytes += len(data)
        super().data_received(data)
        if self._coming and self._head_bytes > HEAD_BYTES:
            self._refuse(431, f"the head of the request is larger than {HEAD_BYTES:,} bytes")
        self._set_timer()

    def on_message_begin(self) -> None:
        """See `HttpToolsProtocol`."""
        super().on_message_begin()
        self._coming = "head"

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        super().on_headers_complete()
        self._coming = "body"
        self._answering += 1

    def on_body(self, body: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._coming, self._head_bytes = "", 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._answering -= 1
        super().on_response_complete()
        self._connections.waits(self)
        self._set_timer()

    def _set_timer(self) -> None:
        """Run the timer exactly while the server waits for the rest of a request."""
        if self.transport.is_closing() or not (self._coming and self._waits):
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._request_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """Refuse a request that took too long to arrive."""
        self._timer = None
        self._refuse(408, f"the request took longer than {self._request_s:g} s to arrive")

    def _refuse(self, status: int, detail: str) -> None:
        """Close the connection, after a response with the reason unless another has begun."""
        if self.transport.is_closing():
            return
        begun = self._answering if self._coming == "head" else self.cycle.response_started
        if not begun:
            self.transport.write(_as_sent(self._refusal(status, detail)))
        self.transport.close()


def _as_sent(response: Response) -> bytes:
    """Return the bytes of a response that closes the connection."""
    response.headers["Connection"] = "close"
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return b"".join((STATUS_LINE[response.status_code], headers, b"\r\n", response.body))
