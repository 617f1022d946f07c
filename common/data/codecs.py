"""Codecs turn the bytes of records into columns and back, and give a reason for each bad record.

Only a record's bytes and the fields decide if it decodes. So all readers of a span skip the same
records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from common.data.columns import Column, assembled, bucket_of, damped
from common.data.decoders import new_decoder
from common.data.fields import DecodedColumns, DescribedRecords, Field, Keys, check_columns
from common.data.registered import RegisteredCodec

if TYPE_CHECKING:
    from common.core.messages import SchemaKind

B = TypeVar("B", bytes, bytes | None)


class Codec(Protocol):
    """A format of records."""

    def decode(self, values: Sequence[bytes | None]) -> DecodedColumns:
        """Turn values into columns. Never raises for any bytes."""

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Turn columns into values.

        Raises:
            ValueError: If a field is missing or does not have the described shape and dtype.
        """


class TensorCodec:
    """Fixed-size records: the fields in order, packed, little-endian."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = tuple(fields)
        # A bool is read as a byte, because a byte other than 0 or 1 must not reach numpy or torch.
        self._table = np.dtype(
            [
                (field.name, np.uint8 if field.dtype == "bool" else field.numpy_dtype, field.shape)
                for field in fields
            ]
        )

    def decode(self, values: Sequence[bytes | None]) -> DecodedColumns:
        """Turn values into columns. All of them are views of one joined buffer."""
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
        return DecodedColumns(records, kept, skipped)

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Turn columns into values."""
        count, size = check_columns(self._fields, records), self._table.itemsize
        table = np.empty(count, self._table)
        for field in self._fields:
            table[field.name] = records[field.name]
        data = table.tobytes()
        return [data[start : start + size] for start in range(0, count * size, size)]


