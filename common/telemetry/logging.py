"""Logging: one line per event with its name and fields, as text or as JSON.

    2026-01-31T12:00:00.123Z info update_applied service=coordinator job=digits version=17

Only the `__main__` of a process calls `set_up_logging`. Code logs changes of state, not iterations
of a loop; `Changes` keeps it from logging the same reason in each iteration.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import structlog
from structlog.dev import Column, ConsoleRenderer, KeyValueColumnFormatter, plain_traceback
from structlog.processors import JSONRenderer
from structlog.stdlib import PositionalArgumentsFormatter, ProcessorFormatter, filter_by_level

from common.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

    from structlog.typing import EventDict, Processor, WrappedLogger

    from common.config.settings import Settings

T = TypeVar("T")

# Attribute of a log record that holds the fields of an event.
_FIELDS = "doll_fields"
_BELOW = ("exception", "stack")
# Indentation of a traceback, so that no line of it looks like an event.
_INDENT = "    "


def to_record(
    _logger: WrappedLogger, _method: str, event: EventDict
) -> tuple[tuple[str], dict[str, object]]:
    """Return the arguments for a standard library logger. The last processor of structlog."""
    fields = dict(event)
    name, error = fields.pop("event"), fields.pop("exc_info", None)
    return (name,), {"exc_info": error, "extra": {_FIELDS: fields}}


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Return the fields of an event, or the logger's name for a record of another library."""
    fields: Mapping[str, object] | None = getattr(record, _FIELDS, None)
    return {"logger": record.name} if fields is None else fields


def line_formatter(
    form: Literal["console", "json"], bound: Mapping[str, object], *, colours: bool
) -> logging.Formatter:
    """Return the formatter of log lines.

    Args:
        form: Format of the lines.
        bound: Fields of every line of the process.
        colours: True to colour the lines of the console format.
    """
    chain: list[Processor] = [_Entry(bound)]
    if form == "json":
        chain += [JSONRenderer(_json)]
    else:
        chain += [_readable, _console(colours=colours)]
    return ProcessorFormatter(processors=chain)


class _Entry:
    """Puts the fields of a line in order. No field replaces the time, the level or the event."""

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
    """Return a line as JSON, with a string for each value that JSON lacks.

    Examples are a loss of NaN, or a nested mapping with tuples as keys in a task's metrics.
    """
    return json.dumps({key: _plain(value) for key, value in entry.items()}, default=str)


def _plain(value: object) -> object:
    try:
        json.dumps(value, default=str, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def _readable(_logger: WrappedLogger, _method: str, entry: EventDict) -> EventDict:
    """Escape names of fields, and rename the two that structlog would print below the line."""
    lines = entry.pop("traceback", "").splitlines()
    shown = {f"{key}_" if key in _BELOW else _line(key): value for key, value in entry.items()}
    below = {"exception": "\n".join(f"{_INDENT}{_line(line)}" for line in lines)} if lines else {}
    return shown | below


def _console(*, colours: bool) -> ConsoleRenderer:
    styles = ConsoleRenderer.get_default_column_styles(colours)
    levels = ConsoleRenderer.get_default_level_styles(colours)

    def level(key: str, value: object) -> str:  # noqa: ARG001 -- structlog's signature and names
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


# Lowest levels of libraries that log each request with its headers, session tokens included, at
# `debug`. httpx2 already logs each request at `info`.
_TELLTALES = dict.fromkeys(
    ("boto3", "botocore", "httpcore2", "s3transfer", "urllib3"), logging.INFO
) | {"httpx2": logging.WARNING}


# Logs events with the fields that were bound to it, such as job or worker. Immutable.
EventLogger: TypeAlias = structlog.stdlib.BoundLogger


def event_logger(name: str, **bound: object) -> EventLogger:
    """Return a logger. It obeys the level of `set_up_logging` even if it was made before.

    Args:
        name: Name of the standard library logger that gets the events: the service or the module.
        **bound: Fields of each event besides its own.
    """
    return EventLogger(logging.getLogger(name), (filter_by_level, to_record), bound)


def job_of(logger: EventLogger) -> str:
    """Return the job that a logger is bound to, or an empty string."""
    return str(structlog.get_context(logger).get("job", ""))


def set_up_logging(settings: Settings, stream: TextIO | None = None, /, **bound: object) -> None:
    """Send all log lines of this process to one stream, in the format of the settings.

    Args:
        settings: Level and format.
        stream: Optional. Output stream. If unset, standard error.
        **bound: Fields of every line, including lines of libraries: service, replica, worker.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(line_formatter(settings.log_format, bound, colours=stream.isatty()))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for name, level in _TELLTALES.items():
        logging.getLogger(name).setLevel(max(level, logging.root.level))
    logging.captureWarnings(capture=True)
    # Other code that uses structlog, such as a task, gets the same format.
    structlog.configure(
        processors=[filter_by_level, PositionalArgumentsFormatter(), to_record],
        wrapper_class=EventLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


class Changes:
    """Detects that a value differs from the last one: `if changes("round", reason): log(...)`."""

    def __init__(self) -> None:
        self._last = dict[str, object]()

    def __call__(self, topic: str, value: object) -> bool:
        """True if `value` differs from the last call for `topic`, or if this is the first call."""
        changed = topic not in self._last or self._last[topic] != value
        self._last[topic] = value
        return changed


class Rejections:
    """Logs messages that did not parse, once for each kind. Threads may share it."""

    def __init__(self) -> None:
        self._known = set[str]()

    def parse(self, kind: str, decode: Callable[[bytes], T], data: bytes) -> T | None:
        """Decode a message, or reject it and return None."""
        try:
            return decode(data)
        except WireError as error:
            self.reject(kind, str(error))
            return None

    def reject(self, kind: str, reason: str) -> None:
        """Log a message if it is the first of its kind."""
        if kind not in self._known:
            self._known.add(kind)
            logging.getLogger(__name__).warning("rejected kind=%s reason=%s", kind, reason)


class StageTimes:
    """Time that a loop spends in each stage, logged once when the loop ends.

    It is always on, since `add` takes less than a microsecond.
    """

    def __init__(self) -> None:
        self._sums_s = dict[str, float]()
        self._counts = dict[str, int]()

    def add(self, stage: str, since: float) -> float:
        """Add one pass of a stage that began at `since`, a time of `perf_counter`.

        Returns:
            Duration of the pass in seconds.
        """
        took_s = perf_counter() - since
        self._sums_s[stage] = self._sums_s.get(stage, 0.0) + took_s
        self._counts[stage] = self._counts.get(stage, 0) + 1
        return took_s

    def log(self, logger: EventLogger) -> None:
        """Log `stage_times`: the number of passes of each stage and their mean in milliseconds."""
        means_ms = {f"{name}_ms": 1e3 * s / self._counts[name] for name, s in self._sums_s.items()}
        logger.info("stage_times", **self._counts, **means_ms)
