"""Fields of a record, and the columns that many records become."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from common.errors import UserError

DtypeName: TypeAlias = Literal[
    "uint8", "int8", "int16", "int32", "int64", "float32", "float64", "bool"
]
# Types that both numpy and torch have.
DTYPE_NAMES: tuple[str, ...] = get_args(DtypeName)

# Types of class labels, word numbers and user ids.
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
LABELS = (*INTEGERS, "bool")
# Types of inputs to computations, which use float32.
NUMBERS = DTYPE_NAMES

Columns: TypeAlias = dict[str, npt.NDArray[Any]]  # (n, *shape) each, by field
# Path to a value: the keys of nested objects, outermost first.
Keys: TypeAlias = tuple[str, ...]


# Total bytes of records that share a pass. On a CPU, a pass over few records costs more overhead
# than computation, and the records of a larger pass do not fit into the cache.
_PASS_BYTES = 128 << 10
# Longest path. The parser's types are nested as deep.
_MOST_KEYS = 32


def keys_of(path: str) -> Keys:
    r"""Return the keys of a path such as payload.after.amount. A dot inside a key is written `\.`.

    Raises:
        ValueError: If a key is empty or cannot be a field's name, or there are too many keys.
    """
    keys = tuple(key.replace("\\.", ".") for key in re.split(r"(?<!\\)\.", path))
    sound = all(key.isprintable() and key and not set(key) & {'"', "\\"} for key in keys)
    if not sound or len(keys) > _MOST_KEYS:
        raise ValueError(
            "must be keys with dots between them, such as payload.after.amount, a dot of a key as"
            " \\."
        )
    return keys


class Parsed(NamedTuple):
    """Values are texts that contain a number, or a time that becomes seconds since 1970."""

    what: Literal["number", "time"]


class Hashed(NamedTuple):
    """Values are hashed into buckets. See `common.data.columns.bucket_of`."""

    buckets: int


class Mapped(NamedTuple):
    """Values are looked up in a table of numbers. See `common.data.columns.text_of`."""

    numbers: Mapping[str, float]


class OneHot(NamedTuple):
    """Values are one of these texts: 1 at its index, 0 elsewhere."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Location of a field's numbers in a record with named values, and how to read them.

    Args:
        paths: A single path, or a path per column of the field.
        joined: True if the paths are the field's columns.
        reading: Conversion of a value to a number. If None, the value is a number, or an array of
            the field's shape.
        default: Optional. Per path, replaces null, absent values and values that no table lists.
        scale: Optional. Per path, a factor for floats.
        offset: Optional. Per path, a summand for floats, added after scaling.
    """

    paths: tuple[Keys, ...]
    joined: bool = False
    reading: Parsed | Hashed | Mapped | OneHot | None = None
    default: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    offset: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record. Without a source, its value is at the key of the field's name.

    Raises:
        UserError: If the name is empty or needs escaping in JSON, or a dimension is not positive.
    """

    name: str
    dtype: DtypeName
    shape: tuple[int, ...] = ()
    source: Source | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or set(self.name) & {'"', "\\"}:
            raise UserError(
                f"field {self.name!r}: a name must be printable, without quotes or backslashes"
            )
        if any(dimension < 1 for dimension in self.shape):
            raise UserError(f"field {self.name!r}: shape {list(self.shape)} has an empty dimension")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype in little-endian order, on any machine."""
        return np.dtype(self.dtype).newbyteorder("<")


class DescribedRecords(Protocol):
    """A job's description of its records."""

    @property
    def codec(self) -> str:
        """Name of a codec."""

    @property
    def buckets(self) -> int:
        """Number of buckets for hashed keys; 0 if no keys are hashed."""

    def described(self) -> Sequence[Field]:
        """Return the fields of a record."""


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """Columns decoded from values, and the values that could not be decoded.

    A column may be a read-only, strided view of the bytes of all values. See `concatenate`.
    """

    records: Columns  # (n, *shape) each, by field
    # Index of the value that each record came from, (n,), ascending.
    kept: npt.NDArray[np.intp]
    # Index and reason of each value that did not decode.
    skipped: list[tuple[int, str]]


class Input(NamedTuple):
    """A field that a task reads."""

    shape: tuple[int, ...] | None  # None: any
    dtypes: tuple[str, ...]


def check_columns(fields: Sequence[Field], records: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return the number of records, after checking that all fields are present and fit.

    Raises:
        ValueError: If a field is missing, or its dtype or shape is wrong.
    """
    count = None
    for field in fields:
        column = records.get(field.name)
        if column is None:
            raise ValueError(f"field {field.name!r} is missing; found {sorted(records)}")
        if column.shape[1:] != field.shape or column.ndim == 0:
            expected = ("n", *field.shape)
            raise ValueError(f"field {field.name!r} has shape {column.shape}, not {expected}")
        if not np.can_cast(column.dtype, field.numpy_dtype, "safe"):
            raise ValueError(f"field {field.name!r} has dtype {column.dtype}, not {field.dtype}")
        if count is None:
            count = len(column)
        if len(column) != count:
            raise ValueError(f"field {field.name!r} has {len(column)} records, others have {count}")
    return count or 0


def records_per_pass(record_bytes: int) -> int:
    """Return the number of records that share a pass, unless a job says otherwise.

    Args:
        record_bytes: Bytes of all fields of a record.
    """
    return max(_PASS_BYTES // record_bytes, 1)


def concatenate(
    parts: Sequence[Mapping[str, npt.NDArray[Any]]],
    empty: Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]] = np.empty,
) -> Columns:
    """Build a batch from slices of polls: the one copy between Kafka's bytes and the gradient.

    The result owns its memory, contiguous and writable, so torch can use it directly. To copy here
    is cheaper than at decoding: a decoded field is a strided view, and records need to be adjacent
    only once their batch is known.

    Args:
        parts: At least one part.
        empty: Makes an array of a shape and a dtype in the wanted memory.
    """
    found = Columns()
    for name, first in parts[0].items():
        columns = [part[name] for part in parts]
        shape = (sum(map(len, columns)), *first.shape[1:])
        found[name] = np.concatenate(columns, out=empty(shape, first.dtype))
    return found
