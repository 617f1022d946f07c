"""Score counts of several workers add up, and results are right within their bins."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, precision_score, recall_score, roc_auc_score

from common.core.scores import BINS, SLOTS, WINDOW_S, WINDOWED, ScoreWindow, measures
from common.learning.outputs import count_scores
from common.learning.sparse_tasks import SparseLogistic

Array: TypeAlias = npt.NDArray[Any]
TASK = SparseLogistic(features=3, entries=1)


def counted(logits: Array, labels: Array) -> Array:
    found = count_scores(
        TASK, torch.from_numpy(logits), {"label": torch.from_numpy(labels)}, len(labels)
    )
    assert found is not None
    counts: Array = found.numpy()
    return counts


scored = st.lists(
    st.tuples(st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-9, 9, width=32), st.booleans()),
    max_size=60,
).map(lambda pairs: np.array(pairs, np.float32).reshape(-1, 2))


@given(parts=st.lists(scored, max_size=5))
def test_counts_of_parts_add_up_to_those_of_all_records(parts: list[Array]) -> None:
    union = np.concatenate([np.empty((0, 2), np.float32), *parts])
    sums = np.zeros(2 * BINS, np.int64)
    for part in parts:
        sums += counted(part[:, 0], part[:, 1])
    assert np.array_equal(sums, counted(union[:, 0], union[:, 1]))
    assert sums.sum() == len(union)


@given(st.integers(0, 2**32 - 1), st.floats(-3, 3), st.floats(0.1, 6), st.floats(0.02, 0.98))
def test_measures_match_scikit_learn_within_a_bin(
    seed: int, shift: float, spread: float, share: float
) -> None:
    random = np.random.default_rng(seed)
    labels = (random.random(300) < share).astype(np.int64)
    labels[:2] = 0, 1
    logits = (random.normal(shift * labels, spread) - 0.3).astype(np.float32)
    counts = counted(logits, labels)
    found = measures(counts)
    first, second = counts.reshape(2, BINS).astype(float)
    within = (first @ second) / (2 * first.sum() * second.sum())  # pairs that share a bin, halved
    assert found["auc"] == pytest.approx(roc_auc_score(labels, logits), abs=within + 1e-12)
    likelier = logits > 0
    for name, of in (("recall", recall_score), ("precision", precision_score), ("f1", f1_score)):
        assert found.get(name, 0.0) == pytest.approx(of(labels, likelier, zero_division=0))
    assert set(found) <= set(WINDOWED)


def test_calibration_error_is_small_for_true_probabilities_only() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, 100_000).astype(np.float32)
    right = random.random(len(logits)) < 1 / (1 + np.exp(-logits))
    assert measures(counted(logits, right))["calibration_error"] < 0.01
    half = random.random(len(logits)) < 0.5
    wrong = np.abs(1 / (1 + np.exp(-logits)) - 0.5).mean()
    assert measures(counted(logits, half))["calibration_error"] == pytest.approx(wrong, abs=0.01)


def test_missing_class_omits_measures_that_need_it() -> None:
    assert measures(np.zeros(2 * BINS, np.int64)) == {}
    one = measures(counted(np.array([-1.0, -2.0], np.float32), np.array([0, 0])))
    assert set(one) == {"calibration_error"}


def test_score_window_covers_the_last_minute() -> None:
    # A count arrives every 5 s from 0 s on, so each of the last 12 slots has exactly one.
    window, one = ScoreWindow(), counted(np.array([1.0], np.float32), np.array([1]))
    for step in range(40):
        window.add(one, step * WINDOW_S / SLOTS)
        assert window.add(0 * one, step * WINDOW_S / SLOTS)["recall"] == 1.0
    assert window.add(0 * one, 1e4) == {}
    other = counted(np.array([-1.0] * 12, np.float32), np.array([1] * 12))
    for step in range(40):
        window.add(one, 2e4 + step * WINDOW_S / SLOTS)
    assert window.add(other, 2e4 + 39 * WINDOW_S / SLOTS)["recall"] == 0.5


def test_equal_scores_are_no_better_than_chance() -> None:
    found = measures(counted(np.zeros(10, np.float32), np.arange(10) % 2))
    assert (found["auc"], found["recall"], found["f1"]) == (0.5, 0.0, 0.0)
    assert "precision" not in found
