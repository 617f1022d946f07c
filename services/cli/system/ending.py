"""Ctrl-C and SIGTERM as a flag that a long command checks, so that everything ends in order.

An exception raised by a signal handler may occur anywhere, even while a child is being started or a
folder removed. A flag that the loop checks leaves nothing half done. Every wait is bounded.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Self

import typer

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Exit status of a program that ended because of a signal, minus the signal's number.
_KILLED = 128


class Ending:
    """Context in which signals that ask this process to end only set a flag."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}

    @property
    def asked(self) -> bool:
        """True if this process should end."""
        return self._signal is not None

    def check(self) -> None:
        """Exit if this process should end.

        Raises:
            typer.Exit: With the exit status for the signal.
        """
        if self._signal is not None:
            raise typer.Exit(_KILLED + self._signal)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
