"""Several pools: how many machines of each, for a deadline, whichever stream they serve.

With one worker per stream (`hold`) machines are counted. Spot machines come first, from the pool
whose ready second is cheapest and which gives any; a lost one is asked for elsewhere at once, and
more may run than there are streams. Machines on demand do what spot is not expected to do by the
deadline:

    single losses   spares on demand, as many as are missing on average
    all are gone    nothing while there is time to wait, then one for each stream
    little time     as many as would still be in time if the largest pool went now

Where streams move to the survivors (`reassign`) the runtime is theta_0, and the cheapest machines
that keep up are rented.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from common.policies.adaptive import LATE
from common.policies.fixed import OnDemandOnly
from common.policies.policy import NOWHERE, ON_DEMAND, Decision, MachineCount, by_slot
from common.policies.reassign import Computing, machines_for_stability
from common.ports.machines import Offer
from common.theory.errors import ParameterError, not_negative, positive
from common.theory.preemption import effective_availability
from common.theory.provisioning import Plan
from common.theory.updates import partial_batches_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.policies.policy import Places, Situation
    from common.theory.provisioning import Binding
    from common.theory.work import Pool, Work


Array: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

GAP = 1e-4  # relative, at which a program counts as solved: prices are not known that well
LIMIT_S = 10.0  # for one program; the best that it has found is taken then
# Relative, of a ready second. Pools that close share machines: a loss takes some of them only, and
# the others are known to give more.
EQUAL_PRICES = 0.05
# Of the reserve, towards the end: who kept all of it until the last update would be early by it.
SPENT = 0.25
ALMOST = 0.5  # of a stream
# Machines of a pool that has just been lost are lost sooner than the mean says.
LOSSES = 2.0
# A spare on demand is not given back for it: it would be started again a moment later.
SPARES = 1
ROUNDING = 1e-9
_LACKS: dict[Binding, str] = {
    "stability": "no machine keeps up with its stream; ",
    "capacity": "all pools together have too few machines; ",
    "infeasible": "not even the most available machines are in time; ",
}


def expected_serving(machines: int, share: float, streams: int, certain: int = 0) -> float:
    """Give how many of some streams are served on average: E[min(streams, certain + ready)].

    Ready machines are binomial, B(machines, share), taken as normal.
    """
    mean, room = machines * share, max(streams - certain, 0)
    deviation = math.sqrt(mean * (1 - share))
    if not deviation:
        return min(mean, room) + min(certain, streams)
    z = (room - mean) / deviation
    below = 0.5 * math.erfc(-z / math.sqrt(2))
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    served = room - (room - mean) * below - deviation * density
    return max(served, 0.0) + min(certain, streams)


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """The spot pools that are worth their price, the best first; arrays are (Z,)."""

    pools: tuple[Pool, ...]
    usd_per_s: Array  # of a ready second
    asked: Counts  # machines, by the last decision
    ready: Counts
    had: Counts  # ready or coming

    @property
    def room(self) -> Array:
        """How many more can be had at all."""
        most = [math.inf if pool.capacity is None else pool.capacity for pool in self.pools]
        return np.array(most) - self.had

    @property
    def gone(self) -> bool:
        """Whether everything that was asked for has been lost, everywhere."""
        return bool(self.asked.all()) and not self.had.any()

    @property
    def scarce(self) -> bool:
        """Whether a pool gives machines, and fewer than it is asked for: each is lost by itself."""
        some = self.had > 0
        return bool(some.any() and (self.asked > self.had)[some].all())

    @property
    def main(self) -> Pool:
        """The pool that matters most now."""
        return self.pools[int(np.argmax(self.had))]

    @property
    def share(self) -> float:
        """Which share of the machines asked for is ready, on average.

        Where all are given, lost ones are replaced at once: only start-up takes its part.
        """
        main = self.main
        delivers = effective_availability(main)
        return delivers if self.scarce or not main.availability else delivers / main.availability

    def counts(self, wanted: int) -> dict[int, int]:
        """Say how many machines of which pools there shall be; a pool that is not named is left.

        Machines stay where they are. What is missing is asked for in the cheapest pools that have
        not just refused; of those that have, one machine tells when that is over. Where all have,
        all are asked for all of it.
        """
        missing = wanted - int(self.had.sum())
        there = {index: int(count) for index, count in enumerate(self.had) if count}
        if missing <= 0:
            return self._without(there, -missing)
        refused = self.asked > self.had
        give = np.flatnonzero(~refused & (self.room > 0))
        if give.size:
            alike = give[self.usd_per_s[give] <= self.usd_per_s[give].min() * (1 + EQUAL_PRICES)]
            counts = dict.fromkeys(np.flatnonzero(refused).tolist(), 1) | there
            for left, index in zip(range(len(alike), 0, -1), alike.tolist(), strict=True):
                more = int(min(math.ceil(missing / left), self.room[index]))
                missing -= more
                if more:
                    counts[index] = there.get(index, 0) + more
            return counts
        return {
            index: int(count + min(missing, room))
            for index, (count, room) in enumerate(zip(self.had, self.room, strict=True))
        }

    def _without(self, there: dict[int, int], surplus: int) -> dict[int, int]:
        """Let machines go where they are dearest."""
        for index in sorted(there, reverse=True):
            if there[index] <= surplus:
                surplus -= there.pop(index)
            else:
                there[index] -= surplus
                break
        return there


def ready_usd_per_s(pool: Pool) -> float:
    """Give the price of a second in which a machine of a pool is ready, at speed 1.

    Machines live for exponential times of mean u. Of their time they are ready for exp(-S / u), and
    billed as `Billing.paid_share` says.
    """
    life_s = pool.availability * pool.cycle_s
    if pool.availability == 1:
        return (pool.usd_per_s + pool.transfer_usd_per_s) / pool.speed
    if not life_s:
        return math.inf
    usd_per_s = pool.usd_per_s * pool.billing.paid_share(life_s) + pool.transfer_usd_per_s
    return usd_per_s * math.exp(min(pool.start_up_s / life_s, 700.0)) / pool.speed


@dataclass(frozen=True, slots=True)
class _Need:
    """How much is to be done in which time."""

    streams: int
    undisturbed_s: float  # of the work that is left
    time_s: float  # until the deadline, less what arrivals may be late
    reserve_s: float  # what the loss of the largest pool takes until others work in its place

    @property
    def short_s(self) -> float:
        """How much of the reserve is used up."""
        return self.undisturbed_s - (self.time_s - self.reserve_s)

    @property
    def serving(self) -> float:
        """How many streams must be served on average."""
        time_s = self.time_s - (1 - SPENT) * self.reserve_s
        most = self.streams - ALMOST  # all of them are never served on average
        return min(self.streams * self.undisturbed_s / max(time_s, ROUNDING), most)

    @property
    def certain(self) -> int:
        """Machines that make up for the reserve, if all others are lost now."""
        if self.short_s <= 0:
            return 0
        share = min(self.short_s / self.reserve_s, 1.0) if self.reserve_s else 1.0
        return math.ceil(self.streams * share - ROUNDING)


class PoolPlan(NamedTuple):
    """Which worker gets a machine of which pool, and what to expect of it."""

    places: Places
    plan: Plan


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
    """Counts machines over all pools, again whenever one comes or goes.

    With `reassign` it plans once, and again when prices, availabilities or the gradient time have
    moved by `moved`.

    Raises:
        ParameterError: If a number is out of range.
    """

    name: ClassVar[str] = "pools"
    watches_outages: ClassVar[bool] = True
    on_preemption: Literal["hold", "reassign"] = "hold"
    spot_up_to: float = 1.5  # spot machines, times the streams
    max_lag_s: float | None = None  # records may wait so long; None: served as steadily as can be
    reliable: int = 0  # machines that are always on demand
    review_s: float = 10.0  # a reserve is kept for it
    moved: float = 0.05

    def __post_init__(self) -> None:
        positive("review_s", self.review_s)
        if not self.spot_up_to >= 1:
            raise ParameterError("spot_up_to", f"must be at least 1, got {self.spot_up_to:g}")
        not_negative("reliable", self.reliable)
        if self.max_lag_s is not None:
            positive("max_lag_s", self.max_lag_s)

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide anew, or return `last` where nothing that matters has changed.

        Raises:
            ParameterError: If there is no pool.
        """
        if self.on_preemption == "reassign":
            return self._reassigned(situation, last)
        if len(situation.pools) == 1:
            return OnDemandOnly().reconsider(situation, last)
        spot = self._spot(situation, last)
        need = self._need(situation, spot)
        if not spot.pools:
            return self._decided(situation, last, {}, need.streams, "no spot machine pays")
        if self.max_lag_s is not None and situation.unserved_s is not None:
            spots = need.streams
            alone = self._bounding_lag(situation, self.max_lag_s, spot, need)
        else:
            share = spot.share
            spots = _least(
                lambda machines: expected_serving(machines, share, need.streams),
                need.serving,
                (need.streams, int(self.spot_up_to * need.streams)),  # fewer cost as much a record
            )
            alone = self._on_demand(situation, last, spot, need, spots)
        named = {
            Offer(spot.pools[index].name): count for index, count in spot.counts(spots).items()
        }
        reason = "first plan" if last is None else _why(spot, need)
        return self._decided(situation, last, named, alone, reason)

    def _spot(self, situation: Situation, last: Decision | None) -> Spot:
        """Put the pools that pay in the order of their price."""
        alone, *others = situation.pools
        work, limit = situation.work, ready_usd_per_s(alone)
        batch_s = work.batch_size / max(float(work.rates_per_s.max()), ROUNDING)
        usable = [
            (usd, pool)
            for pool in others
            if (usd := ready_usd_per_s(pool)) < limit
            and situation.gradient_s / pool.speed < batch_s
        ]
        usable.sort(key=lambda one: one[0])
        pools = tuple(pool for _, pool in usable)
        there = [situation.machines.get(Offer(pool.name), MachineCount()) for pool in pools]
        asked = {} if last is None else last.machines
        return Spot(
            pools,
            np.array([usd for usd, _ in usable]),
            np.array([asked.get(Offer(pool.name), 0) for pool in pools], np.int64),
            np.array([each.ready for each in there], np.int64),
            np.array([each.ready + each.coming for each in there], np.int64),
        )

    def _need(self, situation: Situation, spot: Spot) -> _Need:
        work, start_up_s = situation.work, situation.pools[ON_DEMAND].start_up_s
        late_s = partial_batches_s(work.rates_per_s, work.batch_size)
        late_s += LATE * math.sqrt(work.records) / work.records_per_s
        time_s = work.deadline_s - late_s
        largest = float(spot.had.max() / spot.had.sum()) if spot.had.any() else 1.0
        reserve_s = largest * (start_up_s + self.review_s)
        return _Need(work.workers, work.undisturbed_s, time_s, reserve_s)

    def _on_demand(
        self, situation: Situation, last: Decision | None, spot: Spot, need: _Need, spots: int
    ) -> int:
        """Count machines on demand."""
        streams, main = need.streams, spot.main
        before = 0
        if last is not None:
            before = last.machines.get(Offer(situation.pools[ON_DEMAND].name), 0)
        ready = int(spot.ready.sum())
        losses = LOSSES * need.undisturbed_s / max(_life_s(main), 1.0)
        lost_s = losses * max(need.reserve_s, main.start_up_s + self.review_s)
        missing = 0
        if last is not None and not spot.scarce and need.short_s + lost_s >= 0:
            missing = streams - int(spot.had.sum())
        alone = 0
        if not spot.gone:
            share = spot.share
            alone = _least(
                lambda machines: expected_serving(spots, share, streams, machines),
                need.serving,
                (0, streams),
            )
            if 2 * ready < streams:  # those that stood in for all stay until others are ready
                alone = max(alone, min(before, streams - ready))
        alone = max(alone, missing, need.certain)
        return before if 0 < alone < before <= alone + SPARES else alone

    def _bounding_lag(self, situation: Situation, max_lag_s: float, spot: Spot, need: _Need) -> int:
        """Count machines on demand where records wait for their machine, and not for too long.

        Streams that wait longest are served first, each by a machine of its own, which stays until
        spot machines are ready for all.
        """
        alone = situation.pools[ON_DEMAND]
        there = situation.machines.get(Offer(alone.name), MachineCount())
        ahead_s = alone.start_up_s + self.review_s
        wait_s = situation.unserved_s
        if wait_s is None or need.time_s <= ahead_s + self.review_s:
            return max(need.streams - int(spot.ready.sum()), 0)
        late = int(np.count_nonzero(wait_s + ahead_s + self.review_s > max_lag_s))
        late = min(late, int(np.count_nonzero(wait_s)))
        return min(there.ready, max(need.streams - int(spot.ready.sum()), 0)) + late

    def _decided(
        self,
        situation: Situation,
        last: Decision | None,
        spots: dict[Offer, int],
        alone: int,
        reason: str,
    ) -> Decision:
        pools = situation.pools
        alone = max(alone, self.reliable)
        machines = spots | ({Offer(pools[ON_DEMAND].name): alone} if alone else {})
        there = situation.machines.get(Offer(pools[ON_DEMAND].name), MachineCount())
        refused = last is not None and sum(there) < min(last.on_demand, alone)
        feasible = not (refused or situation.work.undisturbed_s > situation.work.deadline_s)
        if last is not None and last.machines == machines and last.plan.feasible == feasible:
            return last
        plan = _counted_plan(situation, machines, alone, refused=refused)
        return Decision(machines, plan, f"{reason}: {plan.reason}", situation)

    def _reassigned(self, situation: Situation, last: Decision | None) -> Decision:
        reason = "first plan" if last is None else self._moved(situation, last.basis)
        if last is not None and not reason:
            return last
        found = plan_machines(situation.work, situation.pools, situation.gradient_s)
        none = np.zeros(situation.work.workers, np.bool_)
        return by_slot(found.places, none, found.plan, reason, situation)

    def _moved(self, situation: Situation, basis: Situation) -> str:
        """Say what has moved so far that machines are counted again; empty: nothing."""
        numbers = [("gradient time", situation.gradient_s, basis.gradient_s)]
        for pool, then in zip(situation.pools, basis.pools, strict=True):
            numbers += [
                (f"price of {pool.name}", pool.usd_per_hour, then.usd_per_hour),
                (f"availability of {pool.name}", pool.availability, then.availability),
            ]
        return next(
            (
                f"{what} moved from {before:.4g} to {now:.4g}"
                for what, now, before in numbers
                if abs(now - before) > self.moved * before
            ),
            "",
        )


