"""Access tokens of users: valid ones are accepted, others refused, even if the issuer is down."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import hypothesis
import pytest
from hypothesis import strategies as st
from joserfc import jws, jwt
from joserfc.jwk import RSAKey

from common.config.settings import Settings, read_settings
from common.errors import UserError
from services.admin.oidc import AGAIN_S, FRESH_S, SIGN_INS, Issuer, Person
from services.admin.routes.requests import JOB
from tests.contract.odd_servers import ODD, OddServer
from tests.contract.odd_servers import said as answered
from tests.fakes.clock import ManualClock
from tests.unit.admin.conftest import HOST, World, problem

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "https://login.test/realms/doll"
NOW_S = 1_800_000_000.0


@dataclass
class FakeIssuer:
    """An issuer with keys. It can be unavailable."""

    keys: dict[str, RSAKey] = field(default_factory=dict)
    away: bool = False
    asked: int = 0
    exchanged: list[dict[str, list[str]]] = field(default_factory=list)
    gives: str = ""

    def rotate(self, *names: str) -> None:
        """Replace the issuer's keys."""
        self.keys = {name: self.keys.get(name) or new_key(name) for name in names}

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        """Answer the service."""
        self.asked += 1
        if self.away:
            raise httpx2.ConnectError("nobody answers")
        if request.url.path.endswith("/token"):
            self.exchanged.append(parse_qs(request.content.decode()))
            return httpx2.Response(200, json={"access_token": self.gives})
        if request.url.path.endswith("/keys"):
            keys = [key.as_dict(private=False) for key in self.keys.values()]
            return httpx2.Response(200, json={"keys": keys})
        places = {"authorization_endpoint": "authorize", "token_endpoint": "token"}
        document = {name: f"{URL}/{place}" for name, place in places.items()}
        return httpx2.Response(200, json={"issuer": URL, "jwks_uri": f"{URL}/keys", **document})

    def token(self, key: str = "first", *, by: RSAKey | None = None, **changed: Any) -> str:  # noqa: ANN401 -- claims
        """Return a token. None omits a claim."""
        claims = {
            "iss": URL,
            "aud": ["doll", "mail"],
            "sub": "17",
            "exp": NOW_S + 600,
            "preferred_username": "ada",
            "groups": ["staff"],
            **changed,
        }
        given = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode({"alg": "RS256", "kid": key}, given, by or self.keys[key])


def new_key(name: str) -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": name, "use": "sig"})


@dataclass
class Office:
    """An admin service with users of an issuer."""

    world: World
    issuer: FakeIssuer
    clock: ManualClock

    def as_whom(self, token: str) -> tuple[int, str]:
        """Return the status, and the role or the problem."""
        answer = self.world.ask("GET", "/v1/me", key=token)
        body = answer.json()
        return answer.status_code, body.get("role") or body["detail"]


@pytest.fixture
def office() -> Iterator[Office]:
    settings = Settings(
        blobs="s3://memory",
        oidc_issuer=URL,
        oidc_audience="doll",
        oidc_operators=("ml-platform",),
        oidc_client_id="doll-page",
    )
    world, issuer, clock = World(settings), FakeIssuer(), ManualClock(NOW_S)
    issuer.rotate("first")
    world.service.clock = clock
    world.service.issuer = Issuer(settings, clock, httpx2.MockTransport(issuer.answer))
    yield Office(world, issuer, clock)
    world.close()


def test_token_with_the_group_is_an_operator_and_others_are_viewers(office: Office) -> None:
    office.world.streams("clinic-a", "clinic-b")
    token = office.issuer.token(groups=["staff", "ml-platform"])
    viewer = office.issuer.token(groups=None)

    assert office.as_whom(token) == (200, "operator")
    assert office.as_whom(viewer) == (200, "viewer")
    assert "needs the role operator" in problem(
        office.world.ask("POST", "/v1/jobs", key=viewer, json=JOB), 403
    )
    assert office.world.ask("POST", "/v1/jobs", key=token, json=JOB).status_code == 201
    answer = office.world.ask("PATCH", "/v1/jobs/digits", key=token, json={"wanted": "paused"})
    assert answer.json()["reason"] == "paused by oidc:ada"
    assert office.world.get("/v1/me") == {"name": "eve", "role": "viewer"}  # keys still work


