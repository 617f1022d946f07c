"""HTTP as cheap as can be, for benchmarks: kept connections, requests on a schedule.

The schedule does not wait for answers, and latency counts from the time on the schedule: so a
server that stalls is charged for everybody who would have come meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple


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


class Link(NamedTuple):
    """One connection that is kept; one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes, due: float | None = None) -> Answer:
        """Send a request and wait for its answer.

        Raises:
            OSError: If the connection is lost.
        """
        began = perf_counter() if due is None else due
        self.writer.write(request)
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]
            body = await self.reader.readexactly(int(length or 0))
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("closed by the service") from error
        return Answer(int(head.split(b" ", 2)[1]), body, perf_counter() - began)


@dataclass
class Asked:
    """What came of requests on a schedule."""

    seconds: list[float] = field(default_factory=list)  # of each, from when it was due
    statuses: Counter[int] = field(default_factory=Counter)
    connections: int = 0
    late_s: float = 0.0  # at most, of the sender itself


async def connect(address: Address) -> Link:
    """Open a connection.

    Raises:
        OSError: If nobody listens.
    """
    return Link(*await asyncio.open_connection(address.host, address.port))


async def on_schedule(
    address: Address,
    request: bytes,
    rate_per_s: float,
    for_s: float,
    note: Callable[[Answer], None] | None = None,
) -> Asked:
    """Send so many requests per second, whether earlier ones were answered or not.

    Args:
        address: Where to.
        request: What, each time.
        rate_per_s: How many.
        for_s: How long.
        note: Gets each answer.

    Raises:
        OSError: If a connection is lost.
    """
    asked, idle = Asked(), [await connect(address) for _ in range(8)]
    asked.connections = len(idle)
    begin, under_way = perf_counter() + 0.1, set[asyncio.Task[None]]()

    async def ask(due: float) -> None:
        if idle:
            # The one that has been idle longest: the service closes those that ask for nothing.
            link = idle.pop(0)
        else:
            link = await connect(address)
            asked.connections += 1
        answer = await link.ask(request, due)
        asked.seconds.append(answer.seconds)
        asked.statuses[answer.status] += 1
        if note is not None:
            note(answer)
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
        link.writer.close()
    return asked


async def in_turn(address: Address, request: bytes, connections: int, for_s: float) -> float:
    """Answers per second where each of some connections asks again as soon as it is answered.

    Raises:
        OSError: If a connection is lost.
        ValueError: If an answer is not 200.
    """
    began, answered = perf_counter(), 0

    async def ask() -> None:
        nonlocal answered
        link = await connect(address)
        while perf_counter() < began + for_s:
            answer = await link.ask(request)
            if answer.status != 200:
                raise ValueError(f"{answer.status}: {answer.body[:200]!r}")
            answered += 1
        link.writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))
    return answered / (perf_counter() - began)