def _life_s(pool: Pool) -> float:
    return pool.availability * pool.cycle_s


def _least(served: Callable[[int], float], wanted: float, between: tuple[int, int]) -> int:
    """Give the fewest machines that serve so many; the most where none do."""
    fewest, most = between
    return fewest + bisect_left(range(fewest, most), wanted - ROUNDING, key=served)


def _why(spot: Spot, need: _Need) -> str:
    if need.short_s > 0:
        return f"{need.short_s:,.4g} s of the reserve are used"
    if spot.gone:
        return "no pool gives a machine"
    if (spot.asked > spot.had).any():
        return "a machine was lost or refused"
    return "more or fewer are needed"


def _counted_plan(
    situation: Situation, machines: dict[Offer, int], alone: int, *, refused: bool
) -> Plan:
    work, pools = situation.work, situation.pools
    by_name = {pool.name: pool for pool in pools}
    expected = sum(
        count * effective_availability(by_name[offer.pool]) for offer, count in machines.items()
    )
    runtime_s = work.undisturbed_s * max(work.workers / expected, 1.0) if expected else math.inf
    usd_per_s = math.fsum(
        count * by_name[offer.pool].wanted_usd_per_s for offer, count in machines.items()
    )
    usd = usd_per_s * runtime_s if usd_per_s else 0.0
    on_demand_usd = work.on_demand_only_usd(pools[ON_DEMAND])
    spot = sum(machines.values()) - alone
    late = work.undisturbed_s > work.deadline_s
    named = ", ".join(f"{count} in {offer.pool}" for offer, count in machines.items())
    binding: Binding = "infeasible" if late else "deadline" if alone else "workers"
    reason = f"{named or 'nothing'}: {work.undisturbed_s:,.6g} s of {work.deadline_s:,.6g} s"
    if refused:
        reason, binding = f"{_LACKS['capacity']}{reason}", "capacity"
    return Plan(
        feasible=not (late or refused),
        spot=spot,
        on_demand=alone,
        spot_workers=np.zeros(0, np.int64),
        expected_cost_usd=usd,
        expected_runtime_s=runtime_s,
        cost_ratio_to_on_demand=usd / on_demand_usd if on_demand_usd else 1.0,
        binding=binding,
        reason=reason,
    )
