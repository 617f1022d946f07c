"""Convert a request to the theory's input, and its result to one answer for all clients.

An error names the request's field. This module needs scipy, so not every command imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.api.answers import BidAnswer, CurveAnswer, PlanAnswer, PoolPlanAnswer
from common.errors import GivenError
from common.spot.planning.bids import bids, check_bids, computed_per_s
from common.spot.planning.remaining import Remaining, arriving, measured, remaining
from common.spot.policies.chance import deadline_probability, plan_with_probability
from common.spot.theory.errors import ParameterError
from common.spot.theory.provisioning import CostCurve, Plan, cost_curve, plan, plan_of
from common.spot.theory.work import PaperMarket, Pool, Work, gb_per_hour, market

if TYPE_CHECKING:
    from common.kafka.port import Log
    from common.spot.planning.request import PlanRequest, SpotPoolAsked

BIDS = (
    "cost and runtime assume that the machines of the first bids keep running at these prices; use"
    " `doll simulate` to include evictions and new prices"
)
# Fields of a request by the theory's parameter, if their names differ.
_FIELDS = {
    "spot.availability": "availability",
    "spot.cycle_s": "cycle_s",
    "spot.usd_per_hour": "spot_usd_per_hour",
    "on-demand.usd_per_hour": "on_demand_usd_per_hour",
}


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Input of the theory."""

    work: Work
    # One for each kind of spot machines.
    markets: tuple[PaperMarket, ...]
    # Names of the workers; empty if only their number is known.
    names: tuple[str, ...] = ()
    # Notes for the user on the source of the numbers.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PoolPlan:
    """A plan with one kind of spot machines, and the cost of every other number of them."""

    market: PaperMarket
    plan: Plan
    curve: CostCurve
    # (N_tot + 1,) True if this number of machines meets the request.
    enough: npt.NDArray[np.bool_]
    # (N_tot + 1,) probability of meeting the deadline.
    chances: npt.NDArray[np.float64]


def gather(given: PlanRequest, open_log: Callable[[], Log], now_s: float) -> Asked:
    """Combine the request with the job that it names, if any.

    Args:
        given: The request.
        open_log: Called only if a job is named.
        now_s: Seconds since 1970. The job's deadline counts from its submission.

    Raises:
        GivenError: If a number is invalid or missing, by its field.
        NotFoundError: If the job does not exist.
        UnavailableError: If Kafka is unavailable and a job is named.
    """
    if given.policy == "bidbrain":
        check_bids(given, open_log)
    else:
        _check_rates(given)
    _check_pools(given)
    log = open_log() if given.job else None
    left = remaining(given.job, log, now_s) if log else Remaining()
    values = {
        field: _first(getattr(given, field), getattr(left, field))
        for field in ("group_size", "batch_size", "updates", "deadline_s")
    }
    of_pool = () if given.pools else ("availability", "spot_usd_per_hour")
    values |= {field: getattr(given, field) for field in (*of_pool, "on_demand_usd_per_hour")}
    found = {field: value for field, value in values.items() if value is not None}
    lacking = tuple(field for field in values if field not in found)
    if lacking:
        silent = f"; the job {given.job} does not have it" if given.job else ""
        raise GivenError(lacking, f"must be given{silent}")
    names, notes = tuple[str, ...](), left.notes
    if given.policy == "bidbrain":
        sizes = int(found["group_size"]), int(found["batch_size"])
        workers, gradient_s = given.workers or 1, given.gradient_s or 1.0
        rate_per_s = computed_per_s(workers, *sizes, gradient_s)
        rates_per_s, source = np.full(workers, rate_per_s), "gradient_s"
    elif given.rates_per_s is not None:
        rates_per_s, source = np.array(given.rates_per_s, np.float64), "rates_per_s"
    elif given.workers is not None and given.rate_per_s is not None:
        rates_per_s, source = np.full(given.workers, given.rate_per_s, np.float64), "rate_per_s"
    elif log:
        seen = arriving(given.job, log)
        names, rates_per_s, source = seen.workers, seen.rates_per_s, "job"
        notes += seen.notes
    with named(source):
        work = Work(
            rates_per_s,
            int(found["group_size"]),
            int(found["batch_size"]),
            found["updates"],
            found["deadline_s"],
        )
        on_demand_usd = found["on_demand_usd_per_hour"]
        if given.pools:
            on_demand = market(on_demand_usd, 0.0, 1.0).on_demand
            update_mb = _first(given.update_mb, left.update_mb) or 0.0
            moved = gb_per_hour(update_mb, work.updates_per_s)
            observed = measured(given.job, log) if log and given.seen else {}
            pools = [_pool(each, moved, observed) for each in given.pools]
            markets = tuple(PaperMarket(on_demand, pool) for pool in pools)
            names_seen = [pool.name for pool in pools if f"availability.{pool.name}" in observed]
            if names_seen:
                said = f"availability and cycle of {', '.join(names_seen)} are"
                notes += (f"{said} what the provisioner of {given.job} has observed",)
        else:
            one = market(on_demand_usd, found["spot_usd_per_hour"], found["availability"])
            if given.cycle_s is not None:
                one = replace(one, spot=replace(one.spot, cycle_s=given.cycle_s))
            markets = (one,)
    return Asked(work, markets, names, notes)


