"""A backlog processed by machines under bids: `bidbrain` on recorded prices.

The policy and the bill are those of a live job. A machine is lost when its price passes its bid, or
when its pool takes it back; then all machines stand still for lambda. The odds of eviction are
counted in the recording's prices before a run.

    recorded prices ──▶ odds ──▶ policy ──▶ machines ──▶ updates
                                   ▲            └──▶ bill
                                   └── prices, evictions, ends of hours
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from common.spot.experiments.results import PolicyChange, PoolUse, SimulatedRun
from common.spot.machines import Offer
from common.spot.policies.bidding import REVIEWS, Bidding, BidSettings, odds_of
from common.spot.policies.policy import Decision, Hour, MachineCount, Situation, renewal_s
from common.spot.provisioning.bill import Bill
from common.spot.theory.work import Work

if TYPE_CHECKING:
    from common.spot.experiments.analytic import Array, Conditions, Flags
    from common.spot.experiments.policy_driver import Givens
    from common.spot.provisioning.records import EndedBecause

# Hours of past prices that EC2 returns.
MOST_HOURS = 90 * 24
PROGRESS_STEPS = 50
# Maximum number of reviews that skip a pool after repeated refusals.
MOST_REFUSED = 16


def simulate_bids(
    givens: Givens,
    settings: BidSettings,
    conditions: Conditions,
    seed: int,
    progress: Callable[[float], None] = lambda _share: None,
) -> tuple[SimulatedRun, ...]:
    """Simulate R runs of a job that processes a backlog under `bidbrain`.

    Args:
        givens: The job. Its number of workers limits the machines.
        settings: Settings of the policy. The simulation also stops machines for their lambda.
        conditions: Prices, outages, and updates per second. Its offers can be used only once.
        seed: Seed of the draws.
        progress: Called with the share of all updates that is done, every `PROGRESS_STEPS` steps,
            and with 1.0 once at the end.

    Raises:
        ParameterError: If recorded prices are too short to count evictions in them.
    """
    runs = [_Run(givens, conditions, settings, seed, run) for run in range(givens.runs)]
    going = np.ones(givens.runs, np.bool_)
    due_s = np.zeros(givens.runs)
    step_s, steps, now_s = conditions.step_s, 0, 0.0
    before: list[Flags | None] = [None] * len(conditions.offers)
    while going.any():
        offered = [None if offers is None else offers(now_s) for offers in conditions.offers]
        asked = due_s <= now_s
        for prices, was, offer in zip(conditions.prices, before, offered, strict=True):
            asked |= prices.changed(max(now_s - step_s, 0.0), now_s)
            if was is not None and offer is not None:
                asked |= (was != offer).any(axis=1)
        usd_per_hour = np.array([prices.at(now_s) for prices in conditions.prices])
        for index in np.flatnonzero(going & asked).tolist():
            free_slots = [None if offer is None else offer[index] for offer in offered]
            due_s[index] = runs[index].go_on(now_s, usd_per_hour[:, index], free_slots)
            going[index] = not runs[index].over
        before = offered
        steps += 1
        now_s = steps * step_s
        if steps % PROGRESS_STEPS == 0:
            progress(float(np.mean([run.share(now_s) for run in runs])))
    progress(1.0)
    return tuple(run.result() for run in runs)


@dataclass(slots=True)
class _Machine:
    launch: int
    offer: Offer
    pool: int
    slot: int
    launched_s: float
    ready_s: float


@dataclass(slots=True)
class _PoolBook:
    """A run's use of one pool."""

    bill: Bill
    # Time for which the pool is skipped after its next refusal.
    refused_s: float
    refused_until_s: float = -np.inf
    machine_s: float = 0.0
    launches: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Progress:
    """The remaining updates, and their rate since some time."""

    left: float
    since_s: float = 0.0
    still_until_s: float = 0.0
    updates_per_s: float = 0.0

    def left_at(self, now_s: float) -> float:
        """Return the number of remaining updates at a time."""
        worked_s = max(now_s - max(self.since_s, self.still_until_s), 0.0)
        return self.left - worked_s * self.updates_per_s

    def done_s(self) -> float:
        """Return the time at which all are done."""
        if not self.updates_per_s:
            return np.inf
        return max(self.since_s, self.still_until_s) + self.left / self.updates_per_s


