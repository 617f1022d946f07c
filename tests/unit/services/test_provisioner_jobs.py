"""Jobs of one provisioner: a fault in one does not affect the others."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from common.config.settings import Settings
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic, provisioning_board, updates_topic
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoard, MemoryRedis
from common.runtime.faults import Patience
from common.runtime.jobs import Jobs
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import event_logger, fields_of
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdogs
from services.provisioner.__main__ import begins, openers
from services.provisioner.loop import JobProvisioner, ProvisionerProcess
from tests.unit.services.test_provisioner_settings import JOB, MARKET, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

    from common.core.spans import LogPosition, Partition
    from common.kafka.memory import MemoryTail

RENTED = f"{JOB}provisioning: {{workers: 3}}\n"
DIGITS = {"digits": record(RENTED)}
PATIENCE_S = 120.0


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
        if "letters" in partition.topic:
            raise ValueError(f"{partition}@{position}")
        return super().tail(partition, position, on_ready, prompt=prompt)


class Process:
    """A provisioner whose fleet cannot be opened if its directory is a file."""

    def __init__(self, log: MemoryLog, folder: Path) -> None:
        self.redis, self.metrics = MemoryRedis(), ProcessMetrics("provisioner")
        for topic in (control_topic("digits"), updates_topic("digits"), "a"):
            log.create_topics([NewTopic(topic, 2)])
        settings = Settings(
            market=str(folder / "market.yaml"), fleet_directory=str(folder / "machines")
        )
        logger = event_logger("provisioner")
        replica = ProvisionerProcess(
            name="p1",
            # This market has no recorded prices.
            market=MARKET.model_copy(update={"spot": MARKET.spot[:1]}),
            log=log,
            board=partial(MemoryBoard, self.redis),
            openers=partial(openers, settings),
            metrics=self.metrics,
            logger=logger,
        )
        self.supervisor = Supervisor(
            self.metrics,
            Watchdogs(),
            logger,
            patience=Patience(first_s=0.0, longest_s=0.01),
        )
        self.jobs = Jobs(self.supervisor, partial(JobProvisioner, replica), begins)

    def faults(self, job: str, kind: str = "fault") -> float:
        """Return the number of a job's actors that failed in this way."""
        labels = {"job_name": job, "kind": kind}
        found = self.metrics.registry.get_sample_value("doll_job_faults_total", labels)
        return found or 0.0

    def provisions(self, job: str) -> bool:
        """Return True if a provisioner holds the lease of a job."""
        return MemoryBoard(self.redis, provisioning_board(job)).is_leased()


@contextmanager
def running(log: MemoryLog, folder: Path) -> Iterator[Process]:
    process = Process(log, folder)
    yield process
    assert process.supervisor.close(PATIENCE_S)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.01)


def logged(event: str, caplog: pytest.LogCaptureFixture) -> list[tuple[object, object]]:
    """Return the jobs of this event, with reasons."""
    found = [fields_of(each) for each in caplog.records if each.getMessage() == event]
    return [(fields["job"], fields["reason"]) for fields in found]


def test_job_whose_fleet_cannot_be_opened_is_reported_once_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machines = tmp_path / "machines"
    machines.write_text("not a directory")
    with running(MemoryLog(), tmp_path) as process:
        process.jobs.follow(DIGITS)
        until(lambda: process.faults("digits", "unavailable") >= 3, "the job is retried")
        assert [job for job, _ in logged("job_waits", caplog)] == ["digits"]

        # An operator fixes the cause.
        machines.unlink()
        until(machines.is_dir, "the fleet is opened")
        until(lambda: process.provisions("digits"), "the job is provisioned")
    assert logged("job_failed", caplog) == []


def test_internal_error_in_one_job_does_not_affect_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = BrokenLog()
    with running(log, tmp_path) as process:
        process.jobs.follow({"letters": record(RENTED.replace("digits", "letters")), **DIGITS})
        until(lambda: process.faults("letters") >= 2, "one job fails")
        until(lambda: process.provisions("digits"), "the other job is provisioned")
    [(job, reason)] = logged("job_failed", caplog)
    assert job == "letters"
    assert str(reason).startswith("ValueError: ")


def test_deleted_job_ends_once_its_machines_are_released(tmp_path: Path) -> None:
    with running(MemoryLog(), tmp_path) as process:
        process.jobs.follow(DIGITS)
        until(lambda: process.provisions("digits"), "the job is provisioned")
        process.jobs.follow({})
        until(lambda: not process.provisions("digits"), "the provisioner has left the job")
        # The provisioner drops the job.
        process.jobs.follow({})


def test_provisioner_ignores_a_job_without_provisioning(tmp_path: Path) -> None:
    with running(MemoryLog(), tmp_path) as process:
        process.jobs.follow({"digits": record(JOB)})
    assert not process.provisions("digits")


def test_stopped_job_is_checked_once_for_leftover_machines() -> None:
    running, stopped = record(RENTED), replace(record(RENTED), wanted="stopped")
    assert [begins(running, new) for new in (True, False)] == [True, True]
    assert [begins(stopped, new) for new in (True, False)] == [True, False]