class JsonCodec:
    """One JSON object per record, with arrays as nested lists. Keys without a field are ignored.

    The header of a schema registry may precede the object. The parser checks types, ranges and
    lengths as it parses. A record that fails is parsed again without these checks: then numbers are
    widened and defaults filled in, or the reason names the field.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = tuple(fields)
        self._columns = [Column(field) for field in fields]
        self._parse, self._getters = _typed_parser(self._columns)

    def decode(self, values: Sequence[bytes | None]) -> DecodedColumns:
        """Turn values into columns, one copy per field."""
        values = [unframed(value) for value in values]
        parse, parsed, again = self._parse, [], dict[int, list[Any]]()
        kept, skipped = list[int](), list[tuple[int, str]]()
        for index, value in enumerate(values):
            if value is not None and is_too_deep(value):
                skipped.append((index, TOO_DEEP))
                continue
            try:
                parsed.append(parse(value or b""))
            except (msgspec.DecodeError, UnicodeDecodeError):
                try:
                    again[len(kept)] = self._widened(value)
                except (msgspec.DecodeError, ValueError) as error:
                    skipped.append((index, reason_of(error)))
                    continue
            kept.append(index)
        inner = {path: list(map(attrgetter(path), parsed)) for path, _ in self._getters if path}
        leaves = [
            list(map(attrgetter(name), inner.get(path, parsed))) for path, name in self._getters
        ]
        for row, cells in again.items():
            for leaf, cell in zip(leaves, cells, strict=True):
                leaf.insert(row, cell)
        return assembled(self._columns, leaves, kept, skipped)

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Turn columns into values. Infinity and NaN become null, which no reader accepts."""
        check_columns(self._fields, records)
        for field in self._fields:
            if field.source is not None:
                raise ValueError(
                    f"field {field.name!r} is computed from other values of a record; write those"
                    " values instead"
                )
        names = [field.name for field in self._fields]
        columns = [records[name].tolist() for name in names]
        encode = msgspec.json.Encoder().encode
        return [encode(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]

    def _widened(self, value: bytes | None) -> list[Any]:
        """Return the value of each path, widened to the field's type.

        Raises:
            ValueError: If a value does not fit its field.
        """
        if value is None:
            raise ValueError(_why_not(None, 0))
        record = msgspec.json.decode(value)
        if not isinstance(record, dict):
            raise ValueError(f"a record must be a JSON object, got {type(record).__name__}")  # noqa: TRY004 -- the record is wrong, not an argument
        return [each for column in self._columns for each in column.values(record)]


class HashedJsonCodec:
    """Like `JsonCodec`, but hashes keys without a field into the fields `index` and `value`."""

    def __init__(
        self, fields: Sequence[Field], buckets: int, wanted: Collection[str] | None = None
    ) -> None:
        """Prepare the parser.

        Args:
            fields: Must contain `index`, integers of shape (m,), and `value`, float32 of the same
                shape.
            buckets: Number of buckets for the hashed keys.
            wanted: See `make_codec`.
        """
        named = {field.name: field for field in fields}
        self._index = named.pop("index")
        # Its shape and dtype follow from `index`.
        del named["value"]
        self._most = self._index.shape[0]
        columns = [Column(field) for field in named.values()]
        self._named = {keys[0] for column in columns for keys in column.source.paths}
        self._codec = JsonCodec(_wanted(tuple(named.values()), wanted))
        self._buckets = buckets

    def decode(self, values: Sequence[bytes | None]) -> DecodedColumns:
        """Turn values into columns. Records with fewer than m features are padded with zeros."""
        others = self._codec.decode(values)
        index = np.zeros((len(others.kept), self._most), self._index.numpy_dtype)
        number, sound = np.zeros(index.shape), np.ones(len(index), bool)
        for row, at in enumerate(others.kept):
            try:
                for column, (bucket, cell) in enumerate(self._features(unframed(values[at]))):
                    index[row, column], number[row, column] = bucket, cell
            except (msgspec.DecodeError, ValueError, OverflowError) as error:
                others.skipped.append((int(at), reason_of(error)))
                sound[row] = False
        value = np.where(np.isnan(number), np.float32(1), damped(number))
        records = {**others.records, "index": index, "value": value}
        kept = {name: column[sound] for name, column in records.items()}
        return DecodedColumns(kept, others.kept[sound], sorted(others.skipped))

    def encode(self, records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Refuse, because hashing cannot be undone."""
        raise ValueError(f"hashed features cannot be written; found {sorted(records)}")

    def _features(self, value: bytes | None) -> Iterator[tuple[int, float]]:
        """Yield the bucket and the number of each feature of a record; NaN for a text.

        Raises:
            ValueError: If there are too many features, or one is neither a text nor a number.
        """
        cells = msgspec.json.decode(value or b"{}")
        cells = {key: cell for key, cell in cells.items() if key not in self._named}
        several = [(key, cell) for key, cell in cells.items() if cell not in (None, "")]
        if len(several) > self._most:
            raise ValueError(f"the record has more than {self._most} features")
        for key, cell in several:
            if not isinstance(cell, str | int | float):
                raise ValueError("a feature is neither a text nor a number")  # noqa: TRY004 -- the record is wrong, not an argument
            text = cell if isinstance(cell, str) else None
            yield bucket_of(key, text, self._buckets), np.nan if text else float(cell)


# Kinds of schemas by codec, as a schema registry names them.
REGISTERED: dict[str, SchemaKind] = {"avro": "AVRO", "protobuf": "PROTOBUF"}


def codec_of(records: DescribedRecords, wanted: Collection[str] | None = None) -> Codec:
    """Make the codec of a job's records. See `make_codec` for `wanted`."""
    return make_codec(records.codec, records.described(), records.buckets, wanted)


def make_codec(
    name: str, fields: Sequence[Field], buckets: int = 0, wanted: Collection[str] | None = None
) -> Codec:
    """Make a codec by name.

    Args:
        name: `tensor`, `json`, `avro` or `protobuf`.
        fields: Fields of a record, at least one, with distinct names.
        buckets: For `json`: number of buckets for keys without a field; 0 ignores these keys.
        wanted: Optional. Names of the fields to read; records may lack the others. `tensor` always
            reads all fields. If unset, all fields are read.
    """
    if buckets:
        return HashedJsonCodec(fields, buckets, wanted)
    if name == "tensor":
        return TensorCodec(fields)
    read = _wanted(fields, wanted)
    return RegisteredCodec(read, REGISTERED[name]) if name in REGISTERED else JsonCodec(read)


def _wanted(fields: Sequence[Field], wanted: Collection[str] | None) -> Sequence[Field]:
    return [field for field in fields if wanted is None or field.name in wanted]


# Bytes of a schema registry's header: a 0, with which no JSON begins, and the schema's id.
_FRAME = 5


def unframed(value: B) -> B:
    """Return a value without the header of a schema registry."""
    return value[_FRAME:] if value and value[0] == 0 else value


# Levels of objects and arrays in a record; fields need fewer than 50. A parser is limited by the
# stack of its thread, so it would follow a deeper record on one thread and not on another.
_DEEPEST = 256
TOO_DEEP = f"it is nested deeper than {_DEEPEST} objects and arrays"
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))


