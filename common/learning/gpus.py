"""The GPUs of this machine, found by NVML: without torch, and without a CUDA context."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


class Machine(NamedTuple):
    """What NVML knows of a machine."""

    # In the order of their PCI bus.
    gpus: tuple[PhysicalGpu, ...] = ()
    # Newest CUDA version of the driver as major and minor number. (0, 0) if there is no driver.
    cuda: tuple[int, int] = (0, 0)


class NvmlMissingError(Exception):
    """This machine has no NVML: no driver is installed."""


class NvmlError(Exception):
    """NVML reports a fault of the driver."""


class Nvml(Protocol):
    """The functions of the module `pynvml` that are used here. A handle is opaque."""

    # An exception with a number as `value`.
    NVMLError: Any
    NVML_ERROR_NOT_SUPPORTED: int
    NVML_ERROR_NOT_FOUND: int
    NVML_ERROR_LIBRARY_NOT_FOUND: int

    # ruff: noqa: D102, N802 -- NVIDIA's documentation describes them
    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlSystemGetCudaDriverVersion_v2(self) -> int: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: ANN401
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...  # noqa: ANN401
    def nvmlDeviceGetName(self, handle: Any) -> str: ...  # noqa: ANN401
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...  # noqa: ANN401
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> Sequence[int]: ...  # noqa: ANN401
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...  # noqa: ANN401
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...  # noqa: ANN401
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...  # noqa: ANN401


def read_machine(nvml: Nvml | None = None) -> Machine:
    """Return the GPUs of this machine. In a container, these are the container's.

    Args:
        nvml: Optional. If unset, the module `pynvml`.

    Raises:
        NvmlMissingError: If no driver is installed.
        NvmlError: If the driver is faulty.
    """
    if nvml is None:
        import pynvml  # noqa: PLC0415 -- a process without GPUs does not need it

        nvml = cast("Nvml", pynvml)
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
    return Machine(gpus, (cuda // 1000, cuda % 1000 // 10))


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
