"""Run an image's steps from the Dockerfile in a plain directory, without a container engine.

These are all differences to a real build:

- `FROM` an image of Python creates a virtual environment of a Python of this machine. Debian is
  this machine's, too.
- Directories that the steps name below `/` are below the image's directory, and the stages of a
  target share them. Files that the last stages do not copy are deleted before anything starts.
- `RUN useradd` is skipped. The process gets the user id, and a home that does not exist.
- pip may use its cache. PyTorch and its libraries, which take gigabytes, are linked into the image
  from the environment of the tests if it has the pinned version. pip then finds them installed.
- The root file system is not read-only. Instead the process runs as a user that owns nothing and
  can write only to /tmp, as everybody can.
"""

from __future__ import annotations

import os
import re
import shutil
import string
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from tests.dockerfiles import DOCKERFILE, Instruction, chain, needed, read

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = DOCKERFILE.parent.parent
OURS = ("/opt/doll", "/src", "/wheels")  # folders that steps may name
_BASE = "base-python"  # name of the base image
_PATH = re.compile(r"(?<![\w.*:/}$-])/[a-z][\w.-]*(?:/[\w.*-]+)*")
_USER = re.compile(
    r"groupadd --gid (\d+) doll && useradd --uid (\d+) --gid (\d+) --no-create-home"
    r" --home-dir (/nonexistent) doll"
)
_LARGE = re.compile(r"(torch|triton|cuda|nvidia)([-_].*)?")
_FOR_BUILDS = re.compile(r"PIP_\w+|SSL_\w+|\w+_proxy|\w+_PROXY|\w+_CA_BUNDLE|LANG|TMPDIR|HOME")