def test_token_with_a_wrong_claim_or_signature_is_rejected(office: Office) -> None:
    good = office.issuer.token()
    header, claims, signature = good.split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none","kid":"first"}').decode().rstrip("=")
    public = office.issuer.keys["first"].as_pem(private=False)
    hs256 = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"first"}').decode().rstrip("=")
    mac = hmac.digest(public, f"{hs256}.{claims}".encode(), "sha256")
    by_public_key = base64.urlsafe_b64encode(mac).decode().rstrip("=")
    bad = {
        "none": f"{none}.{claims}.",
        "none, signed": f"{none}.{claims}.{signature}",
        "a shared secret": f"{hs256}.{claims}.{by_public_key}",
        "no signature": f"{header}.{claims}.",
        "another audience": office.issuer.token(aud="mail"),
        "no audience": office.issuer.token(aud=None),
        "another issuer": office.issuer.token(iss="https://login.test/realms/other"),
        "over": office.issuer.token(exp=NOW_S - 60),
        "for ever": office.issuer.token(exp=None),
        "not yet": office.issuer.token(nbf=NOW_S + 600),
        "nobody": office.issuer.token(sub=None),
        "somebody else's key": office.issuer.token(by=new_key("first")),
        "an unknown key": office.issuer.token("second", by=new_key("second")),
        "garbage": "a.b.c",
    }

    found = {why: office.as_whom(token)[0] for why, token in bad.items()}

    assert office.as_whom(good) == (200, "viewer")
    assert found == dict.fromkeys(bad, 401)
    # The service requested the discovery document and the keys once for all tokens.
    assert office.issuer.asked == 2


def test_new_issuer_key_is_learned_and_a_withdrawn_one_forgotten(office: Office) -> None:
    old = office.issuer.token(exp=NOW_S + 10_000)
    assert office.as_whom(old)[0] == 200

    office.issuer.rotate("second")
    office.clock.advance(10.0)
    assert office.as_whom(office.issuer.token("second"))[0] == 200
    assert office.as_whom(old)[0] == 401

    second = office.issuer.token("second", exp=NOW_S + 10_000)
    office.issuer.rotate("third")
    office.clock.advance(FRESH_S)
    # The service requests the keys in the background.
    for _ in range(1000):
        status, _said = office.as_whom(second)
        if status == 401:
            break
    assert status == 401


def test_known_keys_remain_valid_while_the_issuer_is_unavailable(office: Office) -> None:
    known = office.issuer.token(exp=NOW_S + 10_000)
    assert office.as_whom(known)[0] == 200

    office.issuer.away = True
    office.clock.advance(FRESH_S + 10)
    assert office.as_whom(known) == (200, "viewer")
    office.issuer.rotate("second")
    for _ in range(2):
        status, said = office.as_whom(office.issuer.token("second", exp=NOW_S + 10_000))
        assert status == 503
        assert f"the OpenID Connect issuer {URL} cannot be reached" in said

    office.issuer.away = False
    office.clock.advance(10.0)
    assert office.as_whom(office.issuer.token("second", exp=NOW_S + 10_000))[0] == 200


def part(value: object) -> str:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(body).decode().rstrip("=")


def signed(office: Office, claims: object) -> str:
    """Return a token of the issuer's key with these claims."""
    head = {"alg": "RS256", "kid": "first"}
    body = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    return jws.serialize_compact(head, body, office.issuer.keys["first"])


def valid(**changed: object) -> dict[str, object]:
    claims = {"iss": URL, "aud": "doll", "sub": "17", "exp": NOW_S + 600}
    return {**claims, **changed}


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
HEADERS = ("alg", "kid", "typ", "crit", "b64", "jwk", "jku", "x5c", "x5t", "x5u", "cty")
CLAIMS = ("iss", "aud", "sub", "exp", "nbf", "iat", "jti", "groups", "preferred_username", "email")


@pytest.mark.parametrize(
    "changed",
    [
        {"exp": 10**400},
        {"exp": float("inf")},
        {"exp": float("nan")},
        {"exp": "soon"},
        {"exp": True},
        {"groups": 5},
        {"groups": {"ml-platform": True}},
        {"preferred_username": 5},
        {"email": [1]},
        {"sub": 5},
        {"aud": {"doll": 1}},
        {"aud": [["doll"]]},
        {"nbf": []},
        {"iat": {}},
    ],
)
def test_signed_claim_of_another_type_is_rejected(office: Office, changed: dict[str, Any]) -> None:
    assert office.as_whom(signed(office, valid()))[0] == 200
    status, said = office.as_whom(signed(office, valid(**changed)))
    assert (status, "not valid" in said) == (401, True)


