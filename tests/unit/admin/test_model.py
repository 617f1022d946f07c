"""Models over HTTP: the tensors of `doll model pull`, tags, and missing versions."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from common.core.messages import (
    GENESIS,
    Batch,
    Evaluated,
    Lead,
    ModelId,
    UpdateApplied,
    WorkerId,
)
from common.core.snapshots import Snapshot
from common.core.spans import Partition, Span
from common.jobs.build import optimizer_of
from common.jobs.job_file import parse_job
from common.learning.checkpoint import unpack
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, task_of
from common.learning.trainer import Trainer
from common.storage.snapshot_file import SnapshotFile, to_bytes, to_parts
from common.storage.store import CheckpointStore
from common.wire.messages import encode_audit
from tests.unit.admin.conftest import problem
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from tests.unit.admin.conftest import World

SPEC = parse_job(JOB)
MODEL = "/v1/jobs/digits/model"


def trained(seed: int) -> bytes:
    """Return a trainer's snapshot with distinct random weights."""
    flat = FlatModel(build_model(task_of(SPEC, ()), 0))
    weights = np.random.default_rng(seed).normal(size=len(flat.vector)).astype(np.float32)
    count = flat.parameter_count
    return Trainer(weights, count, optimizer_of(SPEC), SPEC.reduction, flat.layout).snapshot()


def kept(made: ModelId, updates_position: int, trainer: bytes, *losses: float) -> SnapshotFile:
    claimed = {Partition("clinic-a", 0): 2 * made.version}
    snapshot = Snapshot(
        0, made, updates_position, 0, claimed, samples=2 * made.version, losses=losses
    )
    return SnapshotFile(snapshot, trainer)


@pytest.fixture
def led(world: World) -> World:
    """A job with two versions: 1 in storage, with the lower loss, and 2 only in Redis."""
    world.streams("clinic-a")
    answer = world.ask("POST", "/v1/jobs", json=SPEC.model_dump(mode="json"))
    assert answer.status_code == 201, answer.text
    writer = world.log.writer()
    writer.append("doll.digits.updates", encode_audit(Lead(-1, GENESIS, "c1", 0)))
    for version in (1, 2):
        span = Span("clinic-a", 0, 2 * version - 2, 2 * version)
        batch = Batch(version - 1, WorkerId("w1"), (span,), 2)
        applied = UpdateApplied(0, version, (batch,), 2, 0.5)
        writer.append("doll.digits.updates", encode_audit(applied))
    assert writer.flush(1.0)
    first = kept(ModelId(0, 1), 2, trained(1), 0.1)
    CheckpointStore(world.blobs, "digits").save(first.name, to_parts(first), 0.0)
    world.board("digits").put_snapshot(0, to_bytes(kept(ModelId(0, 2), 3, trained(2), 0.5)), "c1")
    return world


@pytest.mark.parametrize(
    ("asked", "version", "seed"), [("", 2, 2), ("?version=best", 1, 1), ("?version=1", 1, 1)]
)
def test_pytorch_loads_the_requested_version(
    led: World, asked: str, version: int, seed: int
) -> None:
    answer = led.ask("GET", MODEL + asked, key="viewer")
    assert answer.status_code == 200, answer.text
    assert (answer.headers["Doll-Epoch"], answer.headers["Doll-Version"]) == ("0", str(version))
    assert answer.headers["ETag"].startswith(f'"0-{version}-')
    module = build_model(task_of(SPEC, ()), 7)
    module.load_state_dict(safetensors.torch.load(answer.content))
    held = FlatModel(build_model(task_of(SPEC, ()), 0))
    weights = np.random.default_rng(seed).normal(size=len(held.vector)).astype(np.float32)
    assert np.array_equal(FlatModel(module).vector, weights)


def test_unchanged_model_returns_304(led: World) -> None:
    tag = led.ask("GET", MODEL).headers["ETag"]
    for header in (tag, f'"other", W/{tag}', "*"):
        answer = led.ask("GET", MODEL, headers={"If-None-Match": header})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["ETag"] == tag
    other = led.ask("GET", f"{MODEL}?version=1", headers={"If-None-Match": tag})
    assert other.status_code == 200


