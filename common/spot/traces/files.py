"""Formats of recorded prices, availability and arrivals, and their conversion to traces.

| the file's contents                               | meaning                                    |
| ------------------------------------------------- | ------------------------------------------ |
| header with `timestamp`, `price_usd_per_hour`     | price records of many series               |
| header that begins with `step`                    | a grid of 300 s, one series per column     |
| header that begins with `seconds` or `hours`      | one series per column                      |
| no header, two numbers                            | a value at a time in seconds, or in hours  |
|                                                   | if the file's name has that word           |
| no header, date, time, number                     | a value by the clock                       |
| no header, milliseconds, `add` or `remove`, name  | machines that come and go: their number    |
| JSON, `metadata.gap_seconds` and lists            | `data` (availability) or `prices`          |

All of them may be compressed (.gz, .xz). If rows are at equal distances, a missing row is an error,
and the last value holds for one distance more. Otherwise the last row only ends the trace; for
price records, the last row of the file ends all series. A series that is shorter than its table
ends with its last value.
"""

from __future__ import annotations

import csv
import io
import json
import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from common.data.readers import read_bytes
from common.data.tables import parses
from common.errors import UserError
from common.spot.traces.trace import Floats, Trace, trace_from_rows, usual_gap_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from common.spot.traces.spec import TraceSpec

_TIMESTAMP, _PRICE = "timestamp", "price_usd_per_hour"
_UNIT_S = {"step": 300.0, "seconds": 1.0, "hours": 3600.0}
# Number of choices in a message; a list of hundreds would hide them.
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class _Row:
    # Row number in the file, as in an editor.
    number: int
    cells: list[str]


_contents: ContextVar[dict[Path, dict[str, object] | list[_Row]] | None]
# Contents of the files that were read within `read_once`; None outside of it.
_contents = ContextVar("contents", default=None)


def traced(spec: TraceSpec, folder: Path) -> Trace:
    """Read a user's trace, at its replay speed.

    Args:
        spec: File, series, column and speed.
        folder: Folder of its file.

    Raises:
        UserError: If the trace does not exist.
    """
    return read_trace(folder / spec.file, spec.series, spec.column).faster(spec.speed)


def starts_of(
    spec: TraceSpec,
    trace: Trace,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    common_s: Floats | None = None,
) -> Floats:
    """Return each reader's starting time in the trace, on the clock of `trace`.

    Args:
        spec: Its `start_s` is on the clock of the file; None for a uniform draw.
        trace: Result of `traced` for `spec`.
        shape: Shape of the result.
        rng: Source of the draws.
        common_s: (R,) starts, on the clock of the files, for all recordings of a run without a
            start of their own. `shape` is (R,) or (R, 1) then.

    Raises:
        UserError: If the trace ends before `start_s`.
    """
    if spec.start_s is None:
        if common_s is not None:
            return common_s.reshape(shape) / spec.speed
        return rng.uniform(0, trace.end_s, shape)
    start_s = spec.start_s / spec.speed
    if start_s >= trace.end_s:
        length_s = trace.end_s * spec.speed
        raise UserError(
            f"start_s: must be below {length_s:g}, the length of {trace.source}, got"
            f" {spec.start_s:g}"
        )
    return np.full(shape, start_s)


def common_starts_s(
    specs: Sequence[TraceSpec], folder: Path, count: int, seed: int | np.random.Generator
) -> Floats:
    """Draw common starts of the recordings that have no start of their own.

    Args:
        specs: The recordings.
        folder: Folder of their files.
        count: Number of starts.
        seed: Seed of the draws.

    Returns:
        (count,) seconds, on the clock of the files; 0 if all recordings have a start.

    Raises:
        UserError: If a recording does not exist.
    """
    ends_s = [traced(spec, folder).end_s * spec.speed for spec in specs if spec.start_s is None]
    return np.random.default_rng(seed).uniform(0, min(ends_s, default=0.0), count)


