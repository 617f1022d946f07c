"""`doll plan` prints a plan for people and scripts, and names wrong options."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.spot.planning.plan import answers, gather
from common.spot.planning.request import PlanRequest
from common.spot.theory.provisioning import plan as best_plan
from common.spot.theory.provisioning import plan_of
from common.spot.theory.work import Work, market
from services.cli import exits
from services.cli.commands.plan import ranges, read_rates

if TYPE_CHECKING:
    from pathlib import Path

    from common.spot.theory.work import Rates
    from tests.unit.cli.conftest import World

PAPER = {
    "--workers": "64",
    "--rate": "125",
    "--group-size": "20",
    "--batch-size": "256",
    "--updates": "10000",
    "--deadline": "6720",
    "--availability": "0.9",
    "--spot-price": "0.158",
    "--on-demand-price": "0.286",
}


def no_log() -> Any:  # noqa: ANN401 -- it never gives one
    raise AssertionError("Kafka is not needed without a job")


_FIELDS = {
    "--workers": "workers",
    "--rate": "rate_per_s",
    "--group-size": "group_size",
    "--batch-size": "batch_size",
    "--updates": "updates",
    "--deadline": "deadline_s",
    "--availability": "availability",
    "--spot-price": "spot_usd_per_hour",
    "--on-demand-price": "on_demand_usd_per_hour",
}
PAPER_REQUEST = PlanRequest.model_validate(
    {field: json.loads(PAPER[option]) for option, field in _FIELDS.items()}
)


def options(*without: str, **changed: object) -> list[str]:
    """Return the paper's command line, with some options changed or omitted."""
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in changed.items()}
    merged = {name: value for name, value in PAPER.items() if name not in without} | named
    return [word for option in merged.items() for word in option]


