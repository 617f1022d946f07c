"""Results of a run, and intervals over many runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from common.spot.experiments.results import (
    PolicyChange,
    PoolUse,
    RunsSummary,
    SimulatedRun,
    Spread,
    wilson,
)

RUN = SimulatedRun(
    seed=7,
    index=0,
    finished=True,
    runtime_s=100.0,
    deadline_s=110.0,
    updates=10.0,
    on_demand_only_usd=8.0,
    pools=(PoolUse("on-demand", 3.0, 100.0, 2, 0), PoolUse("spot", 1.0, 300.0, 5, 4)),
    history=(PolicyChange(0.0, "first plan", 3, 1), PolicyChange(50.0, "price", 2, 2)),
)


def test_run_totals_add_up_its_pools() -> None:
    assert (RUN.cost_usd, RUN.cost_ratio, RUN.spot_share) == (4.0, 0.5, 0.75)
    assert (RUN.launches, RUN.preemptions, RUN.changes) == (7, 4, 1)


def test_deadline_is_met_by_finishing_exactly_on_it() -> None:
    assert replace(RUN, runtime_s=110.0).met
    assert not replace(RUN, runtime_s=110.1).met
    assert not replace(RUN, finished=False).met


def test_run_without_machines_has_a_spot_share_of_zero() -> None:
    assert replace(RUN, pools=(PoolUse("on-demand", 0.0, 0.0, 0, 0),)).spot_share == 0


def test_interval_of_a_mean_has_its_stated_coverage() -> None:
    rng = np.random.default_rng(1)
    spreads = [Spread.of(rng.normal(5.0, 2.0, 6)) for _ in range(4000)]
    held = sum(one.low < 5.0 < one.high for one in spreads if one.low and one.high)
    # 95 % of 4,000, with a standard deviation of 14
    assert abs(held - 3800) < 5 * 14


def test_single_value_has_no_spread() -> None:
    assert Spread.of(np.array([3.0])) == Spread(3.0, None, None, None)


def test_wilson_bounds_are_where_the_normal_test_just_accepts() -> None:
    for successes, trials in ((3, 12), (171, 200), (199, 200)):
        for share in wilson(successes, trials):
            z = (successes / trials - share) / np.sqrt(share * (1 - share) / trials)
            assert abs(z) == pytest.approx(1.959964, abs=1e-5)


def test_wilson_interval_stays_between_0_and_1() -> None:
    assert wilson(0, 12)[0] == 0
    assert wilson(12, 12)[1] == 1
    assert 0.7 < wilson(12, 12)[0] < 1


def test_summary_is_serializable_as_json() -> None:
    late = replace(RUN, index=1, runtime_s=120.0, history=RUN.history[:1])
    summary = RunsSummary.of([RUN, late])
    said = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert said["runs"] == said["finished"] == 2
    assert said["met"]["share"] == 0.5
    assert said["runtime_s"]["mean"] == 110.0
    assert said["cost_ratio"] == {"mean": 0.5, "std": 0.0, "low": 0.5, "high": 0.5}
    assert said["changes"] == 0.5
    assert json.loads(json.dumps(RUN.as_dict()))["pools"]["spot"]["preemptions"] == 4
