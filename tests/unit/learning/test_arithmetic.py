"""Flags of torch, and compilation of a job's module."""

from __future__ import annotations

import shutil
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.backends import cuda, cudnn
from torch.utils import deterministic as fills

from common.data.fields import Field
from common.errors import UserError
from common.learning.arithmetic import Arithmetic, Precision, need_compiler
from common.learning.gradients import GradientComputer
from tests.ulps import assert_within_ulps
from tests.unit.learning.examples import Regression, points

FILLS: Any = fills
NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def flags() -> list[object]:
    return [
        cuda.matmul.allow_tf32,
        cudnn.allow_tf32,
        cudnn.deterministic,
        cudnn.benchmark,
        torch.get_deterministic_debug_mode(),
        FILLS.fill_uninitialized_memory,
    ]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_flags_of_a_gpu_are_set_and_restored(precision: Precision, deterministic: bool) -> None:  # noqa: FBT001 -- a case of a test
    before, is_tf32 = flags(), precision == "tf32"
    for _ in range(2):
        with Arithmetic(precision, deterministic).applied(GPU):
            expected = [is_tf32, is_tf32, deterministic, False, 2 * deterministic, False]
            assert flags() == expected
        assert flags() == before


@pytest.mark.parametrize(("deterministic", "mode"), [(None, 2), (True, 2), (False, 0)])
def test_cpu_is_deterministic_by_default_and_keeps_flags_of_a_gpu(
    deterministic: bool | None,  # noqa: FBT001 -- a case of a test
    mode: int,
) -> None:
    before = flags()
    with (
        pytest.raises(RuntimeError, match="deterministic") if mode else nullcontext(),
        Arithmetic("tf32", deterministic).applied(CPU),
    ):
        assert flags() == [*before[:4], mode, False]
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    assert flags() == before


def test_gpu_is_not_deterministic_by_default() -> None:
    with Arithmetic().applied(GPU):
        assert not cudnn.deterministic


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match=r"compile: torch needs a C\+\+ compiler .* lacks"):
        need_compiler(CPU)
    with pytest.raises(UserError, match=r"needs (Triton|a C compiler \(gcc or clang\))"):
        need_compiler(GPU)
    monkeypatch.setenv("CXX", sys.executable)
    need_compiler(CPU)
    monkeypatch.setattr("common.learning.arithmetic.find_spec", lambda _: None)
    with pytest.raises(UserError, match="torch needs Triton"):
        need_compiler(GPU)


def compiled(network: nn.Module) -> GradientComputer:
    subject = GradientComputer(Regression(network), network, CPU, pass_records=8)
    subject.compile([Field("x", "float32", (3,)), Field("y", "float32")], 4, 3)
    return subject


@NEEDS_COMPILER
def test_compiled_module_gives_the_same_gradient_and_no_later_pass_compiles() -> None:
    from torch._dynamo.utils import counters  # noqa: PLC0415 -- it takes seconds

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    weights = {name: each.clone() for name, each in network.state_dict().items()}
    subject = compiled(network)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    plain.load_state_dict(weights)
    expected = GradientComputer(Regression(plain), plain, CPU, pass_records=8)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for sizes in ((4, 4), (4, 3), (7,), (4, 4, 4)):
        batches = [points(seed, size) for seed, size in enumerate(sizes)]
        found = subject.compute(batches)
        assert_within_ulps(found.vector, expected.compute(batches).vector, 64)
    assert counters["stats"]["unique_graphs"] == graphs
    assert np.array_equal(found.vector, subject.compute(batches).vector)


@NEEDS_COMPILER
def test_module_that_torch_cannot_compile_is_refused_with_the_reason() -> None:

    class Unknown(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.cond(
                inputs.sum() > 0, lambda x: x, lambda x: x[:1], (inputs,)
            )
            return found

    with pytest.raises(UserError, match="compile: torch cannot compile the module"):
        compiled(Unknown(3, 1))
