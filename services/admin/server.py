"""HTTP server of the application, which ends together with the service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.runtime.connections import REQUEST_S
from common.runtime.http_server import HttpServer
from services.admin.middleware.problems import problem

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

    from services.admin.service import AdminService

# Seconds between checks for a failed thread.
LOOK_S = 0.5
# Number of connections besides event streams.
SPARE_CONNECTIONS = 1000


class Server(HttpServer):
    """Serves an application until it is asked to end or one of the service's threads has failed.

    Args:
        request_s: Time limit for a request to arrive, and for a TLS handshake.

    Raises:
        UserError: If the certificate or the key cannot be used.
    """

    def __init__(self, app: FastAPI, request_s: float = REQUEST_S) -> None:
        self._service: AdminService = app.state.service
        limits = self._service.limits
        super().__init__(
            app,
            self._service.settings,
            limits.streams + SPARE_CONNECTIONS,
            lambda status, detail: problem(status, detail, ""),
            lifespan=True,
            request_s=request_s,
            per_address=limits.connections,
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See the library, which would wait for event streams."""
        self.end()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        """Accept no more requests, and finish the current ones."""
        self._service.ending.set()
        self.should_exit = True

    def watch(self) -> None:
        """End the server when a thread of the service has failed."""
        while not self.should_exit and self._service.fault is None:
            self._service.ending.wait(LOOK_S)
        self.end()
