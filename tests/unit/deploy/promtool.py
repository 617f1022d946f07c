"""Prometheus's own checker of rules, if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from tests.servers import lacking

if TYPE_CHECKING:
    from pathlib import Path


def promtool(*arguments: str, folder: Path) -> str:
    """Return promtool's complaints, or "". If promtool is missing, skip or fail the test."""
    program = shutil.which("promtool")
    if program is None:
        lacking("there is no promtool: install Debian's prometheus")
    done = subprocess.run(  # noqa: S603 -- our own files
        [program, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr
