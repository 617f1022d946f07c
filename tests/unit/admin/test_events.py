"""Server-sent events over a real server and real connections."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import uvicorn
from starlette.requests import ClientDisconnect

from common.api.answers import EVENT_DATA
from common.api.keys import KeyStore
from common.jobs.operations import JobOperations
from services.admin.live.feed import EVENTS
from services.admin.routes import events as module
from tests.unit.admin.conftest import World, problem
from tests.unit.admin.live.helpers import (
    JOB,
    PATIENCE_S,
    Topics,
    eventually,
    happens,
    job,
    lead,
    update,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = f"/v1/jobs/{JOB}/events"


class Served:
    """A service on a free port of this machine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.topics = Topics(world.log)
        JobOperations(world.log).submit(job().spec)
        config = uvicorn.Config(world.app, port=0, log_config=None, lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started)
        host, port = self._server.servers[0].sockets[0].getsockname()
        self.client = httpx2.Client(
            base_url=f"http://{host}:{port}",
            headers={"Authorization": f"Bearer {world.viewer}"},
            timeout=PATIENCE_S,
        )

    @contextmanager
    def stream(self, last_event_id: str = "") -> Iterator[Stream]:
        """Open a stream of events."""
        headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
        with self.client.stream("GET", PATH, headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            yield Stream(response)

    @property
    def listeners(self) -> int:
        """Return the number of open streams."""
        return self.world.service.followers.of(JOB).feed.listeners

    def ask_to_end(self) -> None:
        """Request the end, as a signal does."""
        self.world.service.ending.set()
        self._server.should_exit = True

    def end(self) -> None:
        """Stop the server, and check that it ends."""
        self.ask_to_end()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.client.close()


class Stream:
    """Reads the events of a stream."""

    def __init__(self, response: httpx2.Response) -> None:
        self._lines = response.iter_lines()
        self.last_id = ""
        self.comments = 0

    def next(self) -> tuple[str, Any]:
        """Return the name and data of the next event.

        Raises:
            EOFError: If the stream has ended.
        """
        fields = dict[str, str]()
        for line in self._lines:
            name, _, value = line.partition(": ")
            if line:
                fields[name] = value
            elif "event" in fields:
                self.last_id = fields["id"]
                EVENT_DATA[fields["event"]].model_validate_json(
                    fields["data"]
                )  # the URL is as in the document
                return fields["event"], json.loads(fields["data"])
            else:
                self.comments += "" in fields
                fields.clear()
        raise EOFError


@pytest.fixture
def served(world: World) -> Iterator[Served]:
    before = set(threading.enumerate())
    made = Served(world)
    yield made
    made.end()
    world.service.close()

    def left() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - before]
        return [name for name in names if not name.startswith("asyncio_")]

    # A check of a server may be in flight.
    eventually(lambda: not left())


def test_event_stream_starts_with_the_job_and_continues_with_changes(served: Served) -> None:
    served.topics.audit(lead(), update(0, 1))
    with served.stream() as stream:
        name, data = stream.next()
        assert (name, data["id"], data["progress"]["version"]) == ("job", JOB, 1)
        served.topics.audit(update(0, 2))
        name, data = stream.next()
        assert (name, data["version"], data["count"]) == ("update", 2, 1)
        JobOperations(served.world.log).patch(JOB, "prices are high", wanted="paused")
        name, data = stream.next()
        assert (name, data["wanted"], data["reason"]) == ("job", "paused", "prices are high")


def test_concurrent_event_streams_get_the_same_events(served: Served) -> None:
    served.topics.audit(lead())
    with served.stream() as one, served.stream() as other:
        assert one.next()[0] == other.next()[0] == "job"
        eventually(lambda: served.listeners == 2)
        served.topics.audit(*(update(0, version) for version in range(1, 101)))
        ends = list[list[tuple[str, Any]]]()
        for stream in (one, other):
            events = [stream.next()]
            while events[-1][1]["version"] < 100:
                events.append(stream.next())
            ends.append(events)
        assert ends[0] == ends[1]
        assert sum(data["count"] for _, data in ends[0]) == 100
    eventually(lambda: served.listeners == 0)


def test_reconnected_event_stream_continues_after_the_last_id(served: Served) -> None:
    served.topics.audit(lead())
    with served.stream() as stream:
        stream.next()
        served.topics.audit(update(0, 1))
        assert stream.next()[1]["version"] == 1
        last_id = stream.last_id
    served.topics.audit(update(0, 2))
    with served.stream(last_id) as stream:
        assert stream.next()[1]["version"] == 2


@pytest.mark.parametrize("last_id", ["0123456789abcdef-7", "nonsense"])
def test_event_stream_with_unknown_last_id_starts_again(served: Served, last_id: str) -> None:
    with served.stream(last_id) as stream:
        assert stream.next()[0] == "job"


