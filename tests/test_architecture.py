"""Imports point one way: services -> common; inside common, towards core."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREES = ("common", "services", "tests", "load")
ALLOWED = {  # folder or file: what of ours it may import, beside itself
    "common/core/": (),
    "common/ports.py": ("core", "errors"),
    "common/wire.py": ("core", "errors", "wire_checks"),
    "common/learning/": ("core", "errors"),
    "common/theory/": ("errors",),
    "common/evaluation/": ("core", "trail"),
    "common/traces/": ("datasets", "errors", "theory"),
    "common/renting.py": (),
    "common/provisioning/": ("core", "errors", "renting", "theory", "wire"),
    "common/simulation/faults/": ("core",),
    "common/simulation/experiments/": (
        *("complaints", "core", "datasets", "errors", "job_file", "learning", "theory", "traces"),
    ),
    "common/datasets/": ("errors",),
    "common/adapters/": (
        *("core", "errors", "market", "ports", "rejections", "renting", "traces", "tracing"),
        "wire",
    ),
    "common/testing/": (
        *("core", "errors", "learning", "market", "ports", "rejections", "renting", "tracing"),
        "wire",
    ),
    "common/embedded/": ("adapters", "config", "errors"),
}
SHELLS = ("admin", "cli", "coordinator", "evaluator", "provisioner", "worker")
CORE_LIBRARIES = {"msgspec", "numpy"}
THEORY_LIBRARIES = {"numpy", "scipy"}
OUTSIDE = {  # of the standard library: clocks, chance, the machine
    *("asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "random", "secrets"),
    *("signal", "socket", "subprocess", "sys", "threading", "time", "urllib", "uuid"),
}
HOMES = {  # a client library has one home
    "confluent_kafka": ("common/adapters/kafka_log/", "common/embedded/"),
    "redis": ("common/adapters/redis_", "common/embedded/redis.py"),
    "boto3": ("common/adapters/s3_blobs.py", "common/adapters/ec2_"),
    "fastapi": ("services/admin/",),
    "uvicorn": ("services/admin/",),
    "psutil": ("common/adapters/process_table.py",),
    "httpx2": ("services/cli/",),
    "plotly": ("services/admin/",),
    "prometheus_client": ("common/metrics/",),
    "river": ("common/evaluation/drift.py",),
    "opentelemetry": ("common/adapters/otlp_traces.py",),
    "requests": ("common/adapters/otlp_traces.py",),
    "torch": (
        *("common/learning/", "common/testing/", "services/worker/", "services/coordinator/"),
        *("services/evaluator/", "common/simulation/experiments/learning.py"),
    ),
    "scipy": ("common/theory/", "common/simulation/experiments/outcome.py"),
    "matplotlib": ("services/cli/plots.py",),
    "structlog": ("common/log_lines.py", "common/telemetry.py"),
    "typer": ("services/cli/",),
    "rich": ("services/cli/", "common/simulation/__main__.py"),
}
SECRETS = ("/" + "work/", "/" + "root/", "python" + "hosted", "pypi" + ".org", "maven" + ".org")
PEEK = """
import importlib, sys, threading
for library in ("boto3", "confluent_kafka.admin", "prometheus_client", "pydantic", "redis",
                "rich.console", "river.drift", "torch"):
    importlib.import_module(library)  # what these do when they are imported is their affair
began = []
starts = {"socket.__new__", "subprocess.Popen", "os.fork", "os.putenv", "open"}
def note(event, args):
    if event in starts and not (event == "open" and args[1] in (None, "r", "rb")):
        began.append((event, *args))
sys.addaudithook(note)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(began, threading.active_count())
"""


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module(path: Path) -> str:
    return named(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("place", ALLOWED)
def test_inside_common_imports_point_towards_core(place: str) -> None:
    itself = place.removesuffix("/").removesuffix(".py").replace("/", ".")
    allowed = (itself, *(f"common.{name}" for name in ALLOWED[place]))
    paths = sources(place) if place.endswith("/") else [ROOT / place]
    assert paths
    for path in paths:
        for name in imports(path):
            ours = within(name, "common", "services")
            assert not ours or within(name, *allowed), f"{named(path)} imports {name}"


def test_the_core_knows_numbers_and_messages_and_nothing_of_the_world() -> None:
    for path in sources("common/core"):
        tops = {name.partition(".")[0] for name in imports(path)} - {"common"}
        foreign = tops - sys.stdlib_module_names - CORE_LIBRARIES
        assert not foreign | (tops & OUTSIDE), f"{named(path)} imports {foreign | tops & OUTSIDE}"


def test_the_theory_knows_numbers_and_nothing_of_the_world() -> None:
    for path in sources("common/theory"):
        tops = {name.partition(".")[0] for name in imports(path)} - {"common"}
        foreign = tops - sys.stdlib_module_names - THEORY_LIBRARIES
        assert not foreign | (tops & OUTSIDE), f"{named(path)} imports {foreign | tops & OUTSIDE}"


def test_common_never_imports_services() -> None:
    for path in sources("common"):
        assert not [name for name in imports(path) if within(name, "services")], named(path)


@pytest.mark.parametrize("shell", SHELLS)
def test_services_never_import_each_other(shell: str) -> None:
    others = [f"services.{other}" for other in SHELLS if other != shell]
    for path in sources(f"services/{shell}"):
        for name in imports(path):
            assert not within(name, *others), f"{named(path)} imports {name}"


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


def test_every_file_says_why_it_exists() -> None:
    for path in sources(*TREES):
        text = path.read_text()
        assert not text or text.startswith('"""'), f"{named(path)} does not begin with a docstring"


def test_the_tree_names_no_machine_and_no_registry() -> None:
    others: list[str | Path] = ["Makefile", ".ci/run", "pyproject.toml", "constraints.txt"]
    others += [*ROOT.glob("*.md"), *(ROOT / "deploy").glob("*/pom.xml")]
    others += [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    for path in (*sources(*TREES), *(ROOT / other for other in others)):
        text = path.read_text(errors="replace")  # plots are among them
        assert not [secret for secret in SECRETS if secret in text], path


def test_importing_starts_nothing() -> None:
    modules = [module(path) for path in sources("common", "services")]

    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", PEEK, *modules], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert answer.stdout.split("\n")[0] == "[] 1"


def test_the_protocol_needs_no_torch() -> None:
    modules = [module(path) for path in sources("common/core", "common/adapters")]
    peek = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"

    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", peek], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert answer.stdout.strip() == "False"
