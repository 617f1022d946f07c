"""The application behind its address, ended together with the service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.runtime.connections import REQUEST_S
from common.runtime.http_server import HttpServer
from services.admin.middleware.problems import problem

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

    from services.admin.service import AdminService

LOOK_S = 0.5  # between looks whether a thread has failed
SPARE_CONNECTIONS = 1000  # besides streams of events


class Server(HttpServer):
    """Serves the application of a service until it is told to end, or a thread of it has failed.

    Args:
        request_s: For a request to arrive, and for a handshake of TLS.

    Raises:
        UserError: If certificate or key cannot be used.
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
        """See the library; it would wait for streams of events."""
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
