"""Common parts of all benchmarks: options, tables, JSON, exit status, the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.errors import UserError
from load.harness.stack import NotMeasuredError

_QUARTILES = {"min": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "max": 1.0}


def parser(
    documentation: str | None, example: str = "", *, kafka: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share.

    Args:
        documentation: The script's docstring. Its first line becomes the description.
        example: A command line.
        kafka: Add an option to choose a Kafka.
    """
    found = argparse.ArgumentParser(
        description=(documentation or "").partition("\n")[0],
        epilog=f"example: {example}" if example else None,
    )
    if kafka:
        found.add_argument(
            "--kafka",
            default="apache",
            help="Kafka to use: apache, embedded, or an address [default: apache]",
        )
    found.add_argument("--json", type=Path, metavar="FILE", help="file to write the result to")
    return found


def run(main: Callable[[], int]) -> int:
    """Run a benchmark. Returns its exit status, 2 if nothing was measured."""
    try:
        return main()
    except (NotMeasuredError, UserError) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 2


def conclude(
    path: Path | None, on: Mapping[str, Any], result: Mapping[str, Any], short: Sequence[str]
) -> int:
    """Print the machine and the outcome, and write the result. Returns the exit status.

    Args:
        path: Optional. Path of the JSON file.
        on: Result of `machine`.
        result: Measured values.
        short: Descriptions of missed requirements.
    """
    print(in_words(on))
    for each in short:
        print(f"FALLS SHORT: {each}")
    write(path, {"machine": on, **result})
    return int(bool(short))


class Figure(NamedTuple):
    """A measured number and its requirement."""

    name: str  # includes the unit
    value: float
    digits: int = 0  # decimals
    most: float = inf  # required: at most
    least: float = -inf  # required: at least
    # Optional. Desired value beyond the requirement.
    goal: float | None = None

    @property
    def bar(self) -> float | None:
        """Required bound. None if there is no bound, or two."""
        bounds = [bound for bound in (self.most, self.least) if abs(bound) < inf]
        return bounds[0] if len(bounds) == 1 else None

    @property
    def required(self) -> str:
        """Description of the requirement."""
        bounds = {"at most": self.most, "at least": self.least, "goal": self.goal}
        return " ".join(
            f"{words} {bound:g}"
            for words, bound in bounds.items()
            if bound is not None and abs(bound) < inf
        )

    @property
    def is_short(self) -> bool:
        """True if the value misses the requirement."""
        return not self.least <= self.value <= self.most


def measure_figures(
    title: str, given: argparse.Namespace, figures: Mapping[str, Callable[[], Figure]]
) -> int:
    """Measure the figures that `--only` names, and report them. Returns the exit status."""
    on = machine()
    found = {name: figures[name]() for name in track(given.only, "figures", transient=True)}
    answer = Found(title, list(found.values()), {})
    answer.draw()
    result = {
        name: {"value": it.value, "bar": it.bar, "goal": it.goal} for name, it in found.items()
    }
    return conclude(given.json, on, result, answer.short())


class Found(NamedTuple):
    """Result of one benchmark."""

    title: str
    figures: Sequence[Figure]
    data: Mapping[str, Any]  # content of the JSON file
    # Other missed requirements.
    faults: Sequence[str] = ()

    def short(self) -> list[str]:
        """Return descriptions of missed requirements."""
        late = [each for each in self.figures if each.is_short]
        return [*self.faults, *(f"{each.name}: {each.value:.4g}, {each.required}" for each in late)]

    def draw(self) -> None:
        """Print a table."""
        rows = [
            (each.name, f"{each.value:,.{each.digits}f}", each.required) for each in self.figures
        ]
        draw(self.title, ("", "measured", "required"), rows)


def machine() -> dict[str, Any]:
    """Return properties of the machine that figures depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        # Average of the last minute: 0 on a quiet machine.
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def in_words(found: Mapping[str, Any]) -> str:
    """Return a one-line description of the machine."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def spread(values: Sequence[float], shares: Mapping[str, float] = _QUARTILES) -> dict[str, float]:
    """Return quantiles by name: minimum, quartiles and maximum by default."""
    found = np.quantile(values, list(shares.values())).tolist()
    return dict(zip(shares, found, strict=True))


def draw(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. The first column holds words, the others numbers."""
    table = Table(title=title, title_justify="left", box=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if os.isatty(1) else 160, highlight=False).print(table)


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
