"""Each event is one line with any values, and all libraries' lines have the same format."""

from __future__ import annotations

import json
import logging
import math
import sys
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.telemetry.logging import fields_of, line_formatter, to_record

Form = Literal["console", "json"]
FORMS: tuple[Form, ...] = ("console", "json")
TIME = "2027-01-15T08:00:00.123Z"


def of_a_library(name: str, message: str, *values: object) -> logging.LogRecord:
    """Return a record of a library's call of `logging`."""
    record = logging.LogRecord(name, logging.ERROR, "", 0, message, values, None)
    record.created = 1_800_000_000.1239
    return record


def of_ours(event: str, **fields: object) -> logging.LogRecord:
    """Return the record of one of our events."""
    (message,), carried = to_record(None, "log", {"event": event, **fields})
    extra = carried["extra"]
    assert isinstance(extra, dict)
    record = of_a_library("ours", message)
    vars(record).update(extra)
    return record


def failing(reason: str) -> logging.LogRecord:
    """Return the record of an event with an exception."""
    record = of_ours("failed")
    try:
        raise ValueError(reason)  # noqa: TRY301 -- for its traceback
    except ValueError:
        record.exc_info = sys.exc_info()
    return record


def line_of(
    record: logging.LogRecord, form: Form = "console", *, colours: bool = False, **bound: object
) -> str:
    return line_formatter(form, bound, colours=colours).format(record)


def test_console_line_has_time_level_event_and_fields() -> None:
    line = line_of(of_ours("update_applied", version=17, loss=0.123456789), service="coordinator")
    assert line == f"{TIME} error update_applied service=coordinator version=17 loss=0.123457"


def test_json_line_has_the_same_fields() -> None:
    line = line_of(of_ours("taken", job="digits", at=(1, 2)), "json", service="worker")
    # Searches of long logs rely on this form.
    assert '"event": "taken"' in line
    assert list(json.loads(line).items()) == [
        *(("time", TIME), ("level", "error"), ("event", "taken")),
        *(("service", "worker"), ("job", "digits"), ("at", [1, 2])),
    ]


def test_event_field_overrides_bound_field() -> None:
    record = of_ours("told", replica="c2")
    assert json.loads(line_of(record, "json", replica="c1"))["replica"] == "c2"


def test_fields_cannot_replace_time_level_or_event() -> None:
    record = of_ours("told", time="never", level="debug")
    entry = json.loads(line_of(record, "json", event="another"))
    assert (entry["time"], entry["level"], entry["event"]) == (TIME, "error", "told")


def test_library_lines_have_the_same_form_and_name_their_library() -> None:
    record = of_a_library("kafka", "broker %d away", 3)
    assert line_of(record, service="worker") == (
        f"{TIME} error broker 3 away service=worker logger=kafka"
    )
    assert json.loads(line_of(record, "json", service="worker")) == {
        "time": TIME,
        "level": "error",
        "event": "broker 3 away",
        "service": "worker",
        "logger": "kafka",
    }
    assert fields_of(record) == {"logger": "kafka"}


@pytest.mark.parametrize("form", FORMS)
@given(st.text(), st.text())
def test_event_is_one_line_without_control_characters(form: Form, event: str, text: str) -> None:
    for record in (of_ours(event, reason=text, spans=[text]), of_a_library(text, "%s", event)):
        line = line_of(record, form, replica=text)
        assert line.isprintable()


@given(st.text())
def test_exception_text_cannot_look_like_an_event(text: str) -> None:
    forged = f"{text}\n{TIME} info job_finished job=digits{text}"
    first, *others = line_of(failing(forged)).splitlines()
    assert first == f"{TIME} error failed"
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert line_of(failing(forged), "json").isprintable()


def test_exception_has_its_traceback() -> None:
    trace = json.loads(line_of(failing("here"), "json"))["traceback"]
    for text in (line_of(failing("here")), trace):
        assert "Traceback" in text
        assert "in failing" in text
        assert "ValueError: here" in text


def test_event_logged_as_an_exception_without_one_has_no_traceback() -> None:
    record = of_ours("failed")
    record.exc_info = (None, None, None)
    assert line_of(record) == f"{TIME} error failed"
    assert "traceback" not in json.loads(line_of(record, "json"))


def read(line: str) -> dict[str, object]:
    """Parse a line as strictly as any reader."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    entry: dict[str, object] = json.loads(line, parse_constant=refuse)
    return entry


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_number_keeps_the_line_readable(number: float) -> None:
    entry = read(line_of(of_ours("told", loss=number, losses=[number], version=3), "json"))
    assert (entry["loss"], entry["losses"]) == (str(number), f"[{number}]")
    assert entry["version"] == 3


@pytest.mark.parametrize("value", [{(1, 2): 3}, {"a": {b"b": math.nan}}, {1, 2}, object])
@pytest.mark.parametrize("form", FORMS)
def test_unusual_value_does_not_lose_its_line(form: Form, value: object) -> None:
    line = line_of(of_ours("told", value=value, version=3), form)
    assert line.isprintable()
    if form == "json":
        assert read(line)["version"] == 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["exception", "stack", "a\nb", "\x1b[2J"])
def test_unusual_field_name_does_not_break_its_line(form: Form, name: str) -> None:
    for value in (3, f"x\n{TIME} info job_finished"):
        line = line_of(of_ours("told", **{name: value}), form)
        assert line.isprintable()
        assert line.count("told") == 1


def test_terminal_adds_only_colours() -> None:
    record = of_ours("told", job="digits")
    plain, coloured = line_of(record), line_of(record, colours=True)
    assert "\x1b" not in plain
    assert coloured != plain
    for code in ("0", "1", "2", "31", "36"):
        coloured = coloured.replace(f"\x1b[{code}m", "")
    assert coloured == plain
