"""Spans to a collector, by OpenTelemetry's protocol over HTTP.

A collector that is away costs its traces and nothing else: spans wait in a queue that has an end, a
thread apart sends them, whoever tells them never waits, and what the library complains of at each
attempt is told once. Headers that a collector asks for, a key say, come from the variable that the
library reads itself: OTEL_EXPORTER_OTLP_HEADERS.
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

QUEUE_SPANS = 4096  # a few MB: 10 s of 100 batches a second, all of them traced
REQUEST_SPANS = 512
SEND_EVERY_S = 1.0  # how old a span is when the collector sees it
SEND_S = 2.0  # for one request and its repetitions; then its spans are lost
CLOSE_S = 3.0  # for the last spans: longer than one request
_PATH = "/v1/traces"
_PREFIX = "doll."  # of our attributes, beside those of OpenTelemetry's conventions
_LAST_S = 2.0**33  # in the year 2242: what lies beyond is no time, and its nanoseconds do not fit


class OtlpTracer:
    """Tells spans to a collector.

    Args:
        collector: Its URL, with the path of traces or without.
        ratio: Share of the batches that are sampled.
        service: Which of ours tells.
        name: Of this process.
        changed: Is told why spans are lost when that begins, and an empty word when it is over.
    """

    def __init__(
        self, collector: str, ratio: float, service: str, name: str, changed: Callable[[str], None]
    ) -> None:
        self._ratio = ratio
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # a span that comes here is of a trace that is sampled
            resource=Resource.create(
                {
                    "service.name": f"doll-{service}",
                    "service.instance.id": name,
                    "service.version": version("doll"),
                }
            ),
            id_generator=self._ids,
            shutdown_on_exit=False,  # that waits for half a minute
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
        # "Queue full", for each span: `changed` was told why nothing is sent.
        logging.getLogger("opentelemetry.sdk").setLevel(logging.CRITICAL)
        self._tracer = self._provider.get_tracer("doll", version("doll"))

    def trace(self, job: str, address: Address) -> BatchTrace | None:
        """The trace of a batch, None where it is not sampled."""
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
        """Put a span into the queue; the newest is lost where that is full."""
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
        """Send what is left; what has not gone by `CLOSE_S` is lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _Ids(threading.local, IdGenerator):
    """Gives the span that is being made in this thread its id."""

    root: BatchTrace | None = None  # whose root it is

    def generate_trace_id(self) -> int:
        """Asked for a root alone: all others have a parent."""
        if self.root is None:
            raise AssertionError("a span without a parent is a root")
        return self.root.trace_id

    def generate_span_id(self) -> int:
        """Draw one, for all but a root."""
        return getrandbits(64) or 1 if self.root is None else self.root.root_id


class _Complaints(threading.local, logging.Filter):
    """Keeps what the exporter says from being logged, and its first word in this thread."""

    first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let nothing through."""
        self.first = self.first or record.getMessage()
        return False


_COMPLAINTS = _Complaints()  # a logger takes the same filter only once


class _Sender(SpanExporter):
    """Hands spans to the library's exporter, and tells of its trouble in its stead."""

    def __init__(
        self, exporter: OTLPSpanExporter, endpoint: str, changed: Callable[[str], None]
    ) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._changed = changed
        self._losing = False
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_COMPLAINTS)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send; in the thread of the queue."""
        _COMPLAINTS.first = ""
        result = self._exporter.export(spans)
        losing = result is not SpanExportResult.SUCCESS
        if losing != self._losing:
            self._losing = losing
            complaint = _COMPLAINTS.first or "takes no spans"
            self._changed(f"{self._endpoint}: {complaint}" if losing else "")
        return result

    def shutdown(self) -> None:
        """End the exporter."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the library's


def _exporter(endpoint: str) -> OTLPSpanExporter:
    session = Session()
    session.hooks["response"].append(_refuse_redirect)
    return OTLPSpanExporter(endpoint, timeout=SEND_S, session=session)


def _refuse_redirect(response: Response, *_: object, **__: object) -> None:
    """The library does not go on to where spans are sent elsewhere, and takes them for delivered.

    Raises:
        HTTPError: Where to, which the library tells as any other trouble.
    """
    if 300 <= response.status_code < 400:
        place = response.headers.get("Location", "")
        raise HTTPError(f"status {response.status_code}: name {place!r} in DOLL_TRACES instead")


def _below(trace: BatchTrace) -> Context:
    """Below a trace's root, which another process may tell, and only later."""
    root = SpanContext(
        trace.trace_id, trace.root_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return set_span_in_context(NonRecordingSpan(root), Context())


def _nanoseconds(time_s: float) -> int:
    return round(min(max(0.0, time_s), _LAST_S) * 1e6) * 1000  # a float knows no less than that
