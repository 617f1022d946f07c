"""Which jobs a process takes part in: begins with their actors, and tells them what is wanted."""

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


JOBS_S = 0.5  # between looks at the jobs topic
END_S = 10.0  # for all jobs to end in order


class _Taken:
    """A job, as it is wanted now."""

    def __init__(self, record: JobRecord) -> None:
        self.first = record
        self.record: JobRecord | None = record
        self.running: Supervised | None = None

    def wanted(self) -> JobRecord | None:
        """None where it was deleted."""
        return self.record

    def update(self, record: JobRecord | None) -> None:
        """Let the actor see a record, if it is news."""
        if self.record is not record:
            self.record = record
            if self.running is not None:
                self.running.wake()

    @property
    def over(self) -> bool:
        """Whether its actor has come to its end here."""
        return self.running is None or self.running.ended.is_set()


class Jobs:
    """The jobs that one process takes part in, an actor each.

    Args:
        make: Makes the actor of a job, in one of its turns. It gets how to see the job as it is
            wanted now (None: it was deleted), what wakes it, and what ended the one before.
        begins: Whether to begin with a job, or to begin again with one whose actor came to its end;
            and whether it is new to this process.
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
        """Take in all jobs that there are."""
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
        if taken.record is None:  # it failed again and again until it was deleted
            return None
        return self._make(taken.wanted, wake, fault)


class OpenedKafka(NamedTuple):
    """Kafka, as a process with jobs uses it."""

    log: Log
    job_store: JobStore
    closing: ExitStack  # for what else is to be closed, after the jobs have ended


MakeParts: TypeAlias = "Callable[[OpenedKafka], MakePart]"
Begins: TypeAlias = "Callable[[JobRecord, bool], bool]"


def follow_jobs(  # noqa: PLR0913 -- all in which services differ
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
    """Tell the jobs of a process what is wanted of them, until it is told to end.

    Args:
        process: Its metrics are served from now on.
        metrics: Of the process.
        make_parts: Gets Kafka; what it returns makes a job's actor, see `Jobs`.
        begins: Whether to begin with a job, see `Jobs`.
        beside: Likewise of other actors, which share one thread of their own: they all wait for
            one server, so if it hangs, more threads would only hang as well.
        repairs: True if the process may write the jobs topic and repairs it, see `JobStore.repair`.
        open_log: Opens Kafka.
        slow_s: See `Supervisor`.
        hangs_s: Likewise.

    Raises:
        UserError: If a setting makes no sense.
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
            job_store.read()  # all of it: by its first records alone, a stopped job seems to run
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
                counted = None  # a job is counted once
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