def test_quiet_event_stream_is_kept_open_by_comments(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_S", 0.02)
    with served.stream() as stream:
        assert stream.next()[0] == "job"
        timer = threading.Timer(0.2, lambda: served.topics.audit(lead(), update(0, 1)))
        timer.start()
        assert stream.next()[0] == "update"
        assert stream.comments > 0
        timer.join()


def test_shutdown_ends_all_event_streams(served: Served) -> None:
    with served.stream() as one, served.stream() as other:
        assert one.next()[0] == other.next()[0] == "job"
        served.ask_to_end()
        for stream in (one, other):
            with pytest.raises(EOFError):
                stream.next()


def test_deleting_a_job_ends_its_event_streams(served: Served) -> None:
    with served.stream() as stream:
        stream.next()
        job_store = JobOperations(served.world.log)
        job_store.patch(JOB, "enough", wanted="stopped")
        assert stream.next()[1]["wanted"] == "stopped"
        job_store.delete(JOB)
        with pytest.raises(EOFError):
            stream.next()
    assert served.client.get(PATH).status_code == 404


def test_revoking_a_key_ends_only_its_event_streams(served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.world.operator}"}
    with (
        served.stream() as stream,
        served.client.stream("GET", PATH, headers=headers) as response,
    ):
        other = Stream(response)
        assert stream.next()[0] == other.next()[0] == "job"
        KeyStore(served.world.log).revoke("eve")
        eventually(lambda: served.client.get(PATH).status_code == 401)
        served.topics.audit(lead(), update(0, 1))
        assert other.next()[0] == "update"
        with pytest.raises(EOFError):
            stream.next()


def test_event_streams_beyond_the_limit_return_429(served: Served) -> None:
    service = served.world.service
    with served.stream() as stream:
        stream.next()
        assert service.streams == 1
    eventually(lambda: service.streams == 0)
    service.streams = service.limits.streams
    answer = served.client.get(PATH)
    assert "streams" in problem(answer, 429)
    assert int(answer.headers["Retry-After"]) > 0
    service.streams = 0


def test_event_stream_of_unknown_job_or_caller_is_rejected(served: Served) -> None:
    problem(served.client.get("/v1/jobs/nobody/events"), 404)
    problem(served.client.get(PATH, headers={"Authorization": "Bearer nonsense"}), 401)


# --- slow readers: a fake server, so that nothing depends on the machine's buffers ---------------


class Reader:
    """An ASGI connection whose reader stops after some parts."""

    def __init__(self, takes: int) -> None:
        self.parts = list[bytes]()
        self.taken = asyncio.Event()
        self.goes = asyncio.Event()
        self.ended = False
        self._takes = takes

    async def send(self, message: Any) -> None:  # noqa: ANN401 -- as ASGI has it
        """Receive a part, or block for ever."""
        if message["type"] == "http.response.body":
            if len(self.parts) == self._takes:
                self.taken.set()
                await asyncio.Event().wait()
            self.parts.append(message["body"])
            self.ended = not message["more_body"]

    async def receive(self) -> dict[str, str]:
        """Wait until the reader goes."""
        await self.goes.wait()
        return {"type": "http.disconnect"}


def test_stuck_reader_is_disconnected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_S", 0.05)
    topics = Topics(world.log)
    JobOperations(world.log).submit(job().spec)

    async def read() -> None:
        await world.service.stores.ready()
        follower = await world.service.followers.ready(JOB)
        reader = Reader(takes=1)
        stream = module.EventStream(follower)
        task = asyncio.ensure_future(stream({"type": "http"}, reader.receive, reader.send))
        await happens(lambda: bool(reader.parts))
        topics.audit(lead(), update(0, 1))
        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(task, PATIENCE_S)
        assert follower.feed.listeners == 0

    world.runner.run(read())


def test_reader_stuck_at_the_end_is_disconnected(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEND_S", 0.05)
    Topics(world.log)
    JobOperations(world.log).submit(job().spec)

    async def read() -> None:
        await world.service.stores.ready()
        follower = await world.service.followers.ready(JOB)
        reader = Reader(takes=1)
        stream = module.EventStream(follower)
        task = asyncio.ensure_future(stream({"type": "http"}, reader.receive, reader.send))
        await happens(lambda: bool(reader.parts))
        follower.stop()
        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(task, PATIENCE_S)

    world.runner.run(read())


def test_overtaken_reader_is_disconnected(world: World) -> None:
    Topics(world.log)
    JobOperations(world.log).submit(job().spec)

    async def read() -> None:
        await world.service.stores.ready()
        follower = await world.service.followers.ready(JOB)
        reader = Reader(takes=100)
        stream = module.EventStream(follower)
        task = asyncio.ensure_future(stream({"type": "http"}, reader.receive, reader.send))
        await happens(lambda: bool(reader.parts))
        # The reader cannot read in between.
        for _ in range(EVENTS + 1):
            follower.feed.publish("update", b"{}")
        await asyncio.wait_for(task, PATIENCE_S)
        assert reader.ended
        assert b"event: update" not in b"".join(reader.parts)

    world.runner.run(read())


def test_closed_reader_is_noticed_at_once(world: World) -> None:
    Topics(world.log)
    JobOperations(world.log).submit(job().spec)

    async def read() -> None:
        await world.service.stores.ready()
        follower = await world.service.followers.ready(JOB)
        reader = Reader(takes=100)
        stream = module.EventStream(follower)
        task = asyncio.ensure_future(stream({"type": "http"}, reader.receive, reader.send))
        await happens(lambda: bool(reader.parts))
        reader.goes.set()
        await asyncio.wait_for(task, PATIENCE_S)
        assert not reader.ended
        assert follower.feed.listeners == 0

    world.runner.run(read())
