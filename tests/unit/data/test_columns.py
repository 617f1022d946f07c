"""Fields are found by path and read as the job file says, or the reason names the field."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from common.data.codecs import JsonCodec, codec_of
from common.errors import UserError
from common.jobs.job_file import parse_job
from common.jobs.spec import JobSpec, job_from_json
from common.learning.tasks import build_model, task_of

if TYPE_CHECKING:
    from common.data.fields import DecodedColumns

ENVELOPE = """
features:
  {dtype: float32, from: [payload.after.amount, payload.after.age], default: 0.0, scale: [0.01, 2]}
country: {dtype: int64, from: payload.after.country, hash: 4096}
label: {dtype: int64, from: payload.after.is_fraud, map: {"false": 0, "true": 1}}
"""


def job(fields: str, **task: Any) -> JobSpec:  # noqa: ANN401 -- any JSON
    text = {
        "name": "columns",
        "streams": ["s"],
        "records": {"codec": "json", "fields": yaml.safe_load(fields)},
        "task": task or {"entrypoint": "some.tasks:Task"},
        "batch_size": 2,
        "group_size": 1,
        "optimizer": {"learning_rate": 0.1},
    }
    return parse_job(yaml.safe_dump(text, sort_keys=False))


def decoded(fields: str, *records: object) -> DecodedColumns:
    return codec_of(job(fields).records).decode([json.dumps(record).encode() for record in records])


def column(field: str, *values: object) -> list[Any]:
    """Return column `x` of records with these values; none of them may be skipped."""
    found = decoded(f"x: {field}", *({"x": value} for value in values))
    assert found.skipped == []
    numbers: list[Any] = found.records["x"].tolist()
    return numbers


def reason(field: str, record: object) -> str:
    """Return the reason why the one record is skipped."""
    ((index, why),) = decoded(f"x: {field}", record).skipped
    assert index == 0
    return why


def test_paths_read_fields_of_an_envelope() -> None:
    found = decoded(
        ENVELOPE,
        {"payload": {"after": {"amount": 300, "age": None, "country": "IN", "is_fraud": True}}},
        {"payload": {"before": None, "after": None}},
        {"payload": {"after": {"age": 1.5, "country": 7, "is_fraud": "false", "more": [1]}}},
    )
    assert found.records["features"].dtype == np.float32
    assert found.records["features"].tolist() == [[3, 0], [0, 3]]
    hashes = [crc32(f"payload.after.country={value}".encode()) % 4096 for value in ("IN", "7")]
    assert found.records["country"].tolist() == hashes
    assert found.records["label"].tolist() == [1, 0]
    assert found.kept.tolist() == [0, 2]
    expected = "field 'country', payload.after.country: is null or absent, and has no `default`"
    assert found.skipped == [(1, expected)]


def test_path_escapes_dots_and_field_name_is_a_single_key() -> None:
    found = decoded('{a.b: {dtype: int8}, c: {dtype: int8, from: "d\\\\.e.f"}}',
                    {"a.b": 1, "d.e": {"f": 2}})  # fmt: skip
    assert {name: each.tolist() for name, each in found.records.items()} == {"a.b": [1], "c": [2]}


@pytest.mark.parametrize(
    ("field", "values", "numbers"),
    [
        ("{dtype: int64}", [1, 1.0, True, -(2**63)], [1, 1, 1, -(2**63)]),
        ("{dtype: int64, default: 7}", [None, 3.0, 2**63 - 1], [7, 3, 2**63 - 1]),
        ("{dtype: int64}", [2**63 - 1, 2.0], [2**63 - 1, 2]),
        ("{dtype: float64}", [1, True, 0.5], [1.0, 1.0, 0.5]),
        ("{dtype: bool}", [True, 0, 1.0], [True, False, True]),
        ("{dtype: bool, default: 1}", [None, False], [True, False]),
        ("{dtype: int8, shape: [2], default: 9}", [None, [1, None]], [[9, 9], [1, 9]]),
        ("{dtype: int8, shape: [2]}", [[2.0, True]], [[2, 1]]),
        ("{dtype: float32, shape: [2, 1], scale: 2}", [[[1], [2]]], [[[2], [4]]]),
        ("{dtype: float32, scale: 0.5, offset: 1}", [4, 5], [3, 3.5]),
        ("{dtype: float32, default: 8, scale: 0.5}", [None, 2], [4, 1]),
        ("{dtype: uint8, map: {a: 3, '1': 4}}", ["a", 1, 1.0, "1"], [3, 4, 4, 4]),
        ("{dtype: uint8, map: {a: 3}, default: 255}", ["a", "b", None], [3, 255, 255]),
        ("{dtype: uint8, one_hot: [a, 6, true]}", ["a", 6.0, True], np.eye(3).tolist()),
        ("{dtype: int8, one_hot: [a, b], default: 0}", ["b", "c", None], [[0, 1], [0, 0], [0, 0]]),
        ("{dtype: float32, parse: number}", ["12.5", 3, True], [12.5, 3, 1]),
        ("{dtype: float32, parse: number, default: -1}", ["", None, "1"], [-1, -1, 1]),
        ("{dtype: int64, parse: number}", ["12", "1e3"], [12, 1000]),
        ("{dtype: float64, parse: time}", ["1970-01-02", 5], [86400, 5]),
        ("{dtype: float64, parse: time}", ["1970-01-01T01:00:00+01:00"], [0]),
        ("{dtype: float32, parse: time, offset: -1.7e9}", ["2023-11-14T22:13:21Z"], [1]),
    ],
)  # fmt: skip
def test_json_values_are_converted_to_numbers(
    field: str, values: list[object], numbers: list[object]
) -> None:
    assert column(field, *values) == numbers
    # A value is read the same if its record is the only one.
    assert [column(field, value)[0] for value in values] == numbers


@pytest.mark.parametrize(
    ("field", "record", "expected"),
    [
        ("{dtype: int64}", {}, "field 'x': is null or absent, and has no `default`"),
        ("{dtype: int64}", {"x": None}, "field 'x': is null or absent, and has no `default`"),
        ("{dtype: int64}", {"x": 1.5}, "field 'x': a number does not fit int64"),
        ("{dtype: int64}", {"x": 2**63}, "field 'x': a number does not fit int64"),
        ("{dtype: int64}", {"x": 1e300}, "field 'x': a number does not fit int64"),
        ("{dtype: int64, default: 0}", {"x": "1"}, "field 'x': a text is not a number that fits"),
        ("{dtype: bool}", {"x": 2}, "field 'x': a number does not fit bool"),
        ("{dtype: float32}", {"x": 1e39}, "field 'x': a number does not fit float32"),
        ("{dtype: float32, scale: 1e30}", {"x": 1e10}, "field 'x': a number does not fit float32"),
        ("{dtype: float32, shape: [2]}", {"x": [1]}, "field 'x': an array is not an array of"),
        ("{dtype: float32, shape: [2]}", {"x": [1, None]}, "field 'x': is null or absent"),
        ("{dtype: int8, from: [a, b.c]}", {"a": 1, "b": [2]}, "field 'x', b.c: is null or absent"),
        ("{dtype: float32, from: [a, b]}", {"a": 1, "b": {}}, "'x', b: an object is not a number"),
        ("{dtype: uint8, map: {a: 1}}", {"x": "b"}, "field 'x': a text is not one of the 1 that"),
        ("{dtype: uint8, map: {a: 1}}", {"x": ["a"]}, "field 'x': an array is not one of the 1"),
        ("{dtype: uint8, one_hot: [a]}", {"x": "b"}, "field 'x': a text is not one of the 1 that"),
        ("{dtype: int64, hash: 9}", {"x": {}}, "field 'x': an object is not a text, a number"),
        ("{dtype: float32, parse: number}", {"x": "1_0"}, "field 'x': a text is not a text"),
        ("{dtype: float32, parse: number}", {"x": "inf"}, "field 'x': a text is not a text"),
        ("{dtype: int64, parse: number}", {"x": "0.5"}, "of a number that fits int64"),
        ("{dtype: float64, parse: time}", {"x": "soon"}, "a text is not a text of a time"),
        ("{dtype: int8}", [1], "a record must be a JSON object, got list"),
    ],
)  # fmt: skip
def test_unreadable_value_is_skipped_with_field_and_value_type(
    field: str, record: object, expected: str
) -> None:
    assert expected in reason(field, record)


def test_path_shared_by_fields_of_different_types_is_read_for_each() -> None:
    found = decoded(
        "{x: {dtype: float32, from: hour, scale: 0.5},"
        " y: {dtype: uint8, from: hour, one_hot: [1, 2]},"
        " z: {dtype: int64, from: hour, default: 0}}",
        {"hour": 2},
        {"hour": "2"},
    )
    assert [each.tolist() for each in found.records.values()] == [[1.0], [[0, 1]], [2]]
    assert [index for index, _ in found.skipped] == [1]


VALUES = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from([0.5, 2.0, "a", "2", []])
)


@given(st.lists(st.fixed_dictionaries({}, optional={"a": VALUES, "b": VALUES}), max_size=6))
def test_typed_and_untyped_json_parsers_agree(
    records: list[dict[str, object]],
) -> None:
    fields = job(
        "{x: {dtype: uint8, from: a, default: 3}, y: {dtype: float32, from: [b, b]},"
        " z: {dtype: uint8, from: a, map: {q: 1}, default: 0}}"
    ).records.described()
    values = [json.dumps(record).encode() for record in records]
    one = JsonCodec(fields[:2]).decode(values)
    # Field z reads the path of x as another type. It skips no record that x accepts.
    other = JsonCodec(fields).decode(values)
    assert one.skipped == other.skipped
    assert one.kept.tolist() == other.kept.tolist()
    for name, numbers in one.records.items():
        assert numbers.dtype == other.records[name].dtype
        assert numbers.tolist() == other.records[name].tolist()


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("{dtype: int8, from: a..b}", "x: from: must be keys with dots between them"),
        ("{dtype: int8, from: [a, '']}", "x: from: must be keys with dots between them"),
        (f"{{dtype: int8, from: {'a.' * 32}b}}", "x: from: must be keys with dots between them"),
        ("{dtype: int8, from: []}", "x.from: must have at least 1 entries"),
        (
            "{dtype: int8, from: [a, b], shape: [3]}",
            "x: shape: [3] conflicts with the shape implied by `from` ([2])",
        ),
        ("{dtype: int8, hash: 3, shape: [3]}", "x: shape: hash converts a single value"),
        ("{dtype: int8, hash: 3, map: {a: 1}}", "x: hash and map cannot be combined"),
        ("{dtype: int8, hash: 300}", "x: hash: must fit into dtype int8, got 299"),
        ("{dtype: int8, map: {a: 0.5}}", "x: map: must fit into dtype int8, got 0.5"),
        ("{dtype: int8, default: 128}", "x: default: must fit into dtype int8, got 128"),
        ("{dtype: int8, default: [1, 2]}", "x: default: must be one number, or one for each"),
        ("{dtype: int8, from: [a, b], default: [1]}", "x: default: must be one number, or one"),
        ("{dtype: int8, scale: 2}", "x: scale and offset require dtype float32 or float64"),
        ("{dtype: float32, hash: 9, scale: 2}", "x: scale and offset require dtype"),
        ("{dtype: int8, one_hot: [1, 1.0]}", "x: one_hot: lists a symbol twice"),
        ("{dtype: int8, one_hot: [a], default: 1}", "x: default: must be 0 with one_hot, got 1"),
        ("{dtype: int8, from: [a, b], one_hot: [a]}", "x: one_hot: requires a single"),
        ("{dtype: int8, form: a}", 'unknown field "records.fields.x.form" (did you mean "from"?)'),
    ],
)
def test_invalid_column_options_are_rejected_by_path(field: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        job(f"x: {field}")
    assert expected in str(caught.value)


def test_field_path_with_tensor_codec_is_rejected() -> None:
    text = job("x: {dtype: int8, from: a}").model_dump_json().replace('"json"', '"tensor"')
    with pytest.raises(UserError, match=r"fields.x.from: requires records with named values"):
        job_from_json(text)


def test_job_json_contains_only_the_options_of_each_field() -> None:
    plain = job("x: {dtype: int8, shape: [2], default: null}")
    assert json.loads(plain.model_dump_json())["records"]["fields"]["x"] == {
        "dtype": "int8",
        "shape": [2],
    }
    named = job(ENVELOPE)
    assert job_from_json(named.model_dump_json()) == named
    assert '"from":["payload.after.amount","payload.after.age"]' in named.model_dump_json()


NAMED = """
{a: {dtype: float64}, p: {dtype: bool, one_hot: [u, v]}, n: {dtype: int16, shape: [2]},
 label: {dtype: bool}}
