"""A job file's text to plain data, and a model's complaints to one sentence per field.

YAML is read by its 1.2 core schema: `1e-3` is a number and `no` a word, unlike in YAML 1.1. Keys
given twice and aliases are refused: the first hide mistakes, the second let a small file grow
without bound.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Any

import yaml

from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_MAX_CHARACTERS = 1_000_000  # Kafka's default limit for the record that the job becomes
_SHOWN_PROBLEMS = 3
_SHOWN_CHARACTERS = 60


def load_text(text: str) -> dict[str, Any]:
    """Read YAML or JSON that holds one mapping.

    Raises:
        UserError: If it does not parse, with line and column.
    """
    if len(text) > _MAX_CHARACTERS:
        raise UserError(f"job file: {len(text):,} characters are above {_MAX_CHARACTERS:,}")
    try:
        # Tabs between tokens are common in JSON and forbidden in YAML; they never occur inside
        # JSON strings, and YAML forbids them as indentation anyway.
        data = yaml.load(text.replace("\t", " "), _Loader)  # noqa: S506 -- a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"job file: {where}{error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"job file: is neither YAML nor JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"job file: must be a mapping of fields to values, got {_shown(data)}")
    return data


def as_json(data: dict[str, Any]) -> str:
    """Turn plain data to JSON, so that one strict schema judges what came as YAML and as JSON.

    Raises:
        UserError: If it holds what JSON does not have.
    """
    try:
        return json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"job file: holds a value that is not plain data: {error}") from error


def complaint(
    error: ValidationError, field_names: Callable[[Sequence[str | int]], list[str]]
) -> str:
    """Say in one line what is wrong, by the field's path.

    Args:
        error: What the model found.
        field_names: Gives the fields that are allowed at a path, to guess what was meant.
    """
    # A misspelt field is also a missing one: what was misspelt comes first.
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    problems = [_problem(details, field_names) for details in errors]
    more = len(problems) - _SHOWN_PROBLEMS
    shown = "; ".join(problems[:_SHOWN_PROBLEMS])
    return f"job file: {shown}" + (f" (and {more} more)" if more > 0 else "")


def path_of(location: Sequence[str | int]) -> str:
    """Write a field's path as people do: `records.fields.image.shape[1]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _problem(details: ErrorDetails, field_names: Callable[[Sequence[str | int]], list[str]]) -> str:
    location, kind, context = details["loc"], details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        allowed = field_names(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), allowed, n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"allowed are {', '.join(allowed)}"
        return f'unknown field "{path_of(location)}" ({hint})'
    if kind == "missing":
        return f"{path_of(location)}: is missing"
    if kind == "value_error":  # our own sentence; some of them name the field themselves
        return f"{path_of(location)}: {context['error']}" if location else str(context["error"])
    wanted = _WANTED[kind](context) if kind in _WANTED else details["msg"]
    return f"{path_of(location)}: {wanted}, got {_shown(details['input'])}"


_WANTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "greater_than": lambda context: f"must be above {context['gt']}",
    "less_than": lambda context: f"must be below {context['lt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "int_type": lambda _: "must be a whole number",
    "int_from_float": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "finite_number": lambda _: "must be a finite number",
    "bool_type": lambda _: "must be true or false",
    "string_type": lambda _: "must be text",
    "tuple_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be a mapping of names to values",
    "model_type": lambda _: "must be a mapping of fields to values",
    "too_short": lambda context: f"must have at least {context['min_length']} entries",
    "too_long": lambda context: f"must have at most {context['max_length']} entries",
    "literal_error": lambda context: f"must be {context['expected']}",
}


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


class _Loader(yaml.SafeLoader):
    """The safe loader with the types of JSON and nothing else."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 -- the library's own way; filled below

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]  # the stubs lack it
            raise yaml.MarkedYAMLError(
                problem=f"aliases (*{event.anchor}) are not allowed", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 -- the library's signature
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f'field "{key.value}" is given twice', problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _first
    )
