"""Outermost middleware: measures every request and logs failures."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from common.telemetry.logging import event_logger
from services.admin.middleware.problems import failure

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from common.telemetry.metrics.api import ApiMetrics

_EVENTS = b"text/event-stream"
# Status if a server behind this one is unavailable. The outage is logged once, when it starts.
_AWAY = 503
# Status if a client disconnected before the answer; it appears in the metrics only.
_GONE = 499

_log = event_logger(__name__)


class Observed:
    """Counts and times requests; turns a fault into an answer without details."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        # None until the answer has started.
        status: int | None = None
        seconds: float | None = None

        async def send_on(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status = message["status"]
                kinds = (value for name, value in message["headers"] if name == b"content-type")
                if not next(kinds, b"").startswith(_EVENTS):
                    seconds = perf_counter() - began
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except ClientDisconnect:
            status = _GONE
        except Exception as error:  # noqa: BLE001 -- a fault in one request must not affect others
            response = failure(error, scope["path"])
            if status is None:
                await response(scope, receive, send_on)
        finally:
            self._note(scope, _GONE if status is None else status, seconds)

    def _note(self, scope: Scope, status: int, seconds: float | None) -> None:
        route, method = getattr(scope.get("route"), "path", "none"), scope["method"]
        self._metrics.answered(route, method, status, seconds)
        if status >= 500 and status != _AWAY:
            _log.warning("request_not_served", method=method, path=scope["path"], status=status)
