"""How tables are printed: as wide as the terminal is, or as they need where there is none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType

_NO_TERMINAL = 1000  # columns: a file, or another program, cuts no line


def show(table: RenderableType) -> None:
    """Print one to standard output."""
    width = None if sys.stdout.isatty() else _NO_TERMINAL
    Console(width=width).print(table)
