"""A worker's slots: which GPUs it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.config.settings import Settings
from common.errors import UserError
from common.telemetry.logging import event_logger, fields_of
from services.worker.gpus import Gpu, TorchBuild, find_slots, supported
from tests.fakes.nvml import GPU_IS_LOST, LIBRARY_NOT_FOUND, MISMATCH, FakeError, FakeGpu, FakeNvml

if TYPE_CHECKING:
    from collections.abc import Mapping

WHEEL = TorchBuild(("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"), "13.0")
FIRST, SECOND = FakeGpu("GPU-8a11"), FakeGpu("GPU-8b22", "NVIDIA L4", 24 << 30, (8, 9))
SMALL = FakeGpu("MIG-5c33", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 << 30)
LARGE = FakeGpu("MIG-5d44", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20 << 30)
DIVIDED = FakeGpu("GPU-9e55", instances=[SMALL, None, LARGE])
OLD = FakeGpu("GPU-0f66", "Tesla P100", 16 << 30, (6, 0))
TWO, MIG = FakeNvml([FIRST, SECOND]), FakeNvml([DIVIDED, SECOND])
NO_LIBRARY = FakeNvml(fault=FakeError(LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"))
BROKEN = FakeNvml(fault=FakeError(MISMATCH, "RM has detected an NVML/RM version mismatch."))


def slots(
    nvml: FakeNvml,
    gpus: str = "all",
    visible: str | None = None,
    wheel: TorchBuild = WHEEL,
) -> tuple[Gpu, ...]:
    environment: Mapping[str, str] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    logger = event_logger("worker")
    found = find_slots(Settings(gpus=gpus), environment, logger, lambda: wheel, nvml)
    assert nvml.users == 0
    return found


def uuids(nvml: FakeNvml, gpus: str = "all", visible: str | None = None) -> list[str]:
    return [gpu.uuid for gpu in slots(nvml, gpus, visible)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(fields_of(r)["reason"]) for r in caplog.records if r.levelname == "WARNING"]


def refusal(nvml: FakeNvml, gpus: str) -> str:
    with pytest.raises(UserError, match=r"^DOLL_GPUS: ") as caught:
        slots(nvml, gpus)
    return str(caught.value)


@pytest.mark.parametrize("nvml", [NO_LIBRARY, FakeNvml()])
def test_machine_without_gpu_has_one_slot_on_the_cpu_without_a_word(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    assert slots(nvml) == slots(nvml, "none") == ()
    assert warnings(caplog) == []


def test_broken_driver_leaves_the_cpu_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert slots(BROKEN) == ()
    assert warnings(caplog) == ["RM has detected an NVML/RM version mismatch."]


def test_each_gpu_is_a_slot_with_its_properties() -> None:
    assert slots(TWO) == (
        Gpu("GPU-8a11", "NVIDIA A100-SXM4-40GB", 40 << 30, "580.65.06", "8.0"),
        Gpu("GPU-8b22", "NVIDIA L4", 24 << 30, "580.65.06", "8.9"),
    )
    assert slots(TWO, "none") == ()


def test_gpu_that_shares_the_machines_memory_is_a_slot() -> None:
    shared = FakeNvml([FakeGpu("GPU-1", "NVIDIA GB10", None, (12, 1))])
    assert [gpu.memory_bytes for gpu in slots(shared)] == [0]


def test_instances_of_gpu_in_mig_mode_are_slots() -> None:
    assert slots(MIG)[:2] == (
        Gpu("MIG-5c33", SMALL.name, 5 << 30, "580.65.06", "8.0"),
        Gpu("MIG-5d44", LARGE.name, 20 << 30, "580.65.06", "8.0"),
    )
    assert uuids(MIG) == ["MIG-5c33", "MIG-5d44", "GPU-8b22"]


def test_gpu_in_mig_mode_without_instance_is_no_slot(caplog: pytest.LogCaptureFixture) -> None:
    assert uuids(FakeNvml([FakeGpu("GPU-1", instances=[None])])) == []
    assert warnings(caplog) == ["it is in MIG mode, but has no instance"]


def test_lost_gpu_is_no_slot_and_keeps_its_index(caplog: pytest.LogCaptureFixture) -> None:
    lost = FakeGpu("GPU-1", fault=FakeError(GPU_IS_LOST, "GPU is lost"))
    assert uuids(FakeNvml([lost, SECOND])) == ["GPU-8b22"]
    assert warnings(caplog) == ["GPU is lost"]
    assert uuids(FakeNvml([lost, SECOND]), "1") == ["GPU-8b22"]
    assert "0: cannot be used: GPU is lost" in refusal(FakeNvml([lost, SECOND]), "0")


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("0", ["GPU-8a11"]),
        ("1, 0", ["GPU-8b22", "GPU-8a11"]),
        ("GPU-8b", ["GPU-8b22"]),
        ("GPU-8b22,0", ["GPU-8b22", "GPU-8a11"]),
        ("0,GPU-8a11,0", ["GPU-8a11"]),
    ],
)
def test_list_names_gpus_by_index_or_beginning_of_uuid(gpus: str, expected: list[str]) -> None:
    assert uuids(TWO, gpus) == expected
    # A list is a choice among all GPUs of the machine.
    assert uuids(TWO, gpus, visible="") == expected


def test_list_names_mig_instances_together_or_one_by_one() -> None:
    assert uuids(MIG, "0") == uuids(MIG, "GPU-9e") == ["MIG-5c33", "MIG-5d44"]
    assert uuids(MIG, "MIG-5d") == ["MIG-5d44"]
    assert uuids(MIG, "1,MIG-5c33") == ["GPU-8b22", "MIG-5c33"]


@pytest.mark.parametrize(
    ("nvml", "gpus", "message"),
    [
        (TWO, "2", "2: does not exist; this machine has 0: GPU-8a11, 1: GPU-8b22"),
        (TWO, "0,GPU-77", "GPU-77: does not exist; this machine has 0"),
        (TWO, "GPU-8", "GPU-8: is the beginning of several UUIDs"),
        (TWO, "MIG-5c33", "MIG-5c33: does not exist"),
        (FakeNvml(), "0", "0: does not exist; this machine has no GPU"),
        (NO_LIBRARY, "0", "names GPUs, but no NVIDIA driver is installed; use all or none"),
        (BROKEN, "0", "names GPUs, but the NVIDIA driver reports: RM has detected an NVML/RM"),
        (FakeNvml([OLD]), "0", "Tesla P100 (GPU-0f66) cannot be used: its compute capability"),
    ],
)
def test_list_of_unusable_gpus_is_a_user_error(nvml: FakeNvml, gpus: str, message: str) -> None:
    assert refusal(nvml, gpus).startswith(f"DOLL_GPUS: {message}")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-8a11", "GPU-8b22"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", ["GPU-8b22"]),
        ("1,0", ["GPU-8b22", "GPU-8a11"]),
        ("0,-1,1", ["GPU-8a11"]),
        ("1,2,0", ["GPU-8b22"]),
        ("0,0", []),
        ("1gpu,+0", ["GPU-8b22", "GPU-8a11"]),
        ("GPU-8b", ["GPU-8b22"]),
        ("GPU-8b22,GPU-8a11", ["GPU-8b22", "GPU-8a11"]),
        ("GPU-77,GPU-8a11", []),
        ("GPU-8", []),
    ],
)
def test_cuda_visible_devices_limits_all(visible: str | None, expected: list[str]) -> None:
    assert uuids(TWO, visible=visible) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("MIG-5d44", ["MIG-5d44"]),
        ("MIG-5d,MIG-5c", ["MIG-5d44", "MIG-5c33"]),
        ("0", ["MIG-5c33"]),
        ("GPU-9e55,1", ["MIG-5c33", "GPU-8b22"]),
    ],
)
def test_cuda_visible_devices_limits_mig_instances(visible: str, expected: list[str]) -> None:
    assert uuids(MIG, visible=visible) == expected


def test_gpu_that_pytorch_does_not_support_is_no_slot(caplog: pytest.LogCaptureFixture) -> None:
    assert uuids(FakeNvml([OLD, SECOND])) == ["GPU-8b22"]
    assert warnings(caplog) == [
        f"its compute capability is 6.0, but PyTorch supports only {', '.join(WHEEL.architectures)}"
    ]


@pytest.mark.parametrize(
    ("nvml", "wheel", "reason"),
    [
        (TWO, TorchBuild((), None), "the installed PyTorch is built without CUDA"),
        (
            FakeNvml([SECOND], cuda=12080),
            WHEEL,
            "driver 580.65.06 supports CUDA 12.8, but PyTorch needs CUDA 13.0",
        ),
    ],
)
def test_pytorch_that_does_not_fit_the_driver_leaves_the_cpu(
    nvml: FakeNvml, wheel: TorchBuild, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert slots(nvml, wheel=wheel) == ()
    assert set(warnings(caplog)) == {reason}


def test_newer_minor_version_of_the_driver_fits() -> None:
    assert len(slots(FakeNvml([SECOND], cuda=13020))) == 1
    assert len(slots(FakeNvml([SECOND], cuda=13000), wheel=WHEEL._replace(cuda="13.2"))) == 1


@pytest.mark.parametrize(
    ("capability", "architectures", "fits"),
    [
        ("7.5", ["sm_75"], True),
        ("7.0", ["sm_75"], False),
        ("8.9", ["sm_80"], True),
        ("8.0", ["sm_86"], False),
        ("9.0", ["sm_80", "sm_86"], False),
        ("9.0", ["sm_80", "compute_86"], True),
        ("8.0", ["compute_86"], False),
        ("12.1", ["sm_120"], True),
        ("10.3", ["sm_100", "sm_120"], True),
        ("9.0", ["sm_90a"], True),
        ("12.1", ["sm_120a", "compute_90a"], False),
        ("9.0", [], False),
        ("9.0", ["gfx90a"], False),
    ],
)
def test_architectures_of_a_wheel_support_capability(
    capability: str, architectures: list[str], *, fits: bool
) -> None:
    assert supported(capability, architectures) == fits
