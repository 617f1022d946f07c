"""Looks once at jobs on real servers."""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from time import monotonic
from typing import TYPE_CHECKING

from common.errors import ExpiredError, TruncatedError, UnavailableError, UnknownTopicError
from common.jobs.progress import JobProgress
from common.jobs.watching import (
    HistoryReader,
    LookedAt,
    Looker,
    OwnTopics,
    one_by_one,
    read_history,
    topics_of,
)
from common.telemetry.logging import event_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.jobs.store import JobRecord
    from common.jobs.watching import Glances
    from common.ports.servers import Board, Log

_log = event_logger(__name__)

LIST_S = 3.0  # that histories are read for a list: what is not known by then is told so
LIST_RECORDS = 20_000  # of all histories together: about half a second
_LEAST_RECORDS = 200  # of each
_WAIT_S = 0.01


def look_at_jobs(
    records: Mapping[str, JobRecord],
    log: Log,
    open_board: Callable[[str], Board],
    now: float,
    glances: Glances | None = None,
) -> dict[str, JobProgress]:
    """Look once at jobs: how each is and how far, by name.

    Of a long history only the newest part is read. A job whose topics are gone, or cannot be read
    in time, is missing.

    Args:
        records: The jobs.
        log: Kafka.
        open_board: Opens the board of a job.
        now: Seconds since 1970.
        glances: Optional. Looks at several boards. If unset, they are looked at one by one.

    Raises:
        OutsideError: If Kafka is unavailable.
    """
    own = OwnTopics(log, {place for each in records.values() for place in topics_of(each.id)})
    most = max(_LEAST_RECORDS, LIST_RECORDS // max(1, len(records)))
    found = dict[str, JobProgress]()
    readers = dict[str, HistoryReader]()
    try:
        for name, record in records.items():
            with suppress(UnknownTopicError, UnavailableError):  # its topics are gone, or not known
                if not any(own.bounds(place).end for place in topics_of(record.id)):
                    found[name] = JobProgress(record)
                    continue
                readers[name] = reader = HistoryReader(record.id, log, most, own)
                found[name] = JobProgress(record, reader.updates_start, reader.control_start)
        unread = _read_all(readers, found, now)
    finally:
        for reader in readers.values():
            reader.close()
    for name in unread:
        del found[name]
    with ExitStack() as boards:
        jobs = [
            LookedAt(each.record, boards.enter_context(closing(open_board(each.record.id))))
            for each in found.values()
        ]
        looks = Looker(lambda: log, glances or one_by_one, _log).look(jobs, now, monotonic())
    for progress, look in zip(found.values(), looks, strict=True):
        progress.look(look)
    return found


def _read_all(
    readers: Mapping[str, HistoryReader], found: Mapping[str, JobProgress], now: float
) -> set[str]:
    """Read histories side by side; returns those that could not be read to their ends."""
    unread, until = set(readers), monotonic() + LIST_S
    while unread and monotonic() < until:
        for number, name in enumerate(sorted(unread)):
            try:
                read_history(readers[name], found[name], now, 0.0 if number else _WAIT_S)
            except (ExpiredError, TruncatedError, UnknownTopicError):
                return unread  # somebody cuts topics just now
            if readers[name].caught_up:
                unread.remove(name)
    return unread
