"""Backfill: all slots on spot, on-demand machines in outages only as far as the rest of work asks.

A spot machine can be had for exponential times of mean alpha cycle, and cannot for exponential
times of mean (1 - alpha) cycle. When it comes back it starts up first; whoever stands in goes on
meanwhile. From this follow three ways to run a slot, dearer from one to the next:

                                delivers            costs
    left alone during outages   availability        alpha pi_s
    with a stand-in             phi                 + pi_o for each outage, start-up included
    on demand throughout        1                   pi_o

The deadline leaves some slack: part of what outages take may simply be lost. What must be made up
is made up by the cheapest steps there are, and weighed anew at every outage. What a step gives is
in proportion to the rate of the slot's stream, what it costs is not. So the steps of all slots are
taken in the order of their price per record, until they give enough:

    records   ┌── pinned: the highest rates, only where stand-ins start up too slowly
    missing ──┼── filled: high rates
              └── left alone: low rates
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from common.policies.fixed import market_of
from common.policies.policy import ON_DEMAND, by_slot
from common.theory.errors import ParameterError, not_negative, positive, share
from common.theory.preemption import effective_availability
from common.theory.provisioning import Plan

if TYPE_CHECKING:
    from common.policies.policy import Decision, Flags, Situation
    from common.theory.provisioning import Binding
    from common.theory.work import Pool, Rates, Work


Array: TypeAlias = npt.NDArray[np.float64]

EQUAL_RATES = 0.95  # estimates of equal rates differ by a few percent


@dataclass(frozen=True, slots=True)
class Outages:
    """A slot on spot over a long time, per slot and second of the job."""

    availability: float  # share of the time that the spot machine delivers, its start-ups taken off
    per_s: float  # outages, each from one preemption to the machine that delivers again
    relaxation_s: float  # tau: after it, what was known of the machine's state counts 1/e
    stand_in_idle_s: float  # E[min(S_od, outage)], of each outage, while a stand-in starts up
    alone_usd_per_s: float  # left alone during outages
    stand_in_usd_per_s: float  # in addition, if on-demand machines stand in during all of them
    on_demand_usd_per_s: float

    @property
    def filled(self) -> float:
        """phi, the share that a slot delivers with stand-ins in all its outages."""
        return 1 - self.per_s * self.stand_in_idle_s

    @property
    def recovered(self) -> float:
        """Share of what outages take that stand-ins give back: 1 where they start at once."""
        lost = 1 - self.availability
        return (self.filled - self.availability) / lost if lost else 1.0

    @property
    def fill_usd_per_s(self) -> float:
        """Price of a second of delivery that stand-ins give back; infinite if they give none."""
        gain = self.filled - self.availability
        return self.stand_in_usd_per_s / gain if gain > 0 else math.inf

    @property
    def pin_usd_per_s(self) -> float:
        """Price of a second that on-demand throughout delivers beyond stand-ins."""
        more = self.on_demand_usd_per_s - self.alone_usd_per_s - self.stand_in_usd_per_s
        return more / (1 - self.filled) if self.filled < 1 else math.inf

    @property
    def direct_usd_per_s(self) -> float:
        """Price of a second that on-demand throughout delivers beyond a slot left alone."""
        lost = 1 - self.availability
        return (self.on_demand_usd_per_s - self.alone_usd_per_s) / lost if lost else math.inf

    @property
    def standing_in_pays(self) -> bool:
        """Whether stand-ins give time back for less than on-demand throughout does.

        Not so where outages are over before a stand-in has started, or about then.
        """
        return self.fill_usd_per_s < self.direct_usd_per_s

    @property
    def spot_pays(self) -> bool:
        """Whether a second delivered by a slot on spot is cheaper than one on demand."""
        return self.alone_usd_per_s < self.on_demand_usd_per_s * self.availability


def expected_shorter_s(limit_s: float, least_s: float, mean_s: float) -> float:
    """Give E[min(limit, least + D)] for an exponential D of that mean."""
    if limit_s <= least_s or not mean_s:
        return min(limit_s, least_s)
    return least_s - mean_s * math.expm1(-(limit_s - least_s) / mean_s)


@lru_cache(maxsize=1024)
def outages(on_demand: Pool, spot: Pool) -> Outages:
    """Work out what a slot's outages cost, with start-ups and the shortest time that is billed.

    An outage lasts D, exponential of mean (1 - alpha) cycle, and the start-up of the machine that
    comes back. Where that one is gone again before it delivers (a share 1 - exp(-S / u) of the
    returns), the outage goes on; its stand-in then is idle no second time, nor is a minimum billed
    twice.
    """
    alpha, cycle_s = spot.availability, spot.cycle_s
    delivers = effective_availability(spot)
    mean_off_s = (1 - alpha) * cycle_s
    restarts = delivers / alpha if alpha else 0.0  # share of the returns that come to deliver
    per_s = restarts / cycle_s if alpha < 1 else 0.0
    usual_s = spot.start_up_s, mean_off_s
    idle_s = expected_shorter_s(on_demand.start_up_s, *usual_s)
    least_s = on_demand.billing.least_s
    unused_s = least_s - expected_shorter_s(least_s, *usual_s)  # E[max(0, minimum - outage)]
    stood_in = 1 - delivers + per_s * unused_s
    return Outages(
        availability=delivers,
        per_s=per_s,
        relaxation_s=alpha * mean_off_s,
        stand_in_idle_s=idle_s,
        alone_usd_per_s=spot.wanted_usd_per_s,
        stand_in_usd_per_s=stood_in * on_demand.wanted_usd_per_s,
        on_demand_usd_per_s=on_demand.wanted_usd_per_s,
    )


def expected_up_s(now_up: Flags, t_s: float, market: Outages) -> Array:
    """Give (N_tot,) the expected seconds, of the next t, in which each spot machine delivers.

    With a the availability and x = tau (1 - exp(-t / tau)): a t + (1 - a) x for one that is up now,
    a t - a x for one that is not. Exact for the two-state chain; a start-up is taken for a part of
    the outage, as if it were memoryless, too.
    """
    a, tau_s = market.availability, market.relaxation_s
    remembered_s = -tau_s * math.expm1(-t_s / tau_s) if tau_s else 0.0
    down_s = max(a * (t_s - remembered_s), 0.0)
    return np.where(now_up, a * t_s + (1 - a) * remembered_s, down_s)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The steps that can be taken, in the order of their price per record."""

    workers: int
    slots: npt.NDArray[np.intp]  # (S,)
    pins: Flags  # (S,) which pin a slot instead of filling its outages
    records: Array  # (S,) what they give until the deadline
    usd: Array  # (S,) what they cost

    def until(self, missing: Array) -> list[int]:
        """Count the steps that give so many records; all of them if even they do not.

        Args:
            missing: (m,) any number of amounts; where nothing is missing no step is needed.
        """
        counts = self.records.cumsum().searchsorted(missing) + 1
        counts[missing <= 0] = 0
        return [min(count, len(self.slots)) for count in counts.tolist()]

    def cost_usd(self, missing: float) -> float:
        """Give the price of that many records, with a part of the last step."""
        records, usd = (np.append(0.0, some.cumsum()) for some in (self.records, self.usd))
        return float(np.interp(missing, records, usd))

    def fills(self, count: int) -> Flags:
        """Tell (N_tot,) whose outages the first `count` steps fill."""
        filled = np.zeros(self.workers, np.bool_)
        filled[self.slots[:count][~self.pins[:count]]] = True
        return filled

    def pinned_records(self, count: int) -> Array:
        """Give (N_tot,) what the pins among the first `count` steps give."""
        gained = np.zeros(self.workers)
        pins = self.pins[:count]
        gained[self.slots[:count][pins]] = self.records[:count][pins]
        return gained


