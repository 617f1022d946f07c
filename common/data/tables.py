"""Read CSV as records. The same rules apply to every cell, so all files are read the same way.

- The first row is a header if none of its cells is a number.
- A column of numbers is one feature, unchanged; an empty cell is 0. The label is an integer.
- Columns of symbols need the job's `records.fields`. For these, rows are sent as JSON objects. A
  cell is a number if it reads as one, null if it is empty, and otherwise a text.
- Features keep the order of the columns.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from common.data.records import Records, checked
from common.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt


Column: TypeAlias = "npt.NDArray[np.str_]"  # (n,) cells

# A number as JSON writes it, so 007 is a text.
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d{1,2})?")
_ROWS = "use `--rows` to send rows unchanged, for the job's records.fields to parse"


def table_records(
    data: bytes, source: str, *, label: str | None, leave_out: Sequence[str]
) -> Records:
    """Parse CSV. Columns are chosen by name or index; the default label is the last column.

    Raises:
        UserError: If the table is invalid, or lacks one of the columns.
    """
    names, columns = _columns(data, source)
    label_index = _find("-1" if label is None else label, names, source)
    left_out = {_find(column, names, source) for column in leave_out}
    features = [
        _features(column, f"{source}: column {name!r}")
        for index, (name, column) in enumerate(zip(names, columns, strict=True))
        if index != label_index and index not in left_out
    ]
    if not features:
        raise UserError(f"{source}: no column is left for features")
    labels = _labels(columns[label_index], f"{source}: label column {names[label_index]!r}")
    return checked({"features": np.concatenate(features, axis=1), "label": labels}, source)


def row_records(
    data: bytes, source: str, leave_out: Sequence[str], texts: Sequence[str] = ()
) -> Records:
    """Return each row of a CSV file as a JSON object, with the header's names as keys.

    Args:
        data: The file.
        source: The file's name.
        leave_out: Columns that are not sent.
        texts: Patterns, such as `C*`, of columns whose cells are texts even if they are numbers.

    Returns:
        row (n,), bytes.

    Raises:
        UserError: If the table is invalid, or lacks one of the columns.
    """
    names, columns = _columns(data, source)
    left_out = {_find(column, names, source) for column in leave_out}
    kept = [index for index in range(len(names)) if index not in left_out]
    encode = msgspec.json.Encoder().encode
    named = [names[index] for index in kept]
    cells = list[list[object]]()
    for name, index in zip(named, kept, strict=True):
        read = str if _is_text(name, texts) else _cell
        cells.append([read(cell) if cell else None for cell in columns[index].tolist()])
    rows = np.empty(len(columns[0]), object)
    rows[:] = [encode(dict(zip(named, row, strict=True))) for row in zip(*cells, strict=True)]
    return checked({"row": rows}, source)


def _is_text(name: str, texts: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in texts)


def _cell(cell: str) -> object:
    return msgspec.Raw(cell.encode()) if _NUMBER.fullmatch(cell) else cell


def _columns(data: bytes, source: str) -> tuple[list[str], list[Column]]:
    try:
        rows = [row for row in csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{source}: is not CSV in UTF-8: {error}") from error
    if not rows:
        raise UserError(f"{source}: contains no rows")
    width = len(rows[0])
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise UserError(f"{source}: row {number} has {len(row)} cells, the first has {width}")
    names = [str(index) for index in range(width)]
    if not any(parses(float, cell) for cell in rows[0]):
        names, rows = [cell.strip() for cell in rows[0]], rows[1:]
    if not rows:
        raise UserError(f"{source}: contains a header but no rows")
    cells = zip(*rows, strict=True)
    return names, [np.char.strip(np.array(column, dtype=np.str_)) for column in cells]


def _find(column: str, names: Sequence[str], source: str) -> int:
    if column in names:
        return names.index(column)
    try:
        return range(len(names))[int(column)]
    except (ValueError, IndexError) as error:
        raise UserError(f"{source}: no column {column!r}; there are {', '.join(names)}") from error


def _features(column: Column, where: str) -> npt.NDArray[np.float32]:
    numbers = _numbers(column)
    if numbers is None:
        raise UserError(f"{where}: must contain only numbers; {_ROWS}")
    if not (np.abs(numbers) <= np.finfo(np.float32).max).all():
        raise UserError(f"{where}: contains a number that is not finite as float32")
    return numbers.astype(np.float32)[:, np.newaxis]


def _labels(column: Column, where: str) -> npt.NDArray[np.int64]:
    if (column == "").any():
        raise UserError(f"{where}: row {int(np.argmax(column == '')) + 1} has no label")
    numbers = _numbers(column)
    if numbers is None:
        raise UserError(f"{where}: must contain only numbers; {_ROWS}")
    if not (np.isfinite(numbers).all() and (numbers == np.floor(numbers)).all()):
        raise UserError(f"{where}: labels must be whole numbers, found fractions")
    return numbers.astype(np.int64)


def _numbers(column: Column) -> npt.NDArray[np.float64] | None:
    try:
        return np.where(column == "", "0", column).astype(np.float64)
    except ValueError:
        return None


def parses(parse: Callable[[str], object], cell: str) -> bool:
    """Return True if a cell can be parsed, such as to a number or a time."""
    try:
        parse(cell)
    except ValueError:
        return False
    return True
