"""Read Avro records of one schema, and skip the values that no field needs.

The format is that of Avro's specification. Only a record's bytes and the schema decide if the
record is valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from common.data.record_bytes import RecordBytes, Rows, Sink, Values, Wanted, lists_of
from common.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.data.fields import Keys

# Deepest nesting of records. A schema may contain itself.
_DEEPEST = 64
_NUMBERS = {"boolean": "<u1", "float": "<f4", "double": "<f8"}
_PRIMITIVES = (*_NUMBERS, "null", "int", "long", "bytes", "string")


class Primitive(NamedTuple):
    """A primitive type of Avro."""

    name: str
    # Decimals only: number of digits after the point.
    scale: int | None = None


class Fixed(NamedTuple):
    """A fixed number of bytes."""

    size: int
    scale: int | None = None


class Enum(NamedTuple):
    """A value that is one of these symbols."""

    symbols: tuple[str, ...]


class Array(NamedTuple):
    """A list, or a map if `keyed`. In a map, a key precedes each item."""

    items: Type
    keyed: bool


class Union(NamedTuple):
    """A value of one of these types. The number of its type precedes it."""

    branches: tuple[Type, ...]


@dataclass(eq=False)
class AvroRecord:
    """A sequence of fields. A field may have this same type again."""

    fields: list[tuple[str, Type]] = field(default_factory=list)


Type: TypeAlias = Primitive | Fixed | Enum | Array | Union | AvroRecord


class AvroReader:
    """Reads the records of one schema.

    Args:
        text: The schema.
        references: Schemas whose types `text` uses. Each comes after the schemas that it uses
            itself.

    Raises:
        UserError: If one of the schemas is invalid.
    """

    def __init__(self, text: str, references: Iterable[str] = ()) -> None:
        names = dict[str, Type]()
        try:
            for each in (*references, text):
                self._type = _parsed(msgspec.json.decode(each), "", names)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise UserError(f"the schema is not valid Avro: {error}") from error

    def paths(self) -> dict[Keys, None]:
        """Return the paths of all values, in the schema's order.

        Values in maps have no path. A record type inside itself adds none.
        """
        return dict.fromkeys(_paths(self._type, (), ()))

    def read(self, records: RecordBytes, wanted: Wanted) -> None:
        """Read all records to their ends, and put the wanted values into their sinks."""
        _read(records, self._type, records.rows, wanted, 0)
        left = np.flatnonzero(records.left(records.rows))
        records.refuse(left, "the record is longer than its schema describes")


def _paths(type_: Type, above: Keys, within: tuple[AvroRecord, ...]) -> Iterator[Keys]:
    match type_:
        case AvroRecord(fields) if type_ not in within:
            for name, inner in fields:
                yield from _paths(inner, (*above, name), (*within, type_))
        case Union(branches):
            for branch in branches:
                yield from _paths(branch, above, within)
        case Enum() | Fixed() | Array(keyed=False):
            yield above
        case Primitive(name) if name != "null":
            yield above


def _read(  # noqa: C901, PLR0912 -- one case per type
    records: RecordBytes, type_: Type, rows: Rows, wanted: Wanted | None, depth: int
) -> None:
    """Read or skip one value of each of these records."""
    sink = None if wanted is None else wanted.sink
    values: Values
    match type_:
        case Primitive("null"):
            return
        case Primitive("int" | "long"):
            values = records.zigzags(rows)
        case Primitive("boolean" | "float" | "double" as name):
            values = records.numbers(rows, _NUMBERS[name])
            values = _booleans(records, rows, values) if name == "boolean" else values
        case Primitive(name, scale):
            sizes = records.zigzags(rows)
            if sink is None:
                records.pass_over(rows, sizes)
                return
            if name == "string":
                values = records.texts(rows, sizes)
            else:
                values = records.sized(rows, sizes)
                values = values if scale is None else _decimals(values, scale)
        case Fixed(size, scale):
            if sink is None:
                records.pass_over(rows, size)
                return
            values = records.sized(rows, size)
            values = values if scale is None else _decimals(values, scale)
        case Enum(symbols):
            which = _chosen(records, rows, len(symbols), "symbol")
            values = [] if sink is None else np.array(symbols, object)[which].tolist()
        case Union(branches):
            which = _chosen(records, rows, len(branches), "branch")
            for number in np.flatnonzero(np.bincount(which, minlength=len(branches))).tolist():
                these = which == number
                _read(
                    records, branches[number], rows if these.all() else rows[these], wanted, depth
                )
            return
        case AvroRecord(fields):
            if depth > _DEEPEST:
                records.refuse(rows, f"it is nested deeper than {_DEEPEST} records")
                return
            inner = {} if wanted is None else wanted.inner
            for name, kind in fields:
                _read(records, kind, rows, inner.get(name), depth + 1)
            values = [{}] * len(rows)
        case Array():
            values = _read_items(records, type_, rows, wanted, depth)
            values = [{}] * len(rows) if type_.keyed else values
    if sink is not None:
        sink.add(rows, values)


def _read_items(
    records: RecordBytes, array: Array, rows: Rows, wanted: Wanted | None, depth: int
) -> Values:
    """Read blocks of items. A count precedes each block, and a count of 0 ends the list."""
    if depth > _DEEPEST:
        records.refuse(rows, f"it is nested deeper than {_DEEPEST} records")
        return [None] * len(rows)
    steps, going = list[tuple[Rows, Values]](), rows
    while len(going):
        counts = records.zigzags(going)
        # If a count is negative, the block's size in bytes follows.
        if (sized := counts < 0).any():
            records.varints(going[sized])
            counts = np.abs(counts)
        # Without this check, a record could claim any number of items that take no bytes.
        if (many := counts > records.left(going)).any():
            records.refuse(
                going[many], "an array in the record has more items than the record has bytes"
            )
        going, counts = going[(counts > 0) & ~many], counts[(counts > 0) & ~many]
        number_type = "" if array.keyed else _NUMBERS.get(getattr(array.items, "name", ""), "")
        if number_type and len(going) and (counts == counts[0]).all():
            size = np.dtype(number_type).itemsize * int(counts[0])
            block = records.blocks(going, size).view(number_type)
            block = _booleans(records, going, block) if number_type == "<u1" else block
            steps += [(going, block[:, place]) for place in range(block.shape[1])]
            continue
        for number in range(int(counts.max(initial=0))):
            these = going[counts > number]
            steps.append((these, _read_item(records, array, these, wanted, depth + 1)))
    return lists_of(rows, steps) if wanted is not None and wanted.sink is not None else []


def _read_item(
    records: RecordBytes, array: Array, rows: Rows, wanted: Wanted | None, depth: int
) -> Values:
    if array.keyed:
        inner = {} if wanted is None else wanted.inner
        keys = records.texts(rows, records.zigzags(rows))
        for key in dict.fromkeys(keys):
            these = rows[[each == key for each in keys]]
            _read(records, array.items, these, inner.get(key), depth)
        return [None] * len(rows)
    if wanted is None or wanted.sink is None:
        _read(records, array.items, rows, None, depth)
        return []
    sink = Sink()
    _read(records, array.items, rows, Wanted(sink, {}), depth)
    return sink.of(rows, len(records.rows))


def _chosen(records: RecordBytes, rows: Rows, count: int, what: str) -> npt.NDArray[np.int64]:
    """Return the index of each record's symbol or branch; 0 for records whose index is invalid."""
    which = records.zigzags(rows)
    wrong = (which < 0) | (which >= count)
    if wrong.any():
        records.refuse(rows[wrong], f"the record has a {what} that its schema lacks")
        which = np.where(wrong, 0, which)
    return which


