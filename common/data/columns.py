"""From the values of records that have names (such as JSON) to columns of numbers.

A record passes as one value for each path of each field; those of many records become a column at
once. What cannot be read is found here, with the field's name: whether a record is sound depends on
its content and the fields alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import inf, nan, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

import numpy as np

from common.data.fields import Columns, DecodedColumns, Hashed, Mapped, OneHot, Parsed, Source

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.data.fields import Field, Keys

Scalar: TypeAlias = str | int | float
Values: TypeAlias = "Sequence[Any] | npt.NDArray[Any]"  # of a path, (n,)

_WHOLE = 2.0**53  # up to here a float64 tells neighbouring whole numbers apart


def bucket_of(field: str, text: str | None, buckets: int) -> int:
    """Return the bucket of a text in a field; None: the bucket of the field's numbers.

    A text is 1 in the bucket of its field and itself. A number is in the bucket of its field alone.
    Two things may share a bucket; with many times more buckets than things, few do (Weinberger et
    al. 2009, here without their signs). The name and version of all of this is `crc32-1`.
    """
    return crc32((field if text is None else f"{field}={text}").encode()) % buckets


def damped(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return sign(x) log(1 + |x|) of numbers in their buckets, which may be counts of any size."""
    return (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32)


def text_of(value: Scalar) -> str:
    """What is hashed, mapped or compared: true as `true`, 1.0 as `1`, a text as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else repr(value)


def fits(number: float, dtype: str) -> bool:
    """Whether a dtype holds a number; of a float nothing but its size is asked."""
    return _widened(number, np.dtype(dtype)) is not None


class Column:
    """One field: which values it takes, and the column that they become."""

    def __init__(self, field: Field) -> None:
        self.source = field.source or Source(((field.name,),))
        self.shape = () if self.source.joined or self.source.reading else field.shape  # of a value
        self.field = field
        self._dtype = field.numpy_dtype
        self._readers = [_reader(self.source, keys) for keys in self.source.paths]

    def values(self, record: object) -> list[Any]:
        """One value for each path of a record that was parsed without looking at types.

        Numbers are widened where nothing is lost: 1.0 and true are whole numbers, 0 is false.

        Raises:
            ValueError: If one is absent or of another type; says what was found.
        """
        found = []
        for place, keys in enumerate(self.source.paths):
            value = record
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            found.append(self._checked(value, place, self.shape))
        return found

    def taken(
        self, place: int, values: Values, absent: npt.NDArray[np.bool_]
    ) -> tuple[Values, dict[int, str]]:
        """Return a path's values as `read` takes them, and by row why one is not sound.

        If all values are numbers, they are checked at once. Those that do not pass, and all values
        that are not numbers, are checked one by one.

        Args:
            place: Number of the path.
            values: An array if all values are numbers, or arrays of numbers.
            absent: True for each record that has no value, (n,).
        """
        cells: npt.NDArray[Any] | list[Any]
        numbers = None if self.source.reading else _numbers_of(values, self.shape)
        if numbers is not None and (self._dtype.kind == "f" or numbers.dtype.kind != "f"):
            cells, left = self._numbers_taken(place, numbers, absent)
        else:
            instead = None if self.source.reading else np.zeros(self.shape, int).tolist()
            cells, left = [instead] * len(absent), np.arange(len(absent))
        rows, reasons = left.tolist(), dict[int, str]()
        if isinstance(values, np.ndarray):
            listed = values[left].tolist()
        else:
            listed = [values[row] for row in rows]
        for row, value, none in zip(rows, listed, absent[left].tolist(), strict=True):
            try:
                cells[row] = self._checked(None if none else value, place, self.shape)
            except ValueError as error:
                reasons[row] = str(error)
        return cells, reasons

    def _numbers_taken(
        self, place: int, values: npt.NDArray[Any], absent: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
        """Return numbers as `read` takes them, and the rows that do not pass: they are zeros."""
        wrong = np.zeros(len(values), bool)
        if whole := self._dtype.kind != "f":
            low, high = _limits(self._dtype, inf)
            outside = (values < low) | (values > high)
            wrong = outside.reshape(len(values), -1).any(1) & ~absent
        if self.source.default is None:
            wrong |= absent
        values = values.astype(np.int64 if whole else np.float64)
        values[wrong] = 0
        if self.source.default is not None:
            values[absent] = self.source.default[place]
        return values, np.flatnonzero(wrong)

    def read(self, values: Sequence[Values]) -> tuple[npt.NDArray[Any], dict[int, str]]:
        """The column, (n, *shape), and which of its records are not sound, with the reason.

        Args:
            values: Of each path, (n,) each.
        """
        dtype, whole = self._dtype, self._dtype.kind != "f"
        sizes = (len(values), len(values[0]), *self.shape)
        if whole and self.source.reading is None:
            return self._whole(self._filled(values), sizes)
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = self._scaled(self._numbers(values).reshape(sizes))
            sound = np.isfinite(numbers)
            if not whole:
                sound &= np.isfinite(numbers.astype(dtype, copy=False))
            elif not isinstance(self.source.reading, OneHot):
                low, high = _limits(dtype, _WHOLE)
                inside = (numbers >= low) & (numbers <= high)
                sound &= np.asarray(inside & (numbers == np.floor(numbers)), bool)
        if sound.all():
            return self._ordered(numbers), {}
        return self._ordered(np.where(sound, numbers, 0)), self._reasons(sound, values)

    def _whole(
        self, values: Sequence[Values], sizes: tuple[int, ...]
    ) -> tuple[npt.NDArray[Any], dict[int, str]]:
        """Of whole numbers, which a parser has checked, and of floats, which may be some."""
        numbers = np.array(values, self._dtype if self.shape else None)
        if numbers.dtype.kind != "f":
            return self._ordered(numbers.reshape(sizes)), {}
        widened = [[_widened(value, self._dtype) for value in column] for column in values]
        sound = np.array([[value is not None for value in column] for column in widened])
        filled = [[value or 0 for value in column] for column in widened]
        reasons = {} if sound.all() else self._reasons(sound, values)
        return self._ordered(np.array(filled, self._dtype).reshape(sizes)), reasons

    def _filled(self, values: Sequence[Values]) -> Sequence[Values]:
        """With the default for None, which arrays do not hold any more."""
        if self.source.default is None or self.shape:
            return values
        return [
            column
            if isinstance(column, np.ndarray)
            else [instead if value is None else value for value in column]
            for instead, column in zip(map(int, self.source.default), values, strict=True)
        ]

    def _numbers(self, values: Sequence[Values]) -> npt.NDArray[Any]:
        """Not a number where the default is to stand, infinite where there is none."""
        source = self.source
        if source.reading is None:
            exact = source.default is source.scale is source.offset is None
            return np.array(values, self._dtype if exact else np.float64)
        numbers = [
            [nan if value is None else read(value) for value in column]
            for read, column in zip(self._readers, values, strict=True)
        ]
        return np.array(numbers, np.float64)

    def _scaled(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        per_path = (-1,) + (1,) * (numbers.ndim - 1)
        if self.source.default is not None:
            default = np.reshape(self.source.default, per_path)
            numbers = np.where(np.isnan(numbers), default, numbers)
        if self.source.scale is not None:
            numbers = numbers * np.reshape(self.source.scale, per_path)
        if self.source.offset is not None:
            numbers = numbers + np.reshape(self.source.offset, per_path)
        return numbers

    def _ordered(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """From (paths, n, ...) to (n, *shape)."""
        if isinstance(self.source.reading, OneHot):
            places = np.arange(len(self.source.reading.texts))
            hot: npt.NDArray[Any] = (column[0][:, None] == places).astype(self._dtype)
            return hot
        column = column.astype(self._dtype, copy=False)
        ordered: npt.NDArray[Any] = np.moveaxis(column, 0, 1) if self.source.joined else column[0]
        return ordered

    def _reasons(self, sound: npt.NDArray[np.bool_], values: Sequence[Values]) -> dict[int, str]:
        bad = np.argwhere(~sound.reshape(*sound.shape[:2], -1).all(2))
        return {
            int(row): self._refusal(values[int(place)][int(row)], int(place), self.shape)
            for place, row in reversed(bad.tolist())
        }

    def _checked(self, value: Any, place: int, shape: tuple[int, ...]) -> Any:  # noqa: ANN401 -- whatever a record holds
        """Return one value, or an item of it, as `read` takes it.

        Raises:
            ValueError: If the field does not take it; says what was found.
        """
        if value is None and self.source.default is not None:
            return np.full(shape, self.source.default[place]).tolist() if self.shape else None
        if shape and isinstance(value, bytes) and len(value) == prod(shape):
            numbers = np.frombuffer(value, np.uint8).reshape(1, *shape)
            taken, wrong = self._numbers_taken(place, numbers, np.zeros(1, bool))
            if not len(wrong):
                return taken[0]
        elif shape:
            if isinstance(value, list) and len(value) == shape[0]:
                return [self._checked(each, place, shape[1:]) for each in value]
        elif self.source.reading is not None:
            if isinstance(value, Scalar):
                return value
        elif (widened := _widened(value, self._dtype)) is not None:
            return widened
        raise ValueError(self._refusal(value, place, shape))

    def _refusal(self, value: object, place: int, shape: tuple[int, ...]) -> str:
        """Return the reason: the kind of what was found, never the value, and what is taken."""
        path = ".".join(key.replace(".", "\\.") for key in self.source.paths[place])
        where = f"field {self.field.name!r}"
        where += "" if path == self.field.name else f", {path}"
        if value is None and self.source.default is None:
            return f"{where}: is null or absent, and has no `default`"
        value = self.source.default[place] if value is None and self.source.default else value
        kind, wanted = _kind(value), self._wanted(shape)
        if kind == "a number" and wanted.startswith(kind):
            return f"{where}: a number does not fit {self._dtype.name}"
        return f"{where}: {kind} is not {wanted}"

    def _wanted(self, shape: tuple[int, ...]) -> str:
        match self.source.reading:
            case Parsed(what):
                return f"a text of a {what} that fits {self._dtype.name}"
            case Hashed():
                return "a text, a number, true or false"
            case Mapped(numbers):
                return f"one of the {len(numbers)} that `map` names; a `default` is for others"
            case OneHot(texts):
                return f"one of the {len(texts)} that `one_hot` names; `default: 0` is for others"
        wanted = f"a number that fits {self._dtype.name}"
        return wanted if not shape else f"an array of shape {list(shape)}, each {wanted}"


def assembled(
    columns: Sequence[Column],
    leaves: Sequence[Values],
    kept: Sequence[int],
    skipped: list[tuple[int, str]],
    unsound: Mapping[int, str] = MappingProxyType({}),
) -> DecodedColumns:
    """The columns of what was parsed.

    Args:
        columns: The fields.
        leaves: The values of each path, field by field, (n,) each.
        kept: Which values they came from, (n,).
        skipped: Which values could not be parsed, and why.
        unsound: Which of what was parsed is not sound for another reason, by its place.
    """
    records, begin = Columns(), 0
    for column in columns:
        end = begin + len(column.source.paths)
        records[column.field.name], reasons = column.read(leaves[begin:end])
        unsound = {**reasons, **unsound}
        begin = end
    where = np.array(kept, np.intp)
    if unsound:
        sound = np.ones(len(kept), bool)
        sound[list(unsound)] = False
        skipped = sorted([*skipped, *((kept[row], why) for row, why in unsound.items())])
        records = {name: column[sound] for name, column in records.items()}
        where = where[sound]
    return DecodedColumns(records, where, skipped)


def _numbers_of(values: Values, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
    """Return values as one array, (n, *shape), or None if they are not all of this shape."""
    if isinstance(values, np.ndarray):
        return values if values.shape[1:] == shape else None
    if shape and set(map(type, values)) == {bytes} and set(map(len, values)) == {prod(shape)}:
        return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), *shape)
    return None


def _kind(value: object) -> str:
    """Return what a value is in JSON's words, without the value."""
    match value:
        case str():
            return "a text"
        case bool() | np.bool_():
            return "a boolean"
        case dict():
            return "an object"
        case bytes() | list() | np.ndarray():
            return "an array"
    return "null" if value is None else "a number"