def planned(world: World, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(world.run("plan", *arguments, "--json").stdout)
    return found


@pytest.mark.parametrize(
    ("availability", "deadline", "spot", "ratio"),
    [(0.9, 6720, 30, 0.8019), (0.8, 6720, 15, 0.9120), (0.8, 7040, 29, 0.8216)],
)
def test_plan_json_matches_the_values_of_the_paper(
    world: World, availability: float, deadline: float, spot: int, ratio: float
) -> None:
    found = planned(world, *options(availability=availability, deadline=deadline))
    assert list(found) == [
        "feasible",
        "spot",
        "on_demand",
        "expected_cost_usd",
        "expected_runtime_s",
        "cost_ratio_to_on_demand",
        "binding",
        "reason",
        "spot_workers",
    ]
    assert (found["feasible"], found["spot"], found["on_demand"]) == (True, spot, 64 - spot)
    assert found["cost_ratio_to_on_demand"] == pytest.approx(ratio, abs=5e-5)
    assert found["binding"] == "deadline"


def test_plan_with_an_impossible_deadline_is_no_error(world: World) -> None:
    found = planned(world, *options(deadline=6399))
    assert (found["feasible"], found["spot"], found["binding"]) == (False, 0, "infeasible")
    shown = world.run("plan", *options(deadline=6399)).stdout
    assert "feasible" in shown
    assert "the closest plan" in shown


def test_plan_shows_workers_limit_and_curve(world: World) -> None:
    shown = world.run("plan", *options()).stdout
    assert "30 of 64 workers on spot, 34 on demand" in shown
    assert "0-29" in shown
    assert "80.19 %" in shown
    assert "one more would make it" in shown
    curve = re.findall(r"^ *(\d+) +[\d,]+ s .*█", shown, re.MULTILINE)
    assert curve[0] == "0"
    assert curve[-1] == "64"
    assert "30" in curve


def test_probability_reduces_spot_workers_and_is_reported(world: World) -> None:
    found = planned(world, *options(probability=0.95))
    assert found["spot"] < 30
    assert 0.95 <= found["deadline_probability"] <= 1
    longer = planned(world, *options(probability=0.95, cycle=4000))
    # If outages are fewer but longer, the uptime of a machine varies more.
    assert longer["spot"] < found["spot"]


def test_plan_evaluates_a_given_number_of_spot_workers(world: World) -> None:
    found = planned(world, *options(spot=40, cycle=1000))
    assert (found["feasible"], found["spot"], found["binding"]) == (False, 40, "deadline")
    assert found["deadline_probability"] < 0.5
    cheapest = plan_of(work_of(np.full(64, 125.0)), market(0.286, 0.158, 0.9), 40)
    assert found["expected_cost_usd"] == pytest.approx(cheapest.expected_cost_usd)


def work_of(rates: Rates, deadline_s: float = 6720) -> Work:
    return Work(rates, 20, 256, 10000, deadline_s)


def test_rates_are_read_from_a_file(world: World, tmp_path: Path) -> None:
    rates = np.random.default_rng(4).uniform(60, 250, 64).round(3)
    file = tmp_path / "rates"
    file.write_text("\n".join(map(str, rates)) + "\n\n")
    deadline_s = 1.03 * work_of(rates).undisturbed_s
    line = options("--workers", "--rate", rates=file, deadline=deadline_s)
    found = planned(world, *line)
    expected = best_plan(work_of(rates, deadline_s), market(0.286, 0.158, 0.9))
    assert 0 < found["spot"] < 64
    assert found["spot_workers"] == sorted(expected.spot_workers.tolist())
    assert found["expected_cost_usd"] == pytest.approx(expected.expected_cost_usd)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have at least 1 entries"),
        ("125\nmany\n", "line 2: must be a number, got 'many'"),
        ("125\n-1\n", "--rates[1]: must be at least 0.0, got -1.0"),
        ("0\n0\n", "must have a rate above 0, got only 0"),
        ("125\nnan\n", "--rates[1]: must be a finite number"),
    ],
)
def test_invalid_file_of_rates_is_rejected(
    world: World, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "rates.csv"
    file.write_text(text)
    line = options("--workers", "--rate", rates=file)
    said = world.run("plan", *line, code=exits.REFUSED).stderr
    assert said.startswith("error: --rates")
    assert message in said


def test_unreadable_file_of_rates_is_named(world: World, tmp_path: Path) -> None:
    line = options("--workers", "--rate", rates=tmp_path / "gone.csv")
    said = world.run("plan", *line, code=exits.REFUSED).stderr
    assert said.startswith("error: --rates: ")
    assert "gone.csv: there is no such file" in said
    assert said.count("\n") == 1
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(UserError, match="binary: cannot be read as text"):
        read_rates(tmp_path / "binary")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--workers", "0"),
        ("--workers", "1000000000"),
        ("--rate", "0"),
        ("--rate", "nan"),
        ("--group-size", "0"),
        ("--batch-size", "-1"),
        ("--updates", "-1"),
        ("--deadline", "nan"),
        ("--availability", "1.01"),
        ("--availability", "nan"),
        ("--spot-price", "-0.1"),
        ("--on-demand-price", "0"),
        ("--cycle", "0"),
        ("--probability", "1"),
        ("--spot", "65"),
    ],
)
def test_number_out_of_range_is_reported_with_its_option(
    world: World, option: str, value: str
) -> None:
    said = world.run("plan", *options(), option, value, code=exits.REFUSED).stderr
    assert said.startswith(f"error: {option}: ")
    assert said.count("\n") == 1


def test_missing_options_are_named(world: World) -> None:
    for option in [name for name in PAPER if name not in ("--workers", "--rate")]:
        said = world.run("plan", *options(option), code=exits.REFUSED).stderr
        assert said == f"error: {option}: must be given\n"
    said = world.run("plan", *options("--updates", "--deadline"), code=exits.REFUSED).stderr
    assert said == "error: --updates, --deadline: must be given\n"


def test_conflicting_or_missing_rates_are_rejected(world: World, tmp_path: Path) -> None:
    for without, where in (("--workers", "rate"), ("--rate", "number of workers")):
        said = world.run("plan", *options(without), code=exits.REFUSED).stderr
        assert said == f"error: {without}: must be given with a {where}\n"
    said = world.run("plan", *options("--workers", "--rate"), code=exits.REFUSED).stderr
    assert said == (
        "error: --workers, --rate: must be given, or a rate for each worker, or a job\n"
    )
    (tmp_path / "r").write_text("5\n")
    said = world.run("plan", *options(rates=tmp_path / "r"), code=exits.REFUSED).stderr
    assert "--rates: conflicts with a number of workers" in said


