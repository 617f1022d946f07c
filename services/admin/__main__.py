"""Start the admin service: `python -m services.admin --help`, or `doll admin`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from logging import getLogger
from typing import TYPE_CHECKING

from common.config.settings import Settings, read_settings
from common.errors import UserError
from common.runtime.connect import connect
from common.runtime.termination import on_termination
from common.telemetry.logging import EventLogger, event_logger, set_up_logging
from common.telemetry.metrics.serving import serve
from services.admin.app import create_app
from services.admin.server import Server

if TYPE_CHECKING:
    from services.admin.service import Service

EXIT_OK = 0
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings make no sense; starting again will not help
BACKLOG = 1024
STALLED_S = 30  # after which a connection is dropped that takes nothing of what is sent


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
        # Its beginning and end are told by us, and of clients that speak no HTTP nobody is told.
        getLogger("uvicorn").setLevel("ERROR")
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
    server = Server(app)
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
