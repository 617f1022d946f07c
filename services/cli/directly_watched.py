"""Looks at a job through its own servers: the updates topic, the jobs topic, the notice board."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common import topics
from common.core.spans import Partition
from common.errors import UnavailableError, WireError
from common.wire import decode_audit
from services.cli.watching import REDIS_AWAY, JobView, Picture, lag_of, state_of

if TYPE_CHECKING:
    from common.core.messages import AuditRecord
    from common.jobs.store import JobBook
    from common.ports import Board, Log, Tail

_BEFORE = 200  # audit records from before we looked: enough for a first picture
_READ_RECORDS = 1000


class DirectlyWatched:
    """One job, looked at through Kafka and Redis; see `system.Watched`."""

    def __init__(self, job: str, log: Log, board: Board, book: JobBook) -> None:
        self._job = job
        self._log = log
        self._board = board
        self._book = book
        self._record = book.get(job)
        self._view = JobView()
        updates = Partition(topics.updates_topic(job), 0)
        bounds = log.bounds(updates)
        self._tail = log.tail(updates, max(bounds.start, bounds.end - _BEFORE))
        while self._tail.position() < bounds.end:
            self._read(self._tail, 0.5, None)

    def look(self, timeout_s: float) -> Picture:
        """Wait for updates up to `timeout_s`, and say how the job is."""
        self._read(self._tail, timeout_s, time.monotonic())
        self._record = self._book.refresh(0.0).get(self._job, self._record)
        state = state_of(self._record.wanted, self._record.reason)
        alive, leaving, standing = None, 0, None
        try:
            standing, statuses = self._board.get_standing(), self._board.alive().values()
            alive = sum(status == "alive" for status in statuses)
            leaving = len(statuses) - alive
        except UnavailableError:
            standing, state = None, f"{state}, {REDIS_AWAY}"
        ends = {place: self._log.bounds(place).end for place in self._record.first}
        return Picture(
            state,
            alive,
            leaving,
            self._view.samples_per_s(time.monotonic()),
            lag_of(standing, ends),
            standing.waiting if standing else None,
            self._view.quarantined,
            self._view.lines(),
        )

    def close(self) -> None:
        """Let go of the connections."""
        self._tail.close()
        self._book.close()

    def _read(self, tail: Tail, timeout_s: float, now: float | None) -> None:
        for record in tail.read(_READ_RECORDS, timeout_s):
            self._view.feed(_audit(record.value), now)


def _audit(value: bytes | None) -> AuditRecord | None:
    try:
        record: AuditRecord = decode_audit(value or b"")
    except WireError:
        return None
    return record
