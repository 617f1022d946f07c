"""`doll job watch`: reads the updates topic and the notice board, and draws what it reads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from common import topics
from common.core.spans import Partition
from common.errors import UnavailableError, WireError
from common.jobs import JobBook
from common.wire import decode_audit
from services.cli.outside import outside_of
from services.cli.watching import JobView, lag_of, render

if TYPE_CHECKING:
    from rich.console import Group

    from common.core.messages import AuditRecord
    from common.ports import Board, Log, Tail

_BEFORE = 200  # audit records from before we looked: enough for a first picture
_READ_RECORDS = 1000


def watch(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="The job's name.")],
    *,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Show once and end.")] = False,
) -> None:
    """Watch a job live: updates, loss, metrics, records/s, workers, lag; ends with Ctrl-C.

    Example: [bold]doll job watch digits[/]
    """
    outside = outside_of(context)
    log = outside.open_log()
    watcher = _Watcher(job, log, outside.open_board(job), JobBook(log))
    try:
        if once:
            Console().print(watcher.look(0.0))
            return
        with Live(watcher.look(0.0), auto_refresh=False) as live:
            while True:
                live.update(watcher.look(every_s), refresh=True)
    except KeyboardInterrupt:  # the usual end
        pass
    finally:
        watcher.close()


class _Watcher:
    """Where one job is looked at."""

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

    def look(self, timeout_s: float) -> Group:
        """Wait for updates up to `timeout_s` and draw."""
        self._read(self._tail, timeout_s, time.monotonic())
        self._record = self._book.refresh(0.0).get(self._job, self._record)
        state = f"is to be {self._record.wanted} ({self._record.reason})"
        try:
            standing, workers = self._board.get_standing(), self._board.alive()
        except UnavailableError:
            standing, workers, state = None, None, f"{state}, Redis is away"
        ends = {place: self._log.bounds(place).end for place in self._record.first}
        return render(
            self._job,
            state,
            self._view,
            samples_per_s=self._view.samples_per_s(time.monotonic()),
            workers=workers,
            standing=standing,
            lag=lag_of(standing, ends),
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
