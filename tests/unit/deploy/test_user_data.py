"""The user data of a machine, run by bash with stand-ins for the machine's programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest

from common.config.settings import read_settings
from tests.metadata_server import MetadataServer
from tests.servers import lacking
from tests.unit.deploy.rendering import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCRIPT = ROOT / "deploy/ec2/user-data.sh"
REGION, ACCOUNT = "eu-central-1", "111122223333"
MACHINE = "i-0123456789abcdef0"
PROGRAMS = ("aws", "chown", "dnf", "docker", "shutdown", "sleep", "systemctl", "systemd-run")
STUB = """#!/bin/sh
echo "{name} $*" >>"$STUBS/said"
[ "{name} $1 $2" = "aws ssm get-parameters-by-path" ] && cat "$STUBS/parameters"
[ "{name} $1" = "docker login" ] && cat >/dev/null
[ "{name}" = systemd-run ] && exit "${{WORKER_ENDS:-0}}"
exit 0
"""
SETTINGS = {
    "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/doll-worker:0.1.0",
    "settings/DOLL_KAFKA": "kafka.example.com:9093",
    "settings/DOLL_REDIS_CA": "/run/secrets/ca.pem",
    "settings/DOLL_REDIS": "rediss://redis.example.com:6379/0",
    "secrets/DOLL_REDIS_PASSWORD": "it's a pa$$word",
    "files/ca.pem": "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n",
}


class Booted(NamedTuple):
    """Result of the user data's script."""

    status: int
    # Output of the machine's stand-in programs.
    said: list[str]
    work: Path


@pytest.fixture
def machine() -> Iterator[MetadataServer]:
    """Return the metadata of a machine with an order's tags."""
    server = MetadataServer()
    files = {
        "tags/instance/doll:job": "digits",
        "tags/instance/doll:worker": "digits-w3-17",
        "placement/region": REGION,
        "instance-id": MACHINE,
        "instance-life-cycle": "on-demand",
    }
    for path, value in files.items():
        server.answer(f"/latest/meta-data/{path}", value.encode())
    try:
        yield server
    finally:
        server.close()


def boot(machine: MetadataServer, folder: Path, **variables: str) -> Booted:
    """Run the user data as a machine would, without the machine's own programs."""
    if shutil.which("curl") is None:
        lacking("there is no curl here")
    stubs, work = folder / "stubs", folder / "run"
    stubs.mkdir()
    for name in PROGRAMS:
        (stubs / name).write_text(STUB.format(name=name))
        (stubs / name).chmod(0o755)
    parameters = [{"Name": f"/doll/worker/{key}", "Value": SETTINGS[key]} for key in SETTINGS]
    (stubs / "parameters").write_text(json.dumps({"Parameters": parameters}))
    script = SCRIPT.read_text().replace("http://169.254.169.254", machine.endpoint)
    done = subprocess.run(
        ["bash", "-s"],  # noqa: S607 -- whichever bash there is
        input=script.replace("=/run/doll ", f"={work} ").replace("=/var/lib", f"={folder}"),
        env={"PATH": f"{stubs}:{os.environ['PATH']}", "STUBS": str(stubs), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    said = stubs / "said"
    return Booted(done.returncode, said.read_text().splitlines() if said.exists() else [], work)


@pytest.mark.parametrize("check", ["bash -n", "shellcheck"])
def test_user_data_passes_shell_checks(check: str) -> None:
    program, *options = check.split()
    if shutil.which(program) is None:
        lacking(f"there is no {program} here")
    done = subprocess.run(  # noqa: S603 -- our own file
        [program, *options, str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_machine_starts_the_ordered_worker_and_shuts_down_after_it(
    machine: MetadataServer, tmp_path: Path
) -> None:
    booted = boot(machine, tmp_path)
    assert booted.status == 0
    (run,) = [line for line in booted.said if line.startswith("systemd-run")]
    assert run.endswith(f"{SETTINGS['image']} worker --job digits --name digits-w3-17")
    assert "DOLL_TIER=reliable --env DOLL_NOTICES=ec2" in run
    assert "--read-only" in run
    assert any(line.startswith("docker login") for line in booted.said)
    assert booted.said[-2:] == ["sleep 180", "shutdown -h now"]
    assert machine.refused == 0


def test_settings_and_secrets_are_written_as_the_worker_reads_them(
    machine: MetadataServer, tmp_path: Path
) -> None:
    work = boot(machine, tmp_path).work
    lines = (work / "environment").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines)
    assert given["DOLL_REDIS_PASSWORD_FILE"] == "/run/secrets/DOLL_REDIS_PASSWORD"  # noqa: S105 -- a path
    assert "DOLL_REDIS_PASSWORD" not in given
    here = {key: value.replace("/run/secrets", f"{work}/secrets") for key, value in given.items()}
    settings = read_settings(here)
    assert settings.kafka == SETTINGS["settings/DOLL_KAFKA"]
    assert settings.redis_password == SETTINGS["secrets/DOLL_REDIS_PASSWORD"]
    assert (work / "secrets/ca.pem").read_text() == SETTINGS["files/ca.pem"]
    assert (work / "secrets/ca.pem").stat().st_mode & 0o077 == 0
    assert not (work / "parameters").exists()


def test_machine_shuts_down_after_any_failure(machine: MetadataServer, tmp_path: Path) -> None:
    booted = boot(machine, tmp_path, WORKER_ENDS="1")
    assert booted.status == 1
    assert booted.said[-2:] == ["sleep 180", "shutdown -h now"]
    machine.answer("/latest/meta-data/tags/instance/doll:worker", b"", 404)
    (tmp_path / "again").mkdir()
    booted = boot(machine, tmp_path / "again")
    assert booted.said == ["sleep 180", "shutdown -h now"]


@pytest.mark.parametrize(("machine_id", "ends"), [(MACHINE, True), ("i-of-its-image", False)])
def test_rebooted_machine_shuts_down_but_not_one_made_from_its_image(
    machine: MetadataServer, tmp_path: Path, machine_id: str, *, ends: bool
) -> None:
    boot(machine, tmp_path)
    (tmp_path / "cloud/data").mkdir()
    (tmp_path / "cloud/data/instance-id").write_text(f"{machine_id}\n")
    stubs = tmp_path / "stubs"
    (stubs / "said").unlink()
    done = subprocess.run(  # noqa: S603 -- what our own script wrote
        [tmp_path / "cloud/scripts/per-boot/doll"],
        env={"PATH": f"{stubs}:{os.environ['PATH']}", "STUBS": str(stubs)},
        check=False,
    )
    assert done.returncode == 0
    assert (stubs / "said").exists() == ends
