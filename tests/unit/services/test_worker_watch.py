"""Which job a worker is for, what it is by now, and when the worker is to leave."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from common.config import Settings
from common.job import parse_job
from common.jobs.store import JobBook
from common.metrics.serving import Pulse
from common.testing.log import MemoryLog
from services.worker import __main__ as worker
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from common.job import JobSpec

NAME = "digits"


class Bench:
    """A worker that has found its job and looks at the topic every time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker, "JOBS_S", 0.0)
        monkeypatch.setattr(worker, "_workers_of", lambda *_: 0)
        self.log = MemoryLog()
        self.log.create_topic("clinic-a", 1)
        self.book = JobBook(self.log)
        self.book.submit(parse_job(JOB))
        self.leaving = threading.Event()
        self.watch = worker.Watch(JobBook(self.log), NAME, self.leaving, Pulse())
        self.found = self.watch.find(Settings())

    def look(self) -> JobSpec | None:
        """What the worker goes by now."""
        return self.watch.look()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_a_worker_hears_that_its_job_was_changed(bench: Bench) -> None:
    assert bench.look() == bench.found
    bench.book.change(NAME, {"batch_size": 7, "group_size": 3}, "")
    spec = bench.look()
    assert spec is not None
    assert (spec.batch_size, spec.waiting_bound) == (7, 6)
    assert bench.look() is spec  # nothing is new


def test_a_worker_goes_on_while_kafka_is_away(bench: Bench) -> None:
    bench.log.go_away()
    assert bench.look() == bench.found


@pytest.mark.parametrize("why", ["stopped", "deleted", "told"])
def test_a_worker_leaves_a_job_that_is_stopped_or_deleted_and_when_it_is_told(
    bench: Bench, why: str
) -> None:
    if why == "told":
        bench.leaving.set()
    else:
        bench.book.want(NAME, "stopped", "enough")
    if why == "deleted":
        bench.book.delete(NAME)
    assert bench.look() is None
    bench.leaving.clear()
    assert (bench.look() is None) == (why != "told")
