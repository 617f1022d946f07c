"""Logs follow the settings, cheaply and with bound values, and report each problem once."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from time import perf_counter
from typing import Literal

import pytest
import structlog
from structlog.stdlib import filter_by_level

from common.config.settings import Settings
from common.telemetry.logging import (
    Changes,
    EventLogger,
    StageTimes,
    event_logger,
    fields_of,
    line_formatter,
    set_up_logging,
    to_record,
)

UNTOUCHED = """
import logging, structlog
before = vars(logging.root).copy(), list(logging.root.handlers)
import common.telemetry.logging
common.telemetry.logging.event_logger("x", job="digits").bind(worker="w3").info("hidden")
assert not structlog.is_configured()
assert (vars(logging.root), logging.root.handlers) == before
"""


def logger_to(
    *, form: Literal["console", "json"] = "console", level: int = logging.INFO
) -> tuple[EventLogger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(line_formatter(form, {}, colours=False))
    logger = logging.Logger("test", level)  # noqa: LOG001 -- one that no other test can see
    logger.addHandler(handler)
    return EventLogger(logger, (filter_by_level, to_record), {}), stream


class Terminal(io.StringIO):
    """A stream that shows colours."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_event_has_bound_and_given_fields() -> None:
    log, stream = logger_to()
    log.bind(job="digits").bind(worker="w3").info("update_applied", version=17, loss=0.123456789)
    time, line = stream.getvalue().split(" ", 1)
    assert line == "info update_applied job=digits worker=w3 version=17 loss=0.123457\n"
    assert time.endswith("Z")


def test_binding_does_not_change_the_original_logger() -> None:
    log, stream = logger_to()
    log.bind(job="digits")
    log.warning("alone")
    assert stream.getvalue().endswith("warning alone\n")


def test_logger_is_created_with_bound_fields(caplog: pytest.LogCaptureFixture) -> None:
    event_logger("x", job="digits").warning("told", version=3)
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("x", "told")
    assert fields_of(record) == {"job": "digits", "version": 3}


def test_exception_is_logged_with_its_traceback() -> None:
    log, stream = logger_to()
    try:
        raise ValueError("here")  # noqa: TRY301 -- it is what the test is about
    except ValueError:
        log.exception("failed", job="digits")
    assert " error failed job=digits\n" in stream.getvalue()
    assert "ValueError: here" in stream.getvalue()


def test_events_below_the_level_are_not_written() -> None:
    log, stream = logger_to(level=logging.ERROR)
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert stream.getvalue().endswith(" error d\n")
    assert stream.getvalue().count("\n") == 1


def test_events_below_the_level_are_not_rendered() -> None:
    put_together = list[object]()
    logger = logging.Logger("test", logging.WARNING)  # noqa: LOG001 -- as above

    def note(_logger: object, _method: str, event: object) -> str:
        put_together.append(event)
        return ""

    log = EventLogger(logger, (filter_by_level, note), {})
    log.info("hidden", version=3)
    assert not put_together
    log.warning("shown")
    assert put_together == [{"event": "shown"}]


@pytest.mark.usefixtures("process_logging")
def test_lines_of_our_code_libraries_and_structlog_have_one_form() -> None:
    stream = io.StringIO()
    set_up_logging(Settings(log_format="json"), stream, service="worker", worker="w3")
    event_logger("ours", job="digits").info("told", version=3)
    logging.getLogger("botocore").warning("retry %d", 2)
    structlog.get_logger("task").info("epoch %d", 4, loss=0.5)
    warnings.warn("an old name", stacklevel=1)
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {entry.pop("time")[-1] for entry in entries} == {"Z"}
    *logged, warned = [
        (entry.pop("level"), entry.pop("service"), entry.pop("worker"), entry) for entry in entries
    ]
    assert logged == [
        ("info", "worker", "w3", {"event": "told", "job": "digits", "version": 3}),
        ("warning", "worker", "w3", {"event": "retry 2", "logger": "botocore"}),
        ("info", "worker", "w3", {"event": "epoch 4", "loss": 0.5}),
    ]
    assert warned[-1]["logger"] == "py.warnings"
    assert "an old name" in warned[-1]["event"]


@pytest.mark.usefixtures("process_logging")
def test_logger_bound_before_set_up_follows_it() -> None:
    log = event_logger("early").bind(job="digits")
    log.debug("unheard")
    stream = io.StringIO()
    set_up_logging(Settings(log_level="debug"), stream)
    log.debug("heard")
    set_up_logging(Settings(log_level="warning"), stream)
    log.info("hidden")
    log.warning("shown")
    logged = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]
    assert logged == ["debug heard job=digits", "warning shown job=digits"]


@pytest.mark.usefixtures("process_logging")
def test_only_a_terminal_gets_colours() -> None:
    for stream, coloured in ((Terminal(), True), (io.StringIO(), False)):
        set_up_logging(Settings(), stream)
        event_logger("x").info("told")
        assert ("\x1b[" in stream.getvalue()) is coloured


@pytest.mark.usefixtures("process_logging")
def test_requests_with_their_headers_are_not_logged_even_at_debug() -> None:
    stream = io.StringIO()
    set_up_logging(Settings(log_level="debug"), stream)
    logging.getLogger("botocore.auth").debug("x-amz-security-token:secret")
    logging.getLogger("botocore.auth").info("told")
    logging.getLogger("httpx2").info("GET https://secret.example")  # it logs each request like this
    assert "secret" not in stream.getvalue()
    assert "told" in stream.getvalue()


def test_creating_loggers_at_import_configures_nothing() -> None:
    subprocess.run([sys.executable, "-c", UNTOUCHED], check=True)  # noqa: S603 -- our own command line


def test_reason_is_reported_when_it_changes() -> None:
    changes = Changes()
    logged = [changes("round", reason) for reason in ("waiting", "waiting", "short", "waiting")]
    assert logged == [True, False, True, True]
    assert changes("other", None)
    assert not changes("other", None)


def test_stage_times_are_logged_as_counts_and_mean_milliseconds() -> None:
    log, stream = logger_to(form="json")
    times = StageTimes()
    times.add("push", perf_counter() - 3600.0)
    times.add("push", perf_counter() - 1800.0)
    times.log(log)
    fields = json.loads(stream.getvalue())
    assert fields["event"] == "stage_times"
    assert fields["push"] == 2
    # The tolerance allows for machines of any speed.
    assert fields["push_ms"] == pytest.approx(2_700_000.0, rel=0.1)