def test_model_file_contains_its_description(led: World) -> None:
    evaluated = Evaluated(ModelId(0, 1), 0.0, 10, {"accuracy": 0.75})
    writer = led.log.writer()
    writer.append("doll.digits.updates", encode_audit(evaluated))
    assert writer.flush(1.0)
    _, about = unpack(led.ask("GET", f"{MODEL}?version=1").content)
    assert (about["job"], about["version"], about["epoch"]) == ("digits", "1", "0")
    assert msgspec.json.decode(about["task"]) == {
        "name": "image-classifier",
        "options": SPEC.task_options,
    }
    assert msgspec.json.decode(about["records"])["fields"].keys() == SPEC.records.fields.keys()
    assert msgspec.json.decode(about["offsets"]) == {"clinic-a": {"0": 2}}
    metrics = {"samples": 2, "loss": 0.1, "test": {"accuracy": 0.75}}
    assert msgspec.json.decode(about["metrics"]) == metrics


def test_head_request_does_not_read_the_weights(led: World) -> None:
    asked = {version: led.ask("GET", f"{MODEL}?version={version}") for version in (1, 2)}
    torn = [name for name in led.blobs.names("") if name.endswith("trainer.safetensors")]
    for name in torn:
        led.blobs.put(name, b"torn")
    for version, answer in asked.items():
        tag = answer.headers["ETag"]
        head = led.ask("HEAD", f"{MODEL}?version={version}", headers={"If-None-Match": '"other"'})
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["Doll-Version"] == str(version)
        assert head.headers["ETag"] == tag
        again = led.ask("GET", f"{MODEL}?version={version}", headers={"If-None-Match": tag})
        assert again.status_code == 304
    assert led.ask("HEAD", f"{MODEL}?version=7").status_code == 404


def test_unknown_version_or_job_returns_404(led: World) -> None:
    said = problem(led.ask("GET", f"{MODEL}?version=7"), 404)
    assert "version 7 of the model is not kept, or was rolled back; kept versions: 1, 2" in said
    assert "no job" in problem(led.ask("GET", "/v1/jobs/letters/model"), 404)
    assert "version" in problem(led.ask("GET", f"{MODEL}?version=oldest"), 422)


def test_stored_model_is_served_while_redis_is_unavailable(led: World) -> None:
    led.redis.kill()
    assert led.ask("GET", MODEL).headers["Doll-Version"] == "1"


def test_missing_version_returns_503_while_redis_is_unavailable(led: World) -> None:
    led.redis.kill()
    answer = led.ask("GET", f"{MODEL}?version=999999", key="viewer")
    assert "hot snapshots in Redis could not be read" in problem(answer, 503)


def test_admin_service_does_not_import_torch() -> None:
    peek = "import sys, services.admin.app; print('torch' in sys.modules)"

    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", peek], capture_output=True, text=True, check=True
    )

    assert answer.stdout.strip() == "False"


def test_file_of_a_partly_frozen_model_has_all_its_tensors(led: World) -> None:
    module = build_model(task_of(SPEC, ()), 0)
    first = next(module.parameters())
    first.requires_grad = False
    flat = FlatModel(module)
    parts = flat.vector + 1, flat.parameter_count, optimizer_of(SPEC), SPEC.reduction
    trainer = Trainer(*parts, flat.layout, flat.base.digest).snapshot()
    led.board("digits").put_snapshot(0, to_bytes(kept(ModelId(0, 2), 3, trainer, 0.5)), "c1")
    lacking = led.ask("GET", MODEL)
    assert "the tensors that the task froze" in problem(lacking, 502)
    CheckpointStore(led.blobs, "digits").put_base(flat.base.digest, flat.base.save())
    plain = build_model(task_of(SPEC, ()), 7)
    plain.load_state_dict(safetensors.torch.load(led.ask("GET", MODEL).content))
    assert torch.equal(next(plain.parameters()), first)
    assert np.array_equal(FlatModel(plain).vector[first.numel() :], flat.vector + 1)
