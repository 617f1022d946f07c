"""A model server answers by the protocol from the version that it names, even during outages."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from functools import cache, cached_property
from time import time
from typing import TYPE_CHECKING, Any, cast

import httpx2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from starlette.responses import Response
from torch import Tensor, nn

from common.api.keys import KeyStore
from common.config.settings import Settings
from common.core.messages import (
    GENESIS,
    AttemptId,
    Batch,
    Lead,
    ModelId,
    UpdateApplied,
    WorkerId,
)
from common.core.snapshots import Snapshot
from common.core.spans import Partition, Span
from common.errors import UnavailableError, UnknownTopicError
from common.jobs.build import optimizer_of
from common.jobs.job_file import parse_job
from common.jobs.servers import Outside
from common.kafka.memory import MemoryLog, MemoryTransactions
from common.kafka.names import updates_topic
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded, records_of
from common.kafka.schemas import JobSchemas
from common.learning.errors import ErrorOrigin, Raised, TaskError
from common.learning.parameters import FlatModel, layout_of
from common.learning.tasks import build_model, task_of
from common.learning.trainer import Trainer
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from common.storage.snapshot_file import SnapshotFile, to_bytes, to_parts
from common.storage.store import CheckpointStore
from common.telemetry.logging import event_logger, fields_of
from common.telemetry.metrics.serve import ServeMetrics
from common.telemetry.metrics.serving import Watchdog
from common.wire.messages import encode_audit
from services.serve.__main__ import inputs_of
from services.serve.app import ModelServer
from services.serve.batching import Batches
from services.serve.gate import KeyGate
from services.serve.model_choice import Follower
from services.serve.predictions import PredictionWriter
from services.serve.served_model import ServedModel
from services.serve.topic_answerer import Route, TopicAnswerer
from tests.ulps import assert_within_ulps
from tests.unit.runtime.test_refusals import audited

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from common.data.fields import Columns
    from common.jobs.models import VersionSelector
    from common.jobs.spec import JobSpec
    from common.kafka.port import NewRecord
    from services.serve.protocol import Inputs
    from services.serve.served_model import Predicted

DIGITS = parse_job(
    """
name: digits
streams: [clinic-a]
records: {codec: tensor, fields: {image: {dtype: uint8, shape: [1, 8, 8]}, label: {dtype: int64}}}
task: {name: image-classifier, classes: 10}
batch_size: 2
group_size: 1
optimizer: {name: sgd, learning_rate: 0.1}
"""
)
CLICKS = parse_job(
    """
name: clicks
streams: [clicks]
records:
  codec: json
  fields:
    features: {dtype: float32, shape: [2], from: [spent, visits], scale: 0.5}
    label: {dtype: int64, from: bought}
task: {name: logistic-regression, classes: 2}
batch_size: 2
group_size: 1
optimizer: {name: sgd, learning_rate: 0.1}
"""
)
NETS = parse_job(
    f"""
name: nets
streams: [nets]
records:
  codec: json
  fields: {{x: {{dtype: float32, shape: [2]}}, label: {{dtype: int64}}}}
task:
  module: "{__name__}:Net"
  loss: cross_entropy
  inputs: [x]
  target: label
batch_size: 2
group_size: 1
optimizer: {{name: sgd, learning_rate: 0.1}}
"""
)
IMAGES = np.arange(3 * 64, dtype=np.uint8).reshape(3, 1, 8, 8)


class Net(nn.Module):
    """A torch module with several outputs, of which one belongs to no record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map (n, 2) to hidden values, (n, 4), logits, (n, 3), and the bias, (3,)."""
        hidden = torch.tanh(self.first(x))
        return {"hidden": hidden, "logits": self.last(hidden), "bias": self.last.bias}


def trained(spec: JobSpec, seed: int) -> bytes:
    """Return a trainer's snapshot with random weights."""
    flat = FlatModel(build_model(task_of(spec, (spec.task_name,)), seed))
    layout, count = layout_of(flat.module), flat.parameter_count
    return Trainer(flat.vector, count, optimizer_of(spec), spec.reduction, layout).snapshot()


def asked(images: np.ndarray[Any, Any] = IMAGES, **others: object) -> dict[str, Any]:
    shape, data = list(images.shape), images.ravel().tolist()
    return {
        "inputs": [{"name": "image", "datatype": "UINT8", "shape": shape, "data": data}]
    } | others


class CountedBatches(Batches):
    """Counts requests as they enter the queue, so that a test can wait for them."""

    @cached_property
    def came(self) -> asyncio.Semaphore:
        """Released once for each request that waits. The event loop creates it."""
        return asyncio.Semaphore(0)

    async def predict(self, columns: Columns, name: str = "") -> Predicted:
        """Predict. The first step puts the request into the queue."""
        answer = asyncio.ensure_future(super().predict(columns, name))
        asyncio.get_running_loop().call_soon(self.came.release)
        return await answer


