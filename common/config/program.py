"""How our own programs are started as processes, so that they find our packages and no others.

A user may have folders `common` and `services` too, in the working directory or on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROOT = str(Path(__file__).parents[2])  # where our packages lie, in a checkout or installed


def command_of(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a module of ours, whose PYTHONPATH is a `search_path`."""
    return (sys.executable, "-P", "-m", module, *arguments)  # -P: else the directory comes first


def search_path(others: Iterable[str]) -> str:
    """PYTHONPATH with our packages first, and then other places."""
    return os.pathsep.join(dict.fromkeys((_ROOT, *filter(None, others))))
