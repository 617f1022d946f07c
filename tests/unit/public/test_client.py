"""`doll.Client`: jobs over the API, updates despite broken connections, models that follow."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

import httpx2
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import doll
import doll.events
from common.api.answers import EVENT_DATA, JobAnswer, ProgressAnswer, UpdateEvent
from common.core.messages import GENESIS, Batch, Lead, ModelId, UpdateApplied, WorkerId
from common.core.spans import Span
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.progress import Word
from common.learning.tasks import build_model, task_of
from common.storage.snapshot_file import to_bytes
from common.wire.messages import encode_audit
from doll import connection as connections
from doll import job as jobs
from tests.contract.odd_servers import ODD, OddServer, said
from tests.unit.admin import conftest, test_events, test_model
from tests.unit.admin.live.helpers import eventually, lead, update
from tests.unit.cli.conftest import Bridge
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.admin.conftest import World
    from tests.unit.admin.test_events import Served

URL = "http://doll.test"
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
SPEC = parse_job(JOB)

world, led, served = conftest.world, test_model.led, test_events.served


class WorldTransport(Bridge):
    """Transport to a service for several threads. It can be cut."""

    # All clients share it, because the clients of a world use the world's single event loop.
    _lock = threading.Lock()

    def __init__(self, world: World) -> None:
        super().__init__(lambda: world.app)
        self.runner.close()
        self.runner = world.runner  # closed by the world
        self.cut = False
        self.answered = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request to the service."""
        if self.cut:
            raise httpx2.ConnectError("connection refused")
        with self._lock:
            answer = super().handle_request(request)
            self.answered += 1
            return answer


def client_of(world: World) -> doll.Client:
    return doll.Client(URL, world.operator, transport=WorldTransport(world))


