"""The GPU benchmark on the CPU, in small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0


@pytest.mark.timeout(PATIENCE_S + 30)
def test_benchmark_without_a_gpu_trains_all_records_and_names_what_it_cannot_measure(
    tmp_path: Path,
) -> None:
    result = tmp_path / "gpu.json"
    parts = [word for name in ("training", "copies", "faults") for word in ("--only", name)]
    sizes = ["--models", "cnn", "--seconds", "0.5", "--pass-records", "64"]
    ended = subprocess.run(  # noqa: S603 -- our own interpreter and program
        [sys.executable, "-m", "load.gpu", *parts, *sizes, "--json", str(result)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(result.read_text())
    assert found["failed"] == []
    [training] = found["training"]
    assert (training["model"], training["precision"]) == ("cnn", "bfloat16")
    assert training["pass_records"] == 64
    assert training["flaws"] == []
    assert min(training["consumer"], *training["ours"], *training["loop"]) > 0
    assert "copies: not measured: no GPU" in ended.stdout
    assert "faults: skipped: no GPU" in ended.stdout
