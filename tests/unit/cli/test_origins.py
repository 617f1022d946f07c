"""`doll job submit --from` copies matching parts, and refuses others with the reason."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from common.core.messages import Lead, ModelId
from common.core.snapshots import Snapshot
from common.jobs.build import trainer_of
from common.jobs.job_file import parse_job
from common.jobs.store import JobStore
from common.learning.checkpoint import unpack
from common.storage.snapshot_file import SnapshotFile, to_parts
from common.storage.store import CheckpointStore
from common.wire.messages import encode_audit
from services.cli import exits
from tests.unit.cli.test_audit import LEAD, batch, update
from tests.unit.cli.test_job import JOB, submitted
from tests.unit.cli.test_model import keep, saved

if TYPE_CHECKING:
    from tests.unit.cli.conftest import World

NEXT = JOB.replace("name: digits", "name: next")


@pytest.fixture
def led(world: World) -> World:
    """Versions 1, 2 and 3 of digits with checkpoints. A second leader rolled version 3 back."""
    submitted(world)
    made = (update(1, batch(0, 0, 2)), update(2, batch(1, 2, 4)), update(3, batch(2, 4, 6)))
    records = (LEAD, *made, Lead(0, ModelId(0, 2), "c2", 4))
    world.write("doll.digits.updates", *map(encode_audit, records))
    keep(world, saved(0, ModelId(0, 1), 2, 1.0, 0.3))
    keep(world, saved(0, ModelId(0, 2), 3, 2.0, 0.4))
    keep(world, saved(0, ModelId(0, 3), 4, 3.0, 0.1))
    return world


def shown(world: World, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(world.run("job", "show", job).stdout)
    return found


@pytest.mark.parametrize(
    ("source", "version"),
    [("digits", 2), ("digits@newest", 2), ("digits@best", 1), ("digits@1", 1), ("digits@2", 2)],
)
def test_submit_from_copies_an_effective_checkpoint(led: World, source: str, version: int) -> None:
    result = led.run("job", "submit", "-", "--from", source, typed=NEXT)
    assert "job next submitted" in result.stdout
    assert (
        f"the job starts from the checkpoint 0-{version} of digits: weights and optimizer state"
        in result.stdout
    )
    (blob,) = led.blobs.names("next/")
    data = led.blobs.content[blob]
    origin = shown(led, "next")["origin"]
    sha256 = hashlib.sha256(data).hexdigest()
    assert origin == {"job": "digits", "epoch": 0, "version": version, "sha256": sha256}
    assert blob == f"next/origin/{sha256}.safetensors"
    trainer = trainer_of(parse_job(NEXT), ())()
    trainer.restore(data)  # a snapshot of the new job
    assert set(np.frombuffer(trainer.weights(), np.float32)) == {float(version)}
    assert shown(led, "next")["reason"] == f"submitted, begins with digits@{version}"


def test_job_without_origin_shows_none(led: World) -> None:
    assert shown(led, "digits")["origin"] is None


def test_origin_copy_survives_deletion_of_its_checkpoint(led: World) -> None:
    led.run("job", "submit", "-", "--from", "digits@1", typed=NEXT)
    for name in led.blobs.names("digits/checkpoints/"):
        led.blobs.delete(name)
    origin = JobStore(led.log).get("next").origin
    assert origin is not None
    data = CheckpointStore(led.blobs, "next").origin(origin.sha256)
    assert set(unpack(data)[0]["weights"]) == {1.0}


def test_submit_from_with_another_optimizer_copies_only_weights(led: World) -> None:
    text = NEXT.replace("name: adam", "name: sgd")
    result = led.run("job", "submit", "-", "--from", "digits", typed=text)
    assert "weights only, because the optimizer was adam and is sgd now" in result.stdout
    (blob,) = led.blobs.names("next/")
    trainer_of(parse_job(text), ())().restore(led.blobs.content[blob])


def test_submit_from_skips_a_torn_checkpoint(led: World) -> None:
    (part,) = [n for n in led.blobs.names("") if n.endswith("000000000002/trainer.safetensors")]
    led.blobs.put(part, b"torn")
    result = led.run("job", "submit", "-", "--from", "digits", typed=NEXT)
    assert "the job starts from the checkpoint 0-1 of digits" in result.stdout
    assert shown(led, "next")["origin"]["version"] == 1


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("digit", ("", ""), 'there is no job "digit"; jobs: digits'),
        ("digits@", ("", ""), 'version: must be a number, "newest" or "best", got ""'),
        ("digits@last", ("", ""), 'version: must be a number, "newest" or "best", got "last"'),
        (
            "digits@3",
            ("", ""),
            "version 3 of the model is not kept, or was rolled back; kept versions: 1, 2",
        ),
        ("digits", ("name: next", "name: digits"), 'there is already a job "digits"'),
        ("digits", ("clinic-a", "clinic-x"), 'there is no topic "clinic-x"'),
    ],
)
def test_submit_from_an_impossible_origin_leaves_nothing(
    led: World, source: str, change: tuple[str, str], message: str
) -> None:
    text = NEXT.replace(*change)
    result = led.run("job", "submit", "-", "--from", source, typed=text, code=exits.REFUSED)
    assert message in result.stderr
    assert list(JobStore(led.log).read()) == ["digits"]
    assert [name for name in led.blobs.names("") if "/origin/" in name] == []


def test_submit_from_with_pretrained_weights_is_rejected(led: World) -> None:
    text = f"{NEXT}\ninit: {{from: a, sha256: {'a' * 64}}}\n"
    result = led.run("job", "submit", "-", "--from", "digits", typed=text, code=exits.REFUSED)
    assert "init: cannot be combined with the start from another job's checkpoint" in result.stderr
    assert list(JobStore(led.log).read()) == ["digits"]


def test_submit_with_weights_of_an_unlisted_host_is_rejected_with_the_setting(led: World) -> None:
    text = f"{NEXT}\ninit: {{from: 'https://evil.example/a', sha256: {'a' * 64}}}\n"
    result = led.run("job", "submit", "-", typed=text, code=exits.REFUSED)
    assert "init.from: evil.example is not listed in the setting DOLL_INIT_HOSTS" in result.stderr
    assert list(JobStore(led.log).read()) == ["digits"]


def test_submit_from_without_object_storage_is_rejected_with_the_reason(led: World) -> None:
    arguments = ("job", "submit", "-", "--from", "digits")
    result = led.run(*arguments, typed=NEXT, code=exits.REFUSED, blobs="")
    assert (
        "from: digits requires object storage, but DOLL_BLOBS of this process is not"
        in result.stderr
    )


def test_new_job_gets_a_copy_of_the_frozen_tensors(led: World) -> None:
    store = CheckpointStore(led.blobs, "digits")
    store.put_base("1234", b"frozen")
    trainer = trainer_of(parse_job(JOB), ())()
    trainer.kind = msgspec.structs.replace(trainer.kind, base="1234")
    made = ModelId(0, 2)
    file = SnapshotFile(Snapshot(0, made, 3, 0, {}), trainer.snapshot())
    for name in led.blobs.names(store.folder(made)):
        led.blobs.delete(name)
    store.save(made, to_parts(file), 0.0)
    led.run("job", "submit", "-", "--from", "digits@2", typed=NEXT)
    copy = CheckpointStore(led.blobs, "next")
    assert copy.base(copy.base_digest()) == b"frozen"
