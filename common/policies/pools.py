"""Several pools: how many machines of which type and zone, and which worker gets which.

Pools differ in price, availability, speed and capacity; the first is on-demand. With one worker per
stream (`hold`) the plan is Theorem 5 for any number of pools, found by a mixed-integer program.
Where streams move to the survivors (`reassign`) the runtime is theta_0 and machines are counted.

The expected cost is a ratio, dollars a second over records a second, both linear in the numbers of
machines. Dinkelbach's iteration makes a few linear programs of it: for a guess q of the least
ratio, the x that minimises dollars - q records has a ratio below q, unless q is the least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from common.policies.adaptive import Adaptive
from common.policies.fixed import OnDemandOnly
from common.policies.policy import NOWHERE, ON_DEMAND, by_slot
from common.policies.reassign import Computing, machines_for_stability
from common.theory.errors import ParameterError
from common.theory.preemption import effective_availability
from common.theory.provisioning import Plan

if TYPE_CHECKING:
    from common.policies.policy import Decision, Places, Situation
    from common.theory.provisioning import Binding
    from common.theory.work import Pool, Rates, Work


Array: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

MOST_CLASSES = 32  # of rates: twice as many take three times as long and save 0.4 % at most
GAP = 1e-4  # relative, at which a program counts as solved: prices are not known that well
LIMIT_S = 10.0  # for one program; the best that it has found is taken then
ROUNDS = 20  # of Dinkelbach's iteration, which converges faster than linearly: 5 are many
TOLERANCE = 1e-9  # relative, of sums of rates
# What staying may take of the records that are needed: no rate is known better than that (a Poisson
# stream of 125/s after 1,000 s to 0.3 %), and machines that change places are not to be had for it.
STAYING = 0.002
_LACKS: dict[Binding, str] = {
    "stability": "no machine keeps up with its stream; ",
    "capacity": "all pools together have too few machines; ",
    "infeasible": "not even the most available machines are in time; ",
}


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Workers of equal rates, or nearly so, the lowest first."""

    members: tuple[Counts, ...]  # C arrays of workers, each sorted by rate
    mean_per_s: Array  # (C,)
    highest_per_s: Array  # (C,)

    @property
    def sizes(self) -> Counts:
        """(C,) how many workers each has."""
        return np.array([len(members) for members in self.members], np.int64)


