"""An invalid request of a megabyte costs little memory and time, for every kind of content."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from services.admin.routes.requests import JOB

BYTES = 1_000_000
# Growth of peak memory over all kinds of requests, in MB.
MOST_MB = 40
MOST_MB_OF_FOUR = 100
# Time for one answer. An idle machine takes less than 1 s.
PATIENCE_S = 30.0
HALF_OPEN = 1000
CLOSED_WITHIN_S = 10.0
DATATYPES = {"image": ("UINT8", [1, 8, 8]), "features": ("FP32", [2])}


def filled(before: bytes, unit: bytes, after: bytes = b"") -> bytes:
    """Return a body of a million bytes: a repeated unit between a prefix and a suffix."""
    times = (BYTES - len(before) - len(after)) // len(unit)
    return (before + unit * times + after).ljust(BYTES)


PLACE = "of the large value"
# Possible contents of a JSON value.
VALUES = {
    "empty lists": (b"[", b"[],", b"[]]"),
    "empty objects": (b"[", b"{},", b"{}]"),
    "texts for numbers": (b"[", b'"1",', b'"1"]'),
    "empty texts": (b"[", b'"",', b'""]'),
    "zeros": (b"[", b"0,", b"0]"),
    "floats": (b"[", b"0.1,", b"0.1]"),
    "numbers above FP32": (b"[", b"1e39,", b"1e39]"),
    "numbers above all": (b"[", b"1e999,", b"1e999]"),
    "true": (b"[", b"true,", b"true]"),
    "null": (b"[", b"null,", b"null]"),
    "lists of one": (b"[", b"[1],", b"[1]]"),
    "numbers of 10^5 digits": (b"[", b"9" * 99_990 + b",", b"9]"),
    "one number": (b"", b"9", b""),
    "one fraction": (b"0.", b"3", b""),
    "one text": (b'"', b"x", b'"'),
    "one text of escapes": (b'"', b"\\u0001", b'"'),
    "deep lists": (b"", b"[", b""),
    "deep objects": (b"", b'{"a":', b""),
    "deep pairs": (b"", b'[{"a":', b""),
    "one key again and again": (b"{", b'"a":1,', b'"a":1}'),
}
RAW = {
    "zero bytes": filled(b"", b"\0"),
    "no UTF-8": filled(b"", b"\xff\xfe"),
    "spaces": filled(b"", b" "),
    "brackets that close": filled(b"", b"]"),
    "many keys": (b"{" + b",".join(b'"%06d":1' % n for n in range(89_000)) + b"}").ljust(BYTES),
    "many keys of objects": (b"{" + b",".join(b'"%d":{}' % n for n in range(90_000)) + b"}"),
}


def model_bodies(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield bodies for a model that reads one field."""
    datatype, shape = DATATYPES[name]
    tensor: dict[str, Any] = {
        "name": name,
        "datatype": datatype,
        "shape": [10_000, *shape],
        "data": PLACE,
    }
    record = {"name": "record", "datatype": "BYTES", "shape": [10_000], "data": PLACE}
    others: cycle[dict[str, Any]] = cycle(
        [{"inputs": PLACE}, {"inputs": [tensor | {"data": [], "shape": PLACE}]}, {"id": PLACE}]
    )
    for what, parts in VALUES.items():
        yield f"data: {what}", placed({"inputs": [tensor]}, parts)
        yield f"record: {what}", placed({"inputs": [record]}, parts)
        start, unit, end = (json.dumps(part.decode())[1:-1].encode() for part in parts)
        one = (rb'["{\"spent\": ' + start, unit, end + b'}"]')
        yield f"one record: {what}", placed({"inputs": [record | {"shape": [1]}]}, one)
        other = next(others)
        yield f"{list(other)}: {what}", placed({"inputs": [], **other}, parts)


def job_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bodies for a job."""
    fields = cycle(JOB)
    for what, parts in VALUES.items():
        yield what, filled(*parts)
        # Two bodies and the one above make three for each kind of value. The test sends bodies as
        # JSON and YAML in turn, so each kind is sent as both.
        for field in islice(fields, 2):
            yield f"{field}: {what}", placed(JOB | {field: PLACE}, parts)


def placed(body: object, parts: tuple[bytes, bytes, bytes]) -> bytes:
    """Return a body as JSON, with a large value in place of `PLACE`."""
    start, end = json.dumps(body).encode().split(json.dumps(PLACE).encode())
    return filled(start + parts[0], parts[1], parts[2] + end)


@dataclass
class Target:
    """A process that answers requests."""

    process: subprocess.Popen[str]
    port: int
    key: str

    def ask(self, method: str, path: str, body: bytes | None, kind: str) -> tuple[int, bytes]:
        """Send a request on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            headers = {"Authorization": f"Bearer {self.key}", "Content-Type": kind}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def memory_mb(self, name: str) -> float:
        """Return resident memory: `VmRSS` now, `VmHWM` is the peak since `forget_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [line] = [each for each in status.splitlines() if each.startswith(name)]
        return int(line.split()[1]) / 1024

    def forget_peak(self) -> float:
        """Reset `VmHWM` to the current resident memory, and return it."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.memory_mb("VmRSS")


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    command = [sys.executable, "-m", "tests.integration.hostile_target", request.param]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 -- our own
    try:
        assert process.stdout is not None
        port, key = process.stdout.readline().split()
        yield Target(process, int(port), key)
    finally:
        process.kill()
        process.wait()


