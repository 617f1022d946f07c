"""Recorded prices and availability of the data folder, as series to simulate.

Prices alone do not give the on-demand price of their time. It comes from the list of 2014 for the
old market; from a tenth of the highest price for the files of 2016, because bids were limited to
ten times the on-demand price; from the snapshot of 2022 for everything else.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.data.readers import read_bytes
from common.errors import UserError
from common.spot.experiments.draws import draws_of
from common.spot.traces.files import read_trace
from common.spot.traces.spec import TraceSpec
from load.paper.job import CYCLE_S, HIGH, Prices, Setting, Variation, experiment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from load.paper.runner import Asked

# Factor by which the paper speeds recorded prices up.
SPEED = 2000.0
# Time step of the simulation. It misses faster changes.
GRID_S = 2.0
# One of this many series of 2022 is simulated, because they are much alike.
EVERY = 15
WAYS = ((False, "each worker its own part"), (True, "all at once"))
_OLD, _NEW = "us-east-1-2015-03-to-06.csv.gz", "eu-west-3a-2020-03-to-05.csv.gz"
_CHANGES = "all-regions-changes-2022-05-31.csv.gz"
_SNAPSHOT = "all-regions-snapshot-2022-07-12.csv.gz"
_LIST = "on-demand-2014-us-east-1-us-west-2.csv"
_LINUX = "Linux/UNIX"
_PRICE, _TIME = "price_usd_per_hour", "timestamp"


class Series(NamedTuple):
    """One recorded series, ready to be simulated."""

    group: str
    name: str
    # The paper's setting, but its spot price is the trace's mean while a machine is available.
    setting: Setting
    change: Variation
    speed: float


@dataclass(slots=True)
class Found:
    """Series of the data folder."""

    data: Path
    scratch: Path
    # True if one series of each group is enough.
    quick: bool
    series: list[Series] = field(default_factory=list)
    unused: list[tuple[str, str]] = field(default_factory=list)  # series and reason

    def price(
        self, group: str, name: str, on_demand: float | None, trace: TraceSpec, *, bid: bool = False
    ) -> None:
        """Add a series of prices, or record why it cannot be used."""
        if self.enough(group):
            return
        if on_demand is None:
            self.unused.append((name, "its on-demand price is not known"))
            return
        try:
            mean = _mean_price(self.scratch / trace.file, trace, on_demand if bid else math.inf)
        except UserError as error:
            self.unused.append((name, str(error)))
            return
        change = Variation(name, usd_per_hour=trace, bid_usd_per_hour=on_demand if bid else None)
        prices = Prices(name, on_demand, mean)
        setting = Setting(prices=prices)
        if bid:
            # Only the price preempts machines.
            setting = Setting(availability=1.0, prices=prices)
        self.series.append(Series(group, name, setting, change, trace.speed))

    def enough(self, group: str) -> bool:
        """Return True if no more series of a group are wanted."""
        return self.quick and any(each.group.startswith(group) for each in self.series)

    def on_demand(self, region: str, kind: str) -> float | None:
        """Return the on-demand price of a type in 2022, or None."""
        return snapshot(self.data / "spot-prices" / _SNAPSHOT).get((region, kind))


def _mean_price(path: Path, trace: TraceSpec, bid: float) -> float:
    """Return the mean price over the time that a machine is available."""
    found = read_trace(path, trace.series, trace.column)
    paid_s = np.where(found.values <= bid, found.durations_s, 0.0)
    return float(found.values @ paid_s / paid_s.sum()) if paid_s.any() else found.mean()


def find(asked: Asked) -> Found | None:
    """Search the data folder. If quick, one series of each kind."""
    if asked.data is None:
        return None
    found = Found(asked.data, asked.scratch, asked.quick)
    prices = asked.data / "spot-prices"
    for look, file in ((_of_2015, _OLD), (_of_2016, ""), (_of_2020, _NEW), (_of_2022, _CHANGES)):
        if (prices / file).exists():
            look(prices, found)
    if (asked.data / "spot-traces").is_dir():
        _availability(asked.data / "spot-traces", found)
    return found


def like_the_papers(asked: Asked) -> TraceSpec | None:
    """Return a SUSE price as slow as the paper's, scaled to its mean. None without data."""
    path = asked.data and asked.data / "spot-prices" / _NEW
    if not path or not path.exists():
        return None
    kind, folder = ("c5.2xlarge", "SUSE Linux"), asked.scratch / "paper"
    columns = ("instance_type", "product")
    mean = read_trace(split(path, folder, columns)[kind]).mean()
    file = split(path, folder, columns, scale=HIGH.spot / mean)[kind]
    return TraceSpec(file=str(file), speed=SPEED)


