"""The reader reads what another library writes, and no bytes make it raise."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.avro import AvroReader
from common.data.record_bytes import RecordBytes, wanted_of
from common.errors import UserError

NUMBERS = {
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
}
# Numbers that make the names of records unique.
NUMBERED = itertools.count()
SIMPLE = {
    **NUMBERS,
    "null": st.none(),
    "string": st.text(max_size=200),
    "bytes": st.binary(max_size=4),
}


@st.composite
def types(draw: st.DrawFn, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """Draw a type and a strategy for its values."""
    kind = draw(st.sampled_from([*SIMPLE, *(["array", "map", "record", "union"] * (depth > 0))]))
    if kind in SIMPLE:
        return kind, SIMPLE[kind]
    if kind == "union":
        first, values = draw(types(depth=0))
        return (first, values) if first == "null" else (["null", first], st.none() | values)
    if kind == "record":
        fields = [
            (f"f{at}", *draw(types(depth=depth - 1))) for at in range(draw(st.integers(1, 3)))
        ]
        written = [{"name": name, "type": type_} for name, type_, _ in fields]
        values = st.fixed_dictionaries({name: strategy for name, _, strategy in fields})
        return {"type": "record", "name": f"R{next(NUMBERED)}", "fields": written}, values
    items, values = draw(types(depth=depth - 1))
    if kind == "array":
        # Items that take no bytes would allow arrays of any size, so the reader refuses such
        # arrays.
        most = 0 if items == "null" else 4
        return {"type": "array", "items": items}, st.lists(values, max_size=most)
    return {"type": "map", "values": items}, st.dictionaries(
        st.text(max_size=2), values, max_size=3
    )


@st.composite
def slices(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    fields = [(f"c{at}", *draw(types())) for at in range(draw(st.integers(1, 4)))]
    values = st.fixed_dictionaries({name: strategy for name, _, strategy in fields})
    written = [{"name": name, "type": type_} for name, type_, _ in fields]
    schema = {"type": "record", "name": "Top", "fields": written}
    return schema, draw(st.lists(values, min_size=1, max_size=5))


def written(schema: dict[str, Any], rows: list[dict[str, Any]]) -> list[bytes]:
    parsed, values = fastavro.parse_schema(json.loads(json.dumps(schema))), []
    for row in rows:
        data = io.BytesIO()
        fastavro.schemaless_writer(data, parsed, row)
        values.append(data.getvalue())
    return values


def read(
    schema: Any,  # noqa: ANN401 -- any JSON
    values: list[bytes],
    *paths: str,
) -> tuple[list[list[Any]], dict[int, str]]:
    """Return the values at some paths, and the records that are broken."""
    records = RecordBytes(values)
    wanted, sinks = wanted_of([tuple(path.split(".")) for path in paths])
    AvroReader(json.dumps(schema)).read(records, wanted)
    columns = []
    for sink in sinks:
        cells, absent = sink.cells(len(values))
        listed = cells.tolist() if isinstance(cells, np.ndarray) else cells
        columns.append([None if no else cell for cell, no in zip(listed, absent, strict=True)])
    return columns, records.reasons


def as_read(value: Any) -> Any:  # noqa: ANN401 -- any value of a record
    """Convert a value to the reader's form: bytes become numbers, records empty objects."""
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, list):
        return [as_read(each) for each in value]
    return {} if isinstance(value, dict) else value


