"""Savings by several pools, moving streams and bids: rows A to J, beside the lowest possible cost.

Every row has a bar, and the part falls short if a value exceeds its bar. With other folders of
prices and availability the same rows are computed for those.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.spot.experiments.draws import ROUND_OVERHEAD_S
from common.spot.experiments.experiment import simulate
from common.spot.experiments.spec import Experiment, PolicySpec
from common.spot.market.billing_spec import BillingRules
from common.spot.theory.billing import BY_NAME, HOUR_S
from common.spot.theory.errors import ParameterError
from load.paper import auctions, live, zones
from load.paper.document import NONE, Section, percent
from load.paper.job import GRADIENT_S, SLOW_GRADIENT_S, Setting, Variation, experiment
from load.paper.policies import MINIMUM_S, START_UP_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from load.paper.runner import Runner

CENT = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """One figure of a row, and its upper bound."""

    case: str
    value: float
    bar: float
    met: int | None = None  # met deadlines
    of: int | None = None
    # Lower bound of the value, in most rows with the future known.
    clairvoyant: float | None = None
    lag_s: float | None = None  # worst lag of all streams


class Single(NamedTuple):
    """The paper's job on one spot pool, and the bar of its cost."""

    name: str
    availability: float
    deadline_factor: float
    spot_up_to: float
    bar: float

    @property
    def case(self) -> str:
        """Name of the case."""
        setting = f"pools, pause, ({self.availability:g}, {self.deadline_factor:.2f})"
        return f"{setting}, spot up to {self.spot_up_to:g} N"


SINGLE = (
    Single("A", 0.9, 1.05, 1.0, 0.69),
    Single("A", 0.9, 1.05, 1.5, 0.635),
    Single("A", 0.8, 1.05, 1.0, 0.745),
    Single("A", 0.8, 1.05, 1.5, 0.66),
    Single("A", 0.8, 1.10, 1.0, 0.72),
    Single("A", 0.8, 1.10, 1.5, 0.65),
    Single("B", 0.9, 1.05, 1.5, 0.57),
)
DEADLINES = 0.99  # 198 of 200
# Longer than the job, so the deadline is the only bound.
DAY_S = 24 * HOUR_S
WAITING = {300.0: 0.545, DAY_S: 0.51}
LIKE_A = Single("A", 0.9, 1.05, 1.0, 1.0)
MOVING = {GRADIENT_S: 0.0105, SLOW_GRADIENT_S: 0.036}
TOLERATED_S, MEAN_LAG_S = 180.0, 30.0
ZONES = "skypilot/availability/1-node/aws-02-15-2023"
ZONE_RUNS = 40
ZONES_MOST = (0.32, 0.306)


def run(runner: Runner) -> Section:
    """Compute all rows and write the section."""
    section = Section("Markets: what more pools and bids save")
    rows: dict[str, list[Case]] = {}
    every = (
        *_single(runner),
        *_waiting(runner),
        *_moving(runner),
        *_zones(runner),
        *_auctions(runner),
        *_bill(),
        *_live(runner),
    )
    for name, case in every:
        rows.setdefault(name, []).append(case)
    section.table(
        " | value | at most | clairvoyant | deadlines met | worst lag",
        [_line(name, case) for name, cases in rows.items() for case in cases],
    )
    # Twelve runs prove nothing.
    for name, cases in () if runner.asked.quick else rows.items():
        for case in cases:
            what = f"{name}: {case.case}: {case.value:.4g} instead of {case.bar:g}"
            section.judge(case.value <= case.bar, what)
    section.data = {name: [asdict(case) for case in cases] for name, cases in rows.items()}
    return section


def _line(name: str, case: Case) -> str:
    met = NONE if case.met is None else f"{case.met} of {case.of}"
    lag = NONE if case.lag_s is None else f"{case.lag_s:,.0f} s"
    value, bar = (f"{one:g}" if name in "IJ" else percent(one) for one in (case.value, case.bar))
    return f"{name}: {case.case} | {value} | {bar} | {percent(case.clairvoyant)} | {met} | {lag}"


