"""State that the routes of one admin process share: settings, connections, followers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from time import time
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias, TypeVar, cast

from fastapi import Depends
from starlette.requests import HTTPConnection  # noqa: TC002 -- FastAPI reads it when run

from common.api.keys import KeyRecord
from common.errors import NotFoundError, OutsideError, UserError
from common.jobs.check import PATIENCE_S, built_apart, check_init, check_submission, unasked
from common.jobs.operations import JobOperations
from common.jobs.service import JobService
from common.jobs.watching import one_by_one
from common.runtime.http_server import CONNECTIONS
from common.spot.api import billing_of, check_market, market_of
from common.spot.planning.replan import check_given_back
from common.telemetry.metrics.api import ApiMetrics, ShownJob
from common.telemetry.metrics.serving import Watchdog
from services.admin.checks import Checks, Servers
from services.admin.limiter import Limiter
from services.admin.live.followers import Followers, Sources
from services.admin.oidc import Issuer
from services.admin.pricing import PriceCache
from services.admin.simulating import Simulations
from services.admin.stores import Stores

if TYPE_CHECKING:
    from common.jobs.check import Checked
    from common.jobs.servers import Outside
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.kafka.port import TransactionalLog
    from common.spot.theory.billing import Billing
    from services.admin.middleware.access import Caller

T = TypeVar("T")
# Models read for requests at the same time; each is in memory several times.
MODELS_AT_ONCE = 2
# Complete histories of jobs read for requests at the same time.
HISTORIES_AT_ONCE = 2
# Requests for a new plan sent at the same time.
QUESTIONS_AT_ONCE = 2
# Tasks built for requests at the same time, each in a process of its own: one per core.
TASKS_AT_ONCE = max(2, len(os.sched_getaffinity(0)))
# Time limit of a request's check.
CHECK_S = 2 * PATIENCE_S
# Time limit of a read for a request; a million updates take half of it.
READ_S = 45.0
# Time limit of a request for a new plan, the same as for a change of a job.
ASK_S = 20.0


class Limits(NamedTuple):
    """Limits of one admin process, far above the needs of people and scripts."""

    # Average per key; bursts may have twice as many.
    requests_per_s: float = 1000.0
    # Open event streams; each follows a job.
    streams: int = 200
    # Connections per address.
    connections: int = CONNECTIONS
    # Time limit of one simulation.
    simulate_s: float = 20.0


class AdminService:
    """One admin process. The constructor opens nothing; `close` releases everything.

    Attributes:
        ending: Set when event streams should end.
        streams: Number of open event streams.

    Args:
        clock: Returns seconds since 1970.
    """

    def __init__(self, outside: Outside, limits: Limits, clock: Callable[[], float] = time) -> None:
        self.outside = replace(outside, open_log=self.log)
        self._open_log = outside.open_log
        self.limits = limits
        self.settings = outside.settings
        self.clock = clock
        self.ending = threading.Event()
        self.streams = 0
        self.simulations = Simulations(limits.simulate_s)
        self.prices = PriceCache(outside.settings, clock)
        self.models = Limiter("reading a model", MODELS_AT_ONCE, READ_S)
        self.histories = Limiter("reading a job", HISTORIES_AT_ONCE, READ_S)
        self.tasks = Limiter("checking a task", TASKS_AT_ONCE, CHECK_S)
        self.questions = Limiter("requesting a plan", QUESTIONS_AT_ONCE, ASK_S)
        self.metrics = ApiMetrics(
            lambda: self.streams, self._shown_jobs, lambda: self.stores.missing
        )
        self.watchdog = Watchdog(what="the event loop")
        self._lock = threading.Lock()
        self._log: TransactionalLog | None = None
        self.stores = Stores(self.log, clock)
        self.issuer = Issuer(self.settings, clock) if self.settings.oidc_issuer else None
        self._servers = Servers(outside, self.log, self.stores)
        sources = Sources(
            self.log,
            outside.open_board,
            outside.live_statuses or one_by_one,
            lambda: self.stores.jobs,
            clock,
            self._billing,
        )
        self.followers = Followers(sources, self.ending)
        self.checks = Checks(self._servers.asked(), reported=self.followers.outages)

    def log(self) -> TransactionalLog:
        """Return Kafka, opened at the first call and shared by all threads.

        Raises:
            UnavailableError: If the settings name an embedded broker that has ended.
        """
        with self._lock:
            if self._log is None:
                self._log = self._open_log()
            return self._log

    def job(self, name: str) -> JobRecord:
        """Return a job as last read.

        Raises:
            NotFoundError: If the job does not exist.
        """
        try:
            return self.stores.jobs[name]
        except KeyError:
            raise NotFoundError(f'there is no job "{name}"') from None

    async def check(self, spec: JobSpec, *, unchecked: bool = False) -> Checked:
        """Refuse a job that could not run; waits for its turn and may take seconds.

        Raises:
            GivenError: If the job is invalid; names the field.
        """
        settings = self.settings
        most_mib = settings.coordinator_memory_mib
        build = unasked if unchecked else built_apart

        def checked() -> Checked:
            found = check_submission(spec, settings.tasks, most_mib, build)
            check_market(spec, settings)
            check_init(spec, settings)
            return found

        return await self.tasks.run(checked)

    async def write(self, caller: Caller, act: Callable[[JobService], T]) -> T:
        """Change jobs on behalf of a caller; see `Stores.write`."""
        return await self.stores.write(lambda store: act(self._jobs(store, caller)))

    async def apart(self, caller: Caller | None, act: Callable[[JobService], T]) -> T:
        """Run a change that takes too long for `write`, with its own reader of the jobs topic."""

        def acted() -> T:
            with closing(JobOperations(self.log(), self.clock)) as store:
                return act(self._jobs(store, caller))

        return await self.histories.run(acted)

    def _jobs(self, store: JobOperations, caller: Caller | None) -> JobService:
        by = store if caller is None else store.acting(caller)
        return JobService(by, self.outside, lambda record: check_given_back(record, self.log()))

    def lets_in(self, caller: Caller) -> bool:
        """Return True if a caller still has access."""
        if isinstance(caller, KeyRecord):
            return caller in self.stores.keys
        return self.clock() < caller.until_s

    def start(self) -> None:
        """Start to follow jobs and keys, unless already started."""
        self.stores.start()
        self.followers.start()

    def close(self) -> None:
        """Release everything that was opened."""
        self.ending.set()
        self.followers.close()
        self.checks.close()
        for turns in (self.models, self.histories, self.tasks, self.questions):
            turns.close()
        if self.issuer is not None:
            self.issuer.close()
        self._servers.close()
        self.stores.close()

    @property
    def fault(self) -> Exception | None:
        """Error that ended a thread of this process, or None."""
        return self.stores.fault or self.followers.fault

    def _shown_jobs(self) -> Iterator[ShownJob]:
        """Yield the state of each job, for scrape threads and for requests."""
        names = ("lag", "skipped", "quarantined", "expired", "lost")
        for job, (state, known, _, open_transactions_s) in self.followers.shown():
            counts = (getattr(known, name, None) for name in names)
            yield ShownJob._make((job, state.word, *counts, open_transactions_s))

    def _billing(self) -> dict[str, Billing]:
        """Return how machines are paid for, by pool, as far as the market file says."""
        if not self.settings.market:
            return {}
        try:
            return billing_of(market_of(self.settings))
        except (UserError, OutsideError):
            # Requests for prices report the reason; costs so far are shown without it.
            return {}


async def _answering(request: HTTPConnection) -> AdminService:
    return cast("AdminService", request.app.state.service)


# Parameter of routes that need the service.
Answering: TypeAlias = Annotated[AdminService, Depends(_answering)]
