"""Runs the policy: decides when to ask it, gathers its input, and makes records of its decisions.

The policy decides at the beginning, at each review, when a price has changed, when machines came or
went if it watches outages, when a user requests it, and when the job's settings have changed. A
policy that decides only once decides again for a user, for new settings, and when arrivals are
known for the first time, because its first decision was a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose
from typing import TYPE_CHECKING

import numpy as np

from common.spot.machines import Offer, PriceHistory
from common.spot.policies.bidding import Bidding, odds_of
from common.spot.policies.policy import ON_DEMAND, MachineCount, Situation, renewal_s
from common.spot.policies.pools import Pools
from common.spot.policies.registry import policy_of
from common.spot.provisioning.estimators import SURE, Estimator
from common.spot.provisioning.records import OfferCount, Planned
from common.spot.provisioning.slots import readiness
from common.spot.provisioning.stability import (
    Stability,
    bounded,
    deadline_left_s,
    restored,
    stability_of_plan,
    work_left,
)
from common.spot.theory.capacity import waiting_for_policy
from common.spot.theory.errors import ParameterError
from common.spot.theory.lags import StreamLags

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.spot.policies.bidbrain import EvictionOdds
    from common.spot.policies.policy import Decision, Flags, Policy
    from common.spot.provisioning.fleet_diff import Backoff
    from common.spot.provisioning.fleet_ledger import FleetLedger
    from common.spot.provisioning.settings import ProvisionerSettings
    from common.spot.theory.work import Rates

# Time between attempts of a policy that could not decide.
AGAIN_S = 5.0


class PolicyRunner:
    """The policy in charge, with its last decision.

    Attributes:
        error: Reason why it could not decide the last time; empty if it did.
        warning: Problem of the plan in force at the last decision.
    """

    def __init__(
        self,
        settings: ProvisionerSettings,
        estimator: Estimator,
        ledger: FleetLedger,
        backoff: Backoff,
    ) -> None:
        self._estimator = estimator
        self._ledger = ledger
        self._backoff = backoff
        self._last: Decision | None = None
        self._known_up: Flags | None = None
        self._known_machines: dict[Offer, MachineCount] = {}
        self._review_at_s = float("-inf")
        self._hours_at_s = float("inf")
        self._retry_at_s = float("inf")
        self._prices: dict[str, float] = {}
        # Changes of the job's settings since the last plan.
        self._changed = ""
        # Warning at the last decision that on-demand machines are refused; empty if they are not.
        self._without = ""
        self._guessed = True
        self.error = ""
        self.warning = ""
        self._settings = settings
        self._lags = StreamLags(settings.workers, settings.submitted_s)
        self._odds: EvictionOdds | None = None
        self._policy = _policy(settings, self._odds)

    @property
    def review_s(self) -> float | None:
        """Time between reviews; None if the policy is not asked because of time alone."""
        return self._settings.review_s or self._policy.review_s

    def change(self, settings: ProvisionerSettings) -> None:
        """Use other settings from now on."""
        self._changed = differences(self._settings, settings) or self._changed
        if settings.workers != self._settings.workers:
            self._lags = StreamLags(settings.workers, settings.submitted_s)
        self._settings = settings
        self._policy = _policy(settings, self._odds)

    def learn(self, past: Mapping[str, PriceHistory]) -> None:
        """Set the past prices of machines."""
        if self._settings.policy == "bidbrain" and past:
            try:
                self._odds = odds_of(self._settings.pools, past)
            except ParameterError as error:
                self._odds, self.error = None, str(error)
                return
            self._policy = _policy(self._settings, self._odds)
            self._retry_at_s = float("-inf")

    def resume(self, now_s: float) -> None:
        """Restore the plan in force, if there is one."""
        record = self._ledger.plan
        if record is None:
            return
        try:
            if record.policy == self._policy.name:
                self._last = restored(record, self.situation(now_s), self._settings.submitted_s)
        except ParameterError as error:
            self.error = str(error)
            return
        self._prices = dict(record.usd_per_hour)
        arrivals = record.believed.get("arrivals_per_s")
        self._guessed = arrivals is None or arrivals.std > SURE * arrivals.value
        if record.policy != self._policy.name:
            self._changed = f"policy {record.policy} to {self._policy.name}"

    def situation(self, now_s: float) -> Situation:
        """Return the current situation.

        Raises:
            ParameterError: If the theory cannot use it.
        """
        settings, estimator = self._settings, self._estimator
        rates = estimator.rates_per_s(now_s)
        to_loss = estimator.updates_to_loss()
        work = work_left(settings, rates, estimator.progress, now_s, to_loss)
        waiting = estimator.waiting
        gradient_s = float(estimator.gradient(now_s).value)
        if waiting is not None:
            work, waiting = waiting_for_policy(
                work, waiting, gradient_s, backlog=self._policy.plans_backlog
            )
        return Situation(
            now_s=now_s - settings.submitted_s,
            work=work,
            pools=estimator.pools(self._ledger.paid_usd_per_hour, now_s),
            gradient_s=gradient_s,
            up=self._up(),
            lag_s=self._stream_lags_s(now_s, rates, gradient_s),
            waiting=waiting,
            machines=self._machines(now_s),
            hours={
                offer: hour._replace(ends_s=hour.ends_s - settings.submitted_s)
                for offer, hour in self._ledger.hours(now_s).items()
            },
            refusing=self._backoff.refusing(now_s),
        )

    def ask(self, now_s: float) -> Planned | None:
        """Ask the policy if there is a reason; return the plan if it is new or was requested.

        The caller must write the plan down: the runner counts it as decided.
        """
        why = next(filter(None, self._reasons(now_s)), "")
        if not why:
            return None
        anew, plan = bool(self._changed or self._ledger.replans), self._ledger.plan
        if self._without and plan is not None and not self._refused(plan.on_demand):
            # On-demand machines are available again. A plan that a predecessor recorded may be
            # infeasible only because they were refused, so the policy decides from scratch.
            self._last = None
        try:
            situation = self.situation(now_s)
            decision = self._reconsider(situation, anew=anew, now_s=now_s)
            stability = stability_of_plan(decision, situation)
        except ParameterError as error:
            self.error = f"the previous plan stays in force: {error}"
            self._retry_at_s = now_s + AGAIN_S
            return None
        kept, refused = decision is self._last, self._refused(decision.on_demand)
        anew |= refused != self._without
        self._without = refused
        self._asked(situation, decision, now_s)
        self.warning = "; ".join(
            filter(None, (refused, warning_of_plan(stability, self._settings)))
        )
        if kept and not anew:
            return None
        self._changed = ""
        guesses = self._estimator.guesses(now_s)
        reasons = "; ".join(
            part for part in (why, "the plan is unchanged" if kept else "", guesses) if part
        )
        return self.record(decision, situation, reasons, now_s)

    def record(self, decision: Decision, situation: Situation, why: str, now_s: float) -> Planned:
        """Return the record of a decision.

        Cost and time of an earlier decision are reduced to the work that remains.
        """
        plan, pools, work, ledger = decision.plan, situation.pools, situation.work, self._ledger
        machines = tuple(
            OfferCount(offer.pool, count, offer.type, offer.zone, offer.bid_usd_per_hour)
            for offer, count in decision.machines.items()
            if decision.counted
        )
        share = 1.0
        if decision.basis.work.records:
            share = min(work.records / decision.basis.work.records, 1.0)
        return Planned(
            term=ledger.term,
            number=(ledger.plan.number if ledger.plan else 0) + 1,
            at_s=now_s,
            policy=self._policy.name,
            why=why,
            reason=decision.reason,
            feasible=plan.feasible and not self._without,
            binding="capacity" if self._without else plan.binding,
            pools=tuple(pool.name for pool in pools),
            places=tuple(decision.places.tolist()),
            spot=decision.spot,
            on_demand=decision.on_demand,
            updates_left=bounded(work.updates),
            deadline_left_s=deadline_left_s(self._settings, now_s),
            spent_usd=bounded(ledger.spent_usd(now_s)),
            expected_cost_usd=bounded(share * plan.expected_cost_usd),
            expected_runtime_s=bounded(share * plan.expected_runtime_s),
            on_demand_only_usd=bounded(work.on_demand_only_usd(pools[ON_DEMAND])),
            stability=bounded(stability_of_plan(decision, situation).ratio),
            usd_per_hour={pool.name: pool.usd_per_hour for pool in pools},
            believed=self._estimator.believed(now_s),
            warning=self.warning,
            transfer_usd=bounded(share * plan.expected_runtime_s * _transfer_usd_per_s(decision)),
            answers=max(ledger.replans, default=-1),
            machines=machines,
        )

    def _reasons(self, now_s: float) -> Iterator[str]:
        """Yield the reasons to ask the policy now, most important first; some may be empty."""
        if self.error and now_s < self._retry_at_s:
            return
        if self._ledger.replans:
            asked = self._ledger.replans[max(self._ledger.replans)]
            yield f"{asked.by} requested a new plan" + (f": {asked.reason}" if asked.reason else "")
        yield self._changed
        if self._last is None:
            yield "first plan"
            return
        if self._guessed and self._estimator.arrivals_known(now_s):
            yield "arrivals are known now"
        if self._ledger.plan and self._without != self._refused(self._ledger.plan.on_demand):
            yield "on-demand machines are " + ("available again" if self._without else "refused")
        yield self._prices_moved()
        known, machines = self._known_up, self._known_machines
        if self._policy.watches_outages and (
            known is None
            or (known != self._up()).any()
            or (self._last.counted and machines != self._machines(now_s))
        ):
            yield "machines started or ended"
        if now_s >= self._hours_at_s:
            yield "billed hours end"
        if self.review_s is not None and now_s >= self._review_at_s:
            yield "review"
        if self.error:
            yield "retry after an error"

    def _reconsider(self, situation: Situation, *, anew: bool, now_s: float) -> Decision:
        last = self._last
        once = self._policy.review_s is None
        if once and (anew or (self._guessed and self._estimator.arrivals_known(now_s))):
            last = None
        if last is not None and len(last.basis.up) != situation.work.workers:
            last = None
        return self._policy.reconsider(situation, last)

    def _refused(self, on_demand: int) -> str:
        """Return a warning if on-demand machines are needed for the deadline but refused."""
        alone = self._settings.pools[ON_DEMAND].name
        if self._settings.deadline_at_s is None or not self._backoff.gives_none(alone):
            return ""
        there = self._ledger.running
        if sum(each.pool == alone and not each.left for each in there) >= on_demand:
            return ""
        silent = alone in self._backoff.silent
        why = "useless, because their workers never report" if silent else "refused"
        return f"{alone} machines are {why}: the deadline may be missed without them"

    def _asked(self, situation: Situation, decision: Decision, now_s: float) -> None:
        self._last = decision
        self._known_up = situation.up
        self._known_machines = self._machines(now_s)
        self._prices = self._ledger.paid_usd_per_hour
        self._guessed = not self._estimator.arrivals_known(now_s)
        self._review_at_s = now_s + (self.review_s or float("inf"))
        self._hours_at_s = self._settings.submitted_s + self._hour_after(situation)
        self._retry_at_s = float("inf")
        self.error = ""

    def _hour_after(self, situation: Situation) -> float:
        """Return the next time at which an hour is due for renewal or the renewed one has begun."""
        hour_s = min(pool.billing.hour_s for pool in situation.pools)
        ends_s = [hour.ends_s for hour in situation.hours.values()]
        times_s = [end_s - renewal_s(hour_s) for end_s in ends_s] + ends_s
        return min((at_s for at_s in times_s if at_s > situation.now_s), default=float("inf"))

    def _prices_moved(self) -> str:
        for pool, usd in self._ledger.paid_usd_per_hour.items():
            before = self._prices.get(pool)
            if before is not None and not isclose(usd, before):
                return f"price of {pool} from ${before:g} to ${usd:g}"
        return ""

    def _up(self) -> Flags:
        """Return the slots whose own machine runs, or was ordered without a refusal.

        Before the first plan, all count as up, as in the simulator.
        """
        up = np.zeros(self._settings.workers, np.bool_)
        if self._last is None:
            return ~up
        for instance in self._ledger.open:
            slot = instance.slot
            if slot is None or slot >= len(up) or instance.left:
                continue
            if self._last.counted:
                up[slot] |= instance.running
                continue
            up[slot] |= instance.running or slot not in self._backoff.refused
        return up

    def _stream_lags_s(
        self, now_s: float, rates_per_s: Rates, gradient_s: float
    ) -> npt.NDArray[np.float64]:
        """Estimate the age of each slot's oldest record from the time without a machine."""
        settings = self._settings
        since_s = np.full(settings.workers, settings.submitted_s)
        for slot, at_s in self._ledger.vacated_s.items():
            since_s[slot : slot + 1] = at_s
        for instance in self._ledger.open:
            if instance.has_slot and instance.slot is not None:
                since_s[instance.slot : instance.slot + 1] = now_s
        speed = min(pool.speed for pool in settings.pools)
        return self._lags.at(now_s, since_s, rates_per_s * gradient_s / settings.batch_size / speed)

    def _machines(self, now_s: float) -> dict[Offer, MachineCount]:
        """Count the machines by the offer of their order."""
        ready = readiness(self._settings.pools, self._estimator.start_ups, now_s)
        counts = dict[Offer, MachineCount]()
        for instance in self._ledger.open:
            if instance.left:
                continue
            before, is_ready = counts.get(instance.asked, MachineCount()), ready(instance)
            counts[instance.asked] = MachineCount(
                before.ready + is_ready, before.coming + (not is_ready)
            )
        return counts


