"""The thread that follows the jobs and keys topics, and writes jobs in turn.

One thread owns both stores, so a writer sees what was written before it, and its own work is in the
fold when it gets its answer. Requests read the last fold: that costs no call of a server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, Full, Queue
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from common.api.keys import KeyRecord, Keys, KeyStore
from common.errors import UnavailableError
from common.jobs.store import JobRecord, JobStore
from common.telemetry.logging import Outage, event_logger
from common.topics import names as topics
from common.topics.table import RESTORE

if TYPE_CHECKING:
    from common.ports.servers import Log
    from common.topics.table import Unreadable

    Order: TypeAlias = tuple[Callable[[JobStore], Any], Future[Any]]

T = TypeVar("T")

NEWS_S = 0.05  # between looks at the topics: so soon counts a key, or a job made elsewhere
AGAIN_S = 0.5  # after Kafka did not answer
READY_S = 5.0  # that a request waits for the first fold
LOOK_S = 0.01  # between its looks
WRITE_S = 20.0  # that a request waits for its turn and its work: a store gives up after 15
ORDERS = 64  # that wait for their turn
END_S = 2.0  # a thread that waits for Kafka ends with the process

_log = event_logger(__name__)


class Stores:
    """Jobs and keys as of the last fold.

    Attributes:
        jobs: All of them, by name.
        unreadable: Records of jobs that do not parse, by their keys.
        keys: Who may come in.
        missing: Number of jobs and of keys of which Kafka has no record any more, by topic.
        fault: Why this process cannot go on; None: it can.

    Args:
        open_log: Where the topics are; called in the thread, again after each failure.
        clock: Seconds since 1970, for what is written.
    """

    def __init__(self, open_log: Callable[[], Log], clock: Callable[[], float]) -> None:
        self._open_log = open_log
        self._clock = clock
        self._orders: Queue[Order] = Queue(ORDERS)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._ended = False  # the thread has, or will never begin
        self._opened: tuple[JobStore, KeyStore] | None = None
        self._read = False
        self._away = ""
        self._records = dict[str, KeyRecord]()
        self.jobs: Mapping[str, JobRecord] = {}
        self.unreadable: Mapping[str, Unreadable] = {}
        self.keys = Keys(())
        self.missing: Mapping[str, int] = {topics.JOBS: 0, topics.KEYS: 0}
        self.fault: Exception | None = None

    @property
    def unread(self) -> str:
        """Why the last fold is not the newest or not in Kafka any more; empty: it is."""
        if self._away or not self._read:
            return self._away or "jobs and keys are still being read"
        lost = [f"{topic} ({count})" for topic, count in self.missing.items() if count]
        if not lost:
            return ""
        return f"Kafka has lost records that were here, of {' and '.join(lost)}: {RESTORE}"

    def start(self) -> None:
        """Begin to follow, unless that has begun or ended."""
        with self._lock:
            if self._thread is None and not self._ending:
                self._thread = threading.Thread(target=self._run, name="stores", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread; what waits for its turn is refused."""
        with self._lock:
            self._ending = True
            thread = self._thread
        if thread is not None:
            thread.join(END_S)
        else:
            self._end()

    async def ready(self) -> None:
        """Wait until both topics have been read once.

        Raises:
            UnavailableError: If Kafka is unavailable, or takes long.
        """
        if self._read:
            return
        self.start()
        until = monotonic() + READY_S
        while not self._read:
            if self._away or self._ending or monotonic() > until:
                raise UnavailableError(self.unread)
            await asyncio.sleep(LOOK_S)

    async def write(self, act: Callable[[JobStore], T]) -> T:
        """Have the thread do something, and wait for it; what it changed is in `jobs` then.

        Raises:
            UnavailableError: If Kafka is unavailable, or takes long; the work may be done later.
            DollError: What `act` raises.
        """
        self.start()
        asked = Future[T]()
        try:
            self._orders.put_nowait((act, asked))
        except Full:
            raise UnavailableError(f"{ORDERS} changes of jobs wait for their turn") from None
        if self._ended:  # it may have looked for orders before there was this one
            self._refuse()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), WRITE_S)
        except TimeoutError:
            raise UnavailableError(
                "Kafka did not answer in time: look at the job to see whether the change was made"
            ) from None

    def _run(self) -> None:
        outage = Outage(_log, "kafka")
        try:
            while not self._ending:
                try:
                    self._follow()
                    outage.quiet()
                except UnavailableError as error:
                    outage.met(error)
                    self._away = str(error)
                    self._take(AGAIN_S)
        except Exception as fault:  # noqa: BLE001 -- raised again in the main thread
            self.fault = fault
            self._away = "this process has failed"
        finally:
            self._end()

    def _follow(self) -> None:
        """Look for news, then do what is asked until it is time to look again.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        if self._opened is None:
            log = self._open_log()
            jobs, keys = JobStore(log, self._clock), KeyStore(log, self._clock)
            self._opened = jobs, keys
        jobs, keys = self._opened
        if self._read:
            self._fold(jobs.refresh(0.0), keys.refresh(0.0))
        else:
            self._fold(jobs.read(), keys.read())
            self._read = True
        jobs.repair()
        keys.repair()
        self.unreadable = jobs.unreadable
        self.missing = {topics.JOBS: len(jobs.missing), topics.KEYS: len(keys.missing)}
        self._away = ""
        self._take(NEWS_S)

    def _fold(self, jobs: dict[str, JobRecord], keys: dict[str, KeyRecord]) -> None:
        if jobs != self.jobs:
            self.jobs = jobs
        if keys != self._records:
            self._records, self.keys = keys, Keys(keys.values())

    def _take(self, timeout_s: float) -> None:
        """Do one thing that is asked, if there is one in time."""
        try:
            act, asked = self._orders.get(timeout=timeout_s)
        except Empty:
            return
        if not asked.set_running_or_notify_cancel():
            return  # whoever asked has gone
        try:
            done = act(self._jobs_store())
            self._fold(self._jobs_store().refresh(0.0), self._records)
        except Exception as error:  # noqa: BLE001 -- told to whoever asked
            asked.set_exception(error)
        else:
            asked.set_result(done)

    def _jobs_store(self) -> JobStore:
        if self._opened is None or not self._read:
            raise UnavailableError(self.unread)
        return self._opened[0]

    def _end(self) -> None:
        for store in self._opened or ():
            store.close()
        self._ended = True
        self._refuse()

    def _refuse(self) -> None:
        """Tell all who wait that nobody will do what they asked."""
        while True:
            try:
                _, asked = self._orders.get_nowait()
            except Empty:
                return
            if asked.set_running_or_notify_cancel():
                asked.set_exception(UnavailableError("this service is shutting down"))
