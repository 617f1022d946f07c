"""The slots of a worker: the GPUs that it uses, each by a process of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from common.errors import UserError
from common.learning.gpus import (
    Gpu,
    NvmlError,
    NvmlMissingError,
    TorchBuild,
    read_gpus,
    refusal,
    supported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from common.config.settings import Settings
    from common.learning.gpus import GpuInventory, Nvml, PhysicalGpu
    from common.telemetry.logging import EventLogger

__all__ = ["Gpu", "TorchBuild", "find_slots", "supported"]

_LIST = "DOLL_GPUS: names GPUs, but {}; use all or none"


def find_slots(
    settings: Settings,
    environment: Mapping[str, str],
    logger: EventLogger,
    build: Callable[[], TorchBuild],
    nvml: Nvml | None = None,
) -> tuple[Gpu, ...]:
    """Return the GPUs that this worker uses, one for each slot. Empty: one slot on the CPU.

    Args:
        settings: `settings.gpus` says which GPUs to use.
        environment: Its CUDA_VISIBLE_DEVICES limits `all`.
        logger: Logs why a GPU is not used.
        build: Says what the installed PyTorch supports. It is called only if there are GPUs.
        nvml: See `read_gpus`.

    Raises:
        UserError: If DOLL_GPUS names a GPU that does not exist or cannot be used.
    """
    if settings.gpus == "none":
        return ()
    named = settings.gpus != "all"
    try:
        inventory = read_gpus(nvml)
    except NvmlMissingError as error:
        if named:
            raise UserError(_LIST.format("no NVIDIA driver is installed")) from error
        return ()
    except NvmlError as error:
        if named:
            raise UserError(_LIST.format(f"the NVIDIA driver reports: {error}")) from error
        logger.warning("gpus_unusable", reason=str(error))
        return ()
    if named:
        found = tuple(_named(settings.gpus.split(","), inventory.gpus))
    else:
        found = _visible(environment.get("CUDA_VISIBLE_DEVICES"), inventory.gpus, logger)
    if not found:
        return ()
    return tuple(_usable(found, inventory, build(), named=named, logger=logger))


def _usable(
    gpus: Iterable[Gpu],
    inventory: GpuInventory,
    torch: TorchBuild,
    *,
    named: bool,
    logger: EventLogger,
) -> Iterator[Gpu]:
    """Yield the GPUs that the installed PyTorch can use.

    Raises:
        UserError: If it cannot use a GPU that is `named`.
    """
    for gpu in gpus:
        reason = refusal(gpu.capability, torch, inventory)
        if not reason:
            yield gpu
        elif named:
            raise UserError(f"DOLL_GPUS: {gpu.name} ({gpu.uuid}) cannot be used: {reason}")
        else:
            logger.warning("gpu_unusable", uuid=gpu.uuid, gpu=gpu.name, reason=reason)


def _named(names: Sequence[str], gpus: Sequence[PhysicalGpu]) -> dict[Gpu, None]:
    """Return the GPUs of a list, in its order and without repetitions."""
    found = dict[Gpu, None]()
    for name in map(str.strip, names):
        parts, fault = _match(name, gpus)
        if fault:
            have = ", ".join(f"{i}: {gpu.uuid or 'unknown'}" for i, gpu in enumerate(gpus))
            raise UserError(f"DOLL_GPUS: {name}: {fault}; this machine has {have or 'no GPU'}")
        found |= dict.fromkeys(parts)
    return found


def _visible(
    visible: str | None, gpus: Sequence[PhysicalGpu], logger: EventLogger
) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would see with this value of CUDA_VISIBLE_DEVICES.

    CUDA ignores the first invalid entry and all after it, sees no GPU at all if one is repeated,
    and reads `1x` as `1`. It sees the first instance of a GPU in MIG mode that is not named by its
    instances. Indices count in the order of the PCI bus, as NVML and CUDA_DEVICE_ORDER=PCI_BUS_ID
    have it. CUDA's own default puts the fastest GPU first, which differs only if a machine has GPUs
    of several kinds, and cannot be found out without CUDA.
    """
    if visible is None:
        for gpu in gpus:
            if gpu.fault:
                logger.warning("gpu_unusable", uuid=gpu.uuid, reason=gpu.fault)
        return tuple(part for gpu in gpus for part in gpu.parts)
    found = list[Gpu]()
    for entry in map(str.strip, visible.split(",")):
        number = re.match(r"\+?(\d+)", entry, re.ASCII)
        parts, fault = _match(number[1] if number else entry, gpus)
        if fault:
            break
        if parts[0] in found:
            return ()
        found.append(parts[0])
    return tuple(found)


def _match(name: str, gpus: Sequence[PhysicalGpu]) -> tuple[Sequence[Gpu], str]:
    """Return the GPU, or the MIG instances, that a name means; otherwise, what is wrong.

    Args:
        name: An index, or the beginning of a UUID of a GPU or of a MIG instance.
        gpus: All GPUs of the machine.
    """
    if re.fullmatch(r"\d+", name, re.ASCII):
        whole = [gpus[int(name)]] if int(name) < len(gpus) else []
    else:
        whole = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    mig = [p for gpu in gpus for p in gpu.parts if name.startswith("MIG-")]
    parts = [[part] for part in mig if part.uuid.startswith(name)]
    if len(whole) + len(parts) > 1:
        return (), "is the beginning of several UUIDs"
    if whole and whole[0].fault:
        return (), f"cannot be used: {whole[0].fault}"
    if not whole and not parts:
        return (), "does not exist"
    return (whole[0].parts if whole else parts[0]), ""
