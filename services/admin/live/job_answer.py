"""A job as the API tells it, written once for each of its records: 500 requests a second ask."""

from __future__ import annotations

import msgspec

from common.api.answers import Change, JobAnswer, OriginAnswer
from common.jobs.progress import resting
from common.jobs.store import JobRecord
from services.admin.live.view import JobView

_MOST = 1000  # answers that are kept, a few kilobytes each


class Heads:
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
        head = _head(record)
        self._known[name] = record, head
        return head


def _head(record: JobRecord) -> bytes:
    spec, origin = record.spec, record.origin
    told = JobAnswer(
        id=spec.name,
        wanted=record.wanted,
        reason=record.reason,
        submitted_s=record.submitted_s,
        deadline_s=None
        if spec.stop.deadline_s is None
        else record.submitted_s + spec.stop.deadline_s,
        revision=record.revision,
        changes=tuple(
            Change(
                revision=change.revision,
                at_s=change.at_s,
                changed=change.changed,
                reason=change.reason,
            )
            for change in record.changes
        ),
        spec=spec,
        first=tuple(
            (place.topic, place.index, position) for place, position in sorted(record.first.items())
        ),
        origin=None
        if origin is None
        else OriginAnswer(
            job=origin.job, epoch=origin.epoch, version=origin.version, sha256=origin.sha256
        ),
        detail=record.detail,
        state="running",
        progress=JobView(record).progress(0.0),
    )
    head = told.model_dump_json(exclude={"state", "why", "progress"})
    return head.encode()[:-1] + b","
