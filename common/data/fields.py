"""What a record consists of, and the columns that many records become."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from common.errors import UserError

DtypeName: TypeAlias = Literal[
    "uint8", "int8", "int16", "int32", "int64", "float32", "float64", "bool"
]
DTYPE_NAMES: tuple[str, ...] = get_args(DtypeName)  # those that both numpy and torch have

INTEGERS = ("uint8", "int8", "int16", "int32", "int64")  # what names a class, a word or a user
LABELS = (*INTEGERS, "bool")
NUMBERS = DTYPE_NAMES  # what is computed with, as float32

Columns: TypeAlias = dict[str, npt.NDArray[Any]]  # per field: (n, *shape), n records
Keys: TypeAlias = tuple[str, ...]  # of objects, from the outermost in: the path to a value


_MOST_KEYS = 32  # of a path: a parser's types are as deep


def keys_of(path: str) -> Keys:
    r"""The keys of a path as people write it: payload.after.amount, a dot of a key as \.

    Raises:
        ValueError: If one is empty, or cannot be a field's name.
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
    """Values are texts: of a number, or of a time, which becomes seconds since 1970."""

    what: Literal["number", "time"]


class Hashed(NamedTuple):
    """Values become buckets, by `common.data.columns`."""

    buckets: int


class Mapped(NamedTuple):
    """Values stand for numbers; see `common.data.columns.text_of`."""

    numbers: Mapping[str, float]


class OneHot(NamedTuple):
    """Values are one of these: 1 in its place, 0 elsewhere."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a field's numbers stand in a record that has names, and how they are read.

    Args:
        paths: One, or one for each column of the field.
        joined: Whether the paths are the field's columns.
        reading: How a value becomes a number; None: it is one, or an array of the field's shape.
        default: By path, stands for null, for what is absent, and for what is listed nowhere.
        scale: By path, of floats: what a number is multiplied by.
        offset: By path, of floats: what is added then.
    """

    paths: tuple[Keys, ...]
    joined: bool = False
    reading: Parsed | Hashed | Mapped | OneHot | None = None
    default: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    offset: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record; without a source it is the value of the key of its name.

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
                f"field {self.name!r}: a name is printable, without quotes or backslash"
            )
        if any(dimension < 1 for dimension in self.shape):
            raise UserError(f"field {self.name!r}: shape {list(self.shape)} has an empty dimension")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian, whatever this machine is."""
        return np.dtype(self.dtype).newbyteorder("<")


class DescribedRecords(Protocol):
    """What a job says of its records."""

    @property
    def codec(self) -> str:
        """Name of a codec."""

    @property
    def buckets(self) -> int:
        """Number of buckets into which keys are hashed; 0 if none are."""

    def described(self) -> Sequence[Field]:
        """The fields of a record."""


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """What came out of some values.

    A column may be a read-only view of all the values' bytes, and strided: see `concatenate`.
    """

    records: Columns  # per field: (n, *shape)
    kept: npt.NDArray[np.intp]  # (n,) which values the records came from, ascending
    skipped: list[tuple[int, str]]  # which values did not decode, and why


class Input(NamedTuple):
    """A field that a task reads."""

    shape: tuple[int, ...] | None  # None: any
    dtypes: tuple[str, ...]


def check_columns(fields: Sequence[Field], records: Mapping[str, npt.NDArray[Any]]) -> int:
    """Count the records, having checked that every field is there and fits.

    Raises:
        ValueError: If a field is missing, or its dtype or shape is not the one described.
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


def concatenate(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> Columns:
    """Assemble a batch from slices of polls: the one copy between Kafka's bytes and the gradient.

    The result owns its memory, contiguous and writable, so that torch takes it as it is. Copying
    here and not at decoding is cheapest: a decoded field is a strided view, and records are wanted
    side by side only once it is known which batch they belong to.

    Args:
        parts: One at least.
    """
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
