"""Avro records of one schema, as its specification has them; what is not wanted is passed over.

Whether a record is sound depends on its bytes and the schema alone.
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

_DEEPEST = 64  # a record within a record within a record: of a schema that names itself
_NUMBERS = {"boolean": "<u1", "float": "<f4", "double": "<f8"}
_PRIMITIVES = (*_NUMBERS, "null", "int", "long", "bytes", "string")


class Primitive(NamedTuple):
    """A type that names nothing else."""

    name: str
    scale: int | None = None  # digits behind the point, of a decimal


class Fixed(NamedTuple):
    """So many bytes."""

    size: int
    scale: int | None = None


class Enum(NamedTuple):
    """One of these symbols."""

    symbols: tuple[str, ...]


class Array(NamedTuple):
    """Items; of a map, each behind its key."""

    items: Type
    keyed: bool


class Union(NamedTuple):
    """One of these types, behind its number."""

    branches: tuple[Type, ...]


@dataclass(eq=False)
class AvroRecord:
    """Fields, one after the other; one of them may be of this type again."""

    fields: list[tuple[str, Type]] = field(default_factory=list)


Type: TypeAlias = Primitive | Fixed | Enum | Array | Union | AvroRecord


class AvroReader:
    """Reads what one schema describes.

    Args:
        text: The schema.
        references: Schemas whose types it names, each behind those that it names types of.

    Raises:
        UserError: If one of them makes no sense.
    """

    def __init__(self, text: str, references: Iterable[str] = ()) -> None:
        names = dict[str, Type]()
        try:
            for each in (*references, text):
                self._type = _parsed(msgspec.json.decode(each), "", names)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise UserError(f"it is no Avro schema: {error}") from error

    def paths(self) -> dict[Keys, None]:
        """Where values stand, in the schema's order; not in maps, nor twice in one record type."""
        return dict.fromkeys(_paths(self._type, (), ()))

    def read(self, records: RecordBytes, wanted: Wanted) -> None:
        """Read all records to their ends, what is wanted into its sinks."""
        _read(records, self._type, records.rows, wanted, 0)
        left = np.flatnonzero(records.left(records.rows))
        records.refuse(left, "bytes follow what its schema describes")


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
    """Read one value of each of these records, or pass over it."""
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
    """Read blocks of items, each behind the number of them, up to one of none."""
    if depth > _DEEPEST:
        records.refuse(rows, f"it is nested deeper than {_DEEPEST} records")
        return [None] * len(rows)
    steps, going = list[tuple[Rows, Values]](), rows
    while len(going):
        counts = records.zigzags(going)
        if (sized := counts < 0).any():  # so is how many bytes they take, which comes next
            records.varints(going[sized])
            counts = np.abs(counts)
        # Of what takes no bytes there could be any number.
        if (many := counts > records.left(going)).any():
            records.refuse(going[many], "an array in it has more items than it has bytes")
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
    """Which of so many each has; the first where there is none of that number."""
    which = records.zigzags(rows)
    wrong = (which < 0) | (which >= count)
    if wrong.any():
        records.refuse(rows[wrong], f"it has a {what} that its schema lacks")
        which = np.where(wrong, 0, which)
    return which


def _booleans(records: RecordBytes, rows: Rows, numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return booleans, of the same shape; refuse the records that hold another byte than 0 or 1."""
    wrong = np.any(numbers.reshape(len(rows), -1) > 1, axis=1)
    if wrong.any():
        records.refuse(rows[wrong], "a boolean in it is neither 0 nor 1")
    booleans: npt.NDArray[np.bool_] = numbers == 1
    return booleans


def _decimals(values: list[bytes], scale: int) -> list[float]:
    """Return the numbers that two's complement writes; infinity if float64 does not hold one."""
    return [_quotient(int.from_bytes(each, "big", signed=True), 10**scale) for each in values]


def _quotient(number: int, divisor: int) -> float:
    try:
        return number / divisor
    except OverflowError:
        return inf


def _parsed(written: Any, space: str, names: dict[str, Type]) -> Type:  # noqa: ANN401, C901, PLR0911, PLR0912 -- what JSON holds; one case per type
    """The type of a schema.

    Args:
        written: As JSON has it.
        space: Of names without one.
        names: Types by full name; new ones are added.

    Raises:
        LookupError: If a part of it is missing.
        TypeError: If a part of it is of another kind than it should be.
        ValueError: If it names what is not there.
    """
    match written:
        case str() if written in _PRIMITIVES:
            return Primitive(written)
        case str():
            full = _full(written, space)
            if full not in names:
                raise ValueError(f"there is no type {full}")
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
                names[full] = record = AvroRecord()  # before its fields, which may name it
                inside = full.rpartition(".")[0]
                for each in written["fields"]:
                    record.fields.append((each["name"], _parsed(each["type"], inside, names)))
            return names[full]
        case {"type": "bytes", "logicalType": "decimal"}:
            return Primitive("bytes", int(written.get("scale", 0)))
        case {"type": inner}:
            return _parsed(inner, space, names)
    raise ValueError(f"{written!r} names no type")


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"
