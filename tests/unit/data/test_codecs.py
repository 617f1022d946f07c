"""Codecs return what was written, even beside broken records."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.data.codecs import make_codec
from common.data.columns import bucket_of
from common.data.fields import DTYPE_NAMES, Columns, DecodedColumns, Field

NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters='"\\'), min_size=1)
# Codecs that can also encode columns. The others only decode, by their producers' schemas.
WRITTEN = ("tensor", "json")
FINITE = {"allow_nan": False, "allow_infinity": False}
FIELDS = [Field("x", "float32", (2,)), Field("i", "int8"), Field("b", "bool")]


@st.composite
def described_records(draw: st.DrawFn) -> tuple[list[Field], Columns]:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    count = draw(st.integers(0, 6))
    fields, records = [], {}
    for name in names:
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
        field = Field(name, draw(st.sampled_from(DTYPE_NAMES)), shape)
        finite = {} if "float" not in field.dtype else FINITE
        records[name] = draw(
            hnp.arrays(field.numpy_dtype, (count, *shape), elements=finite or None)
        )
        fields.append(field)
    return fields, records


def same(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


@pytest.mark.parametrize("name", WRITTEN)
@given(case=described_records())
def test_codec_round_trips_records(name: str, case: tuple[list[Field], Columns]) -> None:
    fields, records = case
    codec = make_codec(name, fields)
    values = codec.encode(records)
    decoded = codec.decode(values)
    assert all(same(decoded.records[field.name], records[field.name]) for field in fields)
    assert decoded.kept.tolist() == list(range(len(values)))
    assert decoded.skipped == []


@pytest.mark.parametrize("name", WRITTEN)
@given(
    count=st.integers(1, 12),
    broken=st.dictionaries(st.integers(0, 11), st.sampled_from([None, b"", b"{", b"x" * 500])),
)
def test_broken_value_is_skipped_and_the_others_are_intact(
    name: str, count: int, broken: dict[int, bytes | None]
) -> None:
    codec = make_codec(name, FIELDS)
    random = np.random.default_rng(count)
    records: Columns = {
        "x": random.normal(size=(count, 2)).astype(np.float32),
        "i": random.integers(-128, 128, count).astype(np.int8),
        "b": random.integers(0, 2, count).astype(np.bool_),
    }
    values: list[bytes | None] = [*codec.encode(records)]
    for index in list(broken):
        if index < count:
            values[index] = broken[index]
        else:
            del broken[index]
    decoded = codec.decode(values)
    intact = [index for index in range(count) if index not in broken]
    assert decoded.kept.tolist() == intact
    assert [index for index, _ in decoded.skipped] == sorted(broken)
    assert all(same(decoded.records[name], records[name][intact]) for name in records)


@given(values=st.lists(st.none() | st.binary(max_size=20), max_size=5))
@pytest.mark.parametrize("name", ["tensor", "json", "avro", "protobuf"])
def test_codec_never_raises_on_arbitrary_bytes(name: str, values: list[bytes | None]) -> None:
    decoded = make_codec(name, FIELDS).decode(values)
    assert len(decoded.kept) + len(decoded.skipped) == len(values)
    assert len(decoded.records["x"]) == len(decoded.kept)


def test_tensor_columns_share_one_buffer() -> None:
    fields = [Field("x", "float32", (2,)), Field("y", "int64")]
    codec = make_codec("tensor", fields)
    decoded = codec.decode(codec.encode({"x": np.ones((4, 2), np.float32), "y": np.arange(4)}))
    assert decoded.records["x"].base is not None
    assert decoded.records["x"].strides[0] == decoded.records["y"].strides[0] == 16


def test_tensor_codec_decodes_any_nonzero_byte_as_true() -> None:
    decoded = make_codec("tensor", [Field("b", "bool")]).decode([b"\x00", b"\x01", b"\xff"])
    assert decoded.records["b"].view(np.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ('{"x": [1, 2], "b": true}', "field 'i': is null or absent"),
        ('{"x": [1, 2, 3], "i": 1, "b": true}', "x"),
        ('{"x": [1], "i": 1, "b": true}', "x"),
        ('{"x": 1, "i": 1, "b": true}', "x"),
        ('{"x": [1, "2"], "i": 1, "b": true}', "x"),
        ('{"x": [1, null], "i": 1, "b": true}', "x"),
        ('{"x": [1, 1e39], "i": 1, "b": true}', "x"),
        ('{"x": [1, 2], "i": 1.5, "b": true}', "i"),
        ('{"x": [1, 2], "i": "1", "b": true}', "field 'i': a text is not a number that fits int8"),
        ('{"x": [1, 2], "i": 128, "b": true}', "i"),
        ('{"x": [1, 2], "i": 1, "b": 2}', "field 'b': a number does not fit bool"),
        ('{"x": [1, 2], "i": NaN, "b": true}', "malformed"),
        ("[[1, 2], 1, true]", "object"),
    ],
)  # fmt: skip
def test_json_record_of_wrong_type_or_shape_is_skipped_with_its_field(
    value: str, named: str
) -> None:
    ((index, reason),) = make_codec("json", FIELDS).decode([value.encode()]).skipped
    assert index == 0
    assert named in reason


def test_json_keys_without_a_field_are_ignored() -> None:
    value = b'{"more": {"deep": [1]}, "x": [1, 2.5], "i": -3, "b": false}'
    decoded = make_codec("json", FIELDS).decode([value])
    assert decoded.records["x"].tolist() == [[1, 2.5]]
    assert decoded.records["i"].tolist() == [-3]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    "wrong",
    [
        {"x": np.zeros((2, 3), np.float32)},
        {"x": np.zeros((2, 2), np.float64)},
        {"i": np.zeros(3, np.int8)},
        {"i": None},
    ],
)
def test_encode_with_wrong_columns_raises_value_error(
    name: str, wrong: dict[str, npt.NDArray[Any] | None]
) -> None:
    records = {
        "x": np.zeros((2, 2), np.float32),
        "i": np.zeros(2, np.int8),
        "b": np.zeros(2, np.bool_),
        **wrong,
    }
    with pytest.raises(ValueError, match=f"'{next(iter(wrong))}'"):
        make_codec(name, FIELDS).encode({k: v for k, v in records.items() if v is not None})


HASHED = [
    Field("label", "int64"),
    Field("index", "int32", (3,)),
    Field("value", "float32", (3,)),
]


def hashed(*values: bytes | None) -> DecodedColumns:
    return make_codec("json", HASHED, buckets=1000).decode(values)


def test_keys_without_a_field_are_hashed() -> None:
    value_bytes = b'{"age": 41, "label": 1, "city": "Pune", "shop": null, "code": ""}'
    decoded = hashed(
        b"\0\0\0\0\7" + value_bytes, b'{"label": 0}', b'{"label": 0, "seen": true, "sum": -2.5}'
    )
    assert decoded.skipped == []
    assert decoded.records["label"].tolist() == [1, 0, 0]
    buckets = [bucket_of("age", None, 1000), bucket_of("city", "Pune", 1000)]
    assert decoded.records["index"][0, :2].tolist() == buckets
    np.testing.assert_allclose(decoded.records["value"][0], [np.log(42), 1, 0])
    assert decoded.records["value"][1].tolist() == [0, 0, 0]
    np.testing.assert_allclose(decoded.records["value"][2], [np.log(2), -np.log(3.5), 0])
    assert {name: column.dtype.name for name, column in decoded.records.items()} == {
        field.name: field.dtype for field in HASHED
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"a": 1}', "'label'"),
        (b'{"label": 1, "a": 1, "b": 2, "c": 3, "d": 4}', "the record has more than 3 features"),
        (b'{"label": 1, "a": [1]}', "a feature is neither a text nor a number"),
        (b'{"label": 1, "a": {}}', "a feature is neither a text nor a number"),
        (b'{"label": 1, "a": 1' + b"0" * 400 + b"}", "too large"),
        (b'{"label": 1, "a": "\xff"}', "UTF-8"),
        (b'{"label": 1, "a": ' + b"[" * 100_000, ""),
        (None, "no value"),
    ],
)
def test_record_with_unhashable_features_is_skipped(value: bytes | None, expected: str) -> None:
    good = b'{"label": 7, "a": 1}'
    decoded = hashed(good, value, good)
    ((index, reason),) = decoded.skipped
    assert index == 1
    assert expected in reason
    assert decoded.kept.tolist() == [0, 2]
    assert decoded.records["label"].tolist() == [7, 7]
    assert decoded.records["index"].shape == (2, 3)


@given(st.lists(st.none() | st.binary(max_size=20), max_size=5))
def test_hashing_never_raises_on_arbitrary_bytes(values: list[bytes | None]) -> None:
    decoded = hashed(*values)
    assert len(decoded.kept) + len(decoded.skipped) == len(values)


def test_encode_with_hashed_features_raises_value_error() -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        make_codec("json", HASHED, buckets=9).encode({})


def test_framed_json_decodes_the_same_at_any_position_in_a_poll() -> None:
    codec = make_codec("json", [Field("x", "float32")])
    # The untyped parser refuses a number beyond float64, even in a key that no field names.
    plain, framed = b'{"x": 1}', b'\0\0\0\0\7{"x": 2, "y": 1e400}'

    for poll in ([framed], [framed, plain], [plain, framed]):
        assert codec.decode(poll).skipped == []


@pytest.mark.parametrize("stack", [0, 400])
@pytest.mark.parametrize(("depth", "sound"), [(255, True), (256, False), (980, False)])
def test_json_depth_limit_does_not_depend_on_the_stack_depth(
    stack: int, depth: int, *, sound: bool
) -> None:
    codec = make_codec("json", [Field("x", "float32")])
    # Brackets inside texts do not count as levels.
    text = b'"' + b"[" * 300 + b'\\"]"'
    value = b'{"x": 1, "t": ' + text + b', "y": ' + b"[" * depth + b"]" * depth + b"}"

    def skipped(below: int) -> list[tuple[int, str]]:
        return skipped(below - 1) if below else codec.decode([value]).skipped

    reasons = [] if sound else [(0, "it is nested deeper than 256 objects and arrays")]
    assert skipped(stack) == reasons


def test_deeply_nested_invalid_json_is_skipped() -> None:
    values = [
        b"[" * 300,
        b'"' + b"[" * 300 + b'"',
        b'"' * 3 + b"[" * 300,
        b"]" * 300 + b"[" * 300,
        b"\\" + b"{" * 300,
    ]

    assert len(make_codec("json", [Field("x", "float32")]).decode(values).skipped) == len(values)
