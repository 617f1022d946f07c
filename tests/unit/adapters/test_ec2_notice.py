"""EC2's metadata service: expiring tokens, refusals, and unexpected answers."""

from __future__ import annotations

import json
import time
from datetime import UTC
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import OutsideError, UnavailableError
from common.notices.metadata import InstanceMetadata
from common.notices.preemption import Ec2Notices, Notice
from tests.contract.odd_servers import OddServer, drips_body, drips_headers, endless
from tests.fakes.clock import ManualClock
from tests.metadata_server import INTERRUPTION, TOKEN, MetadataServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from tests.contract.odd_servers import Answer

# Every request that must be answered is answered within this time.
PATIENCE_S = 120.0
AT_S = 1_800_000_000.0
NOTICE = Notice(AT_S, "terminate")
SIX_HOURS_S = 6 * 3600.0
DEAD_PROXY = "http://127.0.0.1:1"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def server(clock: ManualClock) -> Iterator[MetadataServer]:
    with MetadataServer(clock) as server:
        server.interrupt(AT_S)
        yield server


@pytest.fixture
def notices(server: MetadataServer, clock: ManualClock) -> Ec2Notices:
    return Ec2Notices(InstanceMetadata(server.endpoint, PATIENCE_S, clock))


def test_one_token_serves_many_requests(server: MetadataServer, notices: Ec2Notices) -> None:
    for _ in range(5):
        notices.look()
    assert (server.issued, server.refused) == (1, 0)


def test_token_is_renewed_before_it_expires(
    server: MetadataServer, notices: Ec2Notices, clock: ManualClock
) -> None:
    for _ in range(360):
        assert notices.look() == NOTICE
        clock.advance(SIX_HOURS_S / 300)
    assert (server.issued, server.refused) == (2, 0)


def test_refused_token_is_renewed_at_once(server: MetadataServer, notices: Ec2Notices) -> None:
    notices.look()
    server.forget_tokens()
    assert notices.look() == NOTICE
    assert (server.issued, server.refused) == (2, 1)


def test_service_that_refuses_every_token_is_asked_twice(
    server: MetadataServer, notices: Ec2Notices
) -> None:
    server.answer(TOKEN, b"not-one-of-its-own")
    with pytest.raises(OutsideError, match="instance-action answered with status 401"):
        notices.look()
    assert server.refused == 2


@pytest.mark.parametrize(
    ("status", "passing"),
    [(400, False), (403, False), (301, False), (404, False), (429, True), (500, True), (503, True)],
)
def test_failed_token_request_is_refused_or_unavailable_by_status(
    server: MetadataServer, notices: Ec2Notices, status: int, *, passing: bool
) -> None:
    server.answer(TOKEN, b"no", status)
    with pytest.raises(OutsideError, match=f"api/token answered with status {status}") as caught:
        notices.look()
    assert isinstance(caught.value, UnavailableError) == passing


@pytest.mark.parametrize("token", [b"", b"two words", b"two\r\nHeaders: of one", b"\xff"])
def test_token_that_cannot_be_a_header_is_rejected(
    server: MetadataServer, notices: Ec2Notices, token: bytes
) -> None:
    server.answer(TOKEN, token)
    with pytest.raises(OutsideError, match="must return a token"):
        notices.look()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"action": "stop"}',
        b'{"action": "stop", "more": ' + b"[" * 4000,
        b'{"action": "\xff", "noticeTime": "\xff"}',
        b'{"action": 3, "time": "2027-01-15T08:00:00Z"}',
        b'{"action": "stop", "time": "soon"}',
        b'{"action": "stop", "time": "2027-01-15T08:00:00"}',
    ],
)
def test_invalid_notice_is_skipped_and_logged(
    server: MetadataServer,
    notices: Ec2Notices,
    body: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.answer(INTERRUPTION, body)
    assert notices.look() is None
    assert "no instance action" in caplog.text


def test_notice_with_unknown_fields_is_accepted(
    server: MetadataServer, notices: Ec2Notices
) -> None:
    server.answer(INTERRUPTION, b'{"action": "x", "time": "2027-01-15T09:00:00+01:00", "n": [1]}')
    assert notices.look() == Notice(AT_S, "x")


def test_slow_metadata_service_is_unavailable(server: MetadataServer) -> None:
    server.freeze()
    impatient = Ec2Notices(InstanceMetadata(server.endpoint, timeout_s=0.02))
    with pytest.raises(UnavailableError, match="did not answer in"):
        impatient.look()
    server.come_back()


@pytest.mark.parametrize("drips", [drips_headers, drips_body])
def test_endless_slow_answer_is_unavailable(drips: Answer) -> None:
    with OddServer(drips) as server:
        impatient = InstanceMetadata(server.url, timeout_s=0.3)
        with pytest.raises(UnavailableError, match="did not answer in"):
            impatient.get(INTERRUPTION)


def test_endless_answer_is_read_up_to_a_limit() -> None:
    with (
        OddServer(endless) as server,
        pytest.raises(UnavailableError, match="sent an answer of more than 1,000,000 bytes"),
    ):
        InstanceMetadata(server.url, PATIENCE_S).get(INTERRUPTION)


def test_closed_metadata_port_is_unavailable() -> None:
    with MetadataServer() as server:
        endpoint = server.endpoint
    with pytest.raises(UnavailableError, match=f"service at {endpoint} cannot be reached"):
        Ec2Notices(InstanceMetadata(endpoint)).look()


def test_metadata_requests_use_no_proxy(
    notices: Ec2Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, DEAD_PROXY)
    assert notices.look() == NOTICE


def test_metadata_service_without_http_is_unavailable(
    server: MetadataServer, notices: Ec2Notices
) -> None:
    server.say(b"-ERR unknown command 'PUT'\r\n")
    with pytest.raises(UnavailableError, match="cannot be reached"):
        notices.look()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.binary(max_size=40)
    | st.builds(
        b"HTTP/1.1 %d OK\r\n%b: %b\r\n\r\n%b".__mod__,
        st.tuples(
            st.sampled_from([200, 200, 404, 500, 999]),
            st.sampled_from([b"Content-Length", b"Transfer-Encoding", b"X"]),
            st.sampled_from([b"-1", b"7", b"chunked", b"x\r\n folded"]),
            st.binary(max_size=30),
        ),
    )
)
def test_any_answer_gives_no_notice_or_a_known_error(
    server: MetadataServer, notices: Ec2Notices, raw: bytes
) -> None:
    server.say(raw)
    try:
        assert notices.look() is None
    except OutsideError as error:
        assert str(error)  # noqa: PT017 -- both ends are right


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(instant=st.datetimes(timezones=st.just(UTC)), hours=st.integers(-23, 23), action=st.text())
def test_notice_with_any_instant_is_read(
    server: MetadataServer, notices: Ec2Notices, instant: datetime, hours: int, action: str
) -> None:
    written = f"{instant.replace(tzinfo=None).isoformat()}{hours:+03}:30"
    server.answer(INTERRUPTION, json.dumps({"action": action, "time": written}).encode())
    notice = notices.look()
    assert notice is None or (notice.detail == action and time.gmtime(notice.at_s))
