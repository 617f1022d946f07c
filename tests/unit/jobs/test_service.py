"""A job begins with another job's checkpoint, which a service without PyTorch copies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.config.settings import Settings
from common.core.messages import GENESIS, Batch, Lead, ModelId, UpdateApplied, WorkerId
from common.core.snapshots import Snapshot
from common.core.spans import Span
from common.errors import ConflictError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.servers import Outside
from common.jobs.service import JobService
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.learning.checkpoint import Kind, pack, unnamed, unpack
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from common.storage.snapshot_file import SnapshotFile, to_parts
from common.storage.store import CheckpointStore
from common.wire.messages import encode_audit

SPEC = parse_job("""
name: first
streams: [clinic-a]
records: {codec: tensor, fields: {image: {dtype: uint8, shape: [1, 8, 8]}, label: {dtype: int64}}}
task: {name: image-classifier, classes: 10}
batch_size: 2
group_size: 1
optimizer: {name: adam, learning_rate: 2e-3}
""")
NEXT = SPEC.model_copy(update={"name": "next"})
WITHOUT_TORCH = """
import sys
class Refuse:  # as if it were not installed
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from tests.unit.jobs.test_service import NEXT, Bench
bench = Bench()
origin, said = bench.jobs.copy_checkpoint(NEXT, "first@best")
record, is_new = bench.jobs.submit(NEXT, origin=origin)
print(record.origin, is_new, said, sep="\\n")
"""


class Bench:
    """A job with a checkpoint of version 1, and the job service."""

    def __init__(self) -> None:
        self.log, self.blobs, redis = MemoryLog(), MemoryBlobs(), MemoryRedis()
        self.log.create_topics([NewTopic("clinic-a")])
        store = JobOperations(self.log)
        store.submit(SPEC)
        batch = Batch(0, WorkerId("w1"), (Span("clinic-a", 0, 0, 2),), 2)
        writer = self.log.writer()
        for record in (Lead(-1, GENESIS, "c1", 0), UpdateApplied(0, 1, (batch,), 2, 0.25)):
            writer.append("doll.first.updates", encode_audit(record))
        kind = msgspec.json.encode(Kind("adam", 2, 1, unnamed(2, 1))).decode()
        self.data = pack({"weights": np.ones(3, np.float32)}, {"trainer": kind})
        saved = SnapshotFile(Snapshot(0, ModelId(0, 1), 2, 0, {}, losses=(0.25,)), self.data)
        CheckpointStore(self.blobs, "first").save(saved.name, to_parts(saved), 0.0)
        outside = Outside(
            Settings(blobs="s3://memory"),
            lambda: self.log,
            lambda job: MemoryBoard(redis, job),
            lambda: self.blobs,
        )
        self.jobs = JobService(store, outside, lambda _: None)

    def copied(self) -> bytes:
        """Return the checkpoint with which a job begins."""
        (name,) = self.blobs.names("next/origin/")
        return self.blobs.content[name]


def test_checkpoint_is_copied_without_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(  # noqa: S603 -- our own command line
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "first@1",
        "True",
        "the job starts from the checkpoint 0-1 of first: weights and optimizer state (adam)",
    ], done.stderr


def test_checkpoint_of_the_same_optimizer_is_copied_unchanged() -> None:
    bench = Bench()
    bench.jobs.copy_checkpoint(NEXT, "first")
    assert bench.copied() == bench.data


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [({"name": "sgd", "momentum": 0.9}, "momentum"), ({"name": "ftrl"}, "ftrl")],
)
def test_checkpoint_of_another_optimizer_is_copied_without_its_state(
    optimizer: dict[str, object], kind: str
) -> None:
    bench = Bench()
    own = {**optimizer, "learning_rate": 0.1}
    spec = parse_job(
        msgspec.json.encode(
            {**NEXT.model_dump(mode="json", exclude_unset=True), "optimizer": own}
        ).decode()
    )
    _, said = bench.jobs.copy_checkpoint(spec, "first")
    assert said.endswith(f"weights only, because the optimizer was adam and is {kind} now")
    tensors, metadata = unpack(bench.copied())
    assert list(tensors) == ["weights"]
    assert msgspec.json.decode(metadata["trainer"])["optimizer"] == kind


def test_repeated_request_copies_no_checkpoint() -> None:
    bench = Bench()
    origin, _ = bench.jobs.copy_checkpoint(NEXT, "first", "key:body")
    record, is_new = bench.jobs.submit(NEXT, "key:body", origin)
    assert is_new
    assert bench.jobs.copy_checkpoint(NEXT, "first", "key:body") == (None, "")
    assert bench.jobs.submit(NEXT, "key:body", None) == (record, False)
    with pytest.raises(ConflictError, match='there is already a job "next"'):
        bench.jobs.copy_checkpoint(NEXT, "first", "other:body")