def test_malformed_token_is_rejected(office: Office) -> None:
    rest = f"{part(valid())}.{part(b'x')}"
    good = {"alg": "RS256", "kid": "first"}
    odd: dict[str, list[object]] = {
        "crit": [5, [], ["b64"], [5], {}, "kid"],
        "alg": [5, [], None, {}, ""],
        "kid": [5, [], {}],
    }
    heads: list[object] = [
        *({**good, name: each} for name, values in odd.items() for each in values),
        *([], 5, None, "a", b"[" * 9_000, b"\xff", b"", b"9" * 9_000),
    ]
    for head in heads:
        assert office.as_whom(f"{part(head)}.{rest}")[0] == 401, head
    for claims in (b"[" * 20_000, b'{"exp": ' + b"9" * 20_000 + b"}", b"[]", b"5", b"", b"\xff"):
        assert office.as_whom(signed(office, claims))[0] == 401, claims[:20]


@hypothesis.settings(
    max_examples=100, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(st.sampled_from(HEADERS), st.sampled_from(CLAIMS), JSON, JSON)
def test_any_json_in_a_token_is_accepted_or_rejected_without_error(
    office: Office, header: str, claim: str, first: object, second: object
) -> None:
    head = part({"alg": "RS256", "kid": "first", header: first})
    assert office.as_whom(f"{head}.{part(valid())}.{part(b'x')}")[0] == 401
    assert office.as_whom(signed(office, valid(**{claim: second})))[0] in (200, 401)


@pytest.mark.parametrize("kind", ODD)
def test_invalid_issuer_response_means_unavailable_until_a_valid_one(
    office: Office, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.admin.oidc.PATIENCE_S", 0.5)
    with OddServer(ODD[kind]) as server:
        settings = office.world.settings.model_copy(update={"oidc_issuer": server.url})
        office.world.service.issuer = Issuer(settings, office.clock)
        status, said = office.as_whom(office.issuer.token(iss=server.url))
        assert (status, server.url in said) == (503, True)
        keys = [key.as_dict(private=False) for key in office.issuer.keys.values()]
        names = ("jwks_uri", "authorization_endpoint", "token_endpoint")
        document = {"issuer": server.url, **dict.fromkeys(names, f"{server.url}/keys")}
        good = {**document, "keys": keys}
        server.answer = answered(good)

        def may_come_in() -> bool:
            office.clock.advance(AGAIN_S)
            return office.as_whom(office.issuer.token(iss=server.url))[0] == 200

        # A busy machine may be late for some.
        assert any(may_come_in() for _ in range(20))


@pytest.mark.parametrize(
    "keys", [None, [], [None], [5], [{}], [{"kty": 5}], [{"kty": "RSA", "n": 5, "e": []}]]
)
def test_invalid_issuer_keys_return_503(office: Office, keys: object) -> None:
    document = dict.fromkeys(("authorization_endpoint", "token_endpoint"), f"{URL}/keys")
    answer = {"issuer": URL, "jwks_uri": f"{URL}/keys", **document, "keys": keys}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=answer))
    office.world.service.issuer = Issuer(office.world.settings, office.clock, transport)
    assert office.as_whom(office.issuer.token())[0] == 503


def test_new_issuer_key_is_read_while_sign_ins_hang(office: Office) -> None:
    """Ten users' codes are never answered. Keys are still read."""
    assert office.as_whom(office.issuer.token())[0] == 200
    issuer = office.world.service.issuer
    assert issuer is not None
    asked, free = threading.Semaphore(0), threading.Event()

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/token"):
            asked.release()
            await asyncio.to_thread(free.wait)
        return office.issuer.answer(request)

    office.world.service.issuer = issuer = Issuer(
        office.world.settings, office.clock, httpx2.MockTransport(answer)
    )
    assert office.as_whom(office.issuer.token())[0] == 200

    async def flooded() -> Person | None:
        flood = [asyncio.create_task(issuer.token("code", "back", "x")) for _ in range(10)]
        for _ in range(SIGN_INS):
            assert await asyncio.to_thread(asked.acquire, timeout=60.0)
        office.issuer.rotate("second")
        office.clock.advance(AGAIN_S)
        found = await issuer.person(office.issuer.token("second"))
        free.set()
        await asyncio.gather(*flood, return_exceptions=True)
        return found

    person = asyncio.run(flooded())
    assert person is not None
    assert person.name == "oidc:ada"


