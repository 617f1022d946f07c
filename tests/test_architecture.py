"""Imports only lead from higher floors to lower ones, without cycles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
TREES = ("common", "services", "tests", "load")
# A folder imports folders of lower floors only. The root of `common/` holds `errors` alone.
FLOORS = (
    # Separate distribution, in `common/public`.
    ("doll",),
    ("common.errors", "common.core"),
    ("common.data", "common.spot.theory", "common.spot.machines"),
    ("common.config",),
    ("common.learning", "common.spot.policies", "common.spot.traces"),
    ("common.spot.provisioning",),
    ("common.wire", "common.telemetry", "common.http", "common.simulation", "common.spot.market"),
    ("common.notices", "common.spot.experiments", "common.spot.plans"),
    (
        *("common.kafka", "common.redis", "common.tracking"),
        *("common.testing", "common.spot.fleets"),
    ),
    ("common.collectives", "common.storage"),
    ("common.jobs",),
    ("common.api", "common.runtime"),
    ("common.embedded",),
    ("common.spot.api", "common.spot.connect", "common.spot.planning"),
    (
        *("services.worker", "services.coordinator", "services.provisioner", "services.evaluator"),
        *("services.admin", "services.cli", "services.serve"),
    ),
    ("load",),
    ("tests",),
)
# Files outside `common/spot` and its service that import it.
THROUGH_THE_WALL = (
    "common.telemetry.metrics.provisioner",
    # Routes, views and commands about machines, plans and simulations.
    *("services.admin.live.answers", "services.admin.live.followers"),
    *("services.admin.pricing", "services.admin.routes.provisioning", "services.admin.service"),
    "services.admin.simulating",
    *("services.cli.commands.plan", "services.cli.commands.simulate", "services.cli.commands.up"),
    "services.cli.demo.run",
    *("services.cli.commands.provisioning", "services.cli.system.api"),
)
# Number of our files that a process imports, including lazy and type-only imports.
CLOSURES = {
    "services.admin.__main__": 177,
    "services.cli.__main__": 194,
    "services.coordinator.__main__": 133,
    "services.evaluator.__main__": 118,
    "services.provisioner.__main__": 138,
    "services.serve.__main__": 106,
    "services.worker.__main__": 68,
    # Processes that the others start.
    "common.jobs.export": 32,
    "common.jobs.task_check": 39,
    "common.spot.planning.simulation_process": 112,
    "services.worker.job_process": 124,
    "services.cli.demo.tested_model": 86,
}
CORE_LIBRARIES = {"msgspec", "numpy"}
THEORY_LIBRARIES = {"numpy", "scipy"}
# Modules of the standard library for clocks, random numbers and the machine.
OUTSIDE = {
    *("asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "random", "secrets"),
    *("signal", "socket", "subprocess", "sys", "threading", "time", "urllib", "uuid"),
}
DECODERS = "common/data/decoders.py"
HOMES = {  # a client library has one home
    "confluent_kafka": ("common/kafka/", "common/embedded/"),
    "redis": ("common/redis/", "common/embedded/redis.py"),
    "aws_msk_iam_sasl_signer": ("common/kafka/opening.py",),
    "boto3": (
        *("common/storage/s3.py", "common/spot/fleets/ec2/", "common/kafka/opening.py"),
        # Reads which S3 server the environment names.
        "services/cli/commands/parquet.py",
    ),
    "fastapi": ("services/admin/",),
    "uvicorn": ("common/runtime/connections.py", "common/runtime/http_server.py"),
    "psutil": ("common/spot/fleets/local/table.py",),
    "httpx2": (
        *("common/http/", "common/kafka/registry.py", "common/tracking/mlflow.py"),
        *("common/public/doll/", "services/admin/oidc.py", "services/cli/system/"),
    ),
    "pyarrow": ("services/cli/commands/parquet.py",),
    "pynvml": ("common/learning/gpus.py",),
    "plotly": ("services/admin/",),
    "prometheus_client": ("common/telemetry/metrics/",),
    "river": ("services/evaluator/drift.py",),
    "opentelemetry": ("common/telemetry/otlp.py",),
    "requests": ("common/telemetry/otlp.py",),
    "torch": (
        *("common/learning/", "common/testing/", "services/worker/", "services/coordinator/"),
        "common/collectives/",
        *("services/evaluator/", "services/serve/", "common/spot/experiments/learning.py"),
    ),
    "scipy": (
        "common/spot/theory/",
        "common/spot/policies/",
        "common/spot/experiments/results.py",
    ),
    "structlog": ("common/telemetry/logging.py",),
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
    name = named(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name.removeprefix("common.public.")


@cache
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


def folder(name: str) -> str:
    if within(name, "common.spot"):
        return ".".join(name.split(".")[:3])
    return ".".join(name.split(".")[: 2 if within(name, "common", "services") else 1])


def graph(*trees: str) -> dict[str, set[str]]:
    """Return our files that each of our files imports."""
    paths = {module(path): path for path in sources(*trees)}
    return {
        name: {
            ours
            for found in imports(path)
            for ours in (found, found.rpartition(".")[0])
            if ours in paths and ours not in (name, "common", "services")  # roots have no floor
        }
        for name, path in paths.items()
    }


def closure(process: str) -> set[str]:
    """Return our files that a process imports."""
    arrows, found, new = graph("common", "services"), set[str](), {process}
    while new:
        found |= new
        new = {ours for name in new for ours in arrows[name]} - found
    return found


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Return the files of a cycle. Empty if there is none."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []


def upward(arrows: dict[str, set[str]]) -> list[str]:
    """Return imports from a folder to another that is not on a lower floor."""
    floors = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    return [
        f"{name} imports {ours}"
        for name, found in arrows.items()
        for ours in sorted(found)
        if folder(name) != folder(ours) and floors[folder(ours)] >= floors[folder(name)]
    ]


def test_folder_imports_only_folders_of_lower_floors() -> None:
    assert upward(graph(*TREES)) == []


def test_every_folder_has_a_floor_and_every_floor_its_folders() -> None:
    found = {folder(module(path)) for path in sources(*TREES)}
    found -= {"common", "common.spot", "services"}
    assert found == {name for floor in FLOORS for name in floor}


def test_contributing_guide_describes_each_folder() -> None:
    folders = set(re.findall("`([a-z_/]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    ours = {path.parent for tree in ("common", "services") for path in (ROOT / tree).glob("*/*.py")}
    assert [
        folder
        for folder in sorted(map(named, ours))
        if not any(name == folder or name.startswith(f"{folder}/") for name in folders)
    ] == []


def test_every_file_of_a_walk_exists() -> None:
    walks = (ROOT / "CONTRIBUTING.md").read_text().partition("## Seven walks")[2]
    named_files = set(re.findall(r"`([a-z_]+/[a-z_0-9/]+\.[a-z]+)`", walks))
    assert len(named_files) > 40
    assert [name for name in sorted(named_files) if not (ROOT / name).exists()] == []


def test_only_listed_files_outside_common_spot_import_it() -> None:
    """Training can be understood without `common/spot`. Unused exceptions must be removed."""
    free = ("common.spot", "services.provisioner", "load", "tests")
    found = {
        name
        for name, ours in graph("common", "services").items()
        if not within(name, *free) and any(within(each, "common.spot") for each in ours)
    }
    assert found == set(THROUGH_THE_WALL)


@pytest.mark.parametrize("process", CLOSURES)
def test_process_imports_no_more_of_our_files_than_before(process: str) -> None:
    """Lower the number in `CLOSURES` after a change that makes a process import fewer files."""
    assert len(closure(process)) <= CLOSURES[process]


def test_files_do_not_import_each_other_in_a_circle() -> None:
    assert circles(graph(*TREES)) == []


def test_import_circle_and_upward_import_are_detected() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert upward({"common.core.book": {"common.errors", "common.wire.messages"}}) == [
        "common.core.book imports common.errors",
        "common.core.book imports common.wire.messages",
    ]


def test_core_imports_only_numeric_and_message_libraries() -> None:
    for path in sources("common/core"):
        tops = {name.partition(".")[0] for name in imports(path)} - {"common"}
        foreign = tops - sys.stdlib_module_names - CORE_LIBRARIES
        assert not foreign | (tops & OUTSIDE), f"{named(path)} imports {foreign | tops & OUTSIDE}"


def test_theory_imports_only_numeric_libraries() -> None:
    for path in sources("common/spot/theory"):
        tops = {name.partition(".")[0] for name in imports(path)} - {"common"}
        foreign = tops - sys.stdlib_module_names - THEORY_LIBRARIES
        assert not foreign | (tops & OUTSIDE), f"{named(path)} imports {foreign | tops & OUTSIDE}"


def test_fleets_never_import_each_other() -> None:
    for path in sources("common/spot/fleets"):
        kind = Path(named(path)).relative_to("common/spot/fleets").parts[0].removesuffix(".py")
        for name in imports(path):
            if within(name, "common.spot.fleets"):
                found = name.removeprefix("common.spot.fleets.").partition(".")[0]
                assert found == kind, f"{named(path)} imports {name}"


@pytest.mark.parametrize("library", HOMES)
def test_client_library_is_imported_in_one_folder(library: str) -> None:
    for path in sources("common", "services"):
        home = named(path).startswith(HOMES[library])
        assert home or not any(within(n, library) for n in imports(path)), named(path)


def test_every_file_begins_with_a_docstring() -> None:
    for path in sources(*TREES):
        text = path.read_text()
        assert not text or text.startswith('"""'), f"{named(path)} does not begin with a docstring"


