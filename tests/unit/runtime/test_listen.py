"""Sockets that the process listens on."""

from __future__ import annotations

import socket

import pytest

from common.config.settings import Settings
from common.runtime.http_server import STALLED_S, listen


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_listening_socket_drops_connections_that_stall() -> None:
    with (
        listen(Settings(api_port=0)) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            found = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert found == STALLED_S * 1000
