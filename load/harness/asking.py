"""A minimal HTTP client for benchmarks: persistent connections, requests on a schedule.

The schedule does not wait for answers, and latency counts from the scheduled time, so a stalled
server is charged for every request that was due meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple


class Address(NamedTuple):
    """Address of a service, and a key for it."""

    host: str
    port: int
    key: str

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a request as bytes."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes
    seconds: float  # counted from the due time


class Link(NamedTuple):
    """A persistent connection, with one request at a time."""

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
    """Results of requests on a schedule."""

    # Latency of each request, from the time it was due.
    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    connections: int = 0
    # Longest delay of the sender itself.
    late_s: float = 0.0


async def connect(address: Address) -> Link:
    """Open a connection.

    Raises:
        OSError: If no server listens.
    """
    return Link(*await asyncio.open_connection(address.host, address.port))


async def on_schedule(
    address: Address,
    request: bytes,
    rate_per_s: float,
    for_s: float,
    note: Callable[[Answer], None] | None = None,
) -> Asked:
    """Send requests at a fixed rate, without waiting for answers.

    Args:
        address: Address of the service.
        request: Request to repeat.
        rate_per_s: Requests per second.
        for_s: Duration.
        note: Called with each answer.

    Raises:
        OSError: If a connection is lost.
    """
    asked, idle = Asked(), [await connect(address) for _ in range(8)]
    asked.connections = len(idle)
    begin, under_way = perf_counter() + 0.1, set[asyncio.Task[None]]()

    async def ask(due: float) -> None:
        if idle:
            # Use the connection that has been idle longest, because the service closes idle
            # connections.
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
    """Return the answers per second if each connection repeats a request once it is answered.

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
