"""Metadata services on this machine: EC2's with its rules for tokens, and those of other clouds."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

TOKEN = "/latest/api/token"  # noqa: S105 -- the path to ask at
INTERRUPTION = "/latest/meta-data/spot/instance-action"
ZONE_ID = "/latest/meta-data/placement/availability-zone-id"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
SCHEDULED = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 -- a header's name
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_LONGEST_TTL_S = 21_600
# Delay in seconds after which the server notices that it is closed.
_POLL_S = 0.01


class MetadataServer:
    """Serves from a thread on a free port of the loopback device. Tests give notices.

    Args:
        clock: Clock for the expiry of tokens.
    """

    # Header that a request of metadata must have.
    header = _TOKEN_HEADER

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.issued = 0  # tokens
        self.refused = 0  # requests without a valid one
        self._clock = clock
        # Keyed by token.
        self._valid_until = dict[str, float]()
        # Keyed by path. They replace the usual answers.
        self._answers = dict[str, tuple[int, bytes]]()
        # Sent in place of any answer. The server then closes the connection.
        self._raw: bytes | None = None
        # Unset while the server is frozen.
        self._free = threading.Event()
        self._free.set()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Return the server's address."""
        return f"http://127.0.0.1:{self._server.server_port}"

    # --- controls of tests -----------------------------------------------------------------------

    def interrupt(self, at_s: float, action: str = "terminate") -> None:
        """Give notice that the machine ends at this time."""
        self.answer(INTERRUPTION, _json(action=action, time=_instant(at_s)))

    def place(self, zone_id: str) -> None:
        """Set the zone of the machine."""
        self.answer(ZONE_ID, zone_id.encode())

    def talk_nonsense(self) -> None:
        """Answer with text that is no notice."""
        self.answer(INTERRUPTION, b"nonsense")

    def answer(self, path: str, body: bytes, status: int = HTTPStatus.OK) -> None:
        """Answer with this body at a path, if the request has a valid token."""
        self._answers[path] = status, body

    def say(self, raw: bytes) -> None:
        """Send these bytes for each request, and close the connection. They need not be HTTP."""
        self._raw = raw

    def go_away(self) -> None:
        """Close each connection without an answer."""
        self.say(b"")

    def come_back(self) -> None:
        """Answer as usual again."""
        self._raw = None
        self._free.set()

    def freeze(self) -> None:
        """Accept connections, but answer none of them until `come_back`."""
        self._free.clear()

    def forget_tokens(self) -> None:
        """Make all issued tokens invalid."""
        self._valid_until.clear()

    def close(self) -> None:
        """Stop listening."""
        self._free.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- answers ---------------------------------------------------------------------------------

    def outburst(self) -> bytes | None:
        """Return the bytes to send instead of an answer, if any. Waits while frozen."""
        self._free.wait()
        return self._raw

    def token(self, ttl: str | None) -> tuple[int, bytes]:
        """Return status and body for a request of a token."""
        if ttl is None or not ttl.isdecimal() or not 1 <= int(ttl) <= _LONGEST_TTL_S:
            return HTTPStatus.BAD_REQUEST, b""
        if TOKEN in self._answers:
            return self._answers[TOKEN]
        self.issued += 1
        token = secrets.token_urlsafe()
        self._valid_until[token] = self._clock() + int(ttl)
        return HTTPStatus.OK, token.encode()

    def metadata(self, path: str, token: str | None) -> tuple[int, bytes]:
        """Return status and body for a request of metadata."""
        if self._clock() >= self._valid_until.get(token or "", float("-inf")):
            self.refused += 1
            return HTTPStatus.UNAUTHORIZED, b""
        return self._answers.get(path, (HTTPStatus.NOT_FOUND, b"Not Found"))


class _FlaggedServer(MetadataServer):
    """A service that needs no token, but a header against requests that somebody forges."""

    value = ""
    refusal = HTTPStatus.FORBIDDEN

    def metadata(self, path: str, token: str | None) -> tuple[int, bytes]:
        """Return status and body for a request of metadata."""
        if token != self.value:
            self.refused += 1
            return self.refusal, b""
        return self._answers.get(path, (HTTPStatus.NOT_FOUND, b"Not Found"))

    def token(self, ttl: str | None) -> tuple[int, bytes]:
        """Refuse a request of a token."""
        del ttl
        return HTTPStatus.NOT_FOUND, b""


class GceServer(_FlaggedServer):
    """Metadata service of Compute Engine."""

    header, value = "Metadata-Flavor", "Google"

    def __init__(self) -> None:
        super().__init__()
        self.answer(PREEMPTED, b"FALSE")

    def interrupt(self, at_s: float, action: str = "terminate") -> None:
        """Give notice, which has no time."""
        del at_s, action
        self.answer(PREEMPTED, b"TRUE")

    def talk_nonsense(self) -> None:
        """Answer with text that is no notice."""
        self.answer(PREEMPTED, b"perhaps")


class AzureServer(_FlaggedServer):
    """Metadata service of Azure, for the virtual machine `workers_3`."""

    header, value = "Metadata", "true"
    refusal = HTTPStatus.BAD_REQUEST

    def __init__(self) -> None:
        super().__init__()
        self.answer(AZURE_NAME, b"workers_3")
        self.events()

    def events(self, *events: dict[str, object]) -> None:
        """Schedule events, in place of earlier ones."""
        self.answer(SCHEDULED, json.dumps({"DocumentIncarnation": 1, "Events": events}).encode())

    def interrupt(self, at_s: float, action: str = "terminate") -> None:
        """Give notice that the machine ends at this time."""
        del action
        self.events(azure_event(at_s))

    def talk_nonsense(self) -> None:
        """Answer with text that is no notice."""
        self.answer(SCHEDULED, b"nonsense")


def azure_event(
    at_s: float | None, kind: str = "Preempt", machines: tuple[str, ...] = ("workers_3",)
) -> dict[str, object]:
    """Return an event of Azure; without a time, it has begun."""
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Started" if at_s is None else "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": machines,
        "NotBefore": "" if at_s is None else formatdate(at_s, usegmt=True),
    }


class _Server(ThreadingHTTPServer):
    """Handles the requests of one service."""

    daemon_threads = True

    def __init__(self, service: MetadataServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.service = service


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server

    def do_PUT(self) -> None:
        """Issue a token."""
        self._reply(lambda: self.server.service.token(self.headers[_TTL_HEADER]))

    def do_GET(self) -> None:
        """Give metadata away."""
        service = self.server.service
        self._reply(lambda: self.server.service.metadata(self.path, self.headers[service.header]))

    def log_message(self, *_: object) -> None:
        """Log nothing. A failing test shows its own observations."""

    def _reply(self, answer: Callable[[], tuple[int, bytes]]) -> None:
        raw = self.server.service.outburst()
        # The client may have closed the connection.
        with contextlib.suppress(ConnectionError):
            if raw is not None:
                self.wfile.write(raw)
                return
            status, body = answer()
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _json(**fields: str) -> bytes:
    return json.dumps(fields).encode()


def _instant(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
