"""A worker's gradient thread: hear triggers, compute, send (Algorithm 2).

One gradient over all batches of an order, at the newest model heard of. A batch that
is not in memory is read back from Kafka by its address and must give exactly its samples.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from contextlib import suppress
from time import perf_counter, time
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from common.core.assignments import Assignments
from common.core.messages import MOST_TRACEBACK, Failed, Gradient
from common.core.vectors import squared_norm
from common.errors import (
    CorruptError,
    ExpiredError,
    OutsideError,
    UnavailableError,
    UserError,
    WireError,
)
from common.learning.errors import NotFiniteError, Origin, TaskError, WrongTaskError
from common.learning.fields import Columns, concatenate
from common.telemetry.logging import Outage, StageTimes
from common.wire.vectors import decode_sparse, smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.core.assignments import Compute
    from common.core.messages import (
        Batch,
        FailedReason,
        ModelId,
        Reply,
        TriggerStream,
        Unsettled,
        UpdateTrigger,
        WorkerId,
    )
    from common.core.spans import Span
    from common.learning.codecs import Codec
    from common.learning.gradients import GradientComputer
    from common.ports.servers import Board, Fetched, Log
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.serving import Watchdog
    from common.telemetry.metrics.worker import JobMeasures
    from services.worker.rows import BatchCache
    from services.worker.traces import BatchTraces

SLOW_S = 0.1  # a gradient that took longer may have been asked for again: looking costs 0.2 ms
LISTEN_S = 0.25  # longest wait for a trigger: how late the end of the job is noticed
READ_BACK_S = 10.0  # for one span; the coordinator's deadline has long given it to others by then


class _NoGradientError(Exception):
    """An order cannot be carried out: which batches, and why."""

    def __init__(
        self, reason: FailedReason, batches: Sequence[Batch], detail: str, traceback: str = ""
    ) -> None:
        super().__init__(detail)
        self.reason: FailedReason = reason
        self.batches = tuple(batch.offset for batch in batches)
        self.traceback = traceback[-MOST_TRACEBACK:]


class GradientLoop:
    """Carries out this worker's orders, one at a time.

    Args:
        worker: This worker's name.
        computer: The model on its device.
        codec: Decodes records that are read back.
        cache: Batches in memory.
        log: Reads the others back.
        board: The job's board.
        logger: Bound to job and worker.
        measures: Of the job.
        traces: Of its batches.
        watchdog: Of the thread that turns it.
        wait: Waits so many seconds, less if the job ends; for when the board is unavailable.
        round_began: Told when a trigger is heard: of which leader, and what it says of room.
        stream: Says where the leader's triggers are.
        topic_id: Says which topic a span was claimed of; see `Stream`.
        sparse: Whether gradients may be sent sparse to any leader; see `JobSpec.sparse_messages`.
    """

    def __init__(  # noqa: PLR0913 -- the parts of the shell, each used once
        self,
        worker: WorkerId,
        computer: GradientComputer,
        *,
        codec: Codec,
        cache: BatchCache,
        log: Log,
        board: Board,
        logger: EventLogger,
        measures: JobMeasures,
        traces: BatchTraces,
        watchdog: Watchdog,
        wait: Callable[[float], object],
        round_began: Callable[[int, Unsettled | None], None],
        stream: Callable[[], TriggerStream],
        topic_id: Callable[[Span], str],
        sparse: bool,
    ) -> None:
        self._id = worker
        self._computer = computer
        self._codec = codec
        self._cache = cache
        self._source = log
        self._spans = log.spans()
        self._board = board
        self._log = logger
        self._measures = measures
        self._traces = traces
        self._watchdog = watchdog
        self._wait = wait
        self._round_began = round_began
        self._stream = stream
        self._topic_id = topic_id
        self._sparse = self._may_be_sparse = sparse
        self._orders = Assignments(worker)
        self._lock = threading.Lock()  # guards the orders
        self._loaded: ModelId | None = None
        self._missing: ModelId | None = None  # was not on the board, which the leader was told
        self._board_outage = Outage(logger, "board")
        self._times = StageTimes()
        self._told = set[Origin]()  # mistakes of the task that were logged
        self._heard_s = 0.0  # when triggers were heard last, since 1970

    def turn(self) -> None:
        """One turn of the loop: hear what is new, carry out one order."""
        self._watchdog.beat()
        self._listen(0.0 if len(self._orders) else LISTEN_S)
        heard_s = self._heard_s
        with self._lock:
            compute = self._orders.next()
        if compute is not None:
            reply = self._carry_out(compute)
            if isinstance(reply, Gradient) and reply.seconds > SLOW_S:
                self._listen(0.0)  # who asked for it again meanwhile has it now
            sent = self._send(reply, compute.reply_to)
            with self._lock:
                self._orders.done()
            self._traces.answered(compute, heard_s, reply, sent=sent)

    def _listen(self, timeout_s: float) -> None:
        with self._lock:
            self._orders.listen(self._stream())
        try:
            triggers = self._board.triggers(self._orders.heard, timeout_s, self._orders.stream)
            self._board_outage.quiet()  # it may answer, and refuse what is sent
            if triggers:
                self._heard_s = time()
                for trigger in triggers:
                    if trigger.continues(self._loaded):
                        self._change(trigger)
                    elif trigger.model == self._missing:
                        self._catch_up(trigger.model)
                with self._lock:
                    self._orders.hear(triggers)
                self._may_be_sparse = self._sparse or triggers[-1].sparse is True
                self._round_began(triggers[-1].id.epoch, triggers[-1].unsettled)
        except UnavailableError as error:
            self._board_outage.met(error)
            self._wait(LISTEN_S)

    def leave(self, *, finish: bool = True) -> None:
        """Begin no further order, and tell the leader, so that others can; from any thread.

        Args:
            finish: Whether there is time to finish the order under way.
        """
        with self._lock:
            worker_leaving, reply_to = self._orders.leave(finish=finish), self._orders.reply_to
        if worker_leaving is not None:
            self._send(worker_leaving, reply_to)

    def close(self) -> None:
        """Let go of the reader."""
        self._spans.close()
        self._times.tell(self._log)

    def _send(self, reply: Reply, to: str) -> bool:
        """A reply that gets lost is asked for again, by the deadline of its round."""
        started = perf_counter()
        try:
            self._board.push_reply(reply, to)
        except UnavailableError as error:
            self._board_outage.met(error)
            return False
        took_s = self._times.add("push", started)
        if isinstance(reply, Gradient):
            self._measures.took("push", took_s)
            self._measures.gradient_sent()
        return True

    def _carry_out(self, compute: Compute) -> Gradient | Failed:
        try:
            rows = [self._rows(batch) for batch in compute.batches]
            self._load(compute)
            return self._gradient(compute, rows)
        except _NoGradientError as error:
            self._measures.gradient_failed(error.reason)
            cause = error.__cause__
            if not isinstance(cause, TaskError) or self._is_new(cause.origin):
                self._log.warning(
                    "no_gradient",
                    epoch=compute.model.epoch,
                    version=compute.model.version,
                    reason=error.reason,
                    detail=str(error),
                    **({"traceback": error.traceback} if error.traceback else {}),
                )
            return Failed(
                *(self._id, compute.model, error.batches, error.reason, str(error)),
                error.traceback,
            )

    def _is_new(self, origin: Origin) -> bool:
        """Whether this mistake of the task was not told yet: a backlog repeats it by thousands."""
        if origin in self._told:
            return False
        self._told.add(origin)
        return True

    def _gradient(self, compute: Compute, rows: list[Columns]) -> Gradient:
        started = perf_counter()
        try:
            result = self._computer.compute(rows, compute.local_rate)
        except NotFiniteError as error:
            raise _NoGradientError(
                "not_finite", _blamed(compute, error.batch_index), str(error)
            ) from error
        except TaskError as error:
            blamed = _blamed(compute, error.batch_index)
            reason: FailedReason = "task" if isinstance(error, WrongTaskError) else "raised"
            raise _NoGradientError(reason, blamed, error.summary, error.traceback) from error
        except UserError as error:  # the module replaces its buffers
            raise _NoGradientError("task", compute.batches, str(error)) from error
        self._measures.took("gradient", self._times.add("gradient", started))
        vector = smallest(result.sparse) if self._may_be_sparse else result.vector
        square: float | UnsetType = UNSET
        if compute.squared:
            square = squared_norm(vector, self._computer.model.parameter_count)
        return Gradient(
            worker=self._id,
            model=compute.model,
            batches=tuple(batch.offset for batch in compute.batches),
            samples=result.samples,
            loss_sum=result.loss_sum,
            metric_sums=result.metric_sums,
            seconds=result.seconds,
            vector=vector,
            local_rate=compute.local_rate or UNSET,
            square=square,
            scores=result.scores or UNSET,
        )

    def _change(self, trigger: UpdateTrigger) -> None:
        """Make the trigger's model of the one that is loaded; else it is fetched, if asked for."""
        started = perf_counter()
        self._loaded = None
        try:
            self._computer.write(decode_sparse(memoryview(trigger.changes or b"")))
        except (WireError, CorruptError) as error:
            self._log.warning("changes_refused", reason=str(error))
            return
        self._loaded = trigger.model
        self._measures.took("fetch", self._times.add("fetch", started))

    def _catch_up(self, model: ModelId) -> None:
        """Fetch what was missing, now that it was put whole.

        Its order is another worker's by now: who waited for the next would miss that model too, and
        never know one that changes can be made to.
        """
        self._missing = None
        with suppress(_NoGradientError):
            self._fetch(model, ())

    def _load(self, compute: Compute) -> None:
        """Take over the model of a round, once."""
        if self._loaded == compute.model:
            return
        started = perf_counter()
        if compute.weights is None:
            self._fetch(compute.model, compute.batches)
        else:
            self._take(compute.model, compute.weights, compute.batches)
        self._measures.took("fetch", self._times.add("fetch", started))

    def _fetch(self, model: ModelId, batches: Sequence[Batch]) -> None:
        try:
            weights = self._board.get_model(model)
        except UnavailableError as error:
            raise _NoGradientError("model_missing", batches, str(error)) from error
        if weights is None:
            self._missing = model
            raise _NoGradientError("model_missing", batches, "not on the board")
        self._take(model, weights, batches)

    def _take(self, model: ModelId, weights: bytes, batches: Sequence[Batch]) -> None:
        self._loaded = None
        try:
            self._computer.load(weights)
        except CorruptError as error:
            raise _NoGradientError("model_missing", batches, str(error)) from error
        self._loaded = model

    def _rows(self, batch: Batch) -> Columns:
        rows = self._cache.get(batch.address)
        return self._read_back(batch) if rows is None else rows

    def _read_back(self, batch: Batch) -> Columns:
        """Read an address from Kafka, without exactly those records that its indicator skipped."""
        skipped = {(s.topic, s.partition, o) for s in batch.skipped for o in s.offsets}
        parts = list[Columns]()
        there = 0
        try:
            read = [(span, self._spans.read(span, READ_BACK_S)) for span in batch.address]
            self._check_logs(read)
            for _, fetched in read:
                values = _values(fetched, skipped)
                there += len(values)
                if values:
                    parts.append(self._codec.decode(values).records)
        except ExpiredError as error:
            raise _NoGradientError("expired", (batch,), str(error)) from error
        except OutsideError as error:  # a topic that is gone is the leader's to notice
            raise _NoGradientError("unreadable", (batch,), str(error)) from error
        where = ", ".join(map(str, batch.address))
        if there != batch.samples:  # such as compaction: they come back for nobody
            detail = f"{where} holds {there} records now, and held {batch.samples}"
            raise _NoGradientError("expired", (batch,), detail)
        found = sum(len(next(iter(part.values()))) for part in parts)
        if found != batch.samples:  # whoever claimed them runs another program, or this one does
            detail = f"{found} of the {there} records at {where} decode here; all of them did"
            raise _NoGradientError("raised", (batch,), detail)
        self._measures.read_back()
        self._watchdog.beat()  # there may be many, of which each takes seconds
        return concatenate(parts)

    def _check_logs(self, read: Sequence[tuple[Span, Fetched]]) -> None:
        """See that records are of the logs that their spans were claimed of.

        Raises:
            ExpiredError: If they are others, that came to have the same offsets.
        """
        for span, fetched in read:
            below = bisect_left(fetched.offsets, span.known)  # one above is later than the claim
            if below and 0 <= span.epoch < (epoch := fetched.epochs[below - 1]):
                raise ExpiredError(
                    f"{span} ends with a record of leader epoch {epoch}, and ended with one of"
                    f" {span.epoch}: its log lost those that were claimed"
                )
        claimed_of = {span: topic_id for span, _ in read if (topic_id := self._topic_id(span))}
        # After all of them were read, once: it takes as long as a topic has partitions.
        found = self._source.describe({span.topic for span in claimed_of})
        for span, topic_id in claimed_of.items():
            topic = found.get(span.topic)
            if topic is not None and topic.topic_id not in ("", topic_id):
                raise ExpiredError(f"{span} was of another topic {span.topic}, which was deleted")


def _blamed(compute: Compute, index: int | None) -> Sequence[Batch]:
    return compute.batches if index is None else compute.batches[index : index + 1]


def _values(fetched: Fetched, skipped: set[tuple[str, int, int]]) -> list[bytes | None]:
    if not skipped:
        return fetched.values
    place = fetched.partition
    pairs = zip(fetched.offsets, fetched.values, strict=True)
    return [value for offset, value in pairs if (*place, offset) not in skipped]
