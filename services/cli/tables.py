"""Printing of tables: as wide as the terminal, or as wide as needed for other outputs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType

# Width in columns of an output that is not a terminal, so that no line is broken.
_NO_TERMINAL = 1000


def show(table: RenderableType) -> None:
    """Print a table to standard output."""
    width = None if sys.stdout.isatty() else _NO_TERMINAL
    Console(width=width).print(table)
