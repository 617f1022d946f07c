"""Work in threads that may hang with a server: few at a time, and nobody waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.errors import UnavailableError

T = TypeVar("T")


class Limiter:
    """Takes turns; belongs to the event loop.

    Those who wait for a server that hangs would else hold all threads there are, and each would
    wait as long as all before it together.

    Args:
        what: That is done, for whoever waited in vain.
        at_once: Threads.
        patience_s: How long one waits, for its turn and its work together.
    """

    def __init__(self, what: str, at_once: int, patience_s: float) -> None:
        self._what = what
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(at_once, what)  # begin when there is work

    async def run(self, work: Callable[[], T]) -> T:
        """Do something in a thread.

        Raises:
            UnavailableError: If it takes long; what has begun goes on, and holds its turn.
            DollError: What `work` raises.
        """
        asked = asyncio.wrap_future(self._threads.submit(work))
        try:
            return await asyncio.wait_for(asked, self._patience_s)
        except TimeoutError:
            raise UnavailableError(
                f"{self._what} was not done after {self._patience_s:g} s: ask again later"
            ) from None

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False)