def played(handler: Callable[[httpx2.Request], httpx2.Response], key: str = "") -> doll.Client:
    """Return a client of a fake service."""
    return doll.Client(URL, key, transport=httpx2.MockTransport(handler))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without waiting."""
    monkeypatch.setattr(connections, "AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(doll.events, "AGAIN_S", 0.0)


# --- jobs -----------------------------------------------------------------------------------------


def test_submit_accepts_a_file_data_or_a_specification(world: World, tmp_path: Path) -> None:
    world.streams("clinic-a")
    client = client_of(world)
    path = tmp_path / "digits.yaml"
    path.write_text(JOB)
    assert client.submit(path).name == "digits"
    assert client.submit({**SPEC.model_dump(mode="json"), "name": "data"}).name == "data"
    spec = SPEC.model_copy(update={"name": "spec"})
    assert client.submit(spec, unchecked=True).name == "spec"
    assert [job.name for job in client.jobs()] == ["data", "digits", "spec"]
    assert client.job("spec").status().spec["batch_size"] == SPEC.batch_size


def test_job_can_be_paused_changed_resumed_stopped_and_deleted(world: World) -> None:
    world.streams("clinic-a")
    job = client_of(world).submit(SPEC)
    assert (job.pause("prices are high").state, job.status().reason) == (
        *("paused", "prices are high"),
    )
    assert job.change("more often", group_size=3).spec["group_size"] == 3
    assert job.resume().wanted == "running"
    with pytest.raises(doll.ConflictError, match="stop it first"):
        job.delete()
    assert job.stop().state == "stopped"
    job.delete()
    with pytest.raises(doll.NotFoundError, match="digits"):
        job.status()


def test_name_of_a_purged_job_can_be_reused(world: World) -> None:
    world.streams("clinic-a")
    client = client_of(world)
    for control in ("doll.digits.control", "doll.digits.I2.control"):
        job = client.submit(SPEC)
        assert job.name == "digits"
        assert control in world.log.topics()
        job.stop()
        job.delete(purge=True)
        assert control not in world.log.topics()
    with pytest.raises(doll.NotFoundError, match="digits"):
        job.status()


def test_errors_are_reported_with_a_remedy(world: World) -> None:
    world.streams("clinic-a")
    client = client_of(world)
    with pytest.raises(doll.UserError, match="group_size: must be at least 1"):
        client.submit({**SPEC.model_dump(mode="json"), "group_size": 0})
    with pytest.raises(doll.UserError, match=r"absent\.yaml"):
        client.submit("absent.yaml")
    client.submit(SPEC)
    with pytest.raises(doll.ConflictError, match="there is already a job"):
        client.submit(SPEC)
    with pytest.raises(doll.UserError, match="plain data"):
        client.job("digits").change(group_size=object())
    with pytest.raises(doll.UserError, match="DOLL_API_KEY"):
        doll.Client(URL, "doll_x", transport=WorldTransport(world)).jobs()


def test_client_reads_service_and_key_from_the_environment(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(doll.UserError, match="url: is missing"):
        doll.Client()
    monkeypatch.setenv("DOLL_API", URL)
    (tmp_path / "key").write_text(world.viewer + "\n")
    monkeypatch.setenv("DOLL_API_KEY_FILE", str(tmp_path / "key"))
    with doll.Client(transport=WorldTransport(world)) as client:
        assert client.jobs() == []


def test_answer_types_match_the_api_models() -> None:
    for ours, theirs in (
        *((jobs.Update, UpdateEvent), (jobs.Progress, ProgressAnswer), (jobs.Status, JobAnswer)),
    ):
        assert set(ours.__struct_fields__) <= theirs.model_fields.keys()
    assert set(jobs._OVER) < set(get_args(Word))  # noqa: SLF001 -- the words are the API's
    assert {"job", "update"} < EVENT_DATA.keys()


# --- requests that are repeated -------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("first", [500, 503, "lost", "refused"])
def test_idempotent_request_is_retried_with_the_same_key(first: int | str) -> None:
    asked = list[httpx2.Request]()

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        if len(asked) > 2:
            return httpx2.Response(200, content=b'{"id": "digits", "jobs": []}')
        if isinstance(first, int):
            return httpx2.Response(first)
        raise {"lost": httpx2.ReadError, "refused": httpx2.ConnectError}[first]("broken")

    client = played(answer)
    assert client.jobs() == []
    asked.clear()
    assert client.submit(SPEC).name == "digits"
    assert len({request.headers["Idempotency-Key"] for request in asked}) == 1


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("first", "times"), [(500, 1), ("lost", 1), (429, 3), ("refused", 3)])
def test_change_is_retried_only_if_it_did_not_arrive(first: int | str, times: int) -> None:
    asked = list[str]()

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.method)
        if isinstance(first, int):
            return httpx2.Response(first)
        raise {"lost": httpx2.ReadError, "refused": httpx2.ConnectError}[first]("broken")

    with pytest.raises(doll.OutsideError):
        played(answer).job("digits").pause()
    assert asked == ["PATCH"] * times


def test_address_of_another_service_is_reported() -> None:
    client = played(lambda _: httpx2.Response(200, content=b"<html>"))
    with pytest.raises(doll.OutsideError, match="is not a DOLL admin service"):
        client.jobs()
    with pytest.raises(doll.OutsideError, match="is not a DOLL admin service"):
        client.job("digits").model()
    headers = {"Doll-Version": "1", "Doll-Epoch": "0", "ETag": '"0-1"'}
    torn = played(lambda _: httpx2.Response(200, content=b"torn", headers=headers))
    with pytest.raises(doll.OutsideError, match="is not a DOLL admin service"):
        torn.job("digits").model()


# --- updates --------------------------------------------------------------------------------------


class Broken(httpx2.SyncByteStream):
    """A stream of events that breaks off or ends."""

    def __init__(self, *events: tuple[int, str, Any], whole: bool) -> None:
        self._events = events
        self._whole = whole

    def __iter__(self) -> Iterator[bytes]:
        yield b"retry: 2000\n\n: nothing new\n\n"
        for number, kind, data in self._events:
            yield f"id: ring-{number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()
        if not self._whole:
            yield b"id: ring-99\nevent: upd"
            raise httpx2.ReadError("broken")


def made(version: int, epoch: int = 0) -> dict[str, Any]:
    event = jobs.Update(version, epoch, 1.0, 2, 1, 0.5, {})
    return dict(msgspec.to_builtins(event))


@pytest.mark.usefixtures("at_once")
def test_updates_resume_after_a_broken_connection_without_duplicates() -> None:
    progress = jobs.Progress(1, 0, None, {}, None, None, None, None, 0, 0, 0, 0)
    status = jobs.Status("digits", "running", "", "running", "", 0, 0.0, {}, progress)
    status_event = dict(msgspec.to_builtins(status))
    over = {
        **status_event,
        "state": "finished",
        "progress": {**status_event["progress"], "version": 9},
    }
    streams = [
        Broken(
            (0, "job", status_event), (1, "update", made(2)), (2, "update", made(3)), whole=False
        ),
        Broken((3, "update", made(4)), whole=True),
        Broken(
            (0, "job", status_event), (1, "update", made(4)), (2, "update", made(5)), whole=False
        ),
        Broken((3, "member", {}), (4, "update", made(3, epoch=7)), (5, "job", over), whole=True),
    ]
    begun = list[str]()

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/updates"):
            after = int(request.url.params["after"])
            newest = made(after + 1, epoch=7 if after == 8 else 0)
            return httpx2.Response(200, json={"updates": [newest]})
        begun.append(request.headers.get("Last-Event-ID", ""))
        return httpx2.Response(200, stream=streams[len(begun) - 1])

    shown = [(each.epoch, each.version) for each in played(answer).job("digits").updates()]

    # The client looks up the first update and the last one, whose event was not sent. The leader
    # of epoch 7 has taken back the versions 3 to 5.
    assert shown == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (7, 3), (7, 9)]
    assert begun == ["", "ring-2", "ring-3", "ring-2"]


@pytest.mark.usefixtures("at_once")
def test_service_that_stays_unreachable_raises_unavailable_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("connection refused")

    monkeypatch.setattr(doll.events, "PATIENCE_S", 0.01)
    with pytest.raises(doll.UnavailableError, match="connection refused"):
        next(played(refuse).job("digits").updates())


def test_updates_end_with_the_job(served: Served) -> None:
    served.topics.audit(lead(), update(0, 1))
    with doll.Client(str(served.client.base_url), served.world.viewer) as client:
        updates = client.job("digits").updates()
        assert next(updates).version == 1
        served.topics.audit(update(0, 2), lead(0, ModelId(0, 1), epoch=3), update(3, 2))
        until = next(each for each in updates if each.epoch == 3)
        assert (until.version, until.loss) == (2, 0.5)
        JobOperations(served.world.log).patch("digits", "enough", wanted="stopped")
        assert list(updates) == []
        with pytest.raises(doll.NotFoundError):
            next(client.job("nobody").updates())


# --- models ---------------------------------------------------------------------------------------


def test_model_returns_the_stored_weights(led: World) -> None:
    job, net = client_of(led).job("digits"), build_model(task_of(SPEC, ()), 7)
    best = job.model("best")
    net.load_state_dict(best)
    assert (best.version, best.epoch, best.tag) == (1, 0, job.model(1).tag)
    assert job.model().version == 2
    assert (best.metadata["job"], best.metadata["version"]) == ("digits", "1")
    arrays = job.model("best", framework="numpy")
    assert arrays.keys() == best.keys()
    assert all(np.array_equal(arrays[name], best[name].numpy()) for name in best)
    with pytest.raises(doll.NotFoundError):
        job.model(7)


def keep(led: World, epoch: int, version: int, job: str = "digits") -> None:
    """Write the update that makes a version, and the version's snapshot."""
    batch = Batch(version - 1, WorkerId("w1"), (Span("clinic-a", 0, 0, 2),), 2)
    led.log.writer().append(
        f"doll.{job}.updates", encode_audit(UpdateApplied(epoch, version, (batch,), 2, 0.5))
    )
    snapshot = test_model.kept(ModelId(epoch, version), version + 1, test_model.trained(version))
    led.board(job).put_snapshot(epoch, to_bytes(snapshot), "c1")


