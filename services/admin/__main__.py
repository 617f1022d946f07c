"""Start the admin service: `python -m services.admin --help`, or `doll admin`."""

from __future__ import annotations

import socket
import sys
import threading
from logging import getLogger
from typing import TYPE_CHECKING

from common.config.program import command_line
from common.errors import UserError
from common.runtime.connect import connect
from common.runtime.service import EXIT_FAILED, EXIT_OK, run
from services.admin.app import create_app
from services.admin.server import Server

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.runtime.service import ServiceProcess
    from services.admin.service import Service

BACKLOG = 1024
STALLED_S = 30  # after which a connection is dropped that takes nothing of what is sent


def main() -> int:
    """Run until told to end; returns the exit status."""
    name = command_line("admin").name
    return run("admin", name, _serve)  # once uvicorn has ended by a signal, it raises that again


def _serve(process: ServiceProcess) -> int:
    # Its beginning and end are told by us, and of clients that speak no HTTP nobody is told.
    getLogger("uvicorn").setLevel("ERROR")
    settings = process.settings
    app = create_app(connect(settings))
    service: Service = app.state.service
    listening = _listen(settings)
    process.watchdogs.watch(service.watchdog)
    process.serve_metrics(service.metrics.meters)
    server = Server(app)
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.api_tls_cert else "http"
    shown = f"[{host}]" if ":" in host else host
    process.logger.info("admin_listening", url=f"{scheme}://{shown}:{port}")
    threading.Thread(target=server.watch, name="watch", daemon=True).start()
    server.run(sockets=[listening])
    if service.books.fault is not None:
        raise service.books.fault
    process.logger.info("admin_ended")
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
