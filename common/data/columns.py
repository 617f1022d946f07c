"""Turn the values of records with named fields, such as JSON, into columns of numbers.

A record provides one value for each path of each field. The values of many records become a column
in one step. Errors name the field. Only a record's content and the fields decide if the record is
valid.
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
Values: TypeAlias = "Sequence[Any] | npt.NDArray[Any]"  # (n,), values of a path

# Up to this number, float64 has every integer.
_WHOLE = 2.0**53


def bucket_of(field: str, text: str | None, buckets: int) -> int:
    """Return the bucket of a text in a field, or the bucket of the field's numbers if text is None.

    A text counts as 1 in a bucket chosen by its field and itself. All numbers of a field share one
    bucket. Two features may collide; with many times more buckets than features, few do (Weinberger
    et al. 2009, here without signs). The name and version of this scheme is `crc32-1`.
    """
    return crc32((field if text is None else f"{field}={text}").encode()) % buckets


def damped(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return sign(x) log(1 + |x|), because numbers in buckets may be counts of any size."""
    return (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32)


def text_of(value: Scalar) -> str:
    """Return the text to hash, map or compare: `true` for true, `1` for 1.0, a text unchanged."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else repr(value)


def fits(number: float, dtype: str) -> bool:
    """Return True if a dtype can hold a number. Floats are checked for size, not for precision."""
    return _widened(number, np.dtype(dtype)) is not None


class Column:
    """One field: checks its values and turns them into a column."""

    def __init__(self, field: Field) -> None:
        self.source = field.source or Source(((field.name,),))
        # Shape of one value.
        self.shape = () if self.source.joined or self.source.reading else field.shape
        self.field = field
        self._dtype = field.numpy_dtype
        self._readers = [_reader(self.source, keys) for keys in self.source.paths]

    def values(self, record: object) -> list[Any]:
        """Return one value per path of a record that was parsed without type checks.

        Numbers are converted if nothing is lost: 1.0 and true are integers, 0 is false.

        Raises:
            ValueError: If a value is absent or has the wrong type. The message says what was found.
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
        """Return a path's values in the form that `read` expects, and the reasons of bad rows.

        If all values are numbers, they are checked at once. Those that do not pass, and all values
        that are not numbers, are checked one by one.

        Args:
            place: Index of the path.
            values: An array if all values are numbers, or arrays of numbers.
            absent: True for each record without a value, (n,).
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
        """Return numbers in the form that `read` expects, and the rows that failed, set to zero."""
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
        """Return the column, (n, *shape), and the reasons of bad records by row.

        Args:
            values: Values of each path, (n,) each.
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
        """Return the column of an integer field, and the reasons of bad rows.

        The parser checked all values except floats. A float is accepted if it is a whole number
        that the dtype can hold.
        """
        numbers = np.array(values, self._dtype if self.shape else None)
        if numbers.dtype.kind != "f":
            return self._ordered(numbers.reshape(sizes)), {}
        widened = [[_widened(value, self._dtype) for value in column] for column in values]
        sound = np.array([[value is not None for value in column] for column in widened])
        filled = [[value or 0 for value in column] for column in widened]
        reasons = {} if sound.all() else self._reasons(sound, values)
        return self._ordered(np.array(filled, self._dtype).reshape(sizes)), reasons

    def _filled(self, values: Sequence[Values]) -> Sequence[Values]:
        """Replace None by the default. Arrays contain no None."""
        if self.source.default is None or self.shape:
            return values
        return [
            column
            if isinstance(column, np.ndarray)
            else [instead if value is None else value for value in column]
            for instead, column in zip(map(int, self.source.default), values, strict=True)
        ]

    def _numbers(self, values: Sequence[Values]) -> npt.NDArray[Any]:
        """Return numbers: NaN where the default applies, infinity where a value is not a number."""
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
        """Move axes from (paths, n, ...) to (n, *shape)."""
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

    def _checked(self, value: Any, place: int, shape: tuple[int, ...]) -> Any:  # noqa: ANN401 -- any value of a record
        """Return one value, or an item of it, in the form that `read` expects.

        Raises:
            ValueError: If the field does not accept the value. The message says what was found.
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
        """Return the reason: the type found, never the value, and the type expected."""
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
    """Build columns from parsed values.

    Args:
        columns: The fields.
        leaves: Values of each path, field by field, (n,) each.
        kept: Index of the record that each row came from, (n,).
        skipped: Index and reason of each record that could not be parsed.
        unsound: Reasons by row of parsed records that are bad for another reason.
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
    """Return values as one array, (n, *shape), or None if not all have this shape."""
    if isinstance(values, np.ndarray):
        return values if values.shape[1:] == shape else None
    if shape and set(map(type, values)) == {bytes} and set(map(len, values)) == {prod(shape)}:
        return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), *shape)
    return None


def _kind(value: object) -> str:
    """Return a value's type in JSON's terms, without the value."""
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
    """Return the function that turns a value into a number, or into NaN if it cannot."""
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
    """Return NaN for NaN or an empty text, and infinity if the value is not a number."""
    if not value and isinstance(value, str):
        return nan
    try:
        return inf if isinstance(value, str) and "_" in value else float(value)
    except (ValueError, OverflowError):
        return inf


def seconds_of(value: Scalar) -> float:
    """Return seconds since 1970. A time without a zone is UTC; a number is seconds already."""
    if not value or not isinstance(value, str):
        return _number(value)
    try:
        time = datetime.fromisoformat(value)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return inf


def _widened(value: object, dtype: np.dtype[Any]) -> float | None:
    """Return a number converted to this dtype, or None if the dtype cannot hold it."""
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
