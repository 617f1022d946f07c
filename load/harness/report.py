"""What all benchmarks have in common: their options, tables, JSON, exit status, the machine."""

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
    """A parser of the options that all benchmarks share.

    Args:
        documentation: The script's docstring, whose first line describes it.
        example: A command line.
        kafka: Whether there is a Kafka to choose.
    """
    found = argparse.ArgumentParser(
        description=(documentation or "").partition("\n")[0],
        epilog=f"example: {example}" if example else None,
    )
    if kafka:
        found.add_argument(
            "--kafka", default="apache", help="apache, embedded, or an address [default: apache]"
        )
    found.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    return found


def run(main: Callable[[], int]) -> int:
    """Run a benchmark; returns its exit status, 2 where nothing was measured."""
    try:
        return main()
    except (NotMeasuredError, UserError) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 2


def conclude(
    path: Path | None, on: Mapping[str, Any], result: Mapping[str, Any], short: Sequence[str]
) -> int:
    """Print the machine and the verdict, and write the result; returns the exit status.

    Args:
        path: Of the JSON file, if one is wanted.
        on: See `machine`.
        result: What was measured.
        short: What falls short of what is required.
    """
    print(in_words(on))
    for each in short:
        print(f"FALLS SHORT: {each}")
    write(path, {"machine": on, **result})
    return int(bool(short))


class Figure(NamedTuple):
    """A measured number, and what is required of it."""

    name: str  # with its unit
    value: float
    digits: int = 0  # after the point
    most: float = inf  # required: at most
    least: float = -inf  # required: at least
    goal: float | None = None  # wanted beyond that

    @property
    def bar(self) -> float | None:
        """What is required; None where nothing is, or two bounds are."""
        bounds = [bound for bound in (self.most, self.least) if abs(bound) < inf]
        return bounds[0] if len(bounds) == 1 else None

    @property
    def required(self) -> str:
        """In words."""
        bounds = {"at most": self.most, "at least": self.least, "goal": self.goal}
        return " ".join(
            f"{words} {bound:g}"
            for words, bound in bounds.items()
            if bound is not None and abs(bound) < inf
        )

    @property
    def is_short(self) -> bool:
        """Whether it is not as required."""
        return not self.least <= self.value <= self.most


def measure_figures(
    title: str, given: argparse.Namespace, figures: Mapping[str, Callable[[], Figure]]
) -> int:
    """Measure the figures that `--only` names, print and write them; returns the exit status."""
    on = machine()
    found = {name: figures[name]() for name in track(given.only, "figures", transient=True)}
    answer = Found(title, list(found.values()), {})
    answer.draw()
    result = {
        name: {"value": it.value, "bar": it.bar, "goal": it.goal} for name, it in found.items()
    }
    return conclude(given.json, on, result, answer.short())


class Found(NamedTuple):
    """What one benchmark found."""

    title: str
    figures: Sequence[Figure]
    data: Mapping[str, Any]  # for the JSON file
    faults: Sequence[str] = ()  # what else is not as required

    def short(self) -> list[str]:
        """What falls short of what is required."""
        late = [each for each in self.figures if each.is_short]
        return [*self.faults, *(f"{each.name}: {each.value:.4g}, {each.required}" for each in late)]

    def draw(self) -> None:
        """Print a table."""
        rows = [
            (each.name, f"{each.value:,.{each.digits}f}", each.required) for each in self.figures
        ]
        draw(self.title, ("", "measured", "required"), rows)


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


def spread(values: Sequence[float], shares: Mapping[str, float] = _QUARTILES) -> dict[str, float]:
    """Quantiles of some values by name: least, quartiles and greatest unless others are named."""
    found = np.quantile(values, list(shares.values())).tolist()
    return dict(zip(shares, found, strict=True))


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
