"""The scripts of docker-compose.yml: only the owner can read secrets, and servers get them."""

from __future__ import annotations

import configparser
import os
import stat
import subprocess
from typing import TYPE_CHECKING

from tests import compose
from tests.compose import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SCRIPTS = ROOT / "deploy/compose"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with `sh` and these variables, as a container would."""
    return subprocess.run(  # noqa: S603 -- our own scripts
        ["sh", *command],  # noqa: S607 -- whichever shell there is
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def make_secrets(folder: Path) -> dict[str, str]:
    """Run `make-secrets`. Returns the contents of its files by name."""
    done = run(str(SCRIPTS / "make-secrets"), str(folder))
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert not [content for content in found.values() if content.strip() in done.stdout]
    return found


def test_make_secrets_creates_exactly_the_declared_secrets(tmp_path: Path) -> None:
    made = make_secrets(tmp_path / "secrets")
    asked = compose.composed()["secrets"]
    assert asked == {name: {"file": f"./deploy/compose/secrets/{name}"} for name in made}


def test_make_secrets_protects_the_folder_and_makes_files_readable(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "secrets"
    make_secrets(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o444}


def test_make_secrets_keeps_existing_secrets(tmp_path: Path) -> None:
    first = make_secrets(tmp_path)
    (tmp_path / "grafana_password").unlink()
    again = make_secrets(tmp_path)
    assert again["grafana_password"] != first["grafana_password"]
    assert {**again, "grafana_password": ""} == {**first, "grafana_password": ""}


def test_make_secrets_reports_a_folder_in_place_of_a_secret(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    (folder / "s3_credentials").mkdir(parents=True)
    done = run(str(SCRIPTS / "make-secrets"), str(folder))
    assert done.returncode == 1
    assert f"sudo rm -r {folder}" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["s3_credentials"]


def test_make_secrets_creates_long_unique_secrets(tmp_path: Path) -> None:
    one, other = make_secrets(tmp_path / "one"), make_secrets(tmp_path / "other")
    for name, content in one.items():
        assert content != other[name]
    assert len(one["redis_password"].strip()) == 40
    assert len(one["grafana_password"].strip()) == 24
    keys = configparser.ConfigParser()
    keys.read_string(one["s3_credentials"])
    assert len(keys["default"]["aws_access_key_id"]) == 20
    assert len(keys["default"]["aws_secret_access_key"]) == 40


def test_git_ignores_secrets_and_env_files() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/.env", "/deploy/compose/secrets/"} <= set(ignored)


def test_s3_server_gets_the_key_that_clients_read(tmp_path: Path) -> None:
    secrets = make_secrets(tmp_path / "secrets")
    program = tmp_path / "versitygw"
    program.write_text('#!/bin/sh\necho "$ROOT_ACCESS_KEY" "$ROOT_SECRET_KEY" "$@"\n')
    program.chmod(0o755)
    done = run(
        str(SCRIPTS / "s3.sh"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        S3_CREDENTIALS_FILE=str(tmp_path / "secrets/s3_credentials"),
    )
    access, secret, *arguments = done.stdout.split()
    assert f"aws_access_key_id = {access}\n" in secrets["s3_credentials"]
    assert f"aws_secret_access_key = {secret}\n" in secrets["s3_credentials"]
    assert arguments[:2] == ["--port", ":7070"]
    assert arguments[-2:] == ["posix", "/data"]


def test_server_does_not_start_without_its_secret(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for script, variable in (("s3.sh", "S3_CREDENTIALS_FILE"), ("redis.sh", "REDIS_PASSWORD_FILE")):
        done = run(str(SCRIPTS / script), **{variable: str(empty), "REDIS_MAXMEMORY": "64mb"})
        assert done.returncode == 1
        assert "run make secrets" in done.stderr


def test_bucket_is_created_once_and_owned_by_the_server(tmp_path: Path) -> None:
    own = f"{os.getuid()}:{os.getgid()}"
    for _ in range(2):
        done = run(
            str(SCRIPTS / "s3-bucket.sh"), BUCKET="doll", S3_DIRECTORY=str(tmp_path), S3_USER=own
        )
        assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["doll"]
    user = compose.services()["s3"]["user"]
    assert f"S3_USER:-{user}}}" in (SCRIPTS / "s3-bucket.sh").read_text()
