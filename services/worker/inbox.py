"""What other threads deliver to a worker's stream thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from common.core import worker_messages as events

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import Unsettled


class WorkerInbox:
    """Triggers, which may give room to read; `round_began` is for any thread.

    Args:
        is_news: Returns True if what a trigger says is worth a turn at once.
    """

    def __init__(self, is_news: Callable[[int, Unsettled | None], bool]) -> None:
        self._is_news = is_news
        # The newest says all that the others do.
        self._triggers = deque[events.RoundBegan](maxlen=1)
        self._woken = threading.Event()

    def round_began(self, epoch: int, unsettled: Unsettled | None) -> None:
        """Deliver what a trigger says: of which leader it is, and what waits in the job."""
        self._triggers.append(events.RoundBegan(epoch, unsettled))
        if self._is_news(epoch, unsettled):
            self._woken.set()

    def take(self) -> events.RoundBegan | None:
        """Take out the newest trigger; None if there is none."""
        self._woken.clear()
        return self._triggers.popleft() if self._triggers else None

    def wait(self, timeout_s: float) -> None:
        """Wait for news, no longer than this."""
        self._woken.wait(timeout_s)
