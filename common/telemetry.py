"""Logging: one line per event, an event's name and then `key=value`, as text or as JSON.

    2026-01-31T12:00:00.123Z info update_applied job=digits worker=w3 version=17

`set_up_logging` is called by a process's `__main__` alone. Events are for state changes, not for
iterations: `Changes` keeps a reason from being told again at each tick.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

    from common.config import Settings

_FIELDS = "doll_fields"  # where a log record carries the event's keys and values


class EventLogger:
    """Writes events, each with what was bound: service, job, worker. Immutable.

    Args:
        logger: Where events go.
        bound: What each event carries besides its own fields.
    """

    def __init__(self, logger: logging.Logger, bound: Mapping[str, object] | None = None) -> None:
        self._logger = logger
        self._bound = dict(bound or {})

    def bind(self, **fields: object) -> EventLogger:
        """Make a logger whose events carry these fields too."""
        return EventLogger(self._logger, self._bound | fields)

    def debug(self, event: str, **fields: object) -> None:
        """Something that only helps to find a fault."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """A state changed, as it should."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something went wrong that the process copes with."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Something went wrong that a person should see to."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """As `error`, with the traceback of the exception at hand."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def _write(
        self, level: int, event: str, fields: Mapping[str, object], *, exc_info: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            extra = {_FIELDS: self._bound | dict(fields)}
            self._logger.log(level, event, extra=extra, exc_info=exc_info)


class Changes:
    """Tells a value apart from the one before: `if changes("round", reason): log.info(...)`."""

    def __init__(self) -> None:
        self._last = dict[str, object]()

    def __call__(self, topic: str, value: object) -> bool:
        """Whether `value` is another than at the last call for `topic`; True at the first."""
        changed = topic not in self._last or self._last[topic] != value
        self._last[topic] = value
        return changed


def set_up_logging(settings: Settings, stream: TextIO | None = None) -> None:
    """Send the events of this process to a stream (standard error), as the settings say."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)


class TextLines(logging.Formatter):
    """Time, level, event, key=value; quoted where a value has spaces or quotes."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line, and a traceback below it where there is one."""
        fields = " ".join(f"{key}={_quoted(value)}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {_line(record.getMessage())} {fields}"
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return line.rstrip() + trace


class JsonLines(logging.Formatter):
    """The same as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] | None = getattr(record, _FIELDS, None)
    return {"logger": record.name} if fields is None else fields  # not one of our events


def _time(record: logging.LogRecord) -> str:
    instant = datetime.fromtimestamp(record.created, UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


SETTLED_S = 3.0  # of quiet end an outage: Kafka's client tries again, and complains, every second


class Outage:
    """Trouble with one server: logged when it begins, changes and ends, not each time it is met.

    Args:
        logger: Where to tell.
        what: The server: its events are `<what>_away` and `<what>_back`.
        clock: Seconds that never go back.
    """

    def __init__(
        self, logger: EventLogger, what: str, clock: Callable[[], float] = monotonic
    ) -> None:
        self._logger = logger
        self._away, self._back = f"{what}_away", f"{what}_back"
        self._clock = clock
        self._reason = ""
        self._met_at = 0.0

    def met(self, error: Exception) -> None:
        """The server did not answer."""
        self._met_at = self._clock()
        if str(error) != self._reason:
            self._reason = str(error)
            self._logger.warning(self._away, reason=self._reason)

    def over(self) -> None:
        """The server answered."""
        if self._reason:
            self._reason = ""
            self._logger.info(self._back)

    def quiet(self) -> None:
        """Nothing was heard, not of trouble either, as a reader sees it whose server is away."""
        if self._reason and self._clock() - self._met_at >= SETTLED_S:
            self.over()


class StageTimes:
    """Where a loop's time goes: a sum and a count for each stage, told once, when the loop ends.

    Cheap enough to be always on: under a microsecond for each time that is added.
    """

    def __init__(self) -> None:
        self._sums_s = dict[str, float]()
        self._counts = dict[str, int]()

    def add(self, stage: str, since: float) -> None:
        """Count one pass of a stage that began at `since`, on the clock `perf_counter`."""
        self._sums_s[stage] = self._sums_s.get(stage, 0.0) + perf_counter() - since
        self._counts[stage] = self._counts.get(stage, 0) + 1

    def tell(self, logger: EventLogger) -> None:
        """Log `stage_times`: for each stage its passes, and the mean of one in milliseconds."""
        means_ms = {f"{name}_ms": 1e3 * s / self._counts[name] for name, s in self._sums_s.items()}
        logger.info("stage_times", **self._counts, **means_ms)
