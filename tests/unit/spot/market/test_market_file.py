"""A market file describes machines for rent. Errors name the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.spot.machines import Offer
from common.spot.market.market_file import Market, with_common_start
from common.spot.theory.billing import Billing, Preempted
from common.spot.traces.spec import TraceSpec

FULL = """
fleet: process
on_demand: {usd_per_hour: 0.286}
spot:
  - {name: spot, usd_per_hour: {file: prices.csv.gz, speed: 60, start_s: 0}, availability: 0.9}
process: {availability: 0.9, cycle_s: 60}
"""
BID = "{usd_per_hour: 0.5, bid_usd_per_hour: 0.6}"
EC2 = "ec2: {region: eu-central-1, launch_template: doll-worker}"


def written(folder: Path, text: str) -> Path:
    path = folder / "market.yaml"
    path.write_text(text)
    return path


def test_market_of_local_processes_is_loaded(tmp_path: Path) -> None:
    market = Market.load(written(tmp_path, FULL))
    assert (market.on_demand.name, market.on_demand.usd_per_hour) == ("on-demand", 0.286)
    (pool,) = market.spot
    assert pool.usd_per_hour == TraceSpec(file="prices.csv.gz", speed=60.0, start_s=0.0)
    assert market.process.cycle_s == 60.0
    assert market.replayed_from_s is None


def test_example_market_file_is_loaded() -> None:
    market = Market.load(Path(__file__).parents[4] / "docs/examples/market.yaml")
    assert (market.fleet, [pool.name for pool in market.spot]) == ("process", ["spot"])


def test_market_of_ec2_is_loaded(tmp_path: Path) -> None:
    text = f"""
fleet: ec2
{EC2}
on_demand: {{usd_per_hour: 0.286}}
spot: [{{usd_per_hour: history, instance_types: [c5.xlarge], zones: [eu-central-1a]}}]
"""
    market = Market.load(written(tmp_path, text))
    assert market.ec2 is not None
    assert market.ec2.launch_template_version == "$Default"
    assert market.spot[0].instance_types == ("c5.xlarge",)


def test_billing_is_that_of_the_provider_unless_the_file_sets_it(tmp_path: Path) -> None:
    text = f"""
fleet: ec2
{EC2}
on_demand: {{usd_per_hour: 0.286, billing: {{per: hour}}}}
spot:
  - {{usd_per_hour: 0.1}}
  - {{name: old, usd_per_hour: 0.1, billing: ec2-2017}}
