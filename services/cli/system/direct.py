"""A system reached through its own servers: Kafka, Redis and object storage."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from common.api.answers import JobList, JobSummary
from common.api.dead_letters import dead_letters_page
from common.api.jobs import (
    counted,
    job_summary,
    progress_answer,
    remains_answer,
    unreadable_records,
    update_answers,
)
from common.api.model import about_model, versions_answer
from common.errors import (
    ExpiredError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.jobs.changes import local_user
from common.jobs.check import Unchecked, built_apart, check_submission, unasked
from common.jobs.edit import BLOCKS, Value, changed_spec
from common.jobs.notes import notes_on
from common.jobs.progress import UNREAD, JobProgress, resting
from common.jobs.purge import purge, remains_of
from common.jobs.quarantine import Quarantine, QuarantinedBatch, RequeuedBatch, told_batches
from common.jobs.spec import JobSpec, parse_job
from common.jobs.store import JobRecord, JobStore
from common.jobs.watching import (
    HistoryReader,
    Poller,
    look_at_jobs,
    read_history,
    waits_for_checkpoint,
)
from common.kafka.names import job_id
from common.learning.checkpoint import save_weights
from common.spot.api import (
    billing_of,
    check_market,
    market_of,
    prices_answer,
    provisioning_answer,
)
from common.spot.connect import open_prices
from common.spot.machines import by_pool
from common.spot.planning.replan import (
    ask_to_replan,
    check_given_back,
    check_replan,
    not_provisioned,
    read_ledger,
)
from common.spot.provisioning.records import ReplanAsked
from common.storage.find import Wish, all_kept, find_model
from common.telemetry.logging import event_logger
from services.cli.system.origins import begin_with
from services.cli.system.system import SHOWN_UPDATES, Picture, PulledModel, Submitted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from common.api.answers import (
        DeadLettersPage,
        KeptVersions,
        PricesAnswer,
        ProvisioningAnswer,
        RemainsAnswer,
        ToldPlan,
    )
    from common.config.servers import Outside
    from common.core.events import Wanted
    from common.core.losses import ReadFrom
    from common.ports.servers import Board, Log
    from common.spot.planning.compare import Result
    from common.spot.planning.request import PlanRequest
    from common.spot.planning.simulation import SimulateRequest

# Of each of its topics: a second or two. Of a longer history the newest part alone is read, and
# counts are told as "at least"; `doll audit` and the admin service read it whole.
MOST_RECORDS = 20_000
_READ_S = 0.2

_log = event_logger(__name__)


class Direct:
    """See `system.System`. For one command: what it opens stays open until the process ends."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    # --- jobs ------------------------------------------------------------------------------------

    def submit(self, text: str, source: str, *, unchecked: bool = False) -> Submitted:
        spec = parse_job(text, self._outside.settings.tasks)
        why_not = self._check(spec, unchecked=unchecked)
        if why_not is not None:
            why_not.refuse()
        told = "" if why_not is None else why_not.why
        book = self._book()
        if not source:
            return Submitted(book.submit(spec), notes=notes_on(spec), unchecked=told)
        to = job_id(spec.name, book.check_new(spec))  # before anything is put into its folder
        origin, beginning = begin_with(source, spec, to, book, self._outside)
        return Submitted(book.submit(spec, origin), beginning, notes_on(spec), told)

    def jobs(self) -> JobList:
        log, now = self._outside.open_log(), time.time()
        book = JobStore(log)
        records = book.read()
        board, glances = self._outside.open_board, self._outside.glances
        found = look_at_jobs(records, log, board, now, glances)
        summaries = list[JobSummary]()
        for name, record in sorted(records.items()):
            job = found.get(name)
            state = resting(record) or (UNREAD if job is None else job.state_at_work(now))
            summaries.append(job_summary(record, state, None if job is None else job.numbers(now)))
        return JobList(
            jobs=tuple(summaries),
            unreadable=unreadable_records(book.unreadable),
            states=counted(each.state for each in summaries),
            total=len(records),
        )

    def job(self, name: str) -> JobRecord:
        return self._book().get(name)

    def want(self, name: str, wanted: Wanted, reason: str) -> JobRecord:
        return self._book().want(name, wanted, reason)

    def resume_after_loss(
        self, name: str, reason: str, *, from_start: bool, read_from: ReadFrom
    ) -> None:
        book = self._book()
        waits = waits_for_checkpoint(book.get(name), self._outside.open_board)
        book.resume_after_loss(
            name, reason, from_start=from_start, read_from=read_from, waits=waits
        )

    def change(self, name: str, changed: Mapping[str, Value], reason: str) -> JobRecord:
        book = self._book()
        if not changed.keys().isdisjoint(BLOCKS):  # another memory may be needed
            self._check(changed_spec(book.get(name).spec, changed))
        return book.change(name, changed, reason)

    def delete(self, name: str) -> None:
        book = self._book()
        check_given_back(book.get(name), self._outside.open_log())
        book.delete(name)

    def remains(self, name: str) -> RemainsAnswer:
        return remains_answer(remains_of(name, self._book(), self._outside))

    def purge(self, name: str) -> RemainsAnswer:
        book = self._book()
        record = book.read().get(name)
        if record is not None:
            check_given_back(record, self._outside.open_log())
        return remains_answer(purge(name, book, self._outside))

    def quarantine(self, name: str) -> list[QuarantinedBatch]:
        return quarantine_of(self._outside.open_log(), name).listed()

    def dead_letters(self, name: str, limit: int) -> DeadLettersPage:
        log = self._outside.open_log()
        record = JobStore(log).get(name)
        return dead_letters_page(log, record.id, record.spec.streams, limit)

    def requeue(self, name: str, batches: Sequence[int] | None) -> list[RequeuedBatch]:
        quarantine = quarantine_of(self._outside.open_log(), name)
        outcomes = quarantine.requeue(batches, local_user().name, time.time())
        if requeued := [each.batch for each in outcomes if each.outcome == "requeued"]:
            self._book().note(quarantine.job, "requeued", told_batches(requeued))
        return outcomes

    def watch(self, name: str) -> DirectlyWatched:
        log = self._outside.open_log()
        return DirectlyWatched(name, log, self._outside.open_board, JobStore(log))

    def model(self, name: str, wish: Wish, tell: Callable[[str], object]) -> PulledModel:
        log = self._outside.open_log()
        record = JobStore(log).get(name)
        found = find_model(record.id, wish, self._outside, log, tell)
        data = save_weights(found.layout, found.weights, about_model(record, found.kept))
        return PulledModel(*found.kept.snapshot.made, data)

    def versions(self, name: str, tell: Callable[[str], object]) -> KeptVersions:
        log = self._outside.open_log()
        job = JobStore(log).get(name).id
        return versions_answer(all_kept(job, self._outside, log, tell))

    # --- provisioning ----------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> ToldPlan:
        from common.spot.planning.plan import plan_told

        return plan_told(request, self._outside.open_log, time.time())

    def simulate(
        self, request: SimulateRequest, folder: Path, advance: Callable[[str, float], None]
    ) -> dict[str, Result]:
        from common.spot.planning.compare import compare, with_policies

        variants = with_policies(request.experiment, request.policies)
        return compare(variants, folder, request.runs, request.seed, advance)

    def provisioning(self, name: str, limit: int) -> ProvisioningAnswer:
        log, settings = self._outside.open_log(), self._outside.settings
        record = JobStore(log).get(name)
        spec = record.spec
        if spec.provisioning is None or spec.policy is None:
            raise NotFoundError(not_provisioned(name))
        billing = billing_of(market_of(settings)) if settings.market else {}
        ledger = read_ledger(log, record.id, billing)
        return provisioning_answer(
            ledger, spec.policy, spec.provisioning.workers, time.time(), limit
        )

    def replan(self, name: str, reason: str) -> None:
        log = self._outside.open_log()
        record = JobStore(log).get(name)
        check_replan(record, read_ledger(log, record.id))
        ask_to_replan(log, record.id, ReplanAsked(time.time(), local_user().name, reason))

    def prices(self) -> PricesAnswer:
        settings = self._outside.settings
        market = market_of(settings)
        found = by_pool(open_prices(settings, market).look())
        return prices_answer(market, found, time.time())

    def _check(self, spec: JobSpec, *, unchecked: bool = False) -> Unchecked | None:
        """Refuse a job that could not run; return why its task was not checked, if it was not.

        Raises:
            GivenError: By the field.
        """
        settings = self._outside.settings
        most = settings.coordinator_memory_mib
        build = unasked if unchecked else built_apart
        why_not = check_submission(spec, settings.tasks, most, build)
        check_market(spec, settings)
        return why_not

    def _book(self) -> JobStore:
        return JobStore(self._outside.open_log())