def classes_of(rates_per_s: Rates, most: int = MOST_CLASSES, tolerance: float = 0.0) -> Classes:
    """Group workers by rate: equal ones, or where there are more rates than `most`, by quantiles.

    A class counts with its mean rate. Its slowest workers are given to its least available pools,
    so that they lose no more than the mean says: it errs towards the deadline.

    Args:
        rates_per_s: Of the workers.
        most: Classes.
        tolerance: Relative; rates closer than that may count as equal. Estimates of equal rates
            would otherwise change places with each other whenever they are looked at.
    """
    order = np.argsort(rates_per_s, kind="stable")
    ordered = rates_per_s[order]
    starts = [0]
    for worker in range(1, len(ordered)):
        if ordered[worker] > ordered[starts[-1]] * (1 + tolerance):
            starts.append(worker)
    if len(starts) > most:
        starts = np.linspace(0, len(ordered), most, endpoint=False).round().astype(int).tolist()
    members = tuple(np.split(order, starts[1:]))
    mean = np.array([rates_per_s[some].mean() for some in members])
    return Classes(members, mean, np.array([rates_per_s[some].max() for some in members]))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Find integers x[pool, class], (P, C), of least cost per record.

    The workers of a class on all pools are its size; the machines of a pool are no more than it
    has; and the records of a second are enough (equation 23 for pools).
    """

    usd_per_s: Array  # (P,) pi alpha of a machine
    records_per_s: Array  # (P, C) alpha lambda of a worker
    sizes: Counts  # (C,)
    most: Array  # (P,) machines; infinite: as many as wanted
    allowed: npt.NDArray[np.bool_]  # (P, C) whether a machine keeps up with its stream
    needed_per_s: float  # J K b / theta

    def solve(self) -> Counts | None:
        """Give x, or None where there is none.

        The first guess is the least ratio of real numbers, a lower bound found in milliseconds. So
        usually one program of integers finds x, and a second one proves it.
        """
        ratio, found = 0.0, None
        for integers in (False, True):
            for _ in range(ROUNDS):
                x = self._minimise(ratio, integers=integers)
                if x is None:
                    return found
                last, ratio = ratio, self._ratio(x)
                if integers:
                    found = x.round().astype(np.int64)
                if abs(ratio - last) <= GAP * ratio:
                    break
        return found

    def _ratio(self, x: Array) -> float:
        """Give dollars per record."""
        return float(self.usd_per_s @ x.sum(axis=1)) / float((self.records_per_s * x).sum())

    def _minimise(self, ratio: float, *, integers: bool) -> Array | None:
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 -- slow to load
        from scipy.sparse import eye_array, hstack, kron, vstack  # noqa: PLC0415 -- slow to load

        pools, classes = self.allowed.shape
        count = pools * classes
        rows = [
            kron(np.ones((1, pools)), eye_array(classes)),
            kron(eye_array(pools), np.ones((1, classes))),
            self.records_per_s.reshape(1, -1),
        ]
        # At the least ratio the objective is 0, of which no relative gap can be asked. A column
        # that is always 1 lifts it to the size of the bill.
        matrix = hstack([vstack(rows), np.zeros((classes + pools + 1, 1))], format="csr")
        scale = self.usd_per_s.max() or 1.0  # HiGHS takes differences below 1e-7 for rounding
        prices = (self.usd_per_s[:, None] - ratio * self.records_per_s).ravel() / scale
        result = milp(
            np.append(prices, self.sizes.sum()),
            integrality=np.full(count + 1, int(integers)),
            constraints=LinearConstraint(
                matrix,
                np.concatenate((self.sizes, np.zeros(pools), [self.needed_per_s])),
                np.concatenate((self.sizes, self.most, [np.inf])),
            ),
            bounds=Bounds(
                np.append(np.zeros(count), 1),
                np.append(np.where(self.allowed, self.sizes, 0), 1),
            ),
            options={"mip_rel_gap": GAP, "time_limit": LIMIT_S},
        )
        if result.x is None:
            return None
        return np.asarray(result.x[:-1], np.float64).reshape(pools, classes)


class PoolPlan(NamedTuple):
    """Which worker gets a machine of which pool, and what to expect of it."""

    places: Places
    plan: Plan


def plan_hold(
    work: Work,
    pools: tuple[Pool, ...],
    gradient_s: float,
    last: Places | None = None,
    tolerance: float = 0.0,
) -> PoolPlan:
    """Give each worker a machine of some pool, at the least expected cost that meets the deadline.

    A pool in which a worker could not keep up with its own stream, lambda mu_C / speed >= b
    (Proposition 1 for one worker), is not for that worker. With one spot pool the plan is Theorem
    5's. Where there is none, `feasible` is False and the most available machines go to the highest
    rates; workers for which nothing is left have no place.

    Args:
        work: What is left.
        pools: On-demand first.
        gradient_s: mu_C, on a machine of speed 1.
        last: Where workers are now; among those of one class, whoever can stay does.
        tolerance: See `classes_of`.

    Raises:
        ParameterError: If there is no pool.
    """
    if not pools:
        raise ParameterError("pools", "name at least the on-demand machines")
    classes = classes_of(work.rates_per_s, tolerance=tolerance)
    available = np.array([effective_availability(pool) for pool in pools])
    speeds = np.array([pool.speed for pool in pools])
    usd_per_s = np.array([pool.wanted_usd_per_s for pool in pools])
    keeps_up = classes.highest_per_s * gradient_s < speeds[:, None] * work.batch_size
    pays = available > 0  # a stream left alone costs nothing and does nothing: no use of a pool
    if pools[ON_DEMAND].capacity is None:
        pays[1:] &= usd_per_s[1:] < usd_per_s[ON_DEMAND] * available[1:]
    program = Program(
        usd_per_s=usd_per_s,
        records_per_s=available[:, None] * classes.mean_per_s,
        sizes=classes.sizes,
        most=np.array([math.inf if pool.capacity is None else pool.capacity for pool in pools]),
        allowed=keeps_up & pays[:, None],
        needed_per_s=_needed_per_s(work),
    )
    x = program.solve() if math.isfinite(program.needed_per_s) else None
    verdict: tuple[bool, Binding]
    if x is None:
        places = _nearest(program, classes, available)
        verdict = False, _lacking(program)
    else:
        places = _places(classes, x, available, last)
        enough = program.needed_per_s * (1 - STAYING)
        if last is not None and _records_per_s(work, available, places) < enough:
            places = _places(classes, x, available, None)
        verdict = True, _binding(work, program, available, places)
    records_per_s = _records_per_s(work, available, places)
    runtime_s = work.records / records_per_s if records_per_s else math.inf
    return _pool_plan(work, pools, places, verdict, runtime_s)


def _needed_per_s(work: Work) -> float:
    if not work.updates:
        return 0.0
    if not work.deadline_s:
        return math.inf
    return work.records / work.deadline_s * (1 - TOLERANCE)


def _places(classes: Classes, x: Counts, available: Array, last: Places | None) -> Places:
    """Give out places class by class: stay where possible, else low rates to low availability."""
    places = np.full(int(classes.sizes.sum()), NOWHERE, np.int8)
    by_availability = np.argsort(available, kind="stable")
    for index, members in enumerate(classes.members):
        quotas = x[:, index].copy()
        moving = members
        if last is not None:
            for pool in range(len(quotas)):
                staying = members[last[members] == pool][: quotas[pool]]
                places[staying] = pool
                quotas[pool] -= len(staying)
            moving = members[places[members] == NOWHERE]
        places[moving] = np.repeat(by_availability, quotas[by_availability])
    return places


def _nearest(program: Program, classes: Classes, available: Array) -> Places:
    """Give the highest rates the most available machines, as far as there are any."""
    left = program.most.copy()
    places = np.full(int(classes.sizes.sum()), NOWHERE, np.int8)
    best_first = np.argsort(-available, kind="stable")
    for index in reversed(range(len(classes.members))):
        members = classes.members[index]
        for pool in best_first:
            if program.allowed[pool, index]:
                count = int(min(left[pool], len(members)))
                members, given = np.split(members, [len(members) - count])
                places[given] = pool
                left[pool] -= count
    return places


def _lacking(program: Program) -> Binding:
    if not program.allowed.any(axis=0).all():
        return "stability"
    return "capacity" if program.most.sum() < program.sizes.sum() else "infeasible"


def _records_per_s(work: Work, available: Array, places: Places) -> float:
    return float(np.where(places == NOWHERE, 0.0, available[places]) @ work.rates_per_s)


def _binding(work: Work, program: Program, available: Array, places: Places) -> Binding:
    """Name what keeps it from one more worker on spot, or from a cheaper pool."""
    spot = np.flatnonzero(program.usd_per_s[1:] < program.usd_per_s[0] * available[1:]) + 1
    if not len(spot):
        return "price" if available[1:].any() else "availability"
    if (places != ON_DEMAND).all():
        return "workers"
    counts = np.bincount(places, minlength=len(available))
    room = spot[counts[spot] < program.most[spot]]
    if not len(room):
        return "capacity"
    lost = (1 - available[room].max()) * work.rates_per_s[places == ON_DEMAND].min()
    spare = _records_per_s(work, available, places) - program.needed_per_s
    return "deadline" if lost > spare else "cost"


def plan_machines(work: Work, pools: tuple[Pool, ...], gradient_s: float) -> PoolPlan:
    """Rent the cheapest machines that keep up with all streams, whoever has which (`reassign`).

    They are enough on average: the sum of alpha speed is Proposition 1's number with the headroom.
    How likely they fall short for long is weighed, for two pools, in `reassign`.

    Raises:
        ParameterError: If there is no pool.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 -- slow to load

    if not pools:
        raise ParameterError("pools", "name at least the on-demand machines")
    usd_per_s = np.array([pool.wanted_usd_per_s for pool in pools])
    useful = np.array([effective_availability(pool) * pool.speed for pool in pools])
    most = [pool.at_most(work.workers) for pool in pools]
    needed = machines_for_stability(work, Computing(gradient_s))
    counts: Counts | None = None
    if needed is not None:
        result = milp(
            usd_per_s / (usd_per_s.max() or 1.0),
            integrality=np.ones(len(pools)),
            constraints=LinearConstraint(
                np.stack((useful, np.ones(len(pools)))), [needed, 0], [np.inf, work.workers]
            ),
            bounds=Bounds(0, most),
            options={"mip_rel_gap": GAP, "time_limit": LIMIT_S},
        )
        counts = None if result.x is None else np.asarray(result.x).round().astype(np.int64)
    late = work.undisturbed_s > work.deadline_s
    binding: Binding = "stability"
    if late:
        binding = "infeasible"
    elif counts is None and needed is not None:
        binding = "capacity"
    feasible = counts is not None and not late
    if counts is None:
        counts = np.zeros(len(pools), np.int64)
        for pool in np.argsort(-useful, kind="stable"):
            counts[pool] = min(most[pool], work.workers - counts.sum())
    places = np.full(work.workers, NOWHERE, np.int8)
    places[: counts.sum()] = np.repeat(np.arange(len(pools)), counts)
    return _pool_plan(work, pools, places, (feasible, binding), work.undisturbed_s)


