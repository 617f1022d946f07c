"""Age of each stream's oldest record, by the times when it had a machine."""

from __future__ import annotations

import numpy as np

from common.spot.theory.lags import StreamLags


def test_lag_grows_without_a_machine_and_shrinks_with_one() -> None:
    # The stream loses its machine at 10, has one from 50 to 60, and loses it again. At a load of
    # 0.8, each second with a machine reduces the lag by a quarter of a second.
    lags, load = StreamLags(1, 0.0), np.array([0.8])
    waited = [
        lags.at(at_s, np.array([since_s]), load).item()
        for at_s, since_s in ((10, 10), (30, 10), (50, 50), (58, 58), (70, 60), (70, 60))
    ]
    assert waited == [0.0, 20.0, 40.0, 38.0, 47.5, 47.5]


def test_stream_that_never_had_a_machine_lags_since_the_start() -> None:
    lags = StreamLags(2, 100.0)
    since_s = np.array([100.0, 160.0])
    assert lags.at(160.0, since_s, np.full(2, 0.01)).tolist() == [60.0, 0.0]


def test_machine_that_is_too_slow_never_catches_up() -> None:
    lags, since_s = StreamLags(1, 0.0), np.array([0.0])
    lags.at(50.0, since_s, np.array([2.0]))
    lags.at(51.0, np.array([51.0]), np.array([2.0]))
    assert lags.at(500.0, np.array([500.0]), np.array([2.0])).item() == 51.0
