"""Let tests that only depend on some files wait until one of these files changes.

TEST_SINCE names a commit. Without it, or without git, every file counts as changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
_Test = TypeVar("_Test", bound="Callable[..., object]")


def has_changed(*paths: str) -> bool:
    """Return True if a file below these paths, or a dependency, changed since TEST_SINCE."""
    changed = changed_files()
    return changed is None or any(path.startswith((*paths, "constraints.txt")) for path in changed)


def once_changed(*paths: str) -> Callable[[_Test], _Test]:
    """Return marks that defer a test to the night unless a file below these paths changed."""
    if has_changed(*paths):
        return lambda test: test
    return pytest.mark.nightly


def marks_of(*paths: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the same marks for one parameter of a test."""
    return () if has_changed(*paths) else (pytest.mark.nightly,)


def changed_files() -> frozenset[str] | None:
    """Return the files that changed since TEST_SINCE. None if git cannot say."""
    return _changed(os.environ.get("TEST_SINCE", ""))


@cache
def _changed(since: str) -> frozenset[str] | None:
    git = shutil.which("git")
    if not since or git is None:
        return None
    found = subprocess.run(  # noqa: S603 -- our own command line
        [git, "diff", "--name-only", since],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return None if found.returncode != 0 else frozenset(found.stdout.splitlines())
