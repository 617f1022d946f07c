"""Clients in their own environments: `doll-client` alone, and a generated one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.admin.app import create_app
from tests.unit.admin import conftest, test_events
from tests.unit.admin.live.helpers import lead, update

if TYPE_CHECKING:
    from tests.unit.admin.conftest import World
    from tests.unit.admin.test_events import Served

pytestmark = pytest.mark.nightly  # packages are installed first

ROOT = Path(__file__).parents[2]
# Unrelated packages of these names.
STRANGERS = ("common==0.1.2", "services==0.1.1")
GENERATOR = "openapi-python-client==0.29.1"
MYPY = """
[mypy]
strict = True
# The generator's own text, the same for every document:
[mypy-generated.client]
ignore_errors = True
"""
TYPED = """
from generated.api.jobs import change_job, create_job, get_job
from generated.client import AuthenticatedClient
from generated.models import JobAnswer, JobPatch, JobSpec

def version(client: AuthenticatedClient, spec: JobSpec) -> int | None:
    create_job.sync(client=client, body=spec)
    change_job.sync("digits", client=client, body=JobPatch(group_size=3))
    found = get_job.sync("digits", client=client)
    return found.progress.version if isinstance(found, JobAnswer) else None
"""
ASKED = """
import sys, common, services, doll
client = doll.Client(*sys.argv[1:])
(job,) = client.jobs()
print(job.name, job.status().progress.version, next(job.updates()).loss)
try:
    job.model(framework="numpy")
except doll.NotFoundError as error:
    print(error)
print(sorted({"torch", "pydantic", "redis"} & sys.modules.keys()))
"""

world, served = conftest.world, test_events.served


def ran(*command: str | Path, folder: Path) -> str:
    """Run a program without this process's search path. Returns its output."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(  # noqa: S603 -- our own command lines
        command,
        cwd=folder,
        env=environment | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def environment(folder: Path, *packages: str) -> Path:
    """Create an environment with these packages alone. Returns the folder of its programs."""
    ran(sys.executable, "-m", "venv", folder / "env", folder=folder)
    programs = folder / "env" / "bin"
    ran(programs / "pip", "install", "--quiet", *packages, folder=folder)
    return programs


def test_client_works_beside_packages_with_our_module_names(served: Served, tmp_path: Path) -> None:
    served.topics.audit(lead(), update(0, 1))
    project = shutil.copytree(ROOT / "common" / "public", tmp_path / "public")  # it is built there
    programs = environment(tmp_path, str(project), *STRANGERS)

    said = ran(
        *(programs / "python", "-c", ASKED, str(served.client.base_url), served.world.viewer),
        folder=tmp_path,
    )

    first, absent, loaded = said.splitlines()
    assert (first, loaded) == ("digits 1 0.5", "[]")
    assert "none yet" in absent


def test_client_generated_from_openapi_document_has_types(world: World, tmp_path: Path) -> None:
    document = create_app(world.outside).openapi()
    bodies = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    # This generator does not support text bodies.
    del bodies["application/yaml"]
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    (tmp_path / "mypy.ini").write_text(MYPY)
    (tmp_path / "typed.py").write_text(TYPED)
    programs = environment(tmp_path, GENERATOR)
    ran(
        *(programs / "openapi-python-client", "generate", "--path", "openapi.json"),
        *("--output-path", "generated", "--meta", "none", "--fail-on-warning"),
        folder=tmp_path,
    )
    ran(
        *(sys.executable, "-m", "mypy", "--python-executable", programs / "python"),
        *("generated", "typed.py"),
        folder=tmp_path,
    )
