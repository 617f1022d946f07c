"""The contract of groups, checked by processes that exchange vectors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch

from load.gpus.luggage import ROOT

_MEMBERS = 4
_SUITE = "tests/contract/test_group.py"
_PROBE = "nccl and all_reduce_sums"
_MOST_S = 90.0


def check(result: dict[str, Any]) -> list[str]:
    """Run the contract suite over NCCL if that is possible here, otherwise over gloo.

    In the suite, members share one GPU and pretend to be on different machines. Some versions of
    NCCL refuse that, which is not a fault.

    Returns:
        Descriptions of the failed tests.
    """
    gpus = torch.cuda.device_count()
    refused = _failed(_PROBE, result) if gpus else ["no GPU"]
    if not refused:
        return _failed("nccl", result)
    print(f"groups: not over NCCL: needs {_MEMBERS} GPUs, found {gpus} ({refused[0]})")
    return _failed("gloo", result)


def _failed(tests: str, result: dict[str, Any]) -> list[str]:
    """Run the tests that an expression selects, and return descriptions of those that failed."""
    options = ["-q", "-rf", "--noconftest", "-c", os.devnull, "--rootdir", str(ROOT)]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", "-k", tests]
    try:
        ended = subprocess.run(  # noqa: S603 -- our own command line, no shell
            [sys.executable, "-m", "pytest", *options, _SUITE],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_MOST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"groups, {tests}: did not end within {_MOST_S:g} s"]
    last = ended.stdout.strip().rpartition("\n")[2] or ended.stderr[-500:]
    print(f"groups, {tests}: {last}", flush=True)
    result.setdefault("groups", {})[tests] = last
    failed = [each for each in ended.stdout.splitlines() if each.startswith(("FAILED", "ERROR"))]
    return [f"groups, {tests}: {each}" for each in failed or [last]] if ended.returncode else []
