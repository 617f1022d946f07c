"""What a benchmark tells: a table for people, JSON for scripts, the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "load_average": round(os.getloadavg()[0], 2),  # of the minute before: 0 on a quiet machine
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def in_words(found: Mapping[str, Any]) -> str:
    """The machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, quartiles and greatest of some values."""
    low, median, high = (
        quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    )
    return {"min": min(values), "q1": low, "median": median, "q3": high, "max": max(values)}


def draw(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the first column is words, the others are numbers."""
    table = Table(title=title, title_justify="left", box=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if os.isatty(1) else 160, highlight=False).print(table)


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, where a file is named."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
