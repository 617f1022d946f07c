"""Which jobs an evaluator judges: the fault of one is no affair of the others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from common.config import Settings
from common.job import parse_job
from common.jobs.store import JobRecord
from common.log_lines import fields_of
from common.metrics.evaluator import EvaluatorMetrics
from common.metrics.serving import Pulses
from common.telemetry import event_logger
from common.testing.board import MemoryBoard, MemoryRedis
from common.testing.log import MemoryLog
from common.topics import updates_topic
from services.evaluator.jobs import AGAIN_S, Jobs
from tests.unit.services.test_evaluator import JOB, NAME, PATIENCE_S, World, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.core.events import Wanted
    from common.core.spans import Partition
    from common.testing.log_readers import MemoryTail

ENTRYPOINT = "mine.tasks:Task"  # allowed where the job was submitted, not here


def record(name: str, job: str = JOB, wanted: Wanted = "running") -> JobRecord:
    spec = parse_job(job.replace(f"name: {NAME}", f"name: {name}"), (ENTRYPOINT,))
    return JobRecord(spec, wanted, {}, "", 1.0)


class Process:
    """What an evaluator's process has for all of its jobs."""

    def __init__(self, log: MemoryLog | None = None) -> None:
        self.log = log or MemoryLog()
        self.redis = MemoryRedis()
        self.metrics = EvaluatorMetrics()
        self.now_s = 0.0

    def jobs(self, only: str | None = None, settings: Settings | None = None) -> Jobs:
        """The jobs that it judges."""
        return Jobs(
            settings or Settings(),
            self.log,
            self.metrics,
            Pulses(),
            event_logger("evaluator"),
            only=only,
            clock=lambda: self.now_s,
            boards=lambda _, job: MemoryBoard(self.redis, job),
        )

    def judges(self, job: str) -> bool:
        """Whether it does, by its metrics."""
        labels = {"job_name": job, "outcome": "done"}
        value = self.metrics.meters.registry.get_sample_value("doll_evaluations_total", labels)
        return value is not None


class BrokenLog(MemoryLog):
    """Has a fault of ours."""

    def tail(
        self, partition: Partition, position: int, on_ready: Callable[[], None] | None = None
    ) -> MemoryTail:
        """See the port."""
        del on_ready
        raise ValueError(f"{partition}@{position}")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.end()


def test_jobs_that_ask_for_it_are_judged_and_no_others() -> None:
    process = Process()
    jobs = process.jobs()
    plain = JOB[: JOB.index("evaluation")]
    for name in ("asks", "other"):
        process.log.create_topic(updates_topic(name), 1)
    jobs.follow({"asks": record("asks"), "other": record("other", plain)})
    until(lambda: process.judges("asks"), "it is judged")
    assert not process.judges("other")
    jobs.follow({})
    until(lambda: not process.judges("asks"), "it was deleted")
    jobs.end()


def test_of_all_jobs_only_the_one_that_was_named_is_judged() -> None:
    process = Process()
    jobs = process.jobs(only="two")
    for name in ("one", "two"):
        process.log.create_topic(updates_topic(name), 1)
    jobs.follow({name: record(name) for name in ("one", "two")})
    until(lambda: process.judges("two"), "it is judged")
    assert not process.judges("one")
    jobs.end()


def test_a_job_whose_task_may_not_be_imported_here_is_told_once_and_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(world.log)
    process.redis = world.redis
    job = JOB.replace("name: logistic-regression, classes: 2", f'entrypoint: "{ENTRYPOINT}"')
    jobs = process.jobs()
    process.log.create_topic(updates_topic("good"), 1)
    records = {NAME: record(NAME, job), "good": record("good")}
    world.update(1)
    world.update(2)
    world.offer(2)

    def told() -> list[object]:
        faults = [each for each in caplog.records if each.getMessage() == "job_not_evaluated"]
        return [fields_of(each)["reason"] for each in faults]

    jobs.follow(records)
    until(lambda: jobs.follow(records) or told(), "why is told")  # type: ignore[func-returns-value]
    assert "not among the allowed entrypoints" in str(told()[0])
    assert process.judges("good")
    process.now_s += AGAIN_S
    jobs.follow(records)  # begins anew
    until(lambda: not process.judges(NAME), "it has failed again")
    jobs.follow(records)
    assert len(told()) == 1
    jobs.end()


def test_of_a_job_that_is_over_and_judged_no_model_is_made(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # made again it would be told that this task may not be imported here
    world.hold_out()
    world.update(1)
    world.offer(1)
    world.book.want(NAME, "stopped", "enough")
    world.start()
    world.running[0][1].join(PATIENCE_S)
    assert [each.model.version for each in world.told()] == [1]
    process = Process(world.log)
    process.redis = world.redis
    job = JOB.replace("name: logistic-regression, classes: 2", f'entrypoint: "{ENTRYPOINT}"')
    jobs = process.jobs()
    over = {NAME: record(NAME, job, "stopped")}
    jobs.follow(over)
    until(
        lambda: NAME not in {thread.name for thread in threading.enumerate()},
        "there is nothing left to judge",
    )
    jobs.follow(over)  # tells why, had it failed
    assert "job_not_evaluated" not in caplog.text
    jobs.end()


def test_a_fault_of_ours_ends_the_process() -> None:
    process = Process(BrokenLog())
    process.log.create_topic(updates_topic("signs"), 1)
    jobs = process.jobs()
    with pytest.raises(ValueError, match="@0"):
        until(lambda: jobs.follow({"signs": record("signs")}), "it is raised")


def test_a_job_that_was_stopped_before_is_looked_at_once() -> None:
    process = Process()
    jobs = process.jobs()
    stopped = {"signs": record("signs", wanted="stopped")}
    jobs.follow(stopped)
    until(lambda: not process.judges("signs"), "there is nothing to judge")
    process.log.create_topic(updates_topic("signs"), 1)
    jobs.follow(stopped)
    assert not process.judges("signs")
    jobs.follow({"signs": record("signs")})
    until(lambda: process.judges("signs"), "it goes on")
    jobs.end()
