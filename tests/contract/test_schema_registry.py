"""Odd answers of a schema registry cost only time: the next good one lets work continue."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.core.messages import Reference, Schema
from common.data.fields import Field
from common.data.registered import RegisteredCodec
from common.embedded.process import free_port
from common.errors import LateError, RefusedError, UnavailableError, UnreachableError
from common.kafka import registry as module
from common.kafka.memory import MemoryLog
from common.kafka.registry import ConfluentRegistry
from common.kafka.schemas import JobSchemas
from common.telemetry.logging import event_logger
from services.worker.effects.schemas import SchemaFinder
from tests.contract.odd_servers import ODD, OddServer, hangs, said
from tests.unit.services.replicas import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contract.odd_servers import Answer, Send

ON_AGAIN_S = 5.0
TEXT = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}'
GOOD = {"schema": TEXT}
RECORDS = [b"\0\0\0\0\7\2"]


def referring(*references: object) -> Answer:
    return said({**GOOD, "references": references})


LOOP = {"name": "a", "subject": "a", "version": 1}


def ever_deeper(path: str, send: Send, ending: threading.Event) -> None:
    """Refer to a version above this one."""
    version = int(path.partition("?")[0].rpartition("/")[2])
    reference = {"name": "a", "subject": "a", "version": version + 1}
    referring(reference)(path, send, ending)


def ever_more(path: str, send: Send, ending: threading.Event) -> None:
    """Refer to a thousand schemas."""
    names = [f"s{number}" for number in range(1000)] if "ids" in path else []
    referring(*({"name": n, "subject": n, "version": 1} for n in names))(path, send, ending)


OF_A_REGISTRY: dict[str, Answer] = {
    **ODD,
    "a reference that is null": referring(None),
    "references that are a string": said({**GOOD, "references": "a"}),
    "a reference without a version": referring({"name": "a", "subject": "a", "version": None}),
    "a loop of references": referring(LOOP),
    "ever deeper references": ever_deeper,
    "ever more references": ever_more,
    "another kind of schema": said({**GOOD, "schemaType": "XML"}),
    "a schema of 600,000 letters": said({"schema": "x" * 600_000}),
    "a refusal": said({"error_code": 401, "message": "who are you?"}, 401),
    "another 404": said({"error_code": 404, "message": "HTTP 404 Not Found"}, 404),
}


@pytest.fixture
def server() -> Iterator[OddServer]:
    with OddServer(said(GOOD)) as server:
        yield server


@pytest.mark.parametrize("kind", OF_A_REGISTRY)
def test_schema_finder_recovers_in_5_s_and_logs_one_outage(
    server: OddServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    codec = RegisteredCodec([Field("id", "int64")], "AVRO")
    schemas = JobSchemas(MemoryLog(), "job", ConfluentRegistry({"url": server.url}))
    finder = SchemaFinder(codec, schemas, event_logger("worker"))
    server.answer = OF_A_REGISTRY[kind]
    assert not finder.ready(RECORDS)
    until(lambda: bool(finder.missing), "the worker knows that a schema is missing")
    server.answer, since = said(GOOD), monotonic()
    until(lambda: finder.ready(RECORDS), "the schema is found")
    assert monotonic() - since < ON_AGAIN_S
    assert codec.decode(RECORDS).records["id"].tolist() == [1]
    until(lambda: not finder.missing, "the outage is over")
    finder.close()
    logged = [each.getMessage() for each in caplog.records if "registry" in each.getMessage()]
    assert logged == ["schema_registry_unavailable", "schema_registry_recovered"]


def test_schema_finder_survives_faults_of_codec_and_topic() -> None:
    class Faulty:
        def __init__(self) -> None:
            self.faults: list[Exception] = [AttributeError("a"), RecursionError(), KeyError()]

        def get(self, _number: int) -> Schema:
            if self.faults:
                raise self.faults.pop()
            return Schema("AVRO", TEXT)

    codec = RegisteredCodec([Field("id", "int64")], "AVRO")
    finder = SchemaFinder(codec, Faulty(), event_logger("worker"))  # type: ignore[arg-type]
    until(lambda: finder.ready(RECORDS), "the schema is found")


def test_slow_registry_is_asked_again_and_its_late_answer_counts(
    server: OddServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPEAT_S", 0.05)
    monkeypatch.setattr(module, "ANSWER_S", 60.0)
    registry = ConfluentRegistry({"url": server.url})
    arrived, answers = threading.Event(), threading.Event()

    def first_is_late(path: str, send: Send, ending: threading.Event) -> None:
        if arrived.is_set():
            hangs(path, send, ending)
        arrived.set()
        answers.wait()
        said(GOOD)(path, send, ending)

    server.answer = first_is_late
    for _ in range(3):
        with pytest.raises(LateError):
            registry.schema(7)
        until(arrived.is_set, "the first request arrives")
    answers.set()
    monkeypatch.setattr(module, "REPEAT_S", 60.0)
    assert registry.schema(7) == Schema("AVRO", TEXT)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (said(b"", 401), RefusedError),
        (said({"error_code": 40301}, 403), RefusedError),
        (hangs, LateError),
        (None, UnreachableError),
        (said(b"", 503), UnavailableError),
    ],
)
def test_reasons_why_a_schema_is_missing_are_distinguished(
    server: OddServer, answer: Answer | None, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is hangs:
        monkeypatch.setattr(module, "REPEAT_S", 0.05)
    server.answer = answer or said(GOOD)
    url = server.url if answer else f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError) as raised:
        ConfluentRegistry({"url": url}).schema(7)
    assert type(raised.value) is kind


def test_references_are_ordered_by_dependency_and_fetched_once(
    server: OddServer,
) -> None:
    below = {"a": ["b", "c"], "b": ["c"], "c": []}

    def answer(path: str, send: Send, ending: threading.Event) -> None:
        subject = path.split("/")[2] if "subjects" in path else ""
        names = below.get(subject, ["a", "b"])
        used = [{"name": f"{n}.avsc", "subject": n, "version": 2} for n in names]
        said({"schema": subject or TEXT, "references": used})(path, send, ending)

    server.answer = answer
    found = ConfluentRegistry({"url": server.url}).schema(7)
    references = tuple(Reference(f"{name}.avsc", name) for name in "cba")
    assert found == Schema("AVRO", TEXT, references)
    assert len(server.paths) == 4


def test_unreachable_registry_url_is_skipped_and_missing_schema_is_none(
    server: OddServer,
) -> None:
    server.answer = said({"error_code": 40403, "message": "Schema 7 not found"}, 404)
    nobody = f"http://127.0.0.1:{free_port()}"
    assert ConfluentRegistry({"url": f"{nobody},{server.url}/apis/"}).schema(7) is None
    assert server.paths == ["/apis/schemas/ids/7?format=serialized"]


def test_token_is_fetched_once_and_invalid_one_is_an_outage(server: OddServer) -> None:
    def answer(path: str, send: Send, ending: threading.Event) -> None:
        token = said({"access_token": "t", "expires_in": 300})
        (token if path == "/token" else said(GOOD))(path, send, ending)

    properties = {
        "url": server.url,
        "bearer.auth.credentials.source": "OAUTHBEARER",
        "bearer.auth.client.id": "doll",
        "bearer.auth.client.secret": "secret",
        "bearer.auth.scope": "schemas",
        "bearer.auth.issuer.endpoint.url": f"{server.url}/token",
        "bearer.auth.logical.cluster": "lsrc-1",
    }
    registry = ConfluentRegistry(properties)
    server.answer = said(None)
    with pytest.raises(UnavailableError):
        registry.schema(7)
    server.answer = answer
    for _ in range(2):
        assert registry.schema(7) == Schema("AVRO", TEXT)
    assert server.paths.count("/token") == 2


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
MOCKED = ConfluentRegistry({"url": "http://registry"})
FIELDS = st.sampled_from(["schema", "schemaType", "references", "error_code", "message", "name"])


@settings(max_examples=100)
@given(st.sampled_from([200, 400, 404, 500]), JSON | st.dictionaries(FIELDS, JSON))
def test_any_json_from_registry_is_schema_none_or_outage(status: int, body: object) -> None:
    answer = httpx2.Response(status, content=msgspec.json.encode(body))
    MOCKED._http._http._transport = httpx2.MockTransport(lambda _: answer)  # noqa: SLF001
    try:
        found = MOCKED.schema(7)
    except UnavailableError:
        return
    assert found is None or isinstance(found, Schema)
