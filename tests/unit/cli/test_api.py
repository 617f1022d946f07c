"""Requests of commands to the admin service, and their messages if its answer is unexpected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx2
import pytest

from common.jobs.check import CheckReport
from common.jobs.store import JobStore
from common.kafka.port import NewTopic
from common.spot.planning.replan import read_ledger
from common.spot.plans import encode_plan
from common.spot.provisioning import records as plans
from services.cli import exits
from tests.unit.admin.test_provisioning import planned as decided
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import World

URL = "http://doll.test"
PROVISIONED = JOB + "provisioning: {workers: 4, policy: adaptive}\n"


@pytest.fixture
def submitted(world: World) -> World:
    """A world with a job that rents its machines."""
    world.log.create_topics([NewTopic("clinic-a", 2)])
    world.run("job", "submit", "-", typed=PROVISIONED)
    return world


def change(
    at_s: float, action: str, *, changed: dict[str, int] | None = None, reason: str = ""
) -> dict[str, object]:
    """Return a change in the form of the API's answers."""
    who = {"by": "olga", "role": "operator", "revision": 0}
    return {"at_s": at_s, "action": action, **who, "changed": changed or {}, "reason": reason}


def test_job_events_are_printed_until_the_job_is_deleted(world: World) -> None:
    progress = {"version": 3, "lag": None}
    paused = change(0.0, "paused", reason="prices are high")
    resumed = change(86_400.0, "resumed", changed={"group_size": 8})
    job = {
        "state": "running",
        "why": "",
        "revision": 0,
        "progress": progress,
        "changes": [paused],
    }
    again = {**job, "changes": [paused, resumed]}
    update = {"version": 4, "epoch": 1, "at_s": 0.0, "loss": 0.25, "metrics": {"accuracy": 1.0}}

    def respond(request: httpx2.Request) -> httpx2.Response:
        if "Last-Event-ID" in request.headers:
            return httpx2.Response(404, json={"detail": 'there is no job "digits"'})
        parts = [("job", job), ("update", update), ("job", again)]
        return httpx2.Response(
            200,
            text="".join(f"id: a-1\nevent: {n}\ndata: {json.dumps(d)}\n\n" for n, d in parts),
        )

    end = httpx2.MockTransport(respond)
    shown = world.run("job", "events", "digits", code=exits.REFUSED, end=end)
    lines = [line.split(maxsplit=2) for line in shown.stdout.splitlines()]
    assert [" ".join(rest.split()) for _, _, rest in lines] == [
        "change action=paused by=olga role=operator reason=prices are high",
        "job state=running revision=0 version=3",
        "update version=4 epoch=1 loss=0.25",
        "change action=resumed by=olga role=operator group_size=8",
        "job state=running revision=0 version=3",
    ]
    assert (lines[0][:2], lines[3][0]) == (["1970-01-01", "00:00:00"], "1970-01-02")
    assert 'there is no job "digits"' in shown.stderr
    json_output = world.run("job", "events", "digits", "--json", code=exits.REFUSED, end=end).stdout
    assert [json.loads(line) for line in json_output.splitlines()] == [
        {"event": "job", "data": job},
        {"event": "update", "data": update},
        {"event": "job", "data": again},
    ]


def test_job_change_is_recorded_for_the_caller_of_the_service(submitted: World) -> None:
    submitted.run("job", "pause", "digits", "--reason", "why")
    changes = JobStore(submitted.log).get("digits").changes
    assert [(each.by, each.role, each.action) for each in changes] == [
        ("operator", "operator", "submitted"),
        ("operator", "operator", "paused"),
    ]


def test_provisioning_show_and_replan_work_over_the_service(submitted: World) -> None:
    assert "none yet" in submitted.run("provisioning", "show", "digits").stdout
    said = submitted.run("provisioning", "replan", "digits", "--reason", "the deadline moved")
    assert "doll provisioning show digits" in said.stdout
    (asked,) = read_ledger(submitted.log, "digits").replans.values()
    assert (asked.by, asked.reason) == ("operator", "the deadline moved")


def test_provisioning_show_prints_the_current_plan(submitted: World) -> None:
    submitted.log.create_topics([NewTopic("doll.digits.plans")])
    records = plans.ProvisionerLead(-1, "p1", 1000.0), decided(1, 1001.0), decided(2, 1100.0)
    submitted.write("doll.digits.plans", *map(encode_plan, records))
    shown = submitted.run("provisioning", "show", "digits").stdout
    assert "2 on spot, 1 on on-demand, 1 on none (number 2)" in shown
    assert "one more would make it late" in shown


