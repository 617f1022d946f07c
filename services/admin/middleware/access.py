"""Who may do what: API keys and tokens of people, roles on every route.

A key comes as `Authorization: Bearer KEY`, or as the password of Basic, so that a browser can open
the page: it asks its user once, whatever the name. A person's access token comes as Bearer, or in
the cookie of the page's sign-in. Nothing but health, and the way to sign in, is open.
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
TOKEN_COOKIE = "doll-token"  # noqa: S105 -- its name
# Basic alone: Chromium takes a header for one challenge, and asks nobody where it names two.
CHALLENGE = {"WWW-Authenticate": 'Basic realm="doll", charset="UTF-8"'}
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # change nothing
_LONGEST = 8000  # characters of a header that is looked at: a token with many groups


def presented(headers: Headers) -> str | None:
    """The key that a request came with, valid or not."""
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
    """The token of somebody who signed in on the page."""
    if "authorization" in connection.headers:
        return None
    return connection.cookies.get(TOKEN_COOKIE)


def from_another_site(method: str, headers: Headers) -> bool:
    """Whether a page of another site made a browser send what would change something.

    A browser adds a key that it remembers to whatever any page makes it send, and the page's origin
    to all that may change something. Programs send no origin, and no cookie.
    """
    origin = headers.get("origin")
    if method in _SAFE or origin is None:
        return method not in _SAFE and "cookie" in headers
    try:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:  # no origin that a browser would send
        return True


class _Scheme(HTTPBase):
    """A way to present a key, for the OpenAPI document; the gate has read the header already."""

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        """Nothing is left to do."""


_BEARER = _Scheme(scheme="bearer", scheme_name="Bearer", description="An API key.")
_BASIC = _Scheme(
    scheme="basic", scheme_name="Basic", description="An API key as the password; any name."
)


def _needing(role: Role) -> Callable[..., Awaitable[Caller]]:
    """Whose key a request came with, for a route that is for this role.

    Raises:
        HTTPException: When called: 401 without a key, 403 if its role is too small.
    """

    async def caller(
        request: Request,
        _bearer: Annotated[None, Security(_BEARER)],
        _basic: Annotated[None, Security(_BASIC)],
    ) -> Caller:
        known = cast("Caller | None", request.scope.get(CALLER))
        if known is None:
            raise HTTPException(401, "needs an API key", CHALLENGE)
        if not known.may(role):
            raise HTTPException(
                403, f'needs the role {role}; "{known.name}" has the role {known.role}'
            )
        return known

    return caller


VIEWER = Depends(_needing("viewer"))  # for what need not know whose key it was
OPERATOR = Depends(_needing("operator"))
Viewer: TypeAlias = Annotated[Caller, VIEWER]
Operator: TypeAlias = Annotated[Caller, OPERATOR]
