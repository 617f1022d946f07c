"""From the options of `doll plan` to the givens of the theory, and from its answer to one for all.

What is wrong is told by the option that said it. Not for other commands: it brings scipy.
"""

from __future__ import annotations

import csv
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from common.errors import UserError
from common.planning.remaining import Remaining, arriving, remaining
from common.theory.beyond.chance import deadline_probability, plan_with_probability
from common.theory.errors import ParameterError
from common.theory.provisioning import CostCurve, cost_curve, plan, plan_of
from common.theory.work import Market, Rates, Work, market

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from common.ports import Log
    from common.theory.plan import Plan

_MOST_WORKERS = 1_000_000  # a slip of the finger shall not ask for all memory

_OPTIONS = {  # what the theory calls a number, and the option that gives it
    "group_size": "--group-size",
    "batch_size": "--batch-size",
    "updates": "--updates",
    "deadline_s": "--deadline",
    "availability": "--availability",
    "spot.availability": "--availability",
    "spot_usd_per_hour": "--spot-price",
    "on_demand_usd_per_hour": "--on-demand-price",
    "spot.cycle_s": "--cycle",
    "cycle_s": "--cycle",
    "probability": "--probability",
    "spot": "--spot",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options; None where one was not given."""

    workers: int | None = None
    rate_per_s: float | None = None
    rates: Path | None = None
    job: str = ""
    group_size: int | None = None
    batch_size: int | None = None
    updates: float | None = None
    deadline_s: float | None = None
    availability: float | None = None
    spot_usd_per_hour: float | None = None
    on_demand_usd_per_hour: float | None = None
    cycle_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The givens of the theory."""

    work: Work
    market: Market
    names: tuple[str, ...] = ()  # of the workers; none where only their number is known
    notes: tuple[str, ...] = ()  # what a person should know of where the numbers come from


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A plan, and what all other numbers of spot workers would come to."""

    asked: Asked
    plan: Plan
    curve: CostCurve
    enough: npt.NDArray[np.bool_]  # (N_tot + 1,) whether so many do what was asked
    chances: npt.NDArray[np.float64]  # (N_tot + 1,) probability to meet the deadline


def gather(given: Given, open_log: Callable[[], Log], now_s: float) -> Asked:
    """Put together what the options say and what the job says, if one is named.

    Args:
        given: The options.
        open_log: Called only where a job is named.
        now_s: Since 1970; the job's deadline counts from when it was submitted.

    Raises:
        UserError: If a number makes no sense or is missing, by its option.
        UnavailableError: If Kafka is away and a job is named.
    """
    _check_rates(given)
    log = open_log() if given.job else None
    told = remaining(given.job, log, now_s) if log else Remaining()
    values = {
        "--group-size": _first(given.group_size, told.group_size),
        "--batch-size": _first(given.batch_size, told.batch_size),
        "--updates": _first(given.updates, told.updates),
        "--deadline": _first(given.deadline_s, told.deadline_s),
        "--availability": given.availability,
        "--spot-price": given.spot_usd_per_hour,
        "--on-demand-price": given.on_demand_usd_per_hour,
    }
    found = {option: value for option, value in values.items() if value is not None}
    lacking = [option for option in values if option not in found]
    if lacking:
        silent = f", and the job {given.job} does not say" if given.job else ""
        raise UserError(f"{', '.join(lacking)}: must be given{silent}")
    names, notes = tuple[str, ...](), told.notes
    if given.rates is not None:
        rates_per_s, source = read_rates(given.rates), "--rates"
    elif given.workers is not None and given.rate_per_s is not None:
        rates_per_s, source = np.full(given.workers, given.rate_per_s, np.float64), "--rate"
    elif log:
        seen = arriving(given.job, log)
        names, rates_per_s, source = seen.workers, seen.rates_per_s, "--job"
        notes += seen.notes
    with named(source):
        work = Work(
            rates_per_s,
            int(found["--group-size"]),
            int(found["--batch-size"]),
            found["--updates"],
            found["--deadline"],
        )
        prices = market(found["--on-demand-price"], found["--spot-price"], found["--availability"])
        if given.cycle_s is not None:
            prices = replace(prices, spot=replace(prices.spot, cycle_s=given.cycle_s))
    return Asked(work, prices, names, notes)


def answer(asked: Asked, *, probability: float | None, spot: int | None) -> Answer:
    """Plan: for the mean, for a probability, or not at all where N_s is given.

    Raises:
        UserError: If a number makes no sense, by its option.
    """
    if spot is not None and probability is not None:
        raise UserError("--spot, --probability: give one; --spot tells the probability, too")
    work, prices = asked.work, asked.market
    with named():
        curve = cost_curve(work, prices)
        chances = deadline_probability(work, prices.spot, curve.order)
        enough = curve.feasible
        if probability is not None:
            best = plan_with_probability(work, prices, probability)
            enough = chances >= probability
        else:
            best = plan(work, prices) if spot is None else plan_of(work, prices, spot)
    return Answer(asked, best, curve, enough, chances)


def read_rates(path: Path) -> Rates:
    """Read one rate per worker: on each line, in the column `rate` of a CSV, or as a JSON list.

    Raises:
        UserError: If the file cannot be read or holds something else, by its line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"--rates: {path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--rates: {path}: cannot be read as text: {error}") from error
    if text.lstrip().startswith(("[", "{")):
        try:
            return np.array(msgspec.json.decode(text, type=list[float]), np.float64)
        except msgspec.DecodeError as error:
            raise UserError(f"--rates: {path}: must be a JSON list of numbers: {error}") from error
    return _column(text, path)


