"""Threads that follow the jobs and keys topics, and threads that write jobs.

One thread follows both topics. Several threads write jobs in parallel; `CompactedTable` orders
their changes. A writer folds its own change before it answers. Requests read the state as of the
last fold, without calling a server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, Full, Queue
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from common.api.keys import KeyRecord, Keys, KeyStore
from common.errors import UnavailableError, UnknownOutcomeError
from common.jobs.operations import JobOperations
from common.kafka import names as topics
from common.kafka.table import RESTORE
from common.telemetry.logging import event_logger
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.jobs.store import JobRecord
    from common.kafka.port import Log
    from common.kafka.table import Unreadable

    Order: TypeAlias = tuple[Callable[[JobOperations], Any], Future[Any]] | None

T = TypeVar("T")

# Seconds between reads of the topics: the delay until a new key or a job from elsewhere counts.
NEWS_S = 0.05
# Seconds before a retry after Kafka did not answer.
AGAIN_S = 0.5
# Time that a request waits for the first fold.
READY_S = 5.0
# Seconds between a waiting request's checks for the first fold.
LOOK_S = 0.01
# Time limit for a request's turn and its work; the store gives up after 15 s.
WRITE_S = 20.0
# Maximum number of changes that wait for their turn.
ORDERS = 64
# Number of changes that wait for a broker's confirmation at the same time. A change spends most of
# its time waiting, so more threads than cores pay off.
WRITERS = 4
# Seconds that readiness checks report a change that Kafka refused.
REFUSED_S = 60.0
# Time limit for a thread to end. One that waits for Kafka ends with the process.
END_S = 2.0

_log = event_logger(__name__)


class Stores:
    """Jobs and keys as of the last fold.

    Attributes:
        jobs: All jobs by name.
        unreadable: Records of jobs that cannot be parsed, by key.
        keys: Keys that have access.
        missing: Number of jobs and of keys whose records Kafka has lost, by topic.
        fault: Error that ended the thread, or None.

    Args:
        open_log: Opens Kafka; called in the thread, and again after each failure.
        clock: Returns seconds since 1970, for timestamps in records.
    """

    def __init__(self, open_log: Callable[[], Log], clock: Callable[[], float]) -> None:
        self._open_log = open_log
        self._clock = clock
        self._orders: Queue[Order] = Queue(ORDERS)
        self._lock = threading.Lock()
        # Held while folding, so that an earlier fold does not replace a later one.
        self._fold_lock = threading.Lock()
        self._threads = list[threading.Thread]()
        self._end_asked = threading.Event()
        # True once no thread accepts orders any more.
        self._ended = False
        self._opened: tuple[JobOperations, KeyStore] | None = None
        self._read = False
        self._away = ""
        # Reason why the newest change was not made, and the time of the failure.
        self._refused = "", 0.0
        self._records: Mapping[str, KeyRecord] = {}
        self.jobs: Mapping[str, JobRecord] = {}
        self.unreadable: Mapping[str, Unreadable] = {}
        self.keys = Keys(())
        self.missing: Mapping[str, int] = {topics.JOBS: 0, topics.KEYS: 0}
        self.fault: Exception | None = None

    @property
    def unread(self) -> str:
        """Reason why the last fold is outdated or Kafka has lost records, or an empty string."""
        if self._away or not self._read:
            return self._away or "jobs and keys are still being read"
        lost = [f"{topic} ({count})" for topic, count in self.missing.items() if count]
        if not lost:
            return ""
        return f"Kafka has lost records of {' and '.join(lost)}; {RESTORE}"

    @property
    def unwritten(self) -> str:
        """Reason why Kafka refused the newest change less than `REFUSED_S` ago, or empty."""
        reason, at_s = self._refused
        return reason if monotonic() - at_s < REFUSED_S else ""

    def start(self) -> None:
        """Start to follow, unless already started or ended."""
        with self._lock:
            if self._threads or self._end_asked.is_set():
                return
            names = {"stores": self._run} | {f"write jobs {n}": self._write for n in range(WRITERS)}
            for name, run in names.items():
                self._threads.append(threading.Thread(target=run, name=name, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """End the threads and refuse all waiting changes."""
        with self._lock:
            self._end_asked.set()
        until = monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        if not self._threads:
            self._end()

    async def ready(self) -> None:
        """Wait until both topics have been read once.

        Raises:
            UnavailableError: If Kafka is unavailable or slow.
        """
        if self._read:
            return
        self.start()
        until = monotonic() + READY_S
        while not self._read:
            if self._away or self._end_asked.is_set() or monotonic() > until:
                raise UnavailableError(self.unread)
            await asyncio.sleep(LOOK_S)

    async def write(self, act: Callable[[JobOperations], T]) -> T:
        """Run a change in a thread and wait for it; afterwards `jobs` includes it.

        Raises:
            UnknownOutcomeError: If it started and did not end in time. The change may have been
                made, or may be made later.
            UnavailableError: If Kafka is unavailable, or the change did not start in time. Nothing
                was changed.
            DollError: Anything that `act` raises.
        """
        await self.ready()
        asked = Future[T]()
        try:
            self._orders.put_nowait((act, asked))
        except Full:
            raise UnavailableError(
                f"{ORDERS} changes of jobs are queued; nothing was changed; try again"
            ) from None
        # The threads may have emptied the queue before this order was added.
        if self._ended:
            self._refuse()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), WRITE_S)
        except TimeoutError:
            if asked.cancel():
                raise UnavailableError(
                    f"the change did not begin within {WRITE_S:g} s; nothing was changed; try again"
                ) from None
            raise UnknownOutcomeError(
                f"Kafka did not answer within {WRITE_S:g} s; the change may have been made, or may"
                " still be made; look at the job, or repeat a submission with its Idempotency-Key"
            ) from None

    def _run(self) -> None:
        outage = Outage(_log, "kafka")
        try:
            while not self._end_asked.is_set():
                try:
                    self._follow()
                    outage.quiet()
                except UnavailableError as error:
                    outage.met(error)
                    self._away = str(error)
                    self._end_asked.wait(AGAIN_S)
        except Exception as fault:  # noqa: BLE001 -- raised again in the main thread
            self.fault = fault
            self._away = "this process has failed"
        finally:
            self._end()

    def _follow(self) -> None:
        """Read both topics, then wait until it is time to read again.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        if self._opened is None:
            log = self._open_log()
            jobs, keys = JobOperations(log, self._clock), KeyStore(log, self._clock)
            self._opened = jobs, keys
        jobs, keys = self._opened
        self._fold(jobs)
        records = keys.refresh(0.0)
        if records is not self._records and records != self._records:
            self._records, self.keys = records, Keys(records.values())
        self._read = True
        jobs.table.repair()
        keys.repair()
        self.unreadable = jobs.table.unreadable
        self.missing = {topics.JOBS: len(jobs.table.missing), topics.KEYS: len(keys.missing)}
        self._away = ""
        self._end_asked.wait(NEWS_S)

    def _fold(self, store: JobOperations) -> None:
        """Take over the content of the jobs topic.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        with self._fold_lock:
            jobs = store.refresh(0.0)
            if jobs is not self.jobs and jobs != self.jobs:
                self.jobs = jobs

    def _write(self) -> None:
        """Carry out orders one after the other, until the end."""
        while (order := self._orders.get()) is not None:
            act, asked = order
            if not asked.set_running_or_notify_cancel():
                # The caller has given up.
                continue
            try:
                store = self._jobs_store()
                done = act(store)
                self._refused = "", 0.0
                # The change was made, and the follower folds it later.
                with suppress(UnavailableError):
                    self._fold(store)
            except Exception as error:  # noqa: BLE001 -- reported to the caller
                if isinstance(error, UnavailableError) and error.server in ("", "kafka"):
                    self._refused = str(error), monotonic()
                asked.set_exception(error)
            else:
                asked.set_result(done)

    def _jobs_store(self) -> JobOperations:
        if self._opened is None or not self._read:
            raise UnavailableError(self.unread)
        return self._opened[0]

    def _end(self) -> None:
        for store in self._opened or ():
            store.close()
        self._ended = True
        self._refuse()

    def _refuse(self) -> None:
        """Refuse all waiting orders, and end the writing threads."""
        with suppress(Empty):
            while True:
                order = self._orders.get_nowait()
                if order is not None and order[1].set_running_or_notify_cancel():
                    order[1].set_exception(UnavailableError("this service is shutting down"))
        for _ in range(WRITERS):
            self._orders.put_nowait(None)
