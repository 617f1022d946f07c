"""A server of HTTP with limits: slow, many and endless connections cost others nothing."""

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
STALLED_S = 30  # after which a connection is dropped that takes nothing of what is sent
END_S = 5.0  # for requests under way
# Of one address: an office behind one has some, a flood thousands. Proxies are named, and exempt.
CONNECTIONS = 300
IDLE_S = 75  # that a connection without requests stays: longer than a load balancer's minute
SPARE_FILES = 1000  # besides connections: Kafka's, Redis's, new ones that take the place of others


class HttpServer(uvicorn.Server):
    """Serves an application at the address and with the limits that settings name.

    Args:
        app: The application.
        settings: Address, TLS, proxies.
        most: Connections of all clients together.
        refuse: Writes the answer to a request that the application never sees.
        lifespan: True if the application is told when it begins and ends.
        request_s: For a request to arrive, and for a handshake of TLS.
        per_address: Connections of one address.

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


def listen(settings: Settings) -> socket.socket:
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


def url_of(listening: socket.socket, settings: Settings) -> str:
    """Where it is reached on this machine."""
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.api_tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
