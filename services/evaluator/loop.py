"""One job's evaluator: evaluates the versions that a leader offers.

    board   ── offered model ──▶ ┌───────────┐
    updates ── history       ──▶ │ evaluator │ ── Evaluated, Drifted ──▶ updates
    streams ── records       ──▶ └───────────┘

A version is evaluated only if the updates topic shows that it is part of the job's history: not if
a takeover took it back. The evaluator needs nothing from workers, and from the leader only one
write of the model per `every_updates` updates. A slow evaluator evaluates the newest version that
it finds and skips those in between.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from common.errors import CorruptError, NotFoundError, UnavailableError
from common.telemetry.metrics.evaluator import EvaluatorMetrics
from common.telemetry.outages import Outage
from common.wire.messages import encode_audit
from services.evaluator.evaluation_runner import EvaluationRunner, EvaluatorProcess
from services.evaluator.offered_versions import OfferedVersions
from services.evaluator.updates_reader import UpdatesReader

if TYPE_CHECKING:
    from common.core.messages import Drifted, Evaluated, ModelId
    from common.jobs.store import JobRecord
    from common.kafka.port import Writer
    from common.runtime.supervisor import PreviousFault

# Maximum number of updates per read. If there are more, the next turn follows at once.
GATHERED = 100
# Seconds between attempts while a server is unavailable.
AWAY_S = 0.5
FLUSH_S = 5.0


class JobEvaluator:
    """Evaluates the versions of one job: an actor of a supervisor.

    A turn takes at most the evaluation of one version.

    Args:
        wanted: Returns the job's current record, or None if the job was deleted. A record with
            another submission time is another job.
        wake: Unused, because the evaluator polls.
        fault: Unused; the error that ended the previous actor is logged already.

    Raises:
        NotFoundError: If the job was deleted, or has no `evaluation`.
    """

    def __init__(
        self,
        process: EvaluatorProcess,
        wanted: Callable[[], JobRecord | None],
        wake: Callable[[], None],
        fault: PreviousFault | None = None,
    ) -> None:
        del wake, fault
        record = wanted()
        evaluation = record.spec.evaluation if record is not None else None
        if record is None or evaluation is None:
            raise NotFoundError("the job was deleted")
        self._record = record
        self._find = wanted
        self._job = record.spec.name
        self._evaluation = evaluation
        self._process = process
        self._board = process.board(record.id)
        self._metrics = EvaluatorMetrics(record.spec.streams)
        self._log = process.logger.bind(job=self._job)
        self._outage = Outage(self._log, "kafka")
        self._updates = UpdatesReader(process.log, record.id, self._read_from, self._log)
        self._versions = OfferedVersions(evaluation.every_updates)
        # The last offer that was fetched.
        self._known: ModelId | None = None
        # An offer that the updates topic has not confirmed yet.
        self._offer: tuple[ModelId, bytes] | None = None
        # The version that was evaluated last.
        self._last: ModelId | None = None
        # Time of the next poll of the board.
        self._look_at = 0.0
        # None until there is something to report.
        self._writer: Writer | None = None
        self._runner: EvaluationRunner | None = None
        process.metrics.follow(self._job, self._metrics)

    def turn(self) -> float | None:
        """Poll everything once; the job ends if nothing is left to evaluate.

        Raises:
            DollError: If the job cannot be evaluated.
        """
        record = self._find()
        if record is None or not self._record.is_same_job(record):
            return None
        try:
            read = self._go_through(stopped=record.wanted == "stopped")
            self._outage.quiet()
        except UnavailableError as error:
            self._outage.met(error)
            return monotonic() + AWAY_S
        if read is None:
            return None
        return monotonic() + (self._process.pace.look_s if read < GATHERED else 0.0)

    def close(self) -> None:
        """Release everything; reports are delivered first."""
        self._process.metrics.forget(self._metrics)
        if self._runner is not None:
            self._runner.close()
        self._updates.close()
        self._board.close()
        if self._writer is not None:
            try:
                self._writer.flush(FLUSH_S)
            finally:
                self._writer.close()

    def _go_through(self, *, stopped: bool) -> int | None:
        """Read, evaluate and report; return the number of updates read, or None if the job is done.

        Raises:
            UnavailableError: If a server is unavailable.
        """
        over = self._look(stopped=stopped)
        if over and self._offer is None and self._runner is None:
            # The job ended before this process started, or without any offer.
            return None
        records = self._updates.read()
        for offset, _, record in records:
            self._versions.feed(offset, record)
        read = len(records)
        if self._writer is not None:
            self._writer.poll()
            self._outage.watch(self._writer)
        if self._updates.position < self._updates.end:
            # Earlier reports may not all be read yet.
            return read
        over = over and self._updates.at_end
        self._consider_offer(over=over)
        self._go_on(last=over)
        done = self._offer is None and (self._runner is None or self._runner.name is None)
        return None if over and done else read

    def _look(self, *, stopped: bool) -> bool:
        """Fetch a new offer; return True if there will be no more.

        Raises:
            UnavailableError: If the board is unavailable.
        """
        if not stopped and monotonic() < self._look_at:
            return False
        # This precedes the read of the offer, because a leader offers everything before it releases
        # the lease.
        over = stopped and not self._board.is_leased()
        found = self._board.offered_model(self._known)
        self._look_at = monotonic() + self._process.pace.look_s
        if found is not None:
            self._known, self._offer = found[0], found
        return over

    # --- the updates topic -----------------------------------------------------------------------

    def _read_from(self, start: int) -> None:
        self._versions = OfferedVersions(self._evaluation.every_updates, start)

    def _write(self, record: Evaluated | Drifted) -> None:
        if self._writer is None:
            self._writer = self._process.log.writer()
        self._writer.append(self._updates.partition.topic, encode_audit(record))

    # --- offers ----------------------------------------------------------------------------------

    def _consider_offer(self, *, over: bool) -> None:
        """Start with the offered version once the updates topic has confirmed it."""
        if self._offer is None:
            return
        model, weights = self._offer
        name = self._versions.name(model)
        if name is not None:
            self._begin(name, weights, over=over)
        elif not over and self._versions.may_come(model):
            return
        else:
            self._log.info("offer_taken_back", epoch=model.epoch, version=model.version)
            self._metrics.evaluations.labels("skipped").inc()
        self._offer = None

    def _begin(self, name: ModelId, weights: bytes, *, over: bool) -> None:
        tests = bool(self._evaluation.stream) and name.version > self._versions.tested
        predicts = name.version > self._versions.predicted
        if over and not self._versions.after(name):
            # The model has learned from no records after this version, and the job has ended.
            predicts = False
        if name == self._last or not (tests or predicts):
            # A new leader offers its base version again, or the version was evaluated earlier.
            return
        # Created as late as possible, because many jobs may have ended.
        if self._runner is None:
            spec, process = self._record.spec, self._process
            self._runner = EvaluationRunner(
                *(spec, self._record.id, self._evaluation, process),
                *(self._metrics, self._write, self._log),
            )
        self._go_on(last=True)
        try:
            self._runner.begin(name, weights, tests=tests, predicts=predicts)
        except CorruptError as error:
            self._log.warning("offer_unreadable", version=name.version, reason=str(error))
            self._metrics.evaluations.labels("skipped").inc()
            return
        if self._last is not None:
            between = self._versions.offered_between(self._last.version, name.version)
            self._metrics.evaluations.labels("skipped").inc(between)
        self._last = name

    def _go_on(self, *, last: bool) -> None:
        """Continue with the version under evaluation, or drop it if a takeover took it back."""
        runner = self._runner
        if runner is None or runner.name is None:
            return
        if self._versions.name(runner.name) is None:
            runner.drop_version()
        else:
            runner.go_on(self._versions.after(runner.name), last=last)
