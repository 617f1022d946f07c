"""Reads what is beside the traces: lists of on-demand prices, and files that hold many series."""

from __future__ import annotations

import csv
import gzip
import io
from collections import defaultdict
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PRICE, _TIME = "price_usd_per_hour", "timestamp"


def rows(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with a header, compressed or not."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))


def split(
    path: Path, folder: Path, columns: Sequence[str], *, least: int = 1, scale: float = 1.0
) -> dict[tuple[str, ...], Path]:
    """Write each series of a file of price records into one of its own, and give them all.

    A simulation that reads one series out of 156,000 rows would spend most of its time on it. Each
    ends with a record at the time of the last of all series: its price held until then.

    Args:
        path: The file.
        folder: Is made, and holds the series.
        columns: What tells series apart.
        least: Records below which a series is left out.
        scale: Prices are written times this.
    """
    series = defaultdict[tuple[str, ...], list[dict[str, str]]](list)
    everything = rows(path)
    for row in everything:
        series[tuple(row[column] for column in columns)].append(row)
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for key, found in sorted(series.items()):
        if len(found) < least:
            continue
        file = folder / f"{'_'.join(key).replace('/', '-').replace(' ', '-')}.csv"
        with file.open("w", newline="") as opened:
            writer = csv.writer(opened)
            writer.writerow((_TIME, "series", _PRICE))
            last = {**found[-1], _TIME: everything[-1][_TIME]}
            for row in (*found, last):
                writer.writerow((row[_TIME], "this", float(row[_PRICE]) * scale))
        files[key] = file
    return files


@lru_cache(maxsize=2)
def listed(path: Path, region: str) -> dict[str, float]:
    """Read the on-demand prices of 2014, by type."""
    if not path.exists():
        return {}
    name = "on_demand_usd_per_hour"
    return {row["instance_type"]: float(row[name]) for row in rows(path) if row["region"] == region}


@lru_cache(maxsize=1)
def snapshot(path: Path) -> dict[tuple[str, str], float]:
    """Work out on-demand prices in 2022 by region and type, from spot prices and savings.

    The savings are whole per cents and a month's mean, so a zone's price is good to some 5 %: the
    median over the zones is taken.
    """
    prices = defaultdict[tuple[str, str], list[float]](list)
    for row in rows(path) if path.exists() else []:
        if row["savings_percent"]:
            alone = float(row[_PRICE]) / (1 - float(row["savings_percent"]) / 100)
            prices[row["region"], row["instance_type"]].append(alone)
    return {key: median(found) for key, found in prices.items()}


@lru_cache(maxsize=1)
def regions(path: Path) -> dict[str, str]:
    """Tell the region of each zone."""
    return {row["az_id"]: row["region"] for row in rows(path)} if path.exists() else {}