def _transfer_usd_per_s(decision: Decision) -> float:
    """Return the mean cost of traffic of a plan's machines."""
    pools = decision.basis.pools
    usd_per_s = [pool.availability * pool.transfer_usd_per_s for pool in pools]
    return float(np.array(usd_per_s)[decision.pools].sum())


def _policy(settings: ProvisionerSettings, odds: EvictionOdds | None) -> Policy:
    """Make the policy. If the market has no spot pool, `pools` replaces all but `on-demand`."""
    name = settings.policy
    if len(settings.pools) == 1 and name != "on-demand":
        name = "pools"
    return policy_of(
        name,
        settings.probability,
        pools=Pools(
            settings.on_preemption, settings.spot_up_to, settings.max_lag_s, settings.reliable
        ),
        bidding=Bidding(settings.bidding, odds),
    )


def differences(before: ProvisionerSettings, after: ProvisionerSettings) -> str:
    """Describe the changes that a plan depends on."""
    changed = [
        f"{field} from {getattr(before, field)} to {getattr(after, field)}"
        for field in (
            *("policy", "probability", "review_s", "workers", "group_size", "batch_size"),
            *("updates", "loss", "deadline_at_s", "on_preemption", "bidding"),
            *("max_lag_s", "spot_up_to", "reliable"),
        )
        if getattr(before, field) != getattr(after, field)
    ]
    if before.pools != after.pools:
        changed.append("the market file")
    return ", ".join(changed)


def warning_of_plan(stability: Stability, settings: ProvisionerSettings) -> str:
    """Describe a plan's problem and why it stays; empty without a problem."""
    if stability.ratio >= 1:
        return ""
    share = f"the plan keeps up with {100 * stability.ratio:.3g} % of arrivals (Proposition 1)"
    if stability.needed is None:
        return f"{share}: one machine for each of the K gradients would not suffice"
    needs = f"{stability.needed} machines are needed at any time"
    if stability.needed > settings.workers:
        return f"{share}: {needs}, but the job's limit is {settings.workers}"
    return f"{share}: {needs}, but the policy {settings.policy} does not request more"
