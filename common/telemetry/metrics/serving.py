"""Answers scrapes, and whether the process is well, from a thread of its own.

    GET /metrics    for Prometheus
    GET /healthz    200, or 503 and the reason once a loop of the process makes no progress

A server that is unavailable makes no process unhealthy: to start it again would not help.
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

from common.errors import UserError
from common.telemetry.logging import event_logger
from common.telemetry.metrics.registry import EXPOSITION, ProcessMetrics

# Connections, each a thread: who scrapes and who asks for health are a handful.
MOST_OPEN = 32
STILL_S = 60.0  # without a turn of its loop a process is unhealthy: longer than any wait in one


class Watchdog:
    """When a loop of this process turned last; may be shared between threads.

    Args:
        clock: Seconds that never go back.
        what: Names the loop.
        limit_s: Without a turn for so long it is unhealthy.
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
        """Say that the loop has turned."""
        self._beat_at = self._clock()

    def complaint(self) -> str:
        """Why it is unhealthy; empty: it is healthy."""
        still_s = self._clock() - self._beat_at
        return f"{self._what} has made no progress for {still_s:.0f} s" * (still_s >= self._limit_s)


class Watchdogs:
    """Those of a process with several loops; may be shared between threads.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watchdogs = list[Watchdog]()

    def begin(self, what: str, limit_s: float = STILL_S) -> Watchdog:
        """Expect beats of a loop from now on, until `end`."""
        watchdog = Watchdog(self._clock, what, limit_s)
        self.watch(watchdog)
        return watchdog

    def watch(self, watchdog: Watchdog) -> None:
        """As `begin`, with a watchdog that was made before; its first beat is now."""
        watchdog.beat()
        with self._lock:
            self._watchdogs.append(watchdog)

    def end(self, watchdog: Watchdog) -> None:
        """Expect none of it any more, as the loop has come to its end; may be told twice."""
        with self._lock, suppress(ValueError):
            self._watchdogs.remove(watchdog)

    def complaint(self) -> str:
        """Why the process is unhealthy; empty: it is healthy."""
        with self._lock:
            watchdogs = tuple(self._watchdogs)
        return "; ".join(filter(None, (watchdog.complaint() for watchdog in watchdogs)))


def serve(metrics: ProcessMetrics, watchdog: Watchdog | Watchdogs, host: str, port: int) -> int:
    """Answer until the process ends; returns the port.

    Args:
        metrics: What scrapes get.
        watchdog: Of the loop, or of all loops.
        host: The address.
        port: 0 for any that is free.

    Raises:
        UserError: If the address cannot be had.
    """

    class Handler(BaseHTTPRequestHandler):
        """One request."""

        timeout = 10.0  # of a client that says nothing

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
            """Scrapes are not logged."""

    try:
        server = _Server(host, port, Handler)
    except OSError as error:
        raise UserError(
            f"metrics cannot be served on {host}:{port}: {error}; set DOLL_METRICS_PORT and"
            " DOLL_METRICS_HOST, one port for each process of a machine"
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_address[1])


class _Server(ThreadingMixIn, TCPServer):
    """A thread for each connection; of too many the oldest goes, so that health is always told.

    Not Python's own HTTPServer, which asks the DNS for the host's name before it listens.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MOST_OPEN

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        found = {each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        if socket.AF_INET not in found:
            self.address_family = socket.AF_INET6  # of :: that takes IPv4 too
        self._lock = threading.Lock()
        self._open = dict[socket.socket, None]()  # in the order in which they came
        super().__init__((host, port), handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]  # also of datagrams
        with self._lock:
            if len(self._open) >= MOST_OPEN:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it may have gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread hears of it and ends
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]  # as above
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 -- its names
        """Who hangs up is no news; a fault of ours is told as all others are."""
        if not isinstance(sys.exception(), OSError):
            event_logger("metrics").exception("scrape_failed")