def test_follower_serves_complete_and_increasing_versions(led: World) -> None:
    net, inputs, way = (
        build_model(task_of(SPEC, ()), 7),
        torch.ones(1, 1, 8, 8),
        WorldTransport(led),
    )
    before = {name: each.clone() for name, each in net.state_dict().items()}
    job = doll.Client(URL, led.viewer, transport=way).job("digits")
    with job.follow(net, every_s=0.001) as live:
        old = live.served
        answer = old.net(inputs)
        keep(led, 0, 3)
        eventually(lambda: live.version == 3)
        assert (old.version, torch.equal(old.net(inputs), answer)) == (2, True)
        assert not torch.equal(live(inputs), answer)

        # The newest readable checkpoint is of version 1.
        led.board("digits").wipe()
        looks = way.answered
        eventually(lambda: way.answered > looks + 1)
        assert job.model().version == 1
        assert (live.version, live.error) == (3, None)
    assert all(torch.equal(net.state_dict()[name], each) for name, each in before.items())


@pytest.mark.usefixtures("at_once")
def test_follower_switches_to_the_next_job_of_its_name(led: World) -> None:
    job = client_of(led).job("digits")
    with job.follow(build_model(task_of(SPEC, ()), 7), every_s=0.001) as live:
        assert (live.served.epoch, live.version) == (0, 2)
        job.stop()
        job.delete(purge=True)
        client_of(led).submit(SPEC)
        led.log.writer().append("doll.digits.I2.updates", encode_audit(Lead(-1, GENESIS, "c1", 0)))
        keep(led, 0, 1, "digits.I2")
        eventually(lambda: (live.served.epoch, live.version, live.error) == (0, 1, None))