def is_too_deep(value: bytes) -> bool:
    """Return True if JSON is nested too deep to be read."""
    if value.count(b"[") + value.count(b"{") <= _DEEPEST:
        return False
    value = _TEXT.sub(b"", value) if b"\\" in value else value
    marks = value.translate(None, _NO_BRACKETS).replace(b'""', b"")
    brackets = _TEXT.sub(b"", marks).replace(b'"', b"")
    steps = np.frombuffer(brackets, np.uint8)
    ups = (steps == ord("[")) | (steps == ord("{"))
    levels = np.cumsum(np.where(ups, np.int8(1), np.int8(-1)), dtype=np.int32)
    return bool(levels.max(initial=0) > _DEEPEST)


def _why_not(value: bytes | None, size: int) -> str:
    if value is None:
        return "no value (a tombstone)"
    return f"it has {'more' if len(value) > size else 'fewer'} bytes than the {size} of a record"


_PLACE = re.compile(r" \(byte \d+\)")


def reason_of(error: Exception) -> str:
    """Return a parser's message without byte positions and undecodable bytes.

    Args:
        error: The parser's error, or one that quotes nothing of the record.
    """
    return "a text is not UTF-8" if isinstance(error, UnicodeError) else _PLACE.sub("", str(error))


def _typed_parser(
    columns: Sequence[Column],
) -> tuple[Callable[[bytes], Any], list[tuple[str, str]]]:
    """Build a parser for records that need no conversion.

    Returns:
        The parser and, for each path of each column, two attribute names of its result: the dotted
            path to the containing object, empty for the record itself, and the value's name in it.
    """
    read = [(keys, _json_type(column)) for column in columns for keys in column.source.paths]
    kinds = dict(read)
    inner = {keys[:depth] for keys in kinds for depth in range(1, len(keys))}
    if any(kinds[keys] != kind or keys in inner for keys, kind in read):
        return _not_typed, [("", "none")] * len(read)
    attributes = dict[Keys, str]()
    parse: Callable[[bytes], Any] = new_decoder(_struct(kinds, (), attributes)).decode
    return parse, [
        (attributes.get(keys[:-1], ""), attributes[keys].rpartition(".")[2]) for keys, _ in read
    ]


def _not_typed(value: bytes) -> Any:  # noqa: ANN401 -- a parser's type
    """Refuse each record, so that the other parser reads it. Used if one value has two types."""
    raise msgspec.ValidationError(value)


def _struct(kinds: Mapping[Keys, Any], above: Keys, attributes: dict[Keys, str]) -> type:
    """Return the type of the object at a path. Adds the attribute names of the paths below it."""
    depth = len(above)
    keys = dict.fromkeys(path[depth] for path in kinds if path[:depth] == above)
    # Attributes are numbered because a key need not be an identifier.
    names = {f"at_{number}": key for number, key in enumerate(keys)}
    fields = list[Any]()
    for name, key in names.items():
        here = (*above, key)
        attributes[here] = f"{attributes[above]}.{name}" if above else name
        kind = kinds.get(here) or _struct(kinds, here, attributes)
        fields.append((name, *kind) if isinstance(kind, tuple) else (name, kind))
    # Fields with a default must come last.
    order = sorted(fields, key=len)
    return msgspec.defstruct("Object", order, rename=names, gc=False)


def _json_type(column: Column) -> Any:  # noqa: ANN401 -- a type made at run time
    """Return the type of a path's values, and the default if it has one."""
    kind: Any
    dtype = column.field.numpy_dtype
    if column.source.reading is not None:
        kind = str | int | float | bool
    elif dtype.kind == "b":
        kind = bool
    elif dtype.kind == "f":
        kind = float
    else:
        limits = np.iinfo(dtype)
        kind = Annotated[int, msgspec.Meta(ge=int(limits.min), le=int(limits.max))]
    if column.shape:
        for length in reversed(column.shape):
            kind = Annotated[list[kind], msgspec.Meta(min_length=length, max_length=length)]
        return kind
    if dtype.kind != "b" and column.source.reading is None:
        # `Column.read` checks numbers that are not integers.
        kind = kind | float | bool
    return kind if column.source.default is None else (kind | None, None)
