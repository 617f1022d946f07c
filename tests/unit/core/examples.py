"""Partitions, batches and gradients that many tests of the core share."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from common.core.messages import Batch, BatchReady, Gradient, MetricSum, WorkerId
from common.core.spans import Partition, Span, address_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.messages import Assignment, ModelId

Kind = TypeVar("Kind")

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
P, Q = Partition("s", 0), Partition("s", 1)
FIRST = {P: 0, Q: 0}
# Samples of every batch here, unless a test sets them.
SAMPLES = 10


def span(partition: Partition, start: int, end: int) -> Span:
    """Return a span of a partition whose last offset holds a record."""
    return Span(*partition, start, end, known=end)


def ready(worker: WorkerId, *spans: Span, samples: int = SAMPLES) -> BatchReady:
    """Return a claim on these spans."""
    return BatchReady(worker, address_of(spans), samples)


def batch(offset: int, worker: WorkerId = A) -> Batch:
    """Return the accepted batch with this control offset; each has its own address."""
    return Batch(offset, worker, (span(P, offset * SAMPLES, (offset + 1) * SAMPLES),), SAMPLES)


def gradient(worker: WorkerId, model: ModelId, batches: Iterable[Batch]) -> Gradient:
    """Return the gradient of an order for these batches: loss 2 and metric 1 per sample."""
    batches = tuple(batches)
    samples = sum(batch.samples for batch in batches)
    offsets = tuple(batch.offset for batch in batches)
    sums = {"right": MetricSum(1.0 * samples, samples)} if samples else {}
    return Gradient(worker, model, offsets, samples, 2.0 * samples, sums, 0.1)


def answer(order: Assignment, model: ModelId) -> Gradient:
    """Return the gradient that the worker of an order sends."""
    return gradient(order.worker, model, order.batches)


def of_kind(commands: Iterable[object], kind: type[Kind]) -> list[Kind]:
    """Return the commands of one kind, in order."""
    return [command for command in commands if isinstance(command, kind)]


def the(commands: Iterable[object], kind: type[Kind]) -> Kind:
    """Return the only command of a kind; fail if there is none or more than one."""
    (command,) = of_kind(commands, kind)
    return command
