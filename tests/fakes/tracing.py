"""Tracer in memory that shows tests its spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from common.telemetry.tracing import Attribute, BatchTrace, SpanName, is_sampled, trace_of

if TYPE_CHECKING:
    from common.core.spans import Address


class RecordedSpan(NamedTuple):
    """A span as the code under test recorded it."""

    trace: BatchTrace
    name: SpanName
    start_s: float
    end_s: float
    root: bool
    error: str
    attributes: dict[str, Attribute]


class MemoryTracer:
    """Keeps all spans.

    Args:
        ratio: Share of the batches that are sampled.
    """

    def __init__(self, ratio: float = 1.0) -> None:
        self.spans = list[RecordedSpan]()
        self.closed = False
        self._ratio = ratio

    def trace(self, job: str, address: Address) -> BatchTrace | None:
        """Return the trace of a batch. None if the batch is not sampled."""
        trace = trace_of(job, address)
        return trace if is_sampled(trace, self._ratio) else None

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
        """Record a span."""
        self.spans.append(RecordedSpan(trace, name, start_s, end_s, root, error, attributes))

    def close(self) -> None:
        """Record that the tracer was closed."""
        self.closed = True

    def named(self, name: SpanName) -> list[RecordedSpan]:
        """Return the recorded spans of this name."""
        return [span for span in self.spans if span.name == name]
