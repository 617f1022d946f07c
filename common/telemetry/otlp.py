"""Sends spans to a collector by OpenTelemetry's protocol over HTTP.

If a collector is unavailable, only traces are lost. Spans wait in a bounded queue, a separate
thread sends them, and the code that records a span never waits. The library logs an error at each
attempt; this module reports it once. The library itself reads headers that a collector needs, such
as a key, from OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import logging
import threading
from importlib.metadata import version
from random import getrandbits
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from requests import HTTPError, Response, Session

from common.telemetry.tracing import is_sampled, trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from common.core.spans import Address
    from common.telemetry.tracing import Attribute, BatchTrace, SpanName

# A few MB: 10 s of 100 batches a second if all are traced.
QUEUE_SPANS = 4096
REQUEST_SPANS = 512
# Longest time that a span waits in the queue.
SEND_EVERY_S = 1.0
# Time for a request and its retries, after which its spans are lost.
SEND_S = 2.0
# Time for the last spans when the tracer closes: longer than SEND_S.
CLOSE_S = 3.0
_PATH = "/v1/traces"
# Prefix of our attributes, which keeps them apart from OpenTelemetry's conventions.
_PREFIX = "doll."
# Latest time of a span, in the year 2242. Nanoseconds of later times do not fit.
_LAST_S = 2.0**33


class OtlpTracer:
    """Tracer that sends spans to a collector.

    Args:
        collector: URL of the collector, with or without the path of traces.
        ratio: Share of the batches that are sampled.
        service: Name of the service.
        name: Name of this process.
        changed: Called with the reason when spans begin to be lost, and with an empty string when
            they arrive again.
    """

    def __init__(
        self, collector: str, ratio: float, service: str, name: str, changed: Callable[[str], None]
    ) -> None:
        self._ratio = ratio
        self._ids = _Ids()
        self._provider = TracerProvider(
            # Only spans of sampled traces reach the provider.
            sampler=ALWAYS_ON,
            resource=Resource.create(
                {
                    "service.name": f"doll-{service}",
                    "service.instance.id": name,
                    "service.version": version("doll"),
                }
            ),
            id_generator=self._ids,
            # A shutdown at exit would wait for half a minute.
            shutdown_on_exit=False,
        )
        endpoint = collector if collector.endswith(_PATH) else collector.rstrip("/") + _PATH
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _Sender(_exporter(endpoint), endpoint, changed),
                max_queue_size=QUEUE_SPANS,
                schedule_delay_millis=1e3 * SEND_EVERY_S,
                max_export_batch_size=REQUEST_SPANS,
            )
        )
        # The library logs "Queue full" for each span; `changed` has already got the reason.
        logging.getLogger("opentelemetry.sdk").setLevel(logging.CRITICAL)
        self._tracer = self._provider.get_tracer("doll", version("doll"))

    def trace(self, job: str, address: Address) -> BatchTrace | None:
        """Return the trace of a batch; None if the batch is not sampled."""
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
        """Put a span into the queue, or drop the span if the queue is full."""
        self._ids.root = trace if root else None
        span = self._tracer.start_span(
            name,
            Context() if root else _below(trace),
            attributes={_PREFIX + key: value for key, value in attributes.items()},
            start_time=_nanoseconds(start_s),
        )
        if error:
            span.set_status(StatusCode.ERROR, error)
        span.end(_nanoseconds(max(start_s, end_s)))

    def close(self) -> None:
        """Send the remaining spans. Spans that are not sent within `CLOSE_S` are lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _Ids(threading.local, IdGenerator):
    """Generates the ids of the span that this thread is creating.

    Attributes:
        root: Trace whose root the span is; None if the span has a parent.
    """

    root: BatchTrace | None = None

    def generate_trace_id(self) -> int:
        """Return the trace id of a root. The library takes other trace ids from the parent."""
        if self.root is None:
            raise AssertionError("a span without a parent is a root")
        return self.root.trace_id

    def generate_span_id(self) -> int:
        """Return the id of a root, or a random id."""
        return getrandbits(64) or 1 if self.root is None else self.root.root_id


class _Complaints(threading.local, logging.Filter):
    """Suppresses the exporter's log lines and keeps the first one of this thread."""

    first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for every record."""
        self.first = self.first or record.getMessage()
        return False


# One object for all senders, since a logger adds the same filter only once.
_COMPLAINTS = _Complaints()


class _Sender(SpanExporter):
    """Passes spans to the library's exporter and reports its errors in place of its log lines."""

    def __init__(
        self, exporter: OTLPSpanExporter, endpoint: str, changed: Callable[[str], None]
    ) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._changed = changed
        self._losing = False
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_COMPLAINTS)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Runs in the thread of the queue."""
        _COMPLAINTS.first = ""
        result = self._exporter.export(spans)
        losing = result is not SpanExportResult.SUCCESS
        if losing != self._losing:
            self._losing = losing
            complaint = _COMPLAINTS.first or "the collector accepts no spans"
            self._changed(f"{self._endpoint}: {complaint}" if losing else "")
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # OpenTelemetry's


def _exporter(endpoint: str) -> OTLPSpanExporter:
    session = Session()
    session.hooks["response"].append(_refuse_redirect)
    return OTLPSpanExporter(endpoint, timeout=SEND_S, session=session)


def _refuse_redirect(response: Response, *_: object, **__: object) -> None:
    """Turn a redirect into an error, since the library would take the spans for delivered.

    Raises:
        HTTPError: If the response is a redirect. The message has its target.
    """
    if 300 <= response.status_code < 400:
        place = response.headers.get("Location", "")
        raise HTTPError(
            f"the collector redirects to {place!r} (status {response.status_code}); set"
            " DOLL_TRACES to that URL"
        )


def _below(trace: BatchTrace) -> Context:
    """Return a context below a trace's root, which another process may record later."""
    root = SpanContext(
        trace.trace_id, trace.root_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return set_span_in_context(NonRecordingSpan(root), Context())


def _nanoseconds(time_s: float) -> int:
    # A float of seconds since 1970 is exact only to about a microsecond.
    return round(min(max(0.0, time_s), _LAST_S) * 1e6) * 1000
