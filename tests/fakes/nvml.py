"""NVML with made-up GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class FakeError(Exception):
    """An error of NVML, with its number."""

    def __init__(self, value: int, text: str = "") -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED, NOT_FOUND, LIBRARY_NOT_FOUND, GPU_IS_LOST, MISMATCH = 3, 6, 12, 15, 18


@dataclass
class FakeGpu:
    """A GPU or a MIG instance. `instances` of a GPU in MIG mode may have gaps."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    memory_bytes: int | None = 40 << 30
    capability: tuple[int, int] = (8, 0)
    instances: Sequence[FakeGpu | None] | None = None
    fault: FakeError | None = None


@dataclass
class FakeNvml:
    """The functions of `pynvml` that we use."""

    gpus: Sequence[FakeGpu] = ()
    fault: FakeError | None = None
    cuda: int = 13000
    NVMLError: Any = FakeError
    NVML_ERROR_NOT_SUPPORTED: int = NOT_SUPPORTED
    NVML_ERROR_NOT_FOUND: int = NOT_FOUND
    NVML_ERROR_LIBRARY_NOT_FOUND: int = LIBRARY_NOT_FOUND
    # Number of `nvmlInit` without `nvmlShutdown`.
    users: int = field(default=0, init=False)

    # ruff: noqa: N802 -- as NVIDIA calls and documents them
    def nvmlInit(self) -> None:
        if self.fault is not None:
            raise self.fault
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        fault = self.gpus[index].fault
        if fault is not None:
            raise fault
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> SimpleNamespace:
        if handle.memory_bytes is None:
            raise FakeError(NOT_SUPPORTED, "Not Supported")
        return SimpleNamespace(total=handle.memory_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        return handle.capability

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        if handle.capability < (8, 0):
            raise FakeError(NOT_SUPPORTED, "Not Supported")
        return [int(handle.instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return len(handle.instances or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeGpu:
        instance = (handle.instances or ())[index]
        if instance is None:
            raise FakeError(NOT_FOUND, "Not Found")
        return instance
