"""Sign-in of people at an OpenID Connect issuer: requests for access tokens, and their checks.

A token signed by a known key is checked here without a request to the issuer, so that people stay
signed in while the issuer is unavailable. The keys are read again when a token names an unknown
key, and every `FRESH_S`, so that a withdrawn key stops counting.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlencode

import msgspec
from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from common.errors import OutsideError, UnavailableError, UserError, WireError, decoded
from common.http.client import BoundedClient
from services.admin.limiter import Limiter

if TYPE_CHECKING:
    import httpx2

    from common.api.keys import Role
    from common.config.settings import Settings

# Asymmetric algorithms only: with HS256 the issuer's public key would act as a shared secret.
ALGORITHMS = [
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "Ed25519", "EdDSA"),
]
# Maximum time in seconds that a withdrawn key still counts.
FRESH_S = 300.0
# Minimum time between requests for keys, no matter how many tokens name unknown keys. A new key
# counts after this time at the latest.
AGAIN_S = 2.0
PATIENCE_S = 5.0
# Maximum number of concurrent sign-ins, so that they cannot keep the keys from being read.
SIGN_INS = 4
# Tolerated difference between clocks, in seconds.
LEEWAY_S = 30
_LONGEST_NAME = 100
# Seconds since 1970; in the year 5138.
_LATEST_S = 1e11
# Exceptions that `joserfc` raises for malformed tokens or keys, besides its own.
_BUILT_IN = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
_MALFORMED = JoseError, WireError, *_BUILT_IN

T = TypeVar("T")


_Url: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^https?://[!-~]+$")]


class _Document(msgspec.Struct, frozen=True):
    issuer: _Url
    jwks_uri: _Url
    authorization_endpoint: _Url
    token_endpoint: _Url


class _Keys(msgspec.Struct, frozen=True):
    keys: list[dict[str, object]]


class _Granted(msgspec.Struct, frozen=True):
    access_token: str


class _Header(msgspec.Struct, frozen=True):
    alg: str
    kid: str | None = None
    # Extensions that must be understood. None is supported, so there must be none.
    crit: None = None


_DOCUMENT = msgspec.json.Decoder(_Document)
_KEYS = msgspec.json.Decoder(_Keys)
_GRANTED = msgspec.json.Decoder(_Granted)
_HEADER = msgspec.json.Decoder(_Header)


class Person(NamedTuple):
    """Person who is signed in."""

    # Contains a colon, unlike names of API keys.
    name: str
    role: Role
    # End of the token's validity, in seconds since 1970.
    until_s: float

    def may(self, needed: Role) -> bool:
        """Return True if the person has the given role."""
        return needed in ("viewer", self.role)


@dataclass(frozen=True, slots=True)
class _Known:
    """Endpoints and keys that the issuer publishes."""

    name: str
    authorization: str
    token: str
    keys: KeySet
    at_s: float


class Issuer:
    """One issuer; belongs to the event loop.

    Args:
        settings: Settings `oidc_*`; `oidc_issuer` must be set.
        clock: Returns seconds since 1970.
        transport: Optional. If unset, the network.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._name = f"the OpenID Connect issuer {settings.oidc_issuer}"
        self._http = BoundedClient(self._name, PATIENCE_S, transport)
        self._turns = Limiter("signing in", SIGN_INS, 2 * PATIENCE_S)
        self._lock = asyncio.Lock()
        self._known: _Known | None = None
        self._asked_s = -AGAIN_S
        # Error of the last request to the issuer, or None.
        self._away: UnavailableError | None = None
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def signs_in(self) -> bool:
        """True if browsers are sent to the issuer to sign in."""
        return bool(self._settings.oidc_client_id)

    async def person(self, token: str) -> Person | None:
        """Return the owner of an access token, or None if the token is invalid.

        Raises:
            UnavailableError: If its key is unknown and the issuer is unavailable.
        """
        try:
            return self._judged(token, await self._fresh())
        # A bad signature may come from a new key of the same name.
        except (InvalidKeyIdError, BadSignatureError) as error:
            unknown = isinstance(error, InvalidKeyIdError)
        try:
            return self._judged(token, await self._ask())
        except (InvalidKeyIdError, BadSignatureError):
            return None
        except UnavailableError:
            if unknown:
                raise
            return None

    async def way_in(self, back: str, state: str, verifier: str) -> str:
        """Return the URL where a browser signs in (authorization code with PKCE).

        Args:
            back: URL that the issuer redirects the browser to.
            state: Value that the issuer returns with the redirect.
            verifier: Secret that must accompany the request for the token.

        Raises:
            UnavailableError: If the issuer is unavailable.
        """
        known = await self._fresh()
        digest = hashlib.sha256(verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": back,
            "scope": self._settings.oidc_scope,
            "state": state,
            "code_challenge": base64.urlsafe_b64encode(digest).decode().rstrip("="),
            "code_challenge_method": "S256",
        }
        return (
            f"{known.authorization}{'&' if '?' in known.authorization else '?'}{urlencode(query)}"
        )

    async def token(self, code: str, back: str, verifier: str) -> str:
        """Exchange an authorization code for an access token.

        Raises:
            UserError: If the issuer refuses.
            UnavailableError: If the issuer is unavailable.
        """
        known = await self._fresh()
        form = {
            "grant_type": "authorization_code",
            "client_id": self._settings.oidc_client_id,
            "code": code,
            "redirect_uri": back,
            "code_verifier": verifier,
        }
        if self._settings.oidc_client_secret:
            form["client_secret"] = self._settings.oidc_client_secret
        granted = await self._turns.run(
            lambda: self._http.submit(self._answer("POST", known.token, _GRANTED, form)).result()
        )
        return granted.access_token

    def close(self) -> None:
        """Send no more requests."""
        self._turns.close()
        self._http.close()

    def _judged(self, token: str, known: _Known) -> Person | None:
        """Return the owner of a token according to known keys, or None if it is invalid.

        Raises:
            InvalidKeyIdError: If the token names an unknown key.
            BadSignatureError: If no known key of that name made the signature.
        """
        now = self._clock()
        registry = jwt.JWTClaimsRegistry(
            int(now),
            LEEWAY_S,
            iss={"essential": True, "value": known.name},
            aud={"essential": True, "value": self._settings.oidc_audience},
            exp={"essential": True},
            sub={"essential": True},
        )
        try:
            header = base64.urlsafe_b64decode(token.partition(".")[0] + "==")
            decoded(_HEADER.decode, header, "header")
            claims = jwt.decode(token, known.keys, algorithms=ALGORITHMS).claims
            registry.validate(claims)
            until_s = float(claims["exp"]) + LEEWAY_S
        except (InvalidKeyIdError, BadSignatureError):
            raise
        except _MALFORMED:
            return None
        name = claims.get("preferred_username") or claims.get("email") or claims["sub"]
        groups = claims.get(self._settings.oidc_groups) or []
        mine = [groups] if isinstance(groups, str) else groups
        if not (isinstance(name, str) and isinstance(mine, list) and until_s < _LATEST_S):
            return None
        operator = any(each in mine for each in self._settings.oidc_operators)
        shown = "".join(each if each.isprintable() else "?" for each in name[:_LONGEST_NAME])
        return Person(f"oidc:{shown}", "operator" if operator else "viewer", until_s)

    async def _fresh(self) -> _Known:
        """Return the published data, and refresh it in the background if it is old.

        Raises:
            UnavailableError: If nothing is known and the issuer is unavailable.
        """
        if self._known is None:
            return await self._ask()
        due = self._clock() - max(self._known.at_s + FRESH_S, self._asked_s + AGAIN_S) >= 0
        if due and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refresh())
        return self._known

    async def _refresh(self) -> None:
        try:
            await self._ask()
        except OutsideError:
            # The data known so far stays valid.
            return

    async def _ask(self) -> _Known:
        """Read the published data; reuse the result of a request less than `AGAIN_S` ago.

        Raises:
            UnavailableError: If the issuer is unavailable.
        """
        async with self._lock:
            if self._clock() - self._asked_s >= AGAIN_S:
                self._asked_s, self._away = self._clock(), None
                try:
                    self._known = await asyncio.wrap_future(self._http.submit(self._read()))
                except UnavailableError as error:
                    self._away = error
            if self._away is not None or self._known is None:
                raise UnavailableError(str(self._away))
            return self._known

    async def _read(self) -> _Known:
        """Read the issuer's endpoints and keys.

        Raises:
            UnavailableError: If the issuer does not answer correctly.
        """
        place = f"{self._settings.oidc_issuer}/.well-known/openid-configuration"
        document = await self._answer("GET", place, _DOCUMENT)
        if document.issuer.rstrip("/") != self._settings.oidc_issuer:
            raise UnavailableError(
                f"DOLL_OIDC_ISSUER: must be {document.issuer}, got {self._settings.oidc_issuer}"
            )
        found = await self._answer("GET", document.jwks_uri, _KEYS)
        try:
            # The library validates the keys.
            keys = KeySet.import_key_set({"keys": found.keys})  # type: ignore[typeddict-item]
        except _MALFORMED as error:
            raise self._strange(error) from error
        places = document.authorization_endpoint, document.token_endpoint
        return _Known(document.issuer, *places, keys, self._clock())

    async def _answer(
        self,
        method: str,
        url: str,
        decoder: msgspec.json.Decoder[T],
        form: dict[str, str] | None = None,
    ) -> T:
        """Request JSON.

        Raises:
            UserError: If the issuer refuses.
            UnavailableError: If the issuer is unavailable.
        """
        status, body = await self._http.answer(method, url, data=form)
        if form is not None and 400 <= status < 500:
            raise UserError("the OpenID Connect issuer rejected this sign-in; sign in again")
        if status != 200:
            raise self._strange(f"status {status}")
        what = f"{self._name} sent an invalid response"
        return decoded(decoder.decode, body, what, UnavailableError)

    def _strange(self, what: object) -> UnavailableError:
        return UnavailableError(f"{self._name} sent an invalid response: {what}")
