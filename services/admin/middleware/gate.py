"""Checks of every request before its body is read: key, origin, and limits.

The limits are requests per second, open event streams, and the size of a body.
"""

from __future__ import annotations

from math import ceil
from time import monotonic
from typing import TYPE_CHECKING

from fastapi import HTTPException
from starlette.requests import HTTPConnection

from common.api.keys import KeyRecord
from common.errors import UnavailableError
from common.runtime.connections import CALLER
from common.runtime.refusals import Buckets, Refusals, address_of
from services.admin.middleware import access
from services.admin.middleware.problems import problem, problem_of
from services.admin.routes.page import refused_page

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from services.admin.middleware.access import Caller
    from services.admin.service import AdminService

# Number of digits of 2^64, for Content-Length.
_LONGEST_LENGTH = 20
# Number of dots in a token; keys have none.
_DOTS = 2
# Paths of event streams end with this.
_EVENTS = "/events"
# The connection of a refused request is closed, because the rest of its body is not read.
_CLOSE = {"Connection": "close"}


class Gate:
    """Passes a request on or refuses it."""

    def __init__(self, app: ASGIApp, service: AdminService) -> None:
        self._app = app
        self._service = service
        self._body_bytes = service.settings.api_body_bytes
        self._buckets = Buckets(service.limits.requests_per_s)
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request."""
        # Lifespan events and websockets, which the router refuses.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        send_on = self._refusals.observe(scope, send)
        refusal = await self._refusal(scope)
        receive = _bounded(receive, self._body_bytes)
        if refusal is not None:
            await refusal(scope, receive, send_on)
        elif not scope["path"].endswith(_EVENTS):
            await self._app(scope, receive, send_on)
        elif self._service.streams >= self._service.limits.streams:
            refusal = _too_many(scope["path"], "event streams are open", 60)
            await refusal(scope, receive, send)
        else:
            self._service.streams += 1
            try:
                await self._app(scope, receive, send_on)
            finally:
                self._service.streams -= 1

    async def _refusal(self, scope: Scope) -> Response | None:
        """Return the refusal of a request, or None if it is accepted."""
        connection, path = HTTPConnection(scope), scope["path"]
        issuer = self._service.issuer
        key = access.presented(connection.headers)
        caller: Caller | None = None
        if key is None and issuer is not None:
            key = access.in_cookie(connection)
        if key is not None and path not in access.OPEN:
            try:
                if issuer is not None and key.count(".") == _DOTS:
                    caller = await issuer.person(key)
                else:
                    await self._service.stores.ready()
                    caller = self._service.stores.keys.role_of(key)
            except UnavailableError as error:
                return problem_of(error, scope)
        signs_in = issuer is not None and issuer.signs_in
        return self._limit(connection, caller) or _denial(
            connection, key, caller, signs_in=signs_in
        )

    def _limit(self, connection: HTTPConnection, caller: Caller | None) -> Response | None:
        """Refuse a caller with too many requests, or a body that is too large."""
        path = connection.scope["path"]
        address = address_of(connection.scope)
        kind = "key" if isinstance(caller, KeyRecord) else "person"
        who = f"address {address}" if caller is None else f"{kind} {caller.name}"
        wait_s = self._buckets.take(who, monotonic())
        if wait_s > 0:
            return _too_many(path, f"requests from this {who.partition(' ')[0]}", wait_s)
        said_bytes = connection.headers.get("content-length", "0")
        if not said_bytes.isdecimal() or len(said_bytes) > _LONGEST_LENGTH:
            return problem(400, "Content-Length: must be a number", path)
        if int(said_bytes) > self._body_bytes:
            return problem(413, _too_large(self._body_bytes), path, headers=_CLOSE)
        return None


def _denial(
    connection: HTTPConnection, key: str | None, caller: Caller | None, *, signs_in: bool
) -> Response | None:
    """Refuse a caller without a valid key, or a request from another site."""
    path = connection.scope["path"]
    other_site = access.from_another_site(connection.scope["method"], connection.headers)
    if path in access.OPEN and not other_site:
        return None
    if caller is None and path == "/" and "text/html" in connection.headers.get("accept", ""):
        encodings = connection.headers.get("accept-encoding", "")
        if signs_in and connection.scope["query_string"] != b"key":
            return refused_page("sign-in.html", encodings, {"WWW-Authenticate": "Bearer"})
        return refused_page("refused.html", encodings, access.CHALLENGE)
    if caller is None and path not in access.OPEN:
        said = "an API key is required" if key is None else "this API key is not valid"
        hint = "; send `Authorization: Bearer KEY`; `doll key create NAME` creates a key"
        return problem(401, said + hint, path, headers=access.CHALLENGE)
    if other_site:
        return problem(403, "changes are not accepted from pages of another site", path)
    if caller is not None:
        connection.scope[CALLER] = caller
    return None


def _too_many(path: str, what: str, wait_s: float) -> Response:
    headers = {"Retry-After": str(ceil(wait_s))}
    return problem(429, f"too many {what}", path, headers=headers)


def _too_large(body_bytes: int) -> str:
    """Return the error message for a body above the limit."""
    return f"the body is larger than {body_bytes:,} bytes"


def _bounded(receive: Receive, body_bytes: int) -> Receive:
    """Limit the size of a received body, no matter what Content-Length says."""
    taken = 0

    async def receive_some() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > body_bytes:
            raise HTTPException(413, _too_large(body_bytes), _CLOSE)
        return message

    return receive_some
