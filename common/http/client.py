"""HTTP client for external servers that bounds the size and the total time of an answer.

`httpx2`'s own timeouts are per read, so a server that sends one byte per timeout would block a
synchronous caller for ever. Here requests run on an event loop, and one deadline covers the name
lookup, the connection, the headers and the body. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from common.errors import LateError, UnavailableError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from concurrent.futures import Future

T = TypeVar("T")

ANSWER_BYTES = 1_000_000


class BoundedClient:
    """Client of one server. May be shared between threads.

    Args:
        name: Name of the server in error messages.
        answer_s: Seconds until an answer must be complete.
        transport: Optional. If unset, the network.
        options: Further arguments of `httpx2.AsyncClient`.
    """

    def __init__(
        self,
        name: str,
        answer_s: float,
        transport: httpx2.AsyncBaseTransport | None = None,
        **options: Any,  # noqa: ANN401 -- types of `httpx2`
    ) -> None:
        self._name, self._answer_s = name, answer_s
        self._loop = _loop()
        self._http = httpx2.AsyncClient(timeout=answer_s, transport=transport, **options)
        # A compressed answer could be a thousand times larger than what the server sends.
        self._http.headers["Accept-Encoding"] = "identity"

    async def answer(self, method: str, url: str, **request: Any) -> tuple[int, bytes]:  # noqa: ANN401 -- as above
        """Send a request. For coroutines that `submit` runs.

        Args:
            method: `GET`, `POST` or `PUT`.
            url: URL.
            request: Further arguments of `httpx2.AsyncClient.request`.

        Returns:
            The status and the body.

        Raises:
            LateError: If the answer is not complete in time.
            UnreachableError: If the connection fails or breaks.
            UnavailableError: If the answer is too large, or compressed.
        """
        body = bytearray()

        def take(part: bytes) -> None:
            body.extend(part)
            if len(body) > ANSWER_BYTES:
                raise UnavailableError(
                    f"{self._name} sent an answer of more than {ANSWER_BYTES:,} bytes"
                )

        status, _ = await self.receive(method, url, take, **request)
        return status, bytes(body)

    async def receive(
        self,
        method: str,
        url: str,
        take: Callable[[bytes], object],
        **request: Any,  # noqa: ANN401 -- as above
    ) -> tuple[int, Mapping[str, str]]:
        """Send a request, and pass on the body in parts. For coroutines that `submit` runs.

        Args:
            method: See `answer`.
            url: URL.
            take: Called with each part of the body. What it raises ends the request.
            request: See `answer`.

        Returns:
            The status and the headers.

        Raises:
            LateError: If the answer is not complete in time.
            UnreachableError: If the connection fails or breaks.
            UnavailableError: If the answer is compressed.
        """
        try:
            async with (
                asyncio.timeout(self._answer_s),
                self._http.stream(method, url, **request) as answer,
            ):
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    raise UnavailableError(
                        f"{self._name} sent a compressed answer, which is not accepted"
                    )
                async for part in answer.aiter_bytes():
                    take(part)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise LateError(f"{self._name} did not answer in {self._answer_s:g} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            why = str(error) or type(error).__name__
            raise UnreachableError(f"{self._name} cannot be reached: {why}") from error
        return answer.status_code, answer.headers

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine that uses `answer`. Canceling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, method: str, url: str, **request: Any) -> tuple[int, bytes]:  # noqa: ANN401 -- as above
        """Send a request from any thread and wait for the answer; see `answer`."""
        return self.submit(self.answer(method, url, **request)).result()

    def close(self) -> None:
        """Close the connections. Requests in progress fail."""
        self.submit(self._http.aclose())


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Start this process's event loop for requests on its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="bounded-http", daemon=True).start()
    return loop
