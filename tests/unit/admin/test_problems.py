"""Every wrong request is answered with a problem, even if its JSON contains lone surrogates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.admin.routes.requests import JOB

if TYPE_CHECKING:
    from tests.unit.admin.conftest import World


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/jobs"),
        ("PATCH", "/v1/jobs/digits"),
        ("POST", "/v1/jobs/digits/provisioning/replan"),
        ("POST", "/v1/provisioning/plan"),
        ("POST", "/v1/provisioning/simulate"),
    ],
)
@pytest.mark.parametrize(
    "body",
    [r'{"\ud800": 1}', r'{"reason": "\ud800"}', r'{"job": "\ud800"}', r'{"curve": "\ud800"}'],
)
def test_unpaired_surrogate_in_a_body_returns_a_client_error(
    world: World, method: str, path: str, body: str
) -> None:
    world.streams("clinic-a", "clinic-b")
    assert world.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    headers = {"Content-Type": "application/json"}
    answer = world.ask(method, path, content=body, headers=headers)
    assert answer.status_code in (400, 404, 422), answer.text