class _Run:
    """One run under way.

    Attributes:
        over: True if all updates are done, or the run was given up.
    """

    def __init__(
        self, givens: Givens, conditions: Conditions, settings: BidSettings, seed: int, index: int
    ) -> None:
        self._givens, self._conditions, self._settings = givens, conditions, settings
        self._seed, self._index = seed, index
        self._deadline_s = float(givens.deadline_s[index])
        names = [pool.name for pool in givens.pools]
        hour_s = min(pool.billing.hour_s for pool in givens.pools)
        past = {
            name: prices.past(index, self._deadline_s, MOST_HOURS * hour_s)
            for name, prices in zip(names, conditions.prices, strict=True)
        }
        self._policy = Bidding(settings, odds_of(givens.pools, past))
        self._review_s = hour_s / REVIEWS
        self._renewal_s = renewal_s(hour_s)
        self._books = [
            _PoolBook(Bill({pool.name: pool.billing}), self._review_s) for pool in givens.pools
        ]
        self._prices = np.full(len(names), np.nan)
        self._machines: list[_Machine] = []
        # True if a pool has just refused.
        self._refused = False
        self._work = _Progress(float(givens.updates))
        self._review_at_s = self._hours_at_s = 0.0
        self._last: Decision | None = None
        self._history: list[PolicyChange] = []
        self._ended_s = 0.0
        self.over = False

    def share(self, now_s: float) -> float:
        """Return the share of updates that is done."""
        return 1 - max(self._work.left_at(now_s), 0.0) / self._givens.updates

    def go_on(self, now_s: float, prices: Array, free_slots: Sequence[Flags | None]) -> float:
        """Apply the current prices and offers, and return the time of the next event.

        If prices or offers change before that time, call it again then.

        Args:
            now_s: Not earlier than in the last call.
            prices: (P,) USD per hour.
            free_slots: For each pool (M,), True if a slot can have a machine; None if all can.
        """
        give_up_s = self._conditions.give_up_after * self._deadline_s
        done_s = self._work.done_s()
        if min(done_s, give_up_s) <= now_s:
            self._end(min(done_s, give_up_s))
            return np.inf
        self._work.left, self._work.since_s = self._work.left_at(now_s), now_s
        for pool in np.flatnonzero(prices != self._prices).tolist():
            offer = Offer(self._givens.pools[pool].name)
            self._books[pool].bill.price(offer, now_s, float(prices[pool]))
        moved = bool((prices != self._prices).any())
        self._prices = prices.copy()
        lost = [each for each in self._machines if self._is_lost(each, free_slots)]
        for each in lost:
            self._stop(each, now_s, "preempted")
        if lost:
            self._work.still_until_s = now_s + self._settings.lambda_s
        if moved or lost or now_s >= min(self._review_at_s, self._hours_at_s):
            self._decide(now_s, free_slots)
        return self._due_s(now_s, give_up_s)

    def result(self) -> SimulatedRun:
        """Return the result."""
        givens, index = self._givens, self._index
        pools = tuple(
            PoolUse(
                pool.name,
                job_store.bill.spent_usd(np.inf) + job_store.machine_s * pool.transfer_usd_per_s,
                job_store.machine_s,
                job_store.launches,
                job_store.preemptions,
            )
            for pool, job_store in zip(givens.pools, self._books, strict=True)
        )
        return SimulatedRun(
            seed=self._seed,
            index=index,
            finished=self._work.left <= 0,
            runtime_s=self._ended_s,
            deadline_s=self._deadline_s,
            updates=givens.updates - max(self._work.left, 0.0),
            on_demand_only_usd=float(givens.on_demand_only_usd[index]),
            pools=pools,
            history=tuple(self._history),
        )

    def _due_s(self, now_s: float, give_up_s: float) -> float:
        """Set the rate of updates by the ready machines, and return the next event's time."""
        speed = sum(
            self._givens.pools[each.pool].speed for each in self._machines if each.ready_s <= now_s
        )
        capacity = self._conditions.capacity_per_s
        if capacity is not None:
            self._work.updates_per_s = float(capacity(np.array([speed]))[0])
        coming_s = [each.ready_s for each in self._machines if each.ready_s > now_s]
        ahead_s = (self._review_at_s, self._hours_at_s, self._work.done_s(), give_up_s)
        return min(*ahead_s, *coming_s)

    def _is_lost(self, machine: _Machine, free_slots: Sequence[Flags | None]) -> bool:
        bid_usd, flags = machine.offer.bid_usd_per_hour, free_slots[machine.pool]
        if bid_usd is not None and self._prices[machine.pool] > bid_usd:
            return True
        return flags is not None and not flags[machine.slot]

    def _decide(self, now_s: float, free_slots: Sequence[Flags | None]) -> None:
        decision = self._policy.reconsider(self._situation(now_s), self._last)
        if decision is not self._last:
            self._last = decision
            change = PolicyChange(now_s, decision.reason, decision.spot, decision.on_demand)
            self._history.append(change)
        names = [pool.name for pool in self._givens.pools]
        for each in [one for one in self._machines if one.offer not in decision.machines]:
            self._stop(each, now_s, "released")
        for offer, count in decision.machines.items():
            there = [each for each in self._machines if each.offer == offer]
            # The newest machines stop first.
            for each in there[count:]:
                self._stop(each, now_s, "released")
            pool = names.index(offer.pool)
            self._launch(offer, pool, count - len(there), now_s, free_slots[pool])
        # Other pools are tried at once. This ends because a pool that refused is skipped.
        if self._refused:
            self._refused = False
            self._decide(now_s, free_slots)
            return
        self._review_at_s = now_s + self._review_s
        # The policy has decided about hours that end soon.
        hours = self._hours(now_s + self._renewal_s)
        self._hours_at_s = min((hour.ends_s for hour in hours.values()), default=np.inf)
        self._hours_at_s -= self._renewal_s

    def _situation(self, now_s: float) -> Situation:
        givens, index = self._givens, self._index
        pools = tuple(
            replace(pool, usd_per_hour=usd)
            for pool, usd in zip(givens.pools, self._prices.tolist(), strict=True)
        )
        left_s = max(self._deadline_s - now_s, 0.0)
        sizes = givens.group_size, givens.batch_size
        ready = Counter(each.offer for each in self._machines if each.ready_s <= now_s)
        coming = Counter(each.offer for each in self._machines if each.ready_s > now_s)
        return Situation(
            now_s=now_s,
            work=Work(givens.rates_per_s[index], *sizes, self._work.left, left_s),
            pools=pools,
            gradient_s=givens.gradient_s,
            up=np.zeros(givens.workers, np.bool_),
            waiting=self._work.left,
            machines={
                offer: MachineCount(ready[offer], coming[offer]) for offer in {*ready, *coming}
            },
            hours=self._hours(now_s),
            refusing=frozenset(
                pool.name
                for pool, job_store in zip(pools, self._books, strict=True)
                # The pool is still skipped at the next review, so that others are tried then.
                if now_s <= job_store.refused_until_s
            ),
        )

    def _hours(self, now_s: float) -> dict[Offer, Hour]:
        """Return each offer's hour that ends first, for bids and for machines paid by the hour."""
        found = dict[Offer, Hour]()
        for each in self._machines:
            rule = self._givens.pools[each.pool].billing
            if each.offer.bid_usd_per_hour is None and rule.per != "hour":
                continue
            begun_s = each.launched_s + (now_s - each.launched_s) // rule.hour_s * rule.hour_s
            usd_per_hour = self._books[each.pool].bill.usd_per_hour(each.offer, begun_s)
            hour = Hour(begun_s + rule.hour_s, usd_per_hour)
            found[each.offer] = min(found.get(each.offer, hour), hour)
        return found

    def _launch(
        self, offer: Offer, pool: int, wanted: int, now_s: float, free_slots: Flags | None
    ) -> None:
        if wanted <= 0:
            return
        kind, job_store = self._givens.pools[pool], self._books[pool]
        taken = {each.slot for each in self._machines if each.pool == pool}
        most = self._givens.workers if free_slots is None else len(free_slots)
        free = [slot for slot in range(kind.at_most(most)) if slot not in taken]
        if free_slots is not None:
            free = [slot for slot in free if free_slots[slot]]
        if len(free) < wanted:
            job_store.refused_until_s = now_s + job_store.refused_s
            job_store.refused_s = min(2 * job_store.refused_s, MOST_REFUSED * self._review_s)
            self._refused = True
        else:
            job_store.refused_s = self._review_s
        # Machines launched at time 0 are ready: the job's clock begins then.
        ready_s = now_s + kind.start_up_s if now_s else 0.0
        for slot in free[:wanted]:
            launch = sum(each.launches for each in self._books) + 1
            job_store.launches += 1
            self._machines.append(_Machine(launch, offer, pool, slot, now_s, ready_s))
            job_store.bill.started(launch, offer, now_s)

    def _stop(self, machine: _Machine, now_s: float, cause: EndedBecause) -> None:
        self._machines.remove(machine)
        job_store = self._books[machine.pool]
        job_store.bill.ended(machine.launch, now_s, cause)
        job_store.machine_s += now_s - machine.launched_s
        job_store.preemptions += cause == "preempted"

    def _end(self, now_s: float) -> None:
        work = self._work
        work.left = work.left_at(now_s) if now_s < work.done_s() else 0.0
        for each in list(self._machines):
            self._stop(each, now_s, "released")
        work.updates_per_s, self._ended_s, self.over = 0.0, now_s, True