@given(slices())
def test_avro_records_round_trip(case: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    schema, rows = case
    names = [field["name"] for field in schema["fields"]]
    columns, reasons = read(schema, written(schema, rows), *names)
    assert reasons == {}
    for name, column in zip(names, columns, strict=True):
        assert [as_read(each) for each in column] == [as_read(row[name]) for row in rows]


@given(slices(), st.data())
def test_broken_avro_record_is_reported_and_its_neighbours_are_intact(
    case: tuple[dict[str, Any], list[dict[str, Any]]], data: st.DataObject
) -> None:
    schema, rows = case
    values, names = written(schema, rows), [field["name"] for field in schema["fields"]]
    whole, _ = read(schema, values, *names)
    where = data.draw(st.integers(0, len(values)))
    broken = data.draw(st.binary(max_size=20))
    columns, reasons = read(schema, [*values[:where], broken, *values[where:]], *names)
    assert reasons.keys() <= {where}
    for column, intact in zip(columns, whole, strict=True):
        del column[where]
        assert list(map(as_read, column)) == list(map(as_read, intact))


NESTED = {
    "type": "record",
    "name": "a.Outer",
    "fields": [
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["u", "v"]}},
        {
            "name": "before",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "Inner",
                    "fields": [
                        {"name": "x", "type": "double"},
                        {"name": "kind", "type": "Kind"},
                        {"name": "more", "type": ["null", "Inner"]},
                    ],
                },
            ],
        },
        {"name": "after", "type": "a.Inner"},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
        },
        {"name": "tags", "type": {"type": "map", "values": "long"}},
        {"name": "either", "type": ["string", "long", "null"]},
    ],
}


def test_path_finds_values_in_unions_named_types_and_maps() -> None:
    inner = {"x": 1.5, "kind": "v", "more": {"x": 2.5, "kind": "u", "more": None}}
    values = []
    for before, price, tags, either in (
        (None, b"\x01\x00", {"n": 4}, "text"),
        (inner, b"\xff", {"m": 5, "n": 6}, 7),
        (inner, b"", {}, None),
    ):
        row = {"kind": "u", "before": before, "after": inner, "tags": tags, "either": either}
        schema = json.loads(json.dumps(NESTED).replace(', "logicalType": "decimal"', ""))
        values += written(schema, [{**row, "price": price}])
    paths = ("kind", "before.x", "after.kind", "after.more.x", "price", "tags.n", "either")
    columns, reasons = read(NESTED, values, *paths, "nowhere", "before")
    assert reasons == {}
    assert columns == [
        *(["u"] * 3, [None, 1.5, 1.5], ["v"] * 3, [2.5] * 3, [2.56, -0.01, 0.0]),
        *([4, 6, None], ["text", 7, None], [None] * 3, [None, {}, {}]),
    ]


@pytest.mark.parametrize(
    ("schema", "data", "reason"),
    [
        ("double", b"\x00" * 7, "the record ends too early"),
        ("double", b"\x00" * 9, "the record is longer than its schema describes"),
        ("long", b"\x80" * 10, "a number in the record has more than 64 bits"),
        ("long", b"\x80", "the record ends too early"),
        ("string", b"\x03abc", "a length in the record is negative"),
        ("string", b"\x04\xff\xff", "a text in the record is not UTF-8"),
        ("boolean", b"\x02", "a boolean in the record is neither 0 nor 1"),
        (["null", "long"], b"\x04", "the record has a branch that its schema lacks"),
        (
            {"type": "array", "items": "null"},
            b"\x80\x80\x80\x80\x10",
            "more items than the record has bytes",
        ),
        ({"type": "array", "items": "long"}, b"\x08\x02", "more items than the record has bytes"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]},
            b"\x02" * 100 + b"\x00",
            "it is nested deeper than 64 records",
        ),
    ],
)
def test_malformed_avro_record_is_reported_with_the_reason(
    schema: object, data: bytes, reason: str
) -> None:
    top = {"type": "record", "name": "T", "fields": [{"name": "x", "type": schema}]}
    _, reasons = read(top, [data], "x")
    assert reason in reasons[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "Input data was truncated"),
        ('{"type": "record", "name": "R"}', "'fields'"),
        (
            '{"type": "record", "name": "R", "fields": [{"name": "x", "type": "y.Z"}]}',
            "no type y.Z",
        ),
        ("3", "3 is not a type"),
    ],
)
def test_invalid_avro_schema_is_rejected(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=f"the schema is not valid Avro: .*{expected}"):
        AvroReader(text)


def test_schema_can_refer_to_types_of_other_schemas() -> None:
    other = '{"type": "fixed", "name": "n.Two", "size": 2}'
    text = '{"type": "record", "name": "R", "fields": [{"name": "x", "type": "n.Two"}]}'
    wanted, [sink] = wanted_of([("x",)])
    AvroReader(text, [other]).read(RecordBytes([b"\x01\x02"]), wanted)
    assert sink.cells(1)[0] == [b"\x01\x02"]
