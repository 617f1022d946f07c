"""Ctrl-C and SIGTERM as a question that a long command asks itself, so that all ends in order.

An exception raised by a signal may strike anywhere, also while a child is being started or a folder
removed; a flag that the loop looks at cannot leave anything half done. Every wait is bounded.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Self

import typer

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLED = 128  # the exit status of a program that ended for a signal: this and its number


class Ending:
    """While it is entered, signals that ask this process to end only take note of it."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}

    @property
    def asked(self) -> bool:
        """Whether this process is to end."""
        return self._signal is not None

    def check(self) -> None:
        """Do nothing, unless this process is to end.

        Raises:
            typer.Exit: With the status of a program that ended for this signal.
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
