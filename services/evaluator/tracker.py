"""One job's tracker: reads the updates topic, and sends points and models to MLflow.

    updates ── history     ──▶ ┌─────────┐ ── points, doll.position ──▶ the job's run
    storage ── checkpoints ──▶ │ tracker │ ── versions, aliases      ──▶ a registered model
                               └─────────┘

Evaluators write to the updates topic and do not wait for a tracker. Unsent points wait in Kafka. A
tracker that restarts or replaces another finds the job's run by its tags and continues at
`doll.position`. It repeats requests that were not answered; the server keeps each point once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from common.core.liveness import EVALUATOR
from common.errors import DollError, NotFoundError, UserError
from common.telemetry.metrics.evaluator import TrackerMetrics
from common.telemetry.outages import Outage
from common.tracking.port import Metric, RunStatus, TrackedRun, Tracking
from services.evaluator.registered_checkpoints import RegisteredCheckpoints
from services.evaluator.tracked_metrics import TrackedMetrics
from services.evaluator.updates_reader import READ_RECORDS, UpdatesReader

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.jobs.store import JobRecord
    from common.kafka.port import Log
    from common.redis.port import Board
    from common.runtime.supervisor import PreviousFault
    from common.storage.port import Blobs
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics

# Time that a reported reason outlives the pause before the next attempt.
UNABLE_S = 30.0
# Seconds between polls while Kafka is fetching.
FETCH_S = 0.25
# Tag of a run: everything in the updates topic below this offset was sent.
POSITION = "doll.position"
PARAMETERS_LEFT_OUT = {"name", "tracking"}


class TrackingPace(NamedTuple):
    """Timing of a tracker."""

    # Seconds between polls; the points of one interval share a request.
    look_s: float = 5.0
    # Seconds before a retry if a server did not answer.
    away_s: float = 5.0
    # Seconds before a retry after a refusal, which a person must resolve.
    refused_s: float = 60.0
    # Time to wait for the evaluation of the last version after a job has ended.
    quiet_s: float = 30.0
    # Number of updates per mean; a job makes up to hundreds of updates per second.
    every_updates: int = 50


class TrackerProcess(NamedTuple):
    """State that the trackers of a process share."""

    settings: Settings
    # Name of the evaluator.
    name: str
    log: Log
    # Opens the board of a job.
    board: Callable[[str], Board]
    open_tracking: Callable[[], Tracking | None]
    open_blobs: Callable[[], Blobs]
    metrics: ProcessMetrics
    logger: EventLogger
    pace: TrackingPace = TrackingPace()


class JobTracker:
    """Sends one job's points and models to a tracker: an actor of a supervisor.

    Args:
        process: State shared with other trackers. See `JobEvaluator` for the other arguments.

    Raises:
        NotFoundError: If the job was deleted, or has no `tracking`.
    """

    def __init__(
        self,
        process: TrackerProcess,
        wanted: Callable[[], JobRecord | None],
        wake: Callable[[], None],
        fault: PreviousFault | None = None,
    ) -> None:
        del wake, fault
        record = wanted()
        spec = record.spec.tracking if record is not None else None
        if record is None or spec is None:
            raise NotFoundError("the job was deleted")
        self._record = record
        self._find = wanted
        self._job = record.spec.name
        self._spec = spec
        self._process = process
        self._pace = process.pace
        self._board = process.board(record.id)
        self._opened = process.open_tracking()
        self._metrics = TrackerMetrics()
        logger = process.logger.bind(job=self._job)
        self._outage = Outage(logger, "tracking")
        self._updates = UpdatesReader(process.log, record.id, self._read_from, logger)
        self._identity = {
            "doll.job": self._job,
            "doll.incarnation": str(record.incarnation),
            "doll.submitted_s": str(record.submitted_s),
        }
        # None until the tracker has answered.
        self._run: TrackedRun | None = None
        # Status in the tracker.
        self._status: RunStatus = "RUNNING"
        # Everything in the updates topic below this offset was sent.
        self._sent = 0
        # The position in the tracker, which is updated with the next points.
        self._tagged = 0
        # Points to send before more records are read.
        self._pending = list[Metric]()
        self._history = TrackedMetrics(process.pace.every_updates)
        self._checkpoints: RegisteredCheckpoints | None = None
        self._quiet_since = monotonic()
        process.metrics.follow(self._job, self._metrics)

    def turn(self) -> float | None:
        """Read and send new records; the job ends once it has stopped and everything is sent."""
        record = self._find()
        if record is None or not record.is_same_job(self._record):
            self._abandon()
            return None
        self._record = record
        try:
            again_s = self._go_on()
        except DollError as error:
            self._outage.met(error)
            self._metrics.failures.inc()
            # The run may have been deleted if the tracker refused the request.
            self._run = None if isinstance(error, UserError) else self._run
            if self._opened is None:
                self._report_unable(str(error))
            again_s = self._pace.away_s if error.retriable else self._pace.refused_s
        else:
            self._outage.over()
        return None if again_s is None else monotonic() + again_s

    def close(self) -> None:
        """Release everything; unsent points wait in Kafka."""
        self._process.metrics.forget(self._metrics)
        self._updates.close()
        self._board.close()
        if self._opened is not None:
            self._opened.close()

    @property
    def _tracking(self) -> Tracking:
        """The tracking server.

        Raises:
            UserError: If DOLL_MLFLOW is not set.
        """
        if self._opened is None:
            raise UserError(
                "DOLL_MLFLOW: is not set for this evaluator, but the job has `tracking`; set it to"
                " the MLflow server's URL"
            )
        return self._opened

    def _report_unable(self, why: str) -> None:
        # If Redis is unavailable, only the log has the error.
        with suppress(DollError):
            ttl_s = self._pace.refused_s + UNABLE_S
            self._board.put_unable(EVALUATOR + self._process.name, why, ttl_s)

    def _go_on(self) -> float | None:
        """Read and send; return the seconds until the next call, or None if nothing is left to do.

        Raises:
            DollError: If a server is unavailable or refuses a request.
        """
        # This precedes the read of the topic, because a leader writes everything before it releases
        # the lease.
        over = self._record.wanted == "stopped" and not self._board.is_leased()
        end = self._process.log.bounds(self._updates.partition).end
        self._metrics.waiting = max(end - self._sent, 0)
        run = self._begun(end)
        if over and self._status != "RUNNING" and self._sent >= end:
            # Everything was sent earlier.
            return None
        read, position = self._read()
        if self._pending or position - self._tagged >= READ_RECORDS:
            self._send(run.id, position)
        self._sent = max(self._sent, position)
        self._metrics.waiting = max(end - self._sent, 0)
        if read:
            self._quiet_since = monotonic()
        if position < end:
            return 0.0 if read else FETCH_S
        over = over and monotonic() >= self._quiet_since + self._pace.quiet_s
        if over:
            self._pending = self._history.rest()
            self._send(run.id, position)
        self._register(run.id, last=over)
        self._set_status(run.id, over=over)
        return None if over else self._pace.look_s

    def _begun(self, end: int) -> TrackedRun:
        """Return the job's run, found or created."""
        if self._run is None:
            parameters = _flat(self._record.spec.model_dump(mode="json", exclude_defaults=True))
            self._run = self._tracking.begin(
                self._spec.experiment, self._job, self._identity, parameters
            )
            position = self._run.tags.get(POSITION, "")
            # The position exceeds the end if Kafka lost acknowledged records. New records will have
            # the offsets of the lost ones.
            sent = min(int(position) if position.isdigit() else 0, end)
            # The previous run was deleted, so all points are sent again.
            if sent < self._tagged:
                self._updates.close()
                self._pending = []
            self._sent = self._tagged = sent
            self._status = self._run.status
        return self._run

    def _read_from(self, start: int) -> None:
        self._history, self._pending = TrackedMetrics(self._pace.every_updates, start), []

    def _read(self) -> tuple[int, int]:
        """Read on if everything is sent; return the number of records and the new position."""
        records = [] if self._pending else self._updates.read()
        for offset, at_s, record in records:
            found = self._history.feed(offset, at_s, record)
            if offset >= self._sent:
                self._pending += found
        return len(records), self._updates.position

    def _send(self, run: str, position: int) -> None:
        """Send all pending points together with the position after the records read."""
        position = max(position, self._sent)
        self._tracking.log(run, self._pending, {POSITION: str(position)})
        self._metrics.sent.inc(len(self._pending))
        self._pending, self._tagged = [], position

    def _register(self, run: str, *, last: bool) -> None:
        if self._spec.model is None:
            return
        if self._checkpoints is None:
            blobs = self._process.open_blobs()
            self._checkpoints = RegisteredCheckpoints(
                *(self._tracking, self._spec.model, self._identity),
                *(blobs, self._process.settings.blobs),
            )
        self._checkpoints.look(self._record, run, self._history, last=last)

    def _set_status(self, run: str, *, over: bool) -> None:
        ended: RunStatus = "FINISHED" if self._record.finished else "KILLED"
        status: RunStatus = ended if over else "RUNNING"
        if status != self._status:
            self._tracking.set_status(run, status)
            self._status = status

    def _abandon(self) -> None:
        """Mark the run of a deleted job as ended."""
        if self._run is not None:
            # If the tracker is unavailable now, the run stays as it is.
            with suppress(DollError):
                self._set_status(self._run.id, over=True)


def _flat(block: object, path: str = "") -> dict[str, str]:
    """Return a job's settings by their paths, in the form of a run's parameters."""
    if not isinstance(block, dict):
        return {path: str(block)}
    return {
        name: value
        for key, part in block.items()
        if path or key not in PARAMETERS_LEFT_OUT
        for name, value in _flat(part, f"{path}.{key}" if path else key).items()
    }
