"""Read Protobuf records of one schema, and skip the values that no field needs.

Fields may come in any order and may be missing, so records can be at different fields. Each step
therefore reads the lowest field number that is next in any record, from all records where it is
next. Only a record's bytes and the schema decide if the record is valid.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.message import DecodeError

from common.data.record_bytes import Rows, Sink, Values, Wanted, lists_of, unzigzagged
from common.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Reference
    from common.data.fields import Keys
    from common.data.record_bytes import RecordBytes

# Deepest nesting of messages.
_DEEPEST = 64
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5  # wire types
_WIDTHS = {_EIGHT: 8, _FOUR: 4}
_KINDS = FieldDescriptorProto
_FIXED = {
    _KINDS.TYPE_DOUBLE: "<f8",
    _KINDS.TYPE_FLOAT: "<f4",
    _KINDS.TYPE_FIXED64: "<u8",
    _KINDS.TYPE_SFIXED64: "<i8",
    _KINDS.TYPE_FIXED32: "<u4",
    _KINDS.TYPE_SFIXED32: "<i4",
}
_TEXTS = (_KINDS.TYPE_STRING, _KINDS.TYPE_BYTES)
# Files that come with Protobuf. Registries may lack them.
_COMES_WITH = "google/protobuf/"
# Larger than any tag: no tag was read.
_NONE_YET = np.iinfo(np.int64).max


@dataclass(eq=False)
class _Field:
    name: str
    kind: int
    repeated: bool
    # True if an absent value means zero.
    implied: bool
    symbols: dict[int, str] = field(default_factory=dict)  # enums only
    message: _Message | None = None

    @property
    def width(self) -> int:
        """Number of bytes of a fixed-width number."""
        return int(_FIXED[self.kind][2])

    @property
    def wire(self) -> int:
        """Wire type of a single value."""
        if self.kind in _FIXED:
            return _EIGHT if self.width == _WIDTHS[_EIGHT] else _FOUR
        return _SIZED if self.message is not None or self.kind in _TEXTS else _VARINT


@dataclass(eq=False)
class _Message:
    fields: dict[int, _Field] = field(default_factory=dict)


class ProtobufReader:
    """Reads the records of one schema.

    Args:
        text: The schema, a file descriptor in base64.
        references: Schemas of the files it imports, with the names used in the imports.

    Raises:
        UserError: If one of them is invalid, or a file is missing.
    """

    def __init__(self, text: str, references: Iterable[Reference] = ()) -> None:
        self._file = _file(text)
        files = {each.name: _file(each.text) for each in references} | {"": self._file}
        todo = list(files.values())
        while todo:
            for name in todo.pop().dependency:
                if name not in files:
                    files[name] = _well_known(name)
                    todo.append(files[name])
        self._messages = _linked(files.values())

    def paths(self) -> dict[Keys, None]:
        """Return the paths of the values of all messages.

        Values in repeated messages have no path. A message type inside itself adds none.
        """
        return {keys: None for each in self._messages.values() for keys in _paths(each, (), ())}

    def read(self, records: RecordBytes, wanted: Wanted) -> None:
        """Read all records to their ends, and put the wanted values into their sinks."""
        for path, rows in _by_message(records).items():
            message = self._message(path)
            if message is None:
                records.refuse(rows, "the schema has no message of the record's type")
            else:
                _read(records, message, rows, wanted, 0)

    def _message(self, path: tuple[int, ...]) -> _Message | None:
        """Return the message type at this path: its index in the file or in the outer message."""
        name, inside = f".{self._file.package}".rstrip("."), self._file.message_type
        for place in path:
            if not 0 <= place < len(inside):
                return None
            name, inside = f"{name}.{inside[place].name}", inside[place].nested_type
        return self._messages.get(name)


def _paths(message: _Message, above: Keys, within: tuple[_Message, ...]) -> Iterator[Keys]:
    for of in message.fields.values():
        if of.message is None:
            yield (*above, of.name)
        elif not of.repeated and message not in within:
            yield from _paths(of.message, (*above, of.name), (*within, message))


def _by_message(records: RecordBytes) -> dict[tuple[int, ...], Rows]:
    """Group records by message type.

    The path of the type precedes each record; an empty path is the file's first type.
    """
    counts = records.zigzags(records.rows)
    if not counts.any():
        return {(0,): records.rows}
    if (wrong := (counts < 0) | (counts > _DEEPEST)).any():
        records.refuse(records.rows[wrong], "the record names no valid message type")
    paths: list[list[int]] = [[] for _ in records.rows]
    for step in range(int(counts[~wrong].max(initial=0))):
        these = records.rows[(counts > step) & ~wrong]
        for row, place in zip(these.tolist(), records.zigzags(these).tolist(), strict=True):
            paths[row].append(place)
    rows = dict[tuple[int, ...], list[int]]()
    for row, path in enumerate(paths):
        rows.setdefault(tuple(path) or (0,), []).append(row)
    return {path: np.array(of, np.intp) for path, of in rows.items()}


def _read(  # noqa: C901 -- one loop
    records: RecordBytes, message: _Message, rows: Rows, wanted: Wanted, depth: int
) -> None:
    """Read one message of each of these records, up to its end."""
    if depth > _DEEPEST:
        records.refuse(rows, f"it is nested deeper than {_DEEPEST} messages")
        return
    asked = {
        number: (of, wanted.inner[of.name])
        for number, of in message.fields.items()
        if of.name in wanted.inner
    }
    lists: dict[int, list[tuple[Rows, Values]]] = {
        n: [] for n, (of, _) in asked.items() if of.repeated
    }
    # Tag of each record's next field; `_NONE_YET` for records that have ended.
    tags = np.full(len(rows), _NONE_YET)
    # True for records whose next tag must be read.
    fresh = np.ones(len(rows), bool)
    while True:
        if (ask := fresh & (records.left(rows) > 0)).any():
            tags[ask] = records.varints(rows[ask]).view(np.int64)
        tags[fresh & ~ask] = _NONE_YET
        tag = int(tags.min(initial=_NONE_YET))
        if tag == _NONE_YET:
            break
        fresh = tags == tag
        these = rows if fresh.all() else rows[fresh]
        number, wire = tag >> 3, tag & 7
        if number not in asked:
            _pass_over(records, these, wire if number > 0 else -1)
        elif number in lists:
            lists[number] += _items(records, *asked[number], these, wire, depth)
        else:
            _value(records, *asked[number], these, wire, depth)
    for number, steps in lists.items():
        if (sink := asked[number][1].sink) is not None:
            sink.add(rows, lists_of(rows, steps))
    for of, want in asked.values():
        if of.implied and want.sink is not None:
            empty = rows[want.sink.absent(len(records.rows))[rows]]
            if len(empty):
                want.sink.add(empty, _zeros(of, len(empty)))


def _value(
    records: RecordBytes, of: _Field, want: Wanted, rows: Rows, wire: int, depth: int
) -> None:
    if wire != of.wire:
        records.refuse(rows, f"the record's field {of.name} is not encoded as its schema says")
    elif of.message is not None:
        before = records.enter(rows, records.varints(rows).view(np.int64))
        _read(records, of.message, rows, want, depth + 1)
        records.leave(before)
        if want.sink is not None:
            want.sink.add(rows, [{}] * len(rows))
    elif want.sink is not None:
        want.sink.add(rows, _scalars(records, of, rows))
    else:
        _pass_over(records, rows, wire)


def _items(
    records: RecordBytes, of: _Field, want: Wanted, rows: Rows, wire: int, depth: int
) -> list[tuple[Rows, Values]]:
    """Read one item, or all items of a packed field."""
    if wire == of.wire:
        sink = Sink()
        _value(records, of, Wanted(sink, {}), rows, wire, depth)
        return [(rows, sink.of(rows, len(records.rows)))] if want.sink is not None else []
    if wire != _SIZED:
        records.refuse(rows, f"the record's field {of.name} is not encoded as its schema says")
        return []
    sizes = records.varints(rows).view(np.int64)
    size = int(sizes[0])
    if of.kind in _FIXED and (sizes == size).all() and size >= 0 and size % of.width == 0:
        block = records.blocks(rows, size).view(_FIXED[of.kind])
        return [(rows, block[:, place]) for place in range(block.shape[1])]
    steps, before = list[tuple[Rows, Values]](), records.enter(rows, sizes)
    while len(these := rows[records.left(rows) > 0]):
        steps.append((these, _scalars(records, of, these)))
    records.leave(before)
    return steps


def _scalars(records: RecordBytes, of: _Field, rows: Rows) -> Values:
    if of.kind in _FIXED:
        return records.numbers(rows, _FIXED[of.kind])
    numbers = records.varints(rows)
    if of.kind == _KINDS.TYPE_STRING:
        return records.texts(rows, numbers.view(np.int64))
    if of.kind == _KINDS.TYPE_BYTES:
        return records.sized(rows, numbers.view(np.int64))
    return _converted(of, numbers)


def _zeros(of: _Field, count: int) -> Values:
    if of.kind in _FIXED:
        return np.zeros(count, _FIXED[of.kind])
    if of.kind in _TEXTS:
        return ["" if of.kind == _KINDS.TYPE_STRING else b""] * count
    return _converted(of, np.zeros(count, np.uint64))


def _converted(of: _Field, numbers: npt.NDArray[np.uint64]) -> Values:
    """Convert varints to the values of a field. Signed 32-bit numbers are written as 64 bits."""
    match of.kind:
        case _KINDS.TYPE_ENUM:
            low = numbers.astype(np.uint32).view(np.int32)
            return [of.symbols.get(each, each) for each in low.tolist()]
        case _KINDS.TYPE_BOOL:
            converted: npt.NDArray[Any] = numbers != 0
        case _KINDS.TYPE_SINT32 | _KINDS.TYPE_SINT64:
            converted = unzigzagged(numbers)
        case _KINDS.TYPE_INT32:
            converted = numbers.astype(np.uint32).view(np.int32)
        case _KINDS.TYPE_UINT32:
            converted = numbers.astype(np.uint32)
        case _KINDS.TYPE_UINT64:
            converted = numbers
        case _:
            converted = numbers.view(np.int64)
    return converted


def _pass_over(records: RecordBytes, rows: Rows, wire: int) -> None:
    if wire == _VARINT:
        records.varints(rows)
    elif wire == _SIZED:
        records.pass_over(rows, records.varints(rows).view(np.int64))
    elif wire in _WIDTHS:
        records.pass_over(rows, _WIDTHS[wire])
    else:
        records.refuse(rows, "the record has a field without a number, or a group")


def _file(text: str) -> FileDescriptorProto:
    try:
        return FileDescriptorProto.FromString(b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError) as error:
        raise UserError(
            "the schema is not a base64 descriptor; registries return one for `format=serialized`,"
            " and Python producers register one"
        ) from error


def _well_known(name: str) -> FileDescriptorProto:
    module = name.removesuffix(".proto").replace("/", ".") + "_pb2"
    if not name.startswith(_COMES_WITH) or find_spec(module) is None:
        raise UserError(f"the schema imports {name}, which the registry does not have")
    return FileDescriptorProto.FromString(import_module(module).DESCRIPTOR.serialized_pb)


def _linked(files: Iterable[FileDescriptorProto]) -> dict[str, _Message]:
    """Return all messages by full name, each with its fields.

    Raises:
        UserError: If no file has the type of a field.
    """
    found, symbols = (
        dict[str, tuple[_Message, DescriptorProto, bool]](),
        dict[str, dict[int, str]](),
    )

    def collect(holder: Any, space: str, *, implied: bool) -> None:  # noqa: ANN401 -- a file or a message
        for enum in holder.enum_type:
            symbols[f"{space}.{enum.name}"] = {value.number: value.name for value in enum.value}
        inside = (
            holder.message_type if isinstance(holder, FileDescriptorProto) else holder.nested_type
        )
        for each in inside:
            found[f"{space}.{each.name}"] = (_Message(), each, implied)
            collect(each, f"{space}.{each.name}", implied=implied)

    for file in files:
        collect(file, f".{file.package}".rstrip("."), implied=file.syntax == "proto3")
    for message, described, implied in found.values():
        for each in described.field:
            if each.type_name and each.type_name not in found.keys() | symbols.keys():
                raise UserError(
                    f"the schema's field {each.name} has an unknown type, {each.type_name}"
                )
            several = each.label == _KINDS.LABEL_REPEATED
            inner = found.get(each.type_name)
            message.fields[each.number] = _Field(
                each.name,
                each.type,
                several,
                implied and not several and inner is None and not each.HasField("oneof_index"),
                symbols.get(each.type_name, {}),
                inner and inner[0],
            )
    return {name: message for name, (message, _, _) in found.items()}
