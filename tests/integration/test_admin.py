"""The admin service as a process serves a job over TLS, and ends cleanly during a stream."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple

import httpx2
import pytest

from common.api.keys import KeyStore
from common.embedded.process import free_port
from common.embedded.services import EmbeddedService
from common.embedded.stack import EmbeddedStack
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from services.admin.routes.requests import JOB
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG_S = 20.0


class Served(NamedTuple):
    """A process, and a client that knows its certificate and a key."""

    process: EmbeddedService
    client: httpx2.Client


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """The service on embedded servers, with two streams."""
    authority = Authority(tmp_path)
    pair, port = authority.issue("admin"), free_port()
    with EmbeddedStack() as stack:
        with closing(open_log(stack.settings)) as log, closing(KeyStore(log)) as keys:
            for stream in JOB["streams"]:
                log.create_topics([NewTopic(stream)])
            key, _ = keys.create("olga", "operator")
        api = {"api_port": port, "api_tls_cert": str(pair.cert), "api_tls_key": str(pair.key)}
        process = EmbeddedService("admin", "a1", stack.settings.model_copy(update=api), tmp_path)
        trust = ssl.create_default_context(cafile=str(authority.cert))
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(
            base_url=f"https://127.0.0.1:{port}", verify=trust, headers=headers, timeout=LONG_S
        ) as client:
            await_ready(process, client)
            yield Served(process, client)
        process.stop()


def await_ready(process: EmbeddedService, client: httpx2.Client) -> None:
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        assert process.exit_code is None, process.last_words()
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.05)  # it does not listen yet
    pytest.fail(process.last_words())


def test_admin_serves_job_over_tls_and_ends_during_a_stream(
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


FLOOD = 1100
HALF_OPEN = (
    b"",
    b"GET /v1/jobs HTTP/1.1\r\nHost: doll.test\r\nX-Slow: ",
    b"POST /v1/jobs HTTP/1.1\r\nHost: doll.test\r\nContent-Length: 100\r\n\r\n{",
)


def test_half_open_requests_block_no_client_and_are_closed(
    served: Served,
) -> None:
    port = served.client.base_url.port or 0
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    with ExitStack() as stack:
        flood = list[socket.socket]()
        for number in range(FLOOD):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", port), LONG_S))
            # Every fourth connection does not begin its TLS handshake.
            if number % 4:
                half = stack.enter_context(trust.wrap_socket(half))
                half.sendall(HALF_OPEN[number % len(HALF_OPEN)])
            flood.append(half)

        assert served.client.get("/healthz").status_code == 200
        with httpx2.Client(
            base_url=served.client.base_url, verify=trust, headers=served.client.headers
        ) as operator:  # on a connection of its own
            assert operator.get("/v1/jobs").status_code == 200
        for half in flood:
            assert_closed(half)


def assert_closed(half: socket.socket) -> None:
    """Wait until the service has closed a connection."""
    try:
        while half.recv(65_536):
            pass
    # The service closed the connection without TLS's own message of the end.
    except (ConnectionResetError, ssl.SSLError):
        pass
