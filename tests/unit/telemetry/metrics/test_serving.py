"""A process answers scrapes, and reports if its loop is alive."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import pytest

from common.errors import UserError
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import MOST_OPEN, STILL_S, Watchdog, Watchdogs, serve
from tests.fakes.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "127.0.0.1"


def asked(port: int, path: str, host: str = HERE) -> tuple[int, str]:
    connection = HTTPConnection(host, port, timeout=120.0)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_metrics_are_served_with_their_help() -> None:
    metrics = ProcessMetrics("coordinator")
    metrics.follow("digits", CoordinatorMetrics(lambda: 1.5))
    status, text = asked(serve(metrics, Watchdog(), HERE, 0), "/metrics")
    assert status == 200
    meaning = "Age of the job's newest checkpoint in object storage, in seconds."
    assert f"# HELP doll_checkpoint_age_seconds {meaning}\n" in text
    assert "# TYPE doll_checkpoint_age_seconds gauge\n" in text
    assert 'doll_checkpoint_age_seconds{job_name="digits"} 1.5\n' in text
    assert 'doll_build_info{service="coordinator",version="' in text
    assert "process_cpu_seconds_total" in text


def test_process_with_stalled_loop_is_unhealthy_until_it_resumes() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    port = serve(ProcessMetrics("coordinator"), watchdog, HERE, 0)
    assert asked(port, "/healthz") == (200, "healthy\n")
    clock.advance(STILL_S)
    assert asked(port, "/healthz") == (503, "the loop has made no progress for 60 s\n")
    watchdog.beat()
    assert asked(port, "/healthz")[0] == 200


def test_each_loop_of_a_process_has_its_own_limit_until_it_ends() -> None:
    clock = ManualClock()
    watchdogs = Watchdogs(clock)
    port = serve(ProcessMetrics("coordinator"), watchdogs, HERE, 0)
    assert asked(port, "/healthz") == (200, "healthy\n")
    quick, slow = watchdogs.begin("quick", 1.0), watchdogs.begin("slow", 3.0)
    clock.advance(2.0)
    assert asked(port, "/healthz") == (503, "quick has made no progress for 2 s\n")
    clock.advance(1.0)
    both = "quick has made no progress for 3 s; slow has made no progress for 3 s\n"
    assert asked(port, "/healthz") == (503, both)
    watchdogs.end(quick)
    watchdogs.end(quick)
    slow.beat()
    assert asked(port, "/healthz") == (200, "healthy\n")


def test_unknown_path_is_not_found() -> None:
    port = serve(ProcessMetrics("coordinator"), Watchdog(), HERE, 0)
    assert asked(port, "/")[0] == 404


def test_address_in_use_is_refused_by_name() -> None:
    port = serve(ProcessMetrics("coordinator"), Watchdog(), HERE, 0)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: .*; set DOLL_METRICS_PORT"):
        serve(ProcessMetrics("coordinator"), Watchdog(), HERE, port)


@pytest.mark.parametrize(("host", "at"), [("::1", "::1"), ("::", "::1"), ("::", HERE)])
def test_health_is_served_on_ipv6(host: str, at: str) -> None:
    assert (
        asked(serve(ProcessMetrics("coordinator"), Watchdog(), host, 0), "/healthz", at)[0] == 200
    )


def test_silent_clients_do_not_block_other_requests() -> None:
    port = serve(ProcessMetrics("coordinator"), Watchdog(), HERE, 0)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((HERE, port), 10.0))
            for _ in range(MOST_OPEN + 8)
        ]
        assert asked(port, "/healthz") == (200, "healthy\n")
        assert [each.recv(1) for each in silent[:8]] == [b""] * 8  # the oldest had to go
        silent[-1].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert silent[-1].recv(15) == b"HTTP/1.0 200 OK"


class Broken:
    """Fails at a scrape."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def collect(self) -> Iterator[None]:
        """Raise."""
        raise self.error

    def describe(self) -> list[None]:
        """Describe nothing."""
        return []


@pytest.mark.parametrize(
    ("error", "expected"), [(ConnectionResetError("hung up"), 0), (ValueError("ours"), 1)]
)
def test_only_our_own_scrape_failures_are_logged(
    error: Exception,
    expected: int,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    metrics = ProcessMetrics("coordinator")
    metrics.registry.register(Broken(error))  # type: ignore[arg-type]  # it never yields
    port = serve(metrics, Watchdog(), HERE, 0)
    with pytest.raises(OSError, match="without response"):
        asked(port, "/metrics")
    assert [record.getMessage() for record in caplog.records] == ["scrape_failed"] * expected
    assert capfd.readouterr().err == ""
    assert asked(port, "/healthz")[0] == 200
