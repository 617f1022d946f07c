"""Follows the jobs topic: starts the actors of a process's jobs and passes changes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from common.errors import UnavailableError
from common.jobs.store import JobRecord, JobStore
from common.kafka.opening import open_log
from common.runtime.supervisor import HANGS_S, SLOW_S, THREADS, Supervisor
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.kafka.port import Log
    from common.runtime.service import ServiceProcess
    from common.runtime.supervisor import Actor, PreviousFault, Supervised
    from common.telemetry.metrics.registry import ProcessMetrics

    Wanted: TypeAlias = Callable[[], JobRecord | None]
    MakePart: TypeAlias = Callable[[Wanted, Callable[[], None], PreviousFault | None], Actor]


# Time between reads of the jobs topic.
JOBS_S = 0.5
# Time for all jobs to close when the process ends.
END_S = 10.0


class _Taken:
    """A job of this process with its current record."""

    def __init__(self, record: JobRecord) -> None:
        self.first = record
        self.record: JobRecord | None = record
        self.running: Supervised | None = None

    def wanted(self) -> JobRecord | None:
        """Return the current record; None if the job was deleted."""
        return self.record

    def update(self, record: JobRecord | None) -> None:
        """Pass a record to the actor and wake it, if the record is new."""
        if self.record is not record:
            self.record = record
            if self.running is not None:
                self.running.wake()

    @property
    def over(self) -> bool:
        """True if the job's actor has ended in this process."""
        return self.running is None or self.running.ended.is_set()


class Jobs:
    """The jobs of one process, with one actor each.

    Args:
        supervisor: Runs the actors.
        make: Makes the actor of a job within a turn. Its arguments are a function that returns the
            current record (None if the job was deleted), a function that wakes the actor, and the
            previous fault or None.
        begins: Returns True to start an actor for a job without one. Its arguments are the job's
            record, and True if the job is new to this process.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        make: MakePart,
        begins: Callable[[JobRecord, bool], bool],
    ) -> None:
        self._supervisor = supervisor
        self._make = make
        self._begins = begins
        self._taken = dict[str, _Taken]()

    def follow(self, jobs: Mapping[str, JobRecord]) -> None:
        """Update to the current jobs: start actors, pass new records, forget deleted jobs."""
        for job, record in jobs.items():
            taken = self._taken.get(job)
            same = taken is not None and taken.first.is_same_job(record)
            if taken is not None and not taken.over:
                taken.update(record if same else None)
            elif self._begins(record, not same):
                self._begin(job, record)
        for job in self._taken.keys() - jobs.keys():
            if self._taken[job].over:
                del self._taken[job]
            else:
                self._taken[job].update(None)

    def _begin(self, job: str, record: JobRecord) -> None:
        taken = self._taken[job] = _Taken(record)
        taken.running = self._supervisor.begin(job, partial(self._made, taken))

    def _made(
        self, taken: _Taken, wake: Callable[[], None], fault: PreviousFault | None
    ) -> Actor | None:
        # The job was deleted while its actor was being made again after faults.
        if taken.record is None:
            return None
        return self._make(taken.wanted, wake, fault)


class OpenedKafka(NamedTuple):
    """Kafka for a process with jobs.

    Attributes:
        log: Connection to Kafka.
        job_store: The jobs topic.
        closing: Closes further resources after the jobs have ended.
    """

    log: Log
    job_store: JobStore
    closing: ExitStack


MakeParts: TypeAlias = "Callable[[OpenedKafka], MakePart]"
Begins: TypeAlias = "Callable[[JobRecord, bool], bool]"


def follow_jobs(  # noqa: PLR0913 -- services differ in each of these
    process: ServiceProcess,
    metrics: ProcessMetrics,
    make_parts: MakeParts,
    begins: Begins,
    *,
    beside: tuple[MakeParts, Begins] | None = None,
    repairs: bool = False,
    open_log: Callable[[Settings, str], Log] = open_log,
    slow_s: float = SLOW_S,
    hangs_s: float = HANGS_S,
) -> None:
    """Run the jobs of a process until the process has to end.

    Args:
        process: The process. Its metrics are served from now on.
        metrics: Metrics of the process.
        make_parts: Gets Kafka and returns the function that makes the actor of a job, see `Jobs`.
        begins: Returns True to start an actor for a job, see `Jobs`.
        beside: Optional. `make_parts` and `begins` of further actors, which share one separate
            thread. These actors wait for the same server. If it hangs, only one thread hangs.
        repairs: True if the process may write to the jobs topic and repairs it, see
            `common.kafka.table`.
        open_log: Opens Kafka.
        slow_s: See `Supervisor`.
        hangs_s: See `Supervisor`.

    Raises:
        UserError: If a setting is invalid.
    """
    process.serve_metrics(metrics)
    outage = Outage(process.logger, "kafka")
    watchdog = process.watchdogs.begin("the loop of jobs")
    process.logger.info("service_started")

    @contextmanager
    def opened() -> Iterator[tuple[list[Jobs], JobStore]]:
        with ExitStack() as stack:
            log = stack.enter_context(closing(open_log(process.settings, process.name)))
            job_store = stack.enter_context(closing(JobStore(log)))
            # Read the complete topic: a stopped job looks as if it runs in its first records.
            job_store.read()
            jobs = list[Jobs]()
            counted: ProcessMetrics | None = metrics
            both = (((make_parts, begins), THREADS), (beside, 1))
            for (make, begin), threads in [(each, n) for each, n in both if each is not None]:
                make_part = make(OpenedKafka(log, job_store, stack))
                supervisor = Supervisor(
                    *(counted, process.watchdogs, process.logger),
                    threads=threads,
                    slow_s=slow_s,
                    hangs_s=hangs_s,
                )
                stack.callback(supervisor.close, END_S)
                jobs.append(Jobs(supervisor, make_part, begin))
                # Only the first supervisor counts faults, so that a job is counted once.
                counted = None
            yield jobs, job_store

    with ExitStack() as stack:
        found: tuple[list[Jobs], JobStore] | None = None
        while not process.stopping.is_set():
            watchdog.beat()
            try:
                if found is None:
                    found = stack.enter_context(opened())
                jobs, job_store = found
                records = job_store.refresh(JOBS_S)
                if repairs:
                    job_store.table.repair()
                for each in jobs:
                    each.follow(records)
                outage.quiet()
            except UnavailableError as error:
                outage.met(error)
                process.stopping.wait(JOBS_S)