@contextmanager
def read_once() -> Iterator[None]:
    """Read each file only once within this context, for any number of its series.

    The contents stay in memory until its end: some hundred bytes for each row.
    """
    token = _contents.set({})
    try:
        yield
    finally:
        _contents.reset(token)


def _content(path: Path) -> dict[str, object] | list[_Row]:
    kept = _contents.get()
    if kept is not None and path in kept:
        return kept[path]
    try:
        text = read_bytes(path).decode("utf-8-sig")
        found: dict[str, object] | list[_Row]
        if text.lstrip().startswith("{"):
            found = json.loads(text)
        else:
            reader = csv.reader(io.StringIO(text, newline=""))
            found = [_Row(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise UserError(f"{path.name}: must be CSV or JSON in UTF-8: {error}") from error
    if kept is not None:
        kept[path] = found
    return found


def read_trace(path: Path, series: Mapping[str, str] | None = None, column: str = "") -> Trace:
    """Read one series of a file. Its contents decide the format.

    Args:
        path: The file.
        series: For price records, values of the columns that select one series.
        column: For tables and JSON, the column or list, if there are several.

    Raises:
        UserError: If the file or series is missing, the series is ambiguous, or it makes no trace.
    """
    source = path.name
    there = _content(path)
    if isinstance(there, dict):
        _no_series(series, source)
        return _json_trace(there, column or "data", source)
    rows = there
    if not rows:
        raise UserError(f"{source}: has no rows")
    first = rows[0].cells
    for row in rows:
        if len(row.cells) != len(first):
            counts = f"{len(row.cells)} cells, but the first row has {len(first)}"
            raise UserError(f"{source}: row {row.number} has {counts}")
    if _TIMESTAMP in first and _PRICE in first:
        _no_column(column, source)
        return _price_records(first, rows[1:], series or {}, source)
    if first[0] in _UNIT_S:
        _no_series(series, source)
        return _table(first, rows[1:], column, source)
    # Check first that the file is a trace at all.
    found = _without_header(rows, source)
    _no_series(series, source)
    _no_column(column, source)
    return found


def _without_header(rows: Sequence[_Row], source: str) -> Trace:
    first = rows[0].cells
    if len(first) == 2 and parses(float, first[0]):
        unit = "hours" if "hours" in source else "seconds"
        return _table([unit, "value"], rows, "value", source)
    if len(first) == 3 and parses(float, first[0]) and first[1] in ("add", "remove"):
        return _membership(rows, source)
    if len(first) == 3 and parses(datetime.fromisoformat, first[0]):
        times = _parsed(rows, lambda cells: _clock_s(f"{cells[0]}T{cells[1]}"), source)
        values = _parsed(rows, lambda cells: float(cells[2]), source)
        return trace_from_rows(times, values, _numbers(rows), source)
    raise UserError(
        f"{source}: is not in a known format, got {','.join(first)[:80]!r}; the simplest is a CSV"
        " file with the header `seconds,value`"
    )


def _price_records(
    header: list[str], rows: Sequence[_Row], series: Mapping[str, str], source: str
) -> Trace:
    names = [name for name in header if name not in (_TIMESTAMP, _PRICE)]
    found = list(rows)
    for name, value in series.items():
        if name not in names:
            problem = f"has no column {name!r}; choose one of {_choices(names)}"
            raise UserError(f"series: {source} {problem}")
        cell = header.index(name)
        there = {row.cells[cell] for row in found}
        if value not in there:
            raise UserError(
                f"series: {source} has no {name} {value!r}; choose one of {_choices(there)}"
            )
        found = [row for row in found if row.cells[cell] == value]
    left = {name: {row.cells[header.index(name)] for row in found} for name in names}
    several = [f"{name} ({_choices(there)})" for name, there in left.items() if len(there) > 1]
    if several:
        raise UserError(f"series: {source} has more than one; select one by {', '.join(several)}")
    if len(found) < 2:
        raise UserError(f"{source}: the series must have at least 2 records, got {len(found)}")
    at, price = header.index(_TIMESTAMP), header.index(_PRICE)
    times = _parsed(found, lambda cells: _clock_s(cells[at]), source)
    prices = _parsed(found, lambda cells: float(cells[price]), source)
    # The last price of a series was still in force when the recording of all of them ended.
    (end_s,) = _parsed(rows[-1:], lambda cells: _clock_s(cells[at]), source)
    return trace_from_rows(times, prices, _numbers(found), source, end_s=end_s)


def _table(header: list[str], rows: Sequence[_Row], column: str, source: str) -> Trace:
    if not column and len(header) == 2:
        column = header[1]
    if column not in header[1:]:
        asked = f"has no column {column!r}" if column else "has several columns"
        raise UserError(f"column: {source} {asked}; choose one of {_choices(header[1:])}")
    cell = header.index(column)
    held = list(rows)
    while held and not held[-1].cells[cell]:
        held.pop()
    for row in held:
        if not row.cells[cell]:
            problem = f"has no value in column {column!r}, but later rows have"
            raise UserError(
                f"{source}: row {row.number} {problem}; fill it, or end the trace there"
            )
    unit_s = _UNIT_S[header[0]]
    times = _parsed(held, lambda cells: float(cells[0]) * unit_s, source)
    values = _parsed(held, lambda cells: float(cells[cell]), source)
    gap_s = unit_s if header[0] == "step" else usual_gap_s(times)
    return trace_from_rows(times, values, _numbers(held), source, gap_s=gap_s)


def _membership(rows: Sequence[_Row], source: str) -> Trace:
    there: set[str] = set()
    counts = []
    for row in rows:
        _, what, name = row.cells
        if what not in ("add", "remove") or (name in there) == (what == "add"):
            state = "was added before" if name in there else "was not added"
            raise UserError(f"{source}: row {row.number} says {what!r} of {name}, which {state}")
        there ^= {name}
        counts.append(float(len(there)))
    times = _parsed(rows, lambda cells: float(cells[0]) / 1000, source)
    return trace_from_rows(times, counts, _numbers(rows), source)


def _json_trace(document: Mapping[str, object], name: str, source: str) -> Trace:
    metadata, values = document.get("metadata"), document.get(name)
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if not isinstance(gap_s, int | float) or not 0 < gap_s < math.inf:
        raise UserError(f"{source}: metadata.gap_seconds must be a number above 0, got {gap_s!r}")
    if not isinstance(values, list):
        lists = [key for key, value in document.items() if isinstance(value, list)]
        raise UserError(f"column: {source} has no list {name!r}; choose one of {_choices(lists)}")
    for number, value in enumerate(values, start=1):
        if not isinstance(value, int | float):
            raise UserError(f"{source}: row {number} of {name!r} must be a number, got {value!r}")
    times = [tick * float(gap_s) for tick in range(len(values))]
    rows = range(1, len(values) + 1)
    return trace_from_rows(times, values, rows, source, gap_s=float(gap_s))


def _parsed(rows: Iterable[_Row], parse: Callable[[list[str]], float], source: str) -> list[float]:
    numbers = []
    for row in rows:
        try:
            numbers.append(parse(row.cells))
        except ValueError as error:
            raise UserError(f"{source}: row {row.number} cannot be read: {error}") from error
    return numbers


def _clock_s(moment: str) -> float:
    when = datetime.fromisoformat(moment)
    # Only differences matter. A time without a zone counts as UTC, not as this machine's time.
    return when.replace(tzinfo=when.tzinfo or UTC).timestamp()


def _numbers(rows: Iterable[_Row]) -> list[int]:
    return [row.number for row in rows]


def _choices(names: Iterable[str]) -> str:
    names = sorted(set(names))
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _no_series(series: Mapping[str, str] | None, source: str) -> None:
    if series:
        raise UserError(f"series: {source} has only one series; remove `series`")


def _no_column(column: str, source: str) -> None:
    if column:
        raise UserError(f"column: {source} has only one column; remove `column`")
