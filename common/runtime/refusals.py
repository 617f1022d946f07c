"""Logs requests that a service refuses, with token buckets that limit the log."""

from __future__ import annotations

from collections import OrderedDict
from http import HTTPStatus
from time import monotonic, time
from typing import TYPE_CHECKING, cast

from common.jobs.changes import NamedActor, audit, change_by
from common.runtime.connections import CALLER

if TYPE_CHECKING:
    from starlette.types import Message, Scope, Send

    from common.jobs.changes import Author

# Number of callers that are remembered, which takes about 2 MB. A forgotten caller gets a full
# bucket.
BUCKETS = 10_000
# Limits of log lines about refusals, so that a flood of requests is not a flood of lines. Clients
# without a key can use any number of addresses, so all of these together have a limit as well.
_REFUSED_KEY_PER_S = 5.0
_REFUSED_ADDRESS_PER_S = 1 / 60
_REFUSED_ADDRESSES_PER_S = 1.0
_ACTION_CHARACTERS = 200
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class Buckets:
    """A token bucket for each caller.

    Args:
        rate_per_s: Average requests per second of one caller. A burst may have twice as many.
        most: Number of callers that are remembered.
    """

    def __init__(self, rate_per_s: float, most: int = BUCKETS) -> None:
        self._rate_per_s = rate_per_s
        self._size = max(1.0, 2 * rate_per_s)
        self._most = most
        # Tokens of each caller and their time, the caller unseen for longest first.
        self._buckets = OrderedDict[str, tuple[float, float]]()

    def take(self, caller: str, now: float) -> float:
        """Take a token. Return 0, or the seconds until there is one if none was taken."""
        tokens, at_s = self._buckets.pop(caller, (self._size, now))
        tokens = min(self._size, tokens + max(0.0, now - at_s) * self._rate_per_s)
        is_taken = tokens >= 1
        self._buckets[caller] = tokens - is_taken, now
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return 0.0 if is_taken else (1 - tokens) / self._rate_per_s

    def __len__(self) -> int:
        return len(self._buckets)


class Refusals:
    """Logs requests whose key is missing, not valid, or of an insufficient role.

    Args:
        job: Job of the service. If empty, each request's path names its job.
    """

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._keys = Buckets(_REFUSED_KEY_PER_S)
        self._addresses = Buckets(_REFUSED_ADDRESS_PER_S)
        self._strangers = Buckets(_REFUSED_ADDRESSES_PER_S)
        self._unlogged = 0

    def observe(self, scope: Scope, send: Send) -> Send:
        """Return a function that sends an answer, and logs it if it is 401 or 403."""

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in _REFUSED:
                self.log(scope, message["status"], monotonic())
            await send(message)

        return send_on

    def log(self, scope: Scope, status: int, now: float) -> None:
        """Log a request that was answered with 401 or 403, unless there are too many.

        Args:
            scope: ASGI scope of the request.
            status: HTTP status of the response.
            now: Monotonic time in seconds.
        """
        caller, address = cast("Author | None", scope.get(CALLER)), address_of(scope)
        if caller is not None:
            wait_s = self._keys.take(caller.name, now)
        else:
            wait_s = self._addresses.take(address, now)
            wait_s = wait_s or self._strangers.take("", now)
        if wait_s > 0:
            self._unlogged += 1
            return
        reason = (
            "the key's role does not allow this action"
            if caller
            else "the request has no valid key"
        )
        if status == HTTPStatus.FORBIDDEN and caller is None:
            reason = "the request comes from a page of another site"
        if self._unlogged:
            reason, self._unlogged = f"{reason}; {self._unlogged} more since the last line", 0
        action = f"{scope['method']} {scope['path']}"[:_ACTION_CHARACTERS]
        refused = change_by(caller or NamedActor(address, "none"), time(), action, reason)
        audit([refused], "refused", job=self._job or scope.get("path_params", {}).get("job", ""))


def address_of(scope: Scope) -> str:
    """Return the address of the other end of a request's connection."""
    client: tuple[str, int] | None = scope.get("client")
    return client[0] if client else "nowhere"
