"""An extra brings its service's imports: without torch if the service does not train."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
EVERYWHERE = ("common.kafka.log", "common.redis.board")
STORAGE = ("common.storage.disk", "common.storage.s3")
# Modules that a service loads on demand.
OPENED = {
    "worker": ("common.notices.preemption",),
    "coordinator": STORAGE,
    "evaluator": (*STORAGE, "common.tracking.mlflow", "river.drift"),
    "provisioner": (
        *("common.spot.fleets.ec2.fleet", "common.spot.fleets.ec2.prices"),
        *("common.spot.fleets.local.fleet", "common.spot.fleets.prices"),
    ),
    "serve": STORAGE,
    "admin": (*STORAGE, "common.spot.fleets.ec2.prices", "common.spot.planning.simulation_process"),
    "cli": (
        *STORAGE,
        *(
            "common.spot.fleets.ec2.prices",
            "common.spot.planning.compare",
            "common.spot.planning.plan",
        ),
    ),
}
COMMANDS = (
    *("__main__", "local", "options", "system.api"),
    *("commands.producing", "commands.sources"),
    *("demo.judge", "demo.plan", "demo.run", "demo.screen", "demo.summary"),
)
WITHOUT_TORCH = ("provisioner", "admin", "cli")
OWNERS = {top: set(map(canonicalize_name, o)) for top, o in packages_distributions().items()}
IMPORT = """
import importlib, json, os, sys
refused = set()
class Refuse:  # as if these were not installed
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
first, cases = json.loads(sys.stdin.read())
for case, (without, modules) in enumerate([*first, *cases]):
    pid = 0 if case < len(first) else os.fork()  # each begins with what the first ones have loaded
    if pid == 0:
        refused = set(without)
        for name in modules:
            importlib.import_module(name)
    if case < len(first):
        continue
    if pid == 0:
        print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"case {case} failed")
"""


def brought(requirements: Iterable[str]) -> set[str]:
    """Return the distributions that these require, including themselves."""
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
    # The modules of the CLI's commands count, except commands that need more than the CLI's extra.
    if service == "cli":
        return ["common.embedded.stack", *(f"services.cli.{name}" for name in COMMANDS)]
    paths = sorted((ROOT / "services" / service).glob("*.py"))
    return [f"services.{service}.{path.stem}" for path in paths if path.stem != "__init__"]


class Case(NamedTuple):
    """Imports on a machine that has these distributions only."""

    modules: Sequence[str]
    have: Collection[str]

    def arguments(self) -> tuple[list[str], Sequence[str]]:
        """Return the packages that cannot be imported, and the modules to import."""
        refused = [
            top
            for top, owners in OWNERS.items()
            if top not in ("common", "services") and owners.isdisjoint(self.have)
        ]
        return refused, self.modules


def imported(*cases: Case, first: Sequence[Case] = ()) -> list[set[str]]:
    """Return the modules that the process of each case has loaded. It has imported `first`, too."""
    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", IMPORT],
        input=json.dumps([[case.arguments() for case in each] for each in (first, cases)]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return [set(json.loads(line)) for line in answer.stdout.splitlines()]


@pytest.mark.parametrize("trains", [True, False])
def test_service_can_import_everything_with_only_its_extra_installed(*, trains: bool) -> None:
    services = [service for service in OPENED if (service not in WITHOUT_TORCH) == trains]
    haves = [brought([*PROJECT["dependencies"], *EXTRAS[service]]) for service in services]
    cases = [
        Case([*modules_of(service), *EVERYWHERE, *OPENED[service]], have)
        for service, have in zip(services, haves, strict=True)
    ]
    # Slow modules are loaded once, with nothing but their own dependencies.
    first = [Case(("torch",), brought(["torch"]))] if trains else []
    first.append(Case(EVERYWHERE, brought(PROJECT["dependencies"])))
    assert all(("torch" in have) == trains for have in haves)
    assert all(("torch" in loaded) == trains for loaded in imported(*cases, first=first))


def test_command_starts_with_base_dependencies_only() -> None:
    have = brought(PROJECT["dependencies"])
    assert not have & {"boto3", "fastapi", "scipy", "torch"}
    [loaded] = imported(Case([*modules_of("cli"), *EVERYWHERE], have))
    assert "typer" in loaded


def test_services_without_training_do_not_load_torch() -> None:
    modules = [name for service in WITHOUT_TORCH for name in modules_of(service)]
    [loaded] = imported(Case(modules, set[str]().union(*OWNERS.values())))
    assert "numpy" in loaded
    assert "torch" not in loaded


def test_every_installed_distribution_is_pinned() -> None:
    extras = [line for lines in EXTRAS.values() for line in lines if not line.startswith("doll[")]
    assert brought([*PROJECT["dependencies"], *extras]) - pinned() == {"doll-client"}  # ours
