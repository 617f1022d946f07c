"""The address on which a process answers HTTP."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    from common.config.settings import Settings

BACKLOG = 1024
STALLED_S = 30  # after which a connection is dropped that takes nothing of what is sent


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
