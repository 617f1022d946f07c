"""Computes the gradient of an order, or the reason for its failure.

An order gets one gradient over all of its batches. A batch that is not in memory is read back from
Kafka by its address, and must have exactly its samples.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import UNSET, UnsetType

from common.core.messages import MOST_TRACEBACK, Failed, reached_bits
from common.core.vectors import squared_norm
from common.data.fields import Columns, concatenate
from common.errors import ExpiredError, OutsideError, UnavailableError, UserError
from common.learning.errors import (
    ErrorOrigin,
    GpuLostError,
    NoMemoryError,
    NotFiniteError,
    TaskError,
    WrongTaskError,
    enough_memory,
    one_line,
)
from common.learning.parameters import square_of
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
    from common.learning.gradients import GradientComputer, GradientSum
    from common.redis.port import Board
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.serving import Watchdog
    from common.telemetry.metrics.worker import WorkerMetrics
    from common.telemetry.outages import Outage
    from services.worker.effects.schemas import SchemaFinder
    from services.worker.rows import BatchCache
    from services.worker.traces import BatchTraces

# Longest read of one span. The coordinator's deadline reassigns the batch much earlier.
READ_BACK_S = 10.0


class Shell(NamedTuple):
    """The parts of the process that a gradient thread uses."""

    board: Board
    # Bound to the job and the worker.
    logger: EventLogger
    measures: WorkerMetrics
    traces: BatchTraces
    # Watchdog of the thread.
    watchdog: Watchdog
    # Waits this many seconds, or less if the job ends. Used while Redis is unavailable.
    wait: Callable[[float], object]
    # Called for each received trigger, with its leader's epoch and its counts of waiting batches.
    round_began: Callable[[int, Unsettled | None], None]
    # Returns the stream of the leader's triggers.
    stream: Callable[[], TriggerStream]
    # Outage of Redis.
    outage: Outage
    # Token of this process.
    life: str = ""

    def push(self, reply: Reply, to: str) -> bool:
        """Send a reply; return True if Redis accepted it. The leader asks again if it is lost."""
        try:
            self.board.push_reply(reply, to)
        except UnavailableError as error:
            self.outage.met(error)
            return False
        return True


class OrderGradient(NamedTuple):
    """The gradient for an order.

    Attributes:
        found: The gradient in its shortest form, or on the model's device.
        square: Squared norm of the gradient, if the order asks for it.
    """

    found: GradientSum
    square: float | UnsetType

    def fields(self, compute: Compute) -> dict[str, Any]:
        """Return the fields of the reply to an order that do not depend on where the vector is."""
        found = self.found
        return {
            "model": compute.model,
            "batches": tuple(batch.offset for batch in compute.batches),
            "samples": found.samples,
            "loss_sum": found.loss_sum,
            "metric_sums": found.metric_sums,
            "seconds": found.seconds,
            "local_rate": compute.local_rate or UNSET,
            "cut": found.cut or UNSET,
            "square": self.square,
            "scores": found.scores or UNSET,
            "reached": reached_bits(found.reached),
        }


class NoGradientError(Exception):
    """An order cannot be carried out; names the batches and the reason."""

    def __init__(
        self, reason: FailedReason, batches: Sequence[Batch], detail: str, traceback: str = ""
    ) -> None:
        super().__init__(detail)
        self.reason: FailedReason = reason
        self.batches = tuple(batch.offset for batch in batches)
        self.traceback = traceback[-MOST_TRACEBACK:]


class OrderComputer:
    """Computes gradients of orders with the model's current weights.

    Args:
        worker: Name of this worker.
        computer: The model on its device.
        codec: Decodes records that are read back.
        schemas: Finds the schemas of those records. None if they need no schemas.
        cache: Batches in memory.
        log: Reads back the other batches.
        logger: Bound to the job and the worker.
        measures: Metrics of the job.
        watchdog: Watchdog of the computing thread.
        topic_id: Returns the id of the topic that a span was claimed from; see `Stream`.
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
        # Task errors that were logged.
        self._logged = set[ErrorOrigin]()

    def close(self) -> None:
        """Close the reader."""
        self._spans.close()

    def answer(self, compute: Compute, load: Callable[[], None]) -> OrderGradient | Failed:
        """Compute an order's gradient, or return the reason for its failure.

        Args:
            compute: The order.
            load: Loads the model's weights once the records are available. May raise
                `NoGradientError`.
        """
        try:
            return self._answer(compute, load)
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

    def _answer(self, compute: Compute, load: Callable[[], None]) -> OrderGradient:
        try:
            with enough_memory("the records and the model"):
                rows = [self._rows(batch) for batch in compute.batches]
                load()
                return self._gradient(compute, rows)
        except NoMemoryError as error:
            raise NoGradientError("memory", compute.batches, str(error)) from error

    def _is_new(self, origin: ErrorOrigin) -> bool:
        """Return True if a task error was not logged yet; a backlog repeats it many times."""
        if origin in self._logged:
            return False
        self._logged.add(origin)
        return True

    def _gradient(self, compute: Compute, rows: list[Columns]) -> OrderGradient:
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
        except torch.AcceleratorError as error:
            offsets = tuple(batch.offset for batch in compute.batches)
            raise GpuLostError(one_line(error), offsets) from error
        except UserError as error:
            # Otherwise the task's module replaces its buffers, which is an error of the task.
            reason = "memory" if isinstance(error, NoMemoryError) else "task"
            raise NoGradientError(reason, compute.batches, str(error)) from error
        finally:
            self._measures.gradients_cut.inc(self.computer.take_cuts())
        self._measures.pass_records.set(self.computer.largest_pass)
        self._measures.stage_s.labels("gradient").observe(self.times.add("gradient", started))
        numbers, count = result.numbers, self.computer.model.parameter_count
        square: float | UnsetType = UNSET
        if isinstance(numbers, torch.Tensor):
            if compute.squared:
                square = square_of(numbers[:count])
            return OrderGradient(result, square)
        numbers = smallest(numbers)
        if compute.squared:
            square = squared_norm(numbers, count)
        return OrderGradient(replace(result, numbers=numbers), square)

    def _rows(self, batch: Batch) -> Columns:
        rows = self._cache.get(batch.address)
        return self._read_back(batch) if rows is None else rows

    def _read_back(self, batch: Batch) -> Columns:
        """Read a batch back from Kafka, without the records that its claim skipped."""
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
        # A deleted topic is treated like an outage here; the leader notices the deletion.
        except OutsideError as error:
            raise NoGradientError("unreadable", (batch,), str(error)) from error
        where = ", ".join(map(str, batch.address))
        # Compaction may have removed records. No worker can read them again.
        if there != batch.samples:
            detail = (
                f"{where} contains {there} records now, but contained {batch.samples} when it was"
                " claimed"
            )
            raise NoGradientError("expired", (batch,), detail)
        found = sum(len(next(iter(part.values()))) for part in parts)
        # This program and the one that claimed the batch decode differently.
        if found != batch.samples:
            detail = (
                f"only {found} of the {there} records at {where} can be decoded here, but all of"
                " them could when they were claimed"
            )
            raise NoGradientError("raised", (batch,), detail)
        self._measures.batches_read_back.inc()
        # Reading many batches back could exceed the watchdog's limit.
        self._watchdog.beat()
        return concatenate(parts)

    def _check_logs(self, read: Sequence[tuple[Span, Fetched]]) -> None:
        """Check that records come from the logs that their spans were claimed from.

        Raises:
            ExpiredError: If they are other records, which have the same offsets now.
        """
        for span, fetched in read:
            # A record at or above `known` is later than the claim.
            below = bisect_left(fetched.offsets, span.known)
            if below and 0 <= span.epoch < (epoch := fetched.epochs[below - 1]):
                raise ExpiredError(
                    f"{span} ends with a record of leader epoch {epoch}, but ended with one of"
                    f" {span.epoch} when it was claimed; Kafka lost the claimed records"
                )
        claimed_of = {span: topic_id for span, _ in read if (topic_id := self._topic_id(span))}
        # Topic ids are checked once, after all reads: the request is slow for topics with many
        # partitions.
        found = self._source.describe({span.topic for span in claimed_of})
        for span, topic_id in claimed_of.items():
            topic = found.get(span.topic)
            if topic is not None and topic.topic_id not in ("", topic_id):
                raise ExpiredError(
                    f"{span} belongs to an earlier topic {span.topic}, which was deleted"
                )


def _blamed(compute: Compute, index: int | None) -> Sequence[Batch]:
    return compute.batches if index is None else compute.batches[index : index + 1]


def _values(fetched: Fetched, skipped: set[tuple[str, int, int]]) -> list[bytes | None]:
    if not skipped:
        return fetched.values
    place = fetched.partition
    pairs = zip(fetched.offsets, fetched.values, strict=True)
    return [value for offset, value in pairs if (*place, offset) not in skipped]
