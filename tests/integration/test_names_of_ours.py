"""Installed programs start although a user has folders named `common` and `services`."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.changes import marks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
START = """
import sys
from importlib import import_module
module, _, function = {entry!r}.partition(":")
sys.exit(getattr(import_module(module), function)())
"""
OURS = ["common", "services"]
CHILD = """
import sys, time
from doll.distribution import load
load("services")
from pathlib import Path
from common.config.settings import Settings
from common.embedded.services import EmbeddedService
child = EmbeddedService("provisioner", "p1", Settings(), Path(sys.argv[1]))
while child.exit_code is None:
    time.sleep(0.01)
print(child.last_words())
"""
FIND = """
import services
from common.learning.tasks import make_task
make_task("shop:Task", {}, ["shop:Task"])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment with our packages installed from a wheel, not from a checkout."""
    root = tmp_path_factory.mktemp("installed")
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python3.*/site-packages")
    for package in ("common", "services", "common/public/doll"):  # compiled, as pip leaves them
        left_out = shutil.ignore_patterns("public")
        shutil.copytree(ROOT / package, site / Path(package).name, ignore=left_out)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (entry,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    (root / "bin/doll").write_text(START.format(entry=entry))  # has the effect of pip's script
    return root / "bin"


# If no file that sets the search path changed, only one of the two places is tested.
ONCE = marks_of(
    *("common/config/program", "common/embedded/", "common/public/", "services/cli/__main__"),
    "tests/integration/test_names_of_ours.py",
)


@pytest.fixture(
    params=[
        "in the working directory",
        pytest.param("on PYTHONPATH", marks=ONCE),
    ]
)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def said(command: Sequence[object], place: str, folder: Path, packages: Sequence[str]) -> str:
    """Return a command's output on a machine where a user has packages of these names."""
    for package in packages:
        (folder / "of_a_user" / package).mkdir(parents=True)
        (folder / "of_a_user" / package / "__init__.py").write_text("raise SystemExit('theirs')")
    users, environment = folder / "of_a_user", {"PATH": "/usr/bin:/bin", "TERM": "dumb"}
    if place == "on PYTHONPATH":
        environment["PYTHONPATH"] = str(users)
    done = subprocess.run(  # noqa: S603 -- our own command line
        [*map(str, command)],
        cwd=users if place == "in the working directory" else folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_module_finds_our_common_package(installed: Path, place: str, tmp_path: Path) -> None:
    module = [installed / "python", "-m", "services.provisioner", "--help"]
    assert "rents machines from the market" in said(module, place, tmp_path, ["common"])


def test_command_finds_all_our_packages(installed: Path, place: str, tmp_path: Path) -> None:
    command = [installed / "python", installed / "doll", "--help"]
    assert "Train PyTorch models" in said(command, place, tmp_path, OURS)


def test_user_import_of_doll_finds_our_common_package(
    installed: Path, place: str, tmp_path: Path
) -> None:
    asks = "import doll; print(doll.JobSpec.__name__)"
    assert said([installed / "python", "-c", asks], place, tmp_path, OURS) == "JobSpec\n"


def test_user_package_imported_before_ours_is_named(
    installed: Path, place: str, tmp_path: Path
) -> None:
    (tmp_path / "of_a_user").mkdir()
    (tmp_path / "of_a_user/common.py").touch()
    asks = "import common, doll; doll.JobSpec"
    (*_, last) = said([installed / "python", "-c", asks], place, tmp_path, []).splitlines()
    assert last.startswith("ImportError: doll.JobSpec: 'common' is a package of DOLL, but ")
    assert last.endswith("of_a_user/common.py was imported under that name; rename your package")


def test_services_started_by_the_command_find_all_our_packages(
    installed: Path, place: str, tmp_path: Path
) -> None:
    becomes = [installed / "python", installed / "doll", "provisioner", "--help"]
    assert "rents machines from the market" in said(becomes, place, tmp_path / "becomes", OURS)
    (tmp_path / "logs").mkdir()
    starts = [installed / "python", "-P", "-c", CHILD, tmp_path / "logs"]
    output = said(starts, place, tmp_path / "starts", OURS)
    assert "provisioner: DOLL_MARKET: must be set" in output


def test_task_beside_a_user_package_named_common_is_found(
    installed: Path, place: str, tmp_path: Path
) -> None:
    (tmp_path / "of_a_user").mkdir()
    (tmp_path / "of_a_user/shop.py").write_text("from common.prices import price")
    (*_, last) = said([installed / "python", "-c", FIND], place, tmp_path, ["common"]).splitlines()
    assert last == (
        "common.errors.TaskMissingError: task 'shop:Task' cannot be imported here:"
        " ModuleNotFoundError: No module named 'common.prices';"
        " 'common' is also a package of DOLL, so rename yours"
    )
