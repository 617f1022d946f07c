"""A tracker derives the same points from the same records in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from common.core.messages import (
    GENESIS,
    AuditRecord,
    Batch,
    Drifted,
    Evaluated,
    Lead,
    ModelId,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Span
from common.tracking.port import Metric
from services.evaluator.tracked_metrics import TrackedMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

E1, E2 = 1, 9  # epochs


def lead(epoch: int, after: int = -1, base: ModelId = GENESIS) -> Lead:
    return Lead(after, base, f"c{epoch}", epoch=epoch)


def update(version: int, loss: float, samples: int = 10, epoch: int = E1) -> UpdateApplied:
    span = Span("clicks", 0, 10 * version, 10 * version + 10)
    batch = Batch(version, WorkerId("w1"), (span,), samples)
    metrics = {"accuracy": 1 - loss, "auc": loss}
    return UpdateApplied(epoch, version, (batch,), samples, loss, metrics)


def points(records: Sequence[AuditRecord | None], every_updates: int = 2) -> list[Metric]:
    """Return the points of records that were written a second apart."""
    fold = TrackedMetrics(every_updates)
    return [
        point
        for offset, record in enumerate(records)
        for point in fold.feed(offset, 100.0 + offset, record)
    ]


def test_update_metrics_are_averaged_over_the_records_of_several_updates() -> None:
    found = points([lead(E1), update(1, 1.0, 10), update(2, 0.5, 30), update(3, 0.25)])
    assert found == [
        Metric("train/loss", 0.625, 102.0, 2),
        Metric("train/accuracy", 0.375, 102.0, 2),
        # The score already covers the last minute, so the newest value counts.
        Metric("train/auc", 0.5, 102.0, 2),
    ]


def test_metric_is_averaged_over_its_records_and_never_replaces_the_loss() -> None:
    first = replace(update(1, 1.0), metrics={"half": 4.0, "loss": 7.0}, measured={"half": 2})
    second = replace(update(2, 3.0), metrics={})
    third = replace(update(3, 2.0, 8), metrics={"half": 1.0}, measured={"half": 1})
    found = points([lead(E1), first, second, third], every_updates=3)
    means = {each.name: each.value for each in found}
    assert means == {"train/loss": pytest.approx(2.0), "train/half": 3.0}


def test_updates_of_a_deposed_leader_give_no_points() -> None:
    zombie = update(2, 7.0, epoch=E1)
    found = points(
        [lead(E1), update(1, 1.0), lead(E2, E1, ModelId(E1, 1)), zombie, update(2, 0.5, epoch=E2)]
    )
    assert [(each.name, each.value) for each in found if each.name == "train/loss"] == [
        ("train/loss", 0.5)
    ]


def test_reverted_versions_are_reported_again_after_a_takeover() -> None:
    # version  1   2   3   4 | taken back to 2 |  3   4
    first: list[AuditRecord] = [lead(E1), *(update(n, 1.0) for n in (1, 2, 3, 4))]
    again: list[AuditRecord] = [
        lead(E2, E1, ModelId(E1, 2)),
        update(3, 0.5, epoch=E2),
        update(4, 0.5, epoch=E2),
    ]
    losses = [each for each in points([*first, *again]) if each.name == "train/loss"]
    assert [(each.step, each.value, each.at_s) for each in losses] == [
        (2, 1.0, 102.0),
        (4, 1.0, 104.0),
        (4, 0.5, 107.0),
    ]


def test_evaluations_and_drifts_are_reported_at_their_version() -> None:
    version = ModelId(E1, 1)
    evaluated = Evaluated(version, 55.5, 60, {"loss": 0.5}, {"left": {"loss": 0.25}})
    taken_back = Evaluated(ModelId(E2, 1), 56.0, 60, {"loss": 9.0})
    drifted = Drifted(version, 57.5, "left", 0.1, 0.4)
    found = points([lead(E1), update(1, 1.0), evaluated, taken_back, drifted, None])
    assert found == [
        Metric("test/loss", 0.5, 55.5, 1),
        Metric("prequential/left/loss", 0.25, 55.5, 1),
        Metric("drift/left", 0.4, 57.5, 1),
    ]


def test_non_finite_metrics_are_left_out_and_names_become_valid() -> None:
    metrics = {"loss": float("inf"), "my:metric/é %": 0.5}
    evaluated = Evaluated(ModelId(E1, 1), 55.5, 60, metrics)
    [found] = points([lead(E1), update(1, 1.0), evaluated])
    assert (found.name, found.value) == ("test/my_metric_é__", 0.5)


def test_remaining_metrics_at_the_end_of_a_job_can_be_read_repeatedly() -> None:
    fold = TrackedMetrics(2)
    assert fold.rest() == []
    records: list[AuditRecord] = [lead(E1), *(update(n, 1.0 / n) for n in (1, 2, 3))]
    for offset, record in enumerate(records):
        fold.feed(offset, 100.0 + offset, record)
    [loss, *_] = fold.rest()
    assert loss == Metric("train/loss", 1.0 / 3, 103.0, 3)
    assert fold.rest()[0] == loss
