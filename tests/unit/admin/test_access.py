"""Access: keys, roles on every route, pages of other sites."""

from __future__ import annotations

import logging
from base64 import b64encode
from typing import TYPE_CHECKING, NamedTuple

import pytest
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

from common.api.keys import KeyStore
from services.admin.app import ROUTERS
from services.admin.middleware import access
from services.admin.routes import health, sign_in
from services.admin.routes.requests import JOB
from tests.unit.admin.conftest import HOST, World, problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from starlette.routing import BaseRoute


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str


# Requests with a body that change nothing.
LOOKS = {
    Route("POST", "/v1/provisioning/plan"),
    Route("POST", "/v1/provisioning/simulate"),
}
BODIES = {
    Route("POST", "/v1/jobs"): {**JOB, "name": "letters"},
    Route("PATCH", "/v1/jobs/{job}"): {"wanted": "paused"},
    Route("POST", "/v1/jobs/{job}/requeue"): {"batches": "all"},
    Route("POST", "/v1/provisioning/plan"): {
        "workers": 64,
        "rate_per_s": 125,
        "group_size": 20,
        "batch_size": 256,
        "updates": 10000,
        "deadline_s": 6720,
        "availability": 0.9,
        "spot_usd_per_hour": 0.158,
        "on_demand_usd_per_hour": 0.286,
    },
}
# Status of routes that cannot succeed in an empty world or without a body.
OTHERWISE = {
    Route("DELETE", "/v1/jobs/{job}"): 409,
    Route("GET", "/v1/jobs/{job}/remains"): 409,
    Route("GET", "/v1/jobs/{job}/model"): 404,
    Route("HEAD", "/v1/jobs/{job}/model"): 404,
    Route("GET", "/page/{folder}/{name:path}"): 404,
    Route("GET", "/v1/provisioning/prices"): 404,
    Route("POST", "/v1/provisioning/simulate"): 422,
}


def routes_of(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield from (Route(method, route.path) for method in sorted(route.methods or ()))
        else:
            yield from routes_of(route.original_router.routes)  # type: ignore[attr-defined]


ROUTES = sorted(
    {
        route
        for router in (*ROUTERS, health.router, sign_in.router)
        for route in routes_of(router.routes)
    }
)
CLOSED = [route for route in ROUTES if route.path not in access.OPEN]


def asked(world: World, route: Route, key: str | None, job: str) -> int:
    path = route.path.replace("{job}", job)
    body = {"json": BODIES[route]} if route in BODIES else {}
    return world.ask(route.method, path, key=key, **body).status_code


@pytest.fixture(scope="module")
def untouched() -> Iterator[World]:
    """A service for requests that change nothing, shared because creating one is slow."""
    made = World()
    yield made
    made.close()


def test_app_has_exactly_the_listed_routes(world: World) -> None:
    assert len(world.app.routes) == len(ROUTERS) + 2
    assert [route for route in ROUTES if route.path in access.OPEN] == [
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/sign-in"),
        ("GET", "/sign-in/done"),
        ("POST", "/sign-in/out"),
    ]


@pytest.mark.parametrize("route", CLOSED, ids=" ".join)
def test_route_without_a_valid_key_returns_401(untouched: World, route: Route) -> None:
    assert asked(untouched, route, None, "digits") == 401
    assert asked(untouched, route, "doll_0000", "digits") == 401


@pytest.mark.parametrize("route", CLOSED, ids=" ".join)
def test_route_that_changes_state_requires_an_operator(untouched: World, route: Route) -> None:
    changes = route.method not in {"GET", "HEAD"} and route not in LOOKS
    status = asked(untouched, route, "viewer", "nobody")
    assert (status == 403) is changes
    assert status != 401


@pytest.mark.parametrize("route", CLOSED, ids=" ".join)
def test_route_answers_an_operator(world: World, route: Route) -> None:
    world.streams("clinic-a", "clinic-b")
    assert world.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    # The events of an existing job never end.
    endless = route.path.endswith("/events")
    status = asked(world, route, "operator", "nobody" if endless else "digits")
    expected = 404 if endless else OTHERWISE.get(route, 200)
    assert status == expected or (expected == 200 and 200 <= status < 300)


def test_key_is_accepted_as_a_basic_password(world: World) -> None:
    for name in ("", "eve", "whoever"):
        sent = b64encode(f"{name}:{world.viewer}".encode()).decode()
        answer = world.ask("GET", "/v1/jobs", key=None, headers={"Authorization": f"Basic {sent}"})
        assert answer.status_code == 200


def test_response_without_key_explains_how_to_send_one(world: World) -> None:
    answer = world.ask("GET", "/v1/jobs", key=None)
    assert "Authorization: Bearer KEY" in problem(answer, 401)
    assert answer.headers["www-authenticate"] == 'Basic realm="doll", charset="UTF-8"'
    assert problem(world.ask("GET", "/v1/jobs", key="doll_x"), 401).startswith("this API key is no")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "bearer\t",
        "Basic",
        "Basic !!!",
        "Basic /w==",
        "Digest x",
        "Ä" * 2000,
    ],
)
def test_malformed_authorization_header_returns_401(world: World, header: str) -> None:
    answer = world.ask("GET", "/v1/jobs", key=None, headers={"Authorization": header.encode()})
    assert problem(answer, 401)


