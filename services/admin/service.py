"""What the routes of one admin process share: settings, the outside, what it follows."""

from __future__ import annotations

import threading
from time import time
from typing import TYPE_CHECKING, TypeVar, cast

from common.api.prices import market_of, minimum_billing_s
from common.errors import NotFoundError, OutsideError, UserError
from common.jobs.check import PATIENCE_S
from common.telemetry.metrics.api import ApiMetrics, ShownJob
from common.telemetry.metrics.serving import Watchdog
from services.admin.books import Books
from services.admin.checks import Checks, Servers
from services.admin.limiter import Limiter
from services.admin.live.follower import Sources
from services.admin.live.followers import Followers
from services.admin.live.job_answer import JobHeaderCache
from services.admin.middleware.limits import Streams
from services.admin.pricing import PriceDesk
from services.admin.simulating import Simulations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from starlette.requests import HTTPConnection

    from common.api.keys import Keys
    from common.config.servers import Outside
    from common.config.settings import Settings
    from common.jobs.store import JobRecord, JobStore
    from common.ports.servers import Log
    from common.topics.table import Unreadable

T = TypeVar("T")

MODELS_AT_ONCE = 2  # read for requests: each is in memory several times
HISTORIES_AT_ONCE = 2  # of jobs, read whole for a request
QUESTIONS_AT_ONCE = 2  # to whoever provisions
TASKS_AT_ONCE = 2  # built for requests, each in a process of its own
CHECK_S = 2 * PATIENCE_S  # that a request waits
READ_S = 45.0  # that a request waits: a million updates take half of that
ASK_S = 20.0  # likewise, as for a change of a job


class Service:
    """One admin process. Making it opens nothing; `close` lets go of what was opened.

    Args:
        outside: Settings and how to open what they name.
        clock: Seconds since 1970.
    """

    def __init__(self, outside: Outside, clock: Callable[[], float] = time) -> None:
        self.outside = outside
        self.clock = clock
        self.ending = threading.Event()  # set when streams of events should come to their end
        self.heads = JobHeaderCache()
        self.simulations = Simulations(outside.settings.api_simulate_s)
        self.prices = PriceDesk(outside.settings, clock)
        self.models = Limiter("reading a model", MODELS_AT_ONCE, READ_S)
        self.histories = Limiter("reading a job", HISTORIES_AT_ONCE, READ_S)
        self.tasks = Limiter("checking a task", TASKS_AT_ONCE, CHECK_S)
        self.questions = Limiter("asking for a plan", QUESTIONS_AT_ONCE, ASK_S)
        self.streams = Streams(outside.settings.api_streams)
        self.metrics = ApiMetrics(lambda: self.streams.open, self._shown_jobs)
        self.watchdog = Watchdog(what="the event loop")
        self._lock = threading.Lock()
        self._log: Log | None = None
        self._books = Books(self.log, clock)
        self._servers = Servers(outside, self.log, lambda: self._books.unread)
        self.checks = Checks(self._servers.asked())
        sources = Sources(
            self.log, outside.open_board, lambda: self._books.jobs, clock, self._minimum_billing_s
        )
        self.followers = Followers(sources, self.ending)

    @property
    def settings(self) -> Settings:
        """Of this process."""
        return self.outside.settings

    @property
    def jobs(self) -> Mapping[str, JobRecord]:
        """All jobs by name, as last read."""
        return self._books.jobs

    @property
    def unreadable(self) -> Mapping[str, Unreadable]:
        """Records of jobs that do not parse, as last read, by their keys."""
        return self._books.unreadable

    @property
    def keys(self) -> Keys:
        """Who may come in, as last read."""
        return self._books.keys

    @property
    def fault(self) -> Exception | None:
        """Why this process cannot go on; None: it can."""
        return self._books.fault

    def log(self) -> Log:
        """Kafka, opened when first wanted, shared by all threads.

        Raises:
            UnavailableError: If the settings name an embedded broker that is gone.
        """
        with self._lock:
            if self._log is None:
                self._log = self.outside.open_log()
            return self._log

    def job(self, name: str) -> JobRecord:
        """One job, as last read.

        Raises:
            NotFoundError: If there is none of this name.
        """
        try:
            return self._books.jobs[name]
        except KeyError:
            raise NotFoundError(f'there is no job "{name}"') from None

    def start(self) -> None:
        """Begin to follow jobs and keys, unless that has begun."""
        self._books.start()
        self.followers.start()

    async def ready(self) -> None:
        """Wait until jobs and keys have been read once.

        Raises:
            UnavailableError: If Kafka is unavailable, or takes long.
        """
        await self._books.ready()

    async def write(self, act: Callable[[JobStore], T]) -> T:
        """Do something with the jobs topic; what it changed is in `jobs` when it returns.

        Raises:
            UnavailableError: If Kafka is unavailable, or takes long.
            DollError: What `act` raises.
        """
        return await self._books.write(act)

    def close(self) -> None:
        """Let go of everything that was opened."""
        self.ending.set()
        self.followers.close()
        self.checks.close()
        for turns in (self.models, self.histories, self.tasks, self.questions):
            turns.close()
        self._servers.close()
        self._books.close()

    def _shown_jobs(self) -> Iterator[ShownJob]:
        """How each job is that is followed: asked in a thread of scrapes, or by a request."""
        now = self.clock()
        for job, follower in self.followers.following().items():
            with follower.view() as view:
                numbers, state = view.job.numbers(now), view.job.state(now)
            counts = numbers.skipped, numbers.quarantined, numbers.expired, numbers.lost
            yield ShownJob(job, state.word, numbers.lag, *counts)

    def _minimum_billing_s(self) -> dict[str, float]:
        """What machines cost at least, by pool, as far as the market file says."""
        if not self.settings.market:
            return {}
        try:
            return minimum_billing_s(market_of(self.settings))
        except (UserError, OutsideError):
            return {}  # prices tell why; what was spent is shown without


def service_of(request: HTTPConnection) -> Service:
    """The service that answers a request."""
    return cast("Service", request.app.state.service)
