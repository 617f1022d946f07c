"""A backlog under bids: payments, refunds, and a run's knowledge of the future."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.errors import UserError
from common.spot.experiments.experiment import simulate
from common.spot.experiments.prices import ConstantPrices, TracePrices
from common.spot.experiments.spec import Experiment
from common.spot.planning.compare import with_policies
from common.spot.theory.errors import ParameterError
from common.spot.traces.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

HOUR_S = 3600.0
# Five updates a second on four machines: theta_0 is two hours.
JOB: dict[str, Any] = {
    "workers": 4,
    "arrivals": {"process": "backlog"},
    "on_preemption": "reassign",
    "group_size": 4,
    "batch_size": 8,
    "updates": 36_000,
    "deadline_factor": 2,
    "gradient": {"mean_s": 0.195},
    "on_demand": {"usd_per_hour": 0.2},
    "spot": [{"usd_per_hour": 0.05, "billing": "ec2-2017"}],
    "policy": {"name": "bidbrain"},
}


def a_job(**changes: Any) -> Experiment:  # noqa: ANN401 -- fields of a model
    return Experiment.model_validate(JOB | changes)


def recorded(path: Path, prices: list[float], step_s: float = 300.0) -> dict[str, str]:
    rows = [f"{step_s * at:g},{usd}" for at, usd in enumerate(prices)]
    path.write_text("\n".join(["seconds,usd", *rows]) + "\n")
    return {"file": path.name}


def test_backlog_at_a_constant_price_is_paid_without_evictions(
    tmp_path: Path,
) -> None:
    one, other = simulate(a_job(), tmp_path, 2, 1)
    assert one.runtime_s == other.runtime_s == pytest.approx(2 * HOUR_S)
    assert one.cost_usd == pytest.approx(2 * 4 * 0.05)
    assert one.cost_ratio == pytest.approx(0.05 / 0.2)
    assert (one.met, one.preemptions, one.launches, one.spot_share) == (True, 0, 4, 1.0)


def test_hour_with_an_eviction_is_refunded_and_work_pauses(
    tmp_path: Path,
) -> None:
    # price 0.05         0.9        0.05       repeats every two hours, for two weeks
    #       0    3600    5400       5700    7230 s
    # spot  |paid|refunded|          |an hour paid|
    # alone               |30 s nothing, 300 s paid|
    lap = [0.05] * 18 + [0.9] + [0.05] * 5
    spec = recorded(tmp_path / "prices.csv", lap * 168) | {"start_s": 0.0}
    spot = [{"usd_per_hour": spec, "billing": "ec2-2017"}]
    (run,) = simulate(a_job(spot=spot), tmp_path, 1, 1)
    alone, bids = run.pools
    assert run.runtime_s == pytest.approx(2 * HOUR_S + 30)
    assert (bids.launches, bids.preemptions, alone.launches) == (8, 4, 4)
    assert bids.machine_s == pytest.approx(4 * (5400 + 1530))
    assert bids.usd == pytest.approx(4 * 0.05 * 2)
    assert alone.usd == pytest.approx(4 * 0.2 * 300 / HOUR_S)


def test_pool_that_refuses_machines_is_skipped_until_the_next_review(tmp_path: Path) -> None:
    # No spot machine is available from the second hour on.
    (tmp_path / "there.csv").write_text("seconds,n\n0,1\n3600,0\n90000,0\n")
    there = {"file": "there.csv", "start_s": 0.0}
    pool = {"usd_per_hour": 0.05, "availability": there, "together": True, "billing": "ec2-2017"}
    (run,) = simulate(a_job(spot=[pool]), tmp_path, 1, 1)
    alone, bids = run.pools
    assert (bids.launches, bids.preemptions) == (4, 4)
    assert run.met
    # On-demand machines replace them at once. Another request to the pool takes no time.
    assert run.runtime_s == pytest.approx(2 * HOUR_S + 30)
    assert alone.machine_s == pytest.approx(4 * (HOUR_S + 30))


def test_bids_are_reproducible_and_comparable_with_other_policies(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(3)
    spec = recorded(tmp_path / "prices.csv", rng.uniform(0.02, 0.3, 4000).round(4).tolist())
    job = a_job(spot=[{"usd_per_hour": spec, "billing": "ec2-2017"}])
    runs = simulate(job, tmp_path, 2, 5)
    assert simulate(job, tmp_path, 2, 5) == runs
    alone = with_policies(job, ["on-demand"])["on-demand"]
    (on_demand,) = simulate(alone, tmp_path, 1, 5)
    # All records exist at the start, so nothing waits for arrivals.
    assert on_demand.runtime_s == pytest.approx(2 * HOUR_S, abs=5.0)
    assert on_demand.cost_ratio == pytest.approx(1.0, abs=0.01)
    assert runs[0].cost_ratio < 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"arrivals": {}, "rates": 10}, "cannot make a live stream faster"),
        ({"on_preemption": "hold"}, "needs `on_preemption: reassign`"),
        ({"rates": 10}, "rates: must not be given for a backlog"),
        ({"arrivals": {}}, "rates: must be given, unless arrivals are"),
    ],
    ids=["live stream", "hold", "rates of a backlog", "no rates"],
)
def test_bidding_job_that_is_not_a_backlog_is_rejected(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        a_job(**changes)


def test_run_knows_only_prices_from_before_its_start(tmp_path: Path) -> None:
    trace = Trace(np.array([0.0, 100.0, 200.0, 300.0]), np.array([1.0, 2.0, 3.0, 4.0]), 400.0)
    prices = TracePrices(trace, np.array([250.0, 0.0]))
    # The run begins at 250 s of a trace that repeats every 400 s, and uses the next 100 s. The
    # other 300 s are its past: from 350 s over the end of the trace to 250 s.
    times_s, usd_per_hour, until_s = prices.past(0, ahead_s=100.0, most_s=1e9)
    assert (list(times_s), list(usd_per_hour)) == ([0.0, 50.0, 150.0, 250.0], [4.0, 1.0, 2.0, 3.0])
    assert until_s == 300.0
    assert prices.past(1, ahead_s=0.0, most_s=150.0) == ([0.0, 50.0], [3.0, 4.0], 150.0)
    assert ConstantPrices(0.3, 2).past(1, 100.0, 50.0) == ((0.0,), (0.3,), 50.0)
    with pytest.raises(ParameterError, match="must be longer than a run"):
        prices.past(0, ahead_s=400.0, most_s=1e9)
    spot = [{"usd_per_hour": recorded(tmp_path / "short.csv", [0.1, 0.2]), "billing": "ec2-2017"}]
    with pytest.raises(UserError, match=r"must be longer than a run \(14400 s\)"):
        simulate(a_job(spot=spot), tmp_path, 1, 1)
