"""Keeps what libraries print out of a command's output.

HiGHS (1.12, in scipy) prints lines for its own authors on the process's standard output when it
repairs a solution; a script that reads JSON there would stumble over them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def silent_output() -> Iterator[None]:
    """Discard what is written to standard output meanwhile, by whatever library."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C has buffered would come out later
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
