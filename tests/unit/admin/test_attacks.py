"""Attacks by strangers and by other web sites fail."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.api.keys import Keys, KeyStore
from services.admin.routes.requests import JOB
from tests.unit.admin.conftest import HOST, World, problem

if TYPE_CHECKING:
    from collections.abc import Iterator

EVIL = "http://evil.example"
FORGED = {
    "Forwarded": "for=127.0.0.1;host=evil.example;proto=https",
    "X-Forwarded-For": "127.0.0.1",
    "X-Forwarded-Host": "evil.example",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-User": "olga",
    "X-Original-URL": "/healthz",
    "X-Real-IP": "127.0.0.1",
    "X-Rewrite-URL": "/healthz",
}
NAMES = (
    *("..%2f..%2fetc%2fpasswd", "%2e%2e", "digits%00", "digits%0d%0aX: y", "Digits", "digits%20"),
    *("%F0%9F%92%A5", "digits;DROP", "-", "a" * 101, "a" * 5000, "{job}", "%25s", "doll.jobs"),
)
BODIES = (
    *(b"", b"[]", b"null", b'"digits"', b"1", b"\xff\xfe", b"{", b'{"name": "digits"', b"\x00"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b'{"name": ' + b"9" * 10_000 + b"}"),
    *(b'{"batch_size": NaN}', b'{"batch_size": 1e999}', b'{"name": "\\ud800"}'),
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A service with a job, which these tests do not change."""
    made = World()
    made.streams("clinic-a", "clinic-b")
    assert made.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_changes(world: World) -> Iterator[None]:
    before = dict(world.service.stores.jobs)
    yield
    assert dict(world.service.stores.jobs) == before


@pytest.mark.parametrize("name", FORGED)
def test_forged_proxy_header_grants_no_access(world: World, name: str) -> None:
    forged = {name: FORGED[name]}
    assert problem(world.ask("GET", "/v1/jobs", key=None, headers=forged), 401)
    answer = world.ask("DELETE", "/v1/jobs/digits", key="viewer", headers=forged)
    assert problem(answer, 403)


@pytest.mark.parametrize("name", FORGED)
def test_forged_proxy_header_does_not_make_a_page_of_another_site_trusted(
    world: World, name: str
) -> None:
    for origin in (EVIL, "null"):
        headers = {"Origin": origin, name: FORGED[name]}
        answer = world.ask("DELETE", "/v1/jobs/digits", headers=headers)
        assert "another site" in problem(answer, 403)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_form_from_another_site_changes_nothing(world: World, kind: str) -> None:
    body = json.dumps({"wanted": "stopped"}).encode()
    for origin, status in ((EVIL, 403), (f"http://{HOST}", 422)):
        headers = {"Origin": origin, "Content-Type": kind}
        answer = world.ask("PATCH", "/v1/jobs/digits", content=body, headers=headers)
        assert problem(answer, status)


def test_method_override_header_is_ignored(world: World) -> None:
    headers = {"X-HTTP-Method-Override": "DELETE", "X-Method-Override": "DELETE"}
    answer = world.ask("GET", "/v1/jobs/digits?_method=DELETE", key="viewer", headers=headers)
    assert answer.status_code == 200


