"""An extra brings what its service imports: without torch where nothing is trained."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
EVERYWHERE = ("common.adapters.kafka", "common.adapters.redis.board")
STORAGE = ("common.adapters.blobs.disk", "common.adapters.blobs.s3")
OPENED = {  # what a service loads only when it needs it
    "worker": ("common.adapters.ec2.notice",),
    "coordinator": STORAGE,
    "evaluator": (*STORAGE, "common.adapters.mlflow", "river.drift"),
    "provisioner": (
        *("common.adapters.ec2.fleet", "common.adapters.ec2.prices"),
        *("common.adapters.local.fleet", "common.adapters.prices"),
    ),
    "serve": STORAGE,
    "admin": (*STORAGE, "common.adapters.ec2.prices", "common.planning.apart"),
    "cli": (
        *STORAGE,
        *("common.adapters.ec2.prices", "common.planning.compare", "common.planning.plan"),
        "services.cli.system.api",
    ),
}
COMMANDS = (
    *("__main__", "local", "options", "system.direct", "render.plots"),
    *("commands.bounded_topic", "commands.producing", "commands.sources"),
    *("demo.judge", "demo.plan", "demo.run", "demo.screen", "demo.summary"),
)
WITHOUT_TORCH = ("provisioner", "admin", "cli")
IMPORT = """
import importlib, json, sys
refused, modules = json.loads(sys.stdin.read())
class Refuse:  # as if these were not installed
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
for name in modules:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def brought(requirements: Iterable[str]) -> set[str]:
    """Distributions that come with these, theirs included."""
    todo = [Requirement(line) for line in requirements]
    found = set[tuple[str, str]]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            for line in distribution(name).requires or ():
                further = Requirement(line)
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    todo.append(further)
    return {name for name, _ in found}


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


def modules_of(service: str) -> list[str]:
    if service == "cli":  # with what its commands load, but for those of machines that have more
        return ["common.embedded.stack", *(f"services.cli.{name}" for name in COMMANDS)]
    paths = sorted((ROOT / "services" / service).glob("*.py"))
    return [f"services.{service}.{path.stem}" for path in paths if path.stem != "__init__"]


def imported(modules: Sequence[str], have: Collection[str]) -> set[str]:
    """What is loaded once these are imported where only these distributions are installed."""
    refused = [
        top
        for top, owners in packages_distributions().items()
        if top not in ("common", "services")
        and not {canonicalize_name(owner) for owner in owners} & set(have)
    ]
    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", IMPORT],
        input=json.dumps([refused, modules]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return set(json.loads(answer.stdout))


@pytest.mark.parametrize("service", OPENED)
def test_a_service_imports_all_that_it_may_open_from_what_its_extra_brings(service: str) -> None:
    have = brought([*PROJECT["dependencies"], *EXTRAS[service]])
    loaded = imported([*modules_of(service), *EVERYWHERE, *OPENED[service]], have)
    trains = service not in WITHOUT_TORCH
    assert (trains, trains) == ("torch" in have, "torch" in loaded)


def test_the_command_starts_with_the_base_alone_since_every_container_starts_it() -> None:
    have = brought(PROJECT["dependencies"])
    assert not have & {"boto3", "fastapi", "scipy", "torch"}
    assert "typer" in imported([*modules_of("cli"), *modules_of("joiner"), *EVERYWHERE], have)


@pytest.mark.parametrize("service", WITHOUT_TORCH)
def test_torch_is_not_even_loaded_where_it_is_installed(service: str) -> None:
    everything = {canonicalize_name(name) for o in packages_distributions().values() for name in o}
    loaded = imported(modules_of(service), everything)
    assert "numpy" in loaded
    assert "torch" not in loaded


def test_what_is_installed_is_pinned_to_the_last_dependency_of_a_dependency() -> None:
    extras = [line for lines in EXTRAS.values() for line in lines if not line.startswith("doll[")]
    assert brought([*PROJECT["dependencies"], *extras]) - pinned() == {"doll-client"}  # ours