def _of_2015(folder: Path, found: Found) -> None:
    prices = listed(folder / _LIST, "us-east-1")
    files = split(folder / _OLD, found.scratch / "2015", ("instance_type", "availability_zone"))
    for (kind, zone), file in files.items():
        on_demand = prices.get(kind) or found.on_demand("us-east-1", kind)
        trace = TraceSpec(file=str(file), speed=SPEED)
        name = f"2015 {kind} {zone}"
        found.price("2015, price crosses the bid", name, on_demand, trace, bid=True)


def _of_2016(folder: Path, found: Found) -> None:
    for path in sorted(folder.glob("us-east-1-2016-5min-*.csv.gz")):
        kind = path.name.removesuffix(".csv.gz").rpartition("5min-")[2]
        table = rows(path)
        zones = [name for name in table[0] if name != "step"]
        highest = max(float(row[zone]) for row in table for zone in zones if row[zone])
        for zone in zones:
            trace = TraceSpec(file=str(path), column=zone, speed=SPEED)
            name = f"2016 {kind} {zone}"
            found.price("2016, price crosses the bid", name, highest / 10, trace, bid=True)


def _of_2020(folder: Path, found: Found) -> None:
    files = split(folder / _NEW, found.scratch / "2020", ("instance_type", "product"))
    linux = {kind: file for (kind, product), file in files.items() if product == _LINUX}
    others = f"{_NEW}: {len(files) - len(linux)} series of other systems than Linux"
    found.unused.append((others, "their on-demand prices are not known"))
    for kind, file in linux.items():
        trace = TraceSpec(file=str(file), speed=SPEED)
        on_demand = found.on_demand("eu-west-3", kind)
        found.price("2020, price drifts", f"2020 {kind} eu-west-3a", on_demand, trace)


def _of_2022(folder: Path, found: Found) -> None:
    columns = ("instance_type", "az_id")  # all are Linux
    files = split(folder / _CHANGES, found.scratch / "2022", columns, least=2)
    zones = {row["az_id"]: row["region"] for row in rows(folder / _SNAPSHOT)}
    known = {
        key: file for key, file in files.items() if found.on_demand(zones.get(key[1], ""), key[0])
    }
    for (kind, zone), file in list(known.items())[::EVERY]:
        # The series covers less than six hours. At 2,000 times its speed, a run would pass through
        # it hundreds of times, so it runs at its own speed.
        on_demand, name = found.on_demand(zones[zone], kind), f"2022 {kind} {zone}"
        trace = TraceSpec(file=str(file))
        found.price("2022, price changes once or twice", name, on_demand, trace)
    found.unused += [
        (f"{_CHANGES}: all but {len(files)} series", "one record each: the price never changes"),
        (
            f"{_CHANGES}: {len(files) - len(known)} series that change",
            "their on-demand prices are not known",
        ),
        (
            f"{_CHANGES}: {len(known) - len(range(0, len(known), EVERY))} of {len(known)} others",
            f"much alike: every {EVERY}th is simulated",
        ),
        (_SNAPSHOT, "one instant; on-demand prices are worked out from it"),
    ]


def _availability(folder: Path, found: Found) -> None:
    for path in sorted((folder / "skypilot").rglob("*.json.gz")):
        zone, recorded = path.name.removesuffix(".json.gz"), path.parent.name
        kind = "preemptions" if "preemption" in path.parts else "availability"
        _had(found, f"SkyPilot, {kind}", f"{recorded} {zone} ({path.parent.parent.name})", path)
    bamboo = folder / "bamboo"
    for path in sorted((*bamboo.glob("*.csv"), *bamboo.glob("*.csv.gz"))):
        _had(found, "Bamboo, clusters", path.name.partition(".csv")[0], path)
    lives = "lifetimes of single machines, not what could be had over time"
    for path in sorted(folder.glob("gce-*.csv*")):
        startup = "startup" in path.name
        found.unused.append(
            (path.name, "start-up times, used with the policies" if startup else lives)
        )


