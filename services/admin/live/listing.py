"""List of jobs; a row is built again only if its job or summary changed.

A request costs as much as the rows of its page, no matter how many jobs exist.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from math import isnan
from typing import TYPE_CHECKING, Final, NamedTuple

from common.api.jobs import job_summary
from common.jobs.progress import UNREAD, Word
from common.telemetry.outages import ongoing

if TYPE_CHECKING:
    from common.api.answers import JobSummary
    from common.jobs.progress import Numbers, State
    from common.jobs.store import JobRecord

# Fields that a list can be sorted by, besides name and state.
NUMBERS: Final = (
    *("version", "loss", "accuracy", "updates_per_s", "workers", "lag", "skipped", "quarantined"),
    *("expired", "lost", "spent_usd"),
)
# States in sort order: first those that need a person.
_STATES: Final[tuple[Word, ...]] = (
    *("held", "waiting for a server", "waiting for a coordinator", "waiting for workers"),
    *("degraded", "running", "waiting for records", "drained", "paused", "finished", "stopped"),
)


class LiveSummary(NamedTuple):
    """State and progress of a job, as a list shows them."""

    state: State
    # None if unknown.
    numbers: Numbers | None = None
    # Cost of the job's machines; None if it has none.
    spent_usd: float | None = None
    # See `JobProgress.open_transactions_s`.
    open_transactions_s: Mapping[str, float] = {}


class JobRow:
    """One job in the list.

    Attributes:
        record: The job.
        summary: State and progress.
        words: Text that a search matches, in lower case.
    """

    def __init__(self, record: JobRecord, summary: LiveSummary) -> None:
        self.record = record
        self.summary = summary
        spec = record.spec
        task = spec.task_name
        self.words = " ".join((spec.name, summary.state.word, task, *spec.streams)).lower()

    @cached_property
    def answer(self) -> JobSummary:
        """The job as the API returns it."""
        return job_summary(self.record, *self.summary[:3])

    @cached_property
    def json(self) -> bytes:
        """The answer as JSON."""
        return self.answer.model_dump_json().encode()


class Listing:
    """All jobs of one process. For the thread of requests, except `change`.

    Attributes:
        rows: One row per job, by name, as of the last `renew`.

    Args:
        jobs: Returns all jobs as last read, in another mapping if one of them has changed.
        summary: Returns a job's state and progress.
    """

    def __init__(
        self,
        jobs: Callable[[], Mapping[str, JobRecord]],
        summary: Callable[[JobRecord], LiveSummary],
    ) -> None:
        self.rows = dict[str, JobRow]()
        self._jobs = jobs
        self._summary = summary
        self._seen: Mapping[str, JobRecord] = {}
        self._unread = set[str]()
        self._states = Counter[Word]()
        self._orders = dict[str, list[str]]()
        self._lock = threading.Lock()
        self._changed = set[str]()

    def change(self, job: str) -> None:
        """Note that the summary of a job has changed. Any thread may call this."""
        with self._lock:
            self._changed.add(job)

    def renew(self) -> None:
        """Apply all changes since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
        before, self._seen = self._seen, self._jobs()
        jobs = self._seen
        if ongoing() or self._states["waiting for a server"]:
            # An outage can start or end without a finished poll of the job.
            changed |= {name for name, row in self.rows.items() if row.record.wanted == "running"}
        if jobs is not before:
            changed |= {each for each in {*jobs, *before} if jobs.get(each) is not before.get(each)}
        for name in changed:
            self._renew(name, jobs.get(name))

    def unread(self) -> list[JobRecord]:
        """Return the running jobs whose histories are still being read."""
        return [self.rows[name].record for name in self._unread]

    def states(self) -> dict[Word, int]:
        """Return the number of jobs in each state."""
        return {word: count for word, count in sorted(self._states.items()) if count}

    def order(self, sort: str) -> list[str]:
        """Return the names of all jobs sorted by a field, then by name.

        Args:
            sort: Name of the field; with a leading minus, descending.
        """
        if sort in self._orders:
            return self._orders[sort]
        field, sign = sort.removeprefix("-"), -1 if sort.startswith("-") else 1
        self._orders[sort] = order = sorted(self.rows, reverse=sort == "-id")

        def key(name: str) -> tuple[bool, float]:
            word, row = self.rows[name].summary.state.word, self.rows[name]
            value = _STATES.index(word) if field == "state" else getattr(row.answer, field)
            unknown = value is None or isnan(value)
            return unknown, 0.0 if unknown else sign * value

        if field != "id":
            order.sort(key=key)
        return order

    def _renew(self, name: str, record: JobRecord | None) -> None:
        self._orders.clear()
        if (old := self.rows.pop(name, None)) is not None:
            self._states[old.summary.state.word] -= 1
            self._unread.discard(name)
        if record is not None:
            self.rows[name] = row = JobRow(record, self._summary(record))
            self._states[row.summary.state.word] += 1
            if row.summary.state is UNREAD:
                self._unread.add(name)