def _pool_plan(
    work: Work,
    pools: tuple[Pool, ...],
    places: Places,
    verdict: tuple[bool, Binding],
    runtime_s: float,
) -> PoolPlan:
    feasible, binding = verdict
    counts = np.bincount(places[places != NOWHERE], minlength=len(pools)).tolist()
    prices = [pool.wanted_usd_per_s for pool in pools]
    rented = math.fsum(count * price for count, price in zip(counts, prices, strict=True))
    usd = rented * runtime_s if rented else 0.0
    alone_usd = work.on_demand_only_usd(pools[ON_DEMAND])
    spot_workers = (places > ON_DEMAND).nonzero()[0]
    named = ", ".join(
        f"{count} in {pool.name}" for count, pool in zip(counts, pools, strict=True) if count
    )
    missing = int(np.count_nonzero(places == NOWHERE))
    without = f", {missing} slots without a machine" if missing else ""
    takes = f"takes {runtime_s:,.6g} s of {work.deadline_s:,.6g} s on average"
    reason = f"{named or 'nothing'}{without}: {takes}"
    plan = Plan(
        feasible=feasible,
        spot=len(spot_workers),
        on_demand=counts[ON_DEMAND],
        spot_workers=spot_workers,
        expected_cost_usd=usd,
        expected_runtime_s=runtime_s,
        cost_ratio_to_on_demand=usd / alone_usd if alone_usd else 1.0,
        binding=binding,
        reason=reason if feasible else f"not to be met: {_LACKS.get(binding, '')}{reason}",
    )
    return PoolPlan(places, plan)


