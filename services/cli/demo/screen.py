"""Display of a running demo: a live picture in a terminal, otherwise plain lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_EVENTS_SHOWN = 6
_PICTURE_EVERY_S = 0.25
_LINE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class DemoStatus:
    """State of a demo at one moment."""

    phase: str
    sent: int
    total: int
    # Numbers by name, in display order.
    numbers: dict[str, str]


class Screen:
    """Display of a demo.

    Args:
        began: Start time, by the same clock as the `now` of the methods.
    """

    def __init__(self, console: Console, began: float) -> None:
        self._console = console
        self._began = began
        self._events = deque[Text](maxlen=_EVENTS_SHOWN)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_at = began

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def happened(self, what: str, now: float, style: str = "") -> None:
        """Show an event at once."""
        line = Text.assemble((f"{now - self._began:6.1f} s  ", "dim"), (what, style))
        self._events.append(line)
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        self._next_at = now

    def quote(self, text: str) -> None:
        """Print a text unchanged and permanently."""
        self._console.print(Text(text), soft_wrap=True)

    def show(self, look: Callable[[], DemoStatus], now: float) -> None:
        """Draw the status from `look`, unless that was done a moment ago."""
        if now < self._next_at:
            return
        status = look()
        if self._live is not None:
            self._next_at = now + _PICTURE_EVERY_S
            self._live.update(_picture(status, list(self._events)), refresh=True)
        else:
            self._next_at = now + _LINE_EVERY_S
            numbers = "  ".join(f"{name} {value}" for name, value in status.numbers.items())
            line = f"{now - self._began:6.1f} s  {status.sent:,}/{status.total:,} sent  {numbers}"
            self._console.print(Text(line), soft_wrap=True)


def _picture(status: DemoStatus, events: list[Text]) -> Group:
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        Text(status.phase, "bold"),
        ProgressBar(total=max(status.total, 1), completed=status.sent, width=40),
        f"{status.sent:,} of {status.total:,} records sent",
    )
    numbers = Table(*status.numbers, box=None, header_style="dim")
    numbers.add_row(*(Text(value, "bold") for value in status.numbers.values()))
    return Group(bar, numbers, Text(), *events)
