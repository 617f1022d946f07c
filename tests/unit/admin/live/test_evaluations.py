"""What evaluators told of a job is shown of versions that count, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.messages import Drifted, Evaluated, ModelId
from services.admin.live.evaluations import TESTS, Evaluations
from services.admin.live.view import JobView
from tests.unit.admin.live.helpers import job, lead, update

if TYPE_CHECKING:
    from common.core.messages import AuditRecord

STREAMS = ("clicks", "views")


def judged(version: int, accuracy: float = 0.5, epoch: int = 0) -> Evaluated:
    return Evaluated(ModelId(epoch, version), float(version), 100, {"accuracy": accuracy})


def predicted(version: int, **by_stream: float) -> Evaluated:
    means = {stream: {"accuracy": accuracy} for stream, accuracy in by_stream.items()}
    return Evaluated(ModelId(0, version), float(version), 0, {}, means)


def test_nothing_told_is_nothing_known() -> None:
    assert Evaluations(STREAMS).latest() is None
    assert Evaluations(STREAMS).curves().version == ()


def test_the_newest_of_the_test_and_of_each_stream_are_told() -> None:
    evaluations = Evaluations(STREAMS)
    evaluations.feed(judged(10, 0.6))
    evaluations.feed(predicted(10, clicks=0.5, views=0.4))
    evaluations.feed(judged(20, 0.7))
    evaluations.feed(predicted(20, clicks=0.6, elsewhere=0.1))
    evaluations.feed(Drifted(ModelId(0, 20), 3.0, "clicks", 0.1, 0.4))
    latest = evaluations.latest()
    assert latest is not None
    assert (latest.version, latest.records, latest.test) == (20, 100, {"accuracy": 0.7})
    assert latest.predicted == 20
    assert latest.prequential == {"clicks": {"accuracy": 0.6}, "views": {"accuracy": 0.4}}
    assert latest.drifts == 1
    curves = evaluations.curves()
    assert (curves.version, curves.test) == ((10, 20), {"accuracy": (0.6, 0.7)})
    assert [(each.stream, each.version) for each in curves.prequential] == [
        ("clicks", (10, 20)),
        ("views", (10,)),
    ]
    assert [(each.stream, each.before, each.after) for each in curves.drifts] == [
        ("clicks", 0.1, 0.4)
    ]


def test_what_two_evaluators_tell_of_a_version_counts_once_and_none_goes_back() -> None:
    evaluations = Evaluations(STREAMS)
    for version in (10, 10, 20, 10, 20):
        evaluations.feed(judged(version))
    assert evaluations.curves().version == (10, 20)


def test_of_many_versions_some_are_kept_and_always_the_newest() -> None:
    evaluations = Evaluations(STREAMS)
    for version in range(3 * TESTS):
        evaluations.feed(judged(version))
        latest = evaluations.latest()
        assert latest is not None
        assert latest.version == version
    assert TESTS // 2 <= len(evaluations.curves().version) <= TESTS


def test_a_view_tells_of_effective_versions_alone() -> None:
    # offset  0      1    2    3           4               5                    6
    # record  Lead   J=1  J=2  of (0, 2)   of (7, 2): none  Lead, base (0, 1)   of (0, 2): late
    view = JobView(job())
    records: list[AuditRecord] = [
        lead(),
        update(0, 1),
        update(0, 2),
        judged(2, 0.8),
        judged(2, 0.1, epoch=7),
    ]
    for offset, record in enumerate(records):
        assert view.feed_update(offset, record, 1.0, 1.0) == (offset != 4)
    shown = view.progress(2.0).evaluation
    assert shown is not None
    assert (shown.version, shown.test) == (2, {"accuracy": 0.8})
    assert view.curves(2.0).evaluation.version == (2,)
    view.feed_update(5, lead(0, ModelId(0, 1), "c2", 5), 1.0, 1.0)
    assert not view.feed_update(6, judged(2), 1.0, 1.0)
    assert view.progress(2.0).evaluation is None
