"""What a log record looks like as a line: structlog's processors, for our events and for others'.

Events of ours and what libraries tell the standard library's logging become records alike, and
`line_formatter` writes both, so every line of a process has one form: time, level, event, what
the process bound, what the event carries.
"""

from __future__ import annotations

import json
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from structlog.dev import Column, ConsoleRenderer, KeyValueColumnFormatter, plain_traceback
from structlog.processors import JSONRenderer
from structlog.stdlib import ProcessorFormatter

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping

    from structlog.typing import EventDict, Processor, WrappedLogger

_FIELDS = "doll_fields"  # where a log record carries the keys and values of an event
_BELOW = ("exception", "stack")
_INDENT = "    "  # of a traceback: no line of an exception's text begins as an event does


def to_record(
    _logger: WrappedLogger, _method: str, event: EventDict
) -> tuple[tuple[str], dict[str, object]]:
    """End structlog's chain: the arguments for a method of the standard library's logger."""
    fields = dict(event)
    name, error = fields.pop("event"), fields.pop("exc_info", None)
    return (name,), {"exc_info": error, "extra": {_FIELDS: fields}}


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """What an event carries; of a record that is none of ours, who told it."""
    fields: Mapping[str, object] | None = getattr(record, _FIELDS, None)
    return {"logger": record.name} if fields is None else fields


def line_formatter(
    form: Literal["console", "json"], bound: Mapping[str, object], *, colours: bool
) -> logging.Formatter:
    """Make what turns a record into a line.

    Args:
        form: How.
        bound: What every line of the process carries.
        colours: Whether a console's lines have them.
    """
    chain: list[Processor] = [_Entry(bound)]
    if form == "json":
        chain += [JSONRenderer(_json)]
    else:
        chain += [_readable, _traceback_below, _console(colours=colours)]
    return ProcessorFormatter(processors=chain)


class _Entry:
    """All that a line tells, in its order; no field replaces the time, the level or the event."""

    def __init__(self, bound: Mapping[str, object]) -> None:
        self._bound = dict(bound)

    def __call__(self, _logger: WrappedLogger, level: str, event: EventDict) -> EventDict:
        record: logging.LogRecord = event["_record"]
        head = {"time": _time(record.created), "level": level, "event": event["event"]}
        entry = head | self._bound | dict(fields_of(record)) | head
        if (error := event.get("exc_info")) and error[0] is not None:
            entry["traceback"] = "".join(traceback.format_exception(*error)).rstrip()
        return entry


def _time(created_s: float) -> str:
    instant = datetime.fromtimestamp(created_s, UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(entry: EventDict, **_: object) -> str:
    """Write a line; as text what is nothing in JSON, a loss of NaN say: it must not spoil its line.

    Nor must a mapping by pairs, deep in what a task tells of itself.
    """
    try:
        return json.dumps(entry, default=str, allow_nan=False)
    except (TypeError, ValueError):
        plain = {key: _told(value) for key, value in entry.items()}
        return json.dumps(plain, default=str)


def _told(value: object) -> object:
    try:
        json.dumps(value, default=str, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def _readable(_logger: WrappedLogger, _method: str, entry: EventDict) -> EventDict:
    """Names of fields are as plain as their values; two of them mean lines below to structlog."""
    return {f"{key}_" if key in _BELOW else _line(key): value for key, value in entry.items()}


def _traceback_below(_logger: WrappedLogger, _method: str, entry: EventDict) -> EventDict:
    if "traceback" in entry:
        lines = entry.pop("traceback").splitlines()
        entry["exception"] = "\n".join(f"{_INDENT}{_line(line)}" for line in lines)
    return entry


def _console(*, colours: bool) -> ConsoleRenderer:
    styles = ConsoleRenderer.get_default_column_styles(colours)
    levels = ConsoleRenderer.get_default_level_styles(colours)

    def level(key: str, value: object) -> str:  # noqa: ARG001 -- structlog's signature, its names too
        return f"{levels.get(str(value), '')}{value}{styles.reset}"

    def plain(style: str) -> KeyValueColumnFormatter:
        return KeyValueColumnFormatter(None, style, styles.reset, _line)

    columns = [
        Column("time", plain(styles.timestamp)),
        Column("level", level),
        Column("event", plain(styles.bright)),
        Column("", KeyValueColumnFormatter(styles.kv_key, "", styles.reset, _quoted)),
    ]
    return ConsoleRenderer(columns=columns, sort_keys=False, exception_formatter=plain_traceback)


def _line(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