"""
    market = Market.load(written(tmp_path, text))
    assert [market.billing(pool) for pool in market.pools] == [
        Billing("hour"),
        Billing(minimum_s=60.0, preempted=Preempted(free_within_s=3600.0)),
        Billing("hour", price="hour_start", preempted=Preempted(hour_refunded=True)),
    ]
    local = Market.load(written(tmp_path, FULL))
    assert [local.billing(pool) for pool in local.pools] == [Billing(), Billing()]


def test_on_demand_types_can_have_their_own_prices(tmp_path: Path) -> None:
    prices = "usd_per_hour: {c5.large: 0.1, c5.xlarge: 0.2, m5.large: 0.05}"
    types = "instance_types: [c5.large, c5.xlarge]"
    market = Market.load(written(tmp_path, f"on_demand: {{{prices}, {types}}}"))
    assert market.on_demand.prices() == {
        Offer("on-demand"): 0.1,
        Offer("on-demand", "c5.large"): 0.1,
        Offer("on-demand", "c5.xlarge"): 0.2,
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("on_demand: {usd_per_hour: 0}", "on_demand.usd_per_hour"),
        ("on_demand: {usd_per_hour: 1, zone: a}", "zone"),
        (
            "on_demand: {usd_per_hour: 1}\nspot: [{name: on-demand, usd_per_hour: 1}]",
            "different names",
        ),
        ("on_demand: {usd_per_hour: 1}\nspot: [{name: a/b, usd_per_hour: 1}]", "name"),
        ("on_demand: {usd_per_hour: 1}\nspot: [{usd_per_hour: cheap}]", "usd_per_hour"),
        ("fleet: ec2\non_demand: {usd_per_hour: 1}", "ec2: must be given"),
        ("on_demand: {usd_per_hour: 1}\nspot: [{usd_per_hour: history}]", "ec2: must be given"),
        ("on_demand: {usd_per_hour: {a: 1}, instance_types: [a, b]}", "must have a price for b"),
        ("on_demand: {usd_per_hour: {}}", "must have a price for any type"),
        (
            "on_demand: {usd_per_hour: 1}\nspot: [{usd_per_hour: 0.5, bid_usd_per_hour: 0.4}]",
            "bid_usd_per_hour: must be at least the pool's price of 0.5",
        ),
        (
            f"fleet: ec2\n{EC2}\non_demand: {{usd_per_hour: 1}}\nspot: [{BID}]",
            "bid_usd_per_hour: needs `fleet: process`",
        ),
        (
            "on_demand: {usd_per_hour: 1, billing: azure}",
            "on_demand.billing: must be a block of rules or one of ec2, ec2-2017",
        ),
        ("on_demand: {usd_per_hour: 1, billing: {per: day}}", "billing.per"),
        ("on_demand: {usd_per_hour: 1, billing: {minimum_s: -1}}", "billing.minimum_s"),
        ("on_demand: {usd_per_hour: 1, billing: {preempted: {free: 1}}}", "billing.preempted.free"),
        (
            f"{EC2}\non_demand: {{usd_per_hour: 1}}\nspot: [{{usd_per_hour: history}}]",
            "instance_types",
        ),
    ],
)
def test_invalid_market_file_is_rejected_with_the_field(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(UserError, match=rf"market\.yaml.*{problem}"):
        Market.load(written(tmp_path, text))


def test_missing_market_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        Market.load(tmp_path / "nowhere.yaml")


PRICE = "on_demand: {usd_per_hour: 0.3}\nspot: [{name: c5, usd_per_hour: %s}]\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "market.yaml: must be a mapping of fields to values, got null"),
        (
            "on_demand: {usd_per_hour: -1}",
            "market.yaml: on_demand.usd_per_hour: must be above 0.0, got -1",
        ),
        (
            "on_demand: {usd_per_hour: cheap}",
            'usd_per_hour: must be a number or a mapping of names to values, got "cheap"',
        ),
        (
            PRICE % "free",
            "must be a number or a mapping of fields to values or 'history', got \"free\"",
        ),
        (PRICE % "{file: a.csv, speed: 0}", "spot[0].usd_per_hour.speed: must be above 0.0, got 0"),
    ],
)
def test_invalid_union_field_is_reported_in_one_line(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(UserError) as complained:
        Market.load(written(tmp_path, text))
    assert str(complained.value).endswith(problem)


@pytest.mark.parametrize(
    ("rows", "start_s", "problem"),
    [
        ("0,0.1\n10,dear", 0, "row 3 cannot be read: could not convert string to float: 'dear'"),
        ("0,0.1\n20,0.2\n10,0.1", 0, "row 4 (10 s) is 10 s before the previous row"),
        ("0,0.1\n10,-1", 0, "row 3 (10 s) must be a number of at least 0"),
        ("0,0.1\n10,0.2", 99, "start_s: must be below 20, the length of prices.csv, got 99"),
    ],
)
def test_invalid_recording_is_reported_with_its_pool_and_field(
    tmp_path: Path, rows: str, start_s: int, problem: str
) -> None:
    (tmp_path / "prices.csv").write_text(f"seconds,usd\n{rows}\n")
    market = Market.load(written(tmp_path, PRICE % f"{{file: prices.csv, start_s: {start_s}}}"))
    with pytest.raises(UserError) as complained:
        with_common_start(market, tmp_path)
    message = str(complained.value)
    assert message.startswith("market file: c5: usd_per_hour: ")
    assert problem in message