def test_browser_signs_in_with_a_code_that_only_it_can_use(office: Office) -> None:
    world = office.world
    html = {"Accept": "text/html"}
    front = world.ask("GET", "/", key=None, headers=html)
    assert (front.status_code, "/sign-in" in front.text) == (401, True)
    assert not front.headers["www-authenticate"].startswith("Basic")
    by_key = world.ask("GET", "/?key", key=None, headers=html)
    assert by_key.headers["www-authenticate"].startswith("Basic")

    leaving = world.ask("GET", "/sign-in", key=None)
    there = urlsplit(leaving.headers["location"])
    query = {name: value for name, (value,) in parse_qs(there.query).items()}
    cookie = leaving.headers["set-cookie"]
    assert f"{there.scheme}://{there.netloc}{there.path}" == f"{URL}/authorize"
    assert query["code_challenge_method"] == "S256"
    assert query["redirect_uri"] == f"http://{HOST}/sign-in/done"
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie

    office.issuer.gives = office.issuer.token(groups=["ml-platform"])
    done = f"/sign-in/done?code=c1&state={query['state']}"
    assert "did not start" in problem(world.ask("GET", done, key=None), 422)
    sent = {"Cookie": cookie.partition(";")[0]}
    assert "did not start" in problem(
        world.ask("GET", "/sign-in/done?code=c1&state=guessed", key=None, headers=sent), 422
    )
    back = world.ask("GET", done, key=None, headers=sent)
    assert (back.status_code, back.headers["location"]) == (303, "/")
    [form] = office.issuer.exchanged
    verifier = form["code_verifier"][0]
    assert verifier in cookie
    assert verifier not in leaving.headers["location"]

    kept = back.headers["set-cookie"].partition(";")[0]
    mine = {"Cookie": kept}
    assert world.ask("GET", "/v1/me", key=None, headers=mine).json()["role"] == "operator"


def test_cookie_is_not_accepted_from_another_site(office: Office) -> None:
    mine = {"Cookie": f"doll-token={office.issuer.token(groups=['ml-platform'])}"}
    here = {"Origin": f"http://{HOST}"}
    body = {"json": {"wanted": "paused"}}
    path = "/v1/jobs/nobody"

    for headers in ({"Origin": "https://evil.test"}, {"Origin": "null"}, {}):
        answer = office.world.ask("PATCH", path, key=None, headers=mine | headers, **body)
        assert "another site" in problem(answer, 403)
    assert office.world.ask("PATCH", path, key=None, headers=mine | here, **body).status_code == 404
    out = office.world.ask("POST", "/sign-in/out", key=None, headers=mine | here)
    assert (out.status_code, 'doll-token=""' in out.headers["set-cookie"]) == (204, True)


def test_issuer_with_another_name_is_rejected(office: Office) -> None:
    office.world.service.issuer = Issuer(
        office.world.settings.model_copy(update={"oidc_issuer": "https://login.test/other"}),
        office.clock,
        httpx2.MockTransport(office.issuer.answer),
    )

    status, said = office.as_whom(office.issuer.token())

    assert status == 503
    assert "DOLL_OIDC_ISSUER: must be" in said


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DOLL_OIDC_ISSUER": URL}, "DOLL_OIDC_AUDIENCE"),
        (
            {"DOLL_OIDC_ISSUER": "http://login.test", "DOLL_OIDC_AUDIENCE": "doll"},
            "must begin with https",
        ),
    ],
)
def test_unsafe_issuer_settings_are_rejected(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_settings(environ)


def test_sign_in_without_an_issuer_returns_404(world: World) -> None:
    assert "DOLL_OIDC_CLIENT_ID" in problem(world.ask("GET", "/sign-in", key=None), 404)
    token = json.dumps({"alg": "none"})
    assert world.ask("GET", "/v1/me", key=f"{token}.x.").status_code == 401
