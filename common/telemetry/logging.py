"""Logging: an event's name and its fields, one line each, as text or as JSON.

    2026-01-31T12:00:00.123Z info update_applied service=coordinator job=digits version=17

`set_up_logging` is called by a process's `__main__` alone. Events are for state changes, not for
iterations: `Changes` keeps a reason from being told again at each tick.
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
        chain += [_readable, _console(colours=colours)]
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
    return json.dumps({key: _plain(value) for key, value in entry.items()}, default=str)


def _plain(value: object) -> object:
    try:
        json.dumps(value, default=str, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def _readable(_logger: WrappedLogger, _method: str, entry: EventDict) -> EventDict:
    """Names of fields are as plain as their values; two of them mean lines below to structlog."""
    lines = entry.pop("traceback", "").splitlines()
    shown = {f"{key}_" if key in _BELOW else _line(key): value for key, value in entry.items()}
    below = {"exception": "\n".join(f"{_INDENT}{_line(line)}" for line in lines)} if lines else {}
    return shown | below


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


# At `debug` these tell each request with its headers: a flood, and tokens of a session in it.
_TELLTALES = dict.fromkeys(
    ("boto3", "botocore", "httpcore2", "s3transfer", "urllib3"), logging.INFO
) | {"httpx2": logging.WARNING}  # which tells each request at `info` already


# Writes events, each with what was bound: job, worker, version. Immutable.
EventLogger: TypeAlias = structlog.stdlib.BoundLogger


def event_logger(name: str, **bound: object) -> EventLogger:
    """Make a logger; one that is made before `set_up_logging` goes by its level, too.

    Args:
        name: Of the standard library's logger that its events go to: the service or the module.
        **bound: What each event carries besides its own fields.
    """
    return EventLogger(logging.getLogger(name), (filter_by_level, to_record), bound)


def job_of(logger: EventLogger) -> str:
    """Return the job that a logger is bound to; empty if there is none."""
    return str(structlog.get_context(logger).get("job", ""))


def set_up_logging(settings: Settings, stream: TextIO | None = None, /, **bound: object) -> None:
    """Send what this process tells to a stream, as the settings say: all of it, in one form.

    Args:
        settings: The level and the form.
        stream: Where to; standard error if None.
        **bound: What every line carries, be it ours or a library's: service, replica, worker.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(line_formatter(settings.log_format, bound, colours=stream.isatty()))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for name, level in _TELLTALES.items():
        logging.getLogger(name).setLevel(max(level, logging.root.level))
    logging.captureWarnings(capture=True)
    structlog.configure(  # for whoever else tells by it, as the code of a task may
        processors=[filter_by_level, PositionalArgumentsFormatter(), to_record],
        wrapper_class=EventLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


class Changes:
    """Tells a value apart from the one before: `if changes("round", reason): log.info(...)`."""

    def __init__(self) -> None:
        self._last = dict[str, object]()

    def __call__(self, topic: str, value: object) -> bool:
        """Whether `value` is another than at the last call for `topic`; True at the first."""
        changed = topic not in self._last or self._last[topic] != value
        self._last[topic] = value
        return changed


class Rejections:
    """Logs what did not parse, once for each kind; may be shared between threads."""

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
    """Where a loop's time goes: a sum and a count for each stage, told once, when the loop ends.

    Cheap enough to be always on: under a microsecond for each time that is added.
    """

    def __init__(self) -> None:
        self._sums_s = dict[str, float]()
        self._counts = dict[str, int]()

    def add(self, stage: str, since: float) -> float:
        """Count one pass of a stage that began at `since`, on the clock `perf_counter`.

        Returns:
            How long it took, in seconds.
        """
        took_s = perf_counter() - since
        self._sums_s[stage] = self._sums_s.get(stage, 0.0) + took_s
        self._counts[stage] = self._counts.get(stage, 0) + 1
        return took_s

    def log(self, logger: EventLogger) -> None:
        """Log `stage_times`: for each stage its passes, and the mean of one in milliseconds."""
        means_ms = {f"{name}_ms": 1e3 * s / self._counts[name] for name, s in self._sums_s.items()}
        logger.info("stage_times", **self._counts, **means_ms)