def _booleans(records: RecordBytes, rows: Rows, numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return booleans of the same shape; refuse records with a byte other than 0 or 1."""
    wrong = np.any(numbers.reshape(len(rows), -1) > 1, axis=1)
    if wrong.any():
        records.refuse(rows[wrong], "a boolean in the record is neither 0 nor 1")
    booleans: npt.NDArray[np.bool_] = numbers == 1
    return booleans


def _decimals(values: list[bytes], scale: int) -> list[float]:
    """Return numbers written in two's complement; infinity if a number exceeds float64."""
    return [_quotient(int.from_bytes(each, "big", signed=True), 10**scale) for each in values]


def _quotient(number: int, divisor: int) -> float:
    try:
        return number / divisor
    except OverflowError:
        return inf


def _parsed(written: Any, space: str, names: dict[str, Type]) -> Type:  # noqa: ANN401, C901, PLR0911, PLR0912 -- JSON; one case per type
    """Return the type of a schema.

    Args:
        written: The schema, decoded from JSON.
        space: Namespace of names that do not state one.
        names: Types by full name. New types are added.

    Raises:
        LookupError: If a part is missing.
        TypeError: If a part has the wrong type.
        ValueError: If it names an unknown type.
    """
    match written:
        case str() if written in _PRIMITIVES:
            return Primitive(written)
        case str():
            full = _full(written, space)
            if full not in names:
                raise ValueError(f"the schema has no type {full}")
            return names[full]
        case list():
            return Union(tuple(_parsed(each, space, names) for each in written))
        case {"type": "array", "items": items}:
            return Array(_parsed(items, space, names), keyed=False)
        case {"type": "map", "values": items}:
            return Array(_parsed(items, space, names), keyed=True)
        case {"type": "enum" | "fixed" | "record" | "error" as kind, "name": str(name)}:
            full = _full(name, written.get("namespace", space))
            scale = written.get("scale", 0) if written.get("logicalType") == "decimal" else None
            if kind == "enum":
                names[full] = Enum(tuple(map(str, written["symbols"])))
            elif kind == "fixed":
                names[full] = Fixed(int(written["size"]), scale)
            else:
                # Registered before its fields are parsed, because they may use it.
                names[full] = record = AvroRecord()
                inside = full.rpartition(".")[0]
                for each in written["fields"]:
                    record.fields.append((each["name"], _parsed(each["type"], inside, names)))
            return names[full]
        case {"type": "bytes", "logicalType": "decimal"}:
            return Primitive("bytes", int(written.get("scale", 0)))
        case {"type": inner}:
            return _parsed(inner, space, names)
    raise ValueError(f"{written!r} is not a type")


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"
