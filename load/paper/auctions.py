"""The recorded auctions of 2015 and 2016: BidBrain beside Spot Fleet (Proteus, 6.3).

A table whose header begins with `step` is a market of one type. Price records of the old market,
which ended in November 2017, are one market per type and zone. The first part of the prices gives
the odds of eviction, and jobs begin in the rest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from common.errors import UserError
from common.spot.policies.bidbrain import Allocation, BidBrain, eviction_odds
from common.spot.theory.billing import HOUR_S
from common.spot.traces.files import read_once, read_trace
from load.paper.series import header, rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from common.spot.traces.trace import Floats

# Files whose header begins with `step`, or price records.
Kind: TypeAlias = Literal["tables", "records"]

# USD per hour in us-east-1, and virtual cores. The recorded lists do not have all of them.
ON_DEMAND_USD = {
    "c3.xlarge": 0.21,
    "d2.8xlarge": 5.52,
    "g2.2xlarge": 0.65,
    "m3.medium": 0.067,
    "m4.xlarge": 0.239,
    "r3.large": 0.166,
}
CORES = {"medium": 1, "large": 2, "xlarge": 4, "2xlarge": 8, "4xlarge": 16, "8xlarge": 32}
UNUSUAL_CORES = {"d2.8xlarge": 36}
COLUMNS = {"timestamp", "availability_zone", "instance_type", "price_usd_per_hour"}
GRID_S = 300.0  # step of the tables
# Interval of BidBrain's decisions: the grid of price records.
RECORDS_S = 120.0
OLD_MARKET_ENDS = datetime(2017, 11, 1, tzinfo=UTC)


WANTED_CORES, MOST_CORES = 512.0, 756.0
RELIABLE = 3  # machines of the cheapest type
# Share of the time that checkpoints take in Proteus, section 6.3.
CHECKPOINT_SHARE = 0.17
# Median of 45 recorded start-ups of spot machines.
START_S = 87.0
# A job begins only if this multiple of its hours is left in the recorded prices.
LONGEST = 3.0


ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Auctions:
    """Spot prices of several markets on one time grid, whose step divides an hour."""

    # (M, T) USD per hour, repeated after the last.
    prices: Floats
    step_s: float
    on_demand_usd: Floats  # (M,) USD per hour
    work_per_s: Floats  # (M,) per machine


@dataclass(frozen=True, slots=True)
class Job:
    """An amount of work, and the costs of changes of its machines."""

    work: float
    # Price of machines that do no work and are always there.
    reliable_usd_per_hour: float = 0.0
    # Time that all machines stand still after an eviction.
    eviction_s: float = 30.0
    # Time from an allocation to its first work.
    start_s: float = 0.0
    # Share of the time lost to checkpoints.
    checkpoint_share: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Standard:
    """Spot Fleet's strategy: the cheapest market, bid at its on-demand price, until evicted."""

    on_demand_usd: Floats  # (M,) USD per hour
    work_per_s: Floats  # (M,)
    wanted_per_s: float  # work of all machines

    def renews(self, *_: object) -> bool:
        """Return True: an allocation is used until it is evicted."""
        return True

    def acquire(
        self, footprint: Sequence[Allocation], now_s: float, prices: Floats
    ) -> Allocation | None:
        """Take all machines from the cheapest market once none are left."""
        offered = prices <= self.on_demand_usd
        if footprint or not offered.any():
            return None
        market = int(np.argmin(np.where(offered, prices / self.work_per_s, np.inf)))
        machines = int(self.wanted_per_s // self.work_per_s[market])
        usd = float(self.on_demand_usd[market]), float(prices[market])
        return Allocation(market, machines, *usd, now_s + HOUR_S)


@dataclass(slots=True)
class AuctionRun:
    """A job on spot machines of the old market: bids, evictions, hours paid at their beginning.

    Only the used part of the last hours is charged, because the next job uses the rest.
    """

    auctions: Auctions
    job: Job
    strategy: BidBrain | Standard
    left: float  # remaining work
    usd: float = 0.0
    runtime_s: float = 0.0
    # Work that machines could do in refunded hours: their work per second times seconds.
    free: float = 0.0
    paid: float = 0.0  # the same in paid hours
    evictions: int = 0
    # Allocations, and the time at which each begins to work.
    _running: list[tuple[Allocation, float]] = field(default_factory=list)
    _stands_still_s: float = 0.0

    def step(self, now_s: float, prices: Floats) -> bool:
        """Simulate the step that begins now. Returns True if the job ended in it."""
        self._evict_and_renew(now_s, prices)
        while more := self.strategy.acquire([each for each, _ in self._running], now_s, prices):
            self._begin_hour(more, now_s + self.job.start_s)
        step_s = self.auctions.step_s
        still_s = min(self._stands_still_s, step_s)
        self._stands_still_s -= still_s
        done = (1 - self.job.checkpoint_share) * sum(
            self._capacity(each) * min(step_s - still_s, max(now_s + step_s - ready_s, 0.0))
            for each, ready_s in self._running
        )
        if done < self.left or not done:
            self.left -= done
            return False
        self._end(now_s + step_s * self.left / done)
        return True

    def _evict_and_renew(self, now_s: float, prices: Floats) -> None:
        """Evict low bids, pay for hours that are over, and begin the next ones."""
        before, self._running = self._running, []
        ending = list[tuple[Allocation, float]]()
        for each, ready_s in before:
            over = each.ends_s <= now_s + ROUNDING_S
            evicted = prices[each.market] > each.bid_usd
            if over:
                self.paid += self._capacity(each) * HOUR_S
            elif evicted:
                self.usd -= each.machines * each.price_usd
                self.free += self._capacity(each) * (now_s + HOUR_S - each.ends_s)
            if evicted:
                self.evictions += 1
                self._stands_still_s = self.job.eviction_s
            else:
                (ending if over else self._running).append((each, ready_s))
        for each, ready_s in ending:
            if self.strategy.renews([one for one, _ in self._running], each, now_s, prices):
                price_usd = float(prices[each.market])
                again = replace(each, price_usd=price_usd, ends_s=now_s + HOUR_S)
                self._begin_hour(again, ready_s)

    def _begin_hour(self, allocation: Allocation, ready_s: float) -> None:
        self._running.append((allocation, ready_s))
        self.usd += allocation.machines * allocation.price_usd

    def _end(self, now_s: float) -> None:
        for each, _ in self._running:
            unused_s = each.ends_s - now_s
            self.usd -= each.machines * each.price_usd * unused_s / HOUR_S
            self.paid += self._capacity(each) * (HOUR_S - unused_s)
        self.usd += self.job.reliable_usd_per_hour * now_s / HOUR_S
        self.runtime_s = now_s

    def _capacity(self, allocation: Allocation) -> float:
        return allocation.machines * float(self.auctions.work_per_s[allocation.market])


def run_auction(
    auctions: Auctions, job: Job, strategy: BidBrain | Standard, first: int
) -> AuctionRun:
    """Run a job from one step of the prices.

    Raises:
        UserError: If it is not done after two passes through the prices.
    """
    run = AuctionRun(auctions, job, strategy, job.work)
    times = auctions.prices.shape[1]
    for step in range(2 * times):
        if run.step(step * auctions.step_s, auctions.prices[:, (first + step) % times]):
            return run
    raise UserError(f"prices: too high to do {job.work:g} of work in two passes of {times} steps")


def clairvoyant_usd(prices: Floats, step_s: float) -> float:
    """Return the lowest possible cost of a unit that runs all the time and may change markets.

    This is a shortest path through time with all prices known. An hour is paid at its beginning,
    and refunded if an eviction ends it early. The right bid is evicted at any step whose price is
    above all earlier prices of the hour. Evictions cost no time.

    Args:
        prices: (M, T) USD per hour of a unit of work per second.
        step_s: Time between prices.
    """
    steps = prices.shape[1]
    hour = round(HOUR_S / step_s)
    least = np.full(steps + 1, np.inf)
    least[0] = 0.0
    for begin in range(steps):
        end = min(begin + hour, steps)
        paid = least[begin] + prices[:, begin].min() * (end - begin) / hour
        least[end] = min(least[end], paid)
        so_far = np.maximum.accumulate(prices[:, begin:end], axis=1)
        rises = (prices[:, begin + 1 : end] > so_far[:, :-1]).any(axis=0)
        free = begin + 1 + np.flatnonzero(rises)
        least[free] = np.minimum(least[free], least[begin])
    return float(least[steps])


class Row(NamedTuple):
    """One recording, and its bars by hours of a job."""

    name: str
    kind: Kind
    # Share of the prices used to learn the odds.
    learns: float
    most: dict[int, float]  # cost share
    # Cost relative to `standard + elastic`.
    of_elastic: dict[int, float]
    # Share of machine time that is not free.
    paid: float | None = None
    time: float | None = None  # share of the hours


ROWS = (
    Row("G", "tables", 1 / 3, {2: 0.16, 20: 0.15}, {2: 0.78, 20: 0.72}, paid=0.80, time=0.85),
    Row("H", "records", 1 / 2, {2: 0.18, 20: 0.17}, {}),
)


@dataclass(frozen=True, slots=True)
class Work:
    """Jobs of one length on one recording. Picklable."""

    folder: Path
    row: str
    hours: int
    runs: int
    seed: int


class Found(NamedTuple):
    """Means over jobs. Costs are shares of the cost of on-demand machines of the cheapest type."""

    bidbrain: float
    elastic: float
    checkpoints: float
    clairvoyant: float
    # BidBrain's time, as a share of the job's hours.
    time: float
    # Share of BidBrain's machine time.
    free: float


def measured(work: Work) -> Found:
    """Run the same jobs under the three strategies.

    Raises:
        UserError: If the prices cannot be used.
    """
    (row,) = (one for one in ROWS if one.name == work.row)
    auctions = read_auctions(work.folder, row.kind)
    cut = int(row.learns * auctions.prices.shape[1])
    learnt = eviction_odds(auctions.prices[:, :cut], auctions.step_s)
    auctions = replace(auctions, prices=auctions.prices[:, cut:])
    times = auctions.prices.shape[1]
    reliable_usd = RELIABLE * float(
        auctions.on_demand_usd[np.argmin(auctions.on_demand_usd / auctions.work_per_s)]
    )
    job = Job(WANTED_CORES * work.hours * HOUR_S, reliable_usd, start_s=START_S)
    alone = replace(job, reliable_usd_per_hour=0.0, checkpoint_share=CHECKPOINT_SHARE)
    brain = BidBrain(
        learnt, auctions.work_per_s, MOST_CORES, reliable_usd, job.eviction_s, change_s=job.start_s
    )
    standard = Standard(auctions.on_demand_usd, auctions.work_per_s, WANTED_CORES)
    room = times - int(LONGEST * work.hours * HOUR_S / auctions.step_s)
    if room < 1:
        raise UserError(f"{work.folder}: the prices are too short for jobs of {work.hours} h")
    starts = np.random.default_rng(work.seed).integers(0, room, work.runs).tolist()
    ours, elastic, checkpoints = (
        [run_auction(auctions, each, strategy, start) for start in starts]
        for each, strategy in ((job, brain), (job, standard), (alone, standard))
    )
    yardstick = float((auctions.on_demand_usd / auctions.work_per_s).min())  # cheapest type
    alone_usd = WANTED_CORES * work.hours * yardstick
    best_s = job.work / MOST_CORES
    steps = round(best_s / auctions.step_s)
    least_usd = reliable_usd * best_s / HOUR_S + MOST_CORES * fmean(
        clairvoyant_usd(
            auctions.prices[:, np.arange(start, start + steps) % times]
            / auctions.work_per_s[:, None],
            auctions.step_s,
        )
        for start in starts
    )
    free, paid = sum(bill.free for bill in ours), sum(bill.paid for bill in ours)
    return Found(
        bidbrain=fmean(bill.usd for bill in ours) / alone_usd,
        elastic=fmean(bill.usd for bill in elastic) / alone_usd,
        checkpoints=fmean(bill.usd for bill in checkpoints) / alone_usd,
        clairvoyant=least_usd / alone_usd,
        time=fmean(bill.runtime_s for bill in ours) / (work.hours * HOUR_S),
        free=free / (free + paid),
    )


def rows_of(folder: Path) -> tuple[Row, ...]:
    """Return the rows whose prices are in a folder.

    Raises:
        UserError: If the folder has no prices.
    """
    kinds = {kind for path in sorted(folder.glob("*.csv*")) if (kind := _kind(path))}
    if not kinds:
        wanted = "tables of prices (`step,ZONE,...`) and no prices before 2017-11"
        columns = "`timestamp,availability_zone,instance_type,price_usd_per_hour`"
        raise UserError(f"{folder}: has no {wanted} ({columns})")
    return tuple(row for row in ROWS if row.kind in kinds)


def _kind(path: Path) -> Kind | None:
    columns = header(path)
    if columns[0] == "step":
        return "tables"
    if not {*columns} >= COLUMNS:
        return None
    first = rows(path)[:1]
    old = first and datetime.fromisoformat(first[0]["timestamp"]) <= OLD_MARKET_ENDS
    return "records" if old else None


def read_auctions(folder: Path, kind: Kind) -> Auctions:
    """Read all prices of one kind in a folder.

    Args:
        folder: Folder with price files, and optionally `on-demand*.csv` with more on-demand prices.
        kind: Kind of file to read.

    Raises:
        UserError: If there are no prices, or a type's on-demand price or size is unknown.
    """
    names, prices, step_s = _tables(folder) if kind == "tables" else _records(folder)
    if not names:
        wanted = {
            "tables": "tables of prices (`step,ZONE,...`)",
            "records": "prices before 2017-11",
        }
        raise UserError(f"{folder}: has no {wanted[kind]}")
    listed = {
        row["instance_type"]: float(row["on_demand_usd_per_hour"])
        for path in sorted(folder.glob("on-demand*.csv*"))
        for row in rows(path)
    } | ON_DEMAND_USD
    types = [name.partition(" ")[0] for name in names]
    for one in types:
        if one not in listed:
            problem = "is unknown; add a row to on-demand.csv in this folder, with the header"
            header = "`instance_type,on_demand_usd_per_hour`"
            raise UserError(f"{folder}: the on-demand price of {one} {problem} {header}")
    return Auctions(
        np.array(prices),
        step_s,
        on_demand_usd=np.array([listed[one] for one in types]),
        work_per_s=np.array([_cores(one, folder) for one in types], float),
    )


def _cores(name: str, folder: Path) -> int:
    size = name.rpartition(".")[2]
    if name not in UNUSUAL_CORES and size not in CORES:
        raise UserError(f"{folder}: {name}: how many cores it has is not known")
    return UNUSUAL_CORES.get(name, CORES.get(size, 0))


@read_once()
def _tables(folder: Path) -> tuple[list[str], list[Floats], float]:
    """Read tables of one type each, cut to the length of the shortest series."""
    found: dict[str, Floats] = {}
    for path in sorted(folder.glob("*.csv*")):
        first, *zones = header(path)
        if first == "step":
            kind = path.name.partition(".csv")[0].rpartition("-")[2]
            for zone in zones:
                trace = read_trace(path, column=zone)
                found[f"{kind} {zone}"] = trace.values
    shortest = min((len(series) for series in found.values()), default=0)
    return list(found), [series[:shortest] for series in found.values()], GRID_S


def _records(folder: Path) -> tuple[list[str], list[Floats], float]:
    """Read price records of the old market, over the time that all series cover."""
    series = defaultdict[str, list[tuple[float, float]]](list)
    for path in sorted(folder.glob("*.csv*")):
        if not {*header(path)} >= COLUMNS:
            continue
        for row in rows(path):
            at = datetime.fromisoformat(row["timestamp"])
            if at > OLD_MARKET_ENDS:
                break
            name = f"{row['instance_type']} {row['availability_zone']}"
            series[name].append((at.timestamp(), float(row["price_usd_per_hour"])))
    if not series:
        return [], [], RECORDS_S
    first = max(records[0][0] for records in series.values())
    last = max(records[-1][0] for records in series.values())
    grid = np.arange(first, last, RECORDS_S)
    prices = []
    for records in series.values():
        times, values = np.array(sorted(records)).T
        prices.append(values[np.searchsorted(times, grid, side="right") - 1])
    return list(series), prices, RECORDS_S
