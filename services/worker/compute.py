"""The gradient of an order, and of what it cannot be made, the reason.

One gradient over all batches of an order. A batch that is not in memory is read back from Kafka by
its address and must give exactly its samples.
"""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET, UnsetType

from common.core.messages import MOST_TRACEBACK, Failed, Gradient
from common.core.vectors import squared_norm
from common.data.fields import Columns, concatenate
from common.errors import ExpiredError, OutsideError, UnavailableError, UserError
from common.learning.errors import ErrorOrigin, NotFiniteError, TaskError, WrongTaskError
from common.telemetry.logging import StageTimes
from common.wire.vectors import smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.core.messages import (
        Batch,
        FailedReason,
        Reply,
        TriggerStream,
        Unsettled,
        WorkerId,
    )
    from common.core.order_queue import Compute
    from common.core.spans import Span
    from common.data.codecs import Codec
    from common.kafka.port import Fetched, Log
    from common.learning.gradients import GradientComputer
    from common.redis.port import Board
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.serving import Watchdog
    from common.telemetry.metrics.worker import WorkerMetrics
    from common.telemetry.outages import Outage
    from services.worker.effects.schemas import SchemaFinder
    from services.worker.rows import BatchCache
    from services.worker.traces import BatchTraces

READ_BACK_S = 10.0  # for one span; the coordinator's deadline has long given it to others by then


class Shell(NamedTuple):
    """What a gradient thread is surrounded by."""

    board: Board  # the job's
    logger: EventLogger  # bound to job and worker
    measures: WorkerMetrics  # of the job
    traces: BatchTraces  # of its batches
    watchdog: Watchdog  # of the thread
    # Waits so many seconds, less if the job ends; for when the board is unavailable.
    wait: Callable[[float], object]
    # Told when a trigger is heard: of which leader, and what it says of room.
    round_began: Callable[[int, Unsettled | None], None]
    stream: Callable[[], TriggerStream]  # says where the leader's triggers are
    outage: Outage  # of the board

    def push(self, reply: Reply, to: str) -> bool:
        """Send a reply, and return True if the board took it; what gets lost is asked for again."""
        try:
            self.board.push_reply(reply, to)
        except UnavailableError as error:
            self.outage.met(error)
            return False
        return True


class NoGradientError(Exception):
    """An order cannot be carried out: which batches, and why."""

    def __init__(
        self, reason: FailedReason, batches: Sequence[Batch], detail: str, traceback: str = ""
    ) -> None:
        super().__init__(detail)
        self.reason: FailedReason = reason
        self.batches = tuple(batch.offset for batch in batches)
        self.traceback = traceback[-MOST_TRACEBACK:]


class OrderComputer:
    """Computes gradients of orders, at the weights that its model has.

    Args:
        worker: This worker's name.
        computer: The model on its device.
        codec: Decodes records that are read back.
        schemas: Finds the schemas of those; None: they need none.
        cache: Batches in memory.
        log: Reads the others back.
        logger: Bound to job and worker.
        measures: Of the job.
        watchdog: Of the thread that computes.
        topic_id: Says which topic a span was claimed of; see `Stream`.
    """

    def __init__(  # noqa: PLR0913 -- the parts of the shell, each used once
        self,
        worker: WorkerId,
        computer: GradientComputer,
        *,
        codec: Codec,
        schemas: SchemaFinder | None = None,
        cache: BatchCache,
        log: Log,
        logger: EventLogger,
        measures: WorkerMetrics,
        watchdog: Watchdog,
        topic_id: Callable[[Span], str],
    ) -> None:
        self.computer = computer
        self._id = worker
        self._codec = codec
        self._schemas = schemas
        self._cache = cache
        self._source = log
        self._spans = log.spans()
        self._log = logger
        self._measures = measures
        self._watchdog = watchdog
        self.times = StageTimes()
        self._topic_id = topic_id
        self._logged = set[ErrorOrigin]()  # mistakes of the task that were logged

    def close(self) -> None:
        """Let go of the reader."""
        self._spans.close()

    def answer(
        self, compute: Compute, load: Callable[[], None], *, sparse: bool
    ) -> Gradient | Failed:
        """Compute an order's gradient, or say why there is none.

        Args:
            compute: The order.
            load: Gives the model its weights, once the records are there; may raise
                `NoGradientError`.
            sparse: Whether its numbers may leave zeros out.
        """
        try:
            rows = [self._rows(batch) for batch in compute.batches]
            load()
            return self._gradient(compute, rows, sparse=sparse)
        except NoGradientError as error:
            self._measures.gradients_failed.labels(error.reason).inc()
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

    def _is_new(self, origin: ErrorOrigin) -> bool:
        """Whether this mistake of the task was not told yet: a backlog repeats it by thousands."""
        if origin in self._logged:
            return False
        self._logged.add(origin)
        return True

    def _gradient(self, compute: Compute, rows: list[Columns], *, sparse: bool) -> Gradient:
        started = perf_counter()
        try:
            result = self.computer.compute(rows, compute.local_rate)
        except NotFiniteError as error:
            raise NoGradientError(
                "not_finite", _blamed(compute, error.batch_index), str(error)
            ) from error
        except TaskError as error:
            blamed = _blamed(compute, error.batch_index)
            reason: FailedReason = "task" if isinstance(error, WrongTaskError) else "raised"
            raise NoGradientError(reason, blamed, error.summary, error.traceback) from error
        except UserError as error:  # the module replaces its buffers
            raise NoGradientError("task", compute.batches, str(error)) from error
        self._measures.stage_s.labels("gradient").observe(self.times.add("gradient", started))
        vector = smallest(result.sparse) if sparse else result.vector
        square: float | UnsetType = UNSET
        if compute.squared:
            square = squared_norm(vector, self.computer.model.parameter_count)
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
                    if self._schemas is not None:
                        self._schemas.find(values)
                    parts.append(self._codec.decode(values).records)
        except ExpiredError as error:
            raise NoGradientError("expired", (batch,), str(error)) from error
        except OutsideError as error:  # a topic that is gone is the leader's to notice
            raise NoGradientError("unreadable", (batch,), str(error)) from error
        where = ", ".join(map(str, batch.address))
        if there != batch.samples:  # such as compaction: they come back for nobody
            detail = f"{where} holds {there} records now, and held {batch.samples}"
            raise NoGradientError("expired", (batch,), detail)
        found = sum(len(next(iter(part.values()))) for part in parts)
        if found != batch.samples:  # whoever claimed them runs another program, or this one does
            detail = f"{found} of the {there} records at {where} decode here; all of them did"
            raise NoGradientError("raised", (batch,), detail)
        self._measures.batches_read_back.inc()
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
