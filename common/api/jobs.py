"""Conversion of jobs to responses of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from common.api.answers import (
    EvaluationAnswer,
    JobAnswer,
    JobSummary,
    ProgressAnswer,
    RemainsAnswer,
    UnreadableRecord,
)
from common.jobs.notes import notes_on
from common.jobs.progress import Numbers

if TYPE_CHECKING:
    from common.jobs.progress import Evaluations, JobProgress, State
    from common.jobs.purge import Remains
    from common.jobs.store import JobRecord
    from common.kafka.table import Unreadable


def progress_answer(job: JobProgress, now: float) -> ProgressAnswer:
    """Return the progress of a job."""
    done = job.record.reason if job.record.wanted == "stopped" else ""
    evaluation = _evaluation_answer(job.evaluations)
    return ProgressAnswer(**dict(job.numbers(now)), done=done, evaluation=evaluation)


def _evaluation_answer(found: Evaluations) -> EvaluationAnswer | None:
    """Return the newest results of evaluators; None before the first."""
    test = found.tests[-1] if found.tests else None
    predicted = {name: reported[-1] for name, reported in found.predictions.items()}
    if test is None and not predicted:
        return None
    return EvaluationAnswer(
        version=test.model.version if test else None,
        at_s=test.at_s if test else None,
        records=test.records if test else 0,
        test=test.test if test else {},
        prequential={name: reported.prequential[name] for name, reported in predicted.items()},
        predicted=max((reported.model.version for reported in predicted.values()), default=None),
        drifts=len(found.drifts),
    )


def remains_answer(found: Remains) -> RemainsAnswer:
    """Return what jobs of a name have left."""
    return RemainsAnswer(topics=found.topics, files=len(found.files), kept=found.kept)


def job_answer(record: JobRecord, state: State, progress: ProgressAnswer) -> JobAnswer:
    """Return a job in full. Fields that record and response share are copied by name."""
    spec = record.spec
    deadline_s = spec.stop.deadline_s
    others = {
        "id": spec.name,
        "deadline_s": None if deadline_s is None else record.submitted_s + deadline_s,
        "first": [(*place, position) for place, position in sorted(record.first.items())],
        "notes": notes_on(spec),
        "state": state.word,
        "why": state.why,
        "progress": progress,
    }
    return JobAnswer.model_validate(asdict(record) | others)


def job_summary(
    record: JobRecord,
    state: State,
    numbers: Numbers | None,
    spent_usd: float | None = None,
) -> JobSummary:
    """Return the summary of a job for a list.

    Args:
        record: The job.
        state: Its state.
        numbers: Its progress; None if it is not known.
        spent_usd: Cost of its machines; None if it is not known, or no machine was rented.
    """
    spec = record.spec
    known = dict.fromkeys(Numbers.model_fields) if numbers is None else dict(numbers)
    others = {
        "id": spec.name,
        "wanted": record.wanted,
        "reason": record.reason,
        "submitted_s": record.submitted_s,
        "streams": spec.streams,
        "task": spec.task_name,
        "batch_size": spec.batch_size,
        "group_size": spec.group_size,
        "provisioned": spec.provisioning is not None,
        "state": state.word,
        "why": state.why,
        "accuracy": numbers and numbers.metrics.get("accuracy"),
        "spent_usd": spent_usd,
        "whole": numbers is None or numbers.whole,
    }
    return JobSummary.model_validate(known | others)


def unreadable_records(found: Mapping[str, Unreadable]) -> tuple[UnreadableRecord, ...]:
    """Return records of jobs that do not parse, sorted by key."""
    return tuple(
        UnreadableRecord(id=name, offset=each.offset, reason=each.reason)
        for name, each in sorted(found.items())
    )
