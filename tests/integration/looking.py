"""Read a job's state and progress from Kafka and Redis, as the admin service does."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from common.jobs.progress import JobProgress
from common.jobs.watching import HistoryReader, Poller, read_history
from common.telemetry.logging import event_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.jobs.store import JobRecord
    from common.kafka.port import Log
    from common.redis.port import Board


def progress_of(
    record: JobRecord, log: Log, open_board: Callable[[str], Board], now_s: float
) -> JobProgress:
    """Read a job's history to its end, and poll its board and streams once."""
    with closing(HistoryReader(record.id, log)) as history:
        progress = JobProgress(record, history.updates_start, history.control_start)
        while not history.caught_up:
            read_history(history, progress, now_s, 0.1)
    with closing(Poller(record, lambda: log, open_board, event_logger(__name__))) as poller:
        look = poller.look(now_s, 0.0)
    assert look is not None
    progress.look(look)
    return progress
