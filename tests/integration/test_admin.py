"""The admin service as a process: behind TLS it serves a job, and it ends well in mid-stream."""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from common.connections import open_log
from common.embedded.redis import free_port
from common.embedded.services import Service
from common.embedded.stack import EmbeddedStack
from common.keys import KeyBook
from common.ports import NewTopic
from services.admin.examples import JOB
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG_S = 20.0


class Served(NamedTuple):
    """A process and a client that knows its certificate and a key."""

    process: Service
    client: httpx.Client


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """The service on embedded servers, with two streams to learn from."""
    authority = Authority(tmp_path)
    pair, port = authority.issue("admin"), free_port()
    with EmbeddedStack() as stack:
        log = open_log(stack.settings)
        for stream in JOB["streams"]:
            log.create_topics([NewTopic(stream)])
        key, _ = KeyBook(log).create("olga", "operator")
        api = {"api_port": port, "api_tls_cert": str(pair.cert), "api_tls_key": str(pair.key)}
        process = Service("admin", "a1", stack.settings.model_copy(update=api), tmp_path)
        trust = ssl.create_default_context(cafile=str(authority.cert))
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=trust, headers=headers, timeout=LONG_S
        ) as client:
            await_ready(process, client)
            yield Served(process, client)
        process.stop()


def await_ready(process: Service, client: httpx.Client) -> None:
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        assert process.exit_code is None, process.last_words()
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)  # it does not listen yet
    pytest.fail(process.last_words())


def test_a_job_is_made_changed_and_followed_and_the_process_ends_in_mid_stream(
    served: Served,
) -> None:
    process, client = served
    assert client.post("/v1/jobs", json=JOB).status_code == 201
    assert client.get("/v1/jobs/digits").json()["progress"]["version"] == 0
    assert client.patch("/v1/jobs/digits", json={"group_size": 8}).status_code == 200
    assert client.get("/v1/jobs/digits").json()["spec"]["group_size"] == 8  # at once
    with client.stream("GET", "/v1/jobs/digits/events") as events:
        lines = events.iter_lines()
        while next(lines) != "event: job":
            pass
        assert "doll_api_streams_open 1.0" in client.get("/metrics").text
        process.ask_to_end()
        list(lines)  # comes to its end
    process.stop()
    assert process.exit_code == 0, process.last_words()
    assert "admin_ended" in process.last_words()
    assert "Traceback" not in process.last_words()
