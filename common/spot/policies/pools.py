"""Choice of the number of machines from each of several pools, to meet a deadline.

With one worker per stream (`hold`), the policy first requests spot machines, from the pool whose
ready second costs least among those that give machines. It replaces a lost machine elsewhere at
once, and there may be more machines than streams. On-demand machines do the work that spot machines
are not expected to finish by the deadline:

    single losses   on-demand spares, as many as are missing on average
    all are lost    nothing while there is time to wait, then one for each stream, until spot
                    machines are ready to replace them
    little time     as many as would still be in time if the largest pool were lost now

If streams move to the survivors (`reassign`), machines are as few as keep up; see
`common.spot.policies.moving`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from common.spot.machines import Offer
from common.spot.policies.adaptive import LATE
from common.spot.policies.fixed import OnDemandOnly
from common.spot.policies.moving import Backlog, Forecast, moving
from common.spot.policies.policy import ON_DEMAND, Decision, MachineCount, Policy, Situation
from common.spot.policies.spot import Spot, life_s, spot_of
from common.spot.theory.preemption import effective_availability
from common.spot.theory.provisioning import Binding, Plan
from common.spot.theory.work import partial_batches_s

# Share of the reserve that plans may use. A job that kept the whole reserve until its last update
# would end that much before the deadline.
SPENT = 0.25
ALMOST = 0.5  # share of a stream
# Number of spare on-demand machines that are not released, because they would be restarted soon.
SPARES = 1
ROUNDING = 1e-9
_LACKS: dict[Binding | None, str] = {
    "stability": "no number of machines keeps up with what arrives; ",
    "capacity": "all pools together have too few machines; ",
}


def expected_serving(machines: int, share: float, streams: int, certain: int = 0) -> float:
    """Return the mean number of served streams: E[min(streams, certain + ready)].

    Ready machines are binomial, B(machines, share), approximated as normal.
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


@dataclass(frozen=True, slots=True)
class _Need:
    """Remaining work and the time for it."""

    streams: int
    # Time of the remaining work without outages.
    undisturbed_s: float
    # Time until the deadline, less the possible delay of arrivals.
    time_s: float
    # Time from the loss of the largest pool until others work in its place.
    reserve_s: float

    @property
    def short_s(self) -> float:
        """Part of the reserve that is used up; negative if there is more time than the reserve."""
        return self.undisturbed_s - (self.time_s - self.reserve_s)

    @property
    def serving(self) -> float:
        """Mean number of streams that must be served to meet the deadline."""
        time_s = self.time_s - (1 - SPENT) * self.reserve_s
        # No number of spot machines serves all streams on average.
        most = self.streams - ALMOST
        return min(self.streams * self.undisturbed_s / max(time_s, ROUNDING), most)

    @property
    def certain(self) -> int:
        """Number of on-demand machines: for the share of streams by which the reserve is used."""
        if self.short_s <= 0:
            return 0
        share = min(self.short_s / self.reserve_s, 1.0) if self.reserve_s else 1.0
        return math.ceil(self.streams * share - ROUNDING)