def _reader(source: Source, keys: Keys) -> Callable[[Scalar], float]:
    """How a value becomes a number; not a number where it does not."""
    match source.reading:
        case Hashed(buckets):
            field = ".".join(keys)
            return lambda value: bucket_of(field, text_of(value), buckets)
        case Mapped(numbers):
            return lambda value: numbers.get(text_of(value), nan)
        case OneHot(texts):
            places = {text: float(place) for place, text in enumerate(texts)}
            return lambda value: places.get(text_of(value), nan)
        case Parsed("time"):
            return seconds_of
    return _number


def _number(value: Scalar) -> float:
    """Not a number where it says so or is empty, infinite where it is none."""
    if not value and isinstance(value, str):
        return nan
    try:
        return inf if isinstance(value, str) and "_" in value else float(value)
    except (ValueError, OverflowError):
        return inf


def seconds_of(value: Scalar) -> float:
    """Since 1970; a time without a zone is UTC, and a number is seconds already."""
    if not value or not isinstance(value, str):
        return _number(value)
    try:
        time = datetime.fromisoformat(value)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return inf


def _widened(value: object, dtype: np.dtype[Any]) -> float | None:
    """A number as this dtype has it, or None where it does not have it."""
    if not isinstance(value, int | float):
        return None
    if dtype.kind == "f":
        return _number(value)
    if isinstance(value, float) and not value.is_integer():
        return None
    low, high = _limits(dtype, inf)
    return int(value) if low <= value <= high else None


def _limits(dtype: np.dtype[Any], most: float) -> tuple[float, float]:
    if dtype.kind == "b":
        return 0, 1
    limits = np.iinfo(dtype)
    return max(int(limits.min), -most), min(int(limits.max), most)
