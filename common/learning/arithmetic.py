"""Precision and reproducibility of torch's arithmetic, and the compilers that torch needs."""

from __future__ import annotations

import os
import shutil
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
# Torch's stubs lack its flag.
_FILLS: Any = fills
# C++ compilers that torch looks for, if the environment variable CXX names none.
_COMPILERS = ("g++", "clang++")


class Arithmetic(NamedTuple):
    """Precision of gradients, and reproducibility of their bits.

    Attributes:
        precision: `tf32` permits a GPU to round inputs of products and convolutions to 10 bits.
            With `bfloat16`, the forward pass uses it where torch considers it safe.
        deterministic: True if equal inputs must give equal bits. Operations that cannot do so then
            raise a `RuntimeError` that names them. If None, true on a CPU.
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
        # Filling new memory would only show errors of the task, and takes time.
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
        """Return a context in which a forward pass has this precision."""
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
    """Check that `torch.compile` can make programs for a device.

    Raises:
        UserError: If Triton (for a GPU) or a C++ compiler (for the CPU) is missing.
    """
    if device.type == "cuda":
        missing = "Triton" if find_spec("triton") is None else ""
    else:
        found = filter(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))
        missing = "" if any(found) else "a C++ compiler (g++ or clang++)"
    if missing:
        raise UserError(
            f"compile: torch needs {missing}, which this machine lacks; install it or set"
            " `compile: false`"
        )
