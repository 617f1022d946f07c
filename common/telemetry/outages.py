"""Outages of the servers that a process uses, with log lines, a metric and notices to its jobs.

All parts of a process that use a server share one record of its outage. It begins when the first
part has an error, and ends when every part that had one has an answer. So the log gets one line at
the start and one at the end, however many parts and jobs use the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, time
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import ref

from common.core.liveness import OUTAGE, OutageNotice
from common.errors import ForbiddenError, UnavailableError
from common.telemetry.logging import job_of

if TYPE_CHECKING:
    from common.telemetry.logging import EventLogger

# Time without an error after which an outage ends, for parts that get errors but no answers.
# Clients repeat their errors every second.
SETTLED_S = 3.0
# The same time for Kafka, whose client reports an error after 5 s of connecting to a frozen broker.
KAFKA_SETTLED_S = 7.0
# An unconfirmed record of this age is an outage of Kafka, since the client retries silently.
UNWRITTEN_S = 5.0
# Time after which an outage ends if no part has an error: the parts that had one no longer try.
FORGOTTEN_S = 120.0
# Number of missing rights that one outage logs, so that an operator sees all of them at once.
MOST_RIGHTS = 20
# Time between notices to a job.
NOTIFY_S = 4.0
NOTICE_TTL_S = 10.0


class WriterLag(Protocol):
    """A writer to Kafka, see `common.kafka.port.Writer`."""

    @property
    def waiting_s(self) -> float:
        """Age of the oldest record that Kafka has not confirmed."""


class NoticeBoard(Protocol):
    """A board of a job, see `common.redis.port.Board`."""

    def put_unable(self, process: str, reason: str, ttl_s: float) -> None:
        """Put a notice on the board."""


# Guards the variables below.
_lock = threading.Lock()
# Outages by server.
_ongoing = dict[str, "_Ongoing"]()
# Servers that this process uses.
_used = set[str]()
# Each returns True while another process logs the outages that this one would log, too.
_others = list[Callable[[], bool]]()


class _Error(NamedTuple):
    """The newest error of one part."""

    part: ref[Outage]
    job: str
    reason: str


class _Ongoing:
    """An outage that has begun."""

    def __init__(self) -> None:
        # True if this process logs the outage.
        self.is_logged = not any(logs() for logs in _others)
        self.since_s = time()
        # Time of the newest error of any part.
        self.newest_s = monotonic()
        # Newest error of each part. The error of a closed part stays until another part has an
        # answer.
        self.errors = dict[int, _Error]()
        # Missing rights that the log has.
        self.rights = set[str]()

    @property
    def is_forgotten(self) -> bool:
        return monotonic() - self.newest_s > FORGOTTEN_S

    def answered(self, part: Outage) -> bool:
        """Record that a part has an answer; True if the outage is over."""
        self.errors.pop(id(part), None)
        return self.is_forgotten or all(each.part() is None for each in self.errors.values())


class Outage:
    """Errors and answers that one part of a process gets from a server.

    Args:
        logger: Logs the events `<server>_unavailable` and `<server>_recovered`. If it is bound to a
            `job`, only this job is notified of the errors of this part.
        server: Name of the server. An error may name another server.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, logger: EventLogger, server: str, clock: Callable[[], float] = monotonic
    ) -> None:
        self._logger = logger.try_unbind("job", "epoch")
        self.job = job_of(logger)
        self._server = server
        self._clock = clock
        # Time of the last error, by server.
        self._met = dict[str, float]()
        with _lock:
            _used.add(server)

    def met(self, error: Exception) -> None:
        """Record an error of the server."""
        server = getattr(error, "server", "") or self._server
        self._met[server] = self._clock()
        reason = " ".join(str(error).split())
        with _lock:
            _used.add(server)
            outage = _ongoing.get(server)
            begins = outage is None or outage.is_forgotten
            if outage is None or begins:
                outage = _ongoing[server] = _Ongoing()
            outage.newest_s = monotonic()
            outage.errors[id(self)] = _Error(ref(self), self.job, reason)
            is_right = isinstance(error, ForbiddenError) and len(outage.rights) < MOST_RIGHTS
            is_new = is_right and reason not in outage.rights
            is_new |= begins and outage.is_logged
            if is_right:
                outage.rights.add(reason)
        if is_new:
            event = f"{server}_unavailable"
            self._logger.warning(event, reason=reason)

    def watch(self, writer: WriterLag) -> None:
        """Record an error if Kafka does not confirm records, even if it answers other requests."""
        if writer.waiting_s > UNWRITTEN_S:
            reason = f"Kafka has not confirmed a record for {UNWRITTEN_S:g} s"
            self.met(UnavailableError(reason, "kafka"))

    def over(self) -> None:
        """Record an answer of the server."""
        for server in {self._server, *self._met} if _ongoing else ():
            self._end(server)

    def quiet(self) -> None:
        """Record neither an error nor an answer, as after a poll that returned nothing."""
        now = self._clock()
        for server, met_s in list(self._met.items()):
            if now - met_s >= (KAFKA_SETTLED_S if server == "kafka" else SETTLED_S):
                self._end(server)

    def _end(self, server: str) -> None:
        self._met.pop(server, None)
        with _lock:
            outage = _ongoing.get(server)
            if outage is None or not outage.answered(self):
                return
            del _ongoing[server]
        if not outage.is_logged:
            return
        event = f"{server}_recovered"
        self._logger.info(event, after_s=round(time() - outage.since_s, 1))


def leave_log_to(other: Callable[[], bool]) -> None:
    """Log no outage that begins while `other` is true, such as while a child logs the same."""
    _others.append(other)


def ongoing(job: str = "") -> dict[str, OutageNotice]:
    """Return the outages that are not over, by server.

    Args:
        job: Optional. Leave out errors that only parts of other jobs had. If unset, return all.
    """
    found = dict[str, OutageNotice]()
    with _lock:
        for server, outage in _ongoing.items():
            reasons = [
                each.reason for each in outage.errors.values() if not job or each.job in ("", job)
            ]
            if reasons and not outage.is_forgotten:
                found[server] = OutageNotice(outage.since_s, reasons[-1])
    return found


def seconds() -> dict[str, float]:
    """Return how long the outage of each server that this process uses has lasted; 0 if none."""
    outages, now = ongoing(), time()
    none = OutageNotice(now, "")
    with _lock:
        return {each: max(0.0, now - outages.get(each, none).since_s) for each in sorted(_used)}


class OutageNotifier:
    """Puts notices of this process's outages on the board of one of its jobs. For one thread.

    Args:
        board: Board of the job.
        process: Name of the process, which the state of the job shows.
        job: Name of the job, as loggers are bound to it.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, board: NoticeBoard, process: str, job: str, clock: Callable[[], float] = monotonic
    ) -> None:
        self._board = board
        self._process = process
        self._job = job
        self._clock = clock
        self._due = 0.0

    def notify(self) -> None:
        """Put a notice of each outage on the board, at most every `NOTIFY_S`.

        Raises:
            UnavailableError: If Redis is unavailable.
        """
        if not _ongoing or self._clock() < self._due:
            return
        self._due = self._clock() + NOTIFY_S
        outages = ongoing(self._job)
        # A notice would not arrive.
        if "redis" in outages:
            return
        for server, (since_s, reason) in outages.items():
            name = f"{OUTAGE}{server} {self._process}"
            self._board.put_unable(name, f"{since_s:.0f} {reason}", NOTICE_TTL_S)


def forget() -> None:
    """Forget all servers and outages, so that a test starts as a new process does."""
    with _lock:
        _ongoing.clear()
        _used.clear()
