"""Access control for predictions: if enabled, callers need an API key of either role."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from common.api.keys import KeyRecord, Keys, KeyStore
from common.errors import UnavailableError
from common.runtime.connections import CALLER
from common.runtime.refusals import Refusals
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from common.telemetry.logging import EventLogger


# Delay until a revoked key is refused or a new one is accepted.
LOOK_S = 1.0
# Open for load balancers.
_OPEN = "/v2/health/"
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="doll"'}


class KeyGate:
    """Checks API keys; while Kafka is unavailable, the keys last read count."""

    def __init__(
        self, store: KeyStore, known: Mapping[str, KeyRecord], job: str, logger: EventLogger
    ) -> None:
        self._store = store
        self._refusals = Refusals(job)
        self._keys = Keys(known.values())
        self._outage = Outage(logger, "kafka")
        self._look_at = 0.0

    def look(self) -> None:
        """Read the keys again if `LOOK_S` has passed. For one thread."""
        if monotonic() < self._look_at:
            return
        try:
            self._keys = Keys(self._store.refresh(0.0).values())
            self._outage.over()
        except UnavailableError as error:
            self._outage.met(error)
        self._look_at = monotonic() + LOOK_S

    def before(self, app: ASGIApp) -> ASGIApp:
        """Return an application that requires a key for everything except health checks."""

        async def gate(scope: Scope, receive: Receive, send: Send) -> None:
            if not scope.get("path", "").startswith(_OPEN):
                send = self._refusals.observe(scope, send)
                scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
                caller = self._keys.role_of(key.strip()) if scheme.lower() == "bearer" else None
                if caller is None:
                    refused = JSONResponse({"error": "an API key is required"}, 401, _CHALLENGE)
                    await refused(scope, receive, send)
                    return
                scope[CALLER] = caller
            await app(scope, receive, send)

        return gate
