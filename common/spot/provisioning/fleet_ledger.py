"""The provisioner in charge, its decisions and the machines: a pure fold over the plans topic.

Several processes may have believed that they provision, and their records interleave in the topic.
Only this fold decides whose term it is, which orders count and what the machines have cost. The
provisioner decides by it, and the admin service reports it. `records` has an example.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from common.core.thinned_samples import Thinned
from common.spot.machines import Offer
from common.spot.policies.policy import Hour
from common.spot.provisioning.bill import Bill
from common.spot.provisioning.records import (
    Ended,
    EndedBecause,
    LaunchRequested,
    Left,
    Planned,
    PlanRecord,
    Priced,
    ProvisionerLead,
    ReplanAsked,
    Reviewed,
    Settled,
    SlotAssigned,
    Started,
)
from common.spot.theory.billing import BY_THE_SECOND, Billing

# One page of history. The topic has all plans.
PLANS_KEPT = 100
# Points of a curve over time: more than a screen has.
REVIEWS_KEPT = 1000
# Number of unanswered requests that are kept.
REPLANS_KEPT = 100


@dataclass(slots=True)
class Instance:
    """One machine, from its order to its end."""

    launch: int
    # Slot whose stream it reads; None for a spare.
    slot: int | None
    pool: str
    # Name in the order.
    worker: str
    ordered_s: float
    # The provider's id, once it was seen.
    machine: str = ""
    # None if it was not seen running yet, or never ran.
    started_s: float | None = None
    ended_s: float | None = None
    cause: EndedBecause | None = None
    detail: str = ""
    # Type and zone that the provider reports; empty if it has none.
    type: str = ""
    zone: str = ""
    # Offer in the order. Optional. If unset, any machine of the pool.
    asked: Offer = field(default_factory=lambda: Offer(""))
    # Time of its slot's assignment; None if it has no slot, or got it with its order.
    slot_assigned_s: float | None = None
    # Time at which its worker was found to be gone.
    left_s: float | None = None
    # True if no heartbeat of its worker came in time.
    never_reported: bool = False
    # Current name of its worker; until it gets a slot, the one of the order.
    member: str = ""

    def __post_init__(self) -> None:
        self.asked = self.asked if self.asked.pool else Offer(self.pool)
        self.member = self.member or self.worker

    @property
    def counted(self) -> bool:
        """True if it was ordered without a slot."""
        return self.slot is None or self.slot_assigned_s is not None

    @property
    def left(self) -> bool:
        """True if its worker has left it, so that it is useless."""
        return self.left_s is not None

    @property
    def has_slot(self) -> bool:
        """True if it now has a slot's stream."""
        return self.open and self.slot is not None and not self.left

    @property
    def open(self) -> bool:
        """True if it runs or may still start."""
        return self.ended_s is None

    @property
    def offer(self) -> Offer:
        """The offer that has its price."""
        return Offer(self.pool, self.type, self.zone)

    @property
    def running(self) -> bool:
        """True if it was seen running and not seen to end."""
        return self.started_s is not None and self.ended_s is None


