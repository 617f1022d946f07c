"""Job routes: jobs are created once, listed, changed and deleted. Errors name the wrong fields."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest

from common.api.answers import JobList
from common.api.keys import KeyStore
from common.core.messages import GENESIS, Batch, BatchReady, Lead, UpdateApplied, WorkerId
from common.core.snapshot_search import AWAITED
from common.core.spans import Partition, Span
from common.jobs.check import PATIENCE_S, Checked, CheckReport
from common.jobs.edit import CHANGEABLE
from common.jobs.operations import JobOperations
from common.jobs.spec import JobSpec
from common.kafka.names import JOBS, control_topic, updates_topic
from common.wire.messages import encode_audit, encode_claim
from services.admin import service, stores
from services.admin.routes.jobs import JobPatch
from services.admin.routes.requests import JOB
from tests.unit.admin.conftest import HOST, World, problem
from tests.unit.admin.live.helpers import eventually

if TYPE_CHECKING:
    from collections.abc import Collection

    import httpx2

    from common.jobs.store import JobRecord

SPEC = JOB


@pytest.fixture
def digits(world: World) -> World:
    """A world with the example job."""
    world.streams("clinic-a", "clinic-b")
    answer = world.ask("POST", "/v1/jobs", json=SPEC)
    assert answer.status_code == 201
    return world


def post(world: World, key: str | None = None, **changed: object) -> httpx2.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return world.ask("POST", "/v1/jobs", json=SPEC | changed, headers=headers)


def test_created_job_contains_all_defaults_and_start_offsets(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    answer = post(world)
    assert answer.status_code == 201
    assert answer.headers["location"] == "/v1/jobs/digits"
    body = answer.json()
    assert (body["id"], body["wanted"], body["revision"]) == ("digits", "running", 0)
    assert body["deadline_s"] == body["submitted_s"] + 6720
    assert body["spec"]["max_failures"] == 5
    places = [("clinic-a", 0), ("clinic-a", 1), ("clinic-b", 0), ("clinic-b", 1)]
    assert body["first"] == [[stream, partition, 0] for stream, partition in places]
    assert (body["state"], body["why"]) == (
        "waiting for a coordinator",
        "its state has not been read yet",
    )
    shown, seen = world.get("/v1/jobs/digits"), {"progress": None, "why": ""}
    assert [body.pop(name) for name in ("checked", "unchecked", "beginning")] == [True, "", ""]
    assert shown | seen == body | seen
    assert shown["why"] == "no coordinator leads digits yet; `doll coordinator` starts one"
    assert JobOperations(world.log).get("digits").spec.task.name == "image-classifier"


def test_job_created_by_another_program_is_visible(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    assert problem(world.ask("GET", "/v1/jobs/digits"), 404) == 'there is no job "digits"'
    JobOperations(world.log).submit(JobSpec.model_validate_json(json.dumps(SPEC)))
    while world.ask("GET", "/v1/jobs/digits").status_code != 200:
        pass  # pytest's timeout is the limit


def test_create_job_with_a_used_name_is_rejected_and_delete_removes_the_job(digits: World) -> None:
    assert "choose another name" in problem(post(digits), 409)
    assert digits.ask("PATCH", "/v1/jobs/digits", json={"wanted": "stopped"}).status_code == 200
    answer = digits.ask("DELETE", "/v1/jobs/digits")
    assert (answer.status_code, answer.content) == (204, b"")
    assert problem(digits.ask("GET", "/v1/jobs/digits"), 404)
    assert problem(digits.ask("DELETE", "/v1/jobs/digits"), 404)


def test_missing_stream_is_named(world: World) -> None:
    world.streams("clinic-a")
    assert 'there is no topic "clinic-b"' in problem(post(world), 422)


# --- repeated requests ---------------------------------------------------------------------------


def test_repeated_request_with_the_same_key_creates_one_job(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    first, second = post(world, "k1"), post(world, "k1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.json()["submitted_s"] == first.json()["submitted_s"]
    assert second.headers["location"] == first.headers["location"]
    assert written(world) == 1


def test_idempotency_key_compares_the_meaning_of_the_body(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    assert post(world, "k1").status_code == 201
    assert post(world, "k1", batch_size=64, seed=0).status_code == 201
    assert "another body" in problem(post(world, "k1", batch_size=65), 422)
    assert "another body" in problem(post(world, "k1", name="letters"), 422)
    assert post(world, "k2", name="letters").status_code == 201


def test_idempotency_key_is_recognized_by_other_replicas(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    assert post(world, "k1").status_code == 201
    other = world.replica()
    try:
        assert post(other, "k1").status_code == 201
        assert problem(post(other, "k2"), 409)
    finally:
        other.close()
    assert written(world) == 1


def test_concurrent_requests_to_several_replicas_create_one_job(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    others = [world.replica() for _ in range(3)]
    try:
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda other: post(other, "k1"), others))
    finally:
        for other in others:
            other.close()
    assert [answer.status_code for answer in answers] == [201] * 3
    assert len({answer.json()["submitted_s"] for answer in answers}) == 1


def test_idempotency_key_belongs_to_one_caller(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    assert post(world, "k1").status_code == 201
    key, _ = KeyStore(world.log).create("otto", "operator")
    headers = {"Idempotency-Key": "k1"}
    while (
        answer := world.ask("POST", "/v1/jobs", key=key, json=SPEC, headers=headers)
    ).status_code == 401:
        pass
    assert problem(answer, 409)


def written(world: World) -> int:
    """Return the number of records in the jobs topic."""
    return world.log.bounds(Partition(JOBS, 0)).end


# --- invalid requests ----------------------------------------------------------------------------


def test_create_job_with_invalid_fields_names_each_of_them(world: World) -> None:
    answer = post(world, group_size=-3, batch_size=True, streams=["a", "a"], colour="red")
    assert "body.group_size: must be at least 1, got -3" in problem(answer, 422)
    body = {each["field"]: each["detail"] for each in answer.json()["errors"]}
    assert body == {
        "body.streams": "must be different topics, got 'a' twice",
        "body.group_size": "must be at least 1, got -3",
        "body.batch_size": "must be a whole number, got true",
        "body.colour": "unknown field",
    }


def test_job_with_a_task_missing_here_is_accepted_unchecked(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    # The second answer returns the existing job.
    for _ in range(2):
        answer = post(world, "k1", task={"entrypoint": "os:system"})
        assert answer.status_code == 201
        body = answer.json()
        assert not body["checked"]
        assert body["unchecked"] == "DOLL_TASKS of this process does not list os:system"


OWN = "tests.unit.jobs.odd_tasks:Plain"


@pytest.fixture
def checking(world: World) -> World:
    """A service that may build a task."""
    world.settings = world.settings.model_copy(update={"tasks": (OWN,)})
    world.streams("clinic-a", "clinic-b")
    return world


def test_timed_out_check_rejects_the_job_unless_the_request_skips_it(
    checking: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = CheckReport(unended="the check of the task did not end within 60 s")
    monkeypatch.setattr(service, "built_apart", lambda _spec, _allowed: stuck)
    answer = post(checking, task={"entrypoint": OWN})
    assert "did not end within 60 s" in problem(answer, 422)
    assert [each["field"] for each in answer.json()["errors"]] == ["body.task"]
    asked = SPEC | {"task": {"entrypoint": OWN}}
    answer = checking.ask("POST", "/v1/jobs?unchecked=true", json=asked)
    assert answer.status_code == 201
    assert (answer.json()["checked"], answer.json()["unchecked"]) == (
        False,
        "the request asks for no check",
    )
    # A change of the existing job is accepted, although its task cannot be checked.
    answer = checking.ask("PATCH", "/v1/jobs/digits", json={"synchronisation": {"mode": "stale"}})
    assert answer.status_code == 200


def test_checks_of_two_requests_run_concurrently(
    checking: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Barrier(2)

    def build(_spec: JobSpec, _allowed: Collection[str]) -> CheckReport:
        both.wait(PATIENCE_S)
        return CheckReport(model_mb=1.0)

    monkeypatch.setattr(service, "built_apart", build)

    async def ask() -> list[Checked]:
        spec = JobSpec.model_validate_json(json.dumps(SPEC | {"task": {"entrypoint": OWN}}))
        # Two requests of one client arrive in order.
        checks = (checking.service.check(spec) for _ in range(2))
        return list(await asyncio.gather(*checks))

    assert checking.runner.run(ask()) == [Checked(1.0, None)] * 2


def test_too_large_model_is_rejected_at_its_field(world: World) -> None:
    answer = post(world, task={"name": "image-classifier", "classes": 2**31 - 1})
    assert "more than 16,384; make it smaller" in problem(answer, 422)
    assert [each["field"] for each in answer.json()["errors"]] == ["body.task"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "classes"),
        ({"classes": 1}, ">= 2"),
        ({"classes": 10, "colour": "red"}, "colour"),
        ({"classes": 10, "network": "cnn-28"}, "8x8 are too small"),
        ({"classes": 10, "height": 16}, "must be 8 as in the records, got 16"),
    ],
)
def test_invalid_task_options_are_rejected_at_submission(
    world: World, options: dict[str, object], said: str
) -> None:
    world.streams("clinic-a", "clinic-b")
    answer = post(world, task={"name": "image-classifier", **options})
    assert said in problem(answer, 422)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 422),
        (b"[]", 422),
        (b"NaN", 422),
        (b"\xff", 400),
        (b"[" * 100_000, 422),
        (b'{"name": "\\ud800"}', 400),
    ],
)
def test_malformed_body_is_rejected(world: World, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    assert problem(world.ask("POST", "/v1/jobs", content=body, headers=headers), status)


def test_body_without_json_content_type_is_rejected(world: World) -> None:
    headers = {"Content-Type": "text/plain"}
    answer = world.ask("POST", "/v1/jobs", content=json.dumps(SPEC), headers=headers)
    assert "Content-Type: application/json" in problem(answer, 422)


# --- lists ---------------------------------------------------------------------------------------


def test_jobs_are_listed_by_name_in_pages(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    names = ["a", "b", "c", "d", "e"]
    for name in reversed(names):
        assert post(world, name=name).status_code == 201
    assert world.ask("PATCH", "/v1/jobs/b", json={"wanted": "paused"}).status_code == 200
    found, after = list[str](), ""
    while after is not None:
        page = world.get("/v1/jobs", params={"limit": 2, "after": after})
        assert 0 < len(page["jobs"]) <= 2
        found += [job["id"] for job in page["jobs"]]
        after = page["next"]
    assert found == names
    assert [job["id"] for job in world.get("/v1/jobs?wanted=paused")["jobs"]] == ["b"]
    assert world.get("/v1/jobs?after=e")["jobs"] == []


def test_jobs_can_be_sorted_filtered_counted_and_paged(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        assert post(world, name=name).status_code == 201
    world.ask("PATCH", "/v1/jobs/d", json={"wanted": "paused"})
    store = JobOperations(world.log)
    store.hold(store.get("e"), "its weights are not finite")

    def listed(**asked: object) -> list[str]:
        return [job["id"] for job in world.get("/v1/jobs", params=asked)["jobs"]]

    def is_known() -> bool:
        states = world.get("/v1/jobs")["states"]
        return bool(states == {"held": 1, "paused": 1, "waiting for a coordinator": 3})

    eventually(is_known)
    assert listed(sort="state") == ["e", "a", "b", "c", "d"]
    assert listed(sort="-state") == ["d", "a", "b", "c", "e"]
    assert listed(sort="-id") == list(reversed(names))
    assert listed(sort="version") == names
    assert listed(state="held") == ["e"]
    assert listed(text="PAUSED") == ["d"]
    page = world.get("/v1/jobs", params={"sort": "state", "limit": 2, "after": "a"})
    assert [job["id"] for job in page["jobs"]] == ["b", "c"]
    assert (page["next"], page["total"]) == ("c", 5)
    assert page["states"]["held"] == 1
    gone = world.ask("GET", "/v1/jobs", params={"sort": "state", "after": "gone"})
    assert "start again with the first page" in problem(gone, 422)


def test_job_list_is_sent_as_its_model_serializes_it(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    assert world.ask("GET", "/v1/jobs").content == JobList(jobs=()).model_dump_json().encode()
    for name in ("a", "b"):
        assert post(world, name=name).status_code == 201

    for path in ("/v1/jobs?limit=1", "/v1/jobs?after=a", "/v1/jobs?text=none"):
        body = world.ask("GET", path).content
        assert body == JobList.model_validate_json(body).model_dump_json().encode()


def test_paused_job_keeps_its_numbers_in_the_list(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    assert post(world, name="digits").status_code == 201
    spans = (Span("clinic-a", 0, 0, 64),)
    claim, batch = BatchReady(WorkerId("w1"), spans, 64, ()), Batch(0, WorkerId("w1"), spans, 64)
    with closing(world.log.writer()) as writer:
        writer.append(control_topic("digits"), encode_claim(claim))
        for record in (Lead(-1, GENESIS, "c", 0), UpdateApplied(0, 1, (batch,), 64, 0.25, {})):
            writer.append(updates_topic("digits"), encode_audit(record))
    world.ask("PATCH", "/v1/jobs/digits", json={"wanted": "paused"})

    replica = world.replica()
    (job,) = replica.get("/v1/jobs")["jobs"]
    replica.close()

    assert (job["state"], job["version"], job["loss"]) == ("paused", 1, 0.25)


def test_idempotency_key_finds_a_change_of_unknown_outcome(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.streams("clinic-a", "clinic-b")
    world.get("/v1/jobs")
    goes_on = threading.Event()
    submit = JobOperations.submit

    def slow(*given: Any, **named: Any) -> JobRecord:  # noqa: ANN401
        assert goes_on.wait(60.0)
        return submit(*given, **named)

    monkeypatch.setattr(JobOperations, "submit", slow)
    monkeypatch.setattr(stores, "WRITE_S", 0.2)
    headers = {"Idempotency-Key": "once"}
    # A busy machine may need several attempts until one starts in time.
    while (answer := world.ask("POST", "/v1/jobs", json=SPEC, headers=headers)).status_code == 503:
        assert "nothing was changed" in problem(answer, 503)
    assert "may have been made" in problem(answer, 504)

    goes_on.set()
    monkeypatch.setattr(stores, "WRITE_S", 60.0)
    again = world.ask("POST", "/v1/jobs", json=SPEC, headers=headers)
    assert again.status_code == 201
    assert list(JobOperations(world.log).read()) == [again.json()["id"]]


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "wanted=happy"])
def test_list_query_out_of_bounds_is_rejected(world: World, query: str) -> None:
    answer = world.ask("GET", f"/v1/jobs?{query}")
    problem(answer, 422)
    assert answer.json()["errors"][0]["field"] == f"query.{query.partition('=')[0]}"


# --- changes -------------------------------------------------------------------------------------


def test_patch_reports_changed_fields_and_keeps_the_rest(digits: World) -> None:
    change = {"group_size": 8, "deadline_s": None, "learning_rate": 1, "wanted": "paused"}
    body = digits.ask("PATCH", "/v1/jobs/digits", json=change).json()
    assert (body["wanted"], body["revision"], body["deadline_s"]) == ("paused", 1, None)
    assert body["reason"] == "paused by olga"
    assert body["changes"][1]["changed"] == {
        "group_size": 8,
        "deadline_s": None,
        "learning_rate": 1.0,
    }
    assert body["spec"]["batch_size"] == 64
    assert digits.get("/v1/jobs/digits")["changes"] == body["changes"]


def test_patch_replaces_a_whole_block(digits: World) -> None:
    block = {"mode": "stale", "staleness": 2}
    patch = {
        "synchronisation": block,
        "compression": {"significance": 1.5},
        "tuner": {"group_size": [2, 40]},
    }
    body = digits.ask("PATCH", "/v1/jobs/digits", json=patch).json()
    assert body["changes"][1]["changed"] == patch
    assert body["spec"]["synchronisation"]["staleness"] == 2
    body = digits.ask("PATCH", "/v1/jobs/digits", json={"synchronisation": None}).json()
    assert "synchronisation" not in body["spec"]
    assert body["changes"][2]["changed"] == {"synchronisation": None}
    assert body["spec"]["compression"]["significance"] == 1.5


@pytest.mark.parametrize(
    ("patch", "field", "problem"),
    [
        (
            {"synchronisation": {"mode": "averaging"}},
            "body.synchronisation",
            "local_rate: is missing; mode averaging requires it, for example 0.1",
        ),
        ({"compression": {"changes": 2}}, "body.compression.changes", "must be at most 1"),
        ({"tuner": {"workers": "cost"}}, "body.tuner.workers", "`cost` would always choose one"),
    ],
)
def test_patch_with_an_invalid_block_is_rejected_at_its_field(
    digits: World, patch: dict[str, object], field: str, problem: str
) -> None:
    answer = digits.ask("PATCH", "/v1/jobs/digits", json=patch)
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"] == field
    assert problem in error["detail"]
    assert digits.get("/v1/jobs/digits")["revision"] == 0


def test_stopped_job_can_be_resumed(digits: World) -> None:
    for wanted in ("stopped", "running"):
        change = {"wanted": wanted, "reason": "as I like"}
        body = digits.ask("PATCH", "/v1/jobs/digits", json=change).json()
        assert (body["wanted"], body["reason"], body["revision"]) == (wanted, "as I like", 0)


def test_held_job_is_resumed_only_with_matching_loss_options(digits: World) -> None:
    resume = {"wanted": "running", "after_loss": True}
    assert digits.ask("PATCH", "/v1/jobs/digits", json=resume).status_code == 409
    assert digits.ask("PATCH", "/v1/jobs/digits", json={"after_loss": True}).status_code == 422
    job_store = JobOperations(digits.log)
    job_store.hold(job_store.get("digits"), "the updates topic lost records")
    body = digits.ask("PATCH", "/v1/jobs/digits", json={**resume, "from_start": True}).json()
    assert (body["wanted"], body["reason"]) == ("running", "resumed after loss by olga")
    record = JobOperations(digits.log).get("digits")
    assert (record.after_loss, record.from_start, record.read_from) == (1, True, "")

    job_store = JobOperations(digits.log)
    job_store.hold(job_store.get("digits"), "the topic clinic-a was deleted and recreated")
    for alone in ({"read_from": "earliest"}, {"from_start": True}):
        patch = {"wanted": "running", **alone}
        assert digits.ask("PATCH", "/v1/jobs/digits", json=patch).status_code == 422
    assert (
        digits.ask("PATCH", "/v1/jobs/digits", json={**resume, "read_from": "0"}).status_code == 422
    )
    digits.ask("PATCH", "/v1/jobs/digits", json={**resume, "read_from": "earliest"})
    record = JobOperations(digits.log).get("digits")
    assert (record.after_loss, record.from_start, record.read_from) == (2, False, "earliest")


def test_job_awaiting_a_checkpoint_can_be_resumed_after_loss(digits: World) -> None:
    resume = {"wanted": "running", "after_loss": True}
    board = digits.board("digits")
    board.put_unable("c1", "its task is not here", 60.0)
    assert digits.ask("PATCH", "/v1/jobs/digits", json=resume).status_code == 409
    board.put_unable("c1", f"{AWAITED}7-40, but the list is empty", 60.0)
    assert digits.ask("PATCH", "/v1/jobs/digits", json=resume).status_code == 200
    assert JobOperations(digits.log).get("digits").after_loss == 1


def test_patch_without_changes_writes_nothing(digits: World) -> None:
    before = written(digits)
    for change in ({}, {"group_size": 4}, {"wanted": "running"}):
        assert digits.ask("PATCH", "/v1/jobs/digits", json=change).status_code == 200
    assert written(digits) == before


def test_patch_with_an_outdated_revision_is_a_conflict(digits: World) -> None:
    change = {"group_size": 8, "revision": 0}
    assert digits.ask("PATCH", "/v1/jobs/digits", json=change).status_code == 200
    again = digits.ask("PATCH", "/v1/jobs/digits", json=change | {"group_size": 9})
    assert "is at revision 1" in problem(again, 409)


def test_patch_with_an_invalid_combination_changes_nothing(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    assert post(world, waiting_batches=5).status_code == 201
    change = {"wanted": "paused", "batch_size": 1, "group_size": 6}
    assert "waiting_batches" in problem(world.ask("PATCH", "/v1/jobs/digits", json=change), 422)
    body = world.get("/v1/jobs/digits")
    assert (body["wanted"], body["revision"]) == ("running", 0)


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 0},
        {"group_size": 2.5},
        {"group_size": "4"},
        {"group_size": None},
        {"group_size": 2**31},
        {"batch_size": True},
        {"learning_rate": 0},
        {"learning_rate": -1.0},
        {"deadline_s": 0},
        {"wanted": "gone"},
        {"reason": "x" * 501},
        {"revision": -1},
        {"colour": "red"},
    ],
)
def test_patch_with_a_field_out_of_range_names_it(digits: World, change: dict[str, object]) -> None:
    answer = digits.ask("PATCH", "/v1/jobs/digits", json=change)
    problem(answer, 422)
    assert [each["field"] for each in answer.json()["errors"]] == [f"body.{next(iter(change))}"]


def test_job_patch_has_all_changeable_fields() -> None:
    others = {"wanted", "reason", "revision", "after_loss", "from_start", "read_from"}
    assert set(CHANGEABLE) | others == set(JobPatch.__annotations__)


def test_changing_an_unknown_job_or_deleting_a_running_one_is_rejected(digits: World) -> None:
    assert problem(digits.ask("PATCH", "/v1/jobs/nobody", json={"wanted": "paused"}), 404)
    assert "stop it first" in problem(digits.ask("DELETE", "/v1/jobs/digits"), 409)


def test_changes_are_refused_during_a_kafka_outage_and_jobs_still_shown(digits: World) -> None:
    digits.log.go_away()
    answer = digits.ask("PATCH", "/v1/jobs/digits", json={"wanted": "paused"})
    assert problem(answer, 503)
    assert int(answer.headers["retry-after"]) > 0
    assert digits.get("/v1/jobs")["jobs"][0]["wanted"] == "running"


def test_unavailable_server_is_shown_as_the_state_of_each_job(digits: World) -> None:
    def shows(word: str, why: str) -> bool:
        (job,) = digits.get("/v1/jobs")["jobs"]
        shown = digits.get("/v1/jobs/digits")
        both = all(each["state"] == word and why in each["why"] for each in (job, shown))
        return both and f'state="{word}"' in digits.ask("GET", "/metrics").text

    eventually(lambda: shows("waiting for a coordinator", "no coordinator leads"))
    digits.log.go_away()
    eventually(lambda: shows("waiting for a server", "Kafka is unavailable since 20"))
    assert problem(digits.ask("GET", "/readyz"), 503).startswith("kafka: ")
    digits.log.come_back()
    eventually(lambda: shows("waiting for a coordinator", "no coordinator leads"))
    digits.redis.kill()
    eventually(lambda: shows("waiting for a server", "Redis is unavailable since 20"))
    digits.redis.restart()
    eventually(lambda: shows("waiting for a coordinator", "no coordinator leads"))
    digits.board("digits").put_unable("outage storage c1", "1000 no bucket", 60.0)
    away = "object storage is unavailable to c1 since 1970-01-01 00:16:40 UTC: no bucket"
    eventually(lambda: shows("waiting for a coordinator", away))
    eventually(lambda: digits.ask("GET", "/readyz").status_code == 503)
    storage = digits.ask("GET", "/readyz").json()["storage"]
    assert storage == {"ok": False, "reason": "c1: no bucket", "since_s": 1000.0}


def test_metrics_report_the_state_of_each_job_that_is_not_stopped(digits: World) -> None:
    assert post(digits, name="letters").status_code == 201
    assert digits.ask("PATCH", "/v1/jobs/digits", json={"wanted": "paused"}).status_code == 200

    def lines() -> set[str]:
        return set(digits.ask("GET", "/metrics").text.splitlines())

    eventually(
        lambda: (
            {
                'doll_job_state{job_name="digits",state="paused"} 1.0',
                'doll_job_state{job_name="letters",state="waiting for a coordinator"} 1.0',
                'doll_job_lag_records{job_name="letters"} 0.0',
                'doll_stream_open_transaction_seconds{job_name="letters",stream="clinic-a"} 0.0',
                'doll_job_skipped_records_total{job_name="letters"} 0.0',
                'doll_job_quarantined_batches{job_name="letters"} 0.0',
                'doll_job_expired_records_total{job_name="letters"} 0.0',
                'doll_job_lost_records_total{job_name="letters"} 0.0',
            }
            <= lines()
        )
    )
    assert digits.ask("PATCH", "/v1/jobs/letters", json={"wanted": "stopped"}).status_code == 200
    eventually(lambda: not [line for line in lines() if 'job_name="letters"' in line])


def test_job_list_is_not_built_for_a_disconnected_client(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[object]()
    monkeypatch.setattr(JobList, "__init__", lambda *_, **given: made.append(given))
    headers = [(b"host", HOST.encode()), (b"authorization", f"Bearer {world.viewer}".encode())]
    scope = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "http_version": "1.1",
        "path": "/v1/jobs",
        "raw_path": b"/v1/jobs",
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": (HOST, 80),
    }
    sent = list[object]()

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        sent.append(message)

    world.runner.run(world.app(scope, receive, send))

    assert made == []
    assert sent == []
