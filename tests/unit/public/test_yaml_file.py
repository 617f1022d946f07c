"""YAML and JSON texts: what is read, with and without libyaml, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from doll import yaml_file
from doll.errors import UserError

# YAML accepts names of up to 1,024 characters after escaping.
NAME = st.text(max_size=40)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAME, inner, max_size=4),
    max_leaves=20,
)
TEXT = """\
# a comment
name: digits
records:
  fields:
    image: {dtype: uint8, shape: [1, 8, 8]}
numbers: [1e-3, +5, .5, "1", no, ~]
"""


@pytest.fixture(params=[yaml.CSafeLoader, yaml.SafeLoader], ids=["libyaml", "pure"])
def _parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test once with each of the two parsers."""
    monkeypatch.setattr(yaml_file, "_Loader", request.param)


@pytest.mark.usefixtures("_parser")
def test_both_parsers_return_values_and_the_line_of_each_field() -> None:
    data, lines = yaml_file.load_lines(TEXT)

    assert data == {
        "name": "digits",
        "records": {"fields": {"image": {"dtype": "uint8", "shape": [1, 8, 8]}}},
        "numbers": [0.001, 5, 0.5, "1", "no", None],
    }
    paths = ("name", "records.fields.image.shape[1]", "records.absent", "numbers[9]", "absent")
    assert [yaml_file.line_of(lines, path) for path in paths] == [2, 5, 3, 6, 1]


@pytest.mark.usefixtures("_parser")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "line 1, column 6: "),
        ("a:\n  b: &x 1\n  c: *x", "line 3, column 6: aliases (*x) are not allowed"),
        ("a:\n  b: 1\n  b: 2", 'line 3, column 3: field "b" is given twice'),
        ("{1: a, '1': b}", 'field "1" is given twice'),
        ("a: !x 1", "tags (!x) are not allowed"),
        ("[" * 200, "nested deeper than 100 levels"),
        ("- " * 200, "nested deeper than 100 levels"),
        ("[" + "0," * 20_000, "more than 20,000 keys and values"),
        ('"\\ud800"', ""),
        ("a: \x00", "must be YAML or JSON"),
    ],
)
def test_both_parsers_reject_the_same_texts_with_a_message(text: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        yaml_file.load_text(text)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 500


def test_long_text_without_libyaml_is_rejected_before_parsing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert yaml_file.load_text("a: b" + " " * 40_000) == {"a": "b"}
    with pytest.raises(
        UserError, match="must have at most 50,000 characters without libyaml, got 60,004"
    ):
        yaml_file.load_text("a: b" + " " * 60_000)


def test_number_with_many_digits_is_loaded_as_text() -> None:
    assert yaml_file.load_text("a: " + "9" * 100_000) == {"a": "9" * 100_000}


@given(st.dictionaries(NAME, PLAIN, max_size=4))
def test_json_values_round_trip(data: dict[str, Any]) -> None:
    assert yaml_file.load_text(json.dumps(data)) == data


@given(st.text(st.sampled_from("ab:-?*&!|>'\"%@`{}[],# \n\t~19.e<"), max_size=40))
def test_arbitrary_text_is_loaded_or_rejected_with_a_user_error(text: str) -> None:
    with suppress(UserError):
        data, lines = yaml_file.load_lines(text)
        yaml_file.line_of(lines, "a.b[0]")
        json.dumps(data)
