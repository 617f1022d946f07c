"""Looks at a job's board and at the ends of its streams, now and then."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from common.errors import OutsideError
from common.telemetry import Outage
from services.admin.following.view import Look

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import Positions
    from common.jobs.store import JobRecord
    from common.ports import Board, Log
    from common.telemetry import EventLogger

LOOK_S = 0.5
_SHARE = 10  # of its time that a thread spends looking, at most a tenth
_LONGEST_S = 10.0  # even where servers are slow


class Looker:
    """Looks when it is time to, and never fails: what cannot be seen is told as unknown.

    For one thread.

    Attributes:
        looked: Whether there was a look, whatever it saw.

    Args:
        record: The job.
        log: Kafka.
        open_board: Of a job.
        logger: Where outages are told.
    """

    def __init__(
        self,
        record: JobRecord,
        log: Callable[[], Log],
        open_board: Callable[[str], Board],
        logger: EventLogger,
    ) -> None:
        self.looked = False
        self._job = record.spec.name
        self._places = tuple(record.first)
        self._log = log
        self._open_board = open_board
        self._board: Board | None = None
        self._due = 0.0
        bound = logger.bind(job=self._job)
        self._redis, self._streams = Outage(bound, "redis"), Outage(bound, "streams")

    def look(self, now: float, clock: float) -> Look | None:
        """Look, if it is time to.

        Args:
            now: Seconds since 1970.
            clock: Seconds that never go back.
        """
        if clock < self._due:
            return None
        seen = self._look_at_board(Look(now))._replace(ends=self._ends())
        took_s = monotonic() - clock
        self._due = clock + min(_LONGEST_S, max(LOOK_S, _SHARE * took_s))
        self.looked = True
        return seen

    def close(self) -> None:
        """Let go of the connection."""
        if self._board is not None:
            self._board.close()

    def _look_at_board(self, look: Look) -> Look:
        try:
            if self._board is None:
                self._board = self._open_board(self._job)
            seen = look._replace(
                statuses={str(worker): status for worker, status in self._board.alive().items()},
                standing=self._board.get_standing(),
                led=self._board.is_leased(),
            )
        except OutsideError as error:
            self._redis.met(error)
            return look._replace(board_away=str(error))
        self._redis.over()
        return seen

    def _ends(self) -> Positions | None:
        try:
            ends = {place: self._log().bounds(place).end for place in self._places}
        except OutsideError as error:
            self._streams.met(error)
            return None
        self._streams.over()
        return ends
