"""`doll backup` and `doll restore`: jobs and keys survive the loss of their topics."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest

from common.api.keys import KeyStore
from common.jobs.operations import JobOperations
from common.kafka import names as topics
from services.cli import exits
from tests.unit.cli.test_job import submitted

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import World


JOB = "digits"


def lose(world: World) -> None:
    for topic in (topics.JOBS, topics.KEYS):
        world.log.recreate(topic)


def test_restore_brings_back_jobs_and_keys_unchanged(world: World, tmp_path: Path) -> None:
    submitted(world)
    file = tmp_path / "backup.json"
    world.run("key", "create", "page", "--role", "viewer")
    world.run("key", "create", "gone", "--role", "viewer")
    world.run("key", "revoke", "gone")
    job, keys = JobOperations(world.log).get(JOB), KeyStore(world.log).read()

    saved = world.run("backup", str(file)).stdout
    assert saved == f"saved to {file}: 1 record of doll.jobs and 3 records of doll.keys\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lose(world)
    output = world.run("restore", str(file)).stdout
    assert output == "doll.jobs: 1 record restored\ndoll.keys: 3 records restored\n"

    assert JobOperations(world.log).get(JOB) == job
    assert KeyStore(world.log).read() == keys
    assert world.run("restore", str(file)).stdout.count(": 0 records restored") == 2


def test_restore_over_a_changed_job_needs_the_replace_option(world: World, tmp_path: Path) -> None:
    submitted(world)
    file = str(tmp_path / "backup.json")
    world.run("backup", file)
    JobOperations(world.log).patch(JOB, "later", wanted="paused")
    refused = world.run("restore", file, code=exits.REFUSED)
    assert f"doll.jobs: already has other records of {JOB}" in refused.stderr
    assert JobOperations(world.log).get(JOB).wanted == "paused"
    world.run("restore", file, "--replace")
    assert JobOperations(world.log).get(JOB).wanted == "running"


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ((topics.JOBS, topics.KEYS), "there is nothing to save"),
        ((topics.JOBS,), "has 1 records of doll.jobs, but Kafka has only 0; Kafka has lost some"),
        ((topics.KEYS,), "has 2 records of doll.keys, but Kafka has only 0; Kafka has lost some"),
    ],
)
def test_backup_of_a_topic_that_lost_records_keeps_the_previous_file(
    world: World, tmp_path: Path, lost: tuple[str, ...], reason: str
) -> None:
    submitted(world)
    file = tmp_path / "backup.json"
    world.run("key", "create", "page", "--role", "viewer")
    world.run("backup", str(file))
    good = file.read_bytes()
    for topic in lost:
        world.log.recreate(topic)
    refused = world.run("backup", str(file), code=exits.REFUSED)
    assert reason in refused.stderr
    assert file.read_bytes() == good
    assert [each.name for each in tmp_path.iterdir()] == ["backup.json"]


def test_backup_does_not_overwrite_a_file_that_is_no_backup(world: World, tmp_path: Path) -> None:
    submitted(world)
    file = tmp_path / "thesis.txt"
    file.write_text("chapter 1")
    assert "is not a backup of DOLL" in world.run("backup", str(file), code=exits.REFUSED).stderr
    assert file.read_text() == "chapter 1"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"null", b"[]", b"{", b"\xff", b'{"format":2}', b"[" * 100_000),
        *(
            json.dumps({"format": 1, "saved_s": 0, "topics": {"doll.jobs": each}}).encode()
            for each in (
                *(None, 5, {"settings": {}, "records": {"a": {"number": 1}}}),
                {"settings": {}, "records": {"a": {"number": -1, "value": ""}}},
                {"settings": {}, "records": {"a": {"number": 10**15, "value": ""}}},
            )
        ),
        json.dumps({"format": 1, "saved_s": 0, "topics": {}}).encode(),
        json.dumps(
            {
                "format": 1,
                "saved_s": 0,
                "topics": {"clicks": {"settings": {}, "records": {}}},
            }
        ).encode(),
    ],
)
def test_restore_of_a_file_that_is_no_backup_is_rejected(
    world: World, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(content)
    assert "is not a backup of DOLL" in world.run("restore", str(file), code=exits.REFUSED).stderr


def test_unreadable_or_unwritable_backup_file_is_named(world: World, tmp_path: Path) -> None:
    submitted(world)
    missing = tmp_path / "missing" / "backup.json"
    assert "cannot be read" in world.run("restore", str(missing), code=exits.REFUSED).stderr
    assert "cannot be written" in world.run("backup", str(missing), code=exits.REFUSED).stderr
    for folder in (tmp_path, tmp_path.root):
        assert "is a folder" in world.run("backup", str(folder), code=exits.REFUSED).stderr