def steps(rates_per_s: Rates, lost_s: Array, market: Outages) -> Steps:
    """Order all steps; of equal ones the lower slot comes first, whether it is up or not.

    Nothing keeps one from letting nobody stand in until all slack is used up. Where stand-ins start
    at once that costs the same. Where they do not, it leaves every later stroke of bad luck to
    pins, the dearest steps: simulated at alpha = 0.9, theta = 1.1 theta_0 and start-ups of 69 and
    87 s, it costs 1 % of the on-demand cost more.

    Args:
        rates_per_s: Of the slots.
        lost_s: (N_tot,) what outages take from each slot until the deadline, if left alone.
        market: What the steps give and cost.
    """
    workers = len(rates_per_s)
    first = np.argsort(-rates_per_s, kind="stable")
    lost_s, missed = lost_s[first], (rates_per_s * lost_s)[first]
    if not market.standing_in_pays or market.recovered >= 1:
        pins = np.full(workers, not market.standing_in_pays)
        usd_per_s = market.fill_usd_per_s if market.standing_in_pays else market.direct_usd_per_s
        return Steps(workers, first, pins, missed, lost_s * usd_per_s)
    rest, ratio = 1 - market.recovered, market.fill_usd_per_s / market.pin_usd_per_s
    fills_usd = market.recovered * market.fill_usd_per_s * lost_s
    pins_usd = rest * market.pin_usd_per_s * lost_s
    sorted_rates = rates_per_s[first]
    order = np.argsort(-np.concatenate((sorted_rates, ratio * sorted_rates)), kind="stable")
    return Steps(
        workers,
        np.concatenate((first, first))[order],
        order >= workers,
        np.concatenate((market.recovered * missed, rest * missed))[order],
        np.concatenate((fills_usd, pins_usd))[order],
    )