def _single(runner: Runner) -> Iterator[tuple[str, Case]]:
    """Rows A and B: the paper's job on machines of one pool, each preempted independently."""
    jobs = {f"{row.name}: {row.case}": job_of(row) for row in SINGLE}
    found = _simulated(runner, "one pool", jobs)
    for row, job, one in zip(SINGLE, jobs.values(), found, strict=True):
        of, least = runner.asked.runs, least_share(job)
        yield row.name, Case(row.case, one.cost, row.bar, one.met, of, least)
        bar = 1 - DEADLINES
        yield row.name, Case(f"{row.case}: deadlines missed", 1 - one.met / of, bar)


def job_of(row: Single) -> Experiment:
    """Return the paper's job, on machines with the measured start-up times, or without any."""
    setting = Setting(availability=row.availability, deadline_factor=row.deadline_factor)
    start_up_s = START_UP_S if row.name == "A" else (0.0, 0.0)
    change = Variation("", start_up_s=start_up_s, billing=BillingRules(minimum_s=MINIMUM_S))
    policy = PolicySpec(name="pools", spot_up_to=row.spot_up_to)
    return experiment(setting, "static", change).model_copy(update={"policy": policy})


class Simulated(NamedTuple):
    """Results of the runs of an experiment."""

    cost: float  # mean share
    met: int  # met deadlines
    lag_s: float  # worst of all runs
    mean_lag_s: float


def simulated(work: tuple[Experiment, Path, int, int]) -> Simulated:
    """Run an experiment."""
    runs = simulate(*work)
    return Simulated(
        fmean(run.cost_ratio for run in runs),
        sum(run.met for run in runs),
        max(run.worst_lag_s for run in runs),
        fmean(run.mean_lag_s for run in runs),
    )


def _simulated(runner: Runner, title: str, jobs: Mapping[str, Experiment]) -> list[Simulated]:
    """Run several experiments with the command's options."""
    asked = runner.asked
    works = {name: (job, asked.scratch, asked.runs, asked.seed) for name, job in jobs.items()}
    return list(runner.map(title, simulated, works).values())


def least_share(job: Experiment) -> float:
    """Return the lowest possible cost share without knowledge of future losses.

    A second in which a machine on spot is ready costs pi_s exp(S / u), with lives of mean u. The
    fleet that is up at the beginning costs no start-up.
    """
    (spot,), alone = job.spot, job.on_demand
    if not isinstance(spot.availability, float) or not isinstance(spot.usd_per_hour, float):
        raise ParameterError("spot", "a bound is known for chains at a constant price alone")
    life_s = spot.availability * spot.cycle_s
    rate_per_s = job.rates * job.workers if isinstance(job.rates, float) else 0.0
    theta_0_s = job.updates * job.group_size * job.batch_size / rate_per_s
    later = math.exp(spot.start_up_s / life_s)
    # Start-up time saved by a machine that is up at the beginning: E[min(L, S)], with its life L,
    # which is exponential with mean u.
    first_s = life_s * (1 - 1 / later)
    return spot.usd_per_hour / alone.usd_per_hour * (later - first_s / theta_0_s)


def _waiting(runner: Runner) -> Iterator[tuple[str, Case]]:
    """Row C: the same job if records may wait for their machine, up to a maximum lag."""
    jobs = {f"{most_s:,.0f} s": waiting_job_of(most_s) for most_s in WAITING}
    found, of = _simulated(runner, "records that wait", jobs), runner.asked.runs
    for name, one, (most_s, bar) in zip(jobs, found, WAITING.items(), strict=True):
        job = f"pools, keep, (0.9, 1.05), max_lag_s {name}"
        yield "C", Case(job, one.cost, bar, one.met, of, lag_s=one.lag_s)
        yield "C", Case(f"{job}: deadlines missed", 1 - one.met / of, 0.0)
        if most_s < DAY_S:
            yield "C", Case(f"{job}: worst lag / max_lag_s", one.lag_s / most_s, 1.0)