def answers(asked: Asked, *, probability: float | None, spot: int | None) -> tuple[PoolPlan, ...]:
    """Plan with each kind of spot machines: for the mean, for a probability, or for a given N_s.

    Returns:
        The best plan first, the others in the request's order.

    Raises:
        GivenError: If a number is invalid, by its field.
    """
    if spot is not None and probability is not None:
        raise GivenError(
            ("spot", "probability"), "give only one of them; a plan always has its probability"
        )
    work, found = asked.work, list[PoolPlan]()
    # An overflow is infinite: the job takes forever.
    with named(), np.errstate(all="ignore"):
        for prices in asked.markets:
            curve = cost_curve(work, prices)
            chances = deadline_probability(work, prices.spot, curve.order)
            enough = curve.feasible
            if probability is not None:
                planned = plan_with_probability(work, prices, probability)
                enough = chances >= probability
            else:
                planned = plan(work, prices) if spot is None else plan_of(work, prices, spot)
            found.append(PoolPlan(prices, planned, curve, enough, chances))
    best = min(found, key=lambda one: (not one.plan.feasible, one.plan.expected_cost_usd))
    return (best, *(one for one in found if one is not best))


def plan_answer(request: PlanRequest, open_log: Callable[[], Log], now_s: float) -> PlanAnswer:
    """Plan a request. Infinite numbers become null.

    Args:
        request: The request.
        open_log: Called only if a job is named.
        now_s: Seconds since 1970.

    Raises:
        GivenError: If a number is invalid or missing, by its field.
        NotFoundError: If the job does not exist.
        UnavailableError: If Kafka is unavailable and a job is named.
    """
    asked = gather(request, open_log, now_s)
    if request.policy == "bidbrain":
        return _bids_answer(asked, request)
    found = answers(asked, probability=request.probability, spot=request.spot)
    best, several = found[0], len(found) > 1
    workers = tuple(sorted(best.plan.spot_workers.tolist())) if request.list_workers else None
    return PlanAnswer(
        **_common(best.plan, asked.work, best.market),
        deadline_probability=_share(float(best.chances[best.plan.spot])),
        spot_workers=workers,
        names=asked.names,
        curve=_curve(best, request.curve) if request.curve else None,
        notes=asked.notes,
        arrivals_per_s=float(asked.work.rates_per_s.sum()),
        on_demand_only_usd=_finite(float(best.curve.costs_usd[0])),
        pool=best.market.spot.name if several else "",
        pools=tuple(map(_of_pool, found)) if several else (),
    )


def _bids_answer(asked: Asked, request: PlanRequest) -> PlanAnswer:
    """Plan bids. They depend only on prices, so there is no probability."""
    work, first = asked.work, asked.markets[0]
    with named("gradient_s"), np.errstate(all="ignore"):
        pools = (first.on_demand, *(market.spot for market in asked.markets))
        decision = bids(work, pools, request)
    return PlanAnswer(
        **_common(decision.plan, work, first),
        deadline_probability=float(decision.plan.feasible),
        spot_workers=None,
        names=(),
        curve=None,
        notes=(*asked.notes, BIDS),
        arrivals_per_s=0.0,
        on_demand_only_usd=_finite(work.on_demand_only_usd(first.on_demand)),
        bids=tuple(
            BidAnswer(pool=offer.pool, machines=count, at_most_usd_per_hour=offer.bid_usd_per_hour)
            for offer, count in decision.machines.items()
        ),
    )


