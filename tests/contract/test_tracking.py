"""The contract of experiment trackers, in memory and on a fake of MLflow's API.

`tests/integration/test_mlflow.py` runs it on an MLflow server.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.embedded.process import free_port
from common.errors import NotFoundError, UnavailableError, UserError
from common.tracking.mlflow import MlflowServer
from common.tracking.port import Metric
from tests.contract.mlflow_fake import FakeMlflow, refused
from tests.contract.odd_servers import ODD, OddServer, said
from tests.fakes.tracking import MemoryTracking

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.tracking.port import Tracking

    # Points of a run's metric.
    Points = Callable[[str, str], list[Metric]]
    Tracker = tuple[Tracking, Points]

URL = "http://mlflow:5000"
JOB = {"doll.job": "digits", "doll.submitted_s": "1767225600.5"}


def history(client: httpx2.Client, run: str, name: str) -> list[Metric]:
    asked = {"run_id": run, "metric_key": name}
    answer = client.get("/api/2.0/mlflow/metrics/get-history", params=asked)
    return [
        Metric(each["key"], each["value"], each["timestamp"] / 1000, each["step"])
        for each in answer.json().get("metrics", ())
    ]


@pytest.fixture(params=["memory", "imitated"])
def tracker(request: pytest.FixtureRequest) -> Tracker:
    if request.param == "imitated":
        transport = FakeMlflow().transport
        client = httpx2.Client(base_url=URL, transport=transport)
        return MlflowServer(URL, transport=transport), partial(history, client)
    memory = MemoryTracking()

    def points(run: str, name: str) -> list[Metric]:
        return [each for each in memory.runs[run].metrics if each.name == name]

    return memory, points


def identity(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the identity of a job that no other test has."""
    return JOB | {"doll.job": request.node.originalname}


def test_run_is_found_again_only_by_its_full_identity(
    tracker: Tracker, request: pytest.FixtureRequest
) -> None:
    tracking, _ = tracker
    own = identity(request)
    first = tracking.begin("Default", "digits", own, {"group_size": "4"})
    assert (first.status, own.items() <= first.tags.items()) == ("RUNNING", True)
    assert tracking.begin("Default", "digits", own, {"group_size": "4"}).id == first.id
    other = own | {"doll.submitted_s": "1767225601.5"}
    assert tracking.begin("Default", "digits", other, {}).id != first.id


def test_repeated_point_is_stored_once_and_last_tags_win(
    tracker: Tracker, request: pytest.FixtureRequest
) -> None:
    tracking, points = tracker
    run = tracking.begin("Default", "digits", identity(request), {})
    sent = [
        Metric("test/loss", 0.5, 1767225600.25, 100),
        Metric("prequential/clinic-a/loss", 0.625, 1767225600.25, 100),
    ]
    tracking.log(run.id, sent, {"doll.position": "12"})
    tracking.log(run.id, [*sent, Metric("test/loss", 0.25, 1767225601.25, 200)], {})
    tracking.log(run.id, [], {"doll.position": "13"})
    assert [(each.value, each.step) for each in points(run.id, "test/loss")] == [
        (0.5, 100),
        (0.25, 200),
    ]
    assert points(run.id, "prequential/clinic-a/loss") == sent[1:]
    found = tracking.begin("Default", "digits", identity(request), {})
    assert found.tags["doll.position"] == "13"


def test_many_points_are_sent_in_several_requests(
    tracker: Tracker, request: pytest.FixtureRequest
) -> None:
    tracking, points = tracker
    run = tracking.begin("Default", "digits", identity(request), {})
    tracking.log(run.id, [Metric("test/loss", 0.5, 1.0, n) for n in range(1901)], {"a": "b"})
    assert len(points(run.id, "test/loss")) == 1901


def test_run_can_finish_and_resume(tracker: Tracker, request: pytest.FixtureRequest) -> None:
    tracking, _ = tracker
    own = identity(request)
    run = tracking.begin("Default", "digits", own, {})
    for status in ("FINISHED", "RUNNING", "KILLED"):
        tracking.set_status(run.id, status)
        assert tracking.begin("Default", "digits", own, {}).status == status


