"""Spot machines over several pools: the price of a ready second, and the pools to request from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.spot.machines import Offer
from common.spot.policies.policy import Decision, MachineCount, Situation
from common.spot.theory.preemption import effective_availability

if TYPE_CHECKING:
    from common.spot.theory.work import Pool

# Relative difference of prices of a ready second. Pools this close share machines: a loss then
# takes only some of them, and the others are known to give more.
EQUAL_PRICES = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """The spot pools that are worth their price, the cheapest first, and their machines."""

    pools: tuple[Pool, ...]
    usd_per_s: tuple[float, ...]  # price of a ready second
    # Number of machines that the last decision wanted.
    asked: tuple[int, ...]
    ready: tuple[int, ...]
    had: tuple[int, ...]  # ready or coming

    @property
    def room(self) -> list[float]:
        """Number of machines that each pool still has."""
        most = [math.inf if pool.capacity is None else pool.capacity for pool in self.pools]
        return [all_of_it - had for all_of_it, had in zip(most, self.had, strict=True)]

    @property
    def refused(self) -> list[bool]:
        """True for pools that give fewer machines than requested."""
        return [asked > had for asked, had in zip(self.asked, self.had, strict=True)]

    @property
    def largest(self) -> float:
        """Largest share of the machines in one pool; 1 without machines."""
        return max(self.had) / sum(self.had) if any(self.had) else 1.0

    @property
    def gone(self) -> bool:
        """True if machines were requested from every pool, and no pool has any."""
        return all(self.asked) and not any(self.had)

    @property
    def scarce(self) -> bool:
        """True if every pool that has machines gives fewer than requested."""
        some = [refused for refused, had in zip(self.refused, self.had, strict=True) if had]
        return bool(some) and all(some)

    @property
    def main(self) -> Pool:
        """The pool with most machines."""
        return self.pools[self.had.index(max(self.had))]

    @property
    def share(self) -> float:
        """Mean share of the requested machines that is ready.

        If a pool gives enough, lost machines are replaced at once, and only their start-ups are
        missing.
        """
        main = self.main
        delivers = effective_availability(main)
        return delivers if self.scarce or not main.availability else delivers / main.availability

    def offers(self, wanted: int) -> dict[Offer, int]:
        """Return the result of `counts(wanted)`, with offers instead of indexes as keys."""
        return {Offer(self.pools[at].name): count for at, count in self.counts(wanted).items()}

    def counts(self, wanted: int) -> dict[int, int]:
        """Return the wanted number of machines by the index of their pool. Other pools get none.

        Existing machines stay. Missing ones are requested from the cheapest pools that have not
        just refused. Each pool that has refused and has no machines gets one request, which shows
        when it gives machines again. If all pools have refused or are full, each gets requests for
        all missing machines, up to its capacity.
        """
        missing, room = wanted - sum(self.had), self.room
        there = {index: count for index, count in enumerate(self.had) if count}
        if missing <= 0:
            return self._without(there, -missing)
        refused = self.refused
        give = [at for at, more in enumerate(room) if more > 0 and not refused[at]]
        if give:
            dearest = min(self.usd_per_s[at] for at in give) * (1 + EQUAL_PRICES)
            alike = [at for at in give if self.usd_per_s[at] <= dearest]
            counts = {at: 1 for at, not_given in enumerate(refused) if not_given} | there
            for left, index in zip(range(len(alike), 0, -1), alike, strict=True):
                more = int(min(math.ceil(missing / left), room[index]))
                missing -= more
                if more:
                    counts[index] = there.get(index, 0) + more
            return counts
        return {at: int(count + min(missing, room[at])) for at, count in enumerate(self.had)}

    def _without(self, there: dict[int, int], surplus: int) -> dict[int, int]:
        """Remove machines from the most expensive pools."""
        for index in sorted(there, reverse=True):
            if there[index] <= surplus:
                surplus -= there.pop(index)
            else:
                there[index] -= surplus
                break
        return there


def ready_usd_per_s(pool: Pool) -> float:
    """Return the price of a second of a pool's ready machine, at speed 1.

    Machines live for exponential times of mean u. They are ready for exp(-S / u) of their time, and
    billed by `Billing.paid_share`.
    """
    mean_s = life_s(pool)
    if pool.availability == 1:
        return (pool.usd_per_s + pool.transfer_usd_per_s) / pool.speed
    if not mean_s:
        return math.inf
    usd_per_s = pool.usd_per_s * pool.billing.paid_share(mean_s) + pool.transfer_usd_per_s
    return usd_per_s * math.exp(min(pool.start_up_s / mean_s, 700.0)) / pool.speed


def life_s(pool: Pool) -> float:
    """Return the mean lifetime of a pool's machine."""
    return pool.availability * pool.cycle_s


def spot_of(situation: Situation, last: Decision | None, least_speed: float = 0.0) -> Spot:
    """Return the pools that are worth their price and fast enough, ordered by price."""
    alone, *others = situation.pools
    limit = ready_usd_per_s(alone)
    usable = [
        (usd, pool)
        for pool in others
        if (usd := ready_usd_per_s(pool)) < limit and pool.speed > least_speed
    ]
    usable.sort(key=lambda one: one[0])
    pools = tuple(pool for _, pool in usable)
    there = [situation.machines.get(Offer(pool.name), MachineCount()) for pool in pools]
    asked = {} if last is None else last.machines
    return Spot(
        pools,
        tuple(usd for usd, _ in usable),
        tuple(asked.get(Offer(pool.name), 0) for pool in pools),
        tuple(each.ready for each in there),
        tuple(each.ready + each.coming for each in there),
    )
