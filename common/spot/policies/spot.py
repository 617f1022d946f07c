"""Spot machines over several pools: what a ready second costs, and where to ask for how many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.spot.machines import Offer
from common.spot.policies.policy import Decision, MachineCount, Situation
from common.spot.theory.preemption import effective_availability

if TYPE_CHECKING:
    from common.spot.theory.work import Pool

# Relative, of a ready second. Pools that close share machines: a loss takes some of them only, and
# the others are known to give more.
EQUAL_PRICES = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """The spot pools that are worth their price, the best first; there are few."""

    pools: tuple[Pool, ...]
    usd_per_s: tuple[float, ...]  # of a ready second
    asked: tuple[int, ...]  # machines, by the last decision
    ready: tuple[int, ...]
    had: tuple[int, ...]  # ready or coming

    @property
    def room(self) -> list[float]:
        """How many more can be had at all."""
        most = [math.inf if pool.capacity is None else pool.capacity for pool in self.pools]
        return [all_of_it - had for all_of_it, had in zip(most, self.had, strict=True)]

    @property
    def refused(self) -> list[bool]:
        """Which pools give fewer than they are asked for."""
        return [asked > had for asked, had in zip(self.asked, self.had, strict=True)]

    @property
    def largest(self) -> float:
        """Which share of the machines one pool has at most; without machines: all."""
        return max(self.had) / sum(self.had) if any(self.had) else 1.0

    @property
    def gone(self) -> bool:
        """Whether everything that was asked for has been lost, everywhere."""
        return all(self.asked) and not any(self.had)

    @property
    def scarce(self) -> bool:
        """Whether a pool gives machines, and fewer than it is asked for: each is lost by itself."""
        some = [refused for refused, had in zip(self.refused, self.had, strict=True) if had]
        return bool(some) and all(some)

    @property
    def main(self) -> Pool:
        """The pool that matters most now."""
        return self.pools[self.had.index(max(self.had))]

    @property
    def share(self) -> float:
        """Which share of the machines asked for is ready, on average.

        Where all are given, lost ones are replaced at once: only start-up takes its part.
        """
        main = self.main
        delivers = effective_availability(main)
        return delivers if self.scarce or not main.availability else delivers / main.availability

    def offers(self, wanted: int) -> dict[Offer, int]:
        """Say the same as `counts` by offer."""
        return {Offer(self.pools[at].name): count for at, count in self.counts(wanted).items()}

    def counts(self, wanted: int) -> dict[int, int]:
        """Say how many machines of which pools there shall be; a pool that is not named is left.

        Machines stay where they are. What is missing is asked for in the cheapest pools that have
        not just refused; of those that have, one machine tells when that is over. Where all have,
        all are asked for all of it.
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
    mean_s = life_s(pool)
    if pool.availability == 1:
        return (pool.usd_per_s + pool.transfer_usd_per_s) / pool.speed
    if not mean_s:
        return math.inf
    usd_per_s = pool.usd_per_s * pool.billing.paid_share(mean_s) + pool.transfer_usd_per_s
    return usd_per_s * math.exp(min(pool.start_up_s / mean_s, 700.0)) / pool.speed


def life_s(pool: Pool) -> float:
    """Give the mean time for which a machine of a pool is there."""
    return pool.availability * pool.cycle_s


def spot_of(situation: Situation, last: Decision | None, least_speed: float = 0.0) -> Spot:
    """Put the pools that pay, and whose machines are fast enough, in the order of their price."""
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