@contextmanager
def named(rates_option: str = "--rates") -> Iterator[None]:
    """Tell what the theory refuses by the option that gave it.

    Raises:
        UserError: In place of each ParameterError.
    """
    try:
        yield
    except ParameterError as error:
        option = _OPTIONS.get(error.parameter, error.parameter)
        if error.parameter == "rates_per_s":
            option = rates_option
        problem = str(error).removeprefix(f"{error.parameter}: ")
        raise UserError(f"{option}: {problem}") from error


def _column(text: str, path: Path) -> Rates:
    reader = csv.reader(text.splitlines())
    lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    column = 0
    if lines and not _is_number(lines[0][1][0]):
        head = [cell.strip() for cell in lines.pop(0)[1]]
        if "rate" not in head:
            raise UserError(f"--rates: {path}: has no column `rate`, only {', '.join(head)}")
        column = head.index("rate")
    elif lines and len(lines[0][1]) > 1:
        raise UserError(f"--rates: {path}: has several columns: name one `rate` in the first line")
    if not lines:
        raise UserError(f"--rates: {path}: holds no rate")
    for number, cells in lines:
        if len(cells) <= column or not _is_number(cells[column]):
            raise UserError(f"--rates: {path}, line {number}: no rate in {','.join(cells)!r}")
    return np.array([float(cells[column]) for _, cells in lines])


def _check_rates(given: Given) -> None:
    if given.rates is not None and (given.workers is not None or given.rate_per_s is not None):
        raise UserError("--rates: stands instead of --workers and --rate, not beside them")
    if given.workers is not None and not 1 <= given.workers <= _MOST_WORKERS:
        raise UserError(f"--workers: must be 1 to {_MOST_WORKERS:,}, got {given.workers}")
    if given.workers is not None and given.rate_per_s is None:
        raise UserError("--rate: must be given with --workers")
    if given.rate_per_s is not None and given.workers is None:
        raise UserError("--workers: must be given with --rate")
    if given.rates is None and given.workers is None and not given.job:
        raise UserError("--workers, --rate: must be given, or --rates FILE, or --job NAME")


def _first(given: float | None, told: float | None) -> float | None:
    return told if given is None else given


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
