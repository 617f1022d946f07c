"""`doll model pull` writes weights that count by the audit, from every kind of storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from common.core.messages import GENESIS, Lead, ModelId
from common.core.snapshots import Snapshot
from common.errors import CorruptError, FutureFormatError
from common.jobs.build import optimizer_of
from common.jobs.job_file import parse_job
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, task_of
from common.learning.trainer import Trainer
from common.storage.snapshot_file import (
    SnapshotFile,
    from_bytes,
    from_checkpoint,
    to_bytes,
    to_parts,
)
from common.storage.store import CheckpointStore
from common.wire.messages import encode_audit, frame
from services.cli import exits
from tests.changes import once_changed
from tests.unit.cli.test_audit import LEAD, batch, update
from tests.unit.cli.test_job import JOB, submitted

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import World

SPEC = parse_job(JOB)


def saved(
    by: int, made: ModelId, updates_position: int, filled_with: float, *losses: float
) -> SnapshotFile:
    """Return a snapshot in which all weights are the same number, to identify it."""
    flat = FlatModel(build_model(task_of(SPEC, ()), 0))
    weights = np.full_like(flat.vector, filled_with)
    trainer = Trainer(weights, len(weights), optimizer_of(SPEC), layout=flat.layout)
    return SnapshotFile(
        Snapshot(by, made, updates_position, 0, {}, losses=losses), trainer.snapshot()
    )


def keep(world: World, kept: SnapshotFile) -> None:
    CheckpointStore(world.blobs, "digits").save(kept.name, to_parts(kept), 0.0)


def pulled(world: World, path: Path, *options: str) -> float:
    """Pull the model and return the number that its weights are filled with."""
    output = path / "model.safetensors"
    world.run("model", "pull", "digits", "-o", str(output), *options)
    tensors = safetensors.torch.load_file(output)
    task_of(SPEC, ()).build().load_state_dict(tensors)
    (value,) = {float(number) for tensor in tensors.values() for number in tensor.flatten()}
    return value


@pytest.fixture
def led(world: World) -> World:
    """A job with versions 1 and 2 of a leader. A second one took over from 1 and made none."""
    submitted(world)
    records = (
        LEAD,
        update(1, batch(0, 0, 2)),
        update(2, batch(1, 2, 4)),
        Lead(0, ModelId(0, 1), "c2", 3),
    )
    world.write("doll.digits.updates", *map(encode_audit, records))
    return world


def test_pull_takes_the_newest_effective_checkpoint(led: World, tmp_path: Path) -> None:
    keep(led, saved(0, ModelId(0, 1), 2, 1.0))
    # The second leader rolled this version back.
    keep(led, saved(0, ModelId(0, 2), 3, 2.0))
    assert pulled(led, tmp_path) == 1.0


def test_pull_takes_a_hot_snapshot_if_it_is_newer(led: World, tmp_path: Path) -> None:
    keep(led, saved(0, GENESIS, 1, 0.5))
    led.board("digits").put_snapshot(3, to_bytes(saved(3, ModelId(0, 1), 4, 3.0)), "c1")
    assert pulled(led, tmp_path) == 3.0


def test_pull_takes_the_requested_version(led: World, tmp_path: Path) -> None:
    keep(led, saved(0, GENESIS, 1, 0.5))
    keep(led, saved(0, ModelId(0, 1), 2, 1.0))
    assert pulled(led, tmp_path, "--version", "0") == 0.5


def test_pull_best_takes_the_effective_version_with_the_lowest_loss(
    led: World, tmp_path: Path
) -> None:
    keep(led, saved(0, GENESIS, 1, 0.5))  # no update yet, so no loss
    keep(led, saved(0, ModelId(0, 1), 2, 1.0, 0.5, 0.3))
    # The second leader rolled this version back.
    keep(led, saved(0, ModelId(0, 2), 3, 2.0, 0.1))
    keep(led, saved(3, ModelId(3, 2), 5, 3.0, 0.6))
    led.write("doll.digits.updates", encode_audit(update(2, batch(1, 2, 4), epoch=3)))
    assert pulled(led, tmp_path) == 3.0
    assert pulled(led, tmp_path, "--version", "best") == 1.0


def test_pull_of_an_invalid_version_is_rejected(led: World, tmp_path: Path) -> None:
    arguments = (
        "model",
        "pull",
        "digits",
        "-o",
        str(tmp_path / "m.safetensors"),
        "--version",
        "-1",
    )
    result = led.run(*arguments, code=exits.REFUSED)
    assert 'version: must be a number, "newest" or "best", got "-1"' in result.stderr


def test_pull_of_an_unknown_version_lists_the_known_ones(led: World, tmp_path: Path) -> None:
    keep(led, saved(0, ModelId(0, 1), 2, 1.0))
    arguments = ("model", "pull", "digits", "-o", str(tmp_path / "m.safetensors"), "--version", "7")
    result = led.run(*arguments, code=exits.REFUSED)
    assert (
        "version 7 of the model is not kept, or was rolled back; kept versions: 1" in result.stderr
    )


def test_pull_before_the_first_model_says_that_none_exists(led: World, tmp_path: Path) -> None:
    arguments = ("model", "pull", "digits", "-o", str(tmp_path / "m.safetensors"))
    result = led.run(*arguments, code=exits.REFUSED)
    assert "a model is not kept, or was rolled back; kept versions: none yet" in result.stderr


def test_pull_takes_a_checkpoint_without_redis(led: World, tmp_path: Path) -> None:
    keep(led, saved(0, ModelId(0, 1), 2, 1.0))
    led.redis.kill()
    assert pulled(led, tmp_path) == 1.0


def test_pull_skips_a_torn_checkpoint(led: World, tmp_path: Path) -> None:
    keep(led, saved(0, GENESIS, 1, 0.5))
    keep(led, saved(0, ModelId(0, 1), 2, 1.0))
    (part,) = [n for n in led.blobs.names("") if n.endswith("000000000001/trainer.safetensors")]
    led.blobs.put(part, b"torn")
    led.board("digits").put_snapshot(0, b"torn too", "c1")
    assert pulled(led, tmp_path) == 0.5


def test_pull_names_a_file_that_cannot_be_written(led: World, tmp_path: Path) -> None:
    keep(led, saved(0, ModelId(0, 1), 2, 1.0))
    output = str(tmp_path / "no" / "folder.safetensors")
    result = led.run("model", "pull", "digits", "-o", output, code=exits.REFUSED)
    assert "cannot be written" in result.stderr


def test_snapshot_survives_redis_and_storage_formats(world: World) -> None:
    kept = saved(0, ModelId(0, 1), 2, 1.0)
    keep(world, kept)
    stored = from_checkpoint(CheckpointStore(world.blobs, "digits").open(kept.name))
    assert from_bytes(to_bytes(kept)) == kept
    assert stored.title == "the checkpoint 0-1"
    assert SnapshotFile(stored.snapshot, stored.trainer()) == kept


@pytest.mark.parametrize(
    "data",
    [b"", b"\x05\x00\x00\x00", to_bytes(SnapshotFile(Snapshot(0, GENESIS, 0, 0, {}), b""))[:9]],
)
def test_torn_bytes_are_no_snapshot(world: World, data: bytes) -> None:
    store = CheckpointStore(world.blobs, "digits")
    store.save(ModelId(0, 1), {"protocol.msgpack": data, "trainer.safetensors": b""}, 0.0)
    store.save(ModelId(0, 2), {"protocol.msgpack": data}, 0.0)
    with pytest.raises(CorruptError):
        from_bytes(data)
    with pytest.raises(CorruptError, match="does not parse"):
        from_checkpoint(store.open(ModelId(0, 1)))
    with pytest.raises(CorruptError, match=r"has no trainer.safetensors"):
        from_checkpoint(store.open(ModelId(0, 2)))


def test_snapshot_of_a_later_format_is_distinguished_from_a_torn_one(world: World) -> None:
    newer = msgspec.msgpack.encode({"format": 2, "everything": "else"})
    store = CheckpointStore(world.blobs, "digits")
    store.save(ModelId(0, 1), {"protocol.msgpack": newer, "trainer.safetensors": b""}, 0.0)
    with pytest.raises(FutureFormatError, match="format 2, expected at most 1"):
        from_bytes(frame(newer, b""))
    with pytest.raises(FutureFormatError, match="the checkpoint 0-1 has format 2"):
        from_checkpoint(store.open(ModelId(0, 1)))


def test_model_list_shows_effective_versions_and_their_place(led: World) -> None:
    assert "no version of digits is stored yet" in led.run("model", "list", "digits").stdout
    keep(led, saved(0, ModelId(0, 1), 2, 1.0, 0.5, 0.3))
    # The second leader rolled this version back.
    keep(led, saved(0, ModelId(0, 2), 3, 2.0))
    led.board("digits").put_snapshot(3, to_bytes(saved(3, ModelId(0, 1), 4, 3.0)), "c1")
    _, *rows = led.run("model", "list", "digits").stdout.splitlines()
    assert [row.split()[:3] for row in rows] == [["1", "0", "-"], ["1", "0", "0.4000"]]
    assert "checkpoint" in rows[1]


# The file's content is tested in learning/test_export.py. This test loads a compiler twice.
@once_changed("common/jobs/export", "common/learning/", "services/cli/commands/model")
def test_export_runs_in_its_own_process(led: World, tmp_path: Path) -> None:
    keep(led, saved(0, ModelId(0, 1), 2, 1.0))
    output = tmp_path / "digits.pt2"
    assert pulled(led, tmp_path) == 1.0
    model = tmp_path / "model.safetensors"
    said = led.run("model", "export", str(model), "-o", str(output)).output
    assert said.startswith(f"{model}: {output}, ")
    program = torch.export.load(output).module()
    outputs = program(torch.zeros(5, 1, 8, 8, dtype=torch.uint8))
    assert outputs.shape == (5, 10)


def test_export_that_is_impossible_is_rejected_in_one_line(world: World, tmp_path: Path) -> None:
    for name, said in (
        ("digits.pt", ".pt2 or .onnx"),
        ("no/folder/digits.pt2", "cannot be written"),
        ("digits.pt2", "digits.safetensors: cannot be read"),
    ):
        arguments = ("model", "export", "digits.safetensors", "-o", str(tmp_path / name))
        assert said in world.run(*arguments, code=exits.REFUSED).stderr


@pytest.mark.parametrize("name", ["x.pt", "x.pt2", "x.onnx", "x"])
def test_pull_into_a_file_of_another_format_is_rejected_before_reading(
    world: World, name: str, tmp_path: Path
) -> None:
    output = tmp_path / name
    said = world.run("model", "pull", "digits", "-o", str(output), code=exits.REFUSED).stderr
    assert f"--output: must end with .safetensors, got {output}" in said
    assert "doll model export" in said
    assert not output.exists()