# Kind, method, path, content type, body.
Sent = tuple[str, str, str, str, bytes]


def check(target: Target, valid: Sent, others: list[Sent]) -> None:
    """Check that no request costs much, and that a valid request is answered meanwhile."""
    _, method, path, kind, body = valid
    assert target.ask(method, path, body, kind)[0] < 300
    for _, warm_method, warm_path, warm_kind, _ in {other[1:4]: other for other in others}.values():
        assert 400 <= target.ask(warm_method, warm_path, b"[]", warm_kind)[0] < 500
    ended, beside = threading.Event(), list[int]()

    def ask_beside() -> None:
        while not ended.wait(0.05):
            beside.append(target.ask(method, path, body, kind)[0])

    def ask_one(other: Sent) -> float:
        what, method, path, kind, body = other
        began = monotonic()
        status, answer = target.ask(method, path, body, kind)
        assert 400 <= status < 500, (what, status, answer[:300])
        problem = json.loads(answer)
        words = problem.get("detail") or problem["error"]
        assert words, (what, answer[:300])
        assert len(answer) < 100_000, what
        return monotonic() - began

    thread = threading.Thread(target=ask_beside)
    thread.start()
    try:
        before_mb, slowest_s, most_mb = target.forget_peak(), 0.0, 0.0
        for other in others:
            slowest_s = max(slowest_s, took_s := ask_one(other))
            grown_mb = target.memory_mb("VmHWM") - before_mb
            if grown_mb > most_mb + 0.5 or took_s > 0.5:
                print(f"{other[0]}: {took_s:.2f} s, {grown_mb:.1f} MB")  # noqa: T201 -- the figure
            most_mb = max(most_mb, grown_mb)
            assert grown_mb < MOST_MB, other[0]
        before_mb = target.forget_peak()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask_one, others[::2]))
        four_mb = target.memory_mb("VmHWM") - before_mb
        assert four_mb < MOST_MB_OF_FOUR
    finally:
        ended.set()
        thread.join()
    assert set(beside) <= {200}
    print(f"slowest {slowest_s:.2f} s, {most_mb:.1f} MB, of four {four_mb:.1f} MB")  # noqa: T201


@pytest.mark.parametrize(
    ("target", "field"), [("digits", "image"), ("clicks", "features")], indirect=["target"]
)
def test_invalid_megabyte_body_costs_serve_little(target: Target, field: str) -> None:
    path, kind = f"/v2/models/{'digits' if field == 'image' else 'clicks'}", "application/json"
    bodies = [*model_bodies(field), *RAW.items()]
    others = [(what, "POST", f"{path}/infer", kind, body) for what, body in bodies]
    datatype, shape = DATATYPES[field]
    size = 64 if field == "image" else 2
    tensor = {"name": field, "datatype": datatype, "shape": [1, *shape], "data": [1] * size}
    valid = json.dumps({"inputs": [tensor]}).encode()
    check(target, ("valid", "POST", f"{path}/infer", kind, valid), others)


@pytest.mark.parametrize("target", ["admin"], indirect=True)
def test_invalid_megabyte_body_costs_admin_little(target: Target) -> None:
    bodies = [*job_bodies(), *RAW.items()]
    kinds = cycle(("application/json", "application/yaml"))
    others = [
        (f"{kind}: {what}", "POST", "/v1/jobs", kind, body)
        for kind, (what, body) in zip(kinds, bodies, strict=False)
    ]
    plain = [(what, filled(*parts)) for what, parts in VALUES.items()]
    routes = cycle(
        [
            ("PATCH", "/v1/jobs/digits"),
            ("POST", "/v1/jobs/digits/requeue"),
            ("POST", "/v1/provisioning/plan"),
            ("POST", "/v1/provisioning/simulate"),
        ]
    )
    others += [
        (f"{path}: {what}", method, path, "application/json", body)
        for (what, body), (method, path) in zip([*plain, *RAW.items()], routes, strict=False)
    ]
    check(target, ("valid", "GET", "/v1/jobs/digits", "", b""), others)


@pytest.mark.parametrize("target", ["digits"], indirect=True)
def test_half_open_connections_to_serve_are_closed_without_blocking_others(
    target: Target,
) -> None:
    path, began = "/v2/models/digits", monotonic()
    said = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: doll.test\r\nContent-Length: 9\r\n\r\n{"
    halves = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(HALF_OPEN)]
    for number, half in enumerate(halves):
        half.settimeout(PATIENCE_S)
        half.sendall(said[: number % len(said)])
        if number % 100 == 0:
            assert target.ask("GET", path, None, "")[0] == 200
    opened_s = monotonic() - began
    for half in halves:
        with half:
            try:
                while half.recv(65_536):
                    pass
            except ConnectionResetError:
                pass
    assert target.ask("GET", path, None, "")[0] == 200
    # CI's machines are slow, so the cost of opening connections may occur twice.
    assert monotonic() - began < CLOSED_WITHIN_S + 2 * opened_s
