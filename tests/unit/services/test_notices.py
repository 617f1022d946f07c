"""A notice makes the worker leave and is reported once; a missing or broken one does no harm."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest

from common.telemetry.logging import event_logger, fields_of
from services.worker.notices import NoticeWatch
from tests.fakes.notices import MemoryNotices

if TYPE_CHECKING:
    from collections.abc import Mapping

AT_S = 1_800_000_000.0
PATIENCE_S = 120.0


class Bench:
    """A watch with all its inputs and outputs."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.notices = MemoryNotices()
        self.leaving = threading.Event()
        self._caplog = caplog

    def watch(self) -> NoticeWatch:
        """Return the watch."""
        return NoticeWatch(self.notices, self.leaving, event_logger("worker"))

    def events(self) -> list[str]:
        """Return the logged events."""
        return [record.getMessage() for record in self._caplog.records]

    def fields(self) -> list[Mapping[str, object]]:
        """Return the keys and values of each event."""
        return [fields_of(record) for record in self._caplog.records]


@pytest.fixture
def bench(caplog: pytest.LogCaptureFixture) -> Bench:
    return Bench(caplog)


def test_interruption_is_reported_once_and_makes_the_worker_leave(bench: Bench) -> None:
    watch = bench.watch()
    watch.look()
    assert not bench.leaving.is_set()
    bench.notices.interrupt(AT_S, "stop")
    watch.look()
    watch.look()
    assert bench.leaving.is_set()
    assert bench.events() == ["notice_received"]
    at = "2027-01-15T08:00:00Z"
    assert bench.fields() == [{"at": at, "detail": "stop"}]


def test_outage_of_notices_is_logged_at_start_and_end_and_stops_no_worker(bench: Bench) -> None:
    watch = bench.watch()
    bench.notices.go_away()
    for _ in range(3):
        watch.look()
    bench.notices.come_back()
    for _ in range(3):
        watch.look()
    assert bench.events() == ["notices_unavailable", "notices_recovered"]
    assert not bench.leaving.is_set()
    bench.notices.interrupt(AT_S)
    watch.look()
    assert bench.leaving.is_set()


def test_notice_that_exists_at_the_start_is_found_before_any_work(bench: Bench) -> None:
    bench.notices.interrupt(AT_S)
    thread = bench.watch().start(every_s=600.0)
    assert bench.leaving.is_set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_watch_continues_after_an_unexpected_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fails() -> None:
        failed.set()
        raise AttributeError("odd")

    with monkeypatch.context() as patch:
        patch.setattr(bench.notices, "look", fails)
        thread = bench.watch().start(every_s=0.001)
        failed.clear()
        assert failed.wait(PATIENCE_S)
    bench.notices.interrupt(AT_S)
    thread.join(PATIENCE_S)
    assert bench.leaving.is_set()


def test_watch_continues_through_an_outage_until_the_worker_leaves(bench: Bench) -> None:
    bench.notices.go_away()
    thread = bench.watch().start(every_s=0.001)
    bench.notices.interrupt(AT_S)
    bench.notices.come_back()
    assert bench.leaving.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_watch_ends_when_the_worker_leaves_for_another_reason(bench: Bench) -> None:
    thread = bench.watch().start(every_s=600.0)
    bench.leaving.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