@dataclass(frozen=True, slots=True)
class Pools:
    """Plans over all pools once, and again when what it planned with has moved.

    Prices, availabilities and the gradient time may move by `moved`. The pace, the share of the
    time left that the work left takes at full rate, is held tighter: a deadline leaves a few
    percent of slack, of which luck should not take much before it is answered. With `hold` later
    plans keep a reserve, as those of `Adaptive` do: the mean alone is late every second time.
    """

    name: ClassVar[str] = "pools"
    watches_outages: ClassVar[bool] = False  # single outages are what the mix is chosen for
    on_preemption: Literal["hold", "reassign"] = "hold"
    review_s: float = 30.0
    moved: float = 0.05
    pace_moved: float = 0.01
    tolerance: float = 0.05  # rates that close count as equal in later plans, see `classes_of`

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide anew, or return `last` where nothing that matters has changed.

        Raises:
            ParameterError: If there is no pool.
        """
        reason = "first plan" if last is None else self._reason(situation, last)
        if last is not None and reason is None:
            return last
        work, pools = situation.work, situation.pools
        if self.on_preemption == "reassign":
            found = plan_machines(work, pools, situation.gradient_s)
        elif last is None:
            found = plan_hold(work, pools, situation.gradient_s)
        else:
            time_s = self._time_s(situation, last)
            if work.undisturbed_s > time_s:
                alone = OnDemandOnly().reconsider(situation, None)
                return last if np.array_equal(alone.places, last.places) else alone
            work = replace(work, deadline_s=time_s)
            found = plan_hold(work, pools, situation.gradient_s, last.places, self.tolerance)
        stand_ins = np.zeros(work.workers, np.bool_)
        return by_slot(found.places, stand_ins, found.plan, reason or "", situation)

    def _time_s(self, situation: Situation, last: Decision) -> float:
        """Give the time left without the reserve that `Adaptive` keeps, and for the same reason."""
        rates = situation.work.rates_per_s
        lost = float(rates[last.places > ON_DEMAND].sum() / rates.sum())
        reserve_s = Adaptive(self.review_s).reserve_of_s(situation, lost)
        return max(situation.work.deadline_s - float(reserve_s), 0.0)

    def _reason(self, situation: Situation, last: Decision) -> str | None:
        basis = last.basis
        if self.on_preemption == "hold" and (last.places > ON_DEMAND).any():
            needs_s, time_s = situation.work.undisturbed_s, self._time_s(situation, last)
            if needs_s > time_s:
                return f"close: on-demand machines alone need {needs_s:,.6g} s of {time_s:,.6g} s"
        numbers = [("gradient time", situation.gradient_s, basis.gradient_s, self.moved)]
        for pool, then in zip(situation.pools, basis.pools, strict=True):
            numbers += [
                (f"price of {pool.name}", pool.usd_per_hour, then.usd_per_hour, self.moved),
                (f"availability of {pool.name}", pool.availability, then.availability, self.moved),
            ]
        numbers.append(("pace", _pace(situation.work), _pace(basis.work), self.pace_moved))
        for what, now, before, limit in numbers:
            if abs(now - before) > limit * before:
                return f"{what} moved from {before:.4g} to {now:.4g}"
        return None


def _pace(work: Work) -> float:
    return work.undisturbed_s / max(work.deadline_s, 1.0)
