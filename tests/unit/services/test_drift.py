"""A stream drifts when its errors rise for good: not by chance, and not when the model learns."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.evaluator.drift import ErrorWatch, Rise, errors_of

SEEDS = range(20)
RECORDS = 250  # records of one evaluation


def errors(rng: np.random.Generator, rate: float, count: int = RECORDS) -> list[float]:
    """Draw errors, 0 or 1, at this rate."""
    return [float(each) for each in rng.random(count) < rate]


def rises(watch: ErrorWatch, rng: np.random.Generator, rates: list[float]) -> list[Rise]:
    found = [watch.feed(errors(rng, rate)) for rate in rates]
    return [rise for rise in found if rise is not None]


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_constant_error_rate_is_no_drift(rate: float) -> None:
    for seed in SEEDS:
        assert rises(ErrorWatch(), np.random.default_rng(seed), [rate] * 40) == []


def test_jump_of_the_error_rate_is_reported_once_and_soon() -> None:
    for seed in SEEDS:
        rng, watch = np.random.default_rng(seed), ErrorWatch()
        assert rises(watch, rng, [0.05] * 16) == []
        (rise,) = rises(watch, rng, [0.9, 0.9])
        assert rise.before < 0.2 < rise.after
        # This error rate becomes the new normal.
        assert rises(watch, rng, [0.9] * 16) == []


def test_small_lasting_rise_of_the_error_rate_is_reported() -> None:
    hits = 0
    for seed in SEEDS:
        rng, watch = np.random.default_rng(seed), ErrorWatch()
        rises(watch, rng, [0.05] * 16)
        hits += len(rises(watch, rng, [0.12] * 8)) >= 1
    assert hits == len(SEEDS)


def test_falling_error_rate_is_no_drift() -> None:
    for seed in SEEDS:
        learning = [0.9 * np.exp(-step / 8) + 0.03 for step in range(60)]
        jump = [0.9] * 8 + [0.1] * 8
        for rates in (learning, jump):
            assert rises(ErrorWatch(), np.random.default_rng(seed), rates) == []


def test_drift_after_learning_is_measured_from_the_learned_error_rate() -> None:
    for seed in SEEDS:
        rng, watch = np.random.default_rng(seed), ErrorWatch()
        rises(watch, rng, [0.9] * 8 + [0.05] * 16)
        (rise,) = rises(watch, rng, [0.4] * 2)
        assert rise.before < 0.3


def test_no_records_are_no_drift() -> None:
    assert ErrorWatch().feed([]) is None


def test_error_is_derived_from_accuracy_or_else_from_loss() -> None:
    assert errors_of({"loss": [9.0, 0.0], "accuracy": [1.0, 0.0]}) == [0.0, 1.0]
    assert errors_of({"loss": [9.0, 0.0], "accuracy": [math.nan, 0.5]}) == [0.5]
    low, zero, high, lost = errors_of({"loss": [-3.0, 0.0, 50.0, float("nan")]})
    assert (low, zero, lost) == (0.0, 0.0, 1.0)
    assert high == pytest.approx(1.0)
    # Probability that a model gives to the true class; the cross-entropy is its -log.
    truth = 0.25
    assert errors_of({"loss": [-float(np.log(truth))]}) == [pytest.approx(1 - truth)]
