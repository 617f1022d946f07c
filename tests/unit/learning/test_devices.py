"""Which device a process computes on, and what it says about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from common.core.liveness import Device
from common.errors import UserError
from common.learning import devices, host
from common.learning.devices import device_of, resolve_device, torch_build, used_bytes
from common.learning.gpus import NvmlMissingError, TorchBuild
from common.learning.host import memory_bytes, processor_name
from tests.fakes.nvml import LIBRARY_NOT_FOUND, MISMATCH, FakeError, FakeGpu, FakeNvml

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
NO_LIBRARY = FakeNvml(fault=FakeError(LIBRARY_NOT_FOUND))
BROKEN = FakeNvml(fault=FakeError(MISMATCH, "NVML/RM version mismatch."))
WHEEL = TorchBuild(("sm_75", "sm_80"), "13.0")


class Warned:
    """Events that were logged."""

    def __init__(self) -> None:
        self.reasons = list[str]()

    def __call__(self, event: str, *, reason: str) -> None:
        """Log an event."""
        assert event == "gpu_unusable"
        self.reasons.append(reason)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Warned:
    """PyTorch with CUDA that finds no GPU, in a process that has not warned yet."""
    monkeypatch.setattr(devices, "_reported", set())
    monkeypatch.setattr(devices, "torch_build", lambda: WHEEL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return Warned()


def gpu_of_torch(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    major, minor = capability
    found = SimpleNamespace(name="NVIDIA L4", major=major, minor=minor, total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)


def test_gpu_that_fails_its_first_call_is_not_used_and_reported(
    warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("CUDA driver initialization failed\nyou might not have a CUDA gpu.")

    gpu_of_torch(monkeypatch, (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert resolve_device("auto", warned, FakeNvml()) == CPU
    [reason] = warned.reasons
    assert "CUDA driver initialization failed" in reason
    with pytest.raises(UserError, match="CUDA driver initialization failed"):
        resolve_device("cuda", warned, FakeNvml())


def test_auto_is_the_cpu_without_a_word_if_there_is_no_gpu(warned: Warned) -> None:
    assert resolve_device("cpu", warned, BROKEN) == CPU
    assert resolve_device("auto", warned, NO_LIBRARY) == CPU
    assert resolve_device("auto", warned, FakeNvml()) == CPU
    assert warned.reasons == []
    with pytest.raises(UserError, match=r"requires a GPU.*\(this machine has none\)"):
        resolve_device("cuda", warned, NO_LIBRARY)


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (BROKEN, "NVML/RM version mismatch."),
        (
            FakeNvml([FakeGpu("GPU-1", capability=(6, 0))]),
            "its compute capability is 6.0, but PyTorch supports only sm_75, sm_80",
        ),
        (
            FakeNvml([FakeGpu("GPU-1")], cuda=12040),
            "driver 580.65.06 supports CUDA 12.4, but PyTorch needs CUDA 13.0",
        ),
        (FakeNvml([FakeGpu("GPU-1", instances=[])]), "it is in MIG mode, but has no instance"),
    ],
)
def test_auto_warns_once_of_a_gpu_that_pytorch_cannot_use(
    nvml: FakeNvml, reason: str, warned: Warned
) -> None:
    assert resolve_device("auto", warned, nvml) == resolve_device("auto", warned, nvml) == CPU
    assert warned.reasons == [reason]
    with pytest.raises(UserError) as caught:
        resolve_device("cuda", warned, nvml)
    assert reason in str(caught.value)


def test_gpu_that_only_cuda_refuses_is_reported_with_the_error_of_cuda(
    warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert resolve_device("auto", warned, FakeNvml([FakeGpu("GPU-1")])) == CPU
    assert warned.reasons == ["RuntimeError: No CUDA GPUs are available"]


def test_auto_is_the_gpu_if_pytorch_supports_it(
    warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of_torch(monkeypatch, (8, 9))
    for name in ("auto", "cuda"):
        assert resolve_device(name, warned, NO_LIBRARY) == torch.device("cuda", 0)
    gpu_of_torch(monkeypatch, (9, 0))
    assert resolve_device("auto", warned, NO_LIBRARY) == CPU
    assert [reason.partition(",")[0] for reason in warned.reasons] == [
        "NVIDIA L4: its compute capability is 9.0"
    ]
    with pytest.raises(UserError, match="capability is 9"):
        resolve_device("cuda", warned, NO_LIBRARY)


def test_device_of_the_cpu_has_the_processor_and_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processors, limit = tmp_path / "cpuinfo", tmp_path / "memory.max"
    monkeypatch.setattr(host, "_PROCESSORS", processors)
    monkeypatch.setattr(host, "_CGROUP", limit)
    processors.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7R13 Processor\n")
    limit.write_text("67108864\n")
    assert device_of(CPU) == Device("cpu", "AMD EPYC 7R13 Processor", 64 << 20)
    limit.write_text("max\n")
    assert memory_bytes() > 64 << 20
    processors.write_text("processor\t: 0\n")
    assert processor_name()
    assert 0 < used_bytes(CPU) < memory_bytes()


def test_device_of_a_gpu_has_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_of_torch(monkeypatch, (8, 9))
    gpu = torch.device("cuda", 0)

    def missing() -> None:
        raise NvmlMissingError

    monkeypatch.setattr(devices, "read_gpus", missing)
    assert device_of(gpu) == Device("cuda", "NVIDIA L4", 24 << 30, "", "8.9")
    monkeypatch.setattr(devices, "read_gpus", lambda: SimpleNamespace(driver="580.65.06"))
    assert device_of(gpu).driver == "580.65.06"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 << 30, 24 << 30))
    assert used_bytes(gpu) == 20 << 30


def test_installed_pytorch_says_what_it_supports() -> None:
    architectures, cuda = torch_build()
    assert bool(architectures) == (cuda is not None)