def test_revoked_key_is_rejected_soon_after(world: World) -> None:
    assert world.ask("GET", "/v1/jobs", key="viewer").status_code == 200
    KeyStore(world.log).revoke("eve")
    while world.ask("GET", "/v1/jobs", key="viewer").status_code != 401:
        pass  # pytest's timeout is the limit
    assert world.ask("GET", "/v1/jobs", key="operator").status_code == 200


def test_key_appears_in_no_log_and_no_response(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answers = [
        world.ask("GET", "/v1/jobs", key="viewer"),
        world.ask("POST", "/v1/jobs", key="viewer", json={}),
        world.ask("GET", "/v1/jobs", key="doll_secret"),
    ]
    text = caplog.text + "".join(f"{answer.headers} {answer.text}" for answer in answers)
    assert world.viewer not in text
    assert "doll_secret" not in text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (f"http://{HOST}", 404),
        # A proxy in front of the service may use TLS.
        (f"https://{HOST}", 404),
        ("http://evil.example", 403),
        (f"http://{HOST}.evil.example", 403),
        (f"http://{HOST}:8081", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_change_from_a_page_of_another_site_returns_403(
    world: World, origin: str, status: int
) -> None:
    answer = world.ask("DELETE", "/v1/jobs/digits", headers={"Origin": origin})
    assert problem(answer, status)
    assert world.ask("GET", "/v1/jobs", headers={"Origin": origin}).status_code == 200


def test_request_without_origin_is_not_from_another_site() -> None:
    assert not access.from_another_site("DELETE", Headers({"host": HOST}))


def test_request_before_keys_are_known_returns_503_and_health_is_open(world: World) -> None:
    assert world.app
    world.log.go_away()
    answer = world.ask("GET", "/v1/jobs", key="viewer")
    assert "unavailable" in problem(answer, 503)
    assert int(answer.headers["retry-after"]) > 0
    assert world.ask("GET", "/healthz", key=None).status_code == 200
    world.log.come_back()
    while world.ask("GET", "/v1/jobs", key="viewer").status_code != 200:
        pass


def test_known_keys_remain_valid_while_kafka_is_unavailable(world: World) -> None:
    assert world.ask("GET", "/v1/jobs", key="viewer").status_code == 200
    world.log.go_away()
    assert world.ask("GET", "/v1/jobs", key="viewer").status_code == 200
    assert problem(world.ask("GET", "/v1/jobs", key="doll_x"), 401)
