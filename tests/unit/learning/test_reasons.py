"""Reasons for skipped records: a sentence for each fault, without the record's content."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import example, given
from hypothesis import strategies as st

from common.core.messages import Schema
from common.data.codecs import codec_of, make_codec
from common.data.fields import Field
from common.data.registered import RegisteredCodec
from tests.unit.data.test_columns import job
from tests.unit.data.test_registered import framed, schema_of

if TYPE_CHECKING:
    from common.core.messages import SchemaKind
    from common.data.codecs import Codec
    from common.data.fields import DtypeName

MARKER, NUMBER = "s3cr3t", 8675309
NAMES = "abcdefgh"
FIELDS = """
a: {dtype: int64, default: 3}
b: {dtype: float32, shape: [2]}
c: {dtype: bool}
d: {dtype: uint8, map: {x: 1}}
e: {dtype: float32, one_hot: [x, y]}
f: {dtype: float32, parse: number}
g: {dtype: float64, parse: time}
h: {dtype: int64, hash: 9}
label: {dtype: int8, from: [a, b.c]}
"""
MARKED = st.sampled_from([MARKER, NUMBER, NUMBER + 0.5, NUMBER * 10**300, True, None])
VALUES = MARKED | st.lists(MARKED, max_size=3) | st.dictionaries(st.just(MARKER), MARKED)
RECORDS = st.dictionaries(st.sampled_from([*NAMES, MARKER]), VALUES)
JUNK = st.binary(max_size=20)


def hashed() -> Codec:
    shapes: dict[str, tuple[DtypeName, tuple[int, ...]]] = {
        "index": ("int64", (3,)),
        "value": ("float32", (3,)),
        "c": ("bool", ()),
    }
    fields = [Field(name, dtype, shape) for name, (dtype, shape) in shapes.items()]
    return make_codec("json", fields, 100)


def registered(kind: SchemaKind, text: str) -> Codec:
    made = RegisteredCodec(job(FIELDS).records.described(), kind)
    made.learn(1, Schema(kind, text))
    return made


def reasons(codec: Codec, *values: bytes) -> list[str]:
    return [why for _, why in codec.decode(values).skipped]


def assert_nothing_of_it(reasons: list[str]) -> None:
    for reason in reasons:
        assert MARKER not in reason
        assert str(NUMBER) not in reason


@given(record=RECORDS, cut=st.integers(0, 3), junk=JUNK)
@example({MARKER: [MARKER]}, 0, b"")
@example({MARKER: 1}, 0, b"\xff" + MARKER.encode())
def test_json_reason_contains_nothing_of_the_record(
    record: dict[str, Any], cut: int, junk: bytes
) -> None:
    data = json.dumps(record).encode()
    values = (data, data[: len(data) - cut] + junk, junk + data, b'"' + junk + MARKER.encode())
    for codec in (codec_of(job(FIELDS).records), hashed()):
        assert_nothing_of_it(reasons(codec, *values))


@pytest.mark.parametrize("kind", ["string", "bytes", {"type": "array", "items": "string"}])
@given(junk=JUNK, fixed=st.integers(0, 30))
def test_avro_reason_contains_nothing_of_the_record(kind: Any, junk: bytes, fixed: int) -> None:  # noqa: ANN401
    cell = {"string": MARKER, "bytes": MARKER.encode()}.get(str(kind), [MARKER])
    schema = schema_of(dict.fromkeys(NAMES, kind))
    data = framed(1, schema, dict.fromkeys(NAMES, cell))
    codec = registered("AVRO", json.dumps(schema))
    assert_nothing_of_it(reasons(codec, data, data + junk, data[:fixed] + junk + MARKER.encode()))
    assert_nothing_of_it(reasons(codec, b"\0" + NUMBER.to_bytes(4), MARKER.encode()))


@given(junk=JUNK, fixed=st.integers(0, 30))
def test_protobuf_reason_contains_nothing_of_the_record(junk: bytes, fixed: int) -> None:
    file = FileDescriptorProto(name="rows.proto", syntax="proto3")
    message = file.message_type.add(name="Row")
    for number, name in enumerate(NAMES, 1):
        message.field.add(name=name, number=number, type="TYPE_STRING", label="LABEL_OPTIONAL")
    codec = registered("PROTOBUF", b64encode(file.SerializeToString()).decode())
    text = bytes([len(MARKER)]) + MARKER.encode()
    row = b"\0\0\0\0\1\0" + b"".join(bytes([number << 3 | 2]) + text for number in range(1, 9))
    assert_nothing_of_it(reasons(codec, row, row + junk, row[:fixed] + junk + MARKER.encode()))


@given(junk=JUNK)
def test_tensor_reason_contains_nothing_of_the_record(junk: bytes) -> None:
    codec = make_codec("tensor", job("a: {dtype: int64}").records.described())
    assert_nothing_of_it(reasons(codec, junk + MARKER.encode()))


def test_many_faults_of_one_kind_have_one_skip_reason() -> None:
    codec = codec_of(job("amount: {dtype: float32}").records)
    wrong = [b'{"amount": "%s-%d"}' % (MARKER.encode(), number) for number in range(10_000)]
    assert set(reasons(codec, *wrong)) == {
        "field 'amount': a text is not a number that fits float32"
    }
    torn = [b'{"amount": %s' % (b" " * number) for number in range(1_000)]
    assert len(set(reasons(codec, *torn))) == 1
    assert len(set(reasons(codec, *(b'{"amount": %sx' % (b"1" * n) for n in range(1, 300))))) <= 3
