"""Evaluations of a job are shown for versions that count, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.api.jobs import progress_answer
from common.core.messages import Drifted, Evaluated, ModelId
from common.jobs.progress import KEPT_TESTS, JobProgress
from common.spot.provisioning.fleet_ledger import FleetLedger
from services.admin.live.answers import curves_answer
from tests.unit.admin.live.helpers import job, lead, update

if TYPE_CHECKING:
    from common.api.answers import EvaluationAnswer, EvaluationCurves
    from common.core.messages import AuditRecord


def evaluated(version: int, accuracy: float = 0.5, epoch: int = 0) -> Evaluated:
    return Evaluated(ModelId(epoch, version), float(version), 100, {"accuracy": accuracy})


def predicted(version: int, **by_stream: float) -> Evaluated:
    means = {stream: {"accuracy": accuracy} for stream, accuracy in by_stream.items()}
    return Evaluated(ModelId(0, version), float(version), 0, {}, means)


@pytest.fixture
def view() -> JobProgress:
    return JobProgress(job())


def latest(view: JobProgress) -> EvaluationAnswer:
    found = progress_answer(view, 1.0).evaluation
    assert found is not None
    return found


def curves(view: JobProgress) -> EvaluationCurves:
    return curves_answer(view, FleetLedger(), 1.0).evaluation


def test_view_without_evaluations_shows_none(view: JobProgress) -> None:
    assert progress_answer(view, 1.0).evaluation is None
    assert curves(view).version == ()


def test_newest_results_of_the_test_set_and_each_stream_are_shown(view: JobProgress) -> None:
    view.evaluations.feed(evaluated(10, 0.6))
    view.evaluations.feed(predicted(10, clicks=0.5, views=0.4))
    view.evaluations.feed(evaluated(20, 0.7))
    view.evaluations.feed(predicted(20, clicks=0.6, elsewhere=0.1))
    view.evaluations.feed(Drifted(ModelId(0, 20), 3.0, "clicks", 0.1, 0.4))
    reported = latest(view)
    assert (reported.version, reported.records, reported.test) == (20, 100, {"accuracy": 0.7})
    assert reported.predicted == 20
    assert reported.prequential == {"clicks": {"accuracy": 0.6}, "views": {"accuracy": 0.4}}
    assert reported.drifts == 1
    shown = curves(view)
    assert (shown.version, shown.test) == ((10, 20), {"accuracy": (0.6, 0.7)})
    assert [(each.stream, each.version) for each in shown.prequential] == [
        ("clicks", (10, 20)),
        ("views", (10,)),
    ]
    assert [(each.stream, each.before, each.after) for each in shown.drifts] == [
        ("clicks", 0.1, 0.4)
    ]


def test_duplicate_and_older_evaluations_are_ignored(
    view: JobProgress,
) -> None:
    for version in (10, 10, 20, 10, 20):
        view.evaluations.feed(evaluated(version))
    assert curves(view).version == (10, 20)


def test_number_of_kept_evaluations_is_limited_and_includes_the_newest(view: JobProgress) -> None:
    for version in range(3 * KEPT_TESTS):
        view.evaluations.feed(evaluated(version))
        assert view.evaluations.tests[-1].model.version == version
    assert KEPT_TESTS // 2 <= len(curves(view).version) <= KEPT_TESTS


def test_only_evaluations_of_effective_versions_are_shown(view: JobProgress) -> None:
    # offset  0      1    2    3           4               5                    6
    # record  Lead   J=1  J=2  of (0, 2)   of (7, 2)        Lead, base (0, 1)   of (0, 2)
    # shown                    until 5     no such version                      no, rolled back
    records: list[AuditRecord] = [
        lead(),
        update(0, 1),
        update(0, 2),
        evaluated(2, 0.8),
        evaluated(2, 0.1, epoch=7),
    ]
    for offset, record in enumerate(records):
        assert view.feed_update(offset, record, 1.0, 1.0) == (offset != 4)
    shown = progress_answer(view, 2.0).evaluation
    assert shown is not None
    assert (shown.version, shown.test) == (2, {"accuracy": 0.8})
    assert curves_answer(view, FleetLedger(), 2.0).evaluation.version == (2,)
    view.feed_update(5, lead(0, ModelId(0, 1), "c2", 5), 1.0, 1.0)
    assert not view.feed_update(6, evaluated(2), 1.0, 1.0)
    assert progress_answer(view, 2.0).evaluation is None
