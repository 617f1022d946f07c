"""Read the bytes of many records side by side: each step reads one value of each record.

So a step costs a few calls of numpy, however many records there are. An invalid record keeps its
first reason, and its position moves to its end. The values read from it are zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from common.data.fields import Keys

Rows: TypeAlias = npt.NDArray[np.intp]  # record indexes, ascending
# One value per row. Numbers, and arrays of numbers of one shape, are in an array. Bytes are always
# `bytes` in a list, because their length may differ between records.
Values: TypeAlias = npt.NDArray[Any] | list[Any]

# Zeros after the last record, because a number may be read past its end.
_BEYOND = 16
# Bytes of a varint of 64 bits.
_LONGEST = 10


class Sink:
    """Collects the values of one path."""

    def __init__(self) -> None:
        self._parts = list[tuple[Rows, Values]]()

    def add(self, rows: Rows, values: Values) -> None:
        """Add the values of some records. They replace earlier values of these records."""
        self._parts.append((rows, values))

    def absent(self, count: int) -> npt.NDArray[np.bool_]:
        """Return True for each of `count` records that has no value, (count,)."""
        absent = np.ones(count, bool)
        for rows, _ in self._parts:
            absent[rows] = False
        return absent

    def cells(self, count: int) -> tuple[Values, npt.NDArray[np.bool_]]:
        """Return the values of all records, and True for each record without a value.

        The values are an array if all are numbers of one kind and shape, otherwise a list.
        """
        absent = self.absent(count)
        if len(self._parts) == 1 and len(self._parts[0][1]) == count:
            return self._parts[0][1], absent
        arrays = [values for _, values in self._parts if isinstance(values, np.ndarray)]
        kinds = {(array.dtype.kind, array.shape[1:]) for array in arrays}
        if len(arrays) == len(self._parts) and len(kinds) == 1:
            column = np.zeros((count, *arrays[0].shape[1:]), np.result_type(*arrays))
            for rows, values in self._parts:
                column[rows] = values
            return column, absent
        cells: list[Any] = [None] * count
        for rows, values in self._parts:
            listed = values.tolist() if isinstance(values, np.ndarray) else values
            for row, value in zip(rows.tolist(), listed, strict=True):
                cells[row] = value
        return cells, absent

    def of(self, rows: Rows, count: int) -> Values:
        """Return the values of these rows, out of `count` records; None stands for absent ones."""
        cells, absent = self.cells(count)
        if isinstance(cells, np.ndarray):
            if not absent[rows].any():
                return cells[rows]
            cells = [None if no else cell for cell, no in zip(cells.tolist(), absent, strict=True)]
        return [cells[row] for row in rows.tolist()]


class Wanted(NamedTuple):
    """Values to read: the value itself into a sink, and the values inside it by name."""

    sink: Sink | None
    inner: dict[str, Wanted]


def wanted_of(paths: Iterable[Keys]) -> tuple[Wanted, list[Sink]]:
    """Return the tree of wanted values of a record, and the sink of each path."""
    root, sinks = Wanted(None, {}), list[Sink]()
    for keys in paths:
        level = root.inner
        for key in keys[:-1]:
            level = level.setdefault(key, Wanted(None, {})).inner
        here = level.get(keys[-1], Wanted(None, {}))
        here = level[keys[-1]] = Wanted(here.sink or Sink(), here.inner)
        sinks.append(here.sink or Sink())
    return root, sinks


class RecordBytes:
    """The read position of each record in its bytes.

    Args:
        values: The records.
        begin: Number of bytes to skip at the beginning of each record.
    """

    def __init__(self, values: Sequence[bytes], begin: Sequence[int] | int = 0) -> None:
        self._joined = b"".join(values)
        self._bytes = np.frombuffer(self._joined + bytes(_BEYOND), np.uint8)
        sizes = np.fromiter(map(len, values), np.intp, len(values))
        self._ends = np.cumsum(sizes)
        self._at = self._ends - sizes + begin
        self.rows: Rows = np.arange(len(values))
        # Keyed by row.
        self.reasons = dict[int, str]()

    def refuse(self, rows: Rows, reason: str) -> None:
        """Mark these records as invalid."""
        for row in rows.tolist():
            self.reasons.setdefault(row, reason)
        self._at[rows] = self._ends[rows]

    def enter(self, rows: Rows, sizes: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        """Set temporary ends `sizes` bytes ahead, and return the previous ends for `leave`."""
        before, self._ends = self._ends, self._ends.copy()
        wrong = (sizes < 0) | (sizes > self.left(rows))
        self._ends[rows] = np.where(wrong, before[rows], self.places(rows) + sizes)
        if wrong.any():
            self.refuse(rows[wrong], "the record ends too early")
        return before

    def leave(self, before: npt.NDArray[np.intp]) -> None:
        """Restore the ends that `enter` returned."""
        self._ends = before

    def places(self, rows: Rows) -> npt.NDArray[np.intp]:
        """Return the read positions of these records."""
        return self._at if len(rows) == len(self._at) else self._at[rows]

    def left(self, rows: Rows) -> npt.NDArray[np.intp]:
        """Return the number of bytes left in each of these records."""
        ends = self._ends if len(rows) == len(self._ends) else self._ends[rows]
        return ends - self.places(rows)

    def pass_over(self, rows: Rows, sizes: npt.NDArray[Any] | int) -> None:
        """Skip this number of bytes in each record."""
        if isinstance(sizes, np.ndarray) and (bad := sizes < 0).any():
            self.refuse(rows[bad], "a length in the record is negative")
            sizes = np.where(bad, 0, sizes)
        room = self.left(rows)
        short = sizes > room
        if short.any():
            self.refuse(rows[short], "the record ends too early")
            sizes = np.where(short, 0, sizes)
        self._move(rows, sizes)

    def numbers(self, rows: Rows, dtype: str) -> npt.NDArray[Any]:
        """Read one fixed-width number of each record."""
        width, at = np.dtype(dtype).itemsize, self.places(rows)
        size = len(self._bytes) - width + 1
        numbers: npt.NDArray[Any] = np.ndarray((size,), dtype, self._bytes, strides=(1,))[at]
        self.pass_over(rows, width)
        return numbers

    def varints(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """Read one varint of each record: 7 bits per byte, lowest bits first."""
        at = self.places(rows)
        first = self._bytes[at]
        numbers = (first & 127).astype(np.uint64)
        going = np.flatnonzero(first > 127)
        sizes: npt.NDArray[Any] | int = 1
        if len(going):
            sizes = np.ones(len(rows), np.intp)
            for place in range(1, _LONGEST):
                byte = self._bytes[at[going] + place]
                numbers[going] |= (byte & 127).astype(np.uint64) << np.uint64(7 * place)
                sizes[going] = place + 1
                going = going[byte > 127]
                if not len(going):
                    break
            else:
                self.refuse(rows[going], "a number in the record has more than 64 bits")
                numbers[going] = 0
                sizes[going] = 0
        self.pass_over(rows, sizes)
        return numbers

    def zigzags(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Read one zigzag integer of each record: its lowest bit is the sign."""
        return unzigzagged(self.varints(rows))

    def blocks(self, rows: Rows, size: int) -> npt.NDArray[np.uint8]:
        """Read `size` bytes of each record, (rows, size)."""
        if not size or size > len(self._bytes):
            self.pass_over(rows, size)
            return np.zeros((len(rows), size if not size else 0), np.uint8)
        shape = (len(self._bytes) - size + 1, size)
        windows = np.ndarray(shape, np.uint8, self._bytes, strides=(1, 1))
        blocks: npt.NDArray[np.uint8] = windows[np.minimum(self.places(rows), shape[0] - 1)]
        self.pass_over(rows, size)
        return blocks

    def sized(self, rows: Rows, sizes: npt.NDArray[Any] | int) -> list[bytes]:
        """Read `sizes` bytes of each record."""
        begin = self.places(rows).tolist()
        self.pass_over(rows, sizes)
        joined = self._joined
        return [joined[at:end] for at, end in zip(begin, self.places(rows).tolist(), strict=True)]

    def texts(self, rows: Rows, sizes: npt.NDArray[Any]) -> list[str]:
        """Read one UTF-8 text of each record."""
        texts, wrong = list[str](), list[int]()
        for row, data in zip(rows.tolist(), self.sized(rows, sizes), strict=True):
            try:
                texts.append(data.decode())
            except UnicodeDecodeError:
                texts.append("")
                wrong.append(row)
        if wrong:
            self.refuse(np.array(wrong), "a text in the record is not UTF-8")
        return texts

    def _move(self, rows: Rows, sizes: npt.NDArray[Any] | int) -> None:
        if len(rows) == len(self._at):
            self._at = self._at + sizes
        else:
            self._at[rows] += sizes


def unzigzagged(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Decode zigzag integers, whose lowest bit is the sign."""
    halves = (numbers >> np.uint64(1)).view(np.int64)
    signed: npt.NDArray[np.int64] = halves ^ -(numbers & np.uint64(1)).view(np.int64)
    return signed


def lists_of(rows: Rows, steps: list[tuple[Rows, Values]]) -> Values:
    """Return the list of each row, from steps that each have one item of some rows."""
    kinds = {
        (values.dtype, values.shape) if isinstance(values, np.ndarray) else None
        for _, values in steps
    }
    if len(kinds) == 1 and None not in kinds and all(len(these) == len(rows) for these, _ in steps):
        return np.stack([values for _, values in steps], axis=1)
    lists: dict[int, list[Any]] = {row: [] for row in rows.tolist()}
    for these, values in steps:
        listed = values.tolist() if isinstance(values, np.ndarray) else values
        for row, value in zip(these.tolist(), listed, strict=True):
            lists[row].append(value)
    return list(lists.values())
