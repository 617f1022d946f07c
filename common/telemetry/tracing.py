"""Traces: one for each batch, from its first record in Kafka to the update that it is in.

No message carries a trace. Its ids are a hash of what the batch is, the job and the address, and so
is whether it is sampled: the worker that reads a batch, the one that computes it again and the
leader that applies it speak of one trace without having told each other.

    batch                    its first record's arrival in Kafka, until its update is published
      batch.read             that arrival, until it is announced                         (worker)
      batch.announce         indicator sent, until Kafka has it                          (worker)
      batch.wait             accepted, until it is in a trigger                     (coordinator)
      batch.gradient         an order heard, until its gradient is sent; one each time   (worker)
      batch.apply            the last gradient of its round, until the new model is published

All spans are told after the fact. Those of a batch that never came into an update have no root.
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

_TRACE_BYTES, _SPAN_BYTES = 16, 8  # as W3C's Trace Context has them
_LOW = (1 << 64) - 1


class BatchTrace(NamedTuple):
    """The ids of one batch's trace; never 0, which stands for none."""

    trace_id: int  # 128 bits
    root_id: int  # 64 bits, of the span `batch`


class Tracer(Protocol):
    """Where a process tells spans; never waits, never raises, may be shared between threads."""

    def trace(self, job: str, address: Address) -> BatchTrace | None:
        """The trace of a batch, None where it is not sampled: then there is nothing to tell."""

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
        """Tell what has happened to a batch.

        Args:
            trace: The batch's.
            name: What it was.
            start_s: Since 1970.
            end_s: Since 1970; clocks of machines differ, so it may lie before the start.
            root: Whether all others are parts of it.
            error: Why it came to nothing, empty where it did not.
            attributes: What else is worth knowing.
        """

    def close(self) -> None:
        """Send what is left, for a short while."""


class NoTracer:
    """Samples nothing, at no cost: what a process has that no collector was named to."""

    def trace(self, job: str, address: Address) -> BatchTrace | None:  # noqa: ARG002 -- a port's
        """None."""
        return None

    def span(self, *_: object, **__: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def trace_of(job: str, address: Address) -> BatchTrace:
    """Name the trace of a batch: the same in every process, for ever."""
    # As versions do that know of no generations, where there is only the first.
    spans = [span[: 5 if span.generation else 4] for span in address]
    content = msgspec.json.encode([job, spans])
    digest = hashlib.blake2b(content, digest_size=_TRACE_BYTES + _SPAN_BYTES).digest()
    return BatchTrace(
        int.from_bytes(digest[:_TRACE_BYTES]) or 1, int.from_bytes(digest[_TRACE_BYTES:]) or 1
    )


def is_sampled(trace: BatchTrace, ratio: float) -> bool:
    """Whether a trace is among the share that is told; those of a smaller share are in a larger.

    By the low 64 bits of its id, as OpenTelemetry's `TraceIdRatioBased` decides.

    Args:
        trace: Which.
        ratio: Above 0 to 1.
    """
    return trace.trace_id & _LOW < round(ratio * (_LOW + 1))
