"""docker-compose 1.29, as Debian packages it, and its own schema accept docker-compose.yml."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft201909Validator

from tests.compose import EXAMPLE, ROOT, services
from tests.servers import lacking

OLD = "1.29."
MISSING = (
    "there is no docker-compose 1.29 here: apt-get install --no-install-recommends docker-compose"
)
SCHEMA = "import compose.config; print(compose.config.__path__[0])"


@pytest.fixture(scope="module")
def program() -> str:
    """Return the path of docker-compose 1.29. If it is missing or newer, skip or fail the test."""
    found = shutil.which("docker-compose")
    if found is None or not said(found, "version", "--short").startswith(OLD):
        lacking(MISSING)
    return found


def said(*command: str) -> str:
    """Return the answer of a program, which must succeed."""
    done = subprocess.run(  # noqa: S603 -- our own arguments, no shell
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [(), ("--env-file", str(EXAMPLE)), ("--profile", "gpu"), ("--profile", "serve")],
    ids=["as it is", "with the example of .env", "with GPUs", "with a model server"],
)
def test_docker_compose_accepts_the_file(program: str, options: tuple[str, ...]) -> None:
    read: dict[str, Any] = yaml.safe_load(said(program, *options, "config"))
    assert set(read["services"]) == set(services())
    assert read["services"]["worker"]["deploy"]["replicas"] == 2
    assert read["services"]["admin"]["ports"] == ["127.0.0.1:8080:8080/tcp"]


def test_compose_reader_of_the_tests_matches_docker_compose(program: str) -> None:
    read: dict[str, Any] = yaml.safe_load(said(program, "--profile", "gpu", "config"))
    for name, service in services().items():
        theirs = read["services"][name]
        assert theirs["image"] == service["image"]
        assert theirs.get("command") == service.get("command")
        assert theirs.get("environment", {}) == service.get("environment", {})


def test_compose_schema_accepts_the_file(program: str) -> None:
    interpreter = Path(program).read_text().splitlines()[0].removeprefix("#!").split()
    folder = Path(said(*interpreter, "-c", SCHEMA).strip())
    schema: dict[str, Any] = json.loads((folder / "compose_spec.json").read_text())
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    # The schema requires numbers where the file has variables. Their values are numbers.
    document["services"] = {
        name: {**service, "deploy": _numbered(service["deploy"])}
        for name, service in services().items()
    }
    Draft201909Validator(schema).validate(document)


def _numbered(deploy: dict[str, Any]) -> dict[str, Any]:
    replicas = deploy.get("replicas")
    return deploy if replicas is None else {**deploy, "replicas": int(replicas)}
