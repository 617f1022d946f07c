"""One line per event, whatever the values are."""

from __future__ import annotations

import io
import json
import logging
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Settings
from common.telemetry import (
    SETTLED_S,
    Changes,
    EventLogger,
    JsonLines,
    Outage,
    StageTimes,
    TextLines,
    set_up_logging,
)
from common.testing.clock import HandClock


def logger_to(
    formatter: logging.Formatter, level: int = logging.INFO
) -> tuple[EventLogger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("test", level)  # noqa: LOG001 -- one that no other test can see
    logger.addHandler(handler)
    return EventLogger(logger), stream


def test_an_event_carries_what_was_bound_and_what_is_given() -> None:
    log, stream = logger_to(TextLines())
    log.bind(job="digits").bind(worker="w3").info("update_applied", version=17, loss=0.123456789)
    time, line = stream.getvalue().split(" ", 1)
    assert line == "info update_applied job=digits worker=w3 version=17 loss=0.123457\n"
    assert time.endswith("Z")


def test_binding_leaves_the_first_logger_as_it_was() -> None:
    log, stream = logger_to(TextLines())
    log.bind(job="digits")
    log.warning("alone")
    assert stream.getvalue().endswith("warning alone\n")


def test_json_has_the_same_in_an_object() -> None:
    log, stream = logger_to(JsonLines())
    log.info("taken", job="digits", at=(1, 2))
    entry = json.loads(stream.getvalue())
    assert entry.pop("time")
    assert entry == {"level": "info", "event": "taken", "job": "digits", "at": [1, 2]}


def test_an_exception_shows_where_it_came_from() -> None:
    for formatter in (TextLines(), JsonLines()):
        log, stream = logger_to(formatter)
        try:
            raise ValueError("here")  # noqa: TRY301 -- it is what the test is about
        except ValueError:
            log.exception("failed")
        assert "Traceback" in stream.getvalue()
        assert "ValueError: here" in stream.getvalue()


def test_lines_of_other_libraries_name_their_logger() -> None:
    for formatter in (TextLines(), JsonLines()):
        record = logging.LogRecord("kafka", logging.ERROR, "", 0, "broker %d away", (3,), None)
        assert "broker 3 away" in formatter.format(record)
        assert "kafka" in formatter.format(record)


@given(st.text(), st.text())
def test_a_text_event_is_one_line(event: str, value: str) -> None:
    log, stream = logger_to(TextLines())
    log.info(event, reason=value)
    assert len(stream.getvalue().splitlines()) == 1


def test_what_the_level_hides_is_not_written() -> None:
    log, stream = logger_to(TextLines(), logging.ERROR)
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert stream.getvalue().endswith(" error d\n")
    assert stream.getvalue().count("\n") == 1


def test_the_settings_say_how_a_process_logs() -> None:
    root, stream = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level
    try:
        set_up_logging(Settings(log_format="json", log_level="warning"), stream)
        logging.getLogger("x").info("hidden")
        logging.getLogger("x").warning("shown")
    finally:
        root.handlers[:], root.level = before
    assert json.loads(stream.getvalue())["event"] == "shown"


def test_a_reason_is_told_when_it_changes() -> None:
    changes = Changes()
    told = [changes("round", reason) for reason in ("waiting", "waiting", "short", "waiting")]
    assert told == [True, False, True, True]
    assert changes("other", None)
    assert not changes("other", None)


def test_an_outage_is_told_when_it_begins_changes_and_ends() -> None:
    log, stream = logger_to(TextLines())
    outage = Outage(log, "redis")
    outage.over()
    for reason in ("refused", "refused", "timeout"):
        outage.met(OSError(reason))
    outage.over()
    outage.over()
    told = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert told == ["redis_away reason=refused", "redis_away reason=timeout", "redis_back"]


def test_silence_ends_an_outage_once_it_has_lasted() -> None:
    log, stream = logger_to(TextLines())
    clock = HandClock()
    outage = Outage(log, "kafka", clock)
    for _ in range(3):
        outage.met(OSError("refused"))
        outage.quiet()  # the reader finds nothing new, and no wonder
        clock.advance(SETTLED_S / 2)
        outage.quiet()
    clock.advance(SETTLED_S / 2)
    outage.quiet()
    outage.quiet()
    told = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert told == ["kafka_away reason=refused", "kafka_back"]


def test_stage_times_are_told_as_counts_and_mean_milliseconds() -> None:
    log, stream = logger_to(JsonLines())
    times = StageTimes()
    times.add("push", perf_counter() - 3600.0)
    times.add("push", perf_counter() - 1800.0)
    times.tell(log)
    told = json.loads(stream.getvalue())
    assert told["event"] == "stage_times"
    assert told["push"] == 2
    assert told["push_ms"] == pytest.approx(2_700_000.0, rel=0.1)  # of any machine's speed