"""


@pytest.mark.parametrize(
    ("options", "count"), [({}, 5), ({"inputs": ["n"]}, 2), ({"inputs": ["p", "a"]}, 3)]
)
def test_built_in_task_concatenates_numeric_fields(options: dict[str, Any], count: int) -> None:
    spec = job(NAMED, name="tabular-mlp", classes=2, hidden=[4], **options)
    assert spec.task_options["features"] == count
    task = task_of(spec, ())
    found = codec_of(spec.records).decode([b'{"a": 1.5, "p": "v", "n": [3, 4], "label": true}'])
    import torch  # noqa: PLC0415 -- for this test alone

    records = {name: torch.from_numpy(each.copy()) for name, each in found.records.items()}
    outputs = task.forward(build_model(task, 0), records)
    assert outputs.shape == (1, 2)
    assert task.losses(outputs, records).shape == (1,)


def test_task_input_without_a_field_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"task.inputs: must be fields of the records \(a, p, n, label\), got 'b'"
    ):
        job(NAMED, name="logistic-regression", classes=2, inputs=["b"])


def test_parsed_time_does_not_depend_on_the_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
    assert column("{dtype: float64, parse: time}", "2026-01-31T12:00:00") == [noon]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 0, 1]])
def test_json_codec_skips_the_schema_registry_header(order: list[int]) -> None:
    several = [b'\0\0\0\0\7{"x": 1}', b'{"x": 2}', b"\0\0", b'\0\0\0\0\7{"x": true}']
    found = codec_of(job("x: {dtype: int64}").records).decode([several[place] for place in order])
    assert found.records["x"].tolist() == [[1, 2, 0, 1][place] for place in order if place != 2]
    assert [index for index, _ in found.skipped] == [order.index(2)]