def quarantine_of(log: Log, job: str) -> Quarantine:
    """What is quarantined in a job.

    Raises:
        NotFoundError: If there is no such job; its topic alone would be an unknown one.
        UnavailableError: If Kafka is unavailable.
    """
    return Quarantine(log, JobStore(log).get(job).id)


class DirectlyWatched:
    """One job, looked at through Kafka and Redis; see `system.Watched`.

    Raises:
        NotFoundError: If there is no such job.
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(
        self, job: str, log: Log, open_board: Callable[[str], Board], book: JobStore
    ) -> None:
        self._job = job
        self._log = log
        self._book = book
        self._record = book.get(job)
        self._poller = Poller(self._record, lambda: log, open_board, _log)
        self._history: HistoryReader | None = None
        self._progress = JobProgress(self._record)
        with suppress(UnknownTopicError):  # its record says why nobody works on it
            self._open()

    def look(self, timeout_s: float) -> Picture:
        """Wait for updates up to `timeout_s`, and say how the job is."""
        self._read(timeout_s)
        record = self._book.refresh(0.0).get(self._job)
        if record is not None and self._record.is_same_job(record):
            self._record = record
        now = time.time()
        look = self._poller.look(now, time.monotonic())
        progress = self._progress
        progress.record = self._record
        if look is not None:
            progress.look(look)
        version, statuses = progress.version, progress.seen.statuses
        alive = None if statuses is None else sum(each == "alive" for each in statuses.values())
        return Picture(
            progress.state(now),
            progress_answer(progress, now),
            alive,
            len(statuses or ()) - (alive or 0),
            update_answers(progress, version - SHOWN_UPDATES + 1, version),
        )

    def close(self) -> None:
        """Let go of the connections."""
        self._leave()
        self._poller.close()
        self._book.close()

    def _open(self) -> None:
        """Read the history up to now."""
        self._history = history = HistoryReader(self._record.id, self._log, MOST_RECORDS)
        self._progress = JobProgress(self._record, history.updates_start, history.control_start)
        while not history.caught_up:
            read_history(history, self._progress, time.time(), _READ_S)

    def _read(self, timeout_s: float) -> None:
        if self._history is None:
            time.sleep(timeout_s)
            return
        try:
            read_history(self._history, self._progress, time.time(), timeout_s)
        except UnavailableError:  # what was known is shown, until it is back
            time.sleep(timeout_s)
        except UnknownTopicError:
            self._leave()
        except (ExpiredError, TruncatedError):
            self._leave()
            self._open()

    def _leave(self) -> None:
        if self._history is not None:
            self._history.close()
        self._history = None
