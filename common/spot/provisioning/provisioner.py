"""The provisioner of one job, which is put in charge by compare-and-set in the plans topic.

    standby ──lease, topic read──▶ candidate ──own Lead read back──▶ in charge ──▶ settled: over
       ▲                               │ another was faster               │ a later Lead counts,
       └───────────────────────────────┴──────────────────────────────────┘ or the lease is lost

The lease in Redis only limits who may try. A standby follows all topics, so that a takeover begins
with full knowledge. Decisions of a provisioner in charge are in `term`. The shell carries out
commands in order and reports back by events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.core.events import LeaseAnswered, Tick
from common.spot.provisioning import commands as do
from common.spot.provisioning import events
from common.spot.provisioning.estimators import Estimator
from common.spot.provisioning.fleet_diff import Backoff
from common.spot.provisioning.fleet_ledger import FleetLedger
from common.spot.provisioning.records import PlanRecord, ProvisionerLead
from common.spot.provisioning.report import FleetReport, report_of
from common.spot.provisioning.term import Known, Term

if TYPE_CHECKING:
    from common.core.messages import Wanted
    from common.spot.provisioning.commands import ProvisionerCommand
    from common.spot.provisioning.events import ProvisionerEvent
    from common.spot.provisioning.settings import ProvisionerSettings

# Time after which a Lead that was not read back is lost, and the provisioner tries again.
CANDIDACY_S = 15.0
# Number of lease renewals within its lifetime, so that two may fail.
RENEWALS = 3


@dataclass(slots=True)
class _Candidacy:
    """A Lead record that was written and not read back yet."""

    candidacy_id: str
    since_s: float


class Provisioner:
    """One replica's state for one job: `on` handles events, `due` is the time of the next `Tick`.

    All times are in seconds since 1970.

    Attributes:
        ledger: State of the plans topic, as far as it was read.
        finished: True if the job's provisioning is over.

    Args:
        name: Name of this process, unique among all processes ever; identifies own Lead records.
        wanted: Wanted state of the job, as far as it is known.
        reason: Reason of `wanted`.
    """

    def __init__(
        self,
        name: str,
        settings: ProvisionerSettings,
        wanted: Wanted = "running",
        reason: str = "",
    ) -> None:
        self._name = name
        self.ledger = FleetLedger(settings.billing)
        estimator = Estimator(settings)
        self._known = Known(settings, self.ledger, estimator, Backoff(), wanted, reason)
        self._most = settings.workers
        self._caught_up = False
        self._candidacies = 0
        self._candidacy: _Candidacy | None = None
        self._term: Term | None = None
        self._lease_at_s = float("-inf")
        self.finished = False

    @property
    def is_leader(self) -> bool:
        """True if this replica decides."""
        return self._term is not None

    def report(self, now_s: float) -> FleetReport | None:
        """Return the state of the job's machines; None if another replica is in charge."""
        if self._term is None:
            return None
        known = self._known
        made = known.estimator.version, known.estimator.samples
        return report_of(self.ledger, known.settings, *made, now_s)

    def on(self, event: ProvisionerEvent, now_s: float) -> tuple[ProvisionerCommand, ...]:
        """Handle an event; return the commands, in order."""
        if self.finished:
            return ()
        commands = list(self._on(event, now_s))
        if not self.finished and self._term is not None:
            commands += self._term.advance(now_s)
            if self._term.failed:
                commands += self._step_down(self._term.failed)
        if not self.finished:
            commands += self._over()
        return tuple(commands)

    def due(self) -> float:
        """Return the latest time of the next `Tick`."""
        if self.finished:
            return float("inf")
        times = [self._lease_at_s + self._known.settings.lease_ttl_s / RENEWALS]
        if self._term is not None:
            times.append(self._term.due())
        return min(times)

    def _on(  # noqa: C901 -- one case per event, each a line or two
        self, event: ProvisionerEvent, now_s: float
    ) -> Iterator[ProvisionerCommand]:
        known = self._known
        match event:
            case Tick():
                yield from self._tick(now_s)
            case LeaseAnswered(held):
                yield from self._lease_answered(now_s, held=held)
            case events.PlansRead(records, caught_up):
                for offset, record in records:
                    yield from self._plan_read(offset, record, now_s)
                self._caught_up |= caught_up
            case events.UpdateRecordsRead(records):
                known.estimator.updates(records, now_s)
                self._balance(now_s)
            case events.ClaimsRead(claims):
                known.estimator.claims(claims, now_s)
            case events.RecordsCounted(records):
                known.estimator.streams(records)
            case events.ProvisioningWanted(wanted, reason):
                known.wanted, known.reason = wanted, reason
            case events.ProvisioningChanged(settings):
                size = self._size(settings)
                known.settings = known.estimator.settings = settings
                self._resize(size)
                event = events.ProvisioningChanged(known.settings)
            case _:
                # Responses to requests of the replica in charge.
                pass
        if self._term is not None:
            self._term.on(event, now_s)
        if known.wanted != "running":
            known.estimator.unwanted(now_s)

    def _size(self, settings: ProvisionerSettings) -> int:
        """Return the number of workers to decide for: as before, unless the owner changes it."""
        asked, self._most = self._most, settings.workers
        kept = settings.balanced and settings.workers == asked
        return self._known.settings.workers if kept else settings.workers

    def _balance(self, now_s: float) -> None:
        """Use the number of workers that are worth their cost, if the owner wants that."""
        known, term = self._known, self._term
        if known.settings.balanced and term is not None:
            self._resize(known.estimator.workers_wanted(self._most, now_s))
            term.on(events.ProvisioningChanged(known.settings), now_s)

    def _resize(self, workers: int) -> None:
        """Use this number of workers from now on, as if the job's owner wanted no more."""
        known = self._known
        known.settings = known.estimator.settings = replace(known.settings, workers=workers)

    def _tick(self, now_s: float) -> Iterator[ProvisionerCommand]:
        if self._candidacy is not None and now_s - self._candidacy.since_s > CANDIDACY_S:
            yield from self._step_down("its candidacy was not confirmed in time")
        if now_s >= self._lease_at_s + self._known.settings.lease_ttl_s / RENEWALS:
            self._lease_at_s = now_s
            yield do.AskProvisioningLease()

    def _lease_answered(self, now_s: float, *, held: bool) -> Iterator[ProvisionerCommand]:
        if not held:
            if self._term is not None or self._candidacy is not None:
                yield from self._step_down("the lease is held by another")
        elif self._term is None and self._candidacy is None and self._caught_up:
            self._candidacies += 1
            self._candidacy = _Candidacy(f"{self._name}#{self._candidacies}", now_s)
            yield do.AppendPlan(
                ProvisionerLead(self.ledger.head, self._candidacy.candidacy_id, now_s)
            )

    def _plan_read(
        self, offset: int, record: PlanRecord | None, now_s: float
    ) -> Iterator[ProvisionerCommand]:
        if offset < self.ledger.position:
            return
        counts = self._known.plans_read(offset, record)
        if isinstance(record, ProvisionerLead):
            yield from self._lead_read(offset, record, now_s, counts=counts)
        elif self._term is not None:
            self._term.read(record, now_s, counts=counts)

    def _lead_read(
        self, offset: int, lead: ProvisionerLead, now_s: float, *, counts: bool
    ) -> Iterator[ProvisionerCommand]:
        candidacy = self._candidacy
        own = candidacy is not None and lead.candidate == candidacy.candidacy_id
        if self._term is not None and counts:
            yield from self._step_down(f"{lead.candidate} provisions from offset {offset}")
        elif own and counts:
            self._candidacy = None
            plan = self.ledger.plan
            if self._known.settings.balanced and plan is not None and not plan.counted:
                self._resize(min(len(plan.places), self._most))
            self._term = Term(self._known, now_s)
            yield do.BecameLeader(offset)
        elif own:
            yield from self._step_down("another candidate was first")

    def _step_down(self, reason: str) -> Iterator[ProvisionerCommand]:
        self._term = self._candidacy = None
        yield do.StopProvisioning(reason)

    def _over(self) -> Iterator[ProvisionerCommand]:
        """Finish if the log's last word is that all machines are released, in any term."""
        settled = self.ledger.settled
        if settled is None or not self._caught_up or self._candidacy is not None:
            # An own Lead under way would open a term that nobody ends.
            return
        if self._known.wanted == "stopped":
            self._term = None
            self.finished = True
            yield do.ReleaseProvisioningLease()
            yield do.FinishProvisioning(settled.why)
