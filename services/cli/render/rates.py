"""Reads the file of `doll plan --rates`: one rate per worker."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING

import msgspec

from common.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


def read_rates(path: Path) -> list[float]:
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
            return msgspec.json.decode(text, type=list[float])
        except msgspec.DecodeError as error:
            raise UserError(f"--rates: {path}: must be a JSON list of numbers: {error}") from error
    return _column(text, path)


def _column(text: str, path: Path) -> list[float]:
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
    return [float(cells[column]) for _, cells in lines]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
