"""The device on which a process computes: which one, why, and what it is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from common.core.liveness import Device
from common.errors import UserError
from common.learning.errors import one_line
from common.learning.gpus import NvmlError, NvmlMissingError, TorchBuild, read_gpus, refusal
from common.learning.host import memory_bytes, processor_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.learning.gpus import Nvml

_RESIDENT = Path("/proc/self/statm")
CPU = torch.device("cpu")
# Reasons that this process has reported.
_reported = set[str]()


def resolve_device(
    name: Literal["auto", "cpu", "cuda"],
    warn: Callable[..., object],
    nvml: Nvml | None = None,
) -> torch.device:
    """Convert a setting to a device. "auto" is the GPU if there is one.

    Args:
        name: The setting.
        warn: Logs an event with its `reason` if "auto" cannot use a GPU of this machine. It is
            called once for each reason in a process.
        nvml: See `read_gpus`.

    Raises:
        UserError: If "cuda" is required, and no GPU can be used.
    """
    if name == "cpu":
        return CPU
    has_gpu, reason = _usable_gpu(nvml)
    if has_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise UserError(
            "DOLL_DEVICE, or DOLL_GPUS of a worker: requires a GPU, but PyTorch cannot use one"
            f" ({reason or 'this machine has none'}); repair it or do not require it"
        )
    if reason and reason not in _reported:
        _reported.add(reason)
        warn("gpu_unusable", reason=reason)
    return CPU


def _usable_gpu(nvml: Nvml | None) -> tuple[bool, str]:
    """Return True if PyTorch can use a GPU; otherwise also why not, or "" if there is none."""
    build = torch_build()
    if torch.cuda.is_available():
        return _gpu_of_torch(build)
    # A person has hidden all GPUs.
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False, ""
    try:
        inventory = read_gpus(nvml)
    except NvmlMissingError:
        return False, ""
    except NvmlError as error:
        return False, str(error)
    if not inventory.gpus:
        return False, ""
    faults = [
        gpu.fault or refusal(gpu.parts[0].capability, build, inventory) for gpu in inventory.gpus
    ]
    return False, faults[0] if all(faults) else _cuda_error()


def _gpu_of_torch(build: TorchBuild) -> tuple[bool, str]:
    """Return True if PyTorch can use the GPU that it sees; also why not."""
    try:
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
    except RuntimeError as error:
        return False, one_line(error)
    reason = refusal(f"{found.major}.{found.minor}", build)
    return not reason, f"{found.name}: {reason}"


def _cuda_error() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's
    # torch raises errors of several types.
    except Exception as error:  # noqa: BLE001
        return one_line(error)
    return "PyTorch finds no GPU"


def torch_build() -> TorchBuild:
    """Return which GPUs the installed PyTorch supports."""
    return TorchBuild(torch.cuda.get_arch_list(), torch.version.cuda)


def device_of(device: torch.device) -> Device:
    """Return the properties of a device. It may be slow."""
    if device.type == "cpu":
        return Device("cpu", processor_name(), memory_bytes())
    found, driver = torch.cuda.get_device_properties(device), ""
    with suppress(NvmlMissingError, NvmlError):
        driver = read_gpus().driver
    capability = f"{found.major}.{found.minor}"
    return Device("cuda", found.name, found.total_memory, driver, capability)


def used_bytes(device: torch.device) -> float:
    """Return the used memory of a GPU, or the resident memory of this process. NaN if unknown."""
    try:
        if device.type == "cpu":
            return int(_RESIDENT.read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
        free, total = torch.cuda.mem_get_info(device)
    except (OSError, RuntimeError):
        return float("nan")
    return float(total - free)
