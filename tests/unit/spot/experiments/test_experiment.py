"""Experiments in both modes agree with each other, with the theory, and with their file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.config.policy_names import STREAM_POLICIES
from common.errors import UserError
from common.spot.experiments.draws import draws_of
from common.spot.experiments.experiment import (
    simulate,
)
from common.spot.experiments.results import RunsSummary, Throughput
from common.spot.experiments.spec import Experiment
from common.spot.theory.provisioning import plan
from common.spot.theory.work import Work, market

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {  # theta_0 is 120 s
    "workers": 12,
    "rates": 40,
    "group_size": 5,
    "batch_size": 16,
    "updates": 720,
    "deadline_factor": 1.1,
    "on_demand": {"usd_per_hour": 0.286},
    "spot": [{"usd_per_hour": 0.158, "availability": 0.9, "cycle_s": 60}],
}


def an_experiment(**changes: Any) -> Experiment:  # noqa: ANN401 -- fields of a model
    return Experiment.model_validate(SMALL | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rates": {"low": 1, "high": 80}},
        {"while_preempted": "keep"},
        {"policy": {"name": "pools"}},
        {"on_preemption": "reassign", "policy": {"name": "pools"}},
    ],
    ids=["hold", "heterogeneous", "keep", "pools", "moving"],
)
def test_analytic_and_protocol_modes_agree(changes: dict[str, Any], tmp_path: Path) -> None:
    for seed in range(2):
        (alone,) = simulate(an_experiment(**changes), tmp_path, 1, seed)
        (whole,) = simulate(an_experiment(mode="protocol", **changes), tmp_path, 1, seed)

        assert whole.finished
        # Rates, prices and preemptions are the same, records differ. A takeover takes 3 s.
        assert whole.runtime_s == pytest.approx(alone.runtime_s, abs=4.0)
        assert whole.cost_usd == pytest.approx(alone.cost_usd, rel=0.04)


def test_static_split_costs_on_average_what_equation_16_says(tmp_path: Path) -> None:
    experiment = an_experiment(updates=7200, spot=[SMALL["spot"][0] | {"cycle_s": 100}])
    work = Work(np.full(12, 40.0), 5, 16, 7200, 1320.0)
    expected = plan(work, market(0.286, 0.158, 0.9))

    summary = RunsSummary.of(simulate(experiment, tmp_path, 150, 3))

    assert summary.cost_usd.mean == pytest.approx(expected.expected_cost_usd, rel=0.01)
    assert summary.runtime_s.mean == pytest.approx(expected.expected_runtime_s, rel=0.01)


def test_on_demand_machines_alone_take_theta_0(tmp_path: Path) -> None:
    runs = simulate(an_experiment(policy={"name": "on-demand"}), tmp_path, 20, 1)

    assert {run.preemptions for run in runs} == {0}
    assert [run.runtime_s for run in runs] == pytest.approx([120.0] * 20, abs=2.5)
    assert [run.cost_ratio for run in runs] == pytest.approx([1.0] * 20, abs=0.02)


def test_all_policies_get_the_same_drawn_rates(tmp_path: Path) -> None:
    rates = {
        name: draws_of(
            an_experiment(
                rates={"low": 1, "high": 80}, policy={"name": name}, on_preemption="reassign"
            ),
            tmp_path,
            4,
            7,
        ).givens.rates_per_s
        for name in STREAM_POLICIES
    }

    for other in rates.values():
        np.testing.assert_array_equal(other, rates["static"])


def test_runs_are_reproducible_by_seed(tmp_path: Path) -> None:
    for mode in ("analytic", "protocol"):
        experiment = an_experiment(mode=mode, updates=100)
        first, again, other = (simulate(experiment, tmp_path, 2, seed) for seed in (5, 5, 9))

        assert [run.as_dict() for run in first] == [run.as_dict() for run in again]
        assert [run.runtime_s for run in first] != [run.runtime_s for run in other]


def test_progress_is_reported_from_start_to_end(tmp_path: Path) -> None:
    for mode in ("analytic", "protocol"):
        shares = list[float]()
        simulate(an_experiment(mode=mode, updates=2000), tmp_path, 2, 0, shares.append)

        assert shares == sorted(shares)
        assert 0 <= shares[0] < 0.5 < shares[-1] <= 1


def test_trace_arrivals_take_equally_long_in_both_modes(tmp_path: Path) -> None:
    (tmp_path / "day.csv").write_text("seconds,value\n0,1\n30,3\n60,0.5\n90,1\n")
    trace = {"file": "day.csv", "start_s": 10}
    arrivals = {"process": "trace", "trace": trace}
    (alone,) = simulate(an_experiment(arrivals=arrivals), tmp_path, 1, 0)
    (whole,) = simulate(an_experiment(arrivals=arrivals, mode="protocol"), tmp_path, 1, 0)

    assert whole.runtime_s == pytest.approx(alone.runtime_s, rel=0.1)


def test_preempted_machines_learn_as_well_as_others(
    tmp_path: Path,
) -> None:
    learning = {"hidden": [], "learning_rate": 0.01, "evaluate_every": 40}
    curves = []
    for availability in (1.0, 0.8):
        experiment = an_experiment(
            mode="protocol",
            learning=learning,
            updates=120,
            spot=[{"usd_per_hour": 0.1, "availability": availability, "cycle_s": 20}],
            policy={"name": "static", "spot": 12},
        )
        (run,) = simulate(experiment, tmp_path, 1, 0)
        assert run.finished
        curves.append(run.curve)

    for curve in curves:
        assert [point.version for point in curve] == [0, 40, 80, 120]
        assert curve[0].accuracy < 0.3
        assert curve[-1].accuracy > 0.85
        assert curve[-1].loss < curve[0].loss
    assert curves[1][-1].at_s > curves[0][-1].at_s


# One of eight workers is slow, and records arrive much faster than workers can compute.
SLOW_ONE: dict[str, Any] = {
    "workers": 8,
    "rates": 5000,
    "group_size": 8,
    "updates": 100,
    "deadline_s": 100,
    "deadline_factor": None,
    "gradient": {"mean_s": 0.05, "variation": 0.2},
    "policy": {"name": "on-demand"},
    "mode": "protocol",
    "speeds": [1, 1, 1, 1, 1, 1, 1, 0.25],
}


def throughput(folder: Path, **changes: Any) -> Throughput:  # noqa: ANN401 -- fields of a model
    (run,) = simulate(an_experiment(**SLOW_ONE, **changes), folder, 1, 0)
    assert run.throughput is not None
    return run.throughput


def test_stale_mode_has_more_batches_per_second_than_synchronous(tmp_path: Path) -> None:
    stale = {"mode": "stale", "staleness": 1}
    synchronous = throughput(tmp_path)
    faster = throughput(tmp_path, synchronisation=stale)

    assert (synchronous.mean_staleness, synchronous.largest_staleness) == (0, 0)
    assert faster.largest_staleness == 1
    assert faster.batches_per_s > 1.2 * synchronous.batches_per_s
    # The slow worker computes least in both modes.
    for found in (synchronous, faster):
        assert found.shares.index(min(found.shares)) == 7
        assert sum(found.shares) == pytest.approx(1)


def test_shared_link_limits_the_throughput(tmp_path: Path) -> None:
    alone = {"mode": "asynchronous", "staleness": 32}
    free, full = (throughput(tmp_path, link_s=s, synchronisation=alone) for s in (0.0, 0.05))

    assert full.batches_per_s < free.batches_per_s / 1.5
    assert full.batches_per_s <= 8 / (2 * 0.05)  # two messages for eight batches


def test_shared_link_slows_small_groups_more_than_large_ones(tmp_path: Path) -> None:
    rare, often = (
        simulate(
            an_experiment(
                **SLOW_ONE | {"group_size": size, "updates": 800 // size},
                link_s=0.01,
                synchronisation={"mode": "asynchronous", "staleness": 32},
            ),
            tmp_path,
            1,
            0,
        )[0].throughput
        for size in (8, 1)
    )

    assert rare is not None
    assert often is not None
    assert rare.batches_per_s > 1.5 * often.batches_per_s


def test_every_synchronisation_mode_learns(tmp_path: Path) -> None:
    learning = {"hidden": [], "optimizer": "sgd", "learning_rate": 0.5, "evaluate_every": 50}
    for mode in (
        {"mode": "stale", "staleness": 2},
        {"mode": "asynchronous", "damped": True},
        {"mode": "averaging", "local_rate": 0.1},
    ):
        experiment = an_experiment(**SLOW_ONE, learning=learning, synchronisation=mode)
        (run,) = simulate(experiment, tmp_path, 1, 0)
        assert run.finished
        assert [point.version for point in run.curve] == [0, 50, 100]
        assert run.curve[-1].accuracy > 0.8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("workers: 4", "group_size: is missing"),
        ("workers: 0", "workers: must be at least 1"),
        ("deadlin_s: 5", 'unknown field "deadlin_s" (did you mean "deadline_s"?)'),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "line "),
    ],
)
def test_invalid_experiment_file_is_rejected_with_the_field(
    text: str, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)

    with pytest.raises(UserError) as refused:
        Experiment.load(file)

    assert str(refused.value).startswith(str(file))
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"deadline_s": 100}, "deadline_s, deadline_factor: give exactly one"),
        ({"rates": [1.0, 2.0]}, "rates: must have 12 entries, one per worker, got 2"),
        ({"rates": {"low": 5, "high": 1}}, r"low: must be at most high \(1\), got 5"),
        ({"learning": {}}, "learning: needs `mode: protocol`"),
        ({"speeds": 2.0}, "speeds: needs `mode: protocol`"),
        ({"link_s": 0.1}, "link_s: needs `mode: protocol`"),
        ({"synchronisation": {"mode": "stale"}}, "synchronisation: needs `mode: protocol`"),
        ({"speeds": [1.0, 2.0]}, "speeds: must have 12 entries, one per worker, got 2"),
        ({"speeds": {"low": 0, "high": 1}}, "greater than 0"),
        ({"mode": "protocol", "synchronisation": {"mode": "averaging"}}, "averaging requires it"),
        (
            {
                "mode": "protocol",
                "group_size": 1,
                "synchronisation": {"mode": "averaging", "local_rate": 0.1},
            },
            "requires a group_size above 1",
        ),
        (
            {
                "mode": "protocol",
                "learning": {},
                "synchronisation": {"mode": "averaging", "local_rate": 0.1},
            },
            "learning.optimizer: must be sgd or momentum with",
        ),
        ({"arrivals": {"process": "trace"}}, "trace"),
        ({"spot": [SMALL["spot"][0], SMALL["spot"][0]]}, "spot: pools must have different names"),
    ],
)
def test_contradictory_experiment_fields_are_rejected(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        an_experiment(**changes)


def test_experiment_without_any_arrivals_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all rates of a run are 0"):
        simulate(an_experiment(rates=[0.0] * 12), tmp_path, 1, 0)


def test_pool_above_its_bid_is_not_planned_for(tmp_path: Path) -> None:
    spot = SMALL["spot"][0] | {"bid_usd_per_hour": 0.1}
    for policy in ("static", "chance", "pools"):
        (run,) = simulate(an_experiment(spot=[spot], policy={"name": policy}), tmp_path, 1, 0)

        assert run.met
        assert run.spot_share == 0


def test_pools_read_their_recordings_at_the_same_time(tmp_path: Path) -> None:
    # Zone a is up for 300 s and down for 300 s. Zone b is up while zone a is down.
    rows = ["seconds,a,b", *(f"{300 * n},{(n + 1) % 2},{n % 2}" for n in range(20))]
    (tmp_path / "zones.csv").write_text("\n".join(rows))

    def pool(zone: str) -> dict[str, Any]:
        there = {"file": "zones.csv", "column": zone}
        return {"name": zone, "usd_per_hour": 0.1, "availability": there, "together": True}

    experiment = an_experiment(spot=(pool("a"), pool("b")))
    draws = draws_of(experiment, tmp_path, 8, seed=1)
    _, a, b = draws.offers
    assert a is not None
    assert b is not None
    seen = set()
    for step in range(600):
        first, second = (offers(2.0 * step)[:, 0] for offers in (a, b))
        assert (first != second).all()
        seen.add(tuple(first.tolist()))
    assert len(seen) > 4  # runs begin at different places


def test_pool_can_have_more_machines_than_streams(tmp_path: Path) -> None:
    policy = {"name": "static", "spot_up_to": 1.5}
    draws = draws_of(an_experiment(policy=policy), tmp_path, 3, seed=1)

    assert draws.givens.slots_per_pool == 18
    assert draws.offers[1] is not None
    assert draws.offers[1](0.0).shape == (3, 18)
    (run,) = simulate(an_experiment(policy=policy), tmp_path, 1, 0)
    assert run.finished


def test_pools_policy_with_reassignment_rents_few_machines(tmp_path: Path) -> None:
    experiment = an_experiment(on_preemption="reassign", policy={"name": "pools"})
    (run,) = simulate(experiment, tmp_path, 1, 0)

    assert run.finished
    assert run.cost_ratio < 0.5