@dataclass
class World:
    """A model server and its servers."""

    spec: JobSpec = DIGITS
    model: type[ServedModel] = ServedModel
    alias: VersionSelector = "newest"
    shadow_alias: VersionSelector | None = None
    predictions: str = ""
    log: MemoryLog = field(default_factory=MemoryLog)
    redis: MemoryRedis = field(default_factory=MemoryRedis)
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    ended: threading.Event = field(default_factory=threading.Event)
    settings: Settings = field(default_factory=lambda: Settings(blobs="s3://memory"))

    @cached_property
    def models(self) -> list[ServedModel]:
        """Return the served model and its shadow."""
        selectors = [self.alias] + [self.shadow_alias] * (self.shadow_alias is not None)
        return [
            self.model(self.spec, self.settings, selector)
            for selector in selectors
            if selector is not None
        ]

    @cached_property
    def followers(self) -> list[Follower]:
        """Return a follower per model."""
        outside = Outside(self.settings, lambda: self.log, self.board, lambda: self.blobs)
        logger = event_logger("serve")
        return [Follower(self.spec.name, each, outside, logger, 0.0) for each in self.models]

    @cached_property
    def metrics(self) -> ServeMetrics:
        """Return the metrics of the process."""
        served = self.models[0]
        return ServeMetrics(lambda: served.number, served.behind_s)

    @cached_property
    def writer(self) -> PredictionWriter | None:
        """Return a writer to the topic of predictions, if there is one."""
        if not self.predictions:
            return None
        return PredictionWriter(self.log, self.predictions, self.spec.name, self.metrics)

    @cached_property
    def batches(self) -> CountedBatches:
        """Return the batches of requests, with the thread that computes them."""
        return CountedBatches(
            *self.models,
            metrics=self.metrics,
            watchdog=Watchdog(),
            note=self.writer.write if self.writer else None,
            ended=self.ended.set,
            rows=8,
        )

    @cached_property
    def inputs(self) -> Inputs:
        """Return the reader of requests."""
        schemas = JobSchemas(self.log, self.spec.name, None)
        return inputs_of(self.spec, self.models[0], schemas)

    @cached_property
    def app(self) -> Any:  # noqa: ANN401 -- Starlette's
        """Return the application."""
        server = ModelServer(
            self.spec.name, self.models[0], self.inputs, self.batches, self.metrics, self.settings
        )
        return server.app()

    def board(self, _job: str = "") -> MemoryBoard:
        """Return the job's board."""
        return MemoryBoard(self.redis, self.spec.name)

    def lead(self, after: int, base: ModelId, *versions: int) -> int:
        """Write a Lead and updates. Returns the epoch."""
        topic, writer = updates_topic(self.spec.name), self.log.writer()
        self.log.create_topics([NewTopic(topic)])
        epoch = after + 1
        writer.append(topic, encode_audit(Lead(after, base, "c1", epoch)))
        for version in versions:
            span = Span(self.spec.streams[0], 0, version - 1, version)
            batch = Batch(version - 1, WorkerId("w1"), (span,), 1)
            writer.append(topic, encode_audit(UpdateApplied(epoch, version, (batch,), 1, 0.0)))
        assert writer.flush(1.0)
        return epoch

    def kept(
        self, by: int, made: ModelId, seed: int, position: int, *losses: float
    ) -> SnapshotFile:
        """Return a snapshot."""
        snapshot = Snapshot(by, made, position, 0, {}, losses=losses)
        return SnapshotFile(snapshot, trained(self.spec, seed))

    def publish(self, epoch: int, version: int, seed: int) -> None:
        """Write a leader's hot snapshot."""
        kept = self.kept(epoch, ModelId(epoch, version), seed, epoch + version + 1)
        self.board().put_snapshot(epoch, to_bytes(kept), "c1")

    def store(self, kept: SnapshotFile) -> None:
        """Write a checkpoint."""
        store = CheckpointStore(self.blobs, self.spec.name)
        store.save(kept.name, to_parts(kept), 0.0, loss=kept.snapshot.loss)
        store.keep(10, kept.name)

    def look(self) -> None:
        """Let each follower poll once."""
        for each in self.followers:
            each.look()

    def ask(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> httpx2.Response:
        """Send a POST if there is a body, otherwise a GET."""
        return self.runner.run(self._asked(path, body, headers))

    async def _asked(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> httpx2.Response:
        transport = httpx2.ASGITransport(self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://doll.test") as client:
            if body is None:
                return await client.get(path, headers=headers)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=headers)

    async def ask_all(self, bodies: list[object]) -> list[httpx2.Response]:
        """Send requests with these bodies at once."""
        infer = f"/v2/models/{self.spec.name}/infer"
        return await asyncio.gather(*(self._asked(infer, body) for body in bodies))

    def infer(self, body: object, status: int = 200, path: str = "infer") -> dict[str, Any]:
        """Request predictions. Returns the answer."""
        answer = self.ask(f"/v2/models/{self.spec.name}/{path}", body)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def error(self, body: object, status: int = 400) -> str:
        """Request predictions. Returns the error."""
        answer: str = self.infer(body, status)["error"]
        return answer

    def close(self) -> None:
        """Stop the thread."""
        if "batches" in vars(self):
            self.batches.close()
        self.runner.close()


@pytest.fixture
def made() -> Iterator[list[World]]:
    worlds = list[World]()
    yield worlds
    for world in worlds:
        world.close()


def served(made: list[World], model: type[ServedModel] = ServedModel) -> World:
    """A server of a job whose version 1 of leader 0 is hot."""
    world = World(model=model)
    made.append(world)
    world.publish(0, 1, seed=1)
    world.look()
    return world


@pytest.fixture
def world(made: list[World]) -> World:
    return served(made)


def expected(spec: JobSpec, seed: int, columns: dict[str, np.ndarray[Any, Any]]) -> list[float]:
    task = task_of(spec, ())
    module = build_model(task, seed).eval()
    with torch.inference_mode():
        outputs = task.forward(module, {k: torch.from_numpy(v) for k, v in columns.items()})
    found: list[float] = outputs.ravel().tolist()
    return found


def test_infer_response_has_the_network_output_and_its_version(world: World) -> None:
    answer = world.infer(asked(id="mine"))
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("digits", "1", "mine")
    assert (answer["parameters"]["version"], answer["parameters"]["epoch"]) == (1, 0)
    assert 0 <= answer["parameters"]["behind_s"] < 60
    [output] = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [3, 10])
    assert_within_ulps(output["data"], expected(DIGITS, 1, {"image": IMAGES}), 8)
    nested = asked() | {"inputs": [asked()["inputs"][0] | {"data": IMAGES.tolist()}]}
    assert world.infer(nested)["outputs"] == answer["outputs"]
    assert world.infer(asked(), path="versions/1/infer")["outputs"] == answer["outputs"]
    assert "version: must be 1, got 7" in world.infer(asked(), 404, "versions/7/infer")["error"]


def test_metadata_routes_follow_the_protocol(world: World) -> None:
    assert world.ask("/v2").json()["name"] == "doll"
    assert world.ask("/v2/health/live").json() == {"live": True}
    assert world.ask("/v2/health/ready").json()["version"] == 1
    assert world.ask("/v2/models/digits/versions/1/ready").status_code == 200
    assert world.ask("/v2/models/digits/versions/2/ready").status_code == 404
    assert "must be 'digits'" in world.ask("/v2/models/letters").json()["error"]
    assert world.ask("/v2/models/digits").json() == {
        "name": "digits",
        "versions": ["1"],
        "platform": "pytorch",
        "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, 1, 8, 8]}],
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}],
    }


