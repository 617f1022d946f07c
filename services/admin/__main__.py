"""Start the admin service: `python -m services.admin --help`, or `doll admin`."""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import sys
import threading
from logging import getLogger
from typing import TYPE_CHECKING

import uvicorn

from common.config import Settings, read_settings
from common.connections import connect
from common.errors import UserError
from common.metrics.serving import serve
from common.telemetry import EventLogger, event_logger, set_up_logging
from common.termination import on_termination
from services.admin.app import create_app

if TYPE_CHECKING:
    from types import FrameType

    from services.admin.service import Service

EXIT_OK = 0
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings make no sense; starting again will not help
END_S = 5.0  # for requests under way; streams of events end at once
LOOK_S = 0.5  # between looks whether a thread has failed
IDLE_S = 75  # that a connection without requests stays: longer than a load balancer's minute
SPARE_CONNECTIONS = 1000  # besides streams of events
BACKLOG = 1024
STALLED_S = 30  # after which a connection is dropped that takes nothing of what is sent


class _Server(uvicorn.Server):
    """Ends streams of events when it is told to end; else it would wait for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See the library."""
        self.end()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        """Take no more requests, finish those under way."""
        self._service.ending.set()
        self.should_exit = True

    def watch(self) -> None:
        """End when a thread of the service has failed."""
        while not self.should_exit and self._service.fault is None:
            self._service.ending.wait(LOOK_S)
        self.end()


def main() -> int:
    """Run until told to end; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.admin",
        description="The REST API and the live page. Its settings are DOLL_API_... in the"
        " environment; keys are made with `doll key create`.",
        epilog="example: DOLL_API_PORT=8080 python -m services.admin",
    )
    parser.add_argument(
        "--name", default=socket.gethostname(), help="for people; default: the host"
    )
    arguments = parser.parse_args()
    on_termination(lambda: None)  # once the server has ended, it raises the signal again
    try:
        settings = read_settings(os.environ)
        set_up_logging(settings, service="admin", replica=arguments.name)
        getLogger("uvicorn").setLevel("WARNING")  # its beginning and end are told by us
        return _serve(settings, event_logger("admin"))
    except UserError as error:
        print(f"admin: {error}", file=sys.stderr)  # noqa: T201 -- to whoever started it
        return EXIT_USAGE
    except Exception:  # noqa: BLE001 -- the outermost loop: better dead and replayed
        event_logger("admin").exception("admin_failed")
        return EXIT_FAILED


def _serve(settings: Settings, logger: EventLogger) -> int:
    app = create_app(connect(settings))
    service: Service = app.state.service
    listening = _listen(settings)
    if settings.metrics_port:
        metrics = service.metrics.meters
        serve(metrics, service.pulse, settings.metrics_host, settings.metrics_port)
    try:
        config = uvicorn.Config(
            app,
            http="httptools",
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=settings.api_tls_cert or None,
            ssl_keyfile=settings.api_tls_key or None,
            limit_concurrency=settings.api_streams + SPARE_CONNECTIONS,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=int(END_S),
        )
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"DOLL_API_TLS_CERT and DOLL_API_TLS_KEY cannot be used: {error}"
        ) from error
    server = _Server(config, service)
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.api_tls_cert else "http"
    shown = f"[{host}]" if ":" in host else host
    logger.info("admin_listening", url=f"{scheme}://{shown}:{port}")
    threading.Thread(target=server.watch, name="watch", daemon=True).start()
    server.run(sockets=[listening])
    if service.fault is not None:
        raise service.fault
    logger.info("admin_ended")
    return EXIT_OK if server.started else EXIT_FAILED


def _listen(settings: Settings) -> socket.socket:
    """Take the address.

    Raises:
        UserError: If it cannot be had.
    """
    host, port = settings.api_host, settings.api_port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"the API cannot be served on {host}:{port}: {error}; set DOLL_API_HOST and"
            " DOLL_API_PORT"
        ) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_S * 1000)
    return listening


if __name__ == "__main__":
    sys.exit(main())
