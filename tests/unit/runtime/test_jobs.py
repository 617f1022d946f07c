"""A process takes part in some jobs, and their actors are notified of changes."""

from __future__ import annotations

import threading
import time
from math import inf
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from common.jobs.job_file import parse_job
from common.jobs.store import JobRecord
from common.runtime.faults import Patience
from common.runtime.jobs import Jobs
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import event_logger
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdogs
from tests.unit.jobs.test_spec import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.runtime.supervisor import PreviousFault

PATIENCE_S = 120.0


def record(name: str = "digits", reason: str = "submitted") -> JobRecord:
    return JobRecord(parse_job(TEXT.replace("digits", name)), "running", {}, reason, 1.0)


class Part:
    """An actor that sees the desired state, and ends on request."""

    def __init__(self, world: World, wanted: Callable[[], JobRecord | None]) -> None:
        self._world = world
        self._wanted = wanted
        found = wanted()
        if found is not None and found.reason == "broken":
            raise ValueError("broken")

    def turn(self) -> float | None:
        """Read the desired state."""
        found = self._wanted()
        self._world.seen.append(None if found is None else found.reason)
        return None if found is None or found.wanted == "stopped" else inf

    def close(self) -> None:
        """Count the call."""
        self._world.closed += 1


class World:
    """A process with a `Part` for each job."""

    def __init__(self) -> None:
        self.seen = list[str | None]()
        self.made = self.closed = 0
        self._meters = ProcessMetrics("coordinator")
        metrics = self._meters
        patience = Patience(first_s=0.0, longest_s=0.01)
        logger = event_logger("tests.jobs")
        self.supervisor = Supervisor(metrics, Watchdogs(), logger, patience=patience)
        self.jobs = Jobs(self.supervisor, self._make, self._begins)

    def _make(
        self,
        wanted: Callable[[], JobRecord | None],
        wake: Callable[[], None],
        fault: PreviousFault | None,
    ) -> Part:
        del wake, fault
        self.made += 1
        return Part(self, wanted)

    def counted(self) -> float | None:
        """Return the number of the job's faults. None if the supervisor counts none."""
        labels = {"job_name": "digits", "kind": "fault"}
        return self._meters.registry.get_sample_value("doll_job_faults_total", labels)

    def _begins(self, record: JobRecord, new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` asks it
        return new or record.wanted == "running"


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    assert world.supervisor.close(PATIENCE_S)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.005)


def test_actor_sees_each_change_and_nothing_else(world: World) -> None:
    first = record()
    world.jobs.follow({"digits": first})
    until(lambda: world.seen == ["submitted"], "the job has started")
    world.jobs.follow({"digits": first})
    world.jobs.follow({"digits": record(reason="changed")})
    until(lambda: world.seen[-1] == "changed", "the actor sees the change")
    world.jobs.follow({})
    until(lambda: world.seen[-1] is None, "the job is deleted")
    assert world.seen == ["submitted", "changed", None]
    assert world.made == 1


def test_ended_job_restarts_only_if_it_should_run(world: World) -> None:
    stopped = replace(record(), wanted="stopped")
    world.jobs.follow({"digits": stopped})
    until(lambda: world.closed == 1, "the actor is closed")
    world.jobs.follow({"digits": stopped})
    assert world.made == 1
    until(lambda: world.jobs.follow({"digits": record()}) or world.made == 2, "it restarts")  # type: ignore[func-returns-value]


def test_new_job_of_the_same_name_starts_after_the_first_has_ended(world: World) -> None:
    world.jobs.follow({"digits": record()})
    until(lambda: world.seen == ["submitted"], "the job has started")
    second = {"digits": replace(record(reason="again"), incarnation=2)}
    world.jobs.follow(second)
    until(lambda: world.closed == 1, "the first job has ended")
    until(lambda: world.jobs.follow(second) or world.made == 2, "the second job starts")  # type: ignore[func-returns-value]
    until(lambda: world.seen[-1] == "again", "the job has started")
    assert world.seen == ["submitted", None, "again"]


def test_failing_job_ends_when_it_is_deleted(world: World) -> None:
    world.jobs.follow({"digits": record(reason="broken")})
    until(lambda: world.made >= 3, "the job is retried several times")
    world.jobs.follow({})
    until(lambda: world.counted() is None, "the job has ended")
    made = world.made
    again = {"digits": record()}
    until(lambda: world.jobs.follow(again) or "submitted" in world.seen, "a new job starts")  # type: ignore[func-returns-value]
    assert world.made == made + 1
