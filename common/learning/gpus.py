"""The GPUs of this machine, found by NVML: without torch, and without a CUDA context."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The module `pynvml`, or a fake with the functions that are used here.
Nvml: TypeAlias = Any
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)(a?)[a-z]*")


class Gpu(NamedTuple):
    """A GPU, or an instance of a GPU in MIG mode. CUDA sees it alone under its UUID."""

    # `GPU-...`, or `MIG-...` for an instance.
    uuid: str
    name: str
    # 0 if NVML does not know it: the GPU shares the machine's memory.
    memory_bytes: int
    # Version of the driver, such as "580.65.06".
    driver: str
    # CUDA compute capability, such as "8.0".
    capability: str


class PhysicalGpu(NamedTuple):
    """A GPU of the machine and what a process can compute on."""

    uuid: str
    # The GPU itself, or its instances if it is in MIG mode.
    parts: tuple[Gpu, ...]
    # Reason why this GPU cannot be used; "" if it can.
    fault: str = ""


class GpuInventory(NamedTuple):
    """The GPUs of a machine and their driver."""

    # In the order of their PCI bus.
    gpus: tuple[PhysicalGpu, ...] = ()
    # Newest CUDA version that the driver supports, as major and minor number.
    cuda: tuple[int, int] = (0, 0)
    driver: str = ""


class TorchBuild(NamedTuple):
    """GPUs for which the installed PyTorch was built."""

    # Result of `torch.cuda.get_arch_list()`.
    architectures: Sequence[str]
    # Value of `torch.version.cuda`, such as "13.0". None for a build without CUDA.
    cuda: str | None


class NvmlMissingError(Exception):
    """This machine has no NVML: no driver is installed."""


class NvmlError(Exception):
    """NVML reports a fault of the driver."""


def read_gpus(nvml: Nvml | None = None) -> GpuInventory:
    """Return the GPUs of this machine. In a container, these are the container's.

    Args:
        nvml: Optional. If unset, the module `pynvml`.

    Raises:
        NvmlMissingError: If no driver is installed.
        NvmlError: If the driver is faulty.
    """
    if nvml is None:
        import pynvml  # noqa: PLC0415 -- only processes that compute have it

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            raise NvmlMissingError from error
        raise NvmlError(str(error)) from error
    try:
        driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = tuple(_read(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        raise NvmlError(str(error)) from error
    finally:
        nvml.nvmlShutdown()
    return GpuInventory(gpus, (cuda // 1000, cuda % 1000 // 10), driver)


def _read(nvml: Nvml, index: int, driver: str) -> PhysicalGpu:
    uuid = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        parts = tuple(
            Gpu(
                nvml.nvmlDeviceGetUUID(part),
                nvml.nvmlDeviceGetName(part),
                _memory(nvml, part),
                driver,
                f"{major}.{minor}",
            )
            for part in _parts(nvml, handle)
        )
    except nvml.NVMLError as error:
        return PhysicalGpu(uuid, (), str(error))
    fault = "" if parts else "it is in MIG mode, but has no instance"
    return PhysicalGpu(uuid, parts, fault)


def _parts(nvml: Nvml, handle: object) -> Iterable[object]:
    """Return handles of a GPU's MIG instances; without MIG mode, the handle itself."""
    try:
        enabled, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        enabled = 0
    if not enabled:
        return [handle]
    found = list[object]()
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_FOUND:
                raise
    return found


def _memory(nvml: Nvml, handle: object) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return 0


def supported(capability: str, architectures: Iterable[str]) -> bool:
    """True if code for one of these architectures runs on a GPU of this compute capability.

    Machine code (`sm_75`) runs on GPUs of the same major version and the same or a newer minor
    version, PTX (`compute_75`) on these and all newer ones. Both run on exactly one version if they
    use its special features (`sm_90a`).

    Args:
        capability: Compute capability of the GPU, such as "8.6".
        architectures: As `torch.cuda.get_arch_list` returns them.
    """
    gpu = tuple(map(int, capability.split(".")))
    for architecture in architectures:
        if match := _ARCHITECTURE.fullmatch(architecture):
            kind, code, exact = match[1], (int(match[2]), int(match[3])), match[4]
            if code == gpu or (
                not exact and code < gpu and (kind == "compute" or code[0] == gpu[0])
            ):
                return True
    return False


def refusal(capability: str, build: TorchBuild, inventory: GpuInventory | None = None) -> str:
    """Return why a build of PyTorch cannot use a GPU, or "".

    Args:
        capability: Compute capability of the GPU, such as "8.6".
        build: The build of PyTorch.
        inventory: Names the driver. Optional. If unset, the driver is not checked.
    """
    if build.cuda is None:
        return "the installed PyTorch is built without CUDA"
    # CUDA is compatible within a major version.
    if inventory is not None and inventory.cuda[0] < int(build.cuda.partition(".")[0]):
        has = ".".join(map(str, inventory.cuda))
        return f"driver {inventory.driver} supports CUDA {has}, but PyTorch needs CUDA {build.cuda}"
    if not supported(capability, build.architectures):
        kinds = ", ".join(build.architectures)
        return f"its compute capability is {capability}, but PyTorch supports only {kinds}"
    return ""
