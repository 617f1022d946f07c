"""Looks at a job through its own servers: its topics, the jobs topic, the notice board."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from common.errors import ExpiredError, TruncatedError, UnavailableError, UnknownTopicError
from common.jobs.progress import JobProgress
from common.jobs.watching import HistoryReader, Looker, read_history
from common.telemetry.logging import event_logger
from services.cli.commands.watching import SHOWN_UPDATES, Picture, UpdateLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.jobs.store import JobBook
    from common.ports.servers import Board, Log

# Of each of its topics: a second or two. Of a longer history the newest part alone is read, and
# counts are told as "at least"; `doll audit` and the admin service read it whole.
MOST_RECORDS = 20_000
_READ_S = 0.2

_log = event_logger(__name__)


class DirectlyWatched:
    """One job, looked at through Kafka and Redis; see `system.Watched`.

    Args:
        job: Its name.
        log: Kafka.
        open_board: Of a job.
        book: All jobs.

    Raises:
        NotFoundError: If there is no such job.
        UnavailableError: If Kafka is away.
    """

    def __init__(
        self, job: str, log: Log, open_board: Callable[[str], Board], book: JobBook
    ) -> None:
        self._job = job
        self._log = log
        self._book = book
        self._record = book.get(job)
        self._looker = Looker(self._record, lambda: log, open_board, _log)
        self._history: HistoryReader | None = None
        self._progress = JobProgress(self._record)
        with suppress(UnknownTopicError):  # its record says why nobody works on it
            self._open()

    def look(self, timeout_s: float) -> Picture:
        """Wait for updates up to `timeout_s`, and say how the job is."""
        self._read(timeout_s)
        self._record = self._book.refresh(0.0).get(self._job, self._record)
        now = time.time()
        look = self._looker.look(now, time.monotonic())
        progress = self._progress
        progress.record = self._record
        if look is not None:
            progress.look(look)
        numbers, statuses = progress.numbers(now), progress.seen.statuses
        alive = None if statuses is None else sum(each == "alive" for each in statuses.values())
        rows = progress.columns.rows(numbers.version - SHOWN_UPDATES + 1, numbers.version)
        return Picture(
            progress.state(now),
            alive,
            len(statuses or ()) - (alive or 0),
            numbers.samples_per_s,
            numbers.lag,
            numbers.waiting,
            numbers.skipped,
            numbers.quarantined,
            numbers.expired,
            numbers.whole,
            tuple(
                UpdateLine(
                    row.version,
                    row.epoch,
                    row.loss,
                    row.metrics,
                    row.samples,
                    row.batches,
                    row.short,
                )
                for row in rows
            ),
        )

    def close(self) -> None:
        """Let go of the connections."""
        self._leave()
        self._looker.close()
        self._book.close()

    def _open(self) -> None:
        """Read the history up to now."""
        self._history = history = HistoryReader(self._job, self._log, MOST_RECORDS)
        self._progress = JobProgress(self._record, history.updates_start, history.control_start)
        while not history.caught_up:
            read_history(history, self._progress, time.time(), _READ_S)

    def _read(self, timeout_s: float) -> None:
        if self._history is None:
            time.sleep(timeout_s)
            return
        try:
            read_history(self._history, self._progress, time.time(), timeout_s)
        except UnavailableError:  # what was known is shown, until it is back
            time.sleep(timeout_s)
        except UnknownTopicError:
            self._leave()
        except (ExpiredError, TruncatedError):
            self._leave()
            self._open()

    def _leave(self) -> None:
        if self._history is not None:
            self._history.close()
        self._history = None
