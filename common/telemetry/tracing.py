"""Traces: one per batch, from the arrival of its first record in Kafka to its update.

No message carries trace ids. They are a hash of the job and the batch's address, and the hash also
decides if the batch is sampled. So the worker that reads a batch, a worker that computes it again
and the leader that applies it contribute to the same trace without any communication.

    span               from                              to                          by
    batch              first record arrives in Kafka     its update is published     coordinator
      batch.read       first record arrives in Kafka     the claim is sent           worker
      batch.announce   the claim is sent                 Kafka has the claim         worker
      batch.wait       the claim is accepted             the batch is in a trigger   coordinator
      batch.gradient   a worker receives an order        its gradient is sent        worker
      batch.apply      last gradient of the round        the model is published      coordinator

A batch has a `batch.gradient` for each order. Spans are recorded after they end. If a batch is
never in an update, its spans have no root.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from common.core.spans import Address

SpanName: TypeAlias = Literal[
    "batch", "batch.read", "batch.announce", "batch.wait", "batch.gradient", "batch.apply"
]
Attribute: TypeAlias = str | int | float | bool | tuple[str, ...]

# Sizes of ids in W3C Trace Context.
_TRACE_BYTES, _SPAN_BYTES = 16, 8
_LOW = (1 << 64) - 1


class BatchTrace(NamedTuple):
    """Ids of one batch's trace. They are never 0, which means no id.

    Attributes:
        trace_id: 128 bits.
        root_id: 64 bits, id of the span `batch`.
    """

    trace_id: int
    root_id: int


class Tracer(Protocol):
    """Records the spans of a process. Never waits, never raises; threads may share it."""

    def trace(self, job: str, address: Address) -> BatchTrace | None:
        """Return the trace of a batch; None if the batch is not sampled and needs no spans."""

    def span(
        self,
        trace: BatchTrace,
        name: SpanName,
        start_s: float,
        end_s: float,
        *,
        root: bool = False,
        error: str = "",
        **attributes: Attribute,
    ) -> None:
        """Record a span of a batch.

        Args:
            trace: Trace of the batch.
            name: Name of the span.
            start_s: Start in seconds since 1970.
            end_s: End in seconds since 1970. It may be before the start, since clocks differ.
            root: True if this is the root of the trace.
            error: Reason why the step failed; empty if it did not.
            attributes: Further attributes.
        """

    def close(self) -> None:
        """Send the remaining spans, for a limited time."""


class NoTracer:
    """Tracer without a collector: samples no batch and costs nothing."""

    def trace(self, job: str, address: Address) -> BatchTrace | None:  # noqa: ARG002 -- of the port
        """Return None: no batch is sampled."""
        return None

    def span(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def trace_of(job: str, address: Address) -> BatchTrace:
    """Return the ids of a batch's trace, which are the same in every process at any time."""
    # A span of generation 0 is hashed without its generation.
    spans = [span[: 5 if span.generation else 4] for span in address]
    content = msgspec.json.encode([job, spans])
    digest = hashlib.blake2b(content, digest_size=_TRACE_BYTES + _SPAN_BYTES).digest()
    return BatchTrace(
        int.from_bytes(digest[:_TRACE_BYTES]) or 1, int.from_bytes(digest[_TRACE_BYTES:]) or 1
    )


def is_sampled(trace: BatchTrace, ratio: float) -> bool:
    """True if a trace is sampled at a ratio. It is then sampled at every larger ratio, too.

    The low 64 bits of the id decide, as in OpenTelemetry's `TraceIdRatioBased`.

    Args:
        trace: Ids of the trace.
        ratio: Share of traces that are sampled, above 0 and at most 1.
    """
    return trace.trace_id & _LOW < round(ratio * (_LOW + 1))
