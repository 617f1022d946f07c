"""What every request passes first, before anything of it is read: key, site, rate, streams."""

from __future__ import annotations

from math import ceil
from time import monotonic
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from common.errors import UnavailableError
from services.admin.middleware import access
from services.admin.middleware.limits import CLOSE, Buckets, bounded, too_large
from services.admin.middleware.problems import problem, problem_of
from services.admin.routes.page import refused_page

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from common.api.keys import KeyRecord
    from services.admin.service import Service

_EVENTS = "/events"  # paths of streams of events end so


class Gate:
    """Lets a request in, or says why not.

    Args:
        app: What lies behind.
        service: Knows the keys and the settings.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._body_bytes = service.settings.api_body_bytes
        self._buckets = Buckets(service.settings.api_requests_per_s)
        self._streams = service.streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI wants it."""
        if scope["type"] != "http":  # there are no websockets: the router refuses them
            await self._app(scope, receive, send)
            return
        refusal = await self._refusal(scope)
        receive = bounded(receive, self._body_bytes)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif not scope["path"].endswith(_EVENTS):
            await self._app(scope, receive, send)
        elif self._streams.begin():
            try:
                await self._app(scope, receive, send)
            finally:
                self._streams.end()
        else:
            await self._too_many(scope["path"], "streams of events are open", 60)(
                scope, receive, send
            )

    async def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is not let in, None: it is."""
        connection, path = HTTPConnection(scope), scope["path"]
        key, caller = access.presented(connection.headers), None
        if key is not None and path not in access.OPEN:
            try:
                await self._service.ready()
            except UnavailableError as error:
                return problem_of(error, path)
            caller = self._service.keys.role_of(key)
        return self._limit(connection, caller) or self._denial(connection, key, caller)

    def _limit(self, connection: HTTPConnection, caller: KeyRecord | None) -> Response | None:
        """Too many requests, or too large a one."""
        path = connection.scope["path"]
        address = connection.client.host if connection.client else "nowhere"
        who = f"address {address}" if caller is None else f"key {caller.name}"
        wait_s = self._buckets.take(who, monotonic())
        if wait_s > 0:
            return self._too_many(path, f"requests of this {who.partition(' ')[0]}", wait_s)
        said_bytes = connection.headers.get("content-length", "0")
        if not said_bytes.isdecimal():
            return problem(400, "Content-Length is no number", path)
        if int(said_bytes) > self._body_bytes:
            return problem(413, too_large(self._body_bytes), path, headers=CLOSE)
        return None

    @staticmethod
    def _denial(
        connection: HTTPConnection, key: str | None, caller: KeyRecord | None
    ) -> Response | None:
        """Nobody we know, or not from where they say."""
        path = connection.scope["path"]
        if path in access.OPEN:
            return None
        if caller is None and path == "/" and "text/html" in connection.headers.get("accept", ""):
            encodings = connection.headers.get("accept-encoding", "")
            return refused_page(encodings, access.CHALLENGE)
        if caller is None:
            said = "needs an API key" if key is None else "this API key is not valid"
            hint = ": `Authorization: Bearer KEY`; `doll key create NAME` makes one"
            return problem(401, said + hint, path, headers=access.CHALLENGE)
        if access.from_another_site(connection.scope["method"], connection.headers):
            return problem(403, "changes are not taken from pages of another site", path)
        access.let_in(connection.scope, caller)
        return None

    @staticmethod
    def _too_many(path: str, what: str, wait_s: float) -> Response:
        headers = {"Retry-After": str(ceil(wait_s))}
        return problem(429, f"too many {what}", path, headers=headers)
