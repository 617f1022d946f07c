"""A system reached through its own servers: Kafka, Redis and object storage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common.api.prices import market_of, minimum_billing_s, price_list
from common.api.provisioning import provisioning_told
from common.checkpoints.find import find_model
from common.errors import NotFoundError
from common.jobs.check import check_submission
from common.jobs.progress import UNREAD, resting
from common.jobs.quarantine import Quarantine
from common.jobs.spec import parse_job
from common.jobs.store import JobBook
from common.jobs.watching import look_at_jobs
from common.learning.checkpoint import save_weights
from common.learning.torch_here import need_torch
from common.planning.replan import (
    ask_to_replan,
    check_given_back,
    check_replan,
    not_provisioned,
    read_ledger,
)
from common.provisioning.records import ReplanAsked
from common.runtime.connect import open_prices
from services.cli.commands.origins import begin_with
from services.cli.system.directly_watched import DirectlyWatched
from services.cli.system.system import JobLine, Jobs, PulledModel, Submitted, UnreadableLine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from common.api.plan import ToldPlan
    from common.api.prices import PriceList
    from common.api.provisioning import ToldProvisioning
    from common.checkpoints.find import Wish
    from common.config.servers import Outside
    from common.core.events import Wanted
    from common.core.losses import ReadFrom
    from common.jobs.edit import Value
    from common.jobs.progress import JobProgress
    from common.jobs.quarantine import QuarantinedBatch, RequeuedBatch
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.learning.checkpoint import Layout
    from common.planning.compare import Result
    from common.planning.request import PlanRequest
    from common.planning.simulation import SimulateRequest
    from common.ports.servers import Log

BY = "the command line"  # who wanted what it writes, for people


class Direct:
    """See `system.System`. For one command: what it opens stays open until the process ends."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    # --- jobs ------------------------------------------------------------------------------------

    def submit(self, text: str, source: str) -> Submitted:
        """See the protocol."""
        allowed = self._outside.settings.tasks
        spec = parse_job(text, allowed)
        check_submission(spec, allowed, self._outside.settings.max_model_mb)
        book = self._book()
        if not source:
            return Submitted(book.submit(spec))
        book.check_new(spec)  # before anything is put into its folder
        beginning = begin_with(source, spec, book, self._outside)
        return Submitted(book.submit(spec, beginning.origin), beginning.told)

    def jobs(self) -> Jobs:
        """See the protocol."""
        log, now = self._outside.open_log(), time.time()
        book = JobBook(log)
        records = book.read()
        found = look_at_jobs(records, log, self._outside.open_board, now)
        return Jobs(
            tuple(_line(record, found.get(name), now) for name, record in sorted(records.items())),
            tuple(UnreadableLine(name, *each) for name, each in sorted(book.unreadable.items())),
        )

    def job(self, name: str) -> JobRecord:
        """See the protocol."""
        return self._book().get(name)

    def want(self, name: str, wanted: Wanted, reason: str) -> None:
        """See the protocol."""
        self._book().want(name, wanted, reason)

    def resume_after_loss(
        self, name: str, reason: str, *, from_start: bool, read_from: ReadFrom
    ) -> None:
        """See the protocol."""
        self._book().resume_after_loss(name, reason, from_start=from_start, read_from=read_from)

    def change(self, name: str, changed: Mapping[str, Value], reason: str) -> JobRecord:
        """See the protocol."""
        return self._book().change(name, changed, reason)

    def delete(self, name: str) -> None:
        """See the protocol."""
        book = self._book()
        book.get(name)
        check_given_back(name, read_ledger(self._outside.open_log(), name))
        book.delete(name)

    def quarantine(self, name: str) -> list[QuarantinedBatch]:
        """See the protocol."""
        return quarantine_of(self._outside.open_log(), name).listed()

    def requeue(self, name: str, batches: Sequence[int] | None) -> list[RequeuedBatch]:
        """See the protocol."""
        quarantine = quarantine_of(self._outside.open_log(), name)
        return quarantine.requeue(batches, BY, time.time())

    def watch(self, name: str) -> DirectlyWatched:
        """See the protocol."""
        log = self._outside.open_log()
        return DirectlyWatched(name, log, self._outside.open_board, JobBook(log))

    def model(self, name: str, wish: Wish, tell: Callable[[str], object]) -> PulledModel:
        """See the protocol."""
        log = self._outside.open_log()
        spec = JobBook(log).get(name).spec
        found = find_model(name, wish, self._outside, log, tell)
        layout = found.layout or _layout(spec, self._outside.settings.tasks)
        made = found.made
        return PulledModel(made.epoch, made.version, save_weights(layout, found.weights))

    # --- provisioning ----------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> ToldPlan:
        """See the protocol."""
        from common.planning.plan import plan_told  # noqa: PLC0415 -- scipy takes long to load

        return plan_told(request, self._outside.open_log, time.time())

    def simulate(
        self, request: SimulateRequest, folder: Path, advance: Callable[[str, float], None]
    ) -> dict[str, Result]:
        """See the protocol."""
        # These bring scipy and the protocol, which take long to load.
        from common.planning.compare import compare, with_policies  # noqa: PLC0415 -- see above
        from common.planning.silence import silent_output  # noqa: PLC0415 -- see above

        variants = with_policies(request.experiment, request.policies)
        with silent_output():
            return compare(variants, folder, request.runs, request.seed, advance)

    def provisioning(self, name: str, limit: int) -> ToldProvisioning:
        """See the protocol."""
        log, settings = self._outside.open_log(), self._outside.settings
        spec = JobBook(log).get(name).spec
        if spec.provisioning is None or spec.policy is None:
            raise NotFoundError(not_provisioned(name))
        least_s = minimum_billing_s(market_of(settings)) if settings.market else {}
        ledger = read_ledger(log, name, least_s)
        return provisioning_told(ledger, spec.policy, spec.provisioning.workers, time.time(), limit)

    def replan(self, name: str, reason: str) -> None:
        """See the protocol."""
        log = self._outside.open_log()
        check_replan(JobBook(log).get(name), read_ledger(log, name))
        ask_to_replan(log, name, ReplanAsked(time.time(), BY, reason))

    def prices(self) -> PriceList:
        """See the protocol."""
        settings = self._outside.settings
        market = market_of(settings)
        return price_list(market, open_prices(settings, market).look(), time.time())

    def _book(self) -> JobBook:
        return JobBook(self._outside.open_log())


