"""Changes are logged with the key's name, never with names in the request. So are refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.api.keys import KeyStore
from common.jobs.store import FreeName, JobStore
from services.admin.routes.requests import JOB
from tests.unit.runtime.test_refusals import audited

if TYPE_CHECKING:
    from tests.unit.admin.conftest import World


@pytest.fixture
def digits(world: World) -> World:
    """A service with a job that olga has submitted."""
    world.streams(*JOB["streams"])
    assert world.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    return world


def test_each_change_records_the_name_of_its_key(digits: World) -> None:
    ci, _ = KeyStore(digits.log).create("ci", "operator")
    while digits.ask("GET", "/v1/me", key=ci).status_code != 200:
        pass  # pytest's timeout is the limit
    path = "/v1/jobs/digits"
    digits.ask("PATCH", path, key=ci, json={"wanted": "paused", "reason": "by olga"})
    digits.ask("PATCH", path, json={"group_size": 8, "wanted": "running"})
    digits.ask("PATCH", path, key=ci, json={"wanted": "stopped"})
    changes = digits.get(path)["changes"]
    assert [(each["action"], each["by"], each["role"]) for each in changes] == [
        ("submitted", "olga", "operator"),
        ("paused", "ci", "operator"),
        ("changed", "olga", "operator"),
        ("resumed", "olga", "operator"),
        ("stopped", "ci", "operator"),
    ]
    assert changes[1]["reason"] == "by olga"

    assert digits.ask("DELETE", path, key=ci).status_code == 204
    assert digits.ask("DELETE", f"{path}?purge=true").status_code == 200
    assert digits.ask("POST", "/v1/jobs", key=ci, json=JOB).status_code == 201
    changes = digits.get(path)["changes"]
    assert [(each["action"], each["by"]) for each in changes] == [
        ("submitted", "olga"),
        ("deleted", "ci"),
        ("purged", "olga"),
        ("submitted", "ci"),
    ]


@given(
    field=st.sampled_from(["by", "role", "name", "changes", "caller", "reason"]),
    value=st.text(max_size=30) | st.just("oidc:ada") | st.just([{"by": "ada"}]),
    header=st.sampled_from(["X-Forwarded-User", "From", "X-Remote-User", "Idempotency-Key"]),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_name_never_comes_from_a_body_or_a_header(
    digits: World, field: str, value: object, header: str
) -> None:
    wanted = "paused" if JobStore(digits.log).get("digits").wanted == "running" else "running"
    headers = {header: "oidc:ada"}
    for body in ({"wanted": wanted, field: value}, {**JOB, field: value}):
        method, path = ("PATCH", "/v1/jobs/digits") if "wanted" in body else ("POST", "/v1/jobs")
        digits.ask(method, path, json=body, headers=headers)
    changes = JobStore(digits.log).get("digits").changes
    assert {(each.by, each.role) for each in changes} == {("olga", "operator")}


def test_name_of_a_deleted_job_keeps_its_history(digits: World) -> None:
    digits.ask("PATCH", "/v1/jobs/digits", json={"wanted": "stopped"})
    assert digits.ask("DELETE", "/v1/jobs/digits").status_code == 204
    kept = JobStore(digits.log).table.read()["digits"]
    assert isinstance(kept, FreeName)
    assert [(each.action, each.by) for each in kept.changes] == [
        ("submitted", "olga"),
        ("deleted", "olga"),
    ]


def test_change_writes_one_log_line_with_its_caller(
    digits: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    digits.ask("PATCH", "/v1/jobs/digits", json={"wanted": "paused", "reason": "late"})
    assert audited(caplog) == [
        {
            "by": "olga",
            "role": "operator",
            "action": "paused",
            "job": "digits",
            "reason": "late",
            "outcome": "done",
        }
    ]


def test_refusal_by_role_is_logged_with_caller_and_job(
    digits: World, caplog: pytest.LogCaptureFixture
) -> None:
    for method in ("PATCH", "DELETE"):
        answer = digits.ask(method, "/v1/jobs/digits", key="viewer", json={"wanted": "stopped"})
        assert answer.status_code == 403
    lines = audited(caplog)
    assert [(each["by"], each["role"], each["outcome"]) for each in lines] == [
        ("eve", "viewer", "refused")
    ] * 2
    assert [(each["action"], each["job"]) for each in lines] == [
        ("PATCH /v1/jobs/digits", "digits"),
        ("DELETE /v1/jobs/digits", "digits"),
    ]
    assert "role" in lines[0]["reason"]


def test_flood_without_keys_is_logged_once_and_then_counted(
    digits: World, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        digits.ask("DELETE", "/v1/jobs/digits", key=f"doll_{number}" if number % 2 else None)
    [line] = audited(caplog)
    assert (line["by"], line["role"], line["outcome"]) == ("127.0.0.1", "none", "refused")
    assert "doll_" not in caplog.text


def test_request_from_another_site_is_logged_with_the_reason(
    digits: World, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Origin": "http://evil.example"}
    digits.ask("DELETE", "/v1/jobs/digits", headers=headers)
    [line] = audited(caplog)
    assert "another site" in line["reason"]
