"""The application behind its address: uvicorn with limits, ended together with the service."""

from __future__ import annotations

import asyncio
import resource
import ssl
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from common.errors import UserError
from services.admin.middleware.connections import REQUEST_S, Connections, limited

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from fastapi import FastAPI

    from services.admin.service import Service

END_S = 5.0  # for requests under way; streams of events end at once
LOOK_S = 0.5  # between looks whether a thread has failed
IDLE_S = 75  # that a connection without requests stays: longer than a load balancer's minute
SPARE_CONNECTIONS = 1000  # besides streams of events
SPARE_FILES = 1000  # besides connections: Kafka's, Redis's, new ones that take the place of others


class Server(uvicorn.Server):
    """Serves the application of a service until it is told to end, or a thread of it has failed.

    Args:
        request_s: For a request to arrive, and for a handshake of TLS.

    Raises:
        UserError: If certificate or key cannot be used.
    """

    def __init__(self, app: FastAPI, request_s: float = REQUEST_S) -> None:
        self._service: Service = app.state.service
        self._request_s = request_s
        settings = self._service.settings
        most = settings.api_streams + SPARE_CONNECTIONS
        connections = Connections(most, settings.api_connections, settings.api_proxies)
        config = uvicorn.Config(
            app,
            http=limited(connections, request_s),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.api_proxies),
            forwarded_allow_ips=list(settings.api_proxies),
            ssl_certfile=settings.api_tls_cert or None,
            ssl_keyfile=settings.api_tls_key or None,
            limit_concurrency=2 * most,  # requests that are still answered though nobody listens
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=int(END_S),
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"DOLL_API_TLS_CERT and DOLL_API_TLS_KEY cannot be used: {error}"
            ) from error
        _allow_files(most + SPARE_FILES)
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """See the library."""
        with asyncio.Runner(loop_factory=lambda: _Loop(self._request_s)) as runner:
            runner.run(self.serve(sockets))

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


class _Loop(uvloop.Loop):
    """An event loop whose servers wait for no client's TLS for longer than for its requests."""

    def __init__(self, handshake_s: float) -> None:
        super().__init__()
        self._handshake_s = handshake_s

    async def create_server(  # type: ignore[override]  # the library's has four signatures
        self,
        *arguments: Any,  # noqa: ANN401 -- its own
        **named: Any,  # noqa: ANN401 -- its own
    ) -> asyncio.AbstractServer:
        """See the library."""
        if named.get("ssl") is not None:
            named["ssl_handshake_timeout"] = named["ssl_shutdown_timeout"] = self._handshake_s
        return await super().create_server(*arguments, **named)


def _allow_files(wanted: int) -> None:
    """Let this process open so many files and sockets, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
