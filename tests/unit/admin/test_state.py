"""Updates, workers, streams and curves of a job in the API's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.liveness import Device
from common.core.messages import ModelId, WorkerId
from common.jobs.operations import JobOperations
from services.admin.live.followers import JobFollower
from services.admin.routes.requests import JOB as EXAMPLE
from tests.unit.admin.conftest import problem
from tests.unit.admin.live.helpers import JOB, Topics, job, lead, update

if TYPE_CHECKING:
    from tests.unit.admin.conftest import World

PARTS = ("updates", "workers", "streams", "curves")


@pytest.fixture
def topics(world: World) -> Topics:
    made = Topics(world.log)
    JobOperations(world.log).submit(job().spec)
    return made


def test_updates_are_returned_in_pages(world: World, topics: Topics) -> None:
    topics.audit(lead(), *(update(0, version) for version in range(1, 6)))
    topics.audit(lead(0, ModelId(0, 3), epoch=6), update(6, 4))
    first = world.get(f"/v1/jobs/{JOB}/updates?limit=3")
    assert [each["version"] for each in first["updates"]] == [1, 2, 3]
    assert (first["next"], first["newest"], first["oldest"]) == (3, 4, 1)
    rest = world.get(f"/v1/jobs/{JOB}/updates?after={first['next']}")
    assert [(each["version"], each["epoch"]) for each in rest["updates"]] == [(4, 6)]
    assert rest["next"] is None


@pytest.mark.parametrize(
    "query", ["after=-1", "limit=0", "limit=1001", "after=x", f"after={2**63}"]
)
def test_updates_query_out_of_range_is_rejected(world: World, topics: Topics, query: str) -> None:
    assert topics.name == JOB
    detail = problem(world.ask("GET", f"/v1/jobs/{JOB}/updates?{query}"), 422)
    assert query.partition("=")[0] in detail


def test_workers_and_streams_match_the_board_and_the_log(world: World, topics: Topics) -> None:
    topics.arrive("clicks", 7)
    world.board(JOB).beat(WorkerId("w1"), "alive", 60.0)
    body = world.get(f"/v1/jobs/{JOB}/workers")
    assert [(each["name"], each["status"]) for each in body["workers"]] == [("w1", "alive")]
    streams = world.get(f"/v1/jobs/{JOB}/streams")["streams"]
    assert [(each["stream"], each["lag"], each["partitions"]) for each in streams] == [
        ("clicks", 7, 2),
        ("views", 0, 2),
    ]


def test_submitted_job_that_exceeds_a_gpu_of_another_jobs_worker_has_a_note(
    world: World, topics: Topics
) -> None:
    world.streams("clinic-a", "clinic-b")
    board, gpu = world.board(topics.name), Device("cuda", "NVIDIA L4", 24 << 30)
    for worker, memory_bytes in (("w1", 24 << 30), ("w2", 100)):
        device = gpu._replace(memory_bytes=memory_bytes)
        board.beat(WorkerId(worker), "alive", 60.0, "", device)
    found = world.get(f"/v1/jobs/{topics.name}/workers")["workers"]
    assert [each["device"]["memory_bytes"] for each in found] == [24 << 30, 100]
    answer = world.ask("POST", "/v1/jobs", json=EXAMPLE | {"name": "larger"})
    assert answer.status_code == 201
    assert "a worker's GPU (NVIDIA L4) has only 0 MiB" in answer.json()["notes"][-1]


def test_curves_have_columns_of_equal_length(world: World, topics: Topics) -> None:
    topics.audit(lead(), *(update(0, version) for version in range(1, 31)))
    body = world.get(f"/v1/jobs/{JOB}/curves")
    columns = [body[name] for name in ("update_at_s", "version", "loss", "updates_per_s")]
    assert [len(column) for column in [*columns, body["metrics"]["accuracy"]]] == [30] * 5
    assert [len(stream["lag"]) for stream in body["lag"]] == [len(body["lag_at_s"])] * 2


@pytest.mark.parametrize("part", PARTS)
def test_state_of_an_unknown_job_returns_404(world: World, part: str) -> None:
    assert "nobody" in problem(world.ask("GET", f"/v1/jobs/nobody/{part}"), 404)


@pytest.mark.parametrize("part", PARTS)
def test_state_that_is_not_known_yet_returns_503(
    world: World, topics: Topics, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert topics.name == JOB
    monkeypatch.setattr("services.admin.live.followers.READY_S", 0.0)
    monkeypatch.setattr(JobFollower, "catch_up", lambda _: False)
    answer = world.ask("GET", f"/v1/jobs/{JOB}/{part}")
    assert "is known" in problem(answer, 503)
    assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize("part", PARTS)
def test_state_is_visible_to_viewers_and_not_without_a_key(
    world: World, topics: Topics, part: str
) -> None:
    assert topics.name == JOB
    path = f"/v1/jobs/{JOB}/{part}"
    assert world.ask("GET", path, key="viewer").status_code == 200
    problem(world.ask("GET", path, key=None), 401)
