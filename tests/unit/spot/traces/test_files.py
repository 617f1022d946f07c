"""Each file format becomes a trace, or its error says what to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.spot.traces.files import read_trace, starts_of, traced
from common.spot.traces.spec import TraceSpec

RECORDED = Path(__file__).parents[4] / "shared" / "data"
recorded = pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded traces are not here")

PRICES = """\
timestamp,availability_zone,instance_type,product,price_usd_per_hour
2020-03-01T00:00:00Z,a,c5,Linux/UNIX,0.1
2020-03-01T00:00:10Z,b,c5,Linux/UNIX,0.5
2020-03-01T00:01:00Z,a,c5,Linux/UNIX,0.2
2020-03-01T00:01:00Z,a,c5,Linux/UNIX,0.3
2020-03-01T00:01:10Z,a,m5,Windows,0.9
2020-03-01T00:03:00Z,b,c5,Linux/UNIX,0.6
"""
GRID = "step,x,y\n0,1,7\n1,2,8\n2,3,\n"


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_price_series_lasts_as_long_as_the_recording(tmp_path: Path) -> None:
    path = written(tmp_path, PRICES)
    read = read_trace(path, {"availability_zone": "a", "instance_type": "c5"})
    assert read.times_s.tolist() == [0, 60]
    assert read.values.tolist() == [0.1, 0.3]
    assert read.end_s == 180


@pytest.mark.parametrize(
    ("series", "found"),
    [
        ({}, r"more than one; select one by availability_zone \(a, b\), instance_type \(c5, m5\)"),
        ({"availability_zone": "c"}, "no availability_zone 'c'; choose one of a, b"),
        (
            {"zone": "a"},
            "no column 'zone'; choose one of availability_zone, instance_type",
        ),
        ({"instance_type": "m5"}, "the series must have at least 2 records, got 1"),
    ],
)
def test_ambiguous_or_unknown_series_is_rejected_with_the_choices(
    tmp_path: Path, series: dict[str, str], found: str
) -> None:
    with pytest.raises(UserError, match=found):
        read_trace(written(tmp_path, PRICES), series)


def test_error_shows_only_some_of_many_choices(tmp_path: Path) -> None:
    rows = "".join(f"2020-03-01T00:00:00Z,z{n:02},c5,x,1\n" for n in range(30))
    path = written(tmp_path, PRICES.splitlines()[0] + "\n" + rows)
    with pytest.raises(UserError, match="z00, z01, z02, z03, z04, z05 and 24 more"):
        read_trace(path)


def test_price_records_out_of_order_are_rejected(tmp_path: Path) -> None:
    path = written(tmp_path, PRICES.replace("00:01:00Z", "00:02:00Z", 1))
    with pytest.raises(UserError, match=r"row 5 \(60 s\) is 60 s before the previous row"):
        read_trace(path, {"availability_zone": "a", "instance_type": "c5"})


def test_grid_has_a_row_per_five_minutes_and_columns_can_end_early(tmp_path: Path) -> None:
    path = written(tmp_path, GRID)
    x, y = read_trace(path, column="x"), read_trace(path, column="y")
    assert (x.times_s.tolist(), x.values.tolist(), x.end_s) == ([0, 300, 600], [1, 2, 3], 900)
    assert (y.values.tolist(), y.end_s) == ([7, 8], 600)


@pytest.mark.parametrize(
    ("text", "column", "found"),
    [
        (GRID, "", "column: trace.csv has several columns; choose one of x, y"),
        (GRID, "z", "column: trace.csv has no column 'z'; choose one of x, y"),
        (GRID.replace("1,2,8", "1,2,"), "x", None),
        (GRID.replace("1,2,8", "1,,8"), "x", "row 3 has no value in column 'x', but later rows"),
        (GRID.replace("2,3,", "3,3,"), "x", r"row 3 \(300 s\) is followed by a gap"),
        (GRID.replace("1,2,8", "1,two,8"), "x", "row 3 cannot be read"),
        (GRID.replace("1,2,8", "1,2"), "x", "row 3 has 2 cells, but the first row has 3"),
        (GRID.replace("1,2,8", "1,-2,8"), "x", "row 3 .* must be a number of at least 0"),
    ],
)
def test_incomplete_or_invalid_grid_is_rejected(
    tmp_path: Path, text: str, column: str, found: str | None
) -> None:
    path = written(tmp_path, text)
    if found is None:
        assert read_trace(path, column=column).values.tolist() == [1, 2, 3]
        return
    with pytest.raises(UserError, match=found):
        read_trace(path, column=column)


def test_plain_table_of_times_and_values_is_read(tmp_path: Path) -> None:
    events = read_trace(written(tmp_path, "seconds,value\n0,4\n15,2\n60,0\n"))
    assert (events.values.tolist(), events.end_s) == ([4, 2, 0], 60)
    sampled = read_trace(written(tmp_path, "\ufeffseconds, value\n10, 4\n\n20, 2\n30, 0\n"))
    assert (sampled.values.tolist(), sampled.end_s) == ([4, 2, 0], 30)
    hours = read_trace(written(tmp_path, "hours,count\n0,4\n1.5,2\n2,1\n"))
    assert hours.times_s.tolist() == [0, 5400, 7200]


def test_missing_row_of_a_sampled_table_is_rejected(tmp_path: Path) -> None:
    rows = [f"{seconds},1" for seconds in range(0, 1200, 60) if seconds != 600]
    with pytest.raises(UserError, match=r"row 11 \(540 s\) is followed by a gap"):
        read_trace(written(tmp_path, "seconds,value\n" + "\n".join(rows)))


def test_table_without_header_has_seconds_or_hours_and_a_count(tmp_path: Path) -> None:
    steps = "0,0\n20,0\n20,4\n50,4\n50,12\n90,12\n"
    seconds = read_trace(written(tmp_path, steps.replace("\n", "\r\n")))
    assert seconds.times_s.tolist() == [0, 20, 50, 90]
    assert (seconds.values.tolist(), seconds.end_s) == ([0, 4, 12, 12], 90)
    hours = read_trace(written(tmp_path, steps, "p2-to-23-hours.csv"))
    assert hours.end_s == 90 * 3600


def test_add_and_remove_events_are_counted(tmp_path: Path) -> None:
    text = "0,add,n1\n0,add,n2\n5000,remove,n1\n9000,add,n3\n20000,add,n1\n"
    read = read_trace(written(tmp_path, text))
    assert read.times_s.tolist() == [0, 5, 9, 20]
    assert read.values.tolist() == [2, 1, 2, 3]
    with pytest.raises(UserError, match="row 3 says 'remove' of n4, which was not added"):
        read_trace(written(tmp_path, text.replace("remove,n1", "remove,n4")))
    with pytest.raises(UserError, match="row 2 says 'add' of n1, which was added before"):
        read_trace(written(tmp_path, text.replace("add,n2", "add,n1")))


def test_counts_with_dates_must_be_in_order(tmp_path: Path) -> None:
    text = "2021-12-10, 23:59:30, 80\n2021-12-11, 00:00:30, 70\n2021-12-11, 00:01:00, 60\n"
    read = read_trace(written(tmp_path, text))
    assert (read.times_s.tolist(), read.values.tolist()) == ([0, 60, 90], [80, 70, 60])
    with pytest.raises(UserError, match=r"row 3 .* is 60 s before the previous row; sort the rows"):
        read_trace(
            written(tmp_path, text.replace("00:01:00", "23:59:30").replace("11, 23", "10, 23"))
        )


def test_json_file_has_availability_and_optional_prices(tmp_path: Path) -> None:
    document = {"metadata": {"gap_seconds": 30}, "data": [0, 1, 1], "prices": [0.5, 0.5, 0.7]}
    path = tmp_path / "zone.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    available, prices = read_trace(path), read_trace(path, column="prices")
    assert (available.values.tolist(), available.end_s) == ([0, 1, 1], 90)
    assert prices.values.tolist() == [0.5, 0.5, 0.7]
    with pytest.raises(UserError, match="has no list 'price'; choose one of data, prices"):
        read_trace(path, column="price")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "has no rows"),
        ("region,price\nx,1\n", "the simplest is a CSV file with the header `seconds,value`"),
        ("{", "must be CSV or JSON"),
        ('{"data": [1, 2]}', "metadata.gap_seconds must be a number above 0, got None"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1, 2]}', "gap_seconds must be .*, got 0"),
        (
            '{"metadata": {"gap_seconds": 9}, "data": [1, null]}',
            "row 2 of 'data' must be a number, got None",
        ),
        ('{"metadata": {"gap_seconds": 9}, "data": [1]}', "at least 2 rows, got 1"),
        ("seconds,value\n", "at least 2 rows, got 0"),
    ],
)
def test_file_that_is_not_a_trace_is_rejected(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        read_trace(written(tmp_path, text))


def test_unsupported_choice_and_missing_file_are_rejected(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"series: trace\.csv has only one series"):
        read_trace(written(tmp_path, GRID), {"zone": "a"})
    with pytest.raises(UserError, match=r"column: trace\.csv has only one column"):
        read_trace(written(tmp_path, PRICES), {}, "x")
    # The format is checked before the zone and the column.
    for choice in ({"zone": "a"}, {}):
        with pytest.raises(UserError, match=r"is not in a known format, got 'time,usd'"):
            read_trace(written(tmp_path, "time,usd\n2026-01-01,1\n"), choice, "usd")
    with pytest.raises(UserError, match="there is no such file"):
        read_trace(tmp_path / "none.csv")


def test_traced_applies_speed_and_start_of_its_specification(tmp_path: Path) -> None:
    written(tmp_path, GRID)
    spec = TraceSpec(file="trace.csv", column="x", speed=100, start_s=300)
    read, rng = traced(spec, tmp_path), np.random.default_rng(1)
    assert read.end_s == 9
    assert starts_of(spec, read, (2,), rng).tolist() == [3, 3]
    drawn = starts_of(spec.model_copy(update={"start_s": None}), read, (500, 2), rng)
    assert drawn.shape == (500, 2)
    assert drawn.min() >= 0
    assert drawn.mean() == pytest.approx(4.5, abs=5 * 9 / np.sqrt(12 * 1000))
    with pytest.raises(UserError, match=r"start_s: must be below 900, the length of trace\.csv"):
        starts_of(spec.model_copy(update={"start_s": 900.0}), read, (1,), rng)


@recorded
@pytest.mark.parametrize(
    ("file", "series", "column", "days", "mean"),
    [
        ("spot-prices/us-east-1-2016-5min-m4.xlarge.csv.gz", {}, "us-east-1a", 89.67, None),
        ("spot-traces/bamboo/p3-trace.csv", {}, "", 11.37 / 24, None),
        ("spot-traces/bamboo/aws-p2.xlarge-2020-11-20-to-23-hours.csv", {}, "", 88.7 / 24, None),
        (
            "spot-traces/skypilot/availability/1-node/aws-02-15-2023/us-west-2b_v100_1.json.gz",
            {},
            "",
            45.5,
            0.905,
        ),
        (
            "spot-traces/skypilot/preemption/1-node/aws-04-22-2023/us-east-1c_v100_1.json.gz",
            {},
            "prices",
            7.4,
            0.918,
        ),
        (
            "spot-prices/eu-west-3a-2020-03-to-05.csv.gz",
            {"instance_type": "m5d.24xlarge", "product": "Linux/UNIX"},
            "",
            92.8,
            None,
        ),
    ],
)
def test_recorded_files_have_their_documented_length_and_mean(
    file: str, series: dict[str, str], column: str, days: float, mean: float | None
) -> None:
    read = read_trace(RECORDED / file, series, column)
    assert read.end_s / 86400 == pytest.approx(days, rel=0.02)
    if mean is not None:
        assert read.mean() == pytest.approx(mean, abs=0.001)


@recorded
def test_recorded_file_out_of_order_is_rejected() -> None:
    path = RECORDED / "spot-traces/bamboo/gcp-v100x1-us-east1-c-2021-12.csv.gz"
    with pytest.raises(UserError, match=r"row 4 \(60 s\) is 60 s before the previous row"):
        read_trace(path)
