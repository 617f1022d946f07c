"""`/sign-in`: browsers get a token from the OpenID Connect issuer, as a cookie.

The cookie is the token itself, so every replica accepts it. Scripts cannot read it, and other sites
cannot make the browser send it with a change (SameSite, and `Origin` at the gate).
"""

from __future__ import annotations

import hmac
import secrets
from typing import Annotated

from fastapi import APIRouter, Cookie, Query, Request
from starlette.responses import RedirectResponse, Response

from common.errors import NotFoundError, UserError
from services.admin.middleware.access import TOKEN_COOKIE
from services.admin.oidc import Issuer  # noqa: TC001 -- FastAPI reads it when run
from services.admin.service import AdminService, Answering  # noqa: TC001 -- FastAPI reads it when run

router = APIRouter(prefix="/sign-in", include_in_schema=False)

# Holds state and verifier while the browser is at the issuer.
_COOKIE = "doll-sign-in"
_AWAY_S = 600
# Maximum size of a cookie in bytes that every browser accepts.
_LARGEST = 4000


@router.get("")
async def leave(service: Answering, request: Request) -> Response:
    """Redirect a browser to the issuer."""
    state, verifier = secrets.token_urlsafe(32), secrets.token_urlsafe(64)
    there = await _issuer(service).way_in(_back(request), state, verifier)
    answer = RedirectResponse(there, 303, headers={"Cache-Control": "no-store"})
    _keep(answer, request, _COOKIE, f"{state}.{verifier}", _AWAY_S)
    return answer


@router.get("/done")
async def come_back(
    service: Answering,
    request: Request,
    code: Annotated[str, Query(max_length=4000)] = "",
    state: Annotated[str, Query(max_length=200)] = "",
    kept: Annotated[str, Cookie(alias=_COOKIE)] = "",
) -> Response:
    """Exchange the issuer's code, which the browser brings, for a token.

    Raises:
        UserError: If this browser did not start the sign-in, or the token is not for this service.
    """
    issuer = _issuer(service)
    asked, _, verifier = kept.partition(".")
    if not code or not asked or not hmac.compare_digest(asked.encode(), state.encode()):
        raise UserError(
            "this browser did not start this sign-in, or it has expired; open / and sign in again"
        )
    token = await issuer.token(code, _back(request), verifier)
    person = await issuer.person(token)
    if person is None:
        raise UserError(
            "the issuer's access token is not for this service; check DOLL_OIDC_AUDIENCE and"
            " DOLL_OIDC_SCOPE"
        )
    if len(token) > _LARGEST:
        raise UserError(
            f"the issuer's access token must have at most {_LARGEST} bytes, got {len(token)}"
        )
    answer = RedirectResponse("/", 303, headers={"Cache-Control": "no-store"})
    _keep(answer, request, TOKEN_COOKIE, token, max(0, int(person.until_s - service.clock())))
    answer.delete_cookie(_COOKIE, path=router.prefix)
    return answer


@router.post("/out")
async def sign_out(service: Answering) -> Response:
    """Delete the browser's token."""
    _issuer(service)
    answer = Response(status_code=204)
    answer.delete_cookie(TOKEN_COOKIE)
    return answer


def _issuer(service: AdminService) -> Issuer:
    """Return the issuer.

    Raises:
        NotFoundError: If sign-in is not configured.
    """
    if service.issuer is None or not service.issuer.signs_in:
        raise NotFoundError("sign-in is not available, because DOLL_OIDC_CLIENT_ID is not set")
    return service.issuer


def _back(request: Request) -> str:
    return str(request.url.replace(path=f"{router.prefix}/done", query=""))


def _keep(answer: Response, request: Request, name: str, value: str, life_s: int) -> None:
    answer.set_cookie(
        name,
        value,
        max_age=life_s,
        path=router.prefix if name == _COOKIE else "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="lax",
    )
