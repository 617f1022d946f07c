"""Records with schema ids become the columns that a job names, each by its own schema."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from common.core.messages import Schema
from common.data.codecs import codec_of
from common.data.registered import RegisteredCodec
from tests.unit.data.test_columns import ENVELOPE, job

if TYPE_CHECKING:
    from common.core.messages import SchemaKind
    from common.data.fields import DecodedColumns

FIRST = {"x": ["null", "double"], "n": "long", "label": "boolean", "image": "bytes"}
LATER = {"label": "boolean", "n": "int", "new": "string", "image": "bytes"}  # without x
FIELDS = """
x: {dtype: float32, default: 0.5}
n: {dtype: uint8}
image: {dtype: uint8, shape: [1, 2]}
label: {dtype: int64}
"""


def schema_of(fields: dict[str, Any]) -> dict[str, Any]:
    written = [{"name": name, "type": type_} for name, type_ in fields.items()]
    return {"type": "record", "name": "R", "fields": written}


def framed(number: int, schema: dict[str, Any], row: dict[str, Any]) -> bytes:
    data = io.BytesIO()
    data.write(b"\0" + number.to_bytes(4))
    fastavro.schemaless_writer(data, fastavro.parse_schema(schema), row)
    return data.getvalue()


def message_of(row: dict[str, Any]) -> tuple[str, Any]:
    """Return a Protobuf schema for such rows, and the class of its records."""
    file = FileDescriptorProto(name="rows.proto", syntax="proto3")
    message = file.message_type.add(name="Connection")
    kinds = {str: "TYPE_STRING", bytes: "TYPE_BYTES", int: "TYPE_DOUBLE", float: "TYPE_DOUBLE"}
    for number, (name, cell) in enumerate(row.items(), 1):
        kind = kinds[type(cell)]
        message.field.add(name=name, number=number, type=kind, label="LABEL_OPTIONAL")
    pool = DescriptorPool()
    pool.Add(file)
    made = GetMessageClass(pool.FindMessageTypeByName("Connection"))
    return b64encode(file.SerializeToString()).decode(), made


def codec(fields: str, *schemas: dict[str, Any]) -> RegisteredCodec:
    """Return a codec that knows these schemas, with ids from 1 on."""
    made = RegisteredCodec(job(fields).records.described(), "AVRO")
    for number, schema in enumerate(schemas, 1):
        made.learn(number, Schema("AVRO", json.dumps(schema)))
    return made


def decoded(fields: str, types: dict[str, Any], *rows: dict[str, Any]) -> DecodedColumns:
    schema = schema_of(types)
    return codec(fields, schema).decode([framed(1, schema, row) for row in rows])


def test_records_are_decoded_in_order_each_by_its_own_schema() -> None:
    made = codec(FIELDS, schema_of(FIRST), schema_of(LATER))
    old = {"x": 1.5, "n": 3, "label": True, "image": b"\1\2"}
    new = {"n": 4, "label": False, "new": "!", "image": b"\3\4"}
    values = [
        framed(1, schema_of(FIRST), old),
        framed(2, schema_of(LATER), new),
        b"{}",
        framed(1, schema_of(FIRST), {**old, "x": None}),
        framed(3, schema_of(FIRST), old),
        None,
    ]
    assert made.unknown(values) == {3}
    found = made.decode(values)
    assert found.kept.tolist() == [0, 1, 3]
    assert found.records["x"].tolist() == [1.5, 0.5, 0.5]
    assert found.records["n"].tolist() == [3, 4, 3]
    assert found.records["image"].tolist() == [[[1, 2]], [[3, 4]], [[1, 2]]]
    assert found.records["label"].tolist() == [1, 0, 1]
    assert [index for index, _ in found.skipped] == [2, 4, 5]
    assert [why.partition(":")[0] for _, why in found.skipped] == [
        "the record does not begin with a schema id, so no schema-registry serializer wrote it",
        "the schema registry has no schema with the record's id",
        "no value (a tombstone)",
    ]


def test_avro_and_json_decode_to_the_same_columns() -> None:
    inner = {"amount": ["null", "float"], "age": "int", "country": "string", "is_fraud": "boolean"}
    after = {"type": "record", "name": "After", "fields": schema_of(inner)["fields"]}
    payload = {"type": "record", "name": "P", "fields": [{"name": "after", "type": after}]}
    rows = [
        {"payload": {"after": {"amount": a, "age": 40, "country": c, "is_fraud": f}}}
        for a, c, f in ((1.5, "DE", True), (None, "FR", False))
    ]
    found = decoded(ENVELOPE, {"payload": payload}, *rows)
    expected = codec_of(job(ENVELOPE).records).decode([json.dumps(row).encode() for row in rows])
    assert found.skipped == expected.skipped == []
    for name, column in expected.records.items():
        assert found.records[name].dtype == column.dtype
        assert found.records[name].tolist() == column.tolist()


@pytest.mark.parametrize(
    ("field", "type_", "value", "reason"),
    [
        ("{dtype: float32}", ["null", "double"], None, "x': is null or absent"),
        ("{dtype: float32}", "string", "12", "a text is not a number that fits float32"),
        ("{dtype: float32}", "double", float("nan"), "a number does not fit float32"),
        ("{dtype: float32}", "double", 1e300, "a number does not fit float32"),
        ("{dtype: uint8}", "long", 256, "a number does not fit uint8"),
        ("{dtype: int64}", "double", 1.5, "a number does not fit int64"),
        ("{dtype: bool}", "int", 2, "a number does not fit bool"),
        ("{dtype: int64, from: y}", "int", 2, "field 'x', y: is null or absent"),
        ("{dtype: int64, hash: 9}", "bytes", b"a", "an array is not a text, a number"),
        ("{dtype: uint8, shape: [3]}", "bytes", b"ab", "an array is not an array of shape [3]"),
        (
            "{dtype: float32, shape: [2]}",
            {"type": "array", "items": "float"},
            [1.0],
            "an array is not an array of shape [2]",
        ),
    ],
)
def test_missing_or_mistyped_field_is_skipped_with_its_name(
    field: str, type_: object, value: object, reason: str
) -> None:
    found = decoded(f"x: {field}", {"x": type_}, {"x": value})
    [(index, why)] = found.skipped
    assert (index, len(found.kept)) == (0, 0)
    assert reason in why


@pytest.mark.parametrize(
    ("field", "type_", "values", "numbers"),
    [
        ("{dtype: int64}", ["int", "boolean", "double"], [7, True, 8.0], [7, 1, 8]),
        ("{dtype: float64, default: 1, scale: 2}", ["null", "int"], [None, 3], [2.0, 6.0]),
        ("{dtype: int8, default: -1}", ["null", "int"], [None, 3], [-1, 3]),
        ("{dtype: int8, default: 9}", ["null", "double"], [None, 3.0], [9, 3]),
        ("{dtype: float32, parse: number}", "string", ["1.5", "2"], [1.5, 2.0]),
        ("{dtype: int8, map: {a: 4}, default: 5}", ["null", "string"], ["a", "b", None], [4, 5, 5]),
        (
            "{dtype: int8, shape: [2], default: 6}",
            ["null", {"type": "array", "items": "int"}],
            [[1, 2], None],
            [[1, 2], [6, 6]],
        ),
    ],
)
def test_avro_values_are_converted_to_numbers(
    field: str, type_: object, values: list[object], numbers: list[object]
) -> None:
    found = decoded(f"x: {field}", {"x": type_}, *({"x": value} for value in values))
    assert found.skipped == []
    assert found.records["x"].tolist() == numbers


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (Schema("AVRO", "{"), "schema 7: the schema is not valid Avro: Input data was truncated"),
        (Schema("JSON", "{}"), "schema 7 is JSON, not AVRO"),
    ],
)
def test_records_with_an_unusable_schema_are_skipped(schema: Schema, reason: str) -> None:
    made = codec("x: {dtype: int8}")
    made.learn(7, schema)
    assert made.decode([b"\0\0\0\0\7\2"]).skipped == [(0, reason)]
    assert made.unknown([b"\0\0\0\0\7\2"]) == set()


@pytest.mark.parametrize("kind", ["AVRO", "PROTOBUF"])
@pytest.mark.parametrize("bad", [b"", b"\1\2\3"])
def test_image_of_wrong_length_in_a_poll_of_100_skips_one_record(
    kind: SchemaKind, bad: bytes
) -> None:
    images = [bytes([at, 1, 2, 3]) for at in range(99)]
    images.insert(40, bad)
    made = RegisteredCodec(job("image: {dtype: uint8, shape: [2, 2]}").records.described(), kind)
    if kind == "AVRO":
        schema = schema_of({"image": "bytes"})
        made.learn(1, Schema(kind, json.dumps(schema)))
        values = [framed(1, schema, {"image": image}) for image in images]
    else:
        text, message = message_of({"image": b""})
        made.learn(1, Schema(kind, text))
        # Proto3 does not write an empty field, so such a message has no image at all.
        rows = [message(image=image).SerializeToString() for image in images]
        values = [b"\0\0\0\0\1\0" + row for row in rows]

    found = made.decode(values)

    reason = "field 'image': an array is not an array of shape [2, 2], each a number that fits"
    assert found.skipped == [(40, f"{reason} uint8")]
    assert found.records["image"].tobytes() == b"".join(images[:40] + images[41:])


def test_invalid_boolean_in_an_array_is_skipped_beside_longer_arrays() -> None:
    array = {"type": "array", "items": "boolean"}
    schema = schema_of({"x": array})
    made = codec("x: {dtype: bool, shape: [2]}", schema)
    good = framed(1, schema, {"x": [True, False]})
    bad = good[:-3] + b"\2\0\0"
    longer = framed(1, schema, {"x": [True] * 3})

    for poll in ([good, bad], [good, bad, longer]):
        found = made.decode(poll)
        assert found.kept.tolist() == [0]
        assert found.skipped[0] == (1, "schema 1: a boolean in the record is neither 0 nor 1")


def test_record_with_a_decimal_beyond_float64_is_skipped() -> None:
    schema = schema_of({"x": {"type": "bytes", "logicalType": "decimal", "precision": 4}})
    made = codec("x: {dtype: float64}", schema)

    found = made.decode([b"\0\0\0\0\1\x90\3" + b"\x7f" * 200, b"\0\0\0\0\1\2\7"])

    assert found.skipped == [(0, "field 'x': a number does not fit float64")]
    assert found.records["x"].tolist() == [7]


def test_objects_represent_bytes_as_lists() -> None:
    schema = schema_of({"image": "bytes"})
    made = codec("image: {dtype: uint8, shape: [2]}", schema)

    found = made.objects([framed(1, schema, {"image": image}) for image in (b"\1\2", b"\3")])

    assert found == [{"image": [1, 2]}, {"image": [3]}]
