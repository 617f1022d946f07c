"""Who may ask for predictions, where that is asked for: whoever has an API key, of either role."""

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


LOOK_S = 1.0  # how late a key that was revoked is refused, and a new one let in
_OPEN = "/v2/health/"  # for whoever routes to it
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="doll"'}


class KeyGate:
    """Knows the API keys; those of before count while Kafka is unavailable."""

    def __init__(
        self, store: KeyStore, known: Mapping[str, KeyRecord], job: str, logger: EventLogger
    ) -> None:
        self._store = store
        self._refusals = Refusals(job)
        self._keys = Keys(known.values())
        self._outage = Outage(logger, "kafka")
        self._look_at = 0.0

    def look(self) -> None:
        """See which keys there are now, if that is some time ago; by one thread."""
        if monotonic() < self._look_at:
            return
        try:
            self._keys = Keys(self._store.refresh(0.0).values())
            self._outage.over()
        except UnavailableError as error:
            self._outage.met(error)
        self._look_at = monotonic() + LOOK_S

    def before(self, app: ASGIApp) -> ASGIApp:
        """An application that nobody reaches without a key, but to ask whether it is there."""

        async def gate(scope: Scope, receive: Receive, send: Send) -> None:
            if not scope.get("path", "").startswith(_OPEN):
                send = self._refusals.observe(scope, send)
                scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
                caller = self._keys.role_of(key.strip()) if scheme.lower() == "bearer" else None
                if caller is None:
                    refused = JSONResponse({"error": "needs an API key"}, 401, _CHALLENGE)
                    await refused(scope, receive, send)
                    return
                scope[CALLER] = caller
            await app(scope, receive, send)

        return gate