def test_prices_come_from_the_market_of_the_service_or_a_file(world: World, tmp_path: Path) -> None:
    market = tmp_path / "market.yaml"
    market.write_text("on_demand: {usd_per_hour: 0.286}\nspot: [{usd_per_hour: 0.158}]\n")
    assert "set DOLL_MARKET" in world.run("prices", code=exits.REFUSED).stderr
    local = world.run("prices", "--market", str(market)).stdout
    assert local.split()[-6:] == ["on-demand", "on-demand", "0.2860", "spot", "spot", "0.1580"]
    world.environment = {"DOLL_MARKET": str(market)}
    assert world.run("prices").stdout == local


def test_invalid_or_insufficient_key_is_reported_with_a_remedy(submitted: World) -> None:
    said = submitted.run("job", "list", key="wrong", code=exits.REFUSED).stderr
    assert "the API key is not valid; set --api-key, DOLL_API_KEY or DOLL_API_KEY_FILE" in said
    assert "wrong" not in said
    said = submitted.run("job", "pause", "digits", key="viewer", code=exits.REFUSED).stderr
    assert "needs the role operator" in said
    assert "doll key create NAME --role operator" in said


def test_command_that_needs_kafka_rejects_api_option(world: World) -> None:
    said = world.run("--api", URL, "audit", "digits", code=exits.REFUSED).stderr
    assert "connects to Kafka directly; remove --api" in said


def test_command_that_needs_kafka_ignores_doll_api(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOLL_API", URL)
    world.run("key", "create", "ada", "--role", "viewer")
    assert "ada" in world.run("key", "list").output


def test_services_start_although_doll_api_is_set(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[tuple[str, ...]]()
    monkeypatch.setenv("DOLL_API", URL)
    monkeypatch.setattr("os.execve", lambda _path, command, _environment: begun.append(command))
    world.run("serve", "digits")
    world.run("worker")
    assert [command[-2:] for command in begun] == [
        ("services.serve", "digits"),
        ("-m", "services.worker"),
    ]


def test_unavailable_broker_of_the_service_is_reported_as_unavailable(submitted: World) -> None:
    submitted.log.go_away()
    said = submitted.run("job", "list", code=exits.UNAVAILABLE).stderr
    assert said.startswith("error: http://")
    assert "--api" in said


class Answers(httpx2.BaseTransport):
    """A server that always gives the same answer, or none."""

    def __init__(self, status: int, content: bytes = b"") -> None:
        self._answer = status, content

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer the request."""
        status, content = self._answer
        if not status:
            raise httpx2.ConnectError("nobody listens", request=request)
        return httpx2.Response(status, content=content)


@pytest.mark.parametrize(
    ("status", "content", "code", "said"),
    [
        (0, b"", exits.UNAVAILABLE, "no DOLL service at http://127.0.0.1:8080 (DOLL_API is not"),
        (200, b"<html>", exits.UNAVAILABLE, "is not a DOLL admin service"),
        (200, b"[]", exits.UNAVAILABLE, "is not a DOLL admin service"),
        (302, b"", exits.UNAVAILABLE, "HTTP 302 Found"),
        (500, b"{}", exits.UNAVAILABLE, "HTTP 500 Internal Server Error"),
        (503, b'{"detail": "Kafka is unavailable"}', exits.UNAVAILABLE, "Kafka is unavailable"),
        (429, b'{"detail": "too many"}', exits.UNAVAILABLE, "too many"),
        (413, b'{"detail": "too large"}', exits.REFUSED, "too large"),
        (404, b"gone", exits.REFUSED, "HTTP 404 Not Found"),
    ],
)
def test_unexpected_response_is_reported_in_one_line(
    world: World, status: int, content: bytes, code: int, said: str
) -> None:
    output = world.run("job", "list", code=code, end=Answers(status, content)).stderr
    assert said in output
    assert output.count("\n") == 1


def test_submit_reports_why_a_job_was_not_checked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.log.create_topics([NewTopic("clinic-a", 2)])
    own = JOB.replace("{name: image-classifier, classes: 10}", "{entrypoint: shop.tasks:Clicks}")
    assert own != JOB
    world.environment = {"DOLL_TASKS": "shop.tasks:Clicks"}
    stuck = CheckReport(unended="the check of the task did not end within 60 s")
    monkeypatch.setattr("services.admin.service.built_apart", lambda *_: stuck)
    monkeypatch.setattr(
        "common.jobs.check._looked_at", lambda spec, tasks, build: build(spec, tasks)
    )
    said = world.run("job", "submit", "-", typed=own, code=exits.REFUSED).stderr
    assert "did not end within 60 s; if the task is correct" in said
    assert "--unchecked" in said
    said = world.run("job", "submit", "-", "--unchecked", typed=own).stderr
    assert "not checked: the request asks for no check" in said


def test_submit_reports_that_it_waits_for_the_check(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.log.create_topics([NewTopic("clinic-a", 2)])
    monkeypatch.setattr("services.cli.commands.job._PATIENCE_S", 0.0)
    said = world.run("job", "submit", "-", typed=JOB).stderr
    assert "waiting: the service builds the job's task" in said
