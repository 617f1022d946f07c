"""Where members of groups find each other, in Redis (`common.collectives.port.Rendezvous`).

Each name is a stream, `doll:{job}:group:<name>`; an entry has one field, and the stream expires.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common.redis.server import RedisServer
from common.telemetry.rejections import Rejections

if TYPE_CHECKING:
    from common.redis.access import RedisClient

_TTL_MS = 60_000
_MOST_WAIT_S = 1.0  # of one blocking command: below what a server may take to answer


class RedisRendezvous:
    """The streams of a job in a Redis server; may be shared between threads.

    Args:
        client: Its connections.
        job: The job's id.
    """

    def __init__(self, client: RedisClient, job: str) -> None:
        self._keys = f"doll:{{{job}}}:group:"
        self._rejections = Rejections()
        self._server = RedisServer(client, self._keys, self._reject_key)

    def leave(self, name: str, key: str, value: bytes) -> None:
        """Append an entry."""
        stream = self._keys + name
        self._server.ask(("XADD", stream, "*", key, value), ("PEXPIRE", stream, _TTL_MS))

    def entries(self, name: str, after: str, timeout_s: float) -> list[tuple[str, str, bytes]]:
        """Wait for entries behind a position; empty if none came."""
        stream, deadline = self._keys + name, time.monotonic() + timeout_s
        while True:
            left_s = min(deadline - time.monotonic(), _MOST_WAIT_S)
            block = ("BLOCK", max(1, int(1000 * left_s))) if left_s > 0 else ()
            answer = self._server.ask(("XREAD", *block, "STREAMS", stream, after or "0-0"))[0]
            if answer:
                return [
                    (position.decode(), key.decode(errors="replace"), value)
                    for position, fields in answer[0][1]
                    for key, value in fields.items()
                ]
            if left_s <= 0:
                return []

    def _reject_key(self, key: str) -> None:
        self._rejections.reject("key", f"{key} holds another type than a stream")
