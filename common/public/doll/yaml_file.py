"""A job file's text, or an experiment's, to plain data.

YAML is read by its 1.2 core schema: `1e-3` is a number and `no` a word, unlike in YAML 1.1. Keys
given twice and aliases are refused: the first hide mistakes, the second let a small file grow
without bound.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from doll.errors import UserError

_MAX_CHARACTERS = 1_000_000  # Kafka's default limit for the record that the job becomes
_SHOWN_CHARACTERS = 60


def load_file(path: str | Path) -> dict[str, Any]:
    """Read a job file.

    Raises:
        UserError: If it cannot be read, or does not parse.
    """
    return load_text(read_text(path))


def read_text(path: str | Path) -> str:
    """Read a file that somebody wrote and names.

    Raises:
        UserError: If there is none, or it is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from error


class YamlError(UserError):
    """A text is no YAML.

    Args:
        message: What is wrong, and where.
        line: The first is 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def load_text(text: str, name: str = "job file") -> dict[str, Any]:
    """Read YAML or JSON that holds one mapping.

    Args:
        text: What the file holds.
        name: What messages call it.

    Raises:
        UserError: If it does not parse, with line and column.
    """
    if len(text) > _MAX_CHARACTERS:
        raise UserError(f"{name}: {len(text):,} characters are above {_MAX_CHARACTERS:,}")
    try:
        # Tabs between tokens are common in JSON and forbidden in YAML; they never occur inside
        # JSON strings, and YAML forbids them as indentation anyway.
        data = yaml.load(text.replace("\t", " "), _Loader)  # noqa: S506 -- a SafeLoader
    except yaml.MarkedYAMLError as error:
        line, column = (mark.line, mark.column) if (mark := error.problem_mark) else (0, 0)
        where = f"line {line + 1}, column {column + 1}: "
        raise YamlError(f"{name}: {where}{error.problem}", line + 1) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: is neither YAML nor JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{name}: must be a mapping of fields to values, got {shown(data)}")
    return data


def line_of(text: str, path: str) -> int:
    """The line on which a field stands, or the field that would have it; the first is 1.

    Args:
        text: What `load_text` reads.
        path: As in messages: `records.fields.image.shape[1]`.
    """
    node, line = yaml.compose(text.replace("\t", " "), _Loader), 1
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == step]
        elif isinstance(node, yaml.SequenceNode) and step.isdecimal():
            found = [(value, value) for value in node.value[int(step) : int(step) + 1]]
        else:
            found = []
        if found:
            (key, node), *_ = found
            line = key.start_mark.line + 1
    return line


def as_json(data: dict[str, Any], name: str = "job file") -> str:
    """Turn plain data to JSON, so that one strict schema judges what came as YAML and as JSON.

    Raises:
        UserError: If it holds what JSON does not have.
    """
    try:
        return json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: holds a value that is not plain data: {error}") from error


def shown(value: object) -> str:
    """A value as JSON, cut where it is long."""
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