class FleetLedger:
    """The fold: feed it every record of the plans topic, in order.

    - `ProvisionerLead` counts if it names the one in force or the Settled that ended it; its offset
      is the new term.
    - Any other record of a provisioner counts if it is of the term in force, and before that term's
      `Settled`.
    - Plans and launches are numbered: the next number counts, once. A machine starts once, ends
      once, and does not start after its end.
    - A slot is assigned to a machine that runs and has no slot, if the slot has no other open
      machine whose worker has not left: the slot's previous worker will not return.
    - `ReplanAsked` may come from any process, and always counts.

    Attributes:
        term: Offset of the Lead in force, -1 for none.
        head: Offset that the next Lead must name.
        position: Offset of the next record to feed.
        plans: Last plans, newest last.
        planned: Number of plans, by feasibility.
        machines: Every machine that was ever ordered, by launch.
        ended: Number of machines that ended or never came, by cause.
        prices: Last price by pool, USD per hour.
        offers: Last price by type and zone, USD per hour.
        reviews: Reviews since the job began, at most `REVIEWS_KEPT` at equal steps.
        review: Last review.
        replans: Requests that no plan has answered yet, by offset.
        gone_bids: Machines that were ordered under a bid since the last plan and have ended.
        vacated_s: Time at which each slot's last machine ended, or its worker left.
        settled: The `Settled` record that ended the term; None if the term has not ended.
        never_reported: Number of machines whose workers never sent a heartbeat, by pool.

    Args:
        billing: Billing of each pool, from the market file.
    """

    def __init__(self, billing: Mapping[str, Billing] | None = None) -> None:
        self.term = self.head = -1
        self.position = 0
        self.plans = deque[Planned](maxlen=PLANS_KEPT)
        self.planned = Counter[bool]()
        self.machines: dict[int, Instance] = {}
        self.ended = Counter["EndedBecause"]()
        self.prices: dict[str, float] = {}
        self.offers: dict[Offer, float] = {}
        self.reviews = Thinned[Reviewed](REVIEWS_KEPT)
        self.review: Reviewed | None = None
        self.replans: dict[int, ReplanAsked] = {}
        self.gone_bids = Counter[Offer]()
        self.vacated_s: dict[int, float] = {}
        self.settled: Settled | None = None
        self.never_reported = Counter[str]()
        self._open: dict[int, Instance] = {}
        self._planned_at = 0  # launches before the last plan
        self._billing = dict(billing or {})
        self._bill = Bill(self._billing)

    @property
    def plan(self) -> Planned | None:
        """The plan in force."""
        return self.plans[-1] if self.plans else None

    @property
    def launches(self) -> int:
        """Number of orders, which is the last one's number."""
        return len(self.machines)

    @property
    def open(self) -> tuple[Instance, ...]:
        """Machines that run or may start, by launch."""
        return tuple(self._open.values())

    @property
    def running(self) -> tuple[Instance, ...]:
        """Machines that were seen running and not seen to end, by launch."""
        return tuple(instance for instance in self._open.values() if instance.running)

    @property
    def usd_per_hour(self) -> float:
        """The cost of all running machines."""
        return sum(
            self._bill.usd_per_hour(instance.offer, float("inf")) for instance in self.running
        )

    @property
    def paid_usd_per_hour(self) -> dict[str, float]:
        """A machine's price by pool: the mean of running ones, or the last known one."""
        paid = defaultdict[str, list[float]](list)
        for instance in self.running:
            if instance.type:
                paid[instance.pool].append(self._bill.usd_per_hour(instance.offer, float("inf")))
        return self.prices | {pool: fmean(prices) for pool, prices in paid.items()}

    def spent_usd(self, now_s: float) -> float:
        """Return the cost of all machines until now, or until an earlier time.

        A running machine costs its time so far; an ended one what its pool bills.
        """
        return self._bill.spent_usd(now_s)

    def hours(self, now_s: float) -> dict[Offer, Hour]:
        """Return the current hour of machines under a bid or paid by the hour, by offer.

        If an offer has several machines, it is the hour that ends first.
        """
        found = dict[Offer, Hour]()
        for instance in self.open:
            rule = self._billing.get(instance.pool, BY_THE_SECOND)
            if instance.left or (instance.asked.bid_usd_per_hour is None and rule.per != "hour"):
                continue
            since_s = now_s if instance.started_s is None else instance.started_s
            begun_s = since_s + max(now_s - since_s, 0.0) // rule.hour_s * rule.hour_s
            usd_per_hour = self._bill.usd_per_hour(instance.offer, begun_s)
            hour = Hour(begun_s + rule.hour_s, usd_per_hour)
            found[instance.asked] = min(found.get(instance.asked, hour), hour)
        return found

    def feed(self, offset: int, record: PlanRecord | None) -> bool:
        """Fold the record at `offset` (None if it cannot be parsed); return True if it counts.

        Raises:
            ValueError: If `offset` was fed before.
        """
        if offset < self.position:
            raise ValueError(f"plan record {offset} comes after {self.position - 1} was fed")
        self.position = offset + 1
        match record:
            case None:
                return False
            case ProvisionerLead():
                return self._lead(offset, record)
            case ReplanAsked():
                self.replans[offset] = record
                if len(self.replans) > REPLANS_KEPT:
                    del self.replans[min(self.replans)]
                return True
            case _ if record.term != self.term or self.settled is not None:
                return False
            case _:
                return self._decided(offset, record)

    def _lead(self, offset: int, lead: ProvisionerLead) -> bool:
        if lead.after != self.head:
            # It names another Lead than the one in force: another process was faster.
            return False
        self.term = self.head = offset
        self.settled = None
        return True

    def _decided(  # noqa: C901, PLR0911 -- one case per record
        self, offset: int, record: PlanRecord
    ) -> bool:
        match record:
            case LaunchRequested():
                return self._ordered(record)
            case Started():
                return self._started(record)
            case SlotAssigned():
                return self._assign_slot(record)
            case Left():
                return self._left(record)
            case Ended():
                return self._ended(record)
            case Planned():
                return self._planned(record)
            case Priced():
                self.prices |= record.usd_per_hour
                for pool, usd_per_hour in record.usd_per_hour.items():
                    self._bill.price(Offer(pool), record.at_s, usd_per_hour)
                for priced in record.offers:
                    offer = Offer(priced.pool, priced.type, priced.zone)
                    self.offers[offer] = priced.usd_per_hour
                    self._bill.price(offer, record.at_s, priced.usd_per_hour)
            case Reviewed():
                self.review = record
                self.reviews.add(record)
            case Settled():
                self.settled, self.head = record, offset
        return True

    def _planned(self, planned: Planned) -> bool:
        if planned.number != (self.plan.number if self.plan else 0) + 1:
            return False
        self.plans.append(planned)
        self.planned[planned.feasible] += 1
        self._planned_at = self.launches
        self.gone_bids.clear()
        for offset in [offset for offset in self.replans if offset <= planned.answers]:
            del self.replans[offset]
        return True

    def _ordered(self, ordered: LaunchRequested) -> bool:
        if ordered.launch != self.launches + 1:
            return False
        self.machines[ordered.launch] = self._open[ordered.launch] = Instance(
            launch=ordered.launch,
            slot=ordered.slot,
            pool=ordered.pool,
            worker=ordered.worker,
            ordered_s=ordered.at_s,
            asked=Offer(ordered.pool, ordered.machine_type, ordered.zone, ordered.bid_usd_per_hour),
        )
        return True

    def _started(self, started: Started) -> bool:
        instance = self._open.get(started.launch)
        if instance is None or instance.started_s is not None:
            return False
        instance.started_s, instance.machine = started.at_s, started.machine
        instance.type, instance.zone = started.machine_type, started.zone
        if started.usd_per_hour is not None:
            self._bill.price(instance.offer, started.at_s, started.usd_per_hour)
        self._bill.started(instance.launch, instance.offer, started.at_s)
        return True

    def _assign_slot(self, assigned: SlotAssigned) -> bool:
        instance = self._open.get(assigned.launch)
        if instance is None or not instance.running or instance.slot is not None:
            return False
        if any(other.slot == assigned.slot and other.has_slot for other in self._open.values()):
            return False
        instance.slot, instance.member = assigned.slot, assigned.worker
        instance.slot_assigned_s = assigned.at_s
        return True

    def _left(self, left: Left) -> bool:
        instance = self._open.get(left.launch)
        if instance is None or instance.left or not instance.running:
            return False
        if left.never_reported:
            instance.never_reported = True
            self.never_reported[instance.pool] += 1
        elif not instance.counted or not instance.has_slot:
            return False
        instance.left_s = left.at_s
        self._vacate(instance, left.at_s)
        return True

    def _vacate(self, instance: Instance, at_s: float) -> None:
        if instance.slot is not None:
            self.vacated_s[instance.slot] = at_s

    def _ended(self, ended: Ended) -> bool:
        instance = self._open.pop(ended.launch, None)
        if instance is None:
            return False
        instance.ended_s, instance.cause, instance.detail = ended.at_s, ended.cause, ended.detail
        self.ended[ended.cause] += 1
        if instance.asked.bid_usd_per_hour is not None and ended.launch > self._planned_at:
            self.gone_bids[instance.asked] += 1
        if not instance.left:
            self._vacate(instance, ended.at_s)
        self._bill.ended(ended.launch, ended.at_s, ended.cause)
        return True
