"""One job's evaluator: follows its updates topic, takes what its leader offers, judges what counts.

    board   ── offered model ──▶ ┌───────────┐
    updates ── what counts   ──▶ │ evaluator │ ── Evaluated, Drifted ──▶ updates
    streams ── records       ──▶ └───────────┘

It asks nothing of workers, and of the leader no more than one write of the model per n updates. A
slow evaluator judges the newest version that it finds, and leaves out those in between.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from common.core.spans import Partition
from common.errors import (
    CorruptError,
    ExpiredError,
    FutureFormatError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
    WireError,
)
from common.evaluation.track import Track
from common.telemetry.logging import Outage
from common.topics.names import updates_topic
from common.topics.read import identified
from common.wire import messages as wire
from services.evaluator.evaluation_runner import EvaluationRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import AuditRecord, Drifted, Evaluated, ModelId
    from common.jobs.store import JobRecord
    from common.ports.servers import LogRecord, Tail, Writer
    from common.runtime.supervisor import Fault
    from services.evaluator.evaluation_runner import Process

READ_RECORDS = 1000
GATHERED = 100  # updates read at once: where there are more there is a next turn at once
AWAY_S = 0.5  # between attempts while a server is unavailable
FLUSH_S = 5.0


class JobEvaluator:
    """Judges the versions of one job: an actor of a supervisor.

    A turn is the evaluation of one version at the longest.

    Args:
        process: What it shares with others.
        wanted: The job as its owner wants it now; None where it was deleted. One that was submitted
            at another time is another.
        wake: Lets it have a turn soon; it looks now and then by itself.
        fault: What ended the one before; it has been told.

    Raises:
        NotFoundError: If the job was deleted, or has no `evaluation`.
    """

    def __init__(
        self,
        process: Process,
        wanted: Callable[[], JobRecord | None],
        wake: Callable[[], None],
        fault: Fault | None = None,
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
        self._source = process.log
        self._board = process.board(record.id)
        self._metrics = process.metrics
        self._log = process.logger.bind(job=self._job)
        self._outage = Outage(self._log, "servers")
        self._place = Partition(updates_topic(record.id), 0)
        self._track = Track(evaluation.every_updates)
        self._tail: Tail | None = None
        self._until = 0  # end of the topic when reading began: what was told before
        self._known: ModelId | None = None  # the last offer that was fetched
        self._offer: tuple[ModelId, bytes] | None = None  # not known to count yet
        self._last: ModelId | None = None  # judged last
        self._look_at = 0.0  # when to look at the board again
        self._writer: Writer | None = None  # until there is something to tell
        self._judge: EvaluationRunner | None = None
        self._metrics.follow(self._job, record.spec.streams)

    def turn(self) -> float | None:
        """Look at everything once; the job is over where there is nothing left to judge.

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
        """Let go of everything; what was told is delivered."""
        self._metrics.forget(self._job)
        if self._judge is not None:
            self._judge.close()
        if self._tail is not None:
            self._tail.close()
        self._board.close()
        if self._writer is not None:
            try:
                self._writer.flush(FLUSH_S)
            finally:
                self._writer.close()

    def _go_through(self, *, stopped: bool) -> int | None:
        """Read, judge, tell; how many updates were read, None where there is nothing left to do.

        Raises:
            UnavailableError: If a server is unavailable.
        """
        over = self._look(stopped=stopped)
        if over and self._offer is None and self._judge is None:
            return None  # it was over before we came, or nothing was ever offered
        read = self._read()
        if self._writer is not None:
            self._writer.poll()
        if self._position() < self._until:
            return read  # what was told before is not all known
        over = over and self._position() >= self._source.bounds(self._place).end
        self._consider_offer(over=over)
        self._go_on(last=over)
        done = self._offer is None and (self._judge is None or self._judge.name is None)
        return None if over and done else read

    def _look(self, *, stopped: bool) -> bool:
        """Fetch what is offered, if it is news; whether nothing more will be.

        Raises:
            UnavailableError: If the board is unavailable.
        """
        if not stopped and monotonic() < self._look_at:
            return False
        # Asked before the offer is looked at: a leader gives the lease back when all is offered.
        over = stopped and not self._board.is_leased()
        found = self._board.offered_model(self._known)
        self._look_at = monotonic() + self._process.pace.look_s
        if found is not None:
            self._known, self._offer = found[0], found
        return over

    # --- the updates topic -----------------------------------------------------------------------

    def _read(self) -> int:
        """Read what is there; returns how many records that was."""
        if self._tail is None:
            bounds = self._source.bounds(self._place)
            begin = identified(self._source, self._place, bounds.start)
            self._tail, self._until = self._source.tail(self._place, begin), bounds.end
            self._track = Track(self._evaluation.every_updates, bounds.start)
        try:
            records = self._tail.read(READ_RECORDS, 0.0)
        except (ExpiredError, TruncatedError) as error:
            # Only newer ones are kept (the embedded Kafka), or Kafka lost some: what counts is
            # what is there.
            self._log.warning("updates_read_anew", reason=str(error))
            self._tail.close()
            self._tail = None
            return 0
        for record in records:
            self._track.feed(record.offset, decoded(record))
        return len(records)

    def _position(self) -> int:
        return -1 if self._tail is None else self._tail.position()

    def _tell(self, record: Evaluated | Drifted) -> None:
        if self._writer is None:
            self._writer = self._source.writer()
        self._writer.append(self._place.topic, wire.encode_audit(record))

    # --- what is offered -------------------------------------------------------------------------

    def _consider_offer(self, *, over: bool) -> None:
        """Begin with what is offered, once it counts."""
        if self._offer is None:
            return
        model, weights = self._offer
        name = self._track.name(model)
        if name is not None:
            self._begin(name, weights, over=over)
        elif not over and self._track.may_come(model):
            return
        else:
            self._log.info("offer_taken_back", epoch=model.epoch, version=model.version)
            self._metrics.skipped(self._job, 1)
        self._offer = None

    def _begin(self, name: ModelId, weights: bytes, *, over: bool) -> None:
        tests = bool(self._evaluation.stream) and name.version > self._track.tested
        predicts = name.version > self._track.predicted
        if over and not self._track.after(name):
            predicts = False  # there is nothing to predict, and will not be
        if name == self._last or not (tests or predicts):
            return  # a new leader offers what it began with, or it was judged before we came
        if self._judge is None:  # no sooner: there may be many jobs that are over
            spec, process = self._record.spec, self._process
            self._judge = EvaluationRunner(
                spec, self._record.id, self._evaluation, process, self._tell, self._log
            )
        self._go_on(last=True)
        try:
            self._judge.begin(name, weights, tests=tests, predicts=predicts)
        except CorruptError as error:
            self._log.warning("offer_unreadable", version=name.version, reason=str(error))
            self._metrics.skipped(self._job, 1)
            return
        if self._last is not None:
            between = self._track.offered_between(self._last.version, name.version)
            self._metrics.skipped(self._job, between)
        self._last = name

    def _go_on(self, *, last: bool) -> None:
        """With the version in hand, if there is one and it still counts."""
        judge = self._judge
        if judge is None or judge.name is None:
            return
        if self._track.name(judge.name) is None:
            judge.drop_version()
        else:
            judge.go_on(self._track.after(judge.name), last=last)


def decoded(record: LogRecord) -> AuditRecord | None:
    """A record of the updates topic; None where it does not parse.

    Raises:
        FutureFormatError: If a newer program wrote it.
    """
    try:
        return None if record.value is None else wire.decode_audit(record.value)
    except FutureFormatError as error:
        raise FutureFormatError(
            f"the update record at offset {record.offset} is {error}; run a newer evaluator"
        ) from error
    except WireError:
        return None
