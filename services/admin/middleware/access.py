"""Access control: API keys, people's tokens, and the role that each route requires.

A key is sent as `Authorization: Bearer KEY` or as the password of Basic with any user name, so that
a browser can ask its user for it. A person's access token is sent as Bearer or in the cookie of the
page's sign-in. Only health checks and the sign-in are open.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeAlias, cast
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request, Security
from fastapi.security.http import HTTPBase

from common.api.keys import KeyRecord, Role
from common.runtime.connections import CALLER
from services.admin.oidc import Person

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.requests import HTTPConnection

Caller: TypeAlias = KeyRecord | Person

OPEN = frozenset({"/healthz", "/readyz", "/sign-in", "/sign-in/done", "/sign-in/out"})
TOKEN_COOKIE = "doll-token"  # noqa: S105 -- the cookie's name
# Basic only: Chromium sends one challenge's header and does not prompt if there are two.
CHALLENGE = {"WWW-Authenticate": 'Basic realm="doll", charset="UTF-8"'}
# Methods that change nothing.
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# Maximum header length in characters; enough for a token with many groups.
_LONGEST = 8000


def presented(headers: Headers) -> str | None:
    """Return the key or token of a request, valid or not."""
    scheme, _, rest = headers.get("authorization", "")[:_LONGEST].partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest or None
    if scheme.lower() != "basic":
        return None
    try:
        _, _, password = b64decode(rest, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return password or None


def in_cookie(connection: HTTPConnection) -> str | None:
    """Return the token of a person who signed in on the page."""
    if "authorization" in connection.headers:
        return None
    return connection.cookies.get(TOKEN_COOKIE)


def from_another_site(method: str, headers: Headers) -> bool:
    """Return True if a page of another site made the browser send a change.

    A browser adds remembered keys and cookies to requests of any page, and the page's origin to
    those that may change something. Programs send neither an origin nor a cookie.
    """
    origin = headers.get("origin")
    if method in _SAFE or origin is None:
        return method not in _SAFE and "cookie" in headers
    try:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    # A browser would not send such an origin.
    except ValueError:
        return True


class _Scheme(HTTPBase):
    """Authentication scheme for the OpenAPI document; the gate has read the header already."""

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        """Do nothing."""


_BEARER = _Scheme(scheme="bearer", scheme_name="Bearer", description="An API key.")
_BASIC = _Scheme(
    scheme="basic", scheme_name="Basic", description="An API key as the password; any name."
)


def _needing(role: Role) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency that yields the caller of a route for this role.

    Raises:
        HTTPException: When called: 401 without a key, 403 if its role is insufficient.
    """

    async def caller(
        request: Request,
        _bearer: Annotated[None, Security(_BEARER)],
        _basic: Annotated[None, Security(_BASIC)],
    ) -> Caller:
        known = cast("Caller | None", request.scope.get(CALLER))
        if known is None:
            raise HTTPException(401, "an API key is required", CHALLENGE)
        if not known.may(role):
            raise HTTPException(
                403, f'needs the role {role}; "{known.name}" has the role {known.role}'
            )
        return known

    return caller


# Dependency of routes that do not use the caller.
VIEWER = Depends(_needing("viewer"))
OPERATOR = Depends(_needing("operator"))
Viewer: TypeAlias = Annotated[Caller, VIEWER]
Operator: TypeAlias = Annotated[Caller, OPERATOR]
