"""One job's deciding thread: events in, decisions out, one at a time."""

from __future__ import annotations

import threading
from queue import Empty
from time import monotonic, time
from typing import TYPE_CHECKING

from common.core import events
from common.core.commands import ReleaseLease
from common.core.coordinator import Coordinator
from common.core.settings import CoordinatorSettings
from common.job_task import trainer_of
from services.coordinator.effects import Effects
from services.coordinator.measuring import Measuring
from services.coordinator.readers import Heard
from services.coordinator.snapshots import SnapshotStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.checkpoints import CheckpointStore
    from common.config import Settings
    from common.core.events import Wanted
    from common.jobs.store import JobBook, JobRecord
    from common.metrics.coordinator import CoordinatorMetrics
    from common.ports import Board, Log
    from common.telemetry import EventLogger
    from common.tracing import Tracer

LONGEST_WAIT_S = 0.5  # how late a fault of another thread is noticed


class JobCoordinator:
    """One replica's part in one job.

    Args:
        name: Of this replica, unique among all that ever live.
        record: The job.
        settings: Of the process.
        log: Kafka.
        board: The job's board.
        checkpoints: The job's checkpoints, None without object storage.
        book: The jobs topic; for this thread alone.
        metrics: Of the process.
        tracer: Likewise.
        logger: Bound to the replica.
    """

    def __init__(  # noqa: PLR0913 -- what a coordinator is made of
        self,
        name: str,
        record: JobRecord,
        settings: Settings,
        *,
        log: Log,
        board: Board,
        checkpoints: CheckpointStore | None,
        book: JobBook,
        metrics: CoordinatorMetrics,
        tracer: Tracer,
        logger: EventLogger,
    ) -> None:
        spec = record.spec
        self._record = record
        self.job = spec.name
        self._log = logger.bind(job=spec.name)
        self._stopping = threading.Event()
        self._fault: BaseException | None = None
        self._protocol = protocol_settings(record)
        self._machine = Coordinator(name, self._protocol)
        self._wanted: Wanted = record.wanted
        self._metrics = metrics
        self._store = SnapshotStore(
            record, board, checkpoints, logger=self._log, metrics=metrics, fail=self._fail
        )
        followed = metrics.follow(self.job, self._checkpoint_age_s)  # until `run` ends
        self._measuring = Measuring(spec, followed, tracer)
        self._effects = Effects(
            record,
            trainer_of(spec, settings.tasks),
            log,
            board,
            self._store,
            book,
            self._measuring,
            name=name,
            lease_ttl_s=self._protocol.lease_ttl_s,
            logger=self._log,
            fail=self._fail,
        )

    def follow(self, record: JobRecord | None) -> None:
        """Tell what the owner has made of the job; from any thread.

        Args:
            record: None where it was deleted. One that was submitted at another time is another.
        """
        if record is None or record.submitted_s != self._record.submitted_s:
            if self._machine.leader is None:
                self.stop()  # nobody begins to lead a job that is gone
            self._want("stopped")
            return
        if record.revision != self._record.revision:
            self._log.info("job_changed", revision=record.revision)
            self._tell(events.SettingsChanged(protocol_settings(record)))
        self._record, self._measuring.spec = record, record.spec
        self._want(record.wanted)

    def stop(self) -> None:
        """End `run` soon; from any thread."""
        self._stopping.set()

    def run(self, beat: Callable[[], object]) -> None:
        """Decide until stopped or finished.

        Args:
            beat: Told at each turn, which takes longer than a moment only where a job ends.

        Raises:
            BaseException: Whatever ended a thread of this job, or an audit record's delivery.
        """
        machine, effects = self._machine, self._effects
        self._feed(events.WantedChanged(self._wanted))
        try:
            while not self._stopping.is_set() and not machine.finished and self._fault is None:
                beat()
                wait_s = min(machine.due() - monotonic(), LONGEST_WAIT_S)
                try:
                    heard = effects.leadership.heard.get(timeout=max(wait_s, 0.0))
                except Empty:
                    heard = None
                if heard is not None and heard.leadership in (0, effects.leadership.number):
                    self._feed(heard.event)
                if monotonic() >= machine.due():
                    self._feed(events.Tick())
                effects.poll()
        finally:
            if not machine.finished:
                list(effects.do(ReleaseLease()))  # another replica need not wait for it to run out
            effects.close()
            self._metrics.forget(self.job)
        if self._fault is not None:
            raise self._fault

    def _want(self, wanted: Wanted) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            self._tell(events.WantedChanged(wanted))

    def _tell(self, event: events.CoordinatorEvent) -> None:
        self._effects.leadership.heard.put(Heard(0, event))

    def _feed(self, event: events.CoordinatorEvent) -> None:
        measuring, waiting = self._measuring, [event]
        while waiting:
            event = waiting.pop(0)
            measuring.heard(event, time())
            for command in self._machine.on(event, monotonic()):
                begin_s = time()
                waiting += self._effects.do(command)
                measuring.done(command, begin_s, time())
            if isinstance(event, events.ControlRead) and self._machine.leader is not None:
                measuring.decided(self._machine.leader.ledger)

    def _checkpoint_age_s(self) -> float | None:
        """Told by the leader alone; asked by the thread that answers scrapes."""
        return None if self._machine.leader is None else self._store.age_s()

    def _fail(self, fault: BaseException) -> None:
        self._fault = fault
        self._tell(events.Tick())


def protocol_settings(record: JobRecord) -> CoordinatorSettings:
    """The protocol's part of a job's specification."""
    spec, deadline_s = record.spec, record.spec.stop.deadline_s
    return CoordinatorSettings(
        group_size=spec.group_size,
        bound=spec.waiting_bound,
        revision=record.revision,
        learning_rate=spec.optimizer.learning_rate,
        group_linger_s=spec.group_linger_s,
        on_missing=spec.on_missing,
        deadline_floor_s=spec.deadline_floor_s,
        strikes=spec.strikes,
        poison_in_a_row=spec.poison_in_a_row,
        poison_share=spec.poison_share,
        stop_updates=spec.stop.updates,
        stop_loss=spec.stop.loss,
        stop_at=None
        if deadline_s is None
        else monotonic() + record.submitted_s + deadline_s - time(),
        hot_every_s=spec.hot_snapshot.every_s,
        hot_every_updates=spec.hot_snapshot.every_updates,
        checkpoint_every_s=spec.checkpoint.every_s,
        checkpoint_every_updates=spec.checkpoint.every_updates,
    )
