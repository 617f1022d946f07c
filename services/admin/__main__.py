"""Start the admin service: `python -m services.admin --help`, or `doll admin`."""

from __future__ import annotations

import gc

# This comes before the other imports: see `keep_imports`.
if __name__ == "__main__":
    gc.disable()

import sys
import threading
from logging import getLogger
from typing import TYPE_CHECKING

from common.config.program import command_line
from common.runtime.connect import connect
from common.runtime.http_server import listen, url_of
from common.runtime.service import EXIT_FAILED, EXIT_OK, ServiceProcess, run
from services.admin.app import create_app
from services.admin.server import Server

if TYPE_CHECKING:
    from services.admin.service import AdminService


def main() -> int:
    """Run until a signal ends the process; return its exit status."""
    name = command_line("admin").name
    # uvicorn raises the signal again after it has shut down.
    return run("admin", name, _serve)


def _serve(process: ServiceProcess) -> int:
    # This module logs the start and the end. Clients that do not speak HTTP are not worth a log
    # event.
    getLogger("uvicorn").setLevel("ERROR")
    settings = process.settings
    app = create_app(connect(settings))
    service: AdminService = app.state.service
    listening = listen(settings)
    process.watchdogs.watch(service.watchdog)
    process.serve_metrics(service.metrics)
    server = Server(app)
    process.logger.info("admin_listening", url=url_of(listening, settings))
    threading.Thread(target=server.watch, name="watch", daemon=True).start()
    server.run(sockets=[listening])
    if service.fault is not None:
        raise service.fault
    process.logger.info("admin_ended")
    return EXIT_OK if server.started else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