def test_versions_are_found_by_tags_and_have_aliases(
    tracker: Tracker, request: pytest.FixtureRequest
) -> None:
    tracking, _ = tracker
    own, model = identity(request), f"{request.node.originalname}'s"
    run = tracking.begin("Default", "digits", own, {})
    assert tracking.versions(model, own) == []
    for at in (100, 200, 300):
        tags = own | {"doll.version": str(at)}
        number = tracking.register(model, f"s3://b/digits/checkpoints/7-{at}/", run.id, tags)
        assert number == str(at // 100)
    tracking.set_alias(model, "newest", "3")
    tracking.set_alias(model, "newest", "2")
    tracking.set_version_tag(model, "1", "doll.version", "none")
    found = {each.number: each.tags["doll.version"] for each in tracking.versions(model, own)}
    assert found == {"1": "none", "2": "200", "3": "300"}
    assert [each.number for each in tracking.versions(model, {"doll.version": "300"})] == ["3"]


def test_impossible_request_is_refused_with_its_reason(tracker: Tracker) -> None:
    tracking, _ = tracker
    with pytest.raises(UserError, match='experiment "nowhere"'):
        tracking.begin("nowhere", "digits", JOB, {})
    with pytest.raises(UserError, match="no-run"):
        tracking.log("no-run", [], {})


# --- MLflow only ------------------------------------------------------------------------------


def mlflow(fake: FakeMlflow, token: str = "") -> MlflowServer:
    return MlflowServer(URL, token=token, transport=fake.transport, clock=lambda: 7.0)


def test_concurrently_created_runs_resolve_to_the_first() -> None:
    fake = FakeMlflow()
    # The second tracker's search finds no run, as if it came before the first one's.
    first = mlflow(fake).begin("Default", "digits", JOB, {})
    fake.answers["runs/search"] = httpx2.Response(200, json={})
    assert mlflow(fake).begin("Default", "digits", JOB, {}).id == first.id
    assert list(fake.runs) == [first.id]


def test_parameters_are_completed_once_after_a_crash() -> None:
    fake = FakeMlflow()
    mlflow(fake).begin("Default", "digits", JOB, {})
    for _ in range(2):
        run = mlflow(fake).begin("Default", "digits", JOB, {"task.name": "n" * 9000})
    assert fake.runs[run.id]["data"]["params"] == [{"key": "task.name", "value": "n" * 500}]


def test_token_is_sent_and_missing_access_names_the_setting() -> None:
    fake = FakeMlflow(token="right")  # noqa: S106 -- of a fake
    mlflow(fake, "right").begin("Default", "digits", JOB, {})
    with pytest.raises(UserError, match=r"denies access \(status 401\).*DOLL_MLFLOW_TOKEN"):
        mlflow(fake, "wrong").begin("Default", "digits", JOB, {})


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (httpx2.Response(503), UnavailableError, "status 503"),
        (httpx2.Response(429), UnavailableError, "status 429"),
        (
            httpx2.Response(404, text="<!doctype html>"),
            UserError,
            "must be the complete URL of an MLflow server",
        ),
        (httpx2.Response(302, headers={"Location": "/in"}), UserError, "with status 302"),
        (
            httpx2.Response(200, text="hello"),
            UserError,
            "must be the complete URL of an MLflow server",
        ),
        (refused(400, "INVALID", "one\ntwo"), UserError, r"get-by-name: one \(INVALID\)"),
        (
            httpx2.Response(
                200, json={"experiment": {"experiment_id": "1", "lifecycle_stage": "deleted"}}
            ),
            NotFoundError,
            "only a deleted experiment",
        ),
    ],
)
def test_error_is_one_line(answer: httpx2.Response, kind: type, message: str) -> None:
    fake = FakeMlflow()
    fake.answers["experiments/get-by-name"] = answer
    with pytest.raises(kind, match=message) as raised:
        mlflow(fake).begin("Default", "digits", JOB, {})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ODD)
def test_invalid_answer_raises_promptly_and_next_good_answer_counts(kind: str) -> None:
    with OddServer(ODD[kind]) as server:
        tracking = MlflowServer(server.url, answer_s=0.5)
        with pytest.raises((UnavailableError, UserError)):
            tracking.begin("Default", "digits", JOB, {})
        with pytest.raises((UnavailableError, UserError)):
            tracking.register("digits", "s3://b/1", "r", {})
        server.answer = said(
            {"experiment": {"experiment_id": "0"}, "run": {"info": {"run_id": "r"}}}
        )
        assert tracking.begin("Default", "digits", JOB, {}).id == "r"
        tracking.close()


def test_endless_pages_are_refused() -> None:
    with OddServer(said({"next_page_token": "again"})) as server:
        tracking = MlflowServer(server.url)
        with pytest.raises(UserError, match="more than 100 pages"):
            tracking.versions("digits", JOB)
        assert len(server.paths) == 100
        tracking.close()


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(["experiment", "experiment_id", "run", "runs", "info", "model_versions"])


@settings(max_examples=100)
@given(st.sampled_from([200, 400, 500]), JSON | st.dictionaries(NAMES, JSON))
def test_any_json_from_tracker_is_answer_or_known_error(status: int, body: object) -> None:
    answer = httpx2.Response(status, content=msgspec.json.encode(body))
    tracking = MlflowServer(URL, transport=httpx2.MockTransport(lambda _: answer))
    with suppress(UnavailableError, UserError):
        tracking.begin("Default", "digits", JOB, {})
    with suppress(UnavailableError, UserError):
        tracking.versions("digits", {})
    tracking.close()


def test_unreachable_tracker_raises_unavailable() -> None:
    tracking = MlflowServer(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UnavailableError, match="cannot be reached"):
        tracking.begin("Default", "digits", JOB, {})
    tracking.close()
