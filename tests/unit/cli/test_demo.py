"""The pure parts of the demo: its plan, its course, what it prints."""

from __future__ import annotations

import json
from pathlib import Path

from common.core.messages import (
    GENESIS,
    AuditRecord,
    Batch,
    Lead,
    ModelId,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Span
from common.jobs.spec import parse_job
from services.cli.demo.account import Account
from services.cli.demo.course import Course, mean_accuracy, mean_loss
from services.cli.demo.plan import Plan, Preemption
from services.cli.demo.summary import Summary, sparkline, thinned

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "digits.yaml"


def update(version: int, epoch: int = 0, accuracy: float = 0.5, samples: int = 10) -> UpdateApplied:
    batch = Batch(version, WorkerId("w1"), (Span("a", 0, version, version + 1),), samples)
    return UpdateApplied(epoch, version, (batch,), samples, 1.0, {"accuracy": accuracy})


def summary(lost: int = 0, flaws: tuple[str, ...] = ()) -> Summary:
    return Summary(
        job="demo",
        account=Account(100, 100 - lost, 0, 0, 0, lost, 0),
        flaws=flaws,
        updates=1,
        takeovers=0,
        updates_taken_back=0,
        test_accuracy=0.987654,
        test_loss=0.1,
        prequential_accuracy=0.9,
        prequential_accuracy_at_end=0.98,
        samples_per_s=1000.0,
        workers=3,
        preemptions=1,
        pause_after_preemption_s=None,
        longest_pause_s=0.5,
    )


def test_a_preemption_happens_once_and_is_made_good_once() -> None:
    # sent  0 ── 49 │ 50 ──────────────── 100
    # at    0     1 │ 2      6.9 │ 7        9
    #               └ kill       └ bring back
    preemption = Preemption(after=50, away_s=5.0)
    asked = [(0, 0.0), (49, 1.0), (50, 2.0), (60, 3.0), (90, 6.9), (95, 7.0), (100, 9.0)]
    due = [preemption.due(sent, now) for sent, now in asked]
    assert due == [None, None, "kill", None, None, "bring back", None]
    assert preemption.over


def test_the_job_of_a_demo_is_one_that_can_be_submitted() -> None:
    plan = Plan("demo-1", records=100, rate_per_s=10.0, workers=3, seed=7, away_s=1.0)
    spec = plan.job()
    assert spec.name == "demo-1"
    assert spec.streams == ("demo-1-a", "demo-1-b")
    assert spec.seed == 7


def test_the_example_job_can_be_submitted() -> None:
    assert parse_job(EXAMPLE.read_text()).name == "digits"


def test_updates_that_a_takeover_took_back_are_not_in_the_course() -> None:
    course = Course()
    records: list[AuditRecord] = [Lead(-1, GENESIS, "c1"), update(1), update(2), update(3)]
    assert [course.feed(o, r, float(o)) for o, r in enumerate(records)] == [False, True, True, True]
    course.feed(4, Lead(0, ModelId(0, 1), "c2"), 4.0)
    assert not course.feed(5, update(4), 5.0)
    assert course.feed(6, update(2, epoch=4), 6.0)
    assert [(u.epoch, u.version) for u in course.updates] == [(0, 1), (4, 2)]
    assert course.trained == 20
    assert course.longest_pause_s == 3.0


def test_means_are_weighted_by_samples() -> None:
    updates = [update(1, accuracy=1.0, samples=30), update(2, accuracy=0.0, samples=10)]
    assert mean_accuracy(updates) == 0.75
    assert mean_loss(updates) == 1.0
    assert mean_accuracy([]) is None


def test_a_curve_is_drawn_from_bottom_to_top() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"
    assert sparkline([]) == ""
    assert thinned([1.0, 3.0, 5.0], 2) == [1.0, 4.0]


def test_the_summary_names_its_numbers_as_scripts_expect() -> None:
    data = json.loads(json.dumps(summary().as_data()))
    assert data["test_accuracy"] == 0.9877
    assert (data["records_produced"], data["records_trained"]) == (100, 100)
    assert (data["records_lost"], data["records_duplicated"]) == (0, 0)


def test_a_demo_is_sound_only_without_loss_and_flaw() -> None:
    assert summary().sound
    assert not summary(lost=1).sound
    assert not summary(flaws=("gap: a[0]@1:2",)).sound
