"""Runs the tests that compute with floats under each kernel that a processor may choose.

    python -m tests.kernels [OPTION OF PYTEST ...]

BLAS, MKL, oneDNN, torch and numpy choose their code by the processor, and each kernel adds in its
own order. So a test that passes here may fail on another processor: `make numerics`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
# Folders of tests/unit whose subjects compute, and words that mark such tests elsewhere.
_FOLDERS = {"checkpoints", "core", "datasets", "learning", "planning", "policies", "provisioning"}
_FOLDERS |= {"serve", "services", "simulation", "theory", "wire"}
_WORDS = ("numpy", "torch", "approx", "isclose")


class Kernel(NamedTuple):
    """A variable that makes a library choose the code of another processor."""

    variable: str
    value: str
    # Group of CPU instructions that the code needs, in numpy's spelling. Empty if it needs none.
    needs: str = ""


def kernels(has: frozenset[str]) -> list[Kernel]:
    """Return the kernels that a processor with these groups of instructions can run.

    Args:
        has: Groups in numpy's spelling. numpy itself runs without the optional ones.
    """
    every = [
        Kernel("OPENBLAS_CORETYPE", "Prescott"),
        Kernel("OPENBLAS_CORETYPE", "Haswell", "X86_V3"),
        Kernel("OPENBLAS_CORETYPE", "SkylakeX", "X86_V4"),
        Kernel("ATEN_CPU_CAPABILITY", "default"),
        Kernel("MKL_CBWR", "COMPATIBLE"),
        Kernel("ONEDNN_MAX_CPU_ISA", "SSE41"),
    ]
    plain = Kernel("NPY_DISABLE_CPU_FEATURES", " ".join(sorted(has)))
    return [each for each in every if not each.needs or each.needs in has] + [plain] * bool(has)


def computing_tests() -> list[str]:
    """Return the test files that compute with floats."""
    unit = ROOT / "tests/unit"
    return sorted(
        str(path.relative_to(ROOT))
        for path in unit.rglob("test_*.py")
        if path.relative_to(unit).parts[0] in _FOLDERS
        or any(word in path.read_text() for word in _WORDS)
    )


def main() -> int:
    """Run the tests under each kernel. Returns 1 if any failed."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", ())
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not nightly", *sys.argv[1:]]
    failed = []
    for kernel in kernels(frozenset(found)):
        name = f"{kernel.variable}={kernel.value}"
        sys.stdout.write(f"--- {name}\n")
        sys.stdout.flush()
        # CI=1: each property tries the same few examples each time.
        environment = {**os.environ, "CI": "1", kernel.variable: kernel.value}
        command = [*tests, *computing_tests()]
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:  # noqa: S603 -- ours
            failed.append(name)
    sys.stdout.write(f"--- failed under: {', '.join(failed) or 'none'}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
