"""Precision and reproducibility of torch's arithmetic, and the compilers that torch needs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch.backends import cuda, cudnn
from torch.utils import deterministic as fills

from common.errors import UserError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]
# Torch's stubs lack the flag `fill_uninitialized_memory` of this module.
_FILLS: Any = fills


class Arithmetic(NamedTuple):
    """Precision of gradients, and reproducibility of their bits.

    Attributes:
        precision: With `tf32`, a GPU may round the inputs of matrix products and convolutions to a
            mantissa of 10 bits. With `bfloat16`, the forward pass runs under `torch.autocast`.
        deterministic: True if equal inputs must give equal bits on the same device. An operation
            for which torch has no such implementation then raises a `RuntimeError` that names it.
            If None, true on a CPU and false on a GPU.
    """

    precision: Precision = "float32"
    deterministic: bool | None = None

    @contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """Set torch's flags for computations on a device, and restore them at the end.

        The flags are those of the process, so one thread at a time may compute.
        """
        chosen = self.deterministic
        deterministic = device.type == "cpu" if chosen is None else chosen
        mode, fill = torch.get_deterministic_debug_mode(), _FILLS.fill_uninitialized_memory
        torch.set_deterministic_debug_mode("error" if deterministic else "default")
        # Filling new memory takes time, and matters only to a task that reads it before writing it.
        _FILLS.fill_uninitialized_memory = False
        try:
            if device.type == "cuda":
                with _gpu_flags(self.precision, deterministic=deterministic):
                    yield
            else:
                yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            _FILLS.fill_uninitialized_memory = fill

    def forward(self, device: torch.device) -> AbstractContextManager[Any, Any]:
        """Return the context of a forward pass, in addition to `applied`."""
        if self.precision == "bfloat16":
            return torch.autocast(device.type, torch.bfloat16)
        return nullcontext()


DEFAULT = Arithmetic()


@contextmanager
def _gpu_flags(precision: Precision, *, deterministic: bool) -> Iterator[None]:
    is_tf32 = precision == "tf32"
    flags: list[tuple[Any, str, bool]] = [
        (cuda.matmul, "allow_tf32", is_tf32),
        (cudnn, "allow_tf32", is_tf32),
        (cudnn, "deterministic", deterministic),
        # A benchmark of cuDNN's algorithms may select another one in each process.
        (cudnn, "benchmark", False),
    ]
    before = [getattr(owner, name) for owner, name, _ in flags]
    try:
        for owner, name, value in flags:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(flags, before, strict=True):
            setattr(owner, name, value)


def need_compiler(device: torch.device) -> None:
    """Check that the compilers which `torch.compile` uses for a device are installed.

    Raises:
        UserError: If Triton or a C compiler is missing for a GPU, or a C++ compiler for the CPU.
    """
    if device.type == "cuda":
        # Triton has the same rule.
        names, missing = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"], "C"
    else:
        # Torch has the same rule.
        default = "clang++" if sys.platform == "darwin" else "g++"
        names, missing = [os.environ.get("CXX", default)], "C++"
    missing = (
        "" if any(map(shutil.which, names)) else f"a {missing} compiler ({' or '.join(names)})"
    )
    if device.type == "cuda" and find_spec("triton") is None:
        missing = "Triton"
    if missing:
        raise UserError(
            f"compile: torch needs {missing}, which this machine lacks; install it or set"
            " `compile: false`"
        )
