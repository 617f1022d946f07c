"""Orders and their machines: requests to the fleet, and what it reports.

An order that counts is always carried out, even a predecessor's that is not wanted any more. This
uses up its token: if the predecessor wakes up and sends its request again, it launches nothing. A
machine without an order, or with an ended one, is released.

    Ordered ──launch──▶ answered ──listed──▶ Started ──listed as ended, or missing──▶ Ended
                 └─────▶ refused ──────────────────────────────────────────────────▶ Ended
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.spot.machines import LaunchRequest, Machine, Refused
from common.spot.provisioning.records import Ended, Left, Started, client_token

if TYPE_CHECKING:
    from common.spot.provisioning.events import HeartbeatsSeen, MachinesSeen
    from common.spot.provisioning.fleet_ledger import FleetLedger, Instance
    from common.spot.provisioning.records import EndedBecause
    from common.spot.provisioning.settings import ProvisionerSettings

# Minimum number of polls without a machine before it counts as lost.
LOOKS = 3
# Time before a release without effect, or an unanswered launch, is repeated.
AGAIN_S = 10.0
# Time from the beginning of a term in which machines may end that the previous provisioner had
# released. A worker takes up to a minute to leave.
PREDECESSOR_S = 150.0


@dataclass(slots=True)
class _Missed:
    """A machine or worker whose state in the polls is unexpected."""

    since_s: float
    looks: int = 0


@dataclass(slots=True)
class FleetWatch:
    """Requests of a provisioner in charge to the fleet, and the responses.

    Attributes:
        looked: True if the fleet has listed its machines in this term.
        strangers: Running or stopped machines that should not exist, by id, in the last poll.
        since_s: Beginning of the term. A machine that was released shortly before or after may have
            been released by the previous provisioner.
    """

    settings: ProvisionerSettings
    ledger: FleetLedger
    looked: bool = False
    strangers: dict[str, Machine] = field(default_factory=dict)
    since_s: float = float("inf")
    # Time of the last request, by launch.
    _asked_s: dict[int, float] = field(default_factory=dict)
    _answered_s: dict[int, float] = field(default_factory=dict)
    _refused: dict[int, Refused] = field(default_factory=dict)
    _look: MachinesSeen | None = None
    _as_of_s: float = float("-inf")
    # Keyed by launch.
    _missed: dict[int, _Missed] = field(default_factory=dict)
    # Missing heartbeats by launch, for machines whose worker has sent heartbeats since its slot was
    # assigned; None if the last poll had its heartbeat.
    _silent: dict[int, _Missed | None] = field(default_factory=dict)
    _unknown: dict[str, _Missed] = field(default_factory=dict)  # keyed by the provider's id
    # Time of the last release, by the provider's id.
    _released_s: dict[str, float] = field(default_factory=dict)

    # --- input from the fleet ------------------------------------------------------------------

    def answered(self, launches: Iterable[int], refused: Iterable[Refused], now_s: float) -> None:
        """Add the response to a launch."""
        for launch in launches:
            self._answered_s.setdefault(launch, now_s)
        self._refused |= {order.launch: order for order in refused}

    def seen(self, look: MachinesSeen) -> None:
        """Add a list of machines, unless a newer one was added before."""
        if look.as_of_s > self._as_of_s:
            self._look, self._as_of_s, self.looked = look, look.as_of_s, True

    def workers_seen(self, seen: HeartbeatsSeen) -> None:
        """Add current heartbeats. If there are none, do nothing: Redis may have been emptied."""
        for instance in self.ledger.running if seen.members else ():
            if instance.slot_assigned_s is None or seen.as_of_s <= instance.slot_assigned_s:
                # Earlier heartbeats are those of the slot's previous worker.
                continue
            if instance.member in seen.members:
                self._silent[instance.launch] = None
            elif instance.launch in self._silent:
                missed = self._silent[instance.launch] or _Missed(seen.as_of_s)
                missed.looks += 1
                self._silent[instance.launch] = missed

    # --- records of changes --------------------------------------------------------------------

    def records(self, now_s: float) -> Iterator[Started | Ended]:
        """Return what has happened to machines since the last call.

        The caller must write these records down, and read them back before the next call.
        """
        term, look, self._look = self.ledger.term, self._look, None
        if look is not None:
            self._look_for_strangers(look, now_s)
        named = {} if look is None else {machine.launch: machine for machine in self._ours(look)}
        for instance in self.ledger.open:
            refused = self._refused.get(instance.launch)
            machine = named.get(instance.launch)
            if machine is not None:
                self._missed.pop(instance.launch, None)
                yield from self._named(instance, machine, now_s)
            elif refused is not None and instance.started_s is None:
                yield Ended(term, instance.launch, now_s, "refused", refused.reason)
            elif look is not None and (gone := self._not_named(instance, look, now_s)) is not None:
                yield gone

    def left(self, now_s: float) -> Iterator[Left]:
        """Return the machines whose workers have left their slots."""
        for instance in self.ledger.running:
            missed = self._silent.get(instance.launch)
            if missed is None or not instance.has_slot or missed.looks < LOOKS:
                continue
            if now_s - missed.since_s >= self.settings.grace_s:
                yield Left(self.ledger.term, now_s, instance.launch)

    def _ours(self, look: MachinesSeen) -> Iterator[Machine]:
        """Return machines of open orders; of two for one order, the one whose start is recorded."""
        for machine in look.machines:
            instance = self.ledger.machines.get(machine.launch)
            if instance is not None and instance.open and instance.machine in ("", machine.id):
                yield machine

    def _named(
        self, instance: Instance, machine: Machine, now_s: float
    ) -> Iterator[Started | Ended]:
        term = self.ledger.term
        if instance.started_s is None:
            at_s, given = max(machine.started_s, 0.0), (machine.type, machine.zone)
            yield Started(term, instance.launch, at_s, machine.id, *given, machine.usd_per_hour)
        if machine.state != "running":
            at_s = now_s if machine.ended_s is None else machine.ended_s
            cause: EndedBecause
            cause, detail = machine.cause or "lost", machine.detail
            if instance.never_reported and cause == "released":
                cause, detail = "failed", "released, because its worker never reported"
            elif cause == "released" and not self._is_ours(machine, now_s):
                cause, detail = "lost", f"not released by the provisioner: {detail}"
            yield Ended(term, instance.launch, at_s, cause, detail)

    def _is_ours(self, machine: Machine, now_s: float) -> bool:
        """Return True if this provisioner, or perhaps its predecessor, released the machine."""
        recent = machine.started_s < self.since_s and now_s < self.since_s + PREDECESSOR_S
        return recent or machine.id in self._released_s

    def _not_named(self, instance: Instance, look: MachinesSeen, now_s: float) -> Ended | None:
        term, launch, settings = self.ledger.term, instance.launch, self.settings
        if instance.started_s is None:
            answered_s = self._answered_s.get(launch)
            if answered_s is None or look.as_of_s < answered_s:
                # It may not be listed yet.
                return None
        missed = self._missed.setdefault(launch, _Missed(look.as_of_s))
        missed.looks += 1
        patience_s = settings.unseen_s if instance.started_s is None else settings.grace_s
        if missed.looks < LOOKS or look.as_of_s - missed.since_s < patience_s:
            return None
        if instance.started_s is None:
            return Ended(term, launch, now_s, "lost", "it was requested and never appeared")
        if instance.machine in self._released_s:
            return Ended(term, launch, missed.since_s, "released", "no longer listed")
        return Ended(term, launch, missed.since_s, "lost", "the provider no longer lists it")

    # --- requests to the fleet -----------------------------------------------------------------

    def orders(self, now_s: float) -> tuple[LaunchRequest, ...]:
        """Return the orders to request now: new ones, and those without a response."""
        due = [
            instance
            for instance in self.ledger.open
            if instance.started_s is None
            and instance.launch not in self._answered_s
            and now_s >= self._asked_s.get(instance.launch, float("-inf")) + AGAIN_S
        ]
        self._asked_s |= {instance.launch: now_s for instance in due}
        return tuple(
            LaunchRequest(
                instance.launch,
                client_token(self.settings.job, instance.launch),
                instance.slot,
                instance.pool,
                instance.worker,
                *instance.asked[1:],
            )
            for instance in due
        )

    def releases(self, instances: Iterable[Instance], now_s: float) -> tuple[str, ...]:
        """Return the ids of machines to release now: running ones of `instances`, and strangers.

        An order that has no machine yet is handled once it has one.
        """
        ids = [machine.machine for machine in instances if machine.running]
        due = [
            machine
            for machine in (*ids, *self.strangers)
            if now_s >= self._released_s.get(machine, float("-inf")) + AGAIN_S
        ]
        self._released_s |= dict.fromkeys(due, now_s)
        return tuple(due)

    def _look_for_strangers(self, look: MachinesSeen, now_s: float) -> None:
        """Find machines that run without a valid order, or were stopped by somebody.

        A machine with an unknown number may be that of a successor whose record this process has
        yet to read. It is tolerated for the time that such a read takes.
        """
        unknown = dict[str, _Missed]()
        self.strangers = {}
        for machine in look.machines:
            if machine.state == "ended":
                continue
            instance = self.ledger.machines.get(machine.launch)
            if instance is None:
                missed = self._unknown.get(machine.id, _Missed(now_s))
                missed.looks += 1
                unknown[machine.id] = missed
                if missed.looks >= LOOKS and now_s - missed.since_s >= self.settings.grace_s:
                    self.strangers[machine.id] = machine
            elif not instance.open or instance.machine not in ("", machine.id):
                self.strangers[machine.id] = machine
        self._unknown = unknown
