"""Serves metrics and the health of the process from a separate thread.

    GET /metrics    for Prometheus
    GET /healthz    200, or 503 and the reason if a loop of the process makes no progress

An unavailable server does not make a process unhealthy, since a restart would not help.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from time import monotonic
from typing import Protocol

from common.errors import UserError
from common.telemetry.logging import event_logger
from common.telemetry.metrics.registry import EXPOSITION, ProcessMetrics

# Connections, each with a thread. Usually there are a handful of scrapers and health checks.
MOST_OPEN = 32
# Time without an iteration after which a loop is unhealthy: longer than any wait in a loop.
STILL_S = 60.0


class Complains(Protocol):
    """Part of a process that may be unhealthy."""

    def complaint(self) -> str:
        """Return why it is unhealthy; empty if it is healthy."""


class Watchdog:
    """Detects that a loop of this process makes no progress. May be shared between threads.

    Args:
        clock: Monotonic clock, in seconds.
        what: Name of the loop in messages.
        limit_s: Time without a beat after which the loop is unhealthy.
    """

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        what: str = "the loop",
        limit_s: float = STILL_S,
    ) -> None:
        self._clock = clock
        self._what = what
        self._limit_s = limit_s
        self._beat_at = clock()

    def beat(self) -> None:
        """Record that the loop makes progress."""
        self._beat_at = self._clock()

    def complaint(self) -> str:
        """Return why the loop is unhealthy; empty if it is healthy."""
        still_s = self._clock() - self._beat_at
        return f"{self._what} has made no progress for {still_s:.0f} s" * (still_s >= self._limit_s)


class Watchdogs:
    """Watchdogs of a process with several loops. May be shared between threads.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watchdogs = list[Complains]()

    def begin(self, what: str, limit_s: float = STILL_S) -> Watchdog:
        """Expect beats of a loop from now on, until `end`."""
        watchdog = Watchdog(self._clock, what, limit_s)
        self.watch(watchdog)
        return watchdog

    def watch(self, watchdog: Complains) -> None:
        """Watch one more part of the process, until `end`."""
        if isinstance(watchdog, Watchdog):
            watchdog.beat()
        with self._lock:
            self._watchdogs.append(watchdog)

    def end(self, watchdog: Complains) -> None:
        """Watch a part no longer, since it has ended. May be called twice."""
        with self._lock, suppress(ValueError):
            self._watchdogs.remove(watchdog)

    def complaint(self) -> str:
        """Return why the process is unhealthy; empty if it is healthy."""
        with self._lock:
            watchdogs = tuple(self._watchdogs)
        return "; ".join(filter(None, (watchdog.complaint() for watchdog in watchdogs)))


def serve(metrics: ProcessMetrics, watchdog: Watchdog | Watchdogs, host: str, port: int) -> int:
    """Serve metrics and health until the process ends; return the port.

    Args:
        metrics: Metrics of the process.
        watchdog: Watchdog of the loop, or of all loops.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.

    Raises:
        UserError: If the address cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        """Answers one request."""

        # Longest silence of a client, in seconds.
        timeout = 10.0

        def do_GET(self) -> None:
            path, complaint = self.path.partition("?")[0], watchdog.complaint()
            if path == "/metrics":
                status, body = 200, metrics.exposed()
            elif path == "/healthz":
                status, body = 503 if complaint else 200, f"{complaint or 'healthy'}\n".encode()
            else:
                status, body = 404, b"/metrics or /healthz\n"
            self.send_response(status)
            self.send_header("Content-Type", EXPOSITION)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- its name
            """Do not log requests."""

    try:
        server = _Server(host, port, Handler)
    except OSError as error:
        raise UserError(
            f"metrics cannot be served on {host}:{port}: {error}; set DOLL_METRICS_PORT and"
            " DOLL_METRICS_HOST, with a different port for each process on a machine"
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_address[1])


class _Server(ThreadingMixIn, TCPServer):
    """Server with a thread for each connection.

    If there are too many connections, the oldest is closed, so that health checks always succeed.
    Python's `HTTPServer` is not used because it looks up the host's name before it listens.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MOST_OPEN

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        found = {each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        if socket.AF_INET not in found:
            self.address_family = socket.AF_INET6
        self._lock = threading.Lock()
        # Open connections, oldest first.
        self._open = dict[socket.socket, None]()
        super().__init__((host, port), handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]  # typeshed allows datagrams
        with self._lock:
            if len(self._open) >= MOST_OPEN:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # The thread of the connection notices the shutdown and ends. OSError means that
                # the client has already closed the connection.
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]  # as above
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 -- `TCPServer`'s names
        """Log a fault, but not a client that closes its connection."""
        if not isinstance(sys.exception(), OSError):
            event_logger("metrics").exception("scrape_failed")
