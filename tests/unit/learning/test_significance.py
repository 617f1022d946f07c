"""The workers' view of the weights: its error is bounded, and all changes give exact bits."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.vectors import write_to
from common.learning.significance import WHOLE_FROM, Compression, KnownWeights

if TYPE_CHECKING:
    from common.core.messages import Vector

PARAMETERS, BUFFERS = 200, 3


def steps(seed: int, count: int, scale: float) -> list[Vector]:
    """Return weights of consecutive versions, with steps of very different sizes."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=PARAMETERS + BUFFERS)
    weights[random.random(len(weights)) < 0.3] = 0
    found = [weights.astype(np.float32)]
    for _ in range(count):
        size = scale * 10.0 ** random.uniform(-4, 0, len(weights))
        weights = weights + size * random.normal(size=len(weights))
        found.append(weights.astype(np.float32))
    return found


compressions = st.one_of(
    st.floats(0.01, 10).map(Compression),
    st.floats(0.001, 1).map(lambda share: Compression(changes=share)),
)


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 10), compressions)
def test_receiver_of_all_changes_has_the_bits_of_the_view(
    seed: int, scale: float, compression: Compression
) -> None:
    first, *later = steps(seed, 6, scale)
    view = KnownWeights(first, PARAMETERS, compression)
    known = first.copy()
    for version, weights in enumerate(later, 1):
        changes = view.follow(weights, version)
        if changes is None:
            known = view.weights.copy()
            assert known.tobytes() == weights.tobytes()
        else:
            assert len(changes.blocks) <= WHOLE_FROM * PARAMETERS + BUFFERS
            write_to(known, changes)
        assert known.tobytes() == view.weights.tobytes()
        assert known[PARAMETERS:].tobytes() == weights[PARAMETERS:].tobytes()


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 10), st.floats(0.01, 10))
def test_view_error_of_each_weight_is_bounded(seed: int, scale: float, significance: float) -> None:
    first, *later = steps(seed, 6, scale)
    view = KnownWeights(first, PARAMETERS, Compression(significance))
    for version, weights in enumerate(later, 1):
        view.follow(weights, version)
        own = weights[:PARAMETERS].astype(np.float64)
        floor = sqrt((own**2).sum() / max(np.count_nonzero(own), 1))
        off = np.abs(own - view.weights[:PARAMETERS])
        allowed = significance / sqrt(version) * np.maximum(np.abs(own), floor)
        assert (off <= allowed * (1 + 1e-5) + 1e-12).all()


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 10), st.floats(0, 10))
def test_changes_equal_the_definition_in_single_precision(
    seed: int, scale: float, significance: float
) -> None:
    first, weights = steps(seed, 1, scale)
    view = KnownWeights(first, PARAMETERS, Compression(significance))
    own, known = weights[:PARAMETERS], first[:PARAMETERS]
    floor = sqrt(np.dot(own, own) / max(np.count_nonzero(own), 1))
    wanted = np.abs(own - known) > np.maximum(np.abs(own), floor) * significance
    with patch("common.learning.significance._CHUNK", 64):
        changes = view.follow(weights, 1)
    if changes is None:
        assert np.count_nonzero(wanted) > WHOLE_FROM * PARAMETERS
    else:
        assert changes.blocks[:-BUFFERS].tolist() == np.flatnonzero(wanted).tolist()


@given(st.integers(0, 2**32 - 1), st.floats(0.01, WHOLE_FROM))
def test_share_setting_reports_the_largest_changes(seed: int, share: float) -> None:
    first, weights = steps(seed, 1, 1.0)
    view = KnownWeights(first, PARAMETERS, Compression(changes=share))
    changes = view.follow(weights, 1)
    most = int(np.ceil(share * PARAMETERS))
    if changes is None:
        assert most > WHOLE_FROM * PARAMETERS
        return
    chosen = changes.blocks[changes.blocks < PARAMETERS]
    assert len(chosen) == most
    off = np.abs(weights - first)[:PARAMETERS]
    assert off[chosen].min() >= np.delete(off, chosen).max(initial=0)


def test_large_relative_change_of_a_tiny_weight_is_not_reported() -> None:
    first = np.array([10.0, 1e-6, 0.0, 0.0], np.float32)
    view = KnownWeights(first, 4, Compression(0.5))
    changes = view.follow(np.array([10.0, 2e-6, 3e-6, 0.0], np.float32), 1)
    assert changes is not None
    assert changes.blocks.tolist() == []
    changes = view.follow(np.array([10.0, 2e-6, 6.0, 0.0], np.float32), 1)
    assert changes is not None
    assert (changes.blocks.tolist(), changes.values.tolist()) == ([2], [[6.0]])


def test_weight_that_changes_back_is_not_reported() -> None:
    first = np.array([1.0, 1.0, 1.0], np.float32)
    view = KnownWeights(first, 3, Compression(0.1))
    assert view.follow(first * np.float32(1.05), 1) is not None
    changes = view.follow(first, 2)
    assert changes is not None
    assert changes.blocks.tolist() == []


def test_significance_shrinks_with_the_root_of_the_version() -> None:
    first = np.ones(10, np.float32)
    moved = np.array([*[1.0] * 9, 1.2], np.float32)
    for version, expected in ((1, []), (5, []), (10, [9])):
        changes = KnownWeights(first, 10, Compression(0.5)).follow(moved, version)
        assert changes is not None
        assert changes.blocks.tolist() == pytest.approx(expected)
