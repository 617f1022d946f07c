"""The gradient of some batches at some weights: Algorithm 2, line 6, and nothing about protocol."""

from __future__ import annotations

import math
import time
import zlib
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.backends import cudnn

from common.errors import UserError
from common.learning.errors import NotFiniteError, TaskError, what_was_raised
from common.learning.outputs import check_losses, check_metrics, check_outputs, check_same_metrics
from common.learning.parameters import FlatModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from common.core.messages import Vector
    from common.learning.tasks import Task

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda"]


def resolve_device(name: DeviceName) -> torch.device:
    """Turn a setting into a device; "auto" is the GPU where there is one.

    Raises:
        UserError: If a GPU is asked for and there is none.
    """
    has_gpu = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("device 'cuda': PyTorch finds no GPU here; use 'auto' or 'cpu'")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GradientSum:
    """What one worker adds to an update. Every number is a sum over the samples."""

    vector: Vector  # (P + B,) float32 gradient, then (change of the buffers) x samples
    samples: int
    loss_sum: float
    metric_sums: dict[str, float]
    seconds: float  # compute time


class GradientComputer:
    """Computes gradients on one device.

    The same batches at the same weights give the same bits, whatever was computed before: every
    batch starts from the round's buffers and from random numbers that its own data seed.

    The result says how far each batch moved the buffers rather than where to, because then a buffer
    that does not move stays bit for bit what it was; averages of `buffer x samples` would drift.

    Attributes:
        model: The model on the device, with the weights loaded last.
    """

    def __init__(
        self, task: Task, module: nn.Module, device: torch.device, *, autocast: bool = False
    ) -> None:
        """Move the module to the device and prepare it for training.

        Args:
            task: What is learned.
            module: Its network; it belongs to this object from now on.
            device: See `resolve_device`.
            autocast: Run the forward pass in bfloat16 where torch thinks it safe.

        Raises:
            UserError: If the module cannot be trained: see `training_state`.
        """
        self._task = task
        self._device = device
        self._autocast = autocast
        self.model = FlatModel(module.to(device).train())
        self._buffers = self.model.buffers.clone()  # those of the round

    def load(self, weights: bytes | memoryview | Vector) -> None:
        """Take over a model's weights.

        Raises:
            CorruptError: If their length is not this model's.
        """
        self.model.load(weights)
        self._buffers.copy_(self.model.buffers)

    def compute(self, batches: Sequence[Mapping[str, npt.NDArray[Any]]]) -> GradientSum:
        """Sum the gradients of some batches, one forward and backward pass for each.

        Args:
            batches: Columns per batch, contiguous and writable as `concatenate` makes them.

        Raises:
            TaskError: If the task raises on a batch.
            WrongTaskError: If what its methods return cannot be used, whatever the batch.
            NotFiniteError: If a loss or the gradient is not finite.
            ValueError: If there is no batch, or one without samples.
            UserError: If the module does not write its buffers in place.
        """
        counts = [_samples_of(batch) for batch in batches]
        if not counts or not all(counts):
            raise ValueError("a gradient needs at least one batch, and each at least one sample")
        started = time.perf_counter()
        self.model.gradient.zero_()
        with _repeatable(self._device):
            totals = [self._add(index, batch) for index, batch in enumerate(batches)]
        self.model.check_buffers()
        names = totals[0][0]
        for found, _ in totals:
            check_same_metrics(self._task, found, names)
        sums = torch.stack([total for _, total in totals]).tolist()
        for index, row in enumerate(sums):
            if not all(map(math.isfinite, row)):
                raise NotFiniteError("a loss or metric", index)
        vector: Vector = self.model.gradient.to("cpu", copy=True).numpy()
        if not np.isfinite(vector).all():
            raise NotFiniteError("the gradient", 0 if len(batches) == 1 else None)
        loss_sum, *metric_sums = (math.fsum(column) for column in zip(*sums, strict=True))
        return GradientSum(
            vector,
            sum(counts),
            loss_sum,
            dict(zip(names, metric_sums, strict=True)),
            time.perf_counter() - started,
        )

    def _add(self, index: int, batch: Mapping[str, npt.NDArray[Any]]) -> tuple[list[str], Tensor]:
        """Add a batch's part to the gradient; return metric names, and loss and metric sums."""
        _seed(self._device, batch)
        if self.model.buffer_count:
            self.model.buffers.copy_(self._buffers)
        try:
            losses, metrics = self._run(batch)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the machine failed, not the data
        except TaskError:
            raise  # what it returned was looked at already
        except Exception as error:  # the task is the user's code and may raise anything
            raise TaskError(index, what_was_raised(error, self._task, __name__)) from error
        if self.model.buffer_count:
            moved = self.model.buffers - self._buffers
            self.model.gradient[self.model.parameter_count :].add_(moved, alpha=len(losses))
        names = sorted(metrics)
        columns = [losses, *(metrics[name].to(losses.device) for name in names)]
        return names, torch.stack([column.sum(dtype=torch.float64) for column in columns])

    def _run(self, batch: Mapping[str, npt.NDArray[Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Pass a batch forward and back; return (n,) losses and metrics."""
        records = {
            name: torch.from_numpy(column).to(self._device, non_blocking=True)
            for name, column in batch.items()
        }
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            outputs = self._task.forward(self.model.module, records)
            check_outputs(self._task, outputs)
            losses = self._task.losses(outputs, records)
        check_losses(self._task, losses, _samples_of(batch))
        torch.autograd.backward(losses.sum())
        with torch.no_grad():
            metrics = self._task.metrics(outputs.detach(), records)
        check_metrics(self._task, metrics, _samples_of(batch))
        return losses.detach(), metrics


def _samples_of(batch: Mapping[str, npt.NDArray[Any]]) -> int:
    return len(next(iter(batch.values()), ()))


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Give torch's generators back as they were, and let cuDNN use only algorithms that repeat."""
    on_gpu = device.type == "cuda"
    repeating = (
        cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=None, fp32_precision=None
        )
        if on_gpu
        else nullcontext()
    )
    with torch.random.fork_rng(devices=[device] if on_gpu else []), repeating:
        yield


def _seed(device: torch.device, batch: Mapping[str, npt.NDArray[Any]]) -> None:
    """Seed dropout and augmentation by the batch's first record: by its data, not by its holder."""
    seed = _samples_of(batch)
    for column in batch.values():
        seed = zlib.crc32(column[:1].tobytes(), seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
