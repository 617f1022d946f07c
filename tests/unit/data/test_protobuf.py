"""The reader reads what Protobuf's own library writes, and no bytes make it raise."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format, timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from common.core.messages import Reference
from common.data.protobuf import ProtobufReader
from common.data.record_bytes import RecordBytes, wanted_of
from common.errors import UserError

# Types of proto3, with strategies for their values.
KINDS = {
    "DOUBLE": st.floats(allow_nan=False),
    "FLOAT": st.floats(width=32, allow_nan=False),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "SINT64": st.integers(-(2**63), 2**63 - 1),
    "SFIXED64": st.integers(-(2**63), 2**63 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FIXED64": st.integers(0, 2**64 - 1),
    "INT32": st.integers(-(2**31), 2**31 - 1),
    "SINT32": st.integers(-(2**31), 2**31 - 1),
    "SFIXED32": st.integers(-(2**31), 2**31 - 1),
    "UINT32": st.integers(0, 2**32 - 1),
    "FIXED32": st.integers(0, 2**32 - 1),
    "BOOL": st.booleans(),
    "STRING": st.text(max_size=200),
    "BYTES": st.binary(max_size=4),
}
FIELDS = "".join(
    f'field {{ name: "{kind}_{what}" number: {number * 3 + place + 1} type: TYPE_{kind} {more} }}\n'
    for number, kind in enumerate(KINDS)
    for place, (what, more) in enumerate(
        [
            ("one", "label: LABEL_OPTIONAL"),
            ("maybe", f"label: LABEL_OPTIONAL proto3_optional: true oneof_index: {number}"),
            ("many", "label: LABEL_REPEATED"),
        ]
    )
)
ONEOFS = "".join(f'oneof_decl {{ name: "_{kind}_maybe" }}\n' for kind in KINDS)
OF = "label: LABEL_OPTIONAL"
FILE = f"""
name: "rows.proto" package: "shop" syntax: "proto3"
dependency: "google/protobuf/timestamp.proto" dependency: "other.proto"
message_type {{ name: "Unused" }}
message_type {{
  name: "Row"
  {FIELDS}
  field {{ name: "inner" number: 90 {OF} type: TYPE_MESSAGE type_name: ".shop.Row.Inner" }}
  field {{ name: "kind" number: 91 {OF} type: TYPE_ENUM type_name: ".other.Kind" }}
  field {{ name: "at" number: 92 {OF} type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" }}
  field {{ name: "row" number: 93 {OF} type: TYPE_MESSAGE type_name: ".shop.Row" }}
  nested_type {{
    name: "Inner"
    field {{ name: "x" number: 1 {OF} type: TYPE_DOUBLE }}
    field {{
      name: "xs" number: 2 type: TYPE_FLOAT label: LABEL_REPEATED options {{ packed: false }}
    }}
  }}
  {ONEOFS}
}}
"""
OTHER = """
name: "other.proto" package: "other" syntax: "proto3"
enum_type { name: "Kind" value { name: "NONE" number: 0 } value { name: "SOME" number: 3 } }
"""
ROW = b"\x02\x02"  # the second message of its file


def file(text: str) -> FileDescriptorProto:
    return text_format.Parse(text, FileDescriptorProto())


def schema(text: str) -> str:
    return b64encode(file(text).SerializeToString()).decode()


def made(*files: FileDescriptorProto) -> Any:  # noqa: ANN401 -- classes made while running
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    for each in files:
        pool.Add(each)
    return GetMessageClass(pool.FindMessageTypeByName("shop.Row"))


Row = made(file(OTHER), file(FILE))
READER = ProtobufReader(schema(FILE), [Reference("other.proto", schema(OTHER))])


def read(
    values: list[bytes], *paths: str, reader: ProtobufReader = READER
) -> tuple[list[list[Any]], dict[int, str]]:
    """Return the values at some paths, and the records that are broken."""
    records = RecordBytes(values)
    wanted, sinks = wanted_of([tuple(path.split(".")) for path in paths])
    reader.read(records, wanted)
    columns = []
    for sink in sinks:
        cells, absent = sink.cells(len(values))
        listed = cells.tolist() if isinstance(cells, np.ndarray) else cells
        columns.append([None if no else cell for cell, no in zip(listed, absent, strict=True)])
    return columns, records.reasons


def as_read(value: Any) -> Any:  # noqa: ANN401 -- any value of a record
    if isinstance(value, bytes):
        return list(value)
    return [as_read(each) for each in value] if isinstance(value, list) else value


ROWS = st.fixed_dictionaries(
    {},
    optional={
        f"{kind}_{what}": values if what != "many" else st.lists(values, max_size=3)
        for kind, values in KINDS.items()
        for what in ("one", "maybe", "many")
    },
)


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_protobuf_messages_round_trip(rows: list[dict[str, Any]]) -> None:
    names = [f"{kind}_{what}" for kind in KINDS for what in ("one", "maybe", "many")]
    messages = [Row(**row) for row in rows]
    columns, reasons = read([ROW + each.SerializeToString() for each in messages], *names)
    assert reasons == {}
    for name, column in zip(names, columns, strict=True):
        for cell, message in zip(column, messages, strict=True):
            value = getattr(message, name)
            if name.endswith("maybe") and not message.HasField(name):
                assert cell is None
            else:
                assert as_read(cell) == as_read(list(value) if name.endswith("many") else value)


@given(st.lists(ROWS, min_size=1, max_size=3), st.integers(0, 3), st.binary(max_size=20))
def test_broken_protobuf_record_is_reported_and_its_neighbours_are_intact(
    rows: list[dict[str, Any]], where: int, broken: bytes
) -> None:
    values = [ROW + Row(**row).SerializeToString() for row in rows]
    where = min(where, len(values))
    names = ("DOUBLE_many", "STRING_one", "INT32_maybe", "inner.xs")
    whole, _ = read(values, *names)
    columns, reasons = read([*values[:where], ROW + broken, *values[where:]], *names)
    assert reasons.keys() <= {where}
    for column, intact in zip(columns, whole, strict=True):
        del column[where]
        assert [as_read(each) for each in column] == [as_read(each) for each in intact]


def test_path_finds_values_in_nested_messages() -> None:
    first = Row(inner={"x": 1.5, "xs": [1, 2]}, kind=3, at={"seconds": 7}, row={"inner": {"x": 2}})
    values = [ROW + each.SerializeToString() for each in (first, Row(inner={}, kind=4), Row())]
    paths = ("inner.x", "inner.xs", "kind", "at.seconds", "row.inner.x", "row", "nowhere.at.all")
    columns, reasons = read(values, *paths)
    assert reasons == {}
    assert columns == [
        *([1.5, 0.0, None], [[1.0, 2.0], [], None], ["SOME", 4, "NONE"], [7, None, None]),
        *([2.0, None, None], [{}, None, None], [None] * 3),
    ]


def test_message_indexes_select_the_message_type() -> None:
    inner = Row.DESCRIPTOR.nested_types_by_name["Inner"]
    written = GetMessageClass(inner)(x=2.5).SerializeToString()
    values = [b"\x04\x02\x00" + written, b"\x00", b"\x02\x0a", b"\x01", b"\x02\x01"]
    columns, reasons = read(values, "x")
    assert columns[0][:2] == [2.5, None]
    assert reasons == {
        2: "the schema has no message of the record's type",
        3: "the record names no valid message type",
        4: "the schema has no message of the record's type",
    }


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x09\x00", "the record ends too early"),
        (b"\x08\x00", "the record's field DOUBLE_one is not encoded as its schema says"),
        (b"\x18\x00", "the record's field DOUBLE_many is not encoded as its schema says"),
        (b"\x03", "the record has a field without a number, or a group"),
        (b"\x00", "the record has a field without a number, or a group"),
        (b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "the record ends too early"),
        (b"\xd2\x05\x7f", "the record ends too early"),
        (b"\xd2\x05\x01\x09", "the record ends too early"),
    ],
)
def test_malformed_protobuf_record_is_reported_with_the_reason(data: bytes, reason: str) -> None:
    _, reasons = read([ROW + data], "DOUBLE_one", "DOUBLE_many", "inner.x")
    assert reasons == {0: reason}


def test_message_nested_deeper_than_the_limit_is_rejected() -> None:
    data = b""
    for _ in range(70):
        data = b"\xea\x05" + bytes([len(data) & 127 | 128, len(data) >> 7]) + data
    _, reasons = read([ROW + data], ".".join(["row"] * 80))
    assert reasons == {0: "it is nested deeper than 64 messages"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('syntax = "proto3"; message R {}', "the schema is not a base64 descriptor"),
        (
            schema('name: "a" dependency: "b.proto"'),
            "the schema imports b.proto, which the registry",
        ),
        (
            schema(
                'message_type { name: "R" field { name: "f" number: 1 type: TYPE_MESSAGE'
                ' type_name: ".X" label: LABEL_OPTIONAL } }'
            ),
            "the schema's field f has an unknown type, .X",
        ),
    ],
)
def test_invalid_protobuf_schema_is_rejected(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        ProtobufReader(text)
