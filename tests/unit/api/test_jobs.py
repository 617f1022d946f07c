"""The API's answers about jobs."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec.structs import replace

from common.api.answers import JobAnswer
from common.api.jobs import job_answer, job_summary, progress_answer
from common.core.spans import Partition
from common.jobs.changes import Change
from common.jobs.progress import UNREAD, JobProgress, resting
from common.jobs.spec import job_from_json
from common.jobs.store import JobRecord, StartCheckpoint, by_stream
from services.admin.routes.requests import JOB

NOW = 2000.0
FIRST = {Partition("clinic-a", 0): 7, Partition("clinic-a", 1): 0, Partition("clinic-b", 0): 3}
SPEC = job_from_json(json.dumps(JOB))
RUNNING = JobRecord(SPEC, "running", by_stream(FIRST), "submitted", 1000.0)
CHANGED = replace(
    RUNNING,
    revision=2,
    changes=(
        Change(1000.0, "submitted", "olga", "operator"),
        Change(1100.0, "changed", "oidc:ada", "operator", 1, {"group_size": 10}, "late"),
        Change(1200.0, "changed", "ada", "cli", 2, {"deadline_s": None}),
    ),
    origin=StartCheckpoint("letters", 3, 400, "0" * 64),
)
HELD = replace(RUNNING, wanted="paused", reason="it raises", held=True, detail="Traceback: boom")
OVER = replace(RUNNING, wanted="stopped", reason="400 updates applied", finished=True)


@pytest.mark.parametrize("record", [RUNNING, CHANGED, HELD, OVER])
def test_job_answer_contains_the_whole_record(record: JobRecord) -> None:
    progress = progress_answer(JobProgress(record), NOW)
    answer = job_answer(record, resting(record) or UNREAD, progress)
    assert JobAnswer.model_validate_json(answer.model_dump_json()) == answer
    assert answer.spec == record.spec
    assert (answer.wanted, answer.reason) == (record.wanted, record.reason)
    assert answer.detail == record.detail
    assert {Partition(topic, at): position for topic, at, position in answer.first} == record.first
    assert [each.model_dump() for each in answer.changes] == [
        msgspec.structs.asdict(each) for each in record.changes
    ]
    assert (answer.origin is None) == (record.origin is None)
    assert (answer.state == "held", answer.state == "finished") == (record.held, record.finished)


def test_deadline_counts_from_submission() -> None:
    answer = job_answer(RUNNING, UNREAD, progress_answer(JobProgress(RUNNING), NOW))
    assert answer.deadline_s == 1000.0 + 6720


def test_summary_of_an_unread_job_comes_from_its_record() -> None:
    shown = job_summary(RUNNING, UNREAD, None)
    assert (shown.state, shown.why) == UNREAD
    assert (shown.lag, shown.skipped, shown.quarantined, shown.expired) == (None,) * 4
    assert shown.whole
    progress = JobProgress(OVER)
    known = job_summary(OVER, progress.state(NOW), progress.numbers(NOW), 1.5)
    assert (known.state, known.version, known.loss, known.spent_usd) == ("finished", 0, None, 1.5)
    assert (known.skipped, known.expired) == (0, 0)
