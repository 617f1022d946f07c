"""Blocking work in a bounded number of threads, with a time limit for each caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.errors import UnavailableError

T = TypeVar("T")


class Limiter:
    """Runs work in a small pool of threads; belongs to the event loop.

    Without a limit, callers of a server that hangs would occupy all threads, and each caller would
    wait as long as all earlier ones together.

    Args:
        what: Name of the work, for the error message of a timeout.
        at_once: Maximum number of threads.
        patience_s: Maximum time for the wait and the work together.
    """

    def __init__(self, what: str, at_once: int, patience_s: float) -> None:
        self._what = what
        self._patience_s = patience_s
        # Threads start when there is work.
        self._threads = ThreadPoolExecutor(at_once, what)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread.

        Raises:
            UnavailableError: If it takes too long. Work that has started continues and keeps its
                thread.
            DollError: Anything that `work` raises.
        """
        asked = asyncio.wrap_future(self._threads.submit(work))
        try:
            return await asyncio.wait_for(asked, self._patience_s)
        except TimeoutError:
            raise UnavailableError(
                f"{self._what} took longer than {self._patience_s:g} s; try again later"
            ) from None

    def close(self) -> None:
        """Start no more work."""
        self._threads.shutdown(wait=False)
