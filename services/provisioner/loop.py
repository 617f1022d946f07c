"""One job's actor: receives events and carries out the decisions of `common.spot.provisioning`.

plans, updates, claims (Kafka) ─▶ ┌─────────────┐ ─▶ plans topic
machines, prices (provider)    ─▶ │ Provisioner │ ─▶ provider: launch, release, poll
what is wanted (jobs topic)    ─▶ └─────────────┘ ─▶ lease (Redis)
"""

from __future__ import annotations

from contextlib import suppress
from queue import SimpleQueue
from time import monotonic, time
from typing import TYPE_CHECKING, NamedTuple

from common.core.events import LeaseAnswered, Tick
from common.errors import BrokenWriterError, NotFoundError, UnavailableError, UserError
from common.kafka.names import plans_topic, provisioning_board
from common.spot.plans import encode_plan
from common.spot.provisioning import commands as do
from common.spot.provisioning import events
from common.spot.provisioning.provisioner import Provisioner
from common.spot.provisioning.records import (
    Ended,
    LaunchRequested,
    Left,
    Planned,
    Settled,
    SlotAssigned,
    Started,
)
from common.telemetry.metrics.provisioner import ProvisionerMetrics
from common.telemetry.outages import Outage
from services.provisioner.provider_thread import ProviderThread
from services.provisioner.settings import provisioner_settings
from services.provisioner.topics import JobTopics

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from common.jobs.store import JobRecord
    from common.kafka.port import Log
    from common.redis.port import Board
    from common.runtime.supervisor import PreviousFault
    from common.spot.machines import Fleet, Prices
    from common.spot.market.market_file import Market
    from common.spot.provisioning.commands import ProvisionerCommand
    from common.spot.provisioning.events import ProvisionerEvent
    from common.spot.provisioning.records import PlanRecord
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics

    Openers: TypeAlias = tuple[Callable[[], Fleet], Callable[[], Prices]]

# Longest time between turns, which poll the plans and the streams, and report.
LONGEST_WAIT_S = 0.5
# Time between attempts while Kafka is unavailable.
AWAY_S = 0.5
FLUSH_S = 5.0
# Minimum time between reports, which count all running machines. Scrapes of them are usually 5 s or
# more apart.
REPORT_S = 1.0
# Log event of a record, and its fields.
_LOGGED: dict[type, tuple[str, tuple[str, ...]]] = {
    Planned: ("planned", ("spot", "on_demand", "why", "reason")),
    LaunchRequested: ("machine_ordered", ("launch", "slot", "pool", "worker")),
    Started: ("machine_started", ("launch", "machine")),
    SlotAssigned: ("slot_assigned", ("slot", "launch", "worker")),
    Left: ("worker_left_machine", ("launch",)),
    Ended: ("machine_ended", ("launch", "cause", "detail")),
    Settled: ("settled", ("spent_usd", "why")),
}


class ProvisionerProcess(NamedTuple):
    """Parts that all jobs of a process share."""

    # Unique among all processes ever.
    name: str
    # The machines that can be rented.
    market: Market
    log: Log
    # Opens a board by name; used only for leases and heartbeats.
    board: Callable[[str], Board]
    # Returns the openers of a job's fleet and of the prices.
    openers: Callable[[Market, str], Openers]
    metrics: ProcessMetrics
    logger: EventLogger


