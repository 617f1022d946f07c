"""Preemption notices in memory, given by tests."""

from __future__ import annotations

from common.errors import UnavailableError
from common.notices.preemption import Notice


class MemoryNotices:
    """A machine whose test plays the provider."""

    def __init__(self) -> None:
        self.looks = 0  # number of polls
        self._away = False
        self._interruption: Notice | None = None

    def look(self) -> Notice | None:
        self.looks += 1
        if self._away:
            raise UnavailableError("the provider does not answer")
        return self._interruption

    def interrupt(self, at_s: float, action: str = "terminate") -> None:
        """Give notice that the machine ends at this time."""
        self._interruption = Notice(at_s, action)

    def talk_nonsense(self) -> None:
        """Answer with text that is no notice."""
        self._interruption = None

    def go_away(self) -> None:
        """Stop answering."""
        self._away = True

    def come_back(self) -> None:
        """Answer again."""
        self._away = False
