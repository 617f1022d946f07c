"""Reads job files and experiment files, YAML or JSON, into plain data.

YAML follows the 1.2 core schema: `1e-3` is a number and `no` is a string, unlike in YAML 1.1.
Duplicate keys are refused because they hide mistakes, aliases because they let a small file grow
without bound, and tags because JSON lacks them. The reader consumes the parser's events, libyaml's
if PyYAML has it, and stops at a text that is too large or too deep.
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

# Kafka's default limit for a record, since the job is stored as one.
_MOST_CHARACTERS = 1_000_000
# The pure Python parser needs a second for this many characters.
_MOST_PURE_CHARACTERS = 50_000
# Keys, values and ends of collections. A long job file has a few hundred.
_MOST_EVENTS = 20_000
_MOST_LEVELS = 100
# A longer scalar is a string: no field takes such a number.
_MOST_NUMBER_CHARACTERS = 100
_SHOWN_CHARACTERS = 60

# For each field of a mapping, or element of a list: its line, counted from 1, and the lines of its
# content.
Lines: TypeAlias = "dict[str, tuple[int, Lines]] | list[tuple[int, Lines]] | None"


def load_file(path: str | Path) -> dict[str, Any]:
    """Read a job file.

    Raises:
        UserError: If the file cannot be read or does not parse.
    """
    return load_text(read_text(path))


def read_text(path: str | Path) -> str:
    """Read a text file that the user names.

    Raises:
        UserError: If the file does not exist or is not UTF-8 text.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from error


class YamlError(UserError):
    """Invalid YAML.

    Args:
        message: Error message with line and column.
        line: Line of the error, counted from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def load_text(text: str, name: str = "job file") -> dict[str, Any]:
    """Parse YAML or JSON that holds one mapping.

    Args:
        text: Content of the file.
        name: Name of the file in error messages.

    Raises:
        UserError: If the text does not parse. The message has line and column.
    """
    return load_lines(text, name)[0]


def load_lines(text: str, name: str = "job file") -> tuple[dict[str, Any], Lines]:
    """Parse YAML or JSON as `load_text` does, and return the line of each field as well.

    Raises:
        UserError: If the text does not parse. The message has line and column.
    """
    if len(text) > _MOST_CHARACTERS:
        raise UserError(
            f"{name}: must have at most {_MOST_CHARACTERS:,} characters, got {len(text):,}"
        )
    if len(text) > _MOST_PURE_CHARACTERS and not yaml.__with_libyaml__:
        raise UserError(
            f"{name}: must have at most {_MOST_PURE_CHARACTERS:,} characters without libyaml, got"
            f" {len(text):,}; install a PyYAML that has libyaml"
        )
    try:
        # Tabs between tokens are common in JSON and forbidden in YAML; they never occur inside
        # JSON strings, and YAML forbids them as indentation anyway.
        spaced = text.replace("\t", " ")
        # JSON may escape a character as a surrogate pair; YAML may not.
        if text.lstrip().startswith("{"):
            spaced = _HALVES.sub(lambda found: found[1] + json.loads(f'"{found[2]}"'), spaced)
        data, lines = _document(islice(yaml.parse(spaced, _Loader), _MOST_EVENTS))
    except yaml.MarkedYAMLError as error:
        line, column = (mark.line, mark.column) if (mark := error.problem_mark) else (0, 0)
        # libyaml reports the end of a text one line too low.
        if line > (last := text.count("\n")):
            line, column = last, len(text) - text.rfind("\n") - 1
        where = f"line {line + 1}, column {column + 1}: "
        raise YamlError(f"{name}: {where}{error.problem}", line + 1) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: must be YAML or JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{name}: must be a mapping of fields to values, got {shown(data)}")
    return data, lines


def line_of(lines: Lines, path: str) -> int:
    """Return the line of a field, counted from 1. A missing field has the line of its parent.

    Args:
        lines: Lines from `load_lines`.
        path: Path of the field as in error messages: `records.fields.image.shape[1]`.
    """
    line = 1
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(lines, dict) and step in lines:
            line, lines = lines[step]
        elif isinstance(lines, list) and step.isdecimal() and int(step) < len(lines):
            line, lines = lines[int(step)]
    return line


def as_json(data: dict[str, Any], name: str = "job file") -> str:
    """Convert plain data to JSON, so that one strict schema validates both YAML and JSON.

    Raises:
        UserError: If the data contains a value that JSON lacks.
    """
    try:
        return json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: must have only plain data: {error}") from error


def shown(value: object) -> str:
    """Return a value as JSON, shortened to `_SHOWN_CHARACTERS`."""
    return _cut(json.dumps(value, default=str, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _document(events: Iterator[yaml.Event]) -> tuple[Any, Lines]:
    """Return the only document of a text, or None for an empty text, and its lines.

    Raises:
        MarkedYAMLError: If the text does not parse, or uses YAML that is not allowed.
        ValueError: If the text is too large or too deep.
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
    """Refuse aliases, tags, and values that are nested too deep."""
    if level > _MOST_LEVELS:
        raise ValueError(f"nested deeper than {_MOST_LEVELS} levels")
    if isinstance(event, yaml.AliasEvent):
        raise _refused(event, f"aliases (*{_cut(event.anchor or '')}) are not allowed")
    if (tag := getattr(event, "tag", None)) is not None:
        raise _refused(event, f"tags ({_cut(tag)}) are not allowed")


def _node(event: yaml.Event | None, events: Iterator[yaml.Event], level: int) -> tuple[Any, Lines]:
    """Return the value that starts with an event, and its lines."""
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
                raise _refused(key, "a field's name must be text")
            if key.value in fields:
                raise _refused(key, f'field "{_cut(key.value)}" is given twice')
            fields[key.value], inside = _node(next(events, None), events, level + 1)
            lines[key.value] = _line(key), inside
    raise ValueError(f"more than {_MOST_EVENTS:,} keys and values")


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _scalar(event: yaml.ScalarEvent) -> object:
    """Return the value of a scalar. Quoted scalars are strings."""
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
