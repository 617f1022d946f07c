"""What the routes of one admin process share: settings, the outside, what it follows."""

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
from common.jobs.check import PATIENCE_S, built_apart, check_submission, unasked
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
    from common.jobs.check import Unchecked
    from common.jobs.servers import Outside
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.kafka.port import TransactionalLog
    from common.spot.theory.billing import Billing
    from services.admin.middleware.access import Caller

T = TypeVar("T")
MODELS_AT_ONCE = 2  # read for requests: each is in memory several times
HISTORIES_AT_ONCE = 2  # of jobs, read whole for a request
QUESTIONS_AT_ONCE = 2  # to whoever provisions
# Tasks that are built for requests at once, each in a process of its own: one per core.
TASKS_AT_ONCE = max(2, len(os.sched_getaffinity(0)))
CHECK_S = 2 * PATIENCE_S  # that a request waits
READ_S = 45.0  # that a request waits: a million updates take half of that
ASK_S = 20.0  # likewise, as for a change of a job


class Limits(NamedTuple):
    """What one admin process takes before it refuses: far above people and scripts at work."""

    requests_per_s: float = 1000.0  # of one key, on average; twice that at once
    streams: int = 200  # of events, open at once: each follows a job
    connections: int = CONNECTIONS  # of one address
    simulate_s: float = 20.0  # of one simulation


class AdminService:
    """One admin process. Making it opens nothing; `close` lets go of what was opened.

    Attributes:
        ending: Set when streams of events should come to their end.
        streams: Streams of events that are open.

    Args:
        clock: Seconds since 1970.
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
        self.questions = Limiter("asking for a plan", QUESTIONS_AT_ONCE, ASK_S)
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
        """Kafka, opened when first wanted, shared by all threads.

        Raises:
            UnavailableError: If the settings name an embedded broker that is gone.
        """
        with self._lock:
            if self._log is None:
                self._log = self._open_log()
            return self._log

    def job(self, name: str) -> JobRecord:
        """One job, as last read.

        Raises:
            NotFoundError: If there is none of this name.
        """
        try:
            return self.stores.jobs[name]
        except KeyError:
            raise NotFoundError(f'there is no job "{name}"') from None

    async def check(self, spec: JobSpec, *, unchecked: bool = False) -> Unchecked | None:
        """Refuse a job that could not run, in a turn of its own: that may take seconds.

        Returns:
            Why its task was not checked; None if it was.

        Raises:
            GivenError: By the field.
        """
        settings = self.settings
        most_mib = settings.coordinator_memory_mib
        build = unasked if unchecked else built_apart

        def checked() -> Unchecked | None:
            why_not = check_submission(spec, settings.tasks, most_mib, build)
            check_market(spec, settings)
            return why_not

        return await self.tasks.run(checked)

    async def write(self, caller: Caller, act: Callable[[JobService], T]) -> T:
        """Change jobs in a caller's name; see `Stores.write`."""
        return await self.stores.write(lambda store: act(self._jobs(store, caller)))

    async def apart(self, caller: Caller | None, act: Callable[[JobService], T]) -> T:
        """Do what takes too long to be a `write`, with a reader of the jobs topic of its own."""

        def acted() -> T:
            with closing(JobOperations(self.log(), self.clock)) as store:
                return act(self._jobs(store, caller))

        return await self.histories.run(acted)

    def _jobs(self, store: JobOperations, caller: Caller | None) -> JobService:
        by = store if caller is None else store.acting(caller)
        return JobService(by, self.outside, lambda record: check_given_back(record, self.log()))

    def lets_in(self, caller: Caller) -> bool:
        """Whether whoever came in would still get in."""
        if isinstance(caller, KeyRecord):
            return caller in self.stores.keys
        return self.clock() < caller.until_s

    def start(self) -> None:
        """Begin to follow jobs and keys, unless that has begun."""
        self.stores.start()
        self.followers.start()

    def close(self) -> None:
        """Let go of everything that was opened."""
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
        """Why a thread of this process cannot go on; None: all can."""
        return self.stores.fault or self.followers.fault

    def _shown_jobs(self) -> Iterator[ShownJob]:
        """How each job is: asked in a thread of scrapes, or by a request."""
        names = ("lag", "skipped", "quarantined", "expired", "lost")
        for job, (state, known, _, open_transactions_s) in self.followers.shown():
            counts = (getattr(known, name, None) for name in names)
            yield ShownJob._make((job, state.word, *counts, open_transactions_s))

    def _billing(self) -> dict[str, Billing]:
        """How machines are paid for, by pool, as far as the market file says."""
        if not self.settings.market:
            return {}
        try:
            return billing_of(market_of(self.settings))
        except (UserError, OutsideError):
            return {}  # prices tell why; what was spent is shown without


async def _answering(request: HTTPConnection) -> AdminService:
    return cast("AdminService", request.app.state.service)


# For routes that must know whose request it is.
Answering: TypeAlias = Annotated[AdminService, Depends(_answering)]