def cost_share_limit(
    deadline_ratio: float,
    availability: float,
    spot_usd_per_hour: float,
    on_demand_usd_per_hour: float,
) -> float:
    """Give backfill's cost over that of on-demand machines alone, where machines start at once.

    With f = theta / theta_0: until theta, spot runs for alpha theta of the theta_0 of work that a
    slot has, and on-demand machines do the rest: f alpha pi_s / pi_o + 1 - f alpha. From
    f = 1 / alpha on nobody has to stand in: pi_s / pi_o. It is a mean, and takes equal rates: where
    they differ the records to be made up are fewer seconds of the higher ones, which cost less.

    Raises:
        ParameterError: If a number is out of range. A spot price above that of on-demand is none:
            then nothing is bought on spot, and the share is 1.
    """
    share("availability", availability)
    not_negative("spot_usd_per_hour", spot_usd_per_hour)
    positive("on_demand_usd_per_hour", on_demand_usd_per_hour)
    if not deadline_ratio >= 1:
        problem = f"must be at least 1, got {deadline_ratio:g}: not even on-demand machines do it"
        raise ParameterError("deadline_ratio", problem)
    on_spot = min(deadline_ratio * availability, 1.0)
    price_ratio = min(spot_usd_per_hour / on_demand_usd_per_hour, 1.0)
    return on_spot * price_ratio + (1 - on_spot)


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """What a situation asks for."""

    market: Outages
    usable_s: float  # until the deadline, less the reserve
    missing: float  # records that slots left alone would not deliver; below 0: they do more
    steps: Steps
    taken: int  # of the steps
    kept: int  # of the steps: those beyond `taken` are not begun, but not ended either
    late_s: float  # of on-demand machines alone; above 0: the deadline cannot be met


