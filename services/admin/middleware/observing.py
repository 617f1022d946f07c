"""What happens with every request, outermost: it is measured, and what failed is logged."""

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
_AWAY = 503  # of a server behind us, which is logged once, when it goes
_GONE = 499  # of a client that did not wait for its answer: nobody sees it but the metrics

_log = event_logger(__name__)


class Observed:
    """Counts requests and how long they take; a fault becomes an answer that says nothing of it."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI wants it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        status: int | None = None  # None: the answer did not begin
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
        except Exception as error:  # noqa: BLE001 -- one request's fault is not the others'
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
