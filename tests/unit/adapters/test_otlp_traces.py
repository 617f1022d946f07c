"""Spans are sent to a collector that accepts them, refuses them, is silent or does not run."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Span
from common.telemetry import otlp as otlp_traces
from common.telemetry.otlp import CLOSE_S, OtlpTracer
from tests.collector import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.telemetry.tracing import BatchTrace

JOB = "digits"
AT_S = 1_700_000_000.25
PATIENCE_S = 120.0
# No service uses this port any more.
NOBODY = "http://127.0.0.1:9"


def until(condition: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.005)


def address(number: int = 0) -> tuple[Span, ...]:
    return (Span("clinic-a", 0, number, number + 1),)


@contextmanager
def tracing(collector: str, ratio: float = 1.0) -> Iterator[tuple[OtlpTracer, list[str]]]:
    """A tracer, and the errors that it reported."""
    errors = list[str]()
    tracer = OtlpTracer(collector, ratio, "worker", "w1", errors.append)
    try:
        yield tracer, errors
    finally:
        tracer.close()


def traced(tracer: OtlpTracer, number: int = 0) -> BatchTrace:
    trace = tracer.trace(JOB, address(number))
    assert trace is not None
    return trace


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_spans_arrive_with_their_ids_times_and_attributes(path: str) -> None:
    with Collector() as collector, tracing(collector.url + path) as (tracer, errors):
        trace = traced(tracer)
        tracer.span(trace, "batch.wait", AT_S + 1.0, AT_S + 2.0, worker="w1", version=3)
        tracer.span(trace, "batch", AT_S, AT_S + 3.0, root=True, streams=("a", "b"), ready=True)
        tracer.close()
        wait, root = collector.spans
        assert (root.name, root.span_id, root.parent_id) == ("batch", trace.root_id, 0)
        assert (wait.name, wait.parent_id) == ("batch.wait", trace.root_id)
        assert wait.span_id not in (0, trace.root_id)
        assert {span.trace_id for span in collector.spans} == {trace.trace_id}
        assert (root.start_s, root.end_s) == (AT_S, AT_S + 3.0)
        assert wait.attributes == {"doll.worker": "w1", "doll.version": 3}
        assert root.attributes == {"doll.streams": ["a", "b"], "doll.ready": True}
        assert {(span.service, span.instance) for span in collector.spans} == {
            ("doll-worker", "w1")
        }
        assert (wait.error, errors) == ("", [])


def test_failed_span_has_its_error() -> None:
    with Collector() as collector, tracing(collector.url) as (tracer, _):
        tracer.span(traced(tracer), "batch.gradient", AT_S, AT_S + 1.0, error="not_finite")
        tracer.close()
        assert collector.spans[0].error == "not_finite"


@pytest.mark.parametrize("start_s", [-1.0, 1e300, float("inf"), float("nan"), AT_S + 9.0])
def test_span_with_invalid_time_does_not_lose_other_spans(start_s: float) -> None:
    with Collector() as collector, tracing(collector.url) as (tracer, errors):
        tracer.span(traced(tracer), "batch.read", start_s, AT_S)
        tracer.span(traced(tracer), "batch.wait", AT_S, AT_S)
        tracer.close()
        assert [span.name for span in collector.spans] == ["batch.read", "batch.wait"]
        assert collector.spans[0].start_s <= collector.spans[0].end_s
        assert errors == []


def test_unsampled_batches_have_no_trace() -> None:
    with tracing(NOBODY, 0.01) as (tracer, _):
        sampled = [tracer.trace(JOB, address(number)) is not None for number in range(5_000)]
        assert sum(sampled) == pytest.approx(50, abs=30)


def test_root_spans_of_threads_are_not_mixed_up() -> None:
    with Collector() as collector, tracing(collector.url) as (tracer, _):

        def send(first: int) -> None:
            for number in range(first, first + 50):
                trace = traced(tracer, number)
                tracer.span(trace, "batch", AT_S, AT_S, root=True, number=number)
                tracer.span(trace, "batch.wait", AT_S, AT_S, number=number)

        threads = [threading.Thread(target=send, args=(first,)) for first in (0, 100, 200, 300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tracer.close()
        assert len(collector.spans) == 400
        for span in collector.spans:
            number = span.attributes["doll.number"]
            assert isinstance(number, int)
            trace = traced(tracer, number)
            assert span.trace_id == trace.trace_id
            assert (span.span_id == trace.root_id) == (span.name == "batch")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_spans_of_redirected_request_are_lost_and_logged(status: int) -> None:
    with Collector() as collector, tracing(collector.url) as (tracer, errors):
        collector.status = status
        tracer.span(traced(tracer), "batch.wait", AT_S, AT_S)
        tracer.close()
        (error,) = errors
        assert f"redirects to '/elsewhere' (status {status})" in error
        assert collector.requests == 1


def test_unavailable_collector_is_reported_once_and_again_on_recovery(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # collector   refuses ───────────────│ takes
    # spans       a  b  (lost)             c
    # told        trouble                  ""
    monkeypatch.setattr(otlp_traces, "SEND_EVERY_S", 0.01)
    caplog.set_level(logging.DEBUG)
    with Collector() as collector, tracing(collector.url) as (tracer, errors):
        collector.status = 400
        for number in range(2):
            before = collector.requests
            tracer.span(traced(tracer, number), "batch.wait", AT_S, AT_S)
            until(lambda least=before: collector.requests > least, "the span was sent")  # type: ignore[misc]
        until(lambda: len(errors) == 1, "the failure is reported")
        assert "Bad Request" in errors[0]
        assert collector.url in errors[0]
        collector.status = 200
        tracer.span(traced(tracer, 3), "batch.wait", AT_S, AT_S)
        until(lambda: len(errors) == 2, "the recovery is reported")
        assert errors[1] == ""
        assert len(collector.spans) == 1
    said = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert said == []


def test_spans_above_the_queue_size_are_dropped_silently_without_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp_traces, "QUEUE_SPANS", 64)
    monkeypatch.setattr(otlp_traces, "REQUEST_SPANS", 16)
    monkeypatch.setattr(otlp_traces, "CLOSE_S", 0.1)
    with Collector() as collector, tracing(collector.url) as (tracer, _):
        # The collector accepts the request, but does not answer.
        collector.answering.clear()
        for number in range(2_000):
            tracer.span(traced(tracer, number), "batch.wait", AT_S, AT_S)
        assert collector.requests <= 1 + 2_000 // 64
    assert [record for record in caplog.records if "Queue" in record.getMessage()] == []


def test_close_waits_only_briefly_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_traces, "CLOSE_S", 0.2)
    with Collector() as collector, tracing(collector.url) as (tracer, _):
        collector.answering.clear()
        tracer.span(traced(tracer), "batch.wait", AT_S, AT_S)
        closing = threading.Thread(target=tracer.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert collector.spans == []
    assert CLOSE_S > otlp_traces.SEND_S, "a request under way may come to its end"