@pytest.mark.usefixtures("at_once")
def test_follower_serves_during_an_outage_and_then_catches_up(led: World) -> None:
    way = WorldTransport(led)
    job = doll.Client(URL, led.viewer, transport=way).job("digits")
    with job.follow(build_model(task_of(SPEC, ()), 7), every_s=0.001) as live:
        way.cut = True
        eventually(lambda: isinstance(live.error, doll.UnavailableError))
        assert live.version == 2
        keep(led, 0, 3)
        way.cut = False
        eventually(lambda: live.version == 3 and live.error is None)


def test_follow_with_another_network_is_rejected_immediately(led: World) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        client_of(led).job("digits").follow(torch.nn.Linear(3, 1))


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.usefixtures("at_once")
def test_malformed_answer_raises_a_doll_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "OF_JSON", (1_000_000, 0.3))
    with OddServer(ODD[kind]) as server:
        if kind == "dripping headers":
            server.answer = said(None)
        client = doll.Client(server.url, timeout_s=0.3)
        with pytest.raises((doll.OutsideError, doll.UserError)):
            client.job("digits").status()
        client.close()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("after", ["\u00b2", "soon", "9" * 400, "-1"])
def test_invalid_retry_after_header_raises_a_doll_error(
    after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LONGEST_S", 0.0)
    headers = [(b"Retry-After", after.encode())]
    client = played(lambda _: httpx2.Response(503, headers=headers))
    with pytest.raises(doll.UnavailableError):
        client.job("digits").status()


@settings(max_examples=100)
@given(st.sampled_from([200, 404, 422, 500]), JSON)
def test_arbitrary_json_is_an_answer_or_raises_a_doll_error(status: int, body: object) -> None:
    content = msgspec.json.encode(body)
    client = played(lambda _: httpx2.Response(status, content=content))
    with suppress(doll.OutsideError, doll.UserError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "AGAIN_S", ())
        client.job("digits").status()
