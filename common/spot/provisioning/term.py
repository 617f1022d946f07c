"""Decisions of a provisioner between its Lead record and the next one.

Nothing is decided while own records are under way: only records in the log count, and an order is
one that was read back. After every event, one pass of `advance` goes through the steps until one
has a record to write.

    poll ─▶ Started, Ended ─▶ SlotAssigned ─▶ missing? ─▶ Ordered ─▶ policy? ─▶ Planned ─▶ Reviewed
              prices ─▶ Priced                 └─▶ release
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.spot.machines import Offer, PriceHistory, by_pool
from common.spot.policies.policy import ON_DEMAND
from common.spot.provisioning import commands as do
from common.spot.provisioning import events
from common.spot.provisioning.fleet_diff import (
    FleetDiff,
    desired_machines,
    reconcile,
    reconcile_counted,
    worker_name,
)
from common.spot.provisioning.fleet_watch import FleetWatch
from common.spot.provisioning.policy_runner import PolicyRunner
from common.spot.provisioning.records import (
    Ended,
    LaunchRequested,
    Left,
    OfferPrice,
    PlanRecord,
    Priced,
    Reviewed,
    Settled,
    SlotAssigned,
    Started,
)
from common.spot.provisioning.slots import assign_slots, readiness
from common.spot.provisioning.stability import bounded, stability_of_fleet, updates_left
from common.spot.theory.errors import ParameterError

if TYPE_CHECKING:
    from common.core.messages import Wanted
    from common.spot.provisioning.commands import ProvisionerCommand
    from common.spot.provisioning.estimators import Estimator
    from common.spot.provisioning.events import ProvisionerEvent
    from common.spot.provisioning.fleet_diff import Backoff, DesiredMachine
    from common.spot.provisioning.fleet_ledger import FleetLedger
    from common.spot.provisioning.settings import ProvisionerSettings

# Time after which own records that were not read back are lost.
UNREAD_S = 30.0
# Number of start-up times after which a machine without a heartbeat is given up, and the longest
# such time: if no machine of a pool reports, the estimate of its start-up time grows.
START_UPS, LONGEST_START_S = 3.0, 1800.0
# Time between polls of past prices. Odds of evictions are estimated from days of prices.
PAST_S = 6 * 3600.0
# Longest wait for unavailable prices at the start; then the market file's are used.
PRICES_S = 30.0


@dataclass(slots=True)
class Known:
    """State of the job by its topics, which a standby follows, too."""

    settings: ProvisionerSettings
    ledger: FleetLedger
    estimator: Estimator
    backoff: Backoff
    wanted: Wanted = "running"
    # Reason of `wanted`.
    reason: str = ""
    # Past prices of machines.
    past: Mapping[str, PriceHistory] = field(default_factory=dict)

    def plans_read(self, offset: int, record: PlanRecord | None) -> bool:
        """Fold a record of the plans topic; return True if it counts."""
        counts = self.ledger.feed(offset, record)
        if counts and record is not None:
            self.estimator.fleet(record, self.ledger)
            if isinstance(record, (Started, Left, Ended)):
                self.backoff.feed(record, self.ledger.machines[record.launch])
        return counts


class Term:
    """One term of a provisioner in charge.

    Attributes:
        failed: Reason why it cannot continue; empty while it can.

    Args:
        known: State of the topics. The provisioner feeds it before `read`.
        now_s: Beginning of the term.
    """

    def __init__(self, known: Known, now_s: float) -> None:
        self._known = known
        self._watch = FleetWatch(known.settings, known.ledger, since_s=now_s)
        self._policy = PolicyRunner(known.settings, known.estimator, known.ledger, known.backoff)
        self._begun_s = now_s
        self._unread = deque[PlanRecord]()
        self._written_s = now_s
        self._look_at_s = self._prices_at_s = self._past_at_s = now_s
        # Time at which refused machines may be ordered again.
        self._again_at_s = float("inf")
        self._reviewed_s = float("-inf")
        # Time of the next check for alarms. The first check leaves time for a plan.
        self._alarm_at_s = now_s + known.settings.warned_s
        # Kinds of alarm in the last review.
        self._alarmed = set[str]()
        # Last known prices.
        self._prices: Mapping[Offer, float] = {}
        self._fleet_away = self._prices_away = ""
        # Input of the last result of `_steps`.
        self._basis: object = None
        self._lack = FleetDiff((), ())
        self.failed = ""
        self._policy.learn(known.past)
        self._policy.resume(now_s)

    # --- input ---------------------------------------------------------------------------------

    def read(self, record: PlanRecord | None, now_s: float, *, counts: bool) -> None:
        """Match a record, which was folded before, with the own records to be read back."""
        if not (self._unread and record == self._unread[0]):
            return
        self._unread.popleft()
        self._written_s = now_s
        if not counts:
            self.failed = f"its {type(record).__name__} record was not accepted"

    def on(self, event: ProvisionerEvent, now_s: float) -> None:
        """Apply a response or new settings."""
        match event:
            case events.ProvisioningChanged(settings):
                self._watch.settings = settings
                self._policy.change(settings)
            case events.MachinesSeen():
                self._fleet_away = ""
                self._watch.seen(event)
            case events.HeartbeatsSeen():
                self._watch.workers_seen(event)
                self._workers_seen(event)
            case events.LaunchAnswered(launches, refused):
                self._fleet_away = ""
                self._watch.answered(launches, refused, now_s)
            case events.PricesSeen(usd_per_hour):
                self._prices, self._prices_away = usd_per_hour, ""
            case events.PastSeen(prices):
                self._known.past = prices
                self._policy.learn(prices)
            case events.FleetAway(reason):
                self._fleet_away = reason or "no reason given"
            case events.PricesAway(reason):
                self._prices_away = reason or "no reason given"
            case _:
                # Events of the log and of the lease are handled elsewhere.
                pass

    def _workers_seen(self, seen: events.HeartbeatsSeen) -> None:
        known, before = self._known, self._known.estimator.start_ups.reported
        known.estimator.workers_seen(seen, known.ledger)
        for launch in known.estimator.start_ups.reported - before:
            known.backoff.reports(known.ledger.machines[launch].pool)

    # --- decisions -----------------------------------------------------------------------------

    def due(self) -> float:
        """Return the time of the next `Tick`. All other deadlines are checked at polls."""
        return min(self._look_at_s, self._prices_at_s, self._again_at_s)

    def advance(self, now_s: float) -> Iterator[ProvisionerCommand]:
        """Do everything that can be done now."""
        self._again_at_s = self._known.backoff.due(now_s)
        yield from self._looks(now_s)
        if self._unread:
            if now_s - self._written_s > UNREAD_S:
                self.failed = "its records were not read back in time"
            return
        yield from self._launch(now_s)
        seen = self._watch.records, self._watch.left, self._never_reported, self._assign_slots
        for step in (*seen, self._priced, self._end, self._provide, self._decide):
            records = tuple(step(now_s))
            yield from self._write(records, now_s)
            if records:
                return
        yield from self._release(now_s)
        yield from self._write(tuple(self._review(now_s)), now_s)

    def _looks(self, now_s: float) -> Iterator[ProvisionerCommand]:
        settings = self._known.settings
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + settings.look_s
            yield do.PollMachines()
        if now_s >= self._prices_at_s:
            self._prices_at_s = now_s + settings.prices_s
            yield do.PollPrices()
        if settings.policy == "bidbrain" and now_s >= self._past_at_s:
            self._past_at_s = now_s + (PAST_S if self._known.past else PRICES_S)
            yield do.PollPastPrices()

    def _write(self, records: tuple[PlanRecord, ...], now_s: float) -> Iterator[ProvisionerCommand]:
        for record in records:
            self._unread.append(record)
            self._written_s = now_s
            yield do.AppendPlan(record)

    def _launch(self, now_s: float) -> Iterator[ProvisionerCommand]:
        orders = self._watch.orders(now_s)
        if orders:
            yield do.Launch(orders)

    def _priced(self, now_s: float) -> Iterator[PlanRecord]:
        settings, ledger = self._known.settings, self._known.ledger
        prices, names = by_pool(self._prices), settings.pool_names
        # If a pool has no price after this time, its last recorded price or that of the market file
        # is better than none.
        if now_s >= self._begun_s + PRICES_S:
            said = {pool.name: pool.usd_per_hour for pool in settings.pools}
            prices = said | ledger.prices | prices
        changed = {
            pool: usd
            for pool, usd in prices.items()
            if pool in names and ledger.prices.get(pool) != usd
        }
        offers = tuple(
            OfferPrice(offer.pool, offer.type, offer.zone, usd)
            for offer, usd in self._prices.items()
            if offer.type and offer.pool in names and ledger.offers.get(offer) != usd
        )
        if changed or offers:
            yield Priced(ledger.term, now_s, changed, offers)

    # --- the end of the job --------------------------------------------------------------------

    def _end(self, now_s: float) -> Iterator[PlanRecord]:
        """Settle a job that is over, once none of its machines runs."""
        known, ledger = self._known, self._known.ledger
        gone = self._watch.looked and not ledger.open and not self._watch.strangers
        if known.wanted == "stopped" and gone and ledger.settled is None:
            yield Settled(
                term=ledger.term,
                at_s=now_s,
                why=known.reason or "stopped",
                spent_usd=bounded(ledger.spent_usd(now_s)),
                on_demand_only_usd=bounded(self._alone_usd(now_s)),
                predicted_usd=ledger.plan.predicted_usd if ledger.plan else None,
            )

    def _alone_usd(self, now_s: float) -> float:
        """Return the on-demand cost of the updates so far: theta_0 with all workers."""
        settings, estimator = self._known.settings, self._known.estimator
        arrivals_per_s = float(estimator.arrivals(now_s).value)
        alone = estimator.pools(self._known.ledger.paid_usd_per_hour, now_s)[ON_DEMAND]
        return settings.workers * estimator.samples / arrivals_per_s * alone.usd_per_s

    # --- machines ------------------------------------------------------------------------------

    def _assign_slots(self, now_s: float) -> Iterator[PlanRecord]:
        """Assign slots to spare machines. Under `reassign`, streams move by themselves."""
        known, settings = self._known, self._known.settings
        spare = any(instance.slot is None and instance.running for instance in known.ledger.open)
        if known.wanted != "running" or settings.on_preemption != "hold" or not spare:
            return
        free = assign_slots(
            known.ledger.open,
            readiness(settings.pools, known.estimator.start_ups, now_s),
            {pool.name: pool.speed for pool in settings.pools},
            known.ledger.vacated_s,
            known.estimator.rates_per_s(now_s),
        )
        for slot, launch in free:
            worker = worker_name(settings.job, slot, launch, settings.on_preemption)
            yield SlotAssigned(known.ledger.term, now_s, slot, launch, worker)

    def _never_reported(self, now_s: float) -> Iterator[Left]:
        """Give up machines whose workers have sent no heartbeat in three start-up times.

        At least `unseen_s` pass, because the start-up time may be unknown. The machine is released
        even if its worker reports afterwards, because another machine was ordered.
        """
        known, start_ups = self._known, self._known.estimator.start_ups
        most_s = {
            pool.name: min(START_UPS * start_ups.start_up_s(pool), LONGEST_START_S)
            for pool in known.settings.pools
        }
        for instance in known.ledger.running if known.wanted == "running" else ():
            limit_s = max(most_s.get(instance.pool, 0.0), known.settings.unseen_s)
            if not instance.left and start_ups.silent_s(instance) >= limit_s:
                yield Left(known.ledger.term, now_s, instance.launch, never_reported=True)

    def _may_order(self, now_s: float) -> Callable[[DesiredMachine], bool]:
        """Return a function that returns True if a machine may be ordered now.

        In a pool whose workers never report, one machine at a time is tried.
        """
        backoff, reported = self._known.backoff, self._known.estimator.start_ups.reported
        tried = {
            each.pool
            for each in self._known.ledger.open
            if not each.left and each.launch not in reported
        }

        def may(desired: DesiredMachine) -> bool:
            if now_s < backoff.until_s(desired):
                return False
            silent, again = desired.pool in backoff.silent, desired.pool in tried
            tried.add(desired.pool)
            return not (silent and again)

        return may

    def _wanted_machines(self) -> int:
        plan = self._known.ledger.plan
        if self._known.wanted != "running" or plan is None:
            return 0
        return sum(plan.counts.values()) + len(desired_machines(plan.places, plan.pools))

    def _compare(self, may_order: Callable[[DesiredMachine], bool], now_s: float) -> FleetDiff:
        """Compare the wanted machines with the existing ones.

        A plan releases no machine before its start-up has ended: the next plan may want it again,
        and a start-up is paid without any work.
        """
        known, plan, there = self._known, self._known.ledger.plan, self._known.ledger.open
        if known.wanted != "running" or plan is None:
            return reconcile((), there)
        ready = readiness(known.settings.pools, known.estimator.start_ups, now_s)
        if plan.counted:
            gone = known.ledger.gone_bids
            diff = reconcile_counted(plan.counts, there, may_order, now_s, gone)
        else:
            all_desired = desired_machines(plan.places, plan.pools)
            moves = known.settings.on_preemption == "reassign"
            diff = reconcile(all_desired, there, may_order, ready if moves else None)
        release = tuple(each for each in diff.release if each.left or ready(each))
        return diff._replace(release=release)

    def _steps(self, now_s: float) -> FleetDiff:
        """Return missing and surplus machines.

        If the job is wanted running but has no plan yet, there are neither.
        """
        known = self._known
        basis = (now_s, known.ledger.position, known.wanted)
        # The result is used twice in one pass.
        if self._basis != basis:
            self._basis, self._lack = basis, FleetDiff((), ())
            if known.wanted != "running" or known.ledger.plan is not None:
                self._lack = self._compare(self._may_order(now_s), now_s)
        return self._lack

    def _provide(self, now_s: float) -> Iterator[PlanRecord]:
        """Order missing machines, once the existing ones are known."""
        if not self._watch.looked:
            return
        known = self._known
        for number, desired in enumerate(self._steps(now_s).order, known.ledger.launches + 1):
            worker = worker_name(
                known.settings.job, desired.slot, number, known.settings.on_preemption
            )
            offer = desired.offer or Offer(desired.pool)
            yield LaunchRequested(
                term=known.ledger.term,
                launch=number,
                at_s=now_s,
                slot=desired.slot,
                pool=desired.pool,
                worker=worker,
                machine_type=offer.type,
                zone=offer.zone,
                bid_usd_per_hour=offer.bid_usd_per_hour,
            )

    def _release(self, now_s: float) -> Iterator[ProvisionerCommand]:
        machines = self._watch.releases(self._steps(now_s).release, now_s)
        if machines:
            wanted = self._known.wanted
            why = "the plan does not use them" if wanted == "running" else f"the job is {wanted}"
            yield do.Release(machines, why)

    # --- plans and reviews ---------------------------------------------------------------------

    def _decide(self, now_s: float) -> Iterator[PlanRecord]:
        """Ask the policy, once all prices are known."""
        known = self._known
        priced = all(pool in known.ledger.prices for pool in known.settings.pool_names)
        if known.wanted == "running" and priced and self._watch.looked:
            plan = self._policy.ask(now_s)
            if plan is not None:
                yield plan

    def _review(self, now_s: float) -> Iterator[PlanRecord]:
        """Write a review if it is due or the kinds of alarm have changed."""
        known, ledger, settings = self._known, self._known.ledger, self._known.settings
        if now_s < self._alarm_at_s or ledger.settled is not None:
            return
        self._alarm_at_s = now_s + settings.warned_s
        ratio, alarm = self._alarm(now_s)
        every_s = min(settings.reviewed_s, self._policy.review_s or settings.reviewed_s)
        if now_s < self._reviewed_s + every_s and alarm.keys() == self._alarmed:
            return
        self._reviewed_s, self._alarmed = now_s, set(alarm)
        made, to_loss = known.estimator.progress, known.estimator.updates_to_loss()
        yield Reviewed(
            term=ledger.term,
            at_s=now_s,
            version=known.estimator.version,
            updates_left=updates_left(settings, made, to_loss) or 0.0,
            running=len(ledger.running),
            wanted=self._wanted_machines(),
            spent_usd=bounded(ledger.spent_usd(now_s)),
            on_demand_only_usd=bounded(self._alone_usd(now_s)),
            stability=bounded(ratio),
            believed=known.estimator.believed(now_s),
            warning="; ".join(alarm.values()),
        )

    def _alarm(self, now_s: float) -> tuple[float, dict[str, str]]:
        """Return capacity over arrivals of the running machines, and all alarms by kind.

        A new kind of alarm triggers a review; a new text of the same kind does not.
        """
        known, ratio = self._known, 0.0
        alarms = {
            "policy": self._policy.error,
            "fleet": self._fleet_away and f"the provider does not answer: {self._fleet_away}",
            "prices": self._prices_away and f"current prices are unavailable: {self._prices_away}",
            "silent": "; ".join(
                f"workers on machines of {pool} never report: {known.ledger.never_reported[pool]}"
                " machines so far; one at a time is tried, ever less often"
                for pool in sorted(known.backoff.silent)
            ),
        }
        try:
            situation = self._policy.situation(now_s)
        except ParameterError as error:
            alarms["policy"] = alarms["policy"] or str(error)
        else:
            speeds = {pool.name: pool.speed for pool in situation.pools}
            holds = known.settings.on_preemption == "hold"
            ready = readiness(known.settings.pools, known.estimator.start_ups, now_s)
            serving = [
                each
                for each in known.ledger.running
                if ready(each) and not each.left and (each.has_slot or not holds)
            ]
            machines = sum(speeds.get(instance.pool, 1.0) for instance in serving)
            fleet = stability_of_fleet(machines, situation)
            ratio = fleet.ratio
            if known.wanted == "running":
                alarms["plan"] = self._policy.warning
                if ratio < 1 and fleet.needed is not None:
                    alarms["below"] = (
                        f"machines at work: {len(serving)}, needed to keep up with arrivals"
                        f" (Proposition 1): {fleet.needed}; {self._why_below(now_s)}"
                    )
        return ratio, {kind: text for kind, text in alarms.items() if text}

    def _why_below(self, now_s: float) -> str:
        """Explain why there are too few machines."""
        known = self._known
        ready = readiness(known.settings.pools, known.estimator.start_ups, now_s)
        coming = sum(not each.left and not ready(each) for each in known.ledger.open)
        if coming:
            return f"{coming} are starting"
        lacking = self._compare(lambda _: True, now_s).order
        held = sorted(
            {desired.pool for desired in lacking if known.backoff.until_s(desired) > now_s}
        )
        if held:
            return f"{', '.join(held)}: will be ordered again after a refusal or failure"
        if lacking:
            return f"{len(lacking)} are being ordered"
        return "the plan has no more" if known.ledger.plan else "there is no plan yet"
