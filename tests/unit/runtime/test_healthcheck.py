"""A container's health check quickly reports that the process is healthy, or why not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from common.runtime import healthcheck
from common.runtime.healthcheck import HEALTHY, UNHEALTHY, USAGE, find_problem, main
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdog, serve
from tests.fakes.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "127.0.0.1"
HEAVY = ("pydantic", "urllib.request", "http.client", "prometheus_client", "msgspec", "logging")


class _Silent(BaseHTTPRequestHandler):
    """Answers with something that is not HTTP."""

    def do_GET(self) -> None:
        """Send an answer that is not HTTP."""
        self.wfile.write(b"\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- its name
        """Log nothing."""


@pytest.fixture
def nonsense() -> Iterator[int]:
    """Return the port of a server that does not speak HTTP."""
    with HTTPServer((HERE, 0), _Silent) as server:
        thread = Thread(target=server.handle_request, daemon=True)
        thread.start()
        yield server.server_port
        thread.join(10.0)


def ask(monkeypatch: pytest.MonkeyPatch, port: str, host: str = "0.0.0.0") -> int:  # noqa: S104 -- as containers have it
    monkeypatch.setenv("DOLL_METRICS_PORT", port)
    monkeypatch.setenv("DOLL_METRICS_HOST", host)
    return main([])


def test_process_is_healthy_until_its_loop_stalls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    port = str(serve(ProcessMetrics("worker"), watchdog, HERE, 0))
    assert ask(monkeypatch, port) == ask(monkeypatch, port, "localhost") == HEALTHY
    assert capsys.readouterr() == ("", "")
    clock.advance(61.0)
    assert ask(monkeypatch, port) == UNHEALTHY
    assert capsys.readouterr() == ("", "unhealthy: the loop has made no progress for 61 s\n")
    watchdog.beat()
    assert ask(monkeypatch, port) == HEALTHY


def test_process_that_does_not_answer_is_unhealthy() -> None:
    with socket.create_server((HERE, 0)) as frozen:
        port = str(frozen.getsockname()[1])
        assert (
            find_problem(HERE, port, timeout_s=0.05)
            == f"no answer from {HERE}:{port} within 0.05 s"
        )


def test_missing_process_or_invalid_answer_is_unhealthy(nonsense: int) -> None:
    with socket.create_server((HERE, 0)) as gone:
        port = str(gone.getsockname()[1])
    assert "refused" in find_problem(HERE, port)
    assert find_problem(HERE, str(nonsense)) == f"{HERE}:{nonsense} answers with status ''"


@pytest.mark.parametrize("port", ["", "0", "65536", "x", "-1"])
def test_healthcheck_without_valid_port_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    assert ask(monkeypatch, port) == UNHEALTHY
    assert f"DOLL_METRICS_PORT: must be the port of the process's metrics, got {port!r}" in (
        capsys.readouterr().err
    )


def test_help_has_an_example_and_other_arguments_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == HEALTHY
    assert (
        "example: DOLL_METRICS_PORT=9102 python -m common.runtime.healthcheck"
        in capsys.readouterr().out
    )
    assert main(["now"]) == USAGE
    assert "usage: " in capsys.readouterr().err


def test_healthcheck_command_loads_few_modules_and_answers_by_exit_code() -> None:
    port = serve(ProcessMetrics("worker"), Watchdog(), HERE, 0)
    environment = {**os.environ, "DOLL_METRICS_PORT": str(port)}
    peek = (
        f"import sys, common.runtime.healthcheck; print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    loaded = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-S", "-c", peek], capture_output=True, text=True, check=True
    )
    assert loaded.stdout == "[]\n"
    command = [sys.executable, "-m", healthcheck.__name__]
    assert subprocess.run(command, env=environment, check=False).returncode == HEALTHY  # noqa: S603 -- as above
