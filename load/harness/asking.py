"""HTTP as cheap as can be, for benchmarks: kept connections, requests on a schedule, open streams.

The schedule does not wait for answers, and latency counts from the time on the schedule: so a
server that stalls is charged for everybody who would have come meanwhile.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


class Address(NamedTuple):
    """Where a service listens, and the key for it."""

    host: str
    port: int
    key: str

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A request as it is sent."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes
    seconds: float  # since the request was due


class Link(asyncio.Protocol):
    """One connection that is kept; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._awaited: asyncio.Future[Answer] | None = None
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See the library."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See the library."""
        self._received += data
        end = self._received.find(_END)
        if end < 0 or self._awaited is None:
            return
        head = bytes(self._received[:end]).lower()
        at = head.find(_LENGTH)
        length = int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._received) < end + len(_END) + length:
            return
        body = bytes(self._received[end + len(_END) :])
        self._received.clear()
        answer = Answer(int(head.split(b" ", 2)[1]), body, perf_counter() - self._due)
        self._awaited.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        """See the library."""
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(error or ConnectionError("closed by the service"))

    async def ask(self, request: bytes, due: float | None = None) -> Answer:
        """Send a request and wait for its answer.

        Raises:
            OSError: If the connection is lost.
        """
        self._due = perf_counter() if due is None else due
        self._awaited = asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise ConnectionError("not connected")
        self._transport.write(request)
        return await self._awaited

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()


class EventLink(asyncio.Protocol):
    """An open stream of events; counts what it is told."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self.opened = asyncio.Event()
        self.lost = False
        self.updates = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See the library."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """See the library."""
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if any(line.startswith(b"event: job") for line in lines):
            self.opened.set()
        self.updates += sum(line.startswith(b"event: update") for line in lines)

    def connection_lost(self, error: Exception | None) -> None:
        """See the library."""
        del error
        self.lost = True

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()


@dataclass
class Asked:
    """What came of requests on a schedule."""

    seconds: list[float] = field(default_factory=list)  # of each, from when it was due
    statuses: dict[int, int] = field(default_factory=dict)
    connections: int = 0
    late_s: float = 0.0  # at most, of the sender itself

    def note(self, answer: Answer) -> None:
        """Count an answer."""
        self.seconds.append(answer.seconds)
        self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1


async def connect(address: Address) -> Link:
    """Open a connection.

    Raises:
        OSError: If nobody listens.
    """
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(Link, address.host, address.port)
    return link


async def on_schedule(address: Address, request: bytes, rate_per_s: float, for_s: float) -> Asked:
    """Send so many requests per second, whether earlier ones were answered or not.

    Raises:
        OSError: If a connection is lost.
    """
    asked, idle = Asked(), [await connect(address) for _ in range(8)]
    asked.connections = len(idle)
    begin, under_way = perf_counter() + 0.1, set[asyncio.Task[None]]()

    async def ask(due: float) -> None:
        if idle:
            link = idle.pop()
        else:
            link = await connect(address)
            asked.connections += 1
        asked.note(await link.ask(request, due))
        idle.append(link)

    for number in range(round(rate_per_s * for_s)):
        due = begin + number / rate_per_s
        wait_s = due - perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        asked.late_s = max(asked.late_s, perf_counter() - due)
        task = asyncio.ensure_future(ask(due))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    for link in idle:
        link.close()
    return asked


async def open_streams(address: Address, path: str, count: int) -> Sequence[EventLink]:
    """Open streams of events and wait until each has said the first word.

    Raises:
        OSError: If a connection is refused.
        TimeoutError: If a stream says nothing.
    """
    loop, request = asyncio.get_running_loop(), address.request("GET", path)
    links = [
        (await loop.create_connection(lambda: EventLink(request), address.host, address.port))[1]
        for _ in range(count)
    ]
    async with asyncio.timeout(10.0):
        for link in links:
            await link.opened.wait()
    return links
