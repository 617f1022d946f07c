"""Which jobs a coordinator takes part in, and that it is well while it begins with many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config import Settings
from common.job import parse_job
from common.jobs.store import JobRecord
from common.metrics.coordinator import CoordinatorMetrics
from common.metrics.serving import Pulses
from common.ports import WRITER_BYTES
from common.telemetry import event_logger
from common.testing.clock import HandClock
from common.testing.log import MemoryLog
from common.topics import control_topic, updates_topic
from common.tracing import NoTracer
from services.coordinator.__main__ import JOB_STILL_S, Jobs
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.testing.log_readers import MemoryWriter


class SlowLog(MemoryLog):
    """Each job that begins takes as long as one may."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self._hands = clock

    def writer(
        self,
        *,
        waits: bool = True,
        max_bytes: int = WRITER_BYTES,
        on_ready: Callable[[], None] | None = None,
    ) -> MemoryWriter:
        """See the port."""
        self._hands.advance(JOB_STILL_S / 4)
        return super().writer(waits=waits, max_bytes=max_bytes, on_ready=on_ready)


def test_a_replica_that_begins_with_many_jobs_is_well_meanwhile() -> None:
    clock = HandClock()
    pulses, log = Pulses(clock), SlowLog(clock)
    pulse = pulses.begin("the main loop", JOB_STILL_S)
    seen = list[str]()

    def beat() -> None:
        seen.append(pulses.complaint())
        pulse.beat()

    jobs = dict[str, JobRecord]()
    for name in map("digits-{}".format, range(5)):
        spec = parse_job(JOB.replace("name: digits", f"name: {name}"))
        jobs[name] = JobRecord(spec, "running", {}, "", 1.0)
        for topic in (control_topic(name), updates_topic(name)):
            log.create_topic(topic, 1)
    settings = Settings(redis="unix:///nobody/is/here")
    made = Jobs(
        "c1", settings, log, CoordinatorMetrics(), Pulses(), NoTracer(), event_logger("test")
    )
    made.follow(jobs, beat)
    made.end()
    assert seen == [""] * len(jobs)
