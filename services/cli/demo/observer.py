"""What can be seen of a job from outside while it runs: its audit trail and its notice board."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.spans import Partition
from common.errors import UnavailableError, WireError
from common.topics import names as topics
from common.wire.messages import decode_audit
from services.cli.demo.course import Course

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, Positions, Standing
    from common.ports.servers import Board, Log

_READ_RECORDS = 1000
_BOARD_EVERY_S = 0.2


class Observer:
    """Follows one job.

    Args:
        job: Its name.
        log: Where its updates topic is.
        board: Its own.
    """

    def __init__(self, job: str, log: Log, board: Board) -> None:
        self.course = Course()
        self.alive = frozenset[str]()
        self._standing: Standing | None = None
        self._board = board
        self._board_at = 0.0
        self._tail = log.tail(Partition(topics.updates_topic(job), 0), 0)

    @property
    def led(self) -> bool:
        """Whether a coordinator leads the job."""
        return self._standing is not None

    def look(self, wait_s: float, now: float) -> bool:
        """Wait for news up to `wait_s`; whether there was an update. Servers may be away."""
        try:
            if now >= self._board_at:
                self._board_at = now + _BOARD_EVERY_S
                self._standing = self._board.get_standing()
                statuses = self._board.alive()
                self.alive = frozenset(w for w, status in statuses.items() if status == "alive")
            records = self._tail.read(_READ_RECORDS, wait_s)
        except UnavailableError:
            return False
        counted = [self.course.feed(each.offset, _audit(each.value), now) for each in records]
        return any(counted)

    def settled(self, first: Positions) -> int:
        """Records from `first` on that a checkpoint covers."""
        settled = self._standing.settled if self._standing else {}
        return sum(settled.get(place, start) - start for place, start in first.items())

    def drained(self, ends: Positions) -> bool:
        """Whether everything below `ends` has become part of an update."""
        standing = self._standing
        return (
            standing is not None
            and standing.waiting == 0
            and all(standing.claimed.get(place, 0) >= end for place, end in ends.items())
        )

    def close(self) -> None:
        """Let go of the connection."""
        self._tail.close()


def _audit(value: bytes | None) -> AuditRecord | None:
    try:
        record: AuditRecord = decode_audit(value or b"")
    except WireError:
        return None
    return record
