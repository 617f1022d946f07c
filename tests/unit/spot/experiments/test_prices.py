"""Prices of many runs: each run reads the trace from its own start."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.spot.experiments.prices import TracePrices, prices_of
from common.spot.traces.spec import TraceSpec
from common.spot.traces.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

# 0       10      30      40 s
# | 0.1    | 0.3   | 0.1   | 0.1 ...
TRACE = Trace(np.array([0.0, 10, 30]), np.array([0.1, 0.3, 0.1]), 40.0)


def test_constant_price_never_changes(tmp_path: Path) -> None:
    prices = prices_of(0.158, tmp_path, 3, np.random.default_rng(1))
    assert prices.at(5).tolist() == [0.158] * 3
    assert not prices.changed(0, 1e9).any()


def test_each_run_reads_the_trace_from_its_start() -> None:
    prices = TracePrices(TRACE, np.array([0.0, 25, 35]))
    assert prices.at(0).tolist() == [0.1, 0.3, 0.1]
    assert prices.at(6).tolist() == [0.1, 0.1, 0.1]
    assert prices.at(15).tolist() == [0.3, 0.1, 0.3]


def test_price_change_is_reported_once() -> None:
    prices = TracePrices(TRACE, np.array([0.0, 25, 35]))
    assert prices.changed(0, 6).tolist() == [False, True, False]
    assert prices.changed(6, 15).tolist() == [True, False, True]
    assert prices.changed(15, 18).tolist() == [False, False, False]
    # The trace begins with the price at which it ends, so its repetition is no change. A price that
    # rose and fell again is none, either.
    assert prices.changed(38, 42).tolist() == [False, False, False]
    assert prices.changed(0, 35).tolist()[0] is False


def test_returned_prices_are_a_copy() -> None:
    prices = TracePrices(TRACE, np.zeros(2))
    prices.at(1)[:] = 7
    assert prices.at(1).tolist() == [0.1, 0.1]


def test_runs_start_at_random_places_of_a_sped_up_trace(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("seconds,usd\n0,0.1\n1000,0.3\n")
    spec = TraceSpec(file="p.csv", speed=100)
    prices = prices_of(spec, tmp_path, 4000, np.random.default_rng(2))
    first, later = prices.at(0), prices.at(10)
    # At this speed, each price holds for 10 s of a cycle of 20 s. So each run has the other price
    # 10 s later.
    assert (first == 0.1).mean() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(4000))
    assert (first != later).all()
    again = prices_of(spec, tmp_path, 4000, np.random.default_rng(2))
    np.testing.assert_array_equal(again.at(0), first)
    fixed = prices_of(
        spec.model_copy(update={"start_s": 400.0}), tmp_path, 2, np.random.default_rng(2)
    )
    assert fixed.at(5.9).tolist() == [0.1, 0.1]
    assert fixed.at(6.1).tolist() == [0.3, 0.3]
