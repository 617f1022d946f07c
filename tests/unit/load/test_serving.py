"""Staleness of an answer, as the benchmark of predictions counts it."""

from __future__ import annotations

import pytest

from common.core.messages import ModelId
from load.predictions.trained import Seen, stale_s

#  at   0       1       2       3  (Redis is empty; a new leader starts from version 2)  4       5
SEEN = [
    Seen(float(at), ModelId(*made))
    for at, made in enumerate([(7, 2), (7, 4), (7, 6), (7, 8), (7, 2), (9, 3)])
]


@pytest.mark.parametrize(
    ("made", "at", "expected"),
    [
        ((7, 8), 3.5, 0.0),  # the newest
        ((7, 6), 3.5, 0.5),
        ((7, 4), 3.5, 1.5),
        # No poll saw a snapshot of version 5. It is stale since a poll saw version 6.
        ((7, 5), 3.5, 1.5),
        # At 4, a snapshot of the new leader replaced it, although its version is lower.
        ((7, 8), 4.25, 0.25),
        # The new leader starts from version 2, so version 2 is current again.
        ((7, 2), 4.25, 0.0),
        ((7, 2), 5.5, 0.5),
        # The server read this version before a poll saw it.
        ((9, 3), 4.9, 0.0),
        ((9, 3), 9.0, 0.0),
    ],
)
def test_answer_is_stale_since_the_next_snapshot(
    made: tuple[int, int], at: float, expected: float
) -> None:
    assert stale_s(SEEN, ModelId(*made), at) == pytest.approx(expected)
