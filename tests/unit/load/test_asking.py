"""Requests on a schedule: latency is measured from the time when a request was due."""

from __future__ import annotations

import asyncio
from itertools import count
from time import sleep

from load.harness.asking import Address, on_schedule

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.readuntil(b"\r\n\r\n"):
        writer.write(ANSWER)


async def listening() -> tuple[asyncio.Server, Address]:
    server = await asyncio.start_server(served, "127.0.0.1", 0)
    return server, Address("127.0.0.1", server.sockets[0].getsockname()[1], "key")


def test_on_schedule_answers_and_times_every_request() -> None:
    async def ask() -> None:
        server, address = await listening()
        asked = await on_schedule(address, address.request("GET", "/"), 1000, 0.1)
        assert asked.statuses == {200: 100}
        assert len(asked.seconds) == 100
        assert min(asked.seconds) > 0
        server.close()

    asyncio.run(ask())


def test_stall_adds_to_the_latency_of_all_requests_due_meanwhile() -> None:
    """Requests are due every 5 ms. The first answer blocks the loop, so the others wait."""

    async def ask() -> None:
        server, address = await listening()
        answers = count()

        def stall(_: object) -> None:
            if next(answers) == 0:
                sleep(0.2)

        asked = await on_schedule(address, address.request("GET", "/"), 200, 0.1, stall)
        assert sum(asked.seconds) > 10 * 0.1
        server.close()

    asyncio.run(ask())
