"""Removal of everything that jobs of a name own, which frees the name: `doll job delete --purge`.

A purge first writes to the jobs topic that the next job of the name is a new incarnation, which
shares nothing with earlier ones (`common.kafka.names`). Then it removes what the earlier ones own.
If a purge is killed in between, or two run at the same time, at worst something remains that nobody
reads. The next purge of the name removes that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from time import time
from typing import TYPE_CHECKING, NamedTuple

from common.core.spans import Partition
from common.errors import ConflictError, NotFoundError, OutsideError, UnknownTopicError
from common.jobs.changes import audit, change_by
from common.kafka.names import group_name, own_topics, provisioning_board

if TYPE_CHECKING:
    from common.jobs.operations import JobOperations
    from common.jobs.servers import Outside


class Remains(NamedTuple):
    """Everything that jobs of a name own, except a consumer group and keys in Redis that expire."""

    # Number of records by topic.
    topics: dict[str, int]
    # Names in object storage.
    files: tuple[str, ...]
    # Things that were not removed or are not known, each with the reason.
    kept: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.topics or self.files)


def remains_of(name: str, job_store: JobOperations, outside: Outside) -> Remains:
    """Return what a purge would remove.

    Raises:
        NotFoundError: If there never was such a job.
        ConflictError: If the job is not stopped, or its record does not parse.
        UnavailableError: If Kafka is unavailable.
    """
    is_job, unreadable = name in job_store.read(), job_store.table.unreadable.get(name)
    if unreadable is not None:
        raise ConflictError(f'the job "{name}" may be of a newer program: {unreadable.reason}')
    if is_job:
        job_store.stopped(name)
    jobs = [*job_store.past_ids(name), job_store.id_of(name)]
    found = _remains(jobs, outside)
    if not (found or is_job or jobs[1:]):
        raise NotFoundError(f'there is no job "{name}", and nothing is left of one')
    return found


def purge(name: str, job_store: JobOperations, outside: Outside) -> Remains:
    """Free a name, and remove everything that its jobs own. May be repeated at any time.

    Returns:
        What was removed, and what was not.

    Raises:
        NotFoundError: If there never was such a job.
        ConflictError: If the job is not stopped, is still stopping, or its record does not parse.
        UnavailableError: If Kafka is unavailable.
    """
    # Raises if the purge must be refused.
    remains_of(name, job_store, outside)
    last = job_store.id_of(name)
    if name in job_store.read():
        _check_led_no_more(name, last, outside)
        job_store.free(name)
    # A job of this incarnation was deleted without a purge.
    elif _remains([last], outside):
        job_store.free(name)
    else:
        # The name is free; an earlier purge did not remove everything.
        audit([change_by(job_store.by, time(), "purged")], job=name)
    jobs = job_store.past_ids(name)
    found, log = _remains(jobs, outside), outside.open_log()
    # A model server's group has the name of its topic.
    groups = [*map(group_name, jobs), *found.topics]
    topics = _why_not("topics", lambda: log.delete_topics(list(found.topics)))
    files = _why_not("files", lambda: _delete_files(found.files, outside))
    return Remains(
        {} if topics else found.topics,
        () if files else found.files,
        (
            *found.kept,
            *topics,
            *files,
            *_why_not("consumer group", lambda: log.delete_groups(groups)),
            *_why_not("keys in Redis", lambda: _wipe(jobs, outside)),
        ),
    )


def _remains(jobs: Sequence[str], outside: Outside) -> Remains:
    log, files = outside.open_log(), list[str]()
    all_topics, places = log.topics(), list[Partition]()
    records = {topic: 0 for job in jobs for topic in own_topics(job, all_topics)}
    for topic in records:
        # Another purge may have just deleted the topic.
        with suppress(UnknownTopicError):
            places += log.partitions(topic)
    starts, ends = log.starts(places), log.ends(places)
    for place, end in ends.items():
        records[place.topic] += end - starts.get(place, end)
    why: tuple[str, ...] = ("files: DOLL_BLOBS names no object storage",)
    if outside.settings.blobs:
        why = _why_not("files", lambda: files.extend(_files(jobs, outside)))
    return Remains(records, tuple(files), why)


def _files(jobs: Sequence[str], outside: Outside) -> list[str]:
    blobs = outside.open_blobs()
    return [name for job in jobs for name in blobs.names(f"{job}/")]


def _delete_files(names: Sequence[str], outside: Outside) -> None:
    if names:
        blobs = outside.open_blobs()
        for name in names:
            blobs.delete(name)


def _wipe(jobs: Sequence[str], outside: Outside) -> None:
    for job in jobs:
        for board in (job, provisioning_board(job)):
            with closing(outside.open_board(board)) as opened:
                opened.wipe()


def _check_led_no_more(name: str, job: str, outside: Outside) -> None:
    """Check that no leader is still writing a last checkpoint.

    Raises:
        ConflictError: If one may be.
    """
    with suppress(OutsideError), closing(outside.open_board(job)) as board:
        if board.is_leased():
            raise ConflictError(
                f'the job "{name}" is still stopping: its leader writes a last checkpoint; try'
                " again in a few seconds"
            )


def _why_not(what: str, remove: Callable[[], object]) -> tuple[str, ...]:
    """Call `remove`; return why it failed, or nothing if it succeeded."""
    try:
        remove()
    except OutsideError as error:
        return (f"{what}: {error}",)
    return ()