def quarantine_of(log: Log, job: str) -> Quarantine:
    """What is quarantined in a job.

    Raises:
        NotFoundError: If there is no such job; its topic alone would be an unknown one.
        UnavailableError: If Kafka is away.
    """
    JobBook(log).get(job)
    return Quarantine(log, job)


def _line(record: JobRecord, progress: JobProgress | None, now: float) -> JobLine:
    spec, state = record.spec, resting(record)
    line = JobLine(
        spec.name,
        state or UNREAD,
        spec.task.name or spec.task.entrypoint or "",
        spec.streams,
        record.reason,
    )
    if progress is None:
        return line
    numbers = progress.numbers(now)
    return line._replace(
        state=state or progress.state_at_work(now),
        lag=numbers.lag,
        skipped=numbers.skipped,
        quarantined=numbers.quarantined,
        expired=numbers.expired,
        whole=numbers.whole,
    )


def _layout(spec: JobSpec, allowed: Collection[str]) -> Layout:
    """The layout of the job's model, for what an older program kept without it."""
    need_torch(f"{spec.name}'s model was kept by an older program: naming its tensors")
    # These bring torch, which takes seconds.
    from common.jobs.build import task_of  # noqa: PLC0415 -- see above
    from common.learning.parameters import layout_of  # noqa: PLC0415 -- see above

    return layout_of(task_of(spec, allowed).build())
