"""Who provisions, what stands and what runs: a pure fold over the plans topic.

Several processes may have believed that they provision; their records interleave in the topic. This
fold, and nothing else, says whose term it is, which orders count and what the machines have cost.
The provisioner decides on it, the admin service tells of it; `records` shows an example.
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

PLANS_KEPT = 100  # a page of history; the topic has them all
REVIEWS_KEPT = 1000  # points of a curve over time, more than a screen has
REPLANS_KEPT = 100  # that nobody has answered yet


@dataclass(slots=True)
class Instance:
    """One machine, from its order to its end."""

    launch: int
    slot: int | None  # whose stream is its; None: of none yet, it is a spare
    pool: str
    worker: str  # as it was ordered
    ordered_s: float
    machine: str = ""  # the provider's id, once it was seen
    started_s: float | None = None  # None: not seen running yet, or it never ran
    ended_s: float | None = None
    cause: EndedBecause | None = None
    detail: str = ""
    type: str = ""  # what was given, where a pool has several
    zone: str = ""
    asked: Offer = field(default_factory=lambda: Offer(""))  # by default: any of the pool
    # When it was given its slot; None: it has none, or its order's.
    slot_assigned_s: float | None = None
    left_s: float | None = None  # when its worker was found to be gone; None: it was not
    member: str = ""  # the name under which its worker works; until it is seated, as ordered

    def __post_init__(self) -> None:
        self.asked = self.asked if self.asked.pool else Offer(self.pool)
        self.member = self.member or self.worker

    @property
    def counted(self) -> bool:
        """Whether it was ordered for no slot of its own."""
        return self.slot is None or self.slot_assigned_s is not None

    @property
    def left(self) -> bool:
        """Whether its worker has left it, so that it is of no use any more."""
        return self.left_s is not None

    @property
    def has_slot(self) -> bool:
        """Whether a slot's stream is its, now."""
        return self.open and self.slot is not None and not self.left

    @property
    def open(self) -> bool:
        """Whether it runs, or may still come to run."""
        return self.ended_s is None

    @property
    def offer(self) -> Offer:
        """What its price is that of."""
        return Offer(self.pool, self.type, self.zone)

    @property
    def running(self) -> bool:
        """Whether it was seen running and not seen to end."""
        return self.started_s is not None and self.ended_s is None


class FleetLedger:
    """The fold: feed it every record of the plans topic, in order.

    - `ProvisionerLead` counts if it names the one in force or the Settled that ended it; its offset
      is the new term.
    - Whatever else a provisioner writes counts if it is of the term in force, and before that
      term's `Settled`.
    - Plans and launches are numbered: the next number counts, once. A machine starts once, ends
      once, and does not start after its end.
    - A slot is seated on a machine that runs and has no slot, if no other machine of the slot is
      open whose worker has not left: whoever had it before will not come back.
    - `ReplanAsked` is anybody's and counts always.

    Attributes:
        term: Offset of the Lead in force, -1 for none.
        head: What the next Lead has to name.
        position: Offset of the next record to feed.
        plans: The last ones, newest last.
        planned: How many plans there were, by whether they were feasible.
        machines: Every machine that was ever ordered, by launch.
        ended: How many of them are gone, or never came, by cause.
        prices: USD per hour by pool, as told last.
        offers: Likewise of types and zones.
        reviews: Over all time.
        review: The last one.
        replans: By offset, those that no plan has answered yet.
        gone_bids: Machines that were ordered under a bid since the last plan, and are no more.
        vacated_s: By slot, when the machine ended that it had last, or the worker left it.
        settled: The last word, until there is a new leader.

    Args:
        billing: What machines are paid for, by pool, as the market file says.
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
        """How many machines were ordered, which is the last one's number."""
        return len(self.machines)

    @property
    def open(self) -> tuple[Instance, ...]:
        """Machines that run or may come to run, by launch."""
        return tuple(self._open.values())

    @property
    def running(self) -> tuple[Instance, ...]:
        """Machines that were seen running and not seen to end, by launch."""
        return tuple(instance for instance in self._open.values() if instance.running)

    @property
    def usd_per_hour(self) -> float:
        """What the machines cost that run now."""
        return sum(
            self._bill.usd_per_hour(instance.offer, float("inf")) for instance in self.running
        )

    @property
    def paid_usd_per_hour(self) -> dict[str, float]:
        """What a machine of each pool costs: on average of those that run, or as told last."""
        paid = defaultdict[str, list[float]](list)
        for instance in self.running:
            if instance.type:
                paid[instance.pool].append(self._bill.usd_per_hour(instance.offer, float("inf")))
        return self.prices | {pool: fmean(prices) for pool, prices in paid.items()}

    def spent_usd(self, now_s: float) -> float:
        """What all machines have cost until now, or until a time in the past.

        Each one that runs as far as it ran; one that has ended as its pool bills it.
        """
        return self._bill.spent_usd(now_s)

    def hours(self, now_s: float) -> dict[Offer, Hour]:
        """Say of machines under a bid, and of those paid by the hour, which hour ends first."""
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
        """Fold the record at `offset` (None: does not parse); True where it counts.

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
            return False  # it names another one than that in force: somebody was faster
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
        if instance is None or not instance.counted or not instance.has_slot:
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
