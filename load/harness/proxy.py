"""A network that can be broken: TCP proxies whose bytes stop, come late, or never come at all."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 18
# SO_LINGER: closing sends RST, like a host that lost its state.
_LINGER_NOT = struct.pack("ii", 1, 0)


class Network:
    """The thread that runs all proxies, until the context ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def proxy(self) -> Proxy:
        """Create a proxy on a free port."""
        proxy = Proxy(self._loop)
        asyncio.run_coroutine_threadsafe(proxy.listen(), self._loop).result()
        return proxy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Proxy:
    """One port that forwards its connections to another port. Created by `Network.proxy`.

    `cut`, `refuse`, `slow` and `heal` may be called from any thread, and apply to current and
    future connections.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.port = 0
        self._loop = loop
        self._target = 0
        self._latency_s = 0.0
        self._refuses = False
        self._passes = asyncio.Event()
        self._connections = set[asyncio.Task[None]]()

    async def listen(self) -> None:
        """Open the port."""
        self._passes.set()
        server = await asyncio.start_server(self._serve, _HOST, 0, limit=_CHUNK_BYTES)
        self.port = server.sockets[0].getsockname()[1]

    def pass_on_to(self, port: int) -> None:
        """Set the port to forward to. Until then no connection gets through."""
        self._target = port

    def cut(self) -> None:
        """Stop all bytes. Connections stay open without notice, as if a cable were pulled."""
        self._at_once(self._passes.clear)

    def refuse(self) -> None:
        """Reset all connections, and every further one as it arrives."""

        def refuse() -> None:
            self._refuses = True
            for connection in self._connections:
                connection.cancel()

        self._at_once(refuse)

    def slow(self, latency_s: float) -> None:
        """Delay every chunk. A large message therefore also has less bandwidth."""
        self._latency_s = latency_s

    def heal(self) -> None:
        """Undo all faults. Bytes held back in cut connections pass first."""

        def heal() -> None:
            self._latency_s, self._refuses = 0.0, False
            self._passes.set()

        self._at_once(heal)

    def _at_once(self, change: Callable[[], None]) -> None:
        """Apply a change in the loop's thread, and wait for it."""

        async def changed() -> None:
            change()

        asyncio.run_coroutine_threadsafe(changed(), self._loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 -- a coroutine runs in one
        ends = [writer]
        self._connections.add(task)
        try:
            await self._passes.wait()
            if not self._refuses:
                there, on = await asyncio.open_connection(_HOST, self._target, limit=_CHUNK_BYTES)
                ends.append(on)
                await asyncio.gather(self._pump(reader, on), self._pump(there, writer))
        except (OSError, asyncio.CancelledError):
            for end in ends:
                _reset_when_closed(end)
        finally:
            self._connections.discard(task)
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await asyncio.sleep(self._latency_s)
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        # The end of the stream is held back, too.
        await self._passes.wait()
        writer.write_eof()


def _reset_when_closed(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
