"""Records from bytes and back: what a producer wrote becomes columns, and what is broken is named.

Whether a record decodes depends on its bytes and the fields alone, so every reader of an address
skips the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from common.core.hashing import bucket_of, damped
from common.errors import UserError
from common.learning.fields import Columns, Field, check_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came out of some values.

    A column may be a read-only view of all the values' bytes, and strided: see `concatenate`.
    """

    records: Columns  # per field: (n, *shape)
    kept: npt.NDArray[np.intp]  # (n,) which values the records came from, ascending
    skipped: list[tuple[int, str]]  # which values did not decode, and why


class Codec(Protocol):
    """One way to write records."""

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Turn values into columns; never raises on any bytes."""

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Turn columns into values.

        Raises:
            ValueError: If a field is missing or does not have the described shape and dtype.
        """


class TensorCodec:
    """Fixed-size records: the fields one after the other, packed, little-endian."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = tuple(fields)
        # A bool is read as a byte: one that is neither 0 nor 1 must not reach numpy or torch.
        self._table = np.dtype(
            [
                (field.name, np.uint8 if field.dtype == "bool" else field.numpy_dtype, field.shape)
                for field in fields
            ]
        )

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Turn values into columns, all of them views of one joined buffer."""
        size = self._table.itemsize
        whole = [value for value in values if value is not None and len(value) == size]
        if len(whole) == len(values):
            kept, skipped = np.arange(len(values)), []
        else:
            kept = np.flatnonzero([value is not None and len(value) == size for value in values])
            skipped = [
                (index, _why_not(value, size))
                for index, value in enumerate(values)
                if value is None or len(value) != size
            ]
        table = np.frombuffer(b"".join(whole), self._table)
        records = {
            field.name: table[field.name] != 0 if field.dtype == "bool" else table[field.name]
            for field in self._fields
        }
        return Decoded(records, kept, skipped)

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Turn columns into values."""
        count, size = check_columns(self._fields, records), self._table.itemsize
        table = np.empty(count, self._table)
        for field in self._fields:
            table[field.name] = records[field.name]
        data = table.tobytes()
        return [data[start : start + size] for start in range(0, count * size, size)]


class JsonCodec:
    """A JSON object per record, arrays as nested lists; keys that no field names are ignored."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = tuple(fields)
        # The parser checks types, ranges and lengths as it goes and names the field in its errors.
        # Attributes are numbered because a field's name need not be an identifier.
        self._attributes = [f"field_{number}" for number in range(len(fields))]
        row = msgspec.defstruct(
            "Record",
            [
                (name, _json_type(field))
                for name, field in zip(self._attributes, fields, strict=True)
            ],
            rename=dict(zip(self._attributes, [field.name for field in fields], strict=True)),
            gc=False,
        )
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(row).decode

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Turn values into columns, one copy per field."""
        rows, kept, skipped = [], [], []
        for index, value in enumerate(values):
            if value is None:
                skipped.append((index, _why_not(None, 0)))
                continue
            try:
                rows.append(self._decode(value))
                kept.append(index)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                skipped.append((index, str(error)))
        records = {}
        for field, attribute in zip(self._fields, self._attributes, strict=True):
            column = np.array([getattr(row, attribute) for row in rows], field.numpy_dtype)
            records[field.name] = column.reshape(len(rows), *field.shape)
        return Decoded(records, np.array(kept, np.intp), skipped)

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Turn columns into values; what is not finite becomes null, which no reader accepts."""
        check_columns(self._fields, records)
        names = [field.name for field in self._fields]
        columns = [records[name].tolist() for name in names]
        encode = msgspec.json.Encoder().encode
        return [encode(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


class HashedJsonCodec:
    """As `JsonCodec`; keys that no field names are features, hashed into `index` and `value`."""

    def __init__(self, fields: Sequence[Field], buckets: int) -> None:
        """Prepare.

        Args:
            fields: Among them index, whole numbers of shape (m,), and value, float32 alike.
            buckets: How many the features are hashed into.
        """
        named = {field.name: field for field in fields}
        self._index = named.pop("index")
        del named["value"]  # what it is, is known
        self._most = self._index.shape[0]
        self._named = named
        self._codec = JsonCodec(tuple(named.values()))
        self._buckets = buckets

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Turn values into columns; a record of fewer than m features is filled up with zeros."""
        others = self._codec.decode(values)
        index = np.zeros((len(others.kept), self._most), self._index.numpy_dtype)
        number, sound = np.zeros(index.shape), np.ones(len(index), bool)
        for row, at in enumerate(others.kept):
            try:
                for column, (bucket, cell) in enumerate(self._features(values[at])):
                    index[row, column], number[row, column] = bucket, cell
            except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
                others.skipped.append((int(at), str(error)))
                sound[row] = False
        value = np.where(np.isnan(number), np.float32(1), damped(number))
        records = {**others.records, "index": index, "value": value}
        kept = {name: column[sound] for name, column in records.items()}
        return Decoded(kept, others.kept[sound], sorted(others.skipped))

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Refuse: what was hashed cannot be told any more."""
        raise ValueError(f"hashed features cannot be written; found {sorted(records)}")

    def _features(self, value: bytes | None) -> Iterator[tuple[int, float]]:
        """The buckets of a record, and the number of each; not a number where it is a text.

        Raises:
            ValueError: If there are too many, or one is neither a text nor a number.
        """
        cells = msgspec.json.decode(value or b"{}")
        cells = {key: cell for key, cell in cells.items() if key not in self._named}
        several = [(key, cell) for key, cell in cells.items() if cell not in (None, "")]
        if len(several) > self._most:
            raise ValueError(f"{len(several)} features, expected at most {self._most}")
        for key, cell in several:
            if not isinstance(cell, str | int | float):
                raise ValueError(f"{key!r} is neither a text nor a number")  # noqa: TRY004 -- the record's
            text = cell if isinstance(cell, str) else None
            yield bucket_of(key, text, self._buckets), np.nan if text else float(cell)


_CODECS: dict[str, Callable[[Sequence[Field]], Codec]] = {"tensor": TensorCodec, "json": JsonCodec}
CODEC_NAMES = tuple(_CODECS)


def make_codec(name: str, fields: Sequence[Field], buckets: int = 0) -> Codec:
    """Make a codec by name.

    Args:
        name: `tensor` or `json`.
        fields: What a record consists of.
        buckets: Of `json`: how many its other keys are hashed into; 0: they are ignored.

    Raises:
        UserError: If there is no such codec, no field, or a field's name stands twice.
    """
    if name not in _CODECS:
        raise UserError(f"codec {name!r} is none of {', '.join(CODEC_NAMES)}")
    names = [field.name for field in fields]
    if not names:
        raise UserError(f"codec {name!r} needs at least one field")
    for field in names:
        if names.count(field) > 1:
            raise UserError(f"field {field!r} is described twice")
    return HashedJsonCodec(fields, buckets) if buckets else _CODECS[name](fields)


def _why_not(value: bytes | None, size: int) -> str:
    return "no value (a tombstone)" if value is None else f"{len(value)} bytes instead of {size}"


def _json_type(field: Field) -> Any:  # noqa: ANN401 -- a type made while running has no type
    kind: Any
    if field.dtype == "bool":
        kind = bool
    elif field.dtype == "float64":
        kind = float
    elif field.dtype == "float32":
        largest = float(np.finfo(np.float32).max)  # beyond it the cast would make an infinity
        kind = Annotated[float, msgspec.Meta(ge=-largest, le=largest)]
    else:
        limits = np.iinfo(field.dtype)
        kind = Annotated[int, msgspec.Meta(ge=int(limits.min), le=int(limits.max))]
    for length in reversed(field.shape):
        kind = Annotated[list[kind], msgspec.Meta(min_length=length, max_length=length)]
    return kind