class JobProvisioner:
    """One replica's part in the provisioning of one job: an actor of a supervisor.

    Args:
        wanted: Returns the job as its owner wants it now; None if it was deleted.
        wake: Schedules a turn of the actor soon.
        fault: The fault that ended the previous actor, already reported.

    Raises:
        UserError: If the job cannot be provisioned.
    """

    def __init__(
        self,
        replica: ProvisionerProcess,
        wanted: Callable[[], JobRecord | None],
        wake: Callable[[], None],
        fault: PreviousFault | None = None,
    ) -> None:
        del fault
        record = wanted()
        if record is None:
            raise NotFoundError("the job was deleted")
        self._look = wanted
        self._market = market = replica.market
        self._record: JobRecord | None = record
        self._settings = settings = provisioner_settings(record, market)
        self._first = record.first
        self._wanted = record.wanted
        self._name = replica.name
        self._job, self._called = record.id, record.spec.name
        self._source = replica.log
        self._board = replica.board(provisioning_board(self._job))
        self._workers = replica.board(self._job)
        self._log = replica.logger.bind(job=self._called)
        self._metrics = ProvisionerMetrics()
        self._exposed = replica.metrics
        self._wake = wake
        self._reported_at = float("-inf")
        self._inbox = SimpleQueue[events.ProvisionerEvent]()
        self._inbox.put(events.ProvisioningWanted(record.wanted, record.reason))
        self._fault: BaseException | None = None
        self._machine = Provisioner(replica.name, settings)
        self._topics: JobTopics | None = None
        self._kafka_outage = Outage(self._log, "kafka")
        self._board_outage = Outage(self._log, "redis")
        self._writer = replica.log.writer(on_ready=wake)
        openers = replica.openers(market, self._job)
        self._provider = ProviderThread(*openers, self._receive, logger=self._log, fail=self._fail)
        self._exposed.follow(self._called, self._metrics)

    def turn(self) -> float | None:
        """Process new events and make due decisions.

        Returns:
            The time of the next turn on the monotonic clock; None if the job is over.

        Raises:
            BaseException: The error that ended the provider's thread, or a record's delivery.
        """
        if self._fault is not None:
            raise self._fault
        self._follow()
        try:
            self._decide()
            self._kafka_outage.quiet()
        except UnavailableError as error:
            self._kafka_outage.met(error)
            return monotonic() + AWAY_S
        if self._machine.finished:
            return None
        if self._topics is not None and not self._topics.drained:
            return monotonic()
        return monotonic() + max(0.0, min(self._machine.due() - time(), LONGEST_WAIT_S))

    def close(self) -> None:
        """Close all connections. The machines stay for the next replica."""
        self._exposed.forget(self._metrics)
        self._provider.close()
        self._release_lease()
        self._board.close()
        self._workers.close()
        if self._topics is not None:
            self._topics.close()
        try:
            # `turn` has raised this error, which is the reason for the close.
            with suppress(BrokenWriterError):
                self._writer.flush(FLUSH_S)
        finally:
            self._writer.close()

    def _follow(self) -> None:
        """Apply what the job's owner wants, if it has changed."""
        record = self._look()
        if record is self._record:
            return
        self._record = record
        if record is not None:
            try:
                settings = provisioner_settings(record, self._market)
            # The job keeps its previous settings.
            except UserError as error:
                self._log.error("job_not_provisioned", reason=str(error))
            else:
                if settings != self._settings:
                    self._settings = settings
                    self._inbox.put(events.ProvisioningChanged(settings))
        wanted = "stopped" if record is None else record.wanted
        if wanted != self._wanted:
            self._wanted = wanted
            reason = "the job was deleted" if record is None else record.reason
            self._inbox.put(events.ProvisioningWanted(wanted, reason))

    def _decide(self) -> None:
        if self._topics is None:
            look_s = self._settings.look_s
            self._topics = JobTopics(self._source, self._job, self._first, look_s, self._wake)
        for event in self._topics.read():
            self._feed(event)
        # Only this thread takes from the queue.
        while not self._inbox.empty():
            self._feed(self._inbox.get())
        if time() >= self._machine.due():
            self._feed(Tick())
        self._writer.poll()
        self._report()

    def _report(self) -> None:
        due = monotonic() >= self._reported_at + REPORT_S
        # A replica that steps down stops reporting at once.
        if due or not self._machine.is_leader:
            self._reported_at = monotonic()
            self._metrics.report = self._machine.report(time())

    def _receive(self, event: ProvisionerEvent) -> None:
        self._inbox.put(event)
        self._wake()

    def _feed(self, event: ProvisionerEvent) -> None:
        for command in self._machine.on(event, time()):
            self._do(command)

    def _do(self, command: ProvisionerCommand) -> None:
        match command:
            case do.AppendPlan(record):
                self._log_record(record)
                self._writer.append(plans_topic(self._job), encode_plan(record))
            case do.PollMachines():
                self._provider.send(command)
                self._look_for_workers()
            case do.Launch() | do.Release() | do.PollPrices() | do.PollPastPrices():
                self._provider.send(command)
            case do.AskProvisioningLease():
                self._ask_lease()
            case do.ReleaseProvisioningLease():
                self._release_lease()
            case do.BecameLeader(term):
                self._log.info("provisions", term=term)
            case do.StopProvisioning(reason):
                self._log.warning("leadership_lost", reason=reason)
            case do.FinishProvisioning(reason):
                self._log.info("provisioning_finished", reason=reason)

    def _log_record(self, record: PlanRecord) -> None:
        """Log changes. Reviews and prices are only in the topic."""
        if isinstance(record, Left) and record.never_reported:
            self._log.warning("worker_never_reported", launch=record.launch)
            return
        event, names = _LOGGED.get(type(record), ("", ()))
        log = self._log.bind(plan=record.number) if isinstance(record, Planned) else self._log
        if event:
            log.info(event, **{name: getattr(record, name) for name in names})
        if isinstance(record, Planned) and record.warning:
            log.warning("plan_warns", warning=record.warning)

    def _ask_lease(self) -> None:
        try:
            held = self._board.hold_lease(self._name, self._settings.lease_ttl_s)
            self._board_outage.over()
        except UnavailableError as error:
            self._board_outage.met(error)
            # The provisioner stays in charge: the lease only limits which processes try to be.
            return
        self._inbox.put(LeaseAnswered(held))

    def _look_for_workers(self) -> None:
        as_of_s = time()
        # `_ask_lease` logs the outage.
        with suppress(UnavailableError):
            members = frozenset[str](self._workers.heartbeats())
            self._inbox.put(events.HeartbeatsSeen(members, as_of_s))

    def _release_lease(self) -> None:
        try:
            self._board.release_lease(self._name)
        except UnavailableError as error:
            self._board_outage.met(error)

    def _fail(self, fault: BaseException) -> None:
        self._fault = fault
        self._wake()