def test_server_without_a_snapshot_returns_503(made: list[World]) -> None:
    world = World()
    made.append(world)
    world.look()
    assert world.ask("/v2/health/ready").status_code == 503
    assert "no snapshot" in world.error(asked(), 503)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not an inference request"),
        ({"inputs": []}, "inputs"),
        (asked(IMAGES[:0]), "must have 1 to 10,000 records, got shape (0, 1, 8, 8)"),
        ({"inputs": [asked()["inputs"][0] | {"name": "x"}]}, "input 'image' is missing"),
        ({"inputs": [asked()["inputs"][0] | {"datatype": "FP32"}]}, "FP32, expected UINT8"),
        ({"inputs": [asked()["inputs"][0] | {"shape": [3, 64]}]}, "shape (3, 64), expected"),
        ({"inputs": [asked()["inputs"][0] | {"data": [0.5] * 192}]}, "its data are not UINT8"),
        ({"inputs": [asked()["inputs"][0] | {"data": [256] * 192}]}, "its data are not UINT8"),
        ({"inputs": [asked()["inputs"][0] | {"data": [1] * 191}]}, "191 elements in shape (3, 1"),
        ({"inputs": [asked()["inputs"][0] | {"data": ["x"] * 192}]}, "its data are not UINT8"),
    ],
)
def test_invalid_inference_request_is_rejected_with_the_reason(
    world: World, body: object, said: str
) -> None:
    assert said in world.error(body)


FEATURES = {"name": "features", "datatype": "FP32", "shape": [2, 2]}


@pytest.mark.parametrize(
    ("tensor", "data", "said"),
    [
        (FEATURES, b"[1, 2, 3, 1e39]", "a number is not FP32"),
        (FEATURES, b"[1, 2, 3, -1e39]", "a number is not FP32"),
        (FEATURES, b"[1, 2, 3, 1e999]", "its data are not FP32"),
        (FEATURES, b"[1, 2, 3, NaN]", "not an inference request"),
        (FEATURES, b"[1, 2, 3, true]", "its data are not FP32"),
        (FEATURES, b"[1, 2, 3, null]", "its data are not FP32"),
        (FEATURES, b"[1, 2, 3, []]", "its data are not FP32"),
        (FEATURES, b'[1, 2, 3, "4"]', "its data are not FP32"),
        (FEATURES, b"[1, 2, 3, " + b"9" * 100_000 + b"]", "its data are not FP32"),
        (FEATURES, b"[[1, 2, 3], [4]]", "must be one list, or nested as shape (2, 2)"),
        (FEATURES, b"[[1, 2], [3, 4], []]", "5 elements in shape (2, 2)"),
        (FEATURES, b"[[[1, 2], [3, 4]]]", "must be one list, or nested as shape (2, 2)"),
        (FEATURES, b'[["[", 2], [3, "]"]]', "its data are not FP32"),
        (FEATURES, b"[" * 100_000, "not an inference request"),
        (FEATURES, b"4", "its data are not FP32"),
        (FEATURES, b"{}", "its data are not FP32"),
        (FEATURES | {"shape": [10**9, 2]}, b"[1]", "must have 1 to 10,000 records"),
        (FEATURES | {"shape": [10_001, 2]}, b"[1]", "must have 1 to 10,000 records"),
        (FEATURES | {"shape": [-1, 2]}, b"[1]", "not an inference request"),
        (FEATURES | {"shape": [10**30, 2]}, b"[1]", "must have 1 to 10,000 records"),
        (FEATURES | {"shape": [2] * 1000}, b"[1]", "not an inference request"),
        (FEATURES | {"shape": []}, b"[1]", "expected (n, (2,))"),
        (FEATURES | {"datatype": "x" * 100_000}, b"[1]", "datatype xxx"),
        (FEATURES | {"name": "record", "shape": [2]}, b'["", "\xff"]', "can't decode"),
        (FEATURES | {"name": "record"}, b'["", "", ""]', "must have (2, 2) texts, got 3"),
        (FEATURES | {"name": "record", "shape": [2]}, b'["{}", "[[]]"]', "record 0: "),
        (
            FEATURES | {"name": "record", "shape": [1]},
            b'[{"a": 1}]',
            "Expected `str`, got `object`",
        ),
    ],
)
def test_tensor_of_wrong_type_or_shape_is_rejected_with_the_reason(
    made: list[World], tensor: dict[str, Any], data: bytes, said: str
) -> None:
    world = World(CLICKS)
    made.append(world)
    found = world.error(
        json.dumps({"inputs": [tensor | {"data": 321}]}).encode().replace(b"321", data)
    )
    assert said in found
    assert len(found) <= 1000


