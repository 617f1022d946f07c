"""Imports point one way: services -> common; inside common, towards core."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREES = ("common", "services", "tests", "load")
SERVICES = ("worker", "coordinator", "cli")
OUTSIDE = {"asyncio", "boto3", "botocore", "confluent_kafka", "fastapi", "logging", "os", "random"}
OUTSIDE |= {"redis", "rich", "socket", "subprocess", "threading", "time", "torch", "typer"}
OURS = {"adapters", "config", "connections", "embedded", "job", "learning", "ports", "simulation"}
OURS |= {"telemetry", "testing", "wire"}


def common(*names: str) -> set[str]:
    return {f"common.{name}" for name in names}


BANNED = {  # folder: what nothing inside it may import
    "common": {"services"},
    "common/core": OUTSIDE | common(*OURS, "errors"),
    "common/learning": common(*OURS - {"learning"}) | (OUTSIDE - {"torch", "time"}),
    "common/simulation": common(*OURS - {"simulation"}),
    "common/testing": common(*OURS - {"testing", "ports", "learning", "wire"}),
    "common/adapters": common(*OURS - {"adapters", "ports", "wire"}),
    "common/embedded": common(*OURS - {"embedded", "adapters", "config"}),
    "common/datasets": common(*OURS),
} | {
    f"services/{one}": {f"services.{other}" for other in SERVICES if other != one}
    for one in SERVICES
}
HOMES = {  # a client library has one home
    "confluent_kafka": ("common/adapters/kafka_log/", "common/embedded/"),
    "redis": ("common/adapters/redis_", "common/embedded/redis.py"),
    "boto3": ("common/adapters/s3_blobs.py",),
    "torch": ("common/learning/", "common/testing/", "services/worker/", "services/coordinator/"),
    "typer": ("services/cli/",),
    "rich": ("services/cli/", "common/simulation/__main__.py"),
}
SECRETS = ("/" + "work/", "/" + "root/", "python" + "hosted", "pypi" + ".org", "maven" + ".org")
PEEK = """
import importlib, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
print(threading.active_count(), "torch" in sys.modules)
"""


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", BANNED)
def test_imports_point_one_way(folder: str) -> None:
    for path in sources(folder):
        for name in imports(path):
            banned = [b for b in BANNED[folder] if within(name, b)]
            assert not banned, f"{named(path)} imports {name}"


def test_adapters_never_import_each_other() -> None:
    for path in sources("common/adapters"):
        kind = path.relative_to(ROOT / "common/adapters").parts[0].split("_")[0]
        for name in imports(path):
            if within(name, "common.adapters"):
                assert name.split(".")[2].split("_")[0] == kind, f"{named(path)} imports {name}"


@pytest.mark.parametrize("library", HOMES)
def test_a_client_library_has_one_home(library: str) -> None:
    for path in sources("common", "services"):
        home = named(path).startswith(HOMES[library])
        assert home or not any(within(n, library) for n in imports(path)), named(path)


def test_every_file_says_why_it_exists_and_is_short() -> None:
    for path in sources(*TREES):
        text = path.read_text()
        assert not text or ast.get_docstring(ast.parse(text)), f"{named(path)} has no docstring"
    for path in sources("common", "services"):
        assert path.read_text().count("\n") <= 400, f"{named(path)} is really two files"


def test_the_tree_names_no_machine_and_no_registry() -> None:
    others: list[str | Path] = [
        "Makefile",
        ".ci/run",
        "pyproject.toml",
        "constraints.txt",
        *ROOT.glob("*.md"),
    ]
    others += [*(ROOT / "docs").rglob("*.*"), *(ROOT / "deploy").glob("*/pom.xml")]
    for path in (*sources(*TREES), *(ROOT / other for other in others)):
        text = path.read_text()
        assert not [secret for secret in SECRETS if secret in text], path


def test_importing_starts_nothing_and_the_core_needs_no_torch() -> None:
    modules = [
        named(path)[: -len(".py")].replace("/", ".")
        for path in sources("common/core", "common/adapters", "common/simulation")
        if path.name != "__main__.py"
    ]
    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", PEEK, *modules], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["1", "False"]
