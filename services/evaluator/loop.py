"""One job's evaluator: follows its updates topic, takes what its leader offers, judges what counts.

    board   ── offered model ──▶ ┌───────────┐
    updates ── what counts   ──▶ │ evaluator │ ── Evaluated, Drifted ──▶ updates
    streams ── records       ──▶ └───────────┘

It asks nothing of workers, and of the leader no more than one write of the model per n updates. A
slow evaluator judges the newest version that it finds, and leaves out those in between.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING

from common import wire
from common.core.spans import Partition
from common.errors import CorruptError, ExpiredError, FutureFormatError, UnavailableError, WireError
from common.evaluation.track import Track
from common.telemetry import Outage
from common.topics import updates_topic
from services.evaluator.judging import Judge, Pace

if TYPE_CHECKING:
    from common.config import Settings
    from common.core.events import Wanted
    from common.core.messages import AuditRecord, Drifted, Evaluated, ModelId
    from common.job_parts import EvaluationSpec
    from common.jobs.store import JobRecord
    from common.metrics.evaluator import EvaluatorMetrics
    from common.metrics.serving import Pulse
    from common.ports import Board, Log, LogRecord, Tail, Writer
    from common.telemetry import EventLogger

READ_RECORDS = 1000
AWAY_S = 0.5  # between attempts while a server is away
FLUSH_S = 5.0


class JobEvaluator:
    """Judges the versions of one job.

    Args:
        record: The job.
        evaluation: What it wants of us.
        settings: Of the process.
        log: Kafka.
        board: The job's; closed at the end of `run`.
        metrics: Of the process.
        pulse: Of this job's loop.
        logger: Of the process.
        pace: How patient it is.
    """

    def __init__(  # noqa: PLR0913 -- what an evaluator is made of
        self,
        record: JobRecord,
        evaluation: EvaluationSpec,
        settings: Settings,
        *,
        log: Log,
        board: Board,
        metrics: EvaluatorMetrics,
        pulse: Pulse,
        logger: EventLogger,
        pace: Pace = Pace(),  # noqa: B008 -- it cannot be changed
    ) -> None:
        self._record = record
        self._pace = pace
        self._job = record.spec.name
        self._evaluation = evaluation
        self._settings = settings
        self._source = log
        self._board = board
        self._metrics = metrics
        self._pulse = pulse
        self._log = logger.bind(job=self._job)
        self._wanted: Wanted = record.wanted
        self._stopping = threading.Event()
        self._kafka_outage = Outage(self._log, "servers")
        self._place = Partition(updates_topic(self._job), 0)
        self._track = Track(evaluation.every_updates)
        self._tail: Tail | None = None
        self._until = 0  # end of the topic when reading began: what was told before
        self._known: ModelId | None = None  # the last offer that was fetched
        self._offer: tuple[ModelId, bytes] | None = None  # not known to count yet
        self._last: ModelId | None = None  # judged last
        self._look_at = 0.0  # when to look at the board again
        self._writer: Writer | None = None  # until there is something to tell
        self._judge: Judge | None = None

    def follow(self, record: JobRecord | None) -> None:
        """Tell what the owner has made of the job; from any thread.

        Args:
            record: None where it was deleted. One that was submitted at another time is another.
        """
        if record is None or record.submitted_s != self._record.submitted_s:
            self.stop()
        else:
            self._wanted = record.wanted

    def stop(self) -> None:
        """End `run` soon; from any thread."""
        self._stopping.set()

    def run(self) -> None:
        """Judge until stopped, or until the job is over and its last version judged.

        Raises:
            DollError: If the job cannot be evaluated.
        """
        self._metrics.follow(self._job, self._record.spec.streams)
        try:
            while not self._stopping.is_set():
                self._pulse.beat()
                try:
                    if self._turn():
                        return
                    self._kafka_outage.quiet()
                except UnavailableError as error:
                    self._kafka_outage.met(error)
                    self._stopping.wait(AWAY_S)
        finally:
            self._close()

    def _turn(self) -> bool:
        """Look at everything once; whether there is nothing left to do.

        Raises:
            UnavailableError: If a server is away.
        """
        over = self._look()
        if over and self._offer is None and self._judge is None:
            return True  # it was over before we came, or nothing was ever offered
        self._read()
        if self._writer is not None:
            self._writer.poll()
        if self._position() < self._until:
            return False  # what was told before is not all known
        over = over and self._position() >= self._source.bounds(self._place).end
        self._consider_offer(over=over)
        self._go_on(last=over)
        return over and self._offer is None and (self._judge is None or self._judge.name is None)

    def _look(self) -> bool:
        """Fetch what is offered, if it is news; whether nothing more will be.

        Raises:
            UnavailableError: If the board is away.
        """
        stopped = self._wanted == "stopped"
        if not stopped and monotonic() < self._look_at:
            return False
        # Asked before the offer is looked at: a leader gives the lease back when all is offered.
        over = stopped and not self._board.is_leased()
        found = self._board.offered_model(self._known)
        self._look_at = monotonic() + self._pace.look_s
        if found is not None:
            self._known, self._offer = found[0], found
        return over

    # --- the updates topic -----------------------------------------------------------------------

    def _read(self) -> None:
        if self._tail is None:
            bounds = self._source.bounds(self._place)
            self._tail, self._until = self._source.tail(self._place, bounds.start), bounds.end
            self._track = Track(self._evaluation.every_updates, bounds.start)
        try:
            records = self._tail.read(READ_RECORDS, self._pace.look_s)
        except ExpiredError:  # only newer ones are kept (the embedded Kafka): go on with those
            self._tail.close()
            self._tail = None
            return
        for record in records:
            self._track.feed(record.offset, _decoded(record))
        if 0 < len(records) < READ_RECORDS:
            self._stopping.wait(self._pace.gather_s)

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
        judge = self._made_judge()  # no sooner: there may be many jobs that are over
        self._go_on(last=True)
        try:
            judge.begin(name, weights, tests=tests, predicts=predicts)
        except CorruptError as error:
            self._log.warning("offer_unreadable", version=name.version, reason=str(error))
            self._metrics.skipped(self._job, 1)
            return
        if self._last is not None:
            every = self._evaluation.every_updates
            between = name.version // every - self._last.version // every - 1
            self._metrics.skipped(self._job, max(0, between))
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

    def _made_judge(self) -> Judge:
        if self._judge is None:
            self._judge = Judge(
                self._record.spec,
                self._evaluation,
                self._settings,
                log=self._source,
                pace=self._pace,
                tell=self._tell,
                metrics=self._metrics,
                logger=self._log,
            )
        return self._judge

    def _close(self) -> None:
        if self._judge is not None:
            self._judge.close()
        if self._tail is not None:
            self._tail.close()
        if self._writer is not None:
            self._writer.flush(FLUSH_S)
            self._writer.close()
        self._board.close()
        self._metrics.forget(self._job)


def _decoded(record: LogRecord) -> AuditRecord | None:
    try:
        return None if record.value is None else wire.decode_audit(record.value)
    except FutureFormatError as error:
        raise FutureFormatError(
            f"the update record at offset {record.offset} is {error}; run a newer evaluator"
        ) from error
    except WireError:
        return None
