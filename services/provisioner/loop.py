"""One job's deciding thread: events in, decisions out; `common.provisioning` decides.

plans, updates, claims (Kafka) ─▶ ┌────────────┐ ─▶ plans topic
machines, prices (desk)        ─▶ │ Provisioner │ ─▶ desk: launch, release, look
what is wanted (jobs topic)    ─▶ └────────────┘ ─▶ lease (Redis)
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from time import monotonic, time
from typing import TYPE_CHECKING

from common.errors import UnavailableError
from common.provisioning import commands as do
from common.provisioning import events
from common.provisioning.codec import encode_plan
from common.provisioning.provisioner import Provisioner
from common.provisioning.records import Ended, Ordered, Planned, Settled, Started
from common.telemetry import Outage
from common.topics import plans_topic
from services.provisioner.desk import Desk
from services.provisioner.topics import JobTopics

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from common.core.messages import Positions
    from common.metrics.provisioner import ProvisionerMetrics
    from common.metrics.serving import Pulses
    from common.ports import Board, Log
    from common.provisioning.commands import ProvisionerCommand
    from common.provisioning.events import ProvisionerEvent
    from common.provisioning.records import PlanRecord
    from common.provisioning.settings import ProvisionerSettings
    from common.renting import Fleet, Prices
    from common.telemetry import EventLogger

    Openers: TypeAlias = tuple[Callable[[], Fleet], Callable[[], Prices]]

LONGEST_WAIT_S = 0.1  # how late what the desk says is heard
AWAY_S = 0.5  # between attempts while Kafka is away
FLUSH_S = 5.0
# Between reports for scrapes, which come every 5 s or more; one counts all machines that run.
REPORT_S = 1.0


class JobProvisioner:
    """One replica's part in the provisioning of one job.

    Args:
        name: Of this replica, unique among all that ever live.
        settings: Of the job's provisioning.
        first: Where the job begins in each partition of its streams.
        log: Kafka.
        board: For the lease of the job's provisioning alone; closed at the end of `run`.
        openers: Of the fleet and of the prices.
        metrics: Of the process.
        pulses: Likewise; that of the job is among them during `run`.
        logger: Bound to the replica.
    """

    def __init__(  # noqa: PLR0913 -- what a provisioner is made of
        self,
        name: str,
        settings: ProvisionerSettings,
        first: Positions,
        *,
        log: Log,
        board: Board,
        openers: Openers,
        metrics: ProvisionerMetrics,
        pulses: Pulses,
        logger: EventLogger,
    ) -> None:
        self._name = name
        self._job = settings.job
        self._settings = settings
        self._first = first
        self._source = log
        self._board = board
        self._log = logger.bind(job=settings.job)
        self._openers = openers
        self._metrics = metrics
        self._pulses = pulses
        self._reported_at = float("-inf")
        self._heard = SimpleQueue[events.ProvisionerEvent]()
        self._stopping = threading.Event()
        self._fault: BaseException | None = None
        self._machine = Provisioner(name, settings)
        self._writer = log.writer()
        self._kafka_outage = Outage(self._log, "kafka")
        self._board_outage = Outage(self._log, "board")

    @property
    def finished(self) -> bool:
        """Whether the job is over and its machines are given back."""
        return self._machine.finished

    def hear(self, event: events.WantedChanged | events.SettingsChanged) -> None:
        """Tell what the job's owner wants; from any thread."""
        self._heard.put(event)

    def stop(self) -> None:
        """End `run` soon; from any thread. The machines stay, another replica goes on."""
        self._stopping.set()

    def run(self) -> None:
        """Decide until stopped or finished.

        Raises:
            BaseException: Whatever ended the desk, or a record's delivery.
        """
        self._metrics.tell(self._job, None)
        pulse = self._pulses.begin(f"the thread of job {self._job}")
        desk = Desk(*self._openers, self._heard.put, logger=self._log, fail=self._fail)
        topics: JobTopics | None = None
        try:
            while not (self._stopping.is_set() or self._machine.finished or self._fault):
                pulse.beat()
                try:
                    if topics is None:
                        topics = JobTopics(
                            self._source, self._job, self._first, self._settings.look_s
                        )
                    self._turn(topics, desk)
                    self._kafka_outage.quiet()
                except UnavailableError as error:
                    self._kafka_outage.met(error)
                    self._stopping.wait(AWAY_S)
        finally:
            self._pulses.end(pulse)
            self._metrics.forget(self._job)
            self._writer.flush(FLUSH_S)
            desk.close()
            self._release_lease()
            self._board.close()
            if topics is not None:
                topics.close()
            self._writer.close()
        if self._fault is not None:
            raise self._fault

    def _turn(self, topics: JobTopics, desk: Desk) -> None:
        wait_s = max(0.0, min(self._machine.due() - time(), LONGEST_WAIT_S))
        for event in topics.read(wait_s):
            self._feed(event, desk)
        while (heard := self._next_heard()) is not None:
            self._feed(heard, desk)
        if time() >= self._machine.due():
            self._feed(events.Tick(), desk)
        self._writer.poll()
        self._report()

    def _report(self) -> None:
        due = monotonic() >= self._reported_at + REPORT_S
        if due or not self._machine.in_charge:  # who steps down is silent at once
            self._reported_at = monotonic()
            self._metrics.tell(self._job, self._machine.report(time()))

    def _next_heard(self) -> ProvisionerEvent | None:
        try:
            return self._heard.get_nowait()
        except Empty:
            return None

    def _feed(self, event: ProvisionerEvent, desk: Desk) -> None:
        for command in self._machine.on(event, time()):
            self._do(command, desk)

    def _do(self, command: ProvisionerCommand, desk: Desk) -> None:
        match command:
            case do.AppendPlan(record):
                self._tell(record)
                self._writer.append(plans_topic(self._job), encode_plan(record))
            case do.Launch() | do.Release() | do.LookAtMachines() | do.LookAtPrices():
                desk.send(command)
            case do.AskLease():
                self._ask_lease()
            case do.ReleaseLease():
                self._release_lease()
            case do.TookCharge(term):
                self._log.info("provisions", term=term)
            case do.StepDown(reason):
                self._log.warning("steps_down", reason=reason)
            case do.Finish(reason):
                self._log.info("provisioning_finished", reason=reason)

    def _tell(self, record: PlanRecord) -> None:
        """Log what changes; reviews and prices are in the topic for whoever wants them."""
        match record:
            case Planned():
                self._log.info(
                    "planned",
                    plan=record.number,
                    spot=record.spot,
                    on_demand=record.on_demand,
                    why=record.why,
                    reason=record.reason,
                )
                if record.warning:
                    self._log.warning("plan_warns", plan=record.number, warning=record.warning)
            case Ordered():
                self._log.info(
                    "machine_ordered",
                    launch=record.launch,
                    slot=record.slot,
                    pool=record.pool,
                    worker=record.worker,
                )
            case Started():
                self._log.info("machine_started", launch=record.launch, machine=record.machine)
            case Ended():
                self._log.info(
                    "machine_ended",
                    launch=record.launch,
                    cause=record.cause,
                    detail=record.detail,
                )
            case Settled():
                self._log.info("settled", spent_usd=record.spent_usd, why=record.why)
            case _:
                pass

    def _ask_lease(self) -> None:
        try:
            held = self._board.hold_lease(self._name, self._settings.lease_ttl_s)
            self._board_outage.over()
        except UnavailableError as error:
            self._board_outage.met(error)
            return  # whoever is in charge stays so: the lease only says who may try
        self._heard.put(events.LeaseAnswered(held))

    def _release_lease(self) -> None:
        try:
            self._board.release_lease(self._name)
        except UnavailableError as error:
            self._board_outage.met(error)

    def _fail(self, fault: BaseException) -> None:
        self._fault = fault
