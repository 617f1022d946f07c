"""Rows of the markets on small recordings: input, results and output."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.errors import UserError
from load.paper import markets, zones
from load.paper.__main__ import main
from load.paper.auctions import read_auctions, rows_of
from load.paper.markets import job_of
from load.paper.policies import START_UP_S

if TYPE_CHECKING:
    from pathlib import Path

    from common.spot.experiments.spec import Experiment

RECORD = "timestamp,availability_zone,instance_type,product,price_usd_per_hour\n"
BEGIN = datetime(2015, 3, 1, tzinfo=UTC)


@pytest.fixture(name="prices")
def small_recordings(tmp_path: Path) -> Path:
    """Write a table and two weeks of prices, which jump every 70 and every 50 minutes."""
    folder = tmp_path / "prices"
    folder.mkdir()
    steps = range(14 * 288)
    cells = (f"{step},{0.9 if step % 14 == 0 else 0.03},{0.04}" for step in steps)
    table = "\n".join(["step,us-east-1a,us-east-1b", *cells])
    (folder / "us-east-1-5min-m4.xlarge.csv").write_text(table + "\n")
    lines = [
        f"{(BEGIN + timedelta(minutes=5 * step)).isoformat()},us-east-1a,c3.xlarge,Linux/UNIX,"
        f"{0.9 if step % 10 == 0 else 0.03}\n"
        for step in steps
    ]
    (folder / "2015.csv").write_text(RECORD + "".join(lines))
    (folder / "2020.csv").write_text(RECORD + "2020-03-01T00:00:00Z,us-east-1a,x9.odd,Linux,1\n")
    return folder


def test_old_market_tables_and_records_are_read_on_a_grid(prices: Path) -> None:
    tables, records = read_auctions(prices, "tables"), read_auctions(prices, "records")
    assert (tables.on_demand_usd / tables.work_per_s).tolist() == [0.239 / 4] * 2
    assert tables.prices[:, :2].tolist() == [[0.9, 0.03], [0.04, 0.04]]
    assert records.prices[0, :4].tolist() == [0.9, 0.9, 0.9, 0.03]  # 0, 120, 240, 360 s


def test_unknown_instance_type_is_rejected_until_it_has_a_price(prices: Path) -> None:
    for name in ("us-east-1-5min-m4.xlarge.csv", "us-east-1-5min-z1.xlarge.csv"):
        text = (prices / "us-east-1-5min-m4.xlarge.csv").read_text()
        (prices / name).write_text(text)
    with pytest.raises(UserError, match="price of z1"):
        read_auctions(prices, "tables")
    (prices / "on-demand.csv").write_text(
        "region,instance_type,on_demand_usd_per_hour\nus-east-1,z1.xlarge,0.2\n"
    )
    found = read_auctions(prices, "tables")
    assert (found.on_demand_usd / found.work_per_s).min() == pytest.approx(0.05)


def test_rows_depend_on_the_kinds_of_prices_in_the_folder(prices: Path) -> None:
    assert [row.name for row in rows_of(prices)] == ["G", "H"]
    (prices / "2015.csv").unlink()
    assert [row.name for row in rows_of(prices)] == ["G"]
    (prices / "us-east-1-5min-m4.xlarge.csv").unlink()
    with pytest.raises(UserError, match="has no tables of prices"):
        rows_of(prices)


def shortened(job: Experiment) -> Experiment:
    """A quarter of the paper's updates."""
    return job.model_copy(update={"updates": job.updates // 4})


def test_command_writes_rows_and_reports_missed_goals(
    prices: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(markets, "SINGLE", markets.SINGLE[-1:])  # machines that start at once
    monkeypatch.setattr(markets, "WAITING", {300.0: 0.545})
    monkeypatch.setattr(markets, "job_of", lambda row: shortened(job_of(row)))
    out = tmp_path / "out"
    words = ["--only", "markets", "--runs", "12", "--processes", "1", "--out", str(out)]
    words += ["--no-live"]
    # The folder has no recorded zones.
    words += ["--data", str(tmp_path)]
    assert main([*words, "--prices", str(prices), "--json", str(tmp_path / "rows.json")]) in (0, 1)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["I"] == [
        case | {"value": 0, "bar": 0, "clairvoyant": None, "lag_s": None} for case in rows["I"]
    ]
    short = [
        f"FALLS SHORT: markets: {name}: {case['case']}"
        for name, cases in rows.items()
        for case in cases
        if case["value"] > case["bar"]
    ]
    said = capsys.readouterr().out
    assert all(line in said for line in short)
    assert said.count("FALLS SHORT") == len(short)
    assert json.loads((out / "results.json").read_text())["markets"].keys() == rows.keys()
    cost, missed = rows["B"]
    assert cost["value"] == pytest.approx(cost["clairvoyant"], abs=0.01)
    assert (cost["met"], cost["of"], missed["value"]) == (12, 12, 0)
    assert {case["case"] for case in rows["G"]} > {"bidbrain, 2 h: cost", "bidbrain, 20 h: cost"}


@pytest.mark.parametrize("option", ["--prices", "--availability"])
def test_missing_folder_is_reported(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "markets", option, "nowhere"]) == 2
    assert f"{option}: is not a folder, got nowhere" in capsys.readouterr().err


def test_least_share_without_foresight_equals_the_design_value() -> None:
    first, *_, at_once = markets.SINGLE
    assert markets.least_share(markets.job_of(first)) == pytest.approx(0.601, abs=0.001)
    assert markets.least_share(markets.job_of(at_once)) == pytest.approx(0.158 / 0.286)


def test_clairvoyant_uses_available_zones_and_on_demand_for_the_rest() -> None:
    looks, day_s = 100, 100 * zones.LOOK_S
    up = np.ones((looks, 2, 3), np.bool_)
    # The second run has no zone at all.
    up[:, :, 1] = False
    # The third run has no zone for half the time.
    up[50:, :, 2] = False
    spot, alone = zones.SPOT_USD / 3600, zones.ON_DEMAND_USD / 3600
    least = zones.least_machine_usd(up, 0.8 * day_s)
    assert least[:2] == pytest.approx([0.8 * day_s * spot, 0.8 * day_s * alone], rel=1e-3)
    # The fewest on-demand machines that can do the remaining work in the second half. Each of
    # them starts up once, and then runs until the end.
    rest_s = 0.3 * day_s * 0.5 * day_s / (0.5 * day_s - START_UP_S[0])
    moved = 0.5 * day_s * spot + rest_s * alone
    assert least[2] == pytest.approx(moved, rel=1e-3)


def test_single_zone_costs_at_least_what_the_clairvoyant_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zones, "HOURS_S", 7200.0)
    looks = [int(index % 8 != 7) for index in range(80)]
    trace = {"metadata": {"gap_seconds": 300}, "data": looks}
    (tmp_path / "zone_v100_1.json").write_text(json.dumps(trace))
    found = zones.measured(zones.Work(zones.zones_in(tmp_path), 1.25, 2, 1))
    assert found.met == 2
    assert 0.3 <= found.clairvoyant <= found.cost < 0.5
    with pytest.raises(UserError, match="has no recorded zones"):
        zones.zones_in(tmp_path / "zone_v100_1.json")
