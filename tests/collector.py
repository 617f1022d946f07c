"""Trace collector for tests, which receives OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from typing import Self

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class Received:
    """A span as it was received."""

    service: str
    instance: str
    trace_id: int
    span_id: int
    parent_id: int  # 0: none
    name: str
    start_s: float
    end_s: float
    error: str
    attributes: dict[str, object]


class Collector:
    """Context manager that listens on a free port."""

    def __init__(self) -> None:
        self.spans = list[Received]()
        self.requests = 0
        # Status of the collector's answers. Any status but 200 rejects the data.
        self.status = 200
        self.answering = threading.Event()  # cleared: requests wait
        self.answering.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                collector.answering.wait(30.0)
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                if collector.status // 100 == 3:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- its name
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.answering.set()
        self._server.shutdown()
        self._server.server_close()


def _spans(request: ExportTraceServiceRequest) -> list[Received]:
    found = list[Received]()
    for resource in request.resource_spans:
        about = {each.key: _value(each.value) for each in resource.resource.attributes}
        found += (
            Received(
                service=str(about["service.name"]),
                instance=str(about["service.instance.id"]),
                trace_id=int.from_bytes(span.trace_id),
                span_id=int.from_bytes(span.span_id),
                parent_id=int.from_bytes(span.parent_span_id),
                name=span.name,
                start_s=span.start_time_unix_nano / 10**9,
                end_s=span.end_time_unix_nano / 10**9,
                error=span.status.message,
                attributes={each.key: _value(each.value) for each in span.attributes},
            )
            for scope in resource.scope_spans
            for span in scope.spans
        )
    return found


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