@dataclass(frozen=True, slots=True)
class Pools(Policy):
    """Decides the number of machines of each pool whenever a machine comes or goes."""

    name: ClassVar[str] = "pools"
    watches_outages: ClassVar[bool] = True
    on_preemption: Literal["hold", "reassign"] = "hold"
    # Maximum ratio of spot machines to streams.
    spot_up_to: float = 1.5
    # Longest waiting time of records. If None, streams are served as steadily as possible.
    max_lag_s: float | None = None
    # Number of machines that are always on demand.
    reliable: int = 0
    # Time between reviews. The reserve includes it.
    review_s: float = 10.0

    @property
    def plans_backlog(self) -> bool:
        """True if streams move. The number of machines then depends on the backlog."""
        return self.on_preemption == "reassign"

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide again, or return `last` if nothing relevant has changed."""
        if self.on_preemption == "reassign":
            return self._moving(situation, last)
        if len(situation.pools) == 1:
            return OnDemandOnly().reconsider(situation, last)
        work = situation.work
        batch_s = work.batch_size / max(float(work.rates_per_s.max()), ROUNDING)
        spot = spot_of(situation, last, situation.gradient_s / batch_s)
        need = self._need(situation, spot)
        if not spot.pools:
            return self._decided(situation, last, {}, need.streams, "no spot machine pays")
        if self.max_lag_s is not None and situation.lag_s is not None:
            spots = need.streams
            alone = self._bounding_lag(situation, self.max_lag_s, spot, need)
        else:
            share = spot.share
            spots = _least(
                lambda machines: expected_serving(machines, share, need.streams),
                need.serving,
                # Fewer machines than streams would cost as much per record.
                (need.streams, int(self.spot_up_to * need.streams)),
            )
            alone = self._on_demand(situation, last, spot, need, spots)
        reason = "first plan" if last is None else _why(spot, need)
        return self._decided(situation, last, spot.offers(spots), alone, reason)

    def _moving(self, situation: Situation, last: Decision | None) -> Decision:
        spot = spot_of(situation, last)
        backlog = Backlog(situation, spot, self.max_lag_s, self.review_s)
        wanted = moving(backlog, self.reliable, first=last is None)
        return self._decided(
            situation,
            last,
            spot.offers(wanted.spot),
            wanted.on_demand,
            "first plan" if last is None else wanted.reason,
            backlog.forecast(wanted.spot, wanted.on_demand),
        )

    def _need(self, situation: Situation, spot: Spot) -> _Need:
        work, start_up_s = situation.work, situation.pools[ON_DEMAND].start_up_s
        late_s = partial_batches_s(work.rates_per_s, work.batch_size)
        late_s += LATE * math.sqrt(work.records) / work.records_per_s
        time_s = work.deadline_s - late_s
        reserve_s = spot.largest * (start_up_s + self.review_s)
        return _Need(work.workers, work.undisturbed_s, time_s, reserve_s)

    def _on_demand(
        self, situation: Situation, last: Decision | None, spot: Spot, need: _Need, spots: int
    ) -> int:
        """Return the number of on-demand machines."""
        streams, main = need.streams, spot.main
        before = 0
        if last is not None:
            before = last.machines.get(Offer(situation.pools[ON_DEMAND].name), 0)
        ready, together = sum(spot.ready), last is not None and not spot.scarce
        lost_s = _losses(need.undisturbed_s, life_s(main))
        lost_s *= situation.pools[ON_DEMAND].start_up_s + self.review_s
        missing = 0
        if together and need.short_s + lost_s >= 0:
            missing = streams - sum(spot.had)
        alone = 0
        if not spot.gone:
            share = spot.share
            alone = _least(
                lambda machines: expected_serving(spots, share, streams, machines),
                need.serving,
                (0, streams),
            )
        # On-demand machines stay until spot machines are ready. If they were released because fewer
        # losses are ahead than before, they would soon be started again, and each start-up is paid.
        if together or (2 * ready < streams and not spot.gone):
            alone = max(alone, min(before, streams - ready))
        alone = max(alone, missing, need.certain)
        return before if 0 < alone < before <= alone + SPARES else alone

    def _bounding_lag(self, situation: Situation, max_lag_s: float, spot: Spot, need: _Need) -> int:
        """Return the number of on-demand machines if records may wait up to `max_lag_s`.

        Streams that wait longest are served first, each by its own on-demand machine. This machine
        stays until spot machines are ready for all streams and the lag leaves room for another
        loss.
        """
        alone = situation.pools[ON_DEMAND]
        there = situation.machines.get(Offer(alone.name), MachineCount())
        ahead_s = alone.start_up_s + self.review_s
        lag_s, missing = situation.lag_s, max(need.streams - sum(spot.ready), 0)
        if lag_s is None or need.time_s <= ahead_s + self.review_s:
            return missing
        late = lag_s + ahead_s + self.review_s > max_lag_s
        waiting = int(np.count_nonzero(late & ~situation.up & (lag_s > 0)))
        behind = int(np.count_nonzero(late & situation.up))
        return min(there.ready, max(missing, behind)) + waiting

    def _decided(
        self,
        situation: Situation,
        last: Decision | None,
        spots: dict[Offer, int],
        alone: int,
        reason: str,
        forecast: Forecast | None = None,
    ) -> Decision:
        pools = situation.pools
        alone = max(alone, self.reliable)
        machines = spots | ({Offer(pools[ON_DEMAND].name): alone} if alone else {})
        there = situation.machines.get(Offer(pools[ON_DEMAND].name), MachineCount())
        refused = last is not None and sum(there) < min(last.on_demand, alone)
        forecast = forecast or _assigned(situation, machines)
        feasible = not refused and forecast.lacks is None
        if last is not None and last.machines == machines and last.plan.feasible == feasible:
            return last
        plan = _counted_plan(situation, machines, alone, forecast, refused=refused)
        return Decision(machines, plan, f"{reason}: {plan.reason}", situation)


def _least(served: Callable[[int], float], wanted: float, between: tuple[int, int]) -> int:
    """Return the fewest machines that serve this number of streams, or the most if none do."""
    fewest, most = between
    return fewest + bisect_left(range(fewest, most), wanted - ROUNDING, key=served)


def _losses(time_s: float, mean_life_s: float) -> float:
    """Return a high estimate of the number of losses in a time, by a Poisson law."""
    mean = time_s / max(mean_life_s, 1.0)
    return mean + LATE * math.sqrt(mean)


def _why(spot: Spot, need: _Need) -> str:
    if need.short_s > 0:
        return f"{need.short_s:,.4g} s of the time reserve are used"
    if spot.gone:
        return "no pool gives a machine"
    if any(spot.refused):
        return "a machine was lost or refused"
    return "more or fewer are needed"


def _assigned(situation: Situation, machines: dict[Offer, int]) -> Forecast:
    """Forecast for machines that serve one stream each."""
    work, by_name = situation.work, {pool.name: pool for pool in situation.pools}
    serving = math.fsum(
        count * effective_availability(by_name[offer.pool]) for offer, count in machines.items()
    )
    slower = max(work.workers / serving, 1.0) if serving else math.inf
    late = work.undisturbed_s > work.deadline_s
    return Forecast(work.undisturbed_s * slower, "infeasible" if late else None)


def _counted_plan(
    situation: Situation,
    machines: dict[Offer, int],
    alone: int,
    forecast: Forecast,
    *,
    refused: bool,
) -> Plan:
    work, by_name = situation.work, {pool.name: pool for pool in situation.pools}
    usd_per_s = math.fsum(
        count * by_name[offer.pool].wanted_usd_per_s for offer, count in machines.items()
    )
    usd = usd_per_s * forecast.runtime_s if usd_per_s else 0.0
    on_demand_usd = work.on_demand_only_usd(situation.pools[ON_DEMAND])
    named = ", ".join(f"{count} in {offer.pool}" for offer, count in machines.items())
    lacks = "capacity" if refused else forecast.lacks
    reason = f"{named or 'nothing'}: {work.undisturbed_s:,.6g} s of {work.deadline_s:,.6g} s"
    return Plan(
        feasible=lacks is None,
        spot=sum(machines.values()) - alone,
        on_demand=alone,
        spot_workers=np.zeros(0, np.int64),
        expected_cost_usd=usd,
        expected_runtime_s=forecast.runtime_s,
        cost_ratio_to_on_demand=usd / on_demand_usd if on_demand_usd else 1.0,
        binding=lacks or ("deadline" if alone else "workers"),
        reason=_LACKS.get(lacks, "") + reason,
    )