def test_response_has_no_cors_headers(world: World) -> None:
    headers = {"Origin": EVIL, "Access-Control-Request-Method": "DELETE"}
    for method, key in (("OPTIONS", None), ("OPTIONS", "operator"), ("GET", "operator")):
        answer = world.ask(method, "/v1/jobs/digits", key=key, headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("name", NAMES)
def test_path_with_an_invalid_job_name_returns_404(world: World, name: str) -> None:
    for method, path, body in (
        ("GET", f"/v1/jobs/{name}", None),
        ("GET", f"/v1/jobs/{name}/model", None),
        ("GET", f"/v1/jobs/{name}/quarantine", None),
        ("DELETE", f"/v1/jobs/{name}", None),
        ("PATCH", f"/v1/jobs/{name}", {"wanted": "paused"}),
        ("POST", f"/v1/jobs/{name}/requeue", {"batches": "all"}),
    ):
        answer = world.ask(method, path, json=body)
        assert answer.status_code in (404, 405), (path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["..", "a/b", "A", "", "-a", "a" * 101, "a\n", "ä", "a b"])
def test_create_job_with_an_invalid_name_returns_422(world: World, name: str) -> None:
    assert "name" in problem(world.ask("POST", "/v1/jobs", json={**JOB, "name": name}), 422)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/jobs"),
        ("PATCH", "/v1/jobs/digits"),
        ("POST", "/v1/jobs/digits/requeue"),
        ("POST", "/v1/provisioning/plan"),
    ],
)
def test_invalid_body_returns_a_client_error(
    world: World, method: str, path: str, body: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = world.ask(method, path, content=body, headers=headers)
    assert answer.status_code in (400, 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(sorted(JOB)), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON_VALUES, st.sampled_from(["", *JOB]), st.sampled_from(["json", "yaml"]))
@settings(max_examples=200, deadline=None)
def test_any_json_as_a_job_or_field_is_accepted_or_rejected_with_detail(
    value: object, field: str, kind: str
) -> None:
    body = {**JOB, field: value} if field else value
    answer = fuzzed().ask(
        "POST",
        "/v1/jobs",
        content=json.dumps(body).encode(),
        headers={"Content-Type": f"application/{kind}"},
    )
    assert answer.status_code == 201 or 400 <= answer.status_code < 500, answer.text
    assert answer.status_code == 201 or answer.json()["detail"]


@given(
    JSON_VALUES,
    st.sampled_from(
        [
            ("PATCH", "/v1/jobs/digits", "wanted"),
            ("PATCH", "/v1/jobs/digits", "synchronisation"),
            ("PATCH", "/v1/jobs/digits", "group_size"),
            ("POST", "/v1/jobs/digits/requeue", "batches"),
            ("POST", "/v1/jobs/digits/provisioning/replan", "x"),
            ("POST", "/v1/provisioning/plan", "rates_per_s"),
            ("POST", "/v1/provisioning/simulate", "policies"),
            ("PATCH", "/v1/jobs/digits", ""),
            ("POST", "/v1/jobs/digits/requeue", ""),
            ("POST", "/v1/jobs/digits/provisioning/replan", ""),
            ("POST", "/v1/provisioning/plan", ""),
            ("POST", "/v1/provisioning/simulate", ""),
        ]
    ),
)
@settings(max_examples=200, deadline=None)
def test_any_json_as_a_body_causes_no_server_error(
    value: object, route: tuple[str, str, str]
) -> None:
    method, path, field = route
    body = json.dumps({field: value} if field else value).encode()
    answer = fuzzed().ask(method, path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, answer.text


@cache
def fuzzed() -> World:
    """One service for all examples."""
    made = World()
    made.streams("clinic-a", "clinic-b")
    assert made.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    return made


@pytest.mark.parametrize("kind", ["application/json", "application/yaml"])
def test_body_with_many_errors_lists_the_first_and_counts_the_rest(world: World, kind: str) -> None:
    body = json.dumps(JOB | {f"field {n}": 1 for n in range(3000)}).encode()
    answer = world.ask("POST", "/v1/jobs", content=body, headers={"Content-Type": kind})
    assert "(and 2997 more)" in problem(answer, 422)
    assert len(answer.json()["errors"]) == 100


def test_body_with_too_many_values_is_rejected_before_parsing(world: World) -> None:
    for values in (",", "[", "{"):
        body = b'{"name": "' + values.encode() * 20_000 + b'"}'
        headers = {"Content-Type": "application/json"}
        answer = world.ask("POST", "/v1/jobs", content=body, headers=headers)
        assert problem(answer, 422) == "body: must have at most 12,000 values"


def test_keys_are_compared_by_hash_so_that_timing_reveals_nothing(
    world: World,
) -> None:
    class Watched(str):
        """A key that fails if it is compared."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            raise AssertionError(f"compared with {other!r}")

    keys = Keys(KeyStore(world.log).read().values())
    assert keys.role_of(Watched(world.operator)) is not None
    assert keys.role_of(Watched(world.operator[:-1] + "x")) is None