def waiting_job_of(max_lag_s: float) -> Experiment:
    """Return the paper's job, whose records wait in Kafka while their stream has no machine."""
    job = job_of(LIKE_A)
    policy = job.policy.model_copy(update={"max_lag_s": max_lag_s})
    return job.model_copy(update={"policy": policy, "while_preempted": "keep"})


def _moving(runner: Runner) -> Iterator[tuple[str, Case]]:
    """Row D: the same job if streams move to the survivors, so machines only compute gradients."""
    jobs = {f"{1e3 * each:g} ms": moving_job_of(each, TOLERATED_S) for each in MOVING}
    found, of = _simulated(runner, "streams that move", jobs), runner.asked.runs
    for name, one, (gradient_s, bar) in zip(jobs, found, MOVING.items(), strict=True):
        job = f"pools, reassign, (0.9, 1.05), {name}, max_lag_s {TOLERATED_S:g}"
        least = least_share(job_of(LIKE_A)) * least_busy(gradient_s)
        yield "D", Case(job, one.cost, bar, one.met, of, least, one.lag_s)
        yield "D", Case(f"{job}: deadlines missed", 1 - one.met / of, 1 - DEADLINES)
        yield "D", Case(f"{job}: mean lag / 30 s", one.mean_lag_s / MEAN_LAG_S, 1.0)
        yield "D", Case(f"{job}: worst lag / max_lag_s", one.lag_s / TOLERATED_S, 1.0)


def moving_job_of(gradient_s: float, max_lag_s: float | None) -> Experiment:
    """Return the paper's job, whose streams move to the available machines."""
    job = job_of(LIKE_A)
    return job.model_copy(
        update={
            "policy": job.policy.model_copy(update={"max_lag_s": max_lag_s}),
            "on_preemption": "reassign",
            "gradient": job.gradient.model_copy(update={"mean_s": gradient_s}),
        }
    )


def least_busy(gradient_s: float) -> float:
    """Return the share of workers that gradients keep busy, if machines are never idle.

    An update occupies each of m machines for ceil(K / m) mu_C plus the overhead of a round. The
    result is for the m that needs the least time of machines.
    """
    job = job_of(LIKE_A)
    machines = np.arange(1.0, job.group_size + 1)
    rounds = np.ceil(job.group_size / machines)
    machine_s = float((machines * (rounds * gradient_s + ROUND_OVERHEAD_S)).min())
    rate_per_s = job.rates * job.workers if isinstance(job.rates, float) else 0.0
    return machine_s * rate_per_s / (job.group_size * job.batch_size) / job.workers


def _recorded(data: Path | None, name: str) -> Path | None:
    """Return a folder of the data, or None if it is missing."""
    folder = data and data / name
    return folder if folder and folder.is_dir() else None


def _zones(runner: Runner) -> Iterator[tuple[str, Case]]:
    """Rows E and F: zones that open and close as a whole, all together and each alone."""
    asked = runner.asked
    folder = asked.availability or _recorded(asked.data, f"spot-traces/{ZONES}")
    if folder is None:
        return
    there, runs = zones.zones_in(folder), min(asked.runs, ZONE_RUNS)
    works = {
        f"{row}, {factor:.2f}, {len(some)} of {some[0].name}": zones.Work(
            some, factor, runs, asked.seed
        )
        for row, groups in (("E", [there]), ("F", [(one,) for one in there]))
        for factor in zones.FACTORS
        for some in groups
    }
    found = runner.map("zones", zones.measured, works)
    for row, most, beside in (("E", ZONES_MOST, (1.03, 1.03)), ("F", (), (1.03, 1.08))):
        for number, factor in enumerate(zones.FACTORS):
            some = [one for name, one in found.items() if name.startswith(f"{row}, {factor:.2f}")]
            cost = fmean(one.cost for one in some)
            least = fmean(one.clairvoyant for one in some)
            met, of = sum(one.met for one in some), runs * len(some)
            job = f"pools, pause, 24 h, {len(there)} zones, {factor:.2f}"
            if most:
                yield row, Case(job, cost, most[number], met, of, least)
            yield row, Case(f"{job}: of the clairvoyant", cost / least, beside[number], met, of)
            yield row, Case(f"{job}: deadlines missed", 1 - met / of, 0.0)


