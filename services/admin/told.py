"""A job as the API tells it, written once for each of its records: 500 requests a second ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.jobs.store import JobRecord
from services.admin.answers import Change, JobAnswer, OriginAnswer, Progress

if TYPE_CHECKING:
    from services.admin.following.follower import Follower
    from services.admin.service import Service

_MOST = 1000  # answers that are kept, a few kilobytes each
_NOTHING_YET = Progress(
    version=0,
    samples=0,
    loss=None,
    metrics={},
    updates_per_s=None,
    samples_per_s=None,
    lag=None,
    workers=None,
    waiting=None,
    quarantined=0,
    led=None,
    last_update_s=None,
    done="",
)


def told_new(service: Service, record: JobRecord) -> bytes:
    """A job that has just been made, a `JobAnswer` as JSON."""
    return service.heads.of(record) + _NOTHING_YET.model_dump_json().encode() + b"}"


def told_job(service: Service, record: JobRecord, follower: Follower) -> bytes:
    """A job and how far it is, a `JobAnswer` as JSON.

    Args:
        service: Of this process.
        record: The job; its follower may not have heard yet of a change that was made here.
        follower: Knows the rest.
    """
    with follower.view() as view:
        progress = view.progress(service.clock())
    return service.heads.of(record) + progress.model_dump_json().encode() + b"}"


class Heads:
    """All of a job's answer but its progress, which comes last."""

    def __init__(self) -> None:
        self._known = dict[str, tuple[JobRecord, bytes]]()  # by name

    def of(self, record: JobRecord) -> bytes:
        """The beginning of the answer, up to the value of `progress`."""
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
        progress=_NOTHING_YET,
    )
    return told.model_dump_json(exclude={"progress"}).encode()[:-1] + b',"progress":'