def test_largest_float32_in_decimal_notation_is_accepted(made: list[World]) -> None:
    world = World(CLICKS)
    made.append(world)
    world.publish(0, 1, seed=1)
    world.look()
    for data in (
        [3.4028235e38, 0, -3.4028235e38, 1e-50],
        [[1, 2], [3, 4.5]],
        [2**53, 0, 1, 10**18],
    ):
        world.infer({"inputs": [FEATURES | {"data": data}]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
PLACES = ("", "id", "inputs", "name", "datatype", "shape", "data", "record")


@given(JSON, st.sampled_from(PLACES))
@settings(max_examples=200, deadline=None)
def test_any_json_is_answered_or_rejected_with_an_error(value: object, place: str) -> None:
    body: object = {"inputs": [FEATURES | {"data": [1, 2, 3, 4], place: value}]}
    if place in ("", "id", "inputs"):
        body = value if place == "" else {"inputs": [FEATURES | {"data": [1] * 4}], place: value}
    elif place == "record":
        tensor = {"name": "record", "datatype": "BYTES", "shape": [1], "data": [value]}
        body = {"inputs": [tensor]}
    answer = fuzzed().ask("/v2/models/clicks/infer", json.dumps(body).encode())
    assert answer.status_code in (200, 400), answer.text
    assert answer.status_code == 200 or answer.json()["error"]


@cache
def fuzzed() -> World:
    """One model server for all examples."""
    world = World(CLICKS)
    world.publish(0, 1, seed=1)
    world.look()
    return world


def test_internal_error_is_answered_in_json(
    made: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = served(made)

    def fail(*_: object) -> None:
        raise AssertionError("a fault")

    monkeypatch.setattr(world.inputs, "read", fail)
    transport = httpx2.ASGITransport(world.app, raise_app_exceptions=False)

    async def asked_once() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url="http://doll.test") as client:
            return await client.post("/v2/models/digits/infer", content=b"{}")

    answer = world.runner.run(asked_once())
    assert (answer.status_code, answer.json()) == (
        500,
        {"error": "internal error; see the log of the model server"},
    )
    sample = world.metrics.registry.get_sample_value
    assert sample("doll_predictions_total", {"status": "500"}) == 1


def test_too_large_body_returns_413(world: World) -> None:
    world.settings = Settings(api_body_bytes=1024)
    assert "DOLL_API_BODY_BYTES" in world.error(b" " * 1025, 413)


def test_records_are_decoded_as_in_the_streams_and_need_no_label(made: list[World]) -> None:
    world = World(CLICKS)
    made.append(world)
    world.publish(0, 1, seed=1)
    world.look()
    records = [{"spent": 2, "visits": 4.5, "bought": 1}, {"spent": -1.5, "visits": 0, "name": "x"}]
    features = np.array([[1, 2.25], [-0.75, 0]], np.float32)
    data = [json.dumps(each) for each in records]
    tensor = {"name": "record", "datatype": "BYTES", "shape": [2], "data": data}
    [output] = world.infer({"inputs": [tensor]})["outputs"]
    assert_within_ulps(output["data"], expected(CLICKS, 1, {"features": features}), 4)
    columns = {"name": "features", "datatype": "FP32", "shape": [2, 2], "data": features.tolist()}
    assert world.infer({"inputs": [columns]})["outputs"] == [output]
    tensor["data"] = [data[0], '{"spent": "much", "visits": 1}']
    assert "record 1: " in world.error({"inputs": [tensor]})
    tensor["shape"] = [3]
    assert "must have (3,) texts, got 2" in world.error({"inputs": [tensor]})
    tensor["data"] = records
    assert "must have (3,) texts, got 7" in world.error({"inputs": [tensor]})


def test_newer_snapshot_replaces_the_served_one_and_older_ones_do_not(world: World) -> None:
    # leader 0: 1 and 2 hot | Redis is wiped | leader 9: 1 hot | leader 0: 3 hot, too late
    world.publish(0, 2, seed=2)
    world.look()
    assert world.infer(asked())["model_version"] == "2"
    world.redis.kill()
    world.look()
    assert world.infer(asked())["model_version"] == "2"
    world.redis.restart()
    world.board().wipe()
    world.look()
    assert world.infer(asked())["model_version"] == "2"
    world.publish(9, 1, seed=1)
    world.look()
    answer = world.infer(asked())
    assert (answer["model_version"], answer["parameters"]["epoch"]) == ("1", 9)
    # Leader 0 wakes up from a freeze.
    world.publish(0, 3, seed=3)
    world.look()
    assert world.infer(asked())["parameters"]["epoch"] == 9


def test_model_age_counts_from_when_the_version_was_made(made: list[World]) -> None:
    for kept_in in ("redis", "storage"):
        world = World()
        made.append(world)
        snapshot = world.kept(world.lead(-1, GENESIS, 1), ModelId(0, 1), 1, 2)
        old = replace(snapshot.snapshot, made_at_s=time() - 1000.0)
        if kept_in == "redis":
            world.board().put_snapshot(0, to_bytes(snapshot._replace(snapshot=old)), "c1")
        else:
            world.store(snapshot._replace(snapshot=old))
        world.look()
        assert 1000.0 <= world.infer(asked())["parameters"]["age_s"] < 2000.0


def test_snapshot_of_another_model_is_skipped(world: World) -> None:
    torn = SnapshotFile(Snapshot(0, ModelId(0, 2), 3, 0, {}), trained(CLICKS, 1))
    world.board().put_snapshot(0, to_bytes(torn), "c1")
    world.look()
    assert world.infer(asked())["model_version"] == "1"


def test_snapshot_with_other_parameter_names_is_skipped_and_reported(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    data = trained(DIGITS, 1).replace(b"0.weight", b"9.weight")
    world.board().put_snapshot(
        0, to_bytes(SnapshotFile(Snapshot(0, ModelId(0, 2), 3, 0, {}), data)), "c1"
    )
    world.look()
    assert world.infer(asked())["model_version"] == "1"
    said = "at place 1 it has the parameter '9.weight' (16, 1, 3, 3) float32, but the task's model"
    assert any(said in str(fields_of(each)) for each in caplog.records)


def test_weights_that_a_group_member_stored_are_served(world: World, made: list[World]) -> None:
    # leader 3: snapshots of 2, of 3 with weights, and of 4
    # leader 5, which continues from 2 of leader 3: a snapshot of 2, and one with weights
    board = world.board()

    def led(epoch: int, model: ModelId, *, whole: bool = False) -> str:
        snapshot = Snapshot(epoch, model, 3, 0, {}, attempt=AttemptId(3, 1, model.version))
        board.put_snapshot(epoch, to_bytes(SnapshotFile(snapshot, b"")), "c1")
        if whole:
            data = trained(DIGITS, model.version)
            board.put_whole_snapshot(epoch, to_bytes(SnapshotFile(snapshot, data)))
        world.look()
        answer = world.infer(asked())
        return "{parameters[epoch]}-{model_version}".format(**answer)

    # The previous version is still served.
    assert led(3, ModelId(3, 2)) == "0-1"
    assert led(3, ModelId(3, 3), whole=True) == "3-3"
    assert led(3, ModelId(3, 4)) == "3-3"
    # Leader 5 may have rolled version 3 back. It is served until weights of 2 are there.
    assert led(5, ModelId(3, 2)) == "3-3"
    newly_started = World(redis=world.redis)
    made.append(newly_started)
    newly_started.look()
    # Nothing proves that version 3 is still in the history, so a new server does not load it.
    assert newly_started.models[0].version is None
    assert led(5, ModelId(3, 2), whole=True) == "3-2"


def test_request_without_a_key_returns_401_if_keys_are_required(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    store = KeyStore(world.log)
    key, _ = store.create("shop", "viewer")
    gate = KeyGate(store, store.read(), "digits", event_logger("serve"))
    world.app = gate.before(world.app)
    infer = "/v2/models/digits/infer"
    for headers in ({}, {"Authorization": "Bearer doll_guess"}, {"Authorization": f"Basic {key}"}):
        refused = world.ask(infer, asked(), headers)
        assert (refused.status_code, refused.json()) == (401, {"error": "an API key is required"})
        assert refused.headers["WWW-Authenticate"].startswith("Bearer")
    assert world.ask("/v2/models/digits").status_code == 401
    # Load balancers have no key.
    assert world.ask("/v2/health/ready").status_code == 200
    mine = {"Authorization": f"Bearer {key}"}
    assert world.ask(infer, asked(), mine).status_code == 200
    store.revoke("shop")
    gate.look()
    assert world.ask(infer, asked(), mine).status_code == 401
    store.close()
    # One line per minute for one address.
    [line] = audited(caplog)
    assert line == {
        "by": "127.0.0.1",
        "role": "none",
        "action": f"POST {infer}",
        "job": "digits",
        "reason": "the request has no valid key",
        "outcome": "refused",
    }
    assert key not in caplog.text


def test_refused_request_with_a_valid_key_is_logged_with_its_name(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # Every route of a model server accepts any valid key.
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=403)(scope, receive, send)

    store = KeyStore(world.log)
    key, _ = store.create("shop", "viewer")
    world.app = KeyGate(store, store.read(), "digits", event_logger("serve")).before(refusing)
    assert world.ask("/v2", headers={"Authorization": f"Bearer {key}"}).status_code == 403
    store.close()
    [line] = audited(caplog)
    assert (line["by"], line["role"], line["action"]) == ("shop", "viewer", "GET /v2")
    assert line["outcome"] == "refused"


@pytest.mark.parametrize(("alias", "version"), [("best", 1), (2, 2), ("newest", 2)])
def test_alias_selects_a_checkpoint(
    made: list[World], alias: VersionSelector, version: int
) -> None:
    world = World(alias=alias)
    made.append(world)
    epoch = world.lead(-1, GENESIS, 1, 2, 3)
    for made_version, loss in ((1, 0.1), (2, 0.5)):
        made_model = ModelId(epoch, made_version)
        world.store(world.kept(epoch, made_model, made_version, made_version + 1, loss))
    world.look()
    assert world.infer(asked())["model_version"] == str(version)
    world.store(world.kept(epoch, ModelId(epoch, 3), 3, 4, 0.05))
    world.look()
    assert world.infer(asked())["model_version"] == ("2" if alias == 2 else "3")


def test_waiting_requests_are_batched_and_a_bad_one_fails_alone(
    made: list[World],
) -> None:
    passes, entered, go = list[int](), threading.Event(), threading.Event()

    class Waits(ServedModel):
        def predict(self, columns: Columns) -> Predicted:
            entered.set()
            go.wait(120.0)
            passes.append(len(columns["image"]))
            if (columns["image"] == 255).all(axis=(1, 2, 3)).any():
                raise TaskError(0, Raised("it raised", ErrorOrigin("", "", 0, ""), ""))
            return super().predict(columns)

    world = served(made, Waits)
    bad = np.full((1, 1, 8, 8), 255, np.uint8)
    bodies: list[object] = [asked(IMAGES[:1], id=str(n)) for n in range(10)]
    bodies[5] = asked(bad)

    async def together() -> list[httpx2.Response]:
        first = asyncio.create_task(world.ask_all([asked()]))
        await asyncio.to_thread(entered.wait, 30.0)
        answers = asyncio.create_task(world.ask_all(bodies))
        for _ in range(1 + len(bodies)):
            await world.batches.came.acquire()
        go.set()
        assert [each.status_code for each in await first] == [200]
        return await answers

    answers = world.runner.run(together())
    codes = [each.status_code for each in answers]
    assert codes == [200] * 5 + [400] + [200] * 4
    # The second pass fails, so each of its eight requests is computed alone.
    assert passes == [3, 8, *[1] * 8, 2]
    assert [each.json()["id"] for n, each in enumerate(answers) if n != 5] == [
        str(n) for n in range(10) if n != 5
    ]


def test_request_is_rejected_while_too_many_wait(
    made: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.serve.batching.MOST_WAITING", 2)
    entered, go = threading.Event(), threading.Event()

    class Waits(ServedModel):
        def predict(self, columns: Columns) -> Predicted:
            entered.set()
            go.wait(120.0)
            return super().predict(columns)

    world = served(made, Waits)

    async def together() -> tuple[list[httpx2.Response], httpx2.Response]:
        first = asyncio.create_task(world.ask_all([asked()]))
        await asyncio.to_thread(entered.wait, 30.0)
        waiting = asyncio.create_task(world.ask_all([asked()] * 3))
        for _ in range(4):
            await world.batches.came.acquire()
        [refused] = await world.ask_all([asked()])
        go.set()
        return await first + await waiting, refused

    answers, refused = world.runner.run(together())
    assert [each.status_code for each in answers] == [200] * 4
    assert refused.status_code == 503
    assert "too many requests are waiting; try again later" in refused.json()["error"]
    assert world.infer(asked())["model_version"] == "1"


def test_shadow_prediction_is_written_and_not_returned(made: list[World]) -> None:
    world = World(shadow_alias=1, predictions="predicted")
    made.append(world)
    world.log.create_topics([NewTopic("predicted")])
    epoch = world.lead(-1, GENESIS, 1, 2)
    world.store(world.kept(epoch, ModelId(epoch, 1), 1, 2, 0.1))
    world.publish(epoch, 2, seed=2)
    world.look()
    [output] = world.infer(asked(id="mine"))["outputs"]
    world.close()
    assert world.writer is not None
    world.writer.close()
    [(_, answer)] = cast("list[tuple[int, Any]]", read_decoded(world.log, "predicted", json.loads))
    assert (answer["id"], answer["job"], answer["version"], answer["epoch"]) == (
        "mine",
        "digits",
        2,
        epoch,
    )
    assert np.ravel(answer["outputs"]).tolist() == output["data"]
    assert answer["shadow"]["version"] == 1
    shadow = np.ravel(answer["shadow"]["outputs"])
    assert_within_ulps(shadow, expected(DIGITS, 1, {"image": IMAGES}), 8)
    difference = np.abs(shadow - output["data"]).mean()
    sample = world.metrics.registry.get_sample_value
    assert sample("doll_shadow_difference") == pytest.approx(difference)
    assert sample("doll_predictions_total", {"status": "200"}) == 1
    assert sample("doll_prediction_batch_records_sum") == 3
    assert sample("doll_served_version") == 2


def test_deleted_predictions_topic_does_not_prevent_answers(made: list[World]) -> None:
    world = World(predictions="predicted")
    made.append(world)
    world.log.create_topics([NewTopic("predicted")])
    world.publish(0, 1, seed=1)
    world.look()

    assert world.writer is not None
    world.log.delete_topics(["predicted"])
    assert world.infer(asked())["model_version"] == "1"
    world.close()
    sample = world.metrics.registry.get_sample_value
    assert sample("doll_predictions_not_written_total") == 3


def test_internal_error_in_the_computing_thread_ends_the_process(made: list[World]) -> None:
    class Fails(ServedModel):
        def predict(self, columns: Columns) -> Predicted:
            raise MemoryError(f"no more for {columns.keys()}")

    world = served(made, Fails)

    async def asked_once() -> None:
        task = asyncio.create_task(world.batches.predict({"image": IMAGES}))
        await asyncio.to_thread(world.ended.wait, 30.0)
        task.cancel()

    world.runner.run(asked_once())
    assert isinstance(world.batches.fault, MemoryError)
    assert "shutting down" in world.error(asked(), 503)


def test_weights_replaced_under_load_never_mix_two_versions(world: World) -> None:
    """Each answer is from the network of the version that it names, despite swaps."""
    weights = {version: expected(DIGITS, version, {"image": IMAGES}) for version in range(1, 9)}
    found = list[dict[str, Any]]()
    for version in range(2, 9):
        bodies: list[object] = [asked() for _ in range(4)]
        world.publish(0, version, seed=version)
        looking = threading.Thread(target=world.look)
        looking.start()
        found += [each.json() for each in world.runner.run(world.ask_all(bodies))]
        looking.join()
    found.append(world.infer(asked()))
    for answer in found:
        right = weights[int(answer["model_version"])]
        assert_within_ulps(answer["outputs"][0]["data"], right, 8)
    assert found[-1]["model_version"] == "8"


def named(rows: list[list[float]], seed: int) -> dict[str, Any]:
    """Return the outputs of `Net` for these records, by name."""
    module = build_model(task_of(NETS, (NETS.task_name,)), seed).eval()
    with torch.inference_mode():
        outputs = module(torch.tensor(rows))
    return {name: outputs[name].numpy() for name in ("hidden", "logits")}


ROWS = [[1.0, 2.0], [-0.5, 4.0], [3.0, 0.25]]


def of_nets(rows: list[list[float]]) -> dict[str, Any]:
    shape = [len(rows), 2]
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": rows}]}


def test_named_outputs_are_in_responses_metadata_and_written_predictions(
    made: list[World],
) -> None:
    own = Settings(blobs="s3://memory", tasks=(NETS.task_name,))
    world = World(NETS, shadow_alias=1, predictions="predicted", settings=own)
    made.append(world)
    world.log.create_topics([NewTopic("predicted")])
    epoch = world.lead(-1, GENESIS, 1, 2)
    world.store(world.kept(epoch, ModelId(epoch, 1), 1, 2, 0.1))
    world.publish(epoch, 2, seed=2)
    world.look()
    assert world.ask("/v2/models/nets").json()["outputs"] == [
        {"name": "hidden", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "logits", "datatype": "FP32", "shape": [-1, 3]},
    ]
    # The requests are computed in one batch or two, and each gets the outputs of its records. A
    # request of three records has as many rows as the bias.
    bodies: list[object] = [of_nets(ROWS[:1]), of_nets(ROWS)]
    for rows, response in zip(
        (ROWS[:1], ROWS), world.runner.run(world.ask_all(bodies)), strict=True
    ):
        outputs, right = response.json()["outputs"], named(rows, 2)
        assert [each["name"] for each in outputs] == ["hidden", "logits"]
        for each in outputs:
            assert each["shape"] == list(right[each["name"]].shape)
            assert_within_ulps(each["data"], right[each["name"]].ravel(), 8)
    world.close()
    assert world.writer is not None
    world.writer.close()
    found = cast("list[tuple[int, Any]]", read_decoded(world.log, "predicted", json.loads))
    answers = {len(answer["outputs"]["logits"]): answer for _, answer in found}
    for part, seed in ((answers[3], 2), (answers[3]["shadow"], 1)):
        for name, right in named(ROWS, seed).items():
            assert_within_ulps(part["outputs"][name], right, 8)
    sample = world.metrics.registry.get_sample_value
    assert (sample("doll_shadow_difference") or 0.0) > 0


def test_topic_answerer_names_the_outputs_of_each_record(made: list[World]) -> None:
    own = Settings(blobs="s3://memory", tasks=(NETS.task_name,))
    world = World(NETS, settings=own)
    made.append(world)
    world.publish(0, 1, seed=1)
    world.look()
    answerers = Answerers(world)
    answerer = answerers.open("s1")
    answerers.write(*({"x": row} for row in ROWS))
    turned(answerer)
    answers, right = answerers.answers(), named(ROWS, 1)
    for number in range(len(ROWS)):
        outputs = answers[f"asked[0]@{number}"]["outputs"]
        assert outputs.keys() == right.keys()
        for name, values in right.items():
            assert_within_ulps(outputs[name], values[number], 8)
    answerer.close()


# --- from a topic to another ---------------------------------------------------------------------


class Answerers:
    """Processes that read the topic `asked` and write answers to the topic `answered`."""

    def __init__(self, world: World, partitions: int = 2) -> None:
        self._world = world
        self.log = world.log
        self.log.create_topics([NewTopic("asked", partitions), NewTopic("answered")])
        self._writer = self.log.writer()

    def open(self, name: str) -> TopicAnswerer:
        """Start a further process."""
        inputs = self._world.inputs
        route = Route(self._world.spec.name, "asked", "answered")
        logger = event_logger("serve")
        return TopicAnswerer(
            self.log, route, self._world.models[0], inputs, name, logger, retry_s=0.0
        )

    def write(self, *records: object, partition: int = 0) -> None:
        """Write requests."""
        for record in records:
            value = record if isinstance(record, bytes) else json.dumps(record).encode()
            self._writer.append("asked", value, partition=partition, key=b"a key")
        assert self._writer.flush(1.0)

    def answers(self) -> dict[str, dict[str, Any]]:
        """Return answers by the name of their records. Fails if a record was answered twice."""
        found = dict[str, dict[str, Any]]()
        for record in records_of(self.log, Partition("answered", 0)):
            name = dict(record.headers)["from"].decode()
            assert name not in found
            assert record.key == b"a key"
            found[name] = json.loads(record.value or b"")
        return found


@pytest.fixture
def answerers(made: list[World]) -> Answerers:
    made.append(World(CLICKS))
    return Answerers(made[0])


def turned(*answerers: TopicAnswerer) -> None:
    """Give each process four turns."""
    for _ in range(4):
        for answerer in answerers:
            answerer.turn(0.0)


CLICK = {"spent": 2, "visits": 4.5}


def test_topic_answerer_answers_each_record_once_a_version_exists(
    answerers: Answerers, made: list[World]
) -> None:
    [world] = made
    answerer = answerers.open("s1")
    answerers.write(CLICK, b"not JSON", CLICK)
    answerers.write(CLICK, partition=1)
    turned(answerer)
    assert answerers.answers() == {}
    world.publish(0, 1, seed=1)
    world.look()
    turned(answerer)
    answers = answerers.answers()
    assert sorted(answers) == ["asked[0]@0", "asked[0]@1", "asked[0]@2", "asked[1]@0"]
    right = expected(CLICKS, 1, {"features": np.array([[1, 2.25]], np.float32)})
    answer = answers["asked[1]@0"]
    assert_within_ulps(answer.pop("outputs"), right, 4)
    assert answer == {"job": "clicks", "version": 1, "epoch": 0}
    assert "error" in answers["asked[0]@1"]
    answerer.close()


def test_next_topic_answerer_continues_after_the_last_answer(
    answerers: Answerers, made: list[World]
) -> None:
    [world] = made
    world.publish(0, 1, seed=1)
    world.look()
    first = answerers.open("s1")
    answerers.write(CLICK, CLICK)
    turned(first)
    answerers.write(CLICK)
    # The second takes a partition over while the first still runs.
    second = answerers.open("s2")
    answerers.write(CLICK, CLICK, partition=1)
    turned(first, second, first)
    first._group.close()  # noqa: SLF001 -- it is taken for dead, and does not know it
    answerers.write(CLICK, CLICK)
    turned(second)
    turned(first)
    answerers.write(CLICK, partition=1)
    turned(second, first)
    assert len(answerers.answers()) == 8
    for answerer in (first, second):
        answerer.close()


@pytest.mark.parametrize("written", [False, True], ids=["nothing was written", "all was"])
def test_topic_answerer_writes_answers_once_after_a_failed_write(
    answerers: Answerers, made: list[World], monkeypatch: pytest.MonkeyPatch, *, written: bool
) -> None:
    [world] = made
    world.publish(0, 1, seed=1)
    world.look()
    write, failures = MemoryTransactions.write, list[bool]()

    def fails_once(self: MemoryTransactions, records: Sequence[NewRecord]) -> None:
        if failures:
            return write(self, records)
        failures.append(written)
        if written:
            write(self, records)
        raise UnavailableError("the queue is full, and Kafka does not answer")

    monkeypatch.setattr(MemoryTransactions, "write", fails_once)
    answerer = answerers.open("s1")
    answerers.write(CLICK, CLICK)
    turned(answerer)
    answerers.write(CLICK)
    turned(answerer)
    assert failures == [written]
    assert sorted(answerers.answers()) == ["asked[0]@0", "asked[0]@1", "asked[0]@2"]
    answerer.close()


def test_topic_answerer_skips_expired_records(answerers: Answerers, made: list[World]) -> None:
    [world] = made
    world.publish(0, 1, seed=1)
    world.look()
    answerer = answerers.open("s1")
    turned(answerer)
    answerers.write(CLICK, CLICK, CLICK)
    answerers.log.expire(Partition("asked", 0), 2)
    turned(answerer)
    turned(answerer)
    assert list(answerers.answers()) == ["asked[0]@2"]
    answerer.close()


def test_topic_answerer_with_a_missing_topic_raises(answerers: Answerers) -> None:
    with pytest.raises(UnknownTopicError, match="elsewhere"):
        TopicAnswerer(
            answerers.log,
            Route("clicks", "elsewhere", "answered"),
            *(cast("Any", None), cast("Any", None)),
            "s1",
            event_logger("serve"),
        )
