"""Outages of the servers that a process uses: told once in its log, in its metrics, to its jobs.

All parts of a process that use the same server share what is known of it: each of them notices an
outage, one line of the log says so. Parts of one job tell the others of that job by the board.
"""

from __future__ import annotations

import threading
from time import monotonic, time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from common.core.liveness import OUTAGE, Trouble
from common.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.ports.servers import Board, Writer
    from common.telemetry.logging import EventLogger

SETTLED_S = 3.0  # of quiet end an outage: clients try again, and complain, every second
# Likewise of Kafka: to a broker that is frozen its client tries to connect for 5 s, then complains.
KAFKA_SETTLED_S = 7.0
# Age of a record that Kafka has not taken at which that is an outage: its client retries silently.
UNWRITTEN_S = 5.0
# Time after which an outage that nobody met again is over, because who met it has gone.
FORGOTTEN_S = 120.0
TELL_S = 4.0  # between notices on a job's board
TOLD_S = 10.0  # lifetime of a notice

_lock = threading.Lock()  # guards what follows
_lasting = dict[str, "_Lasting"]()
_known = set[str]()


class _Lasting:
    """An outage of a server that lasts."""

    def __init__(self) -> None:
        self.since_s = time()
        self.met_s = monotonic()
        # Reason by who met it, until that one has an answer.
        self.by = WeakKeyDictionary[Outage, str]()

    @property
    def is_forgotten(self) -> bool:
        return monotonic() - self.met_s > FORGOTTEN_S


class Outage:
    """Trouble with a server as one part of a process sees it.

    Args:
        logger: Gets the events `<server>_unavailable` and `<server>_recovered`. An outage that a
            part with a `job` meets is told of this job only.
        server: Its name, unless an error says that it is about another one.
        clock: Seconds that never go back.
    """

    def __init__(
        self, logger: EventLogger, server: str, clock: Callable[[], float] = monotonic
    ) -> None:
        self._logger = logger.try_unbind("job", "epoch")
        self.job = str(logger.bound.get("job", ""))
        self._server = server
        self._clock = clock
        self._met = dict[str, float]()  # when, by server, while it lasts
        with _lock:
            _known.add(server)

    def met(self, error: Exception) -> None:
        """Note that the server did not do what it should."""
        server = getattr(error, "server", "") or self._server
        self._met[server] = self._clock()
        with _lock:
            _known.add(server)
            lasting = _lasting.get(server)
            begins = lasting is None or lasting.is_forgotten
            if lasting is None or begins:
                lasting = _lasting[server] = _Lasting()
            lasting.met_s = monotonic()
            lasting.by[self] = " ".join(str(error).split())
        if begins:
            event = f"{server}_unavailable"
            self._logger.warning(event, reason=str(error))

    def watch(self, writer: Writer) -> None:
        """Note if Kafka does not take what was written, though it may answer all else."""
        if writer.waiting_s > UNWRITTEN_S:
            reason = f"a record that was written {UNWRITTEN_S:g} s ago or earlier is not taken"
            self.met(UnavailableError(reason, "kafka"))

    def over(self) -> None:
        """Note that the server answered."""
        for server in {self._server, *self._met} if _lasting else ():
            self._end(server)

    def quiet(self) -> None:
        """Nothing was heard, not of trouble either, as where a reader's server is unavailable."""
        now = self._clock()
        for server, met_s in list(self._met.items()):
            if now - met_s >= (KAFKA_SETTLED_S if server == "kafka" else SETTLED_S):
                self._end(server)

    def _end(self, server: str) -> None:
        self._met.pop(server, None)
        with _lock:
            lasting = _lasting.get(server)
            if lasting is None:
                return
            lasting.by.pop(self, None)
            if lasting.by:
                return
            del _lasting[server]
        event = f"{server}_recovered"
        self._logger.info(event, after_s=round(time() - lasting.since_s, 1))


def troubles(job: str = "") -> dict[str, Trouble]:
    """Return the outages that last, by server.

    Args:
        job: Optional. Leaves out what only parts of other jobs have met. If unset, nothing is.
    """
    with _lock:
        found = {
            server: (lasting.since_s, [why for by, why in lasting.by.items() if _is_of(by, job)])
            for server, lasting in _lasting.items()
            if not lasting.is_forgotten
        }
    return {server: Trouble(since, whys[-1]) for server, (since, whys) in found.items() if whys}


def _is_of(outage: Outage, job: str) -> bool:
    return not job or outage.job in ("", job)


def seconds() -> dict[str, float]:
    """Return for how long the outage of each server has lasted; 0 if there is none."""
    lasting, now = troubles(), time()
    with _lock:
        known = sorted(_known)
    nothing = Trouble(now, "")
    return {each: max(0.0, now - lasting.get(each, nothing).since_s) for each in known}


class TroubleTeller:
    """Tells the outages that a process sees on the board of one of its jobs. For one thread.

    Args:
        process: Its name, as the job's state tells it.
        job: Name of the job, as loggers have it.
    """

    def __init__(
        self, board: Board, process: str, job: str, clock: Callable[[], float] = monotonic
    ) -> None:
        self._board = board
        self._process = process
        self._job = job
        self._clock = clock
        self._due = 0.0

    def tell(self) -> None:
        """Tell them, if it is time to.

        Raises:
            UnavailableError: If Redis is unavailable.
        """
        if not _lasting or self._clock() < self._due:
            return
        self._due = self._clock() + TELL_S
        lasting = troubles(self._job)
        if "redis" in lasting:
            return  # it would not arrive
        for server, (since_s, reason) in lasting.items():
            name = f"{OUTAGE}{server} {self._process}"
            self._board.put_unable(name, f"{since_s:.0f} {reason}", TOLD_S)


def forget() -> None:
    """Know of no server and no outage any more, as a process that begins; for tests."""
    with _lock:
        _lasting.clear()
        _known.clear()