@dataclass
class PlainImage:
    """A built target: its files below `root`, and its entry point.

    Args:
        root: An existing empty directory that everybody may enter.
        target: Target of the Dockerfile.
    """

    root: Path
    target: str
    environment: dict[str, str] = field(default_factory=dict)  # ENV of the last stages
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    user: int = 0
    group: int = 0
    stop_signal: str = ""

    def build(self) -> None:
        """Run the steps.

        Raises:
            subprocess.CalledProcessError: If a step fails.
        """
        stages = read(DOCKERFILE.read_text())
        last = chain(stages, self.target)
        interpreter = python_for_everybody() or Path(sys.executable)
        _run([str(interpreter), "-m", "venv", str(self.root / _BASE)], {**os.environ}, self.root)
        for stage in needed(stages, self.target):
            if stage not in last:
                variables, folder = self._variables(), "/"
                for above in chain(stages, stage.name):
                    for step in above.instructions:
                        folder = self._build_step(step, variables, folder, run=above is stage)
        kept = [copy for stage in last for copy in stage.instructions if copy.word == "COPY"]
        self._forget_all_but({path for copy in kept for path in copy.copied()[1]})
        self.environment = {"PATH": os.pathsep.join((str(self.root / _BASE / "bin"), os.defpath))}
        for stage in last:
            for step in stage.instructions:
                self._final_step(step)

    def place(self, text: str) -> str:
        """Replace the image's paths in a text by their places on this machine."""
        for path in _PATH.findall(text):
            assert path.startswith((*OURS, "/dev/")), f"{path}: no directory that this test knows"
        ours = "|".join(OURS)
        return re.sub(rf"(?<![\w.*:/}}$-])({ours})(?![\w-])", rf"{self.root}\1", text)

    @property
    def packages(self) -> Path:
        """Return the folder of the installed packages."""
        (found,) = (self.root / "opt/doll/lib").glob("python3.*/site-packages")
        return found

    def _variables(self) -> dict[str, str]:
        """Return the environment of a step."""
        kept = {name: value for name, value in os.environ.items() if _FOR_BUILDS.fullmatch(name)}
        path = (str(self.root / _BASE / "bin"), os.defpath)
        return kept | {"PATH": os.pathsep.join(path)}

    def _build_step(
        self, step: Instruction, variables: dict[str, str], folder: str, *, run: bool
    ) -> str:
        """Run a step of a stage outside the image. Returns the next working directory."""
        match step.word:
            case "ENV" | "ARG":
                variables |= {n: self._filled(v, variables) for n, v in step.pairs().items()}
                variables.pop("PIP_NO_CACHE_DIR", None)
            case "WORKDIR":
                folder = step.text
                Path(self.place(folder)).mkdir(parents=True, exist_ok=True)
            case "COPY" if run:
                self._copy(step, folder)
            case "RUN" if run:
                if re.search(r"install .* torch$", step.text):
                    self._link_what_is_large()
                _run(["/bin/sh", "-c", self.place(step.text)], variables, self.place(folder))
            case "COPY" | "RUN":
                pass  # the stage above has done it
            case other:
                raise AssertionError(f"{other}: this test does not know how to build with it")
        return folder

    def _final_step(self, step: Instruction) -> None:
        """Run a step of a stage that is part of the image."""
        match step.word:
            case "ENV":
                found = step.pairs().items()
                self.environment |= {n: self._filled(v, self.environment) for n, v in found}
            case "RUN":
                match = _USER.fullmatch(step.text)
                assert match, f"{step.text}: only a user is made here"
                assert match[1] == match[3]
                self.environment["HOME"] = match[4]
            case "USER":
                self.user, self.group = map(int, step.text.split(":"))
            case "ENTRYPOINT":
                self.entrypoint = step.listed()
            case "HEALTHCHECK":
                self.health = step.health()[1]
            case "STOPSIGNAL":
                self.stop_signal = step.text
            case "WORKDIR":
                assert step.text == "/"
            case "COPY":
                _, sources, to = step.copied()
                assert sources == [to]  # it is there already
                assert Path(self.place(to)).exists()
            case "ARG" | "CMD" | "EXPOSE" | "LABEL":
                pass
            case other:
                raise AssertionError(f"{other}: this test does not know what it makes of an image")

    def _copy(self, step: Instruction, folder: str) -> None:
        stage, sources, to = step.copied()
        if stage is not None:
            assert sources == [to]
            assert Path(self.place(to)).exists()
            return
        for source in sources:
            path = Path(self.place(folder)) / to
            if to.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, path, ignore=shutil.ignore_patterns("__pycache__", "*.py[co]")
                )
            else:
                shutil.copy(ROOT / source, path)

    def _filled(self, text: str, variables: Mapping[str, str]) -> str:
        return string.Template(self.place(text)).substitute(variables)

    def _link_what_is_large(self) -> None:
        pins = set((ROOT / "constraints.txt").read_text().splitlines())
        large = [found for found in distributions() if _LARGE.fullmatch(found.name)]
        if any(f"{found.name}=={found.version}" not in pins for found in large):
            # pip would replace our packages because it takes them for the image's own.
            return
        entries = dict[str, Path]()
        for found in large:
            for file in found.files or ():
                if file.parts[0] != "..":
                    entries[file.parts[0]] = Path(str(found.locate_file(file.parts[0])))
        for name, path in entries.items():
            (self.packages / name).symlink_to(path)

    def _forget_all_but(self, kept: set[str]) -> None:
        assert kept == {"/opt/doll"}, f"{kept}: the image is more than this test knows"
        for path in self.root.iterdir():
            if path.name not in ("opt", _BASE):
                shutil.rmtree(path)


def python_for_everybody() -> Path | None:
    """Return a Python of our version that other users may run, and that can create environments."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(os.path.realpath(sys.executable))
    places = (Path("/usr/local/bin"), Path("/usr/bin"))
    for path in (own, *(folder / f"python{version}" for folder in places)):
        real = Path(os.path.realpath(path))
        if real.exists() and may_enter(real):
            found = subprocess.run(  # noqa: S603 -- a Python of this machine
                [real, "-c", "import ensurepip, venv"], capture_output=True, check=False
            )
            if found.returncode == 0:
                return real
    return None


def may_enter(path: Path) -> bool:
    """Return True if everybody may enter the directories above a path and read the path itself."""
    above = all(parent.stat().st_mode & 0o001 for parent in path.parents)
    return above and bool(path.stat().st_mode & 0o004)


def _run(command: list[str], environment: Mapping[str, str], folder: str | Path) -> None:
    done = subprocess.run(  # noqa: S603 -- steps of our own Dockerfile
        command,
        env=dict(environment),
        cwd=folder,
        umask=0o022,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}"