def _common(plan: Plan, work: Work, prices: PaperMarket) -> dict[str, Any]:
    """Return the fields of a plan of any kind."""
    return {
        "feasible": plan.feasible,
        "spot": plan.spot,
        "on_demand": plan.on_demand,
        "expected_cost_usd": _finite(plan.expected_cost_usd),
        "expected_runtime_s": _finite(plan.expected_runtime_s),
        "cost_ratio_to_on_demand": _finite(plan.cost_ratio_to_on_demand),
        "binding": plan.binding,
        "reason": plan.reason,
        "workers": work.workers,
        "group_size": work.group_size,
        "batch_size": work.batch_size,
        "updates": work.updates,
        "deadline_s": work.deadline_s,
        "undisturbed_s": _finite(work.undisturbed_s),
        "availability": prices.spot.availability,
        "spot_usd_per_hour": prices.spot.usd_per_hour,
        "on_demand_usd_per_hour": prices.on_demand.usd_per_hour,
        "cycle_s": prices.spot.cycle_s,
    }


def _of_pool(found: PoolPlan) -> PoolPlanAnswer:
    plan, pool = found.plan, found.market.spot
    return PoolPlanAnswer(
        name=pool.name,
        usd_per_hour=pool.usd_per_hour,
        availability=pool.availability,
        cycle_s=pool.cycle_s,
        feasible=plan.feasible,
        spot=plan.spot,
        expected_cost_usd=_finite(plan.expected_cost_usd),
        expected_runtime_s=_finite(plan.expected_runtime_s),
        deadline_probability=_share(float(found.chances[plan.spot])),
    )


@contextmanager
def named(rates_field: str = "rates_per_s") -> Iterator[None]:
    """Convert the theory's errors to errors of the field that gave the number.

    Raises:
        GivenError: In place of each ParameterError.
    """
    try:
        yield
    except ParameterError as error:
        field = _FIELDS.get(error.parameter, error.parameter)
        if error.parameter == "rates_per_s":
            field = rates_field
        problem = str(error).removeprefix(f"{error.parameter}: ")
        raise GivenError((field,), problem) from error


def _check_rates(given: PlanRequest) -> None:
    one = given.workers is not None, given.rate_per_s is not None
    if given.rates_per_s is not None and any(one):
        others = "conflicts with a number of workers at one rate; give only one of them"
        raise GivenError(("rates_per_s",), others)
    if any(one) and not all(one):
        lacking, there = ("rate_per_s", "number of workers") if one[0] else ("workers", "rate")
        raise GivenError((lacking,), f"must be given with a {there}")
    if given.rates_per_s is None and not any(one) and not given.job:
        others = "must be given, or a rate for each worker, or a job"
        raise GivenError(("workers", "rate_per_s"), others)


def _check_pools(given: PlanRequest) -> None:
    for field in ("availability", "spot_usd_per_hour", "cycle_s"):
        if given.pools and getattr(given, field) is not None:
            raise GivenError((field,), "conflicts with `pools`, which have their own; remove it")
    names = [pool.name for pool in given.pools or ()]
    for name in names:
        if names.count(name) > 1:
            raise GivenError(("pools",), f"must have different names, got {name!r} twice")


def _pool(asked: SpotPoolAsked, gb_per_hour: float, seen: Mapping[str, float]) -> Pool:
    return Pool.of(
        asked,
        availability=seen.get(f"availability.{asked.name}", asked.availability),
        cycle_s=seen.get(f"cycle_s.{asked.name}", asked.cycle_s),
        billing=asked.billing.rules(),
        gb_per_hour=gb_per_hour,
    )


def _first(given: float | None, known: float | None) -> float | None:
    return known if given is None else given


def _curve(found: PoolPlan, points: int) -> CurveAnswer:
    count = len(found.curve.order)
    every = math.ceil(count / points)
    rows = sorted({*range(0, count + 1, every), found.plan.spot, count})
    return CurveAnswer(
        spot=tuple(rows),
        cost_usd=_column(found.curve.costs_usd[rows]),
        runtime_s=_column(found.curve.runtimes_s[rows]),
        in_time=tuple(map(_share, found.chances[rows].tolist())),
        enough=tuple(found.enough[rows].tolist()),
    )


def _column(values: npt.NDArray[np.float64]) -> tuple[float | None, ...]:
    return tuple(map(_finite, values.tolist()))


def _share(value: float) -> float:
    """Clip a probability that left its range by rounding; 0 for NaN."""
    return min(1.0, max(0.0, value))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