@pytest.mark.parametrize(
    ("changed", "binding", "spot"),
    [
        ({"availability": 1}, "workers", 64),
        ({"availability": 0}, "availability", 0),
        ({"spot_price": 0.3}, "price", 0),
        ({"deadline": 1e6}, "workers", 64),
    ],
)
def test_limit_cases_are_planned(
    world: World, changed: dict[str, object], binding: str, spot: int
) -> None:
    found = planned(world, *options(**changed))
    assert (found["feasible"], found["binding"], found["spot"]) == (True, binding, spot)
    assert f"{spot} of 64 workers on spot" in world.run("plan", *options(**changed)).stdout


def test_infinite_runtime_is_null_in_json_and_never_done_in_text(world: World) -> None:
    line = options(availability=0, spot=64)
    found = planned(world, *line)
    assert (found["expected_cost_usd"], found["expected_runtime_s"]) == (None, None)
    assert "never finishes" in world.run("plan", *line).stdout


@given(st.sets(st.integers(0, 60)))
def test_ranges_contain_exactly_the_given_numbers(numbers: set[int]) -> None:
    held = set[int]()
    for part in ranges(numbers):
        first, _, last = part.partition("-")
        held |= set(range(int(first), int(last or first) + 1))
    assert held == numbers


def test_many_ranges_are_shortened(world: World, tmp_path: Path) -> None:
    file = tmp_path / "rates.txt"
    file.write_text("\n".join(["10", "250"] * 40))
    line = options("--workers", "--rate", rates=file, updates=9000, deadline=4600)
    assert ", ... (--json has all)" in world.run("plan", *line).stdout


def test_answer_contains_the_sufficient_numbers_of_spot_workers() -> None:
    asked = gather(PAPER_REQUEST, no_log, 0.0)
    on_average, *others = answers(asked, probability=None, spot=None)
    assert not others
    assert np.flatnonzero(on_average.enough).tolist() == list(range(31))
    (surely,) = answers(asked, probability=0.99, spot=None)
    assert int(np.flatnonzero(surely.enough).max()) == surely.plan.spot < 30


MARKET = """
on_demand: {usd_per_hour: 0.286}
spot:
  - {name: east, usd_per_hour: 0.158, availability: 0.9}
  - {name: west, usd_per_hour: {file: prices.csv}, availability: 0.9, billing: ec2, capacity: 20}
"""
UNSAID = ("--availability", "--spot-price", "--on-demand-price")


@pytest.fixture(name="market_file")
def two_pools(tmp_path: Path) -> Path:
    """Write a market with the paper's pool, and one of 20 machines at $0.10 and $0.14 in turn."""
    (tmp_path / "prices.csv").write_text("seconds,usd\n0,0.10\n300,0.14\n600,0.10\n900,0.14\n")
    path = tmp_path / "market.yaml"
    path.write_text(MARKET)
    return path


def test_plan_of_a_market_file_covers_each_pool_and_takes_the_cheapest(
    world: World, market_file: Path
) -> None:
    found = planned(world, *options(*UNSAID, market=market_file))
    # Pool west has only 20 machines.
    assert (found["pool"], found["spot"]) == ("west", 20)
    west, east = found["pools"]
    # The price is the mean of the recorded prices.
    assert west["usd_per_hour"] == pytest.approx(0.12)
    alone = planned(world, *options())
    assert (east["name"], east["spot"]) == ("east", alone["spot"])
    assert east["expected_cost_usd"] == pytest.approx(alone["expected_cost_usd"])
    # EC2 does not charge for machines that it interrupts in their first hour: 900 s on average.
    assert west["expected_cost_usd"] < east["expected_cost_usd"]
    shown = world.run("plan", *options(*UNSAID, market=market_file)).stdout
    assert re.search(r"^ *east +0.158 +90.00 % +1,000 s +30 ", shown, re.MULTILINE)
    assert "spot pool west" in shown


