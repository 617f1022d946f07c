"""Finds recorded prices and availability in a folder, and says why it skips some files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from common.spot.experiments.experiment import simulate
from common.spot.traces.files import read_trace
from load.paper.job import CYCLE_S, HIGH, experiment
from load.paper.policies import START_UP_S, start_up_s
from load.paper.runner import Asked
from load.paper.series import Found, find, listed, snapshot, split

RECORDS = """timestamp,availability_zone,instance_type,product,price_usd_per_hour
2015-03-11T00:00:00Z,us-east-1a,c3.xlarge,Linux/UNIX,0.03
2015-03-11T06:00:00Z,us-east-1a,x9.huge,Linux/UNIX,1.0
2015-03-11T12:00:00Z,us-east-1a,c3.xlarge,Linux/UNIX,0.9
2015-03-12T00:00:00Z,us-east-1b,c3.xlarge,Linux/UNIX,0.04
2015-03-13T00:00:00Z,us-east-1a,x9.huge,Linux/UNIX,1.0
"""
SNAPSHOT = """region,az_id,instance_type,price_usd_per_hour,savings_percent
eu-west-3,euw3-az1,c5.large,0.04,60
eu-west-3,euw3-az2,c5.large,0.05,60
eu-west-3,euw3-az3,c5.large,0.03,60
eu-west-3,euw3-az3,c5.metal,3.0,
"""


def compressed(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))
    return path


@pytest.fixture(name="asked")
def some_data(tmp_path: Path) -> Asked:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    prices, traces = data / "spot-prices", data / "spot-traces"
    compressed(prices / "us-east-1-2015-03-to-06.csv.gz", RECORDS)
    (prices / "on-demand-2014-us-east-1-us-west-2.csv").write_text(
        "region,instance_type,on_demand_usd_per_hour\nus-east-1,c3.xlarge,0.21\n"
    )
    up = {"metadata": {"gap_seconds": 600}, "data": [1, 1, 1, 0, 1, 1, 0, 0] * 20}
    folder = traces / "skypilot" / "availability" / "1-node" / "aws"
    compressed(folder / "us-east-1a_v100_1.json.gz", json.dumps(up))
    bamboo = traces / "bamboo"
    bamboo.mkdir()
    (bamboo / "back.csv").write_text("0,3\n100,2\n50,1\n")
    scratch.mkdir()
    return Asked(12, 1, quick=False, data=data, scratch=scratch)


@pytest.fixture(name="found")
def what_is_there(asked: Asked) -> Found:
    found = find(asked)
    assert found is not None
    return found


def test_unusable_series_are_listed_with_the_reason(found: Found) -> None:
    reasons = dict(found.unused)
    assert "on-demand price" in reasons["2015 x9.huge us-east-1a"]
    assert "before the previous row" in reasons["back"]


def test_old_series_bids_the_on_demand_price_and_averages_below_it(
    found: Found,
) -> None:
    (series,) = [each for each in found.series if each.name == "2015 c3.xlarge us-east-1a"]
    assert series.change.bid_usd_per_hour == series.setting.prices.on_demand == 0.21
    assert series.setting.prices.spot == pytest.approx(0.03)


def test_availability_is_sped_up_to_the_cycle_of_the_paper(
    found: Found,
) -> None:
    some = [each for each in found.series if "SkyPilot" in each.group]
    assert [each.change.together for each in some] == [False, True]
    for each in some:
        assert each.setting.prices == HIGH
        trace = each.change.availability
        assert trace is not None
        # The trace has two outages in 8 steps of 600 s.
        assert trace.speed == each.speed == pytest.approx(8 * 600 / 2 / CYCLE_S)


def test_every_found_series_can_be_simulated(found: Found, asked: Asked) -> None:
    for each in found.series:
        wanted = experiment(each.setting, "static", each.change).model_copy(update={"updates": 50})
        (run,) = simulate(wanted, asked.scratch, 1, 1)
        assert run.finished


def test_find_without_a_data_folder_returns_none() -> None:
    assert find(Asked(12, 1, quick=False, data=None, scratch=Path())) is None


def test_split_series_equals_the_series_in_the_file(tmp_path: Path) -> None:
    path = compressed(tmp_path / "all.csv.gz", RECORDS)
    files = split(path, tmp_path / "each", ("instance_type", "availability_zone"), scale=2.0)
    alone = read_trace(files["c3.xlarge", "us-east-1a"])
    there = read_trace(path, {"instance_type": "c3.xlarge", "availability_zone": "us-east-1a"})
    assert alone.end_s == there.end_s == 2 * 86_400
    assert alone.mean() == pytest.approx(2 * there.mean())


def test_split_omits_series_with_too_few_records(tmp_path: Path) -> None:
    path = compressed(tmp_path / "all.csv.gz", RECORDS)
    files = split(path, tmp_path / "each", ("instance_type", "availability_zone"), least=2)
    assert set(files) == {("c3.xlarge", "us-east-1a"), ("x9.huge", "us-east-1a")}


def test_on_demand_price_is_the_median_over_zones(tmp_path: Path) -> None:
    path = compressed(tmp_path / "snapshot.csv.gz", SNAPSHOT)
    assert snapshot(path) == {("eu-west-3", "c5.large"): pytest.approx(0.1)}


def test_listed_prices_of_a_missing_file_are_empty(tmp_path: Path) -> None:
    assert listed(tmp_path / "none.csv", "us-east-1") == {}


def test_start_up_times_are_medians_of_summed_stages(tmp_path: Path) -> None:
    folder = tmp_path / "spot-traces"
    folder.mkdir()
    rows = ["transient,1,2,3", "transient,10,20,30", "transient,2,2,3", "on-demand,1,1,1"]
    head = "kind,provisioning_s,staging_s,booting_s"
    (folder / "gce-gpu-vm-startup-seconds.csv").write_text("\n".join([head, *rows]))
    assert start_up_s(tmp_path)[:2] == (3.0, 7.0)
    assert start_up_s(None)[:2] == START_UP_S
