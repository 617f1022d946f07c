"""Plans, simulations and prices over HTTP: answers, ranges, limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.api.answers import PricesAnswer
from common.config.settings import Settings
from common.errors import GivenError
from common.spot.planning.compare import as_data, compare, with_policies
from common.spot.planning.plan import plan_answer
from common.spot.planning.request import PlanRequest
from common.spot.planning.simulation import SimulateRequest
from services.admin.routes.provisioning import MOST_WORKERS, PlanBody
from services.admin.routes.requests import JOB
from services.admin.service import Limits
from services.admin.simulating import AT_ONCE
from tests.unit.admin.conftest import World, problem

if TYPE_CHECKING:
    from pathlib import Path

PLAN = "/v1/provisioning/plan"
SIMULATE = "/v1/provisioning/simulate"
PRICES = "/v1/provisioning/prices"
PAPER: dict[str, Any] = {
    "workers": 64,
    "rate_per_s": 125,
    "group_size": 20,
    "batch_size": 256,
    "updates": 10000,
    "deadline_s": 6720,
    "availability": 0.9,
    "spot_usd_per_hour": 0.158,
    "on_demand_usd_per_hour": 0.286,
}
SMALL: dict[str, Any] = {
    "name": "small",
    "workers": 4,
    "rates": 50,
    "group_size": 2,
    "batch_size": 10,
    "updates": 60,
    "deadline_factor": 1.4,
    "on_demand": {"usd_per_hour": 0.286},
    "spot": [{"usd_per_hour": 0.158, "availability": 0.8, "cycle_s": 20}],
}


def no_log() -> Any:  # noqa: ANN401 -- it never gives one
    raise AssertionError("Kafka is not needed without a job")


def planned(world: World, **changed: object) -> dict[str, Any]:
    answer = world.ask("POST", PLAN, key="viewer", json={**PAPER, **changed})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(world: World, path: str, body: object) -> list[str]:
    """Return the fields that a 422 names."""
    answer = world.ask("POST", path, json=body)
    problem(answer, 422)
    return [each["field"] for each in answer.json()["errors"]]


def test_plan_of_several_pools_describes_each_of_them(world: World) -> None:
    pools = [
        {"name": "east", "usd_per_hour": 0.158, "availability": 0.9},
        {"name": "west", "usd_per_hour": 0.12, "availability": 0.9, "cycle_s": 5000},
    ]
    no = {"availability": None, "spot_usd_per_hour": None}
    found = planned(world, **no, pools=pools)
    assert (found["pool"], [one["name"] for one in found["pools"]]) == ("west", ["west", "east"])
    assert found["pools"][1]["expected_cost_usd"] == planned(world)["expected_cost_usd"]
    assert refused(world, PLAN, {**PAPER, "pools": pools}) == ["body.availability"]
    assert refused(world, PLAN, {**PAPER, **no, "pools": [pools[0]] * 2}) == ["body.pools"]
    bids = planned(world, **no, pools=pools, policy="bidbrain", gradient_s=0.01, rate_per_s=None)
    assert bids["bids"] == [
        {"pool": "west", "machines": 64, "at_most_usd_per_hour": pytest.approx(0.12, abs=1e-4)}
    ]
    assert refused(world, PLAN, {**PAPER, "policy": "bidbrain"}) == ["body.rate_per_s"]


def simulated(world: World, **asked: object) -> dict[str, Any]:
    answer = world.ask("POST", SIMULATE, key="viewer", json={"experiment": SMALL, **asked})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# --- plans -----------------------------------------------------------------------------------


def test_plan_of_the_paper_matches_the_command(world: World) -> None:
    found = planned(world, curve=10, list_workers=True)
    asked = PlanRequest.model_validate({**PAPER, "curve": 10, "list_workers": True})
    assert found == json.loads(plan_answer(asked, no_log, 0.0).model_dump_json())
    assert (found["feasible"], found["spot"], found["binding"]) == (True, 30, "deadline")
    assert found["spot_workers"] == list(range(30))
    assert {0, 30, 64} <= set(found["curve"]["spot"])
    assert len(found["curve"]["spot"]) == len(found["curve"]["cost_usd"]) <= 13


def test_plan_with_an_impossible_deadline_is_infeasible(world: World) -> None:
    found = planned(world, deadline_s=6399)
    assert (found["feasible"], found["binding"]) == (False, "infeasible")
    assert found["reason"]


def test_infinite_runtime_and_cost_are_null(world: World) -> None:
    found = planned(world, availability=0, spot=64, curve=64)
    assert (found["expected_cost_usd"], found["expected_runtime_s"]) == (None, None)
    assert found["curve"]["cost_usd"][-1] is None


def test_plan_handles_ten_thousand_workers_with_their_own_rates(world: World) -> None:
    rates = [1 + (n * 37) % 250 for n in range(10_000)]
    body = {name: PAPER[name] for name in PAPER if name not in ("workers", "rate_per_s")}
    deadline_s = 1.05 * 10_000 * 20 * 256 / sum(rates)
    answer = world.ask("POST", PLAN, json={**body, "rates_per_s": rates, "deadline_s": deadline_s})
    found = answer.json()
    assert (found["feasible"], found["spot"] + found["on_demand"]) == (True, 10_000)
    assert found["spot"] > 0


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": MOST_WORKERS + 1}, "workers"),
        ({"availability": 1.5}, "availability"),
        ({"updates": None}, "updates"),
        ({"probability": 1}, "probability"),
        ({"spot": 65}, "spot"),
        ({"workers": None}, "workers"),
        ({"rates_per_s": [1, 2]}, "rates_per_s"),
        ({"wrokers": 3}, "wrokers"),
    ],
)
def test_plan_request_with_an_invalid_field_names_it(
    world: World, changed: dict[str, object], field: str
) -> None:
    assert refused(world, PLAN, {**PAPER, **changed}) == [f"body.{field}"]


def test_plan_for_an_unknown_job_returns_404(world: World) -> None:
    answer = world.ask("POST", PLAN, json={**PAPER, "job": "digits"})
    assert 'no job "digits"' in problem(answer, 404)


@given(
    st.fixed_dictionaries(
        {
            "rates_per_s": st.lists(st.floats(0, 1e12), min_size=1, max_size=6),
            "group_size": st.integers(1, 10**6),
            "batch_size": st.integers(1, 10**9),
            "updates": st.floats(0, 1e15),
            "deadline_s": st.floats(0, 1e12),
            "availability": st.floats(0, 1),
            "spot_usd_per_hour": st.floats(0, 1e6),
            "on_demand_usd_per_hour": st.floats(0, 1e6, exclude_min=True),
            "cycle_s": st.none() | st.floats(0, 1e12, exclude_min=True),
            "probability": st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True),
            "curve": st.integers(0, 10),
        }
    )
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_plan_request_in_range_is_planned_or_rejected_by_field(
    asked: dict[str, object],
) -> None:
    request = PlanBody.model_validate(asked)
    fields = set[str]()
    try:
        answer = plan_answer(request, no_log, 0.0)
        assert json.loads(answer.model_dump_json()) == answer.model_dump(mode="json")
        assert 0 <= answer.deadline_probability <= 1
    except GivenError as error:
        fields = set(error.fields)
    assert fields <= set(PlanBody.model_fields)


# --- simulations -----------------------------------------------------------------------------


def test_simulation_matches_the_command(world: World, tmp_path: Path) -> None:
    found = simulated(world, runs=3, seed=7, policies=["on-demand", "pools"])
    asked = SimulateRequest.model_validate({"experiment": SMALL})
    variants = with_policies(asked.experiment, ["on-demand", "pools"])
    results = compare(variants, tmp_path, 3, 7, lambda _name, _share: None)
    assert found == json.loads(json.dumps(as_data(asked.experiment, 7, results)))


def test_simulation_of_a_mode_reports_throughput_and_shares(world: World) -> None:
    mode = {"mode": "protocol", "synchronisation": {"mode": "stale"}, "speeds": [1, 1, 1, 0.25]}
    found = simulated(world, experiment={**SMALL, **mode}, runs=2)
    assert found["summary"]["static"]["throughput"]["batches_per_s"] > 0
    assert len(found["runs"]["static"][1]["throughput"]["shares"]) == 4


@pytest.mark.parametrize(
    ("changed", "asked", "fields"),
    [
        ({"workers": 10**9}, {}, ["experiment.workers", "runs"]),
        ({"updates": 10**9}, {"runs": 100}, ["experiment.updates", "runs"]),
        ({"updates": 10**6, "mode": "protocol"}, {}, ["experiment.updates", "runs"]),
        ({"workers": 5000, "mode": "protocol"}, {}, ["experiment.workers"]),
        (
            {"mode": "protocol", "learning": {"hidden": [20_000, 20_000]}},
            {},
            ["experiment.learning.hidden"],
        ),
        (
            {
                "mode": "protocol",
                "learning": {"hidden": [1000, 1000], "optimizer": "sgd"},
                "synchronisation": {"mode": "asynchronous"},
            },
            {},
            ["experiment.learning.hidden"],
        ),
        (
            {"mode": "protocol", "synchronisation": {"mode": "stale", "staleness": 0}},
            {},
            ["experiment.synchronisation.staleness"],
        ),
        ({"workers": 0}, {}, ["experiment.workers"]),
        ({}, {"policies": ["statik"]}, ["policies[0]"]),
        ({}, {"runs": 0}, ["runs"]),
    ],
)
def test_too_large_or_invalid_simulation_is_rejected(
    world: World, changed: dict[str, object], asked: dict[str, object], fields: list[str]
) -> None:
    body = {"experiment": {**SMALL, **changed}, **asked}
    assert refused(world, SIMULATE, body) == [f"body.{field}" for field in fields]


def trace(file: str) -> dict[str, object]:
    spot = [{"usd_per_hour": {"file": file}, "availability": 0.8}]
    return {"experiment": {**SMALL, "spot": spot}, "runs": 2}


def test_simulation_reads_no_files_of_the_service(world: World) -> None:
    assert refused(world, SIMULATE, trace("prices.csv")) == [
        "body.experiment.spot[0].usd_per_hour.file"
    ]
    data = {**SMALL, "mode": "protocol", "learning": {"data": "/etc/passwd"}}
    assert refused(world, SIMULATE, {"experiment": data}) == ["body.experiment.learning.data"]


def test_simulation_over_its_time_limit_is_killed_with_advice() -> None:
    world = World(limits=Limits(simulate_s=0.05))
    try:
        said = problem(world.ask("POST", SIMULATE, json={"experiment": SMALL}), 422)
        assert "took longer than 0.05 s; request fewer runs" in said
        assert world.service.simulations.running == 0
    finally:
        world.close()


def test_number_of_concurrent_simulations_is_limited(world: World) -> None:
    world.service.simulations.running = AT_ONCE
    answer = world.ask("POST", SIMULATE, json={"experiment": SMALL})
    assert "simulations are running already" in problem(answer, 429)
    assert int(answer.headers["Retry-After"]) > 0


# --- prices ----------------------------------------------------------------------------------


def test_prices_are_reported_by_pool(tmp_path: Path) -> None:
    market = tmp_path / "market.yaml"
    market.write_text("on_demand: {usd_per_hour: 0.286}\nspot: [{usd_per_hour: 0.158}]\n")
    world = World(Settings(market=str(market)))
    try:
        answer = PricesAnswer.model_validate(world.get(PRICES))
        assert [(pool.name, pool.kind, pool.usd_per_hour) for pool in answer.pools] == [
            ("on-demand", "on-demand", 0.286),
            ("spot", "spot", 0.158),
        ]
        # Prices are cached.
        assert world.get(PRICES)["at_s"] == answer.at_s
    finally:
        world.close()


def test_prices_without_a_market_name_the_missing_setting(world: World) -> None:
    assert "DOLL_MARKET" in problem(world.ask("GET", PRICES), 404)


def test_invalid_market_file_returns_502(tmp_path: Path) -> None:
    market = tmp_path / "market.yaml"
    market.write_text("spot: []\n")
    world = World(Settings(market=str(market)))
    try:
        assert "on_demand: is missing" in problem(world.ask("GET", PRICES), 502)
    finally:
        world.close()


def test_submitted_job_with_a_max_lag_below_start_up_time_is_rejected(
    tmp_path: Path,
) -> None:
    market = tmp_path / "market.yaml"
    market.write_text("on_demand: {usd_per_hour: 0.286, start_up_s: 69}\n")
    world = World(Settings(market=str(market)))
    asked = {"workers": 2, "policy": "pools", "max_lag_s": 30}
    try:
        refused = world.ask("POST", "/v1/jobs", json={**JOB, "provisioning": asked})
        assert "max_lag_s: must be at least 69, got 30" in problem(refused, 422)
        given = {**JOB, "provisioning": {**asked, "max_lag_s": 69}}
        assert "there is no topic" in problem(world.ask("POST", "/v1/jobs", json=given), 422)
    finally:
        world.close()
