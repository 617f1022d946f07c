"""A job as the API answers it, written once for each of its records: 500 requests a second ask."""

from __future__ import annotations

import msgspec

from common.api.jobs import job_answer
from common.jobs.progress import UNREAD, resting
from common.jobs.store import JobRecord
from services.admin.live.view import JobView

_MOST = 1000  # answers that are kept, a few kilobytes each


class JobHeaderCache:
    """All of a job's answer but its state and its progress, which come last."""

    def __init__(self) -> None:
        self._known = dict[str, tuple[JobRecord, bytes]]()  # by name

    def told(self, view: JobView, record: JobRecord, now: float) -> bytes:
        """The whole answer, a `JobAnswer` as JSON."""
        state, progress = resting(record) or view.job.state_at_work(now), view.progress(now)
        return b'%b"state":%b,"why":%b,"progress":%b}' % (
            self._of(record),
            *map(msgspec.json.encode, state),
            progress.model_dump_json().encode(),
        )

    def _of(self, record: JobRecord) -> bytes:
        """The beginning of the answer, up to what is not of the record."""
        name = record.spec.name
        known = self._known.get(name)
        if known is not None and known[0] is record:
            return known[1]
        if len(self._known) >= _MOST:
            self._known.clear()
        answer = job_answer(record, UNREAD, JobView(record).progress(0.0))
        head = answer.model_dump_json(exclude={"state", "why", "progress"}).encode()[:-1] + b","
        self._known[name] = record, head
        return head