def test_repository_names_no_machine_and_no_registry() -> None:
    others: list[str | Path] = ["Makefile", ".ci/run", "pyproject.toml", "constraints.txt"]
    others += [*ROOT.glob("*.md"), *(ROOT / "deploy").glob("*/pom.xml")]
    others += [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    for path in (*sources(*TREES), *(ROOT / other for other in others)):
        text = path.read_text(errors="replace")  # plots are among them
        assert not [secret for secret in SECRETS if secret in text], path


def test_importing_a_module_starts_nothing() -> None:
    modules = [module(path) for path in sources("common", "services")]

    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-B", "-c", PEEK, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert answer.stdout.split("\n")[0] == "[] 1"


def test_protocol_modules_do_not_import_torch() -> None:
    paths = sources(
        "common/core", "common/kafka", "common/redis", "common/telemetry", "common/notices"
    )

    assert not loads_torch(*[module(path) for path in paths])


def test_worker_learns_of_its_job_before_it_loads_torch() -> None:
    assert not loads_torch("services.worker.__main__")


def loads_torch(*modules: str) -> bool:
    """Return True if these modules load PyTorch."""
    peek = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", peek], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip() == "True"


def unsafe_decoding(source: str) -> list[int]:
    """Find the lines at which a decoder of a type is built after the module's import.

    msgspec completes its description of a Struct at the type's first use, and the process crashes
    if two threads do that at once. So each decoder is built while its module is imported, and what
    is only known at run time passes through `common/data/decoders.py`.
    """
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and within(node.module or "", "msgspec")
        for alias in node.names
    } | {
        alias.asname or "msgspec": alias.name if alias.asname else "msgspec"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if within(alias.name, "msgspec")
    }

    def meant(node: ast.AST) -> str:
        """Return the function of msgspec that an expression names, or nothing."""
        if isinstance(node, ast.Subscript):
            return meant(node.value)
        first, *others = ast.unparse(node).split(".") if isinstance(node, ast.expr) else [""]
        known = ".".join((names[first], *others)) if first in names else ""
        return known.rpartition(".")[2]

    def look(node: ast.AST, *, inside: bool) -> Iterator[int]:
        if isinstance(node, ast.Call):
            called = [meant(each) for each in (node.func, *node.args)]
            typed = any(each.arg in ("type", None) for each in node.keywords)
            if (
                "convert" in called
                or ("decode" in called and typed)
                or ("Decoder" in called and inside and ast.unparse(node.func) != "isinstance")
            ):
                yield node.lineno
        inside |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from look(child, inside=inside)

    return sorted(set(look(tree, inside=False)))