@dataclass(frozen=True, slots=True)
class Backfill:
    """All slots on spot; stand-ins, and pinned slots, as few as the rest of the work asks for.

    A slot is pinned at its next outage: it costs no more than a stand-in then, and nothing that
    runs is stopped. At once it is pinned only at the beginning, and where spot has become as dear
    as on-demand; there a stand-in starts up first, the place changes when it delivers, and it stays
    until the slot's own machine does.

    A stand-in whose minimum is not used up is kept beside the spot machine that is back: it costs
    nothing, and the next outage may come. It is let go if the minimum could be over before the
    next review, for from then on it would cost.

    The defaults come from simulations at alpha = 0.9 and theta = 1.05 theta_0 with start-ups of 69
    and 87 s: `noise_quantile` from 1 to 3 moves the cost by 0.3 %; `band_s` from 10 to 30 s moves
    it by less, but with 5 s some deadlines are missed: slots are given back and needed again.
    """

    name: ClassVar[str] = "backfill"
    watches_outages: ClassVar[bool] = True  # stand-ins start when an outage does
    plans_backlog: ClassVar[bool] = False
    review_s: float | None = 30.0  # an outage is heard of at once; this is for arrivals that change
    noise_quantile: float = 2.33  # standard deviations: 99 % of a normal law
    band_s: float = 20.0  # slack by which a step must be superfluous before it is undone

    def reserve_s(self, work: Work, market: Outages, start_up_s: float) -> float:
        """Give the time that is not to be planned with.

        Batches that are begun and the last group, N (b - 1) / 2 + K b records on average; Poisson
        noise of the records to come; what outages take on average until the next review; and where
        stand-ins start up, the noise of that until a slot pinned now would deliver (what comes
        later can still be answered), outages taken for Poisson, too.
        """
        rates = work.rates_per_s
        waiting = work.workers * (work.batch_size - 1) / 2 + work.group_size * work.batch_size
        review_s = min(self.review_s or 0.0, work.deadline_s)
        variance = work.records
        if market.stand_in_idle_s:
            squares = float(rates @ rates) * market.stand_in_idle_s**2
            variance += squares * market.per_s * min(review_s + start_up_s, work.deadline_s)
        noise = self.noise_quantile * math.sqrt(variance)
        return (waiting + noise) / work.records_per_s + (1 - market.availability) * review_s

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide anew, or return `last` where nothing that matters has changed.

        Raises:
            ParameterError: If there is no spot pool.
        """
        needs = self._needs(situation)
        running = situation.stands_in_s >= 0  # not where it is NaN
        pinned = _pinned(situation, needs, running, last)
        stand_ins = self._stand_ins(situation, needs, running, pinned)
        places = (~pinned).astype(np.int8)  # the first spot pool where it is not ON_DEMAND
        if last is not None:
            same = places.tobytes() == last.places.tobytes()
            if same and stand_ins.tobytes() == last.stand_ins.tobytes():
                return last
        plan = _plan(situation, needs, pinned)
        return by_slot(places, stand_ins, plan, _why_now(situation, stand_ins, last), situation)

    def _needs(self, situation: Situation) -> Needs:
        work, offered = situation.work, market_of(situation.pools)
        market = outages(offered.on_demand, offered.spot)
        reserve_s = self.reserve_s(work, market, offered.on_demand.start_up_s)
        usable_s = max(work.deadline_s - reserve_s, 0.0)
        up_s = expected_up_s(situation.up, usable_s, market)
        ordered = steps(work.rates_per_s, usable_s - up_s, market)
        missing = work.records - float(work.rates_per_s @ up_s)
        band = self.band_s * work.records_per_s
        late_s = work.undisturbed_s - work.deadline_s
        taken, kept = ordered.until(np.array((missing, missing + band)))
        if late_s > 0:
            taken = kept = len(ordered.slots)
        return Needs(market, usable_s, missing, ordered, taken, kept, late_s)

    def _stand_ins(
        self, situation: Situation, needs: Needs, running: Flags, pinned: Flags
    ) -> Flags:
        down = ~situation.up
        kept = running & down
        if needs.market.standing_in_pays and needs.kept:
            filled = needs.steps.fills(needs.taken) & down
            kept &= needs.steps.fills(needs.kept) | pinned
            stand_ins: Flags = (filled & ~pinned) | kept
        else:
            stand_ins = kept & pinned
        minimum_s, soon_s = situation.pools[ON_DEMAND].billing.least_s, self.review_s or math.inf
        if minimum_s > soon_s:
            stand_ins |= (situation.stands_in_s + soon_s <= minimum_s) & situation.up
        if not needs.market.spot_pays and situation.pools[ON_DEMAND].start_up_s:
            stand_ins |= ~pinned
        return stand_ins


def _pinned(situation: Situation, needs: Needs, running: Flags, last: Decision | None) -> Flags:
    count = situation.work.workers
    if last is None:
        if needs.late_s > 0 or not needs.market.spot_pays:
            return np.ones(count, np.bool_)
        return needs.steps.pinned_records(needs.taken) > 0
    pinned: Flags = last.places == ON_DEMAND
    fresh = ~(situation.up | running)
    if not needs.market.spot_pays:
        start_up_s = situation.pools[ON_DEMAND].start_up_s
        return pinned | fresh | (situation.stands_in_s >= start_up_s) | (not start_up_s)
    if needs.late_s > 0:
        return pinned | fresh
    if not (needs.steps.pins[: needs.kept].any() or pinned.any()):
        return np.zeros(count, np.bool_)
    rates = situation.work.rates_per_s
    gains = needs.steps.pinned_records(len(needs.steps.slots))
    kept = needs.steps.pinned_records(needs.kept)
    pinned = _highest(pinned, rates, gains, float(kept.sum()))
    wanted = needs.steps.pinned_records(needs.taken)
    short = float(wanted.sum()) - float(gains @ pinned)
    if short > 0:
        enough = EQUAL_RATES * float(rates[wanted > 0].min())
        pinned |= _highest(fresh & ~pinned & (rates >= enough), rates, gains, short)
    return pinned


def _highest(among: Flags, rates_per_s: Rates, gains: Array, enough: float) -> Flags:
    """Choose the slots of highest rates whose gains come to that much, the last one whole."""
    slots = among.nonzero()[0]
    slots = slots[np.argsort(-rates_per_s[slots], kind="stable")]
    before = gains[slots].cumsum() - gains[slots]
    chosen = np.zeros(len(among), np.bool_)
    chosen[slots[before < enough]] = True
    return chosen


def _plan(situation: Situation, needs: Needs, pinned: Flags) -> Plan:
    work, market = situation.work, needs.market
    on_demand_usd = work.on_demand_only_usd(situation.pools[ON_DEMAND])
    count = int(np.count_nonzero(pinned))
    binding: Binding
    if needs.late_s > 0:
        binding, runtime_s, usd = "infeasible", work.undisturbed_s, on_demand_usd
        reason = f"even on-demand machines alone would be late by {needs.late_s:,.6g} s"
    elif not market.spot_pays:
        runtime_s, usd = work.undisturbed_s, on_demand_usd
        binding = "price" if market.availability else "availability"
        reason = "all on demand: a second that spot delivers is not cheaper"
    elif needs.missing > 0:
        binding, runtime_s = "deadline", needs.usable_s
        usd = work.workers * runtime_s * market.alone_usd_per_s
        usd += needs.steps.cost_usd(needs.missing)
        filled = int(np.count_nonzero(needs.steps.fills(needs.taken) & ~pinned))
        reason = f"outages are filled in {filled} of {work.workers} slots, {count} are on demand"
    else:
        binding, runtime_s = "workers", work.undisturbed_s / market.availability
        usd = work.workers * runtime_s * market.alone_usd_per_s
        reason = f"all on spot, nobody stands in: {-needs.missing:,.6g} records to spare"
    return Plan(
        feasible=needs.late_s <= 0,
        spot=work.workers - count,
        on_demand=count,
        spot_workers=(~pinned).nonzero()[0],
        expected_cost_usd=usd,
        expected_runtime_s=runtime_s,
        cost_ratio_to_on_demand=usd / on_demand_usd if on_demand_usd else 1.0,
        binding=binding,
        reason=reason,
    )


def _why_now(situation: Situation, stand_ins: Flags, last: Decision | None) -> str:
    if last is None:
        return "first plan"
    if situation.pools != last.basis.pools:
        return "price or availability changed"
    if (situation.up != last.basis.up).any():
        return "a machine went or came"
    standing, stood = np.count_nonzero(stand_ins), np.count_nonzero(last.stand_ins)
    return f"slack changed: {standing} stand-ins instead of {stood}"