def test_recorded_availability_belongs_to_the_pool_named_like_its_file(
    world: World, market_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "east.csv").write_text("seconds,n\n0,1\n600,0\n900,1\n1000,1\n")
    answer = world.run("plan", *options(*UNSAID, market=market_file, traces=folder), "--json")
    assert "come and go at once" in answer.stderr
    east = next(one for one in json.loads(answer.stdout)["pools"] if one["name"] == "east")
    assert (east["availability"], east["cycle_s"]) == (pytest.approx(0.7), pytest.approx(1000))
    (folder / "south.csv").write_text("seconds,n\n0,1\n1000,1\n")
    alone = options("--availability", traces=folder)
    assert [one["name"] for one in planned(world, *alone)["pools"]] == ["south", "east"]
    stray = world.run(
        "plan", *options(*UNSAID, market=market_file, traces=folder), code=exits.REFUSED
    )
    assert "the market has no spot pool 'south'" in stray.stderr


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"market": "seconds,usd\n0,0.10\n300,x\n600,0.1\n"}, "west: prices.csv: row 3 cannot"),
        ({"traces": "seconds,n\n0,1\n900,0\n600,1\n"}, "east: east.csv: row 4 (600 s) is 300 s"),
        ({"traces": None}, "traces: has no file that ends with .csv, .json, .txt"),
    ],
    ids=["price", "order", "none"],
)
def test_invalid_recording_is_reported_with_pool_and_row(
    world: World, market_file: Path, tmp_path: Path, broken: dict[str, str], problem: str
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "east.csv").write_text("seconds,n\n0,1\n600,0\n900,1\n1000,1\n")
    if "market" in broken:
        (tmp_path / "prices.csv").write_text(broken["market"])
    elif broken["traces"]:
        (folder / "east.csv").write_text(broken["traces"])
    else:
        (folder / "east.csv").unlink()
    refused = world.run(
        "plan", *options(*UNSAID, market=market_file, traces=folder), code=exits.REFUSED
    )
    assert problem in refused.stderr


def test_option_that_repeats_the_market_file_is_rejected(world: World, market_file: Path) -> None:
    refused = world.run("plan", *options(market=market_file), code=exits.REFUSED)
    assert (
        "--availability: conflicts with --market, which gives this value; remove one"
        in refused.stderr
    )


BACKLOG = ("--rate", "--availability", "--spot-price", "--on-demand-price")


def test_bids_for_a_backlog_are_reported_with_figures_from_past_prices(
    world: World, tmp_path: Path
) -> None:
    # Ten days at $0.10, but every third hour twice as much for five minutes.
    prices = [0.2 if step % 36 == 35 else 0.1 for step in range(2880)]
    rows = "\n".join(f"{300 * step},{usd}" for step, usd in enumerate([*prices, 0.1]))
    (tmp_path / "prices.csv").write_text(f"seconds,usd\n{rows}\n")
    market = tmp_path / "market.yaml"
    market.write_text(
        "on_demand: {usd_per_hour: 0.3}\n"
        "spot: [{name: old, usd_per_hour: {file: prices.csv}, billing: ec2-2017}]\n"
    )
    line = options(*BACKLOG, policy="bidbrain", gradient=0.2, market=market, workers=20)
    found = planned(world, *line)
    (bid,) = found["bids"]
    assert (bid["pool"], bid["machines"], found["spot"], found["on_demand"]) == ("old", 20, 20, 0)
    # In the time of one gradient, 20 machines make an update. A bid below $0.20 loses its machines
    # in every third hour, which is then free of charge.
    assert found["expected_runtime_s"] == pytest.approx(2000)
    share = 1 - found["expected_cost_usd"] / (20 * 0.1 * 2000 / 3600)
    assert share == pytest.approx(1 / 3 if bid["at_most_usd_per_hour"] < 0.2 else 0, abs=0.02)
    shown = world.run("plan", *line)
    assert "20 of old at up to $" in shown.stdout
    assert "`doll simulate`" in shown.stderr


@pytest.mark.parametrize(
    ("without", "changed", "problem"),
    [
        (BACKLOG[1:], {"gradient": 0.2}, "--rate: a stream cannot go faster than it arrives"),
        (BACKLOG[:1], {}, "--gradient: must be given for bidbrain"),
        (BACKLOG[:1], {"gradient": 0.2, "spot": 3}, "--spot: does not apply to bidbrain"),
    ],
    ids=["live stream", "no gradient", "a number"],
)
def test_bids_without_a_backlog_are_rejected_with_the_reason(
    world: World, without: tuple[str, ...], changed: dict[str, object], problem: str
) -> None:
    line = options(*without, policy="bidbrain", **changed)
    assert problem in world.run("plan", *line, code=exits.REFUSED).stderr


def test_help_has_an_example_and_explains_the_status_of_infeasible(world: World) -> None:
    text = " ".join(world.run("plan", "--help").stdout.split())
    assert "Example: doll plan --workers 64" in text
    assert "the exit status is still 0" in text