def test_decoders_of_types_are_built_at_import() -> None:
    paths = [path for path in sources("common", "services", "load") if named(path) != DECODERS]
    assert [
        f"{named(path)}:{line}" for path in paths for line in unsafe_decoding(path.read_text())
    ] == []


@pytest.mark.parametrize(
    "text",
    [
        "def read(data): return msgspec.json.decode(data, type=Job)",
        "def read(data): return msgspec.msgpack.Decoder(Job).decode(data)",
        "def read(data): return msgspec.json.Decoder[Job](Job).decode(data)",
        "def read(data): return convert(data, Job)",
        "def read(data): return as_job(data, Job)",
        "def read(data): return msgspec.yaml.decode(data, **options)",
        "async def read(data): return read_json(data, type=Job)",
        "class Reader:\n def read(self, data): return msgspec.convert(data, Job)",
        "read = lambda data: msgspec.json.decode(data, type=Job)",
        "read = partial(msgspec.json.decode, type=Job)",
        "read = partial(json_of.decode, type=Job)",
        "def readers(kinds): return map(msgspec.json.Decoder, kinds)",
        "def read(data): return json.Decoder(Job).decode(data)",
        "import msgspec.yaml\ndef read(data): return msgspec.yaml.decode(data, type=Job)",
    ],
)
def test_decoder_built_at_run_time_is_detected(text: str) -> None:
    imported = (
        "import msgspec\nimport msgspec.json as json_of\nfrom msgspec import convert, json\n"
        "from msgspec import convert as as_job\nfrom msgspec.json import decode as read_json\n"
    )
    assert unsafe_decoding(imported + text) == [imported.count("\n") + text.count("\n") + 1]


@pytest.mark.parametrize(
    "text",
    [
        "JOB = msgspec.json.Decoder(Job)",
        "def read(data): return JOB.decode(data)",
        "def read(data): return msgspec.json.decode(data)",
        "def read(data, decoder: msgspec.json.Decoder[Job]): return decoder.decode(data)",
        "def is_json(decoder): return isinstance(decoder, msgspec.json.Decoder)",
        "def read(image): return image.convert('RGB')",
    ],
)
def test_safe_ways_to_decode_are_not_reported(text: str) -> None:
    assert unsafe_decoding("import msgspec\n" + text) == []


if __name__ == "__main__":
    for process, most in CLOSURES.items():
        print(f"{process} imports {len(closure(process))} files of ours, at most {most}")  # noqa: T201 -- for `make lint`
