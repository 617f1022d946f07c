"""HTTP server with limits, so that slow, numerous or endless connections do not harm others."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from common.errors import UserError
from common.runtime.connections import REQUEST_S, Connections, limited

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from common.config.settings import Settings
    from common.runtime.connections import Refuse

BACKLOG = 1024
# Time after which a connection is dropped if the client reads nothing that is sent.
STALLED_S = 30
# Time for requests in progress when the server ends.
END_S = 5.0
# Connections of one address: an office has dozens, a flood thousands. Proxies in the settings are
# exempt.
CONNECTIONS = 300
# Time that an idle connection stays open: longer than the minute of most load balancers.
IDLE_S = 75
# Files besides client connections: Kafka, Redis, and new connections that replace others.
SPARE_FILES = 1000


class HttpServer(uvicorn.Server):
    """Serves an application at the address and with the limits of the settings.

    Args:
        app: The application.
        settings: Address, TLS and proxies.
        most: Maximum number of connections of all clients.
        refuse: Makes the response to a request that never reaches the application.
        lifespan: True if the application gets ASGI lifespan events.
        request_s: Time for a request to arrive, and for a TLS handshake.
        per_address: Maximum number of connections of one address.

    Raises:
        UserError: If certificate or key cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        most: int,
        refuse: Refuse,
        *,
        lifespan: bool,
        request_s: float = REQUEST_S,
        per_address: int = CONNECTIONS,
    ) -> None:
        self._request_s = request_s
        connections = Connections(most, per_address, settings.api_proxies)
        config = uvicorn.Config(
            app,
            http=limited(connections, refuse, request_s),
            ws="none",
            lifespan="on" if lifespan else "off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.api_proxies),
            forwarded_allow_ips=list(settings.api_proxies),
            ssl_certfile=settings.api_tls_cert or None,
            ssl_keyfile=settings.api_tls_key or None,
            # Includes requests that are still being answered after their client has gone.
            limit_concurrency=2 * most,
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
        """See `uvicorn.Server`."""
        with asyncio.Runner(loop_factory=lambda: _Loop(self._request_s)) as runner:
            runner.run(self.serve(sockets))


class _Loop(uvloop.Loop):
    """An event loop that limits the time of TLS handshakes and shutdowns."""

    def __init__(self, handshake_s: float) -> None:
        super().__init__()
        self._handshake_s = handshake_s

    async def create_server(  # type: ignore[override]  # uvloop's has four signatures
        self,
        *arguments: Any,  # noqa: ANN401 -- uvloop's
        **named: Any,  # noqa: ANN401 -- uvloop's
    ) -> asyncio.AbstractServer:
        """See `uvloop.Loop`."""
        if named.get("ssl") is not None:
            named["ssl_handshake_timeout"] = named["ssl_shutdown_timeout"] = self._handshake_s
        return await super().create_server(*arguments, **named)


def _allow_files(wanted: int) -> None:
    """Raise the process's limit of open files to `wanted`, as far as the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


def listen(settings: Settings) -> socket.socket:
    """Listen at the address of the API.

    Raises:
        UserError: If the address cannot be used.
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
    # Linux has this option. Connections inherit it from the listening socket.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_S * 1000)
    return listening


def url_of(listening: socket.socket, settings: Settings) -> str:
    """Return the URL of the API on this machine."""
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.api_tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
