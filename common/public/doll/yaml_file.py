"""A job file's text, or an experiment's, to plain data.

YAML is read by its 1.2 core schema: `1e-3` is a number and `no` a word, unlike in YAML 1.1. Keys
given twice, aliases and tags are refused: the first hide mistakes, the second let a small file grow
without bound, the third have no counterpart in JSON. A text is read from the events of the parser,
libyaml's where it is there, and a text that is too large or too deep is read no further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from doll.errors import UserError

_MOST_CHARACTERS = 1_000_000  # Kafka's default limit for the record that the job becomes
_MOST_PURE_CHARACTERS = 50_000  # the parser that is written in Python needs a second for them
_MOST_EVENTS = 20_000  # keys, values and ends: a long job file has some hundred
_MOST_LEVELS = 100
_MOST_NUMBER_CHARACTERS = 100  # what is longer is a text: no type of ours has such a number
_SHOWN_CHARACTERS = 60

# Line of each field of a mapping or element of a list, from 1 on, and the lines inside.
Lines: TypeAlias = "dict[str, tuple[int, Lines]] | list[tuple[int, Lines]] | None"


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
    return load_lines(text, name)[0]


def load_lines(text: str, name: str = "job file") -> tuple[dict[str, Any], Lines]:
    """Read YAML or JSON as `load_text` does, and where each field stands.

    Raises:
        UserError: If it does not parse, with line and column.
    """
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{name}: {len(text):,} characters are above {_MOST_CHARACTERS:,}")
    if len(text) > _MOST_PURE_CHARACTERS and not yaml.__with_libyaml__:
        raise UserError(
            f"{name}: {len(text):,} characters are above {_MOST_PURE_CHARACTERS:,}, the most"
            " without libyaml; install a PyYAML that has libyaml"
        )
    try:
        # Tabs between tokens are common in JSON and forbidden in YAML; they never occur inside
        # JSON strings, and YAML forbids them as indentation anyway.
        spaced = text.replace("\t", " ")
        if text.lstrip().startswith("{"):  # JSON may write a character as two halves, YAML may not
            spaced = _HALVES.sub(lambda found: found[1] + json.loads(f'"{found[2]}"'), spaced)
        data, lines = _document(islice(yaml.parse(spaced, _Loader), _MOST_EVENTS))
    except yaml.MarkedYAMLError as error:
        line, column = (mark.line, mark.column) if (mark := error.problem_mark) else (0, 0)
        if line > (last := text.count("\n")):  # libyaml's end of a text lies below it
            line, column = last, len(text) - text.rfind("\n") - 1
        where = f"line {line + 1}, column {column + 1}: "
        raise YamlError(f"{name}: {where}{error.problem}", line + 1) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: is neither YAML nor JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{name}: must be a mapping of fields to values, got {shown(data)}")
    return data, lines


def line_of(lines: Lines, path: str) -> int:
    """Return the line of a field, or of the field that would have it; the first is 1.

    Args:
        lines: As from `load_lines`.
        path: As in messages: `records.fields.image.shape[1]`.
    """
    line = 1
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(lines, dict) and step in lines:
            line, lines = lines[step]
        elif isinstance(lines, list) and step.isdecimal() and int(step) < len(lines):
            line, lines = lines[int(step)]
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
    return _cut(json.dumps(value, default=str, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _document(events: Iterator[yaml.Event]) -> tuple[Any, Lines]:
    """Return a text's only document, null if it has none, and the lines in it.

    Raises:
        MarkedYAMLError: If the text does not parse, or holds what is not allowed.
        ValueError: If it is too large or too deep.
    """
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        return None, None
    found = _node(next(events), events, 0)
    next(events, None)
    if isinstance(another := next(events, None), yaml.DocumentStartEvent):
        raise _refused(another, "a second document is not allowed")
    return found


def _check(event: yaml.Event | None, level: int) -> None:
    """Refuse what JSON does not have, and what is nested too deep."""
    if level > _MOST_LEVELS:
        raise ValueError(f"nested deeper than {_MOST_LEVELS} levels")
    if isinstance(event, yaml.AliasEvent):
        raise _refused(event, f"aliases (*{_cut(event.anchor or '')}) are not allowed")
    if (tag := getattr(event, "tag", None)) is not None:
        raise _refused(event, f"tags ({_cut(tag)}) are not allowed")


def _node(event: yaml.Event | None, events: Iterator[yaml.Event], level: int) -> tuple[Any, Lines]:
    """Return the value that an event begins, and the lines in it."""
    _check(event, level)
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event), None
    if isinstance(event, yaml.SequenceStartEvent):
        elements, places = list[Any](), list[tuple[int, Lines]]()
        for each in events:
            if isinstance(each, yaml.SequenceEndEvent):
                return elements, places
            value, inside = _node(each, events, level + 1)
            elements.append(value)
            places.append((_line(each), inside))
    elif isinstance(event, yaml.MappingStartEvent):
        fields, lines = dict[str, Any](), dict[str, tuple[int, Lines]]()
        for key in events:
            if isinstance(key, yaml.MappingEndEvent):
                return fields, lines
            _check(key, level)
            if not isinstance(key, yaml.ScalarEvent):
                raise _refused(key, "a field's name must be a text")
            if key.value in fields:
                raise _refused(key, f'field "{_cut(key.value)}" is given twice')
            fields[key.value], inside = _node(next(events, None), events, level + 1)
            lines[key.value] = _line(key), inside
    raise ValueError(f"more than {_MOST_EVENTS:,} keys and values")


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _scalar(event: yaml.ScalarEvent) -> object:
    """Return what a scalar stands for; quoted ones are texts."""
    text: str = event.value
    if event.implicit[0] and len(text) <= _MOST_NUMBER_CHARACTERS:
        for pattern, read in _TYPES:
            if pattern.fullmatch(text):
                return read(text)
    return text


def _refused(event: yaml.Event | None, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=getattr(event, "start_mark", None))


_HALVES = re.compile(r"(?<!\\)((?:\\\\)*)(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)")
_Loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_TYPES: tuple[tuple[re.Pattern[str], Callable[[str], object]], ...] = (
    (re.compile(r"~|null|"), lambda _: None),
    (re.compile(r"true|false"), "true".__eq__),
    (re.compile(r"[-+]?(0|[1-9][0-9]*)"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
)