def _had(found: Found, group: str, name: str, path: Path) -> None:
    """Add a trace of availability twice: each worker has its own part, or all have the same."""
    if found.enough(group):
        return
    trace = TraceSpec(file=str(path))
    try:
        gap_s = read_trace(path).gap_s
        prices, column = _recorded_prices(path, found)
        for together, word in WAYS[: 1 if found.quick else 2]:
            change = Variation(f"{name}, {word}", availability=trace, together=together)
            setting = draws_of(experiment(Setting(), "static", change), path.parent, 1, 0)
            speed = setting.givens.pools[1].cycle_s / CYCLE_S
            speed = min(speed, gap_s / GRID_S) if gap_s else speed
            faster = trace.model_copy(update={"speed": speed})
            paid = faster.model_copy(update={"column": column}) if column else None
            change = replace(change, availability=faster, usd_per_hour=paid)
            found.series.append(
                Series(f"{group}; {word}", name, Setting(prices=prices), change, speed)
            )
    except UserError as error:
        found.unused.append((name, str(error)))


def _recorded_prices(path: Path, found: Found) -> tuple[Prices, str]:
    """Return the prices of a trace and their column. Without prices, return the paper's."""
    column = "prices"
    try:
        mean = read_trace(path, column=column).mean()
    except UserError:
        return HIGH, ""
    kind = "r5.16xlarge" if "intel_64" in path.name else "p3.2xlarge"  # one V100
    on_demand = found.on_demand(path.name[: len("us-east-1")], kind)
    return (Prices(kind, on_demand, mean), column) if on_demand else (HIGH, "")


# --- files beside the traces: on-demand prices, and many series in one ----------------------------


def rows(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with a header, compressed or not. No rows if there is no file."""
    text = read_bytes(path).decode() if path.exists() else ""
    return list(csv.DictReader(io.StringIO(text, newline="")))


def header(path: Path) -> list[str]:
    """Read the column names of a CSV file, compressed or not. A single empty name if empty."""
    text = read_bytes(path).decode()
    return next(csv.reader(io.StringIO(text, newline="")), [""])


def split(
    path: Path, folder: Path, columns: Sequence[str], *, least: int = 1, scale: float = 1.0
) -> dict[tuple[str, ...], Path]:
    """Write each series of a file of price records into a file of its own. Returns all files.

    A simulation that reads one series out of 156,000 rows would spend most of its time on it. Each
    file ends with a record at the time of the last of all series, because its price held until
    then.

    Args:
        path: The file.
        folder: Target folder. Created if missing.
        columns: Columns that identify a series.
        least: Minimum number of records. Shorter series are left out.
        scale: Factor of the prices.
    """
    series = defaultdict[tuple[str, ...], list[tuple[str, float]]](list)
    everything = rows(path)
    for row in everything:
        price = float(row[_PRICE]) * scale
        series[tuple(row[column] for column in columns)].append((row[_TIME], price))
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for key, found in sorted(series.items()):
        if len(found) >= least:
            files[key] = folder / f"{'_'.join(key).replace('/', '-').replace(' ', '-')}.csv"
            records = [*found, (everything[-1][_TIME], found[-1][1])]
            lines = (f"{at},this,{price}\n" for at, price in records)
            files[key].write_text(f"{_TIME},series,{_PRICE}\n{''.join(lines)}")
    return files


@cache
def listed(path: Path, region: str) -> dict[str, float]:
    """Read the on-demand prices of 2014, by type."""
    name = "on_demand_usd_per_hour"
    return {row["instance_type"]: float(row[name]) for row in rows(path) if row["region"] == region}


@cache
def snapshot(path: Path) -> dict[tuple[str, str], float]:
    """Derive on-demand prices in 2022 by region and type, from spot prices and savings.

    The savings are whole per cents and monthly means, so a zone's price is good to some 5 %. The
    median over the zones is used.
    """
    prices = defaultdict[tuple[str, str], list[float]](list)
    for row in rows(path):
        if row["savings_percent"]:
            alone = float(row[_PRICE]) / (1 - float(row["savings_percent"]) / 100)
            prices[row["region"], row["instance_type"]].append(alone)
    return {key: median(found) for key, found in prices.items()}
