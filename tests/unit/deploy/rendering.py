"""Renders the chart with the real helm, if it is installed.

`make .tools/helm` puts a pinned version into `.tools`, which precedes PATH. Without helm, tests are
skipped. With TEST_REQUIRE_SERVERS=1 and an installed Go they fail instead, unless
TEST_WITHOUT_HELM=1: CI sets that if none of the files that they test has changed.
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
CHART = ROOT / "deploy/helm/doll"
MARKET = ROOT / "deploy/ec2/market.yaml"
FILES = sorted(path.stem.removeprefix("values-") for path in CHART.glob("values-*.yaml"))

# A manifest of Kubernetes. Its schemas validate it.
Manifest = dict[str, Any]


@cache
def made(*names: str) -> tuple[Manifest, ...]:
    """Return all objects of the chart, with its default values or with some of its values files."""
    options = [option for name in names for option in ("-f", str(CHART / f"values-{name}.yaml"))]
    if "ec2" in names:
        options += ["--set-file", f"provisioner.market={MARKET}"]
    return chart(*options)


def chart(*options: str, path: Path = CHART) -> tuple[Manifest, ...]:
    """Return all objects of the chart, with options of `helm template`."""
    where = (str(path), "--namespace", "doll", "--kube-version", "1.37")
    rendered = helm("template", "doll", *where, *options).stdout
    return tuple(each for each in yaml.safe_load_all(rendered) if each)


def helm(*arguments: str, refused: bool = False) -> subprocess.CompletedProcess[str]:
    """Run helm, and return its result. Skip or fail the test if helm is missing."""
    program = shutil.which(
        "helm", path=f"{ROOT / '.tools'}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if program is None:
        reason = "there is no helm here: `make .tools/helm` builds it (it needs Go)"
        excused = os.environ.get("TEST_WITHOUT_HELM") == "1" or not shutil.which("go")
        if os.environ.get("TEST_REQUIRE_SERVERS") == "1" and not excused:
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(  # noqa: S603 -- our own files, no shell
        [program, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == refused, done.stderr
    return done


def of_kind(objects: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    """Return the objects of some kinds."""
    return [each for each in objects if each["kind"] in kinds]


def pods(objects: tuple[Manifest, ...]) -> dict[str, Manifest]:
    """Return the pod template of each workload, by the workload's name."""
    workloads = of_kind(objects, "Deployment", "StatefulSet")
    return {each["metadata"]["name"]: each["spec"]["template"] for each in workloads}


def name_of(each: Manifest) -> str:
    """Return kind and name."""
    return f"{each['kind']}/{each['metadata']['name']}"
