"""Jobs of one evaluator: a fault in one does not affect the others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from common.config.settings import Settings
from common.jobs.job_file import parse_job
from common.jobs.store import JobRecord
from common.kafka.memory import MemoryLog
from common.kafka.names import updates_topic
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoard, MemoryRedis
from common.runtime.faults import Patience
from common.runtime.jobs import Jobs
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import event_logger, fields_of
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdogs
from services.evaluator.__main__ import begins
from services.evaluator.evaluation_runner import EvaluatorProcess
from services.evaluator.loop import JobEvaluator
from tests.unit.services.test_evaluator import JOB, NAME, PATIENCE_S, World, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.core.messages import Wanted
    from common.core.spans import LogPosition, Partition
    from common.kafka.memory import MemoryTail

# Allowed on the machine that submitted the job, but not here.
ENTRYPOINT = "mine.tasks:Task"


def record(name: str, job: str = JOB, wanted: Wanted = "running") -> JobRecord:
    spec = parse_job(job.replace(f"name: {NAME}", f"name: {name}"))
    return JobRecord(spec, wanted, {}, "", 1.0)


class Evaluator:
    """State of an evaluator's process for all of its jobs."""

    def __init__(self, log: MemoryLog | None = None, redis: MemoryRedis | None = None) -> None:
        self.log = log or MemoryLog()
        self.metrics = ProcessMetrics("evaluator")
        logger, board = event_logger("evaluator"), partial(MemoryBoard, redis or MemoryRedis())
        self._process = EvaluatorProcess(Settings(), self.log, board, self.metrics, logger)
        self._supervisor = Supervisor(
            self.metrics,
            Watchdogs(),
            logger,
            patience=Patience(first_s=0.0, longest_s=0.01),
        )

    def jobs(self, only: str | None = None) -> Jobs:
        """Return the jobs that it evaluates."""
        make = partial(JobEvaluator, self._process)
        return Jobs(self._supervisor, make, partial(begins, only))

    def evaluates(self, job: str) -> bool:
        """Return True if the metrics show that a job is evaluated."""
        return self._count("doll_evaluations_total", job_name=job, outcome="done") is not None

    def faults(self, job: str) -> float:
        """Return the number of a job's actors that failed."""
        return self._count("doll_job_faults_total", job_name=job, kind="fault") or 0.0

    def has(self, job: str) -> bool:
        """Return True if the supervisor runs the job."""
        return self._count("doll_job_faults_total", job_name=job, kind="fault") is not None

    def _count(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def end(self) -> None:
        """Stop in order."""
        assert self._supervisor.close(PATIENCE_S)


class BrokenLog(MemoryLog):
    """A log with a bug in one job's topics."""

    def tail(
        self,
        partition: Partition,
        position: int | LogPosition,
        on_ready: Callable[[], None] | None = None,
        *,
        prompt: bool = False,
    ) -> MemoryTail:
        """See the port."""
        if "broken" in partition.topic:
            raise ValueError(f"{partition}@{position}")
        return super().tail(partition, position, on_ready, prompt=prompt)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.end()


def failures(caplog: pytest.LogCaptureFixture) -> list[tuple[object, str]]:
    """Return the jobs that were reported as failed, with reasons."""
    logged = [fields_of(each) for each in caplog.records if each.getMessage() == "job_failed"]
    return [(fields["job"], str(fields["reason"])) for fields in logged]


def test_evaluator_takes_only_jobs_with_evaluation() -> None:
    process = Evaluator()
    jobs = process.jobs()
    plain = JOB[: JOB.index("evaluation")]
    for name in ("asks", "other"):
        process.log.create_topics([NewTopic(updates_topic(name))])
    jobs.follow({"asks": record("asks"), "other": record("other", plain)})
    until(lambda: process.evaluates("asks"), "the job is evaluated")
    assert not process.evaluates("other")
    jobs.follow({})
    until(lambda: not process.evaluates("asks"), "the job is no longer evaluated")
    process.end()


def test_evaluator_limited_to_one_job_takes_only_that_job() -> None:
    process = Evaluator()
    jobs = process.jobs(only="two")
    for name in ("one", "two"):
        process.log.create_topics([NewTopic(updates_topic(name))])
    jobs.follow({name: record(name) for name in ("one", "two")})
    until(lambda: process.evaluates("two"), "the job is evaluated")
    assert not process.evaluates("one")
    process.end()


def test_job_with_forbidden_task_is_reported_once_and_retried(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    process = Evaluator(world.log, world.redis)
    job = JOB.replace("name: logistic-regression, classes: 2", f'entrypoint: "{ENTRYPOINT}"')
    process.log.create_topics([NewTopic(updates_topic("good"))])
    world.update(1)
    world.update(2)
    world.offer(2)
    process.jobs().follow({NAME: record(NAME, job), "good": record("good")})
    until(lambda: process.faults(NAME) >= 3, "the job is retried")
    until(lambda: process.evaluates("good"), "the other job is evaluated")
    process.end()
    [(failed, reason)] = failures(caplog)
    assert failed == NAME
    assert "not among the allowed entrypoints" in reason


def test_no_model_is_built_for_an_ended_and_evaluated_job(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # A new actor would be refused, because this task may not be imported here.
    world.hold_out()
    world.update(1)
    world.offer(1)
    world.job_store.patch(NAME, "enough", wanted="stopped")
    world.start().await_end()
    assert [each.model.version for each in world.evals()] == [1]
    process = Evaluator(world.log, world.redis)
    job = JOB.replace("name: logistic-regression, classes: 2", f'entrypoint: "{ENTRYPOINT}"')
    process.jobs().follow({NAME: record(NAME, job, "stopped")})
    until(lambda: not process.has(NAME), "nothing is left to evaluate")
    assert failures(caplog) == []
    process.end()


def test_internal_error_in_one_job_does_not_affect_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = Evaluator(BrokenLog())
    for name in ("broken", "whole"):
        process.log.create_topics([NewTopic(updates_topic(name))])
    process.jobs().follow({name: record(name) for name in ("broken", "whole")})
    until(lambda: process.faults("broken") >= 2, "one job fails")
    until(lambda: process.evaluates("whole"), "the other job is evaluated")
    process.end()
    [(failed, reason)] = failures(caplog)
    assert failed == "broken"
    assert reason.startswith("ValueError: ")


def test_stopped_job_is_checked_only_once_until_it_is_resumed() -> None:
    process = Evaluator()
    jobs = process.jobs()
    stopped = {"signs": record("signs", wanted="stopped")}
    jobs.follow(stopped)
    until(lambda: not process.has("signs"), "nothing is left to evaluate")
    process.log.create_topics([NewTopic(updates_topic("signs"))])
    jobs.follow(stopped)
    assert not process.has("signs")
    jobs.follow({"signs": record("signs")})
    until(lambda: process.evaluates("signs"), "the resumed job is evaluated")
    process.end()
