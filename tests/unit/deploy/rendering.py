"""Renders the overlays and the chart with the real kustomize and helm, where these can be had.

They are looked for in `.tools`, which `make kubernetes-tools` fills with pinned versions, and then
in PATH. Without them tests are skipped; where TEST_REQUIRE_SERVERS=1 and Go is there, they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy/kubernetes"
CHART = ROOT / "deploy/helm/doll"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())

Manifest = dict[str, Any]  # of Kubernetes: its schemas say what is in it, and are asked


@cache
def overlay(name: str) -> tuple[Manifest, ...]:
    """All objects of an overlay."""
    return kustomize(KUBERNETES / "overlays" / name)


def kustomize(folder: Path) -> tuple[Manifest, ...]:
    """All objects that a folder's kustomization makes."""
    return _objects(_run("kustomize", "build", str(folder)).stdout)


def chart(*options: str) -> tuple[Manifest, ...]:
    """All objects of the chart, with options of `helm template`."""
    return _objects(run_helm(*options).stdout)


def run_helm(*options: str, refused: bool = False) -> subprocess.CompletedProcess[str]:
    """What `helm template` says of the chart."""
    where = ("--namespace", "doll", "--kube-version", "1.37")
    return _run("helm", "template", "doll", str(CHART), *where, *options, refused=refused)


def of_kind(objects: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [each for each in objects if each["kind"] in kinds]


def pods(objects: tuple[Manifest, ...]) -> dict[str, Manifest]:
    """The template of each workload's pods, by the workload's name."""
    workloads = of_kind(objects, "Deployment", "StatefulSet")
    return {each["metadata"]["name"]: each["spec"]["template"] for each in workloads}


def name_of(each: Manifest) -> str:
    """Kind and name."""
    return f"{each['kind']}/{each['metadata']['name']}"


def tool(name: str) -> str:
    """Where a program is; skips, or fails, where it is not."""
    found = shutil.which(name, path=f"{ROOT / '.tools'}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        reason = f"there is no {name} here: `make kubernetes-tools` builds it (it needs Go)"
        if os.environ.get("TEST_REQUIRE_SERVERS") == "1" and shutil.which("go"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def _run(name: str, *arguments: str, refused: bool = False) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(  # noqa: S603 -- our own files, no shell
        [tool(name), *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == refused, done.stderr
    return done


def _objects(text: str) -> tuple[Manifest, ...]:
    return tuple(each for each in yaml.safe_load_all(text) if each)