def _auctions(runner: Runner) -> Iterator[tuple[str, Case]]:
    """Rows G and H: BidBrain on the prices of 2016 and 2015."""
    asked = runner.asked
    folder = asked.prices or _recorded(asked.data, "spot-prices")
    if folder is None:
        return
    rows = auctions.rows_of(folder)
    works = {
        f"{row.name}, {hours} h": auctions.Work(folder, row.name, hours, asked.runs, asked.seed)
        for row in rows
        for hours in row.most
    }
    found = runner.map("auctions", auctions.measured, works)
    for row in rows:
        for hours, most in row.most.items():
            one = found[f"{row.name}, {hours} h"]
            job = f"bidbrain, {hours} h"
            yield row.name, Case(f"{job}: cost", one.bidbrain, most, clairvoyant=one.clairvoyant)
            if (bar := row.of_elastic.get(hours)) is not None:
                beside = one.bidbrain / one.elastic
                yield row.name, Case(f"{job}: of standard + elastic", beside, bar)
            if row.paid is not None:
                yield row.name, Case(f"{job}: machine time not free", 1 - one.free, row.paid)
            if row.time is not None:
                yield row.name, Case(f"{job}: time", one.time, row.time)


# Cases: billing rule, seconds that a machine ran, True if preempted, USD per hour, USD billed.
BILLS = (
    ("ec2", 900.0, True, 0.158, 0.0),
    ("ec2", 2 * HOUR_S, True, 0.158, 0.316),
    ("ec2", 900.0, False, 0.158, 0.0395),
    ("ec2", 20.0, False, 0.9, 0.015),
    ("ec2-2017", 5000.0, True, 0.2, 0.2),
    ("ec2-2017", 5000.0, False, 0.2, 0.4),
    ("ec2-2017", 3000.0, True, 0.2, 0.0),
    ("gce", 50.0, True, 3.6, 0.0),
    ("gce", 90.0, True, 3.6, 0.09),
)
# Mean life of preempted machines, and the share of their time that EC2 charges.
PAID_SHARES = ((900.0, 0.09), (1.8 * HOUR_S, 0.89), (9 * HOUR_S, 0.994))


def _bill() -> Iterator[tuple[str, Case]]:
    """Row I: bills of single machines, compared with the provider's rules."""
    wrong = 0
    for name, ran_s, preempted, usd_per_hour, usd in BILLS:
        paid_s = float(BY_NAME[name].paid_s(ran_s, preempted=preempted))
        wrong += abs(paid_s * usd_per_hour / HOUR_S - usd) >= CENT / 100
    yield "I", Case("bills of one machine that are not to the cent", wrong, 0)
    wrong = sum(
        abs(BY_NAME["ec2"].paid_share(mean_s) - share) >= CENT / 2 for mean_s, share in PAID_SHARES
    )
    yield "I", Case("shares of interrupted time that EC2 would not charge", wrong, 0)


def _live(runner: Runner) -> Iterator[tuple[str, Case]]:
    """Row J, and row I's bill of a live run: a job on processes, under bids in a moving market."""
    if not runner.asked.live:
        return
    found = live.measured()
    yield "I", Case("cents by which the bill of a live run is off", found.cents, 0)
    yield "J", Case("bidbrain, live: machines launched twice", found.twice, 0)
    yield "J", Case("bidbrain, live: machines forgotten", found.forgotten, 0)
    yield "J", Case("bidbrain, live: records lost or used twice", found.wrong, 0)
    yield "J", Case("bidbrain, live: evictions that did not come", float(not found.evicted), 0)
    unread = f"bidbrain, live: partitions unread for more than {live.UNREAD_S:g} s"
    yield "J", Case(unread, found.unread, 0, lag_s=found.unread_s)
