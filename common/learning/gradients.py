"""Compute the gradient of batches at given weights: Algorithm 2, line 6, without any protocol."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
import torch

from common.core.messages import ALL_REACHED, MetricSum
from common.core.vectors import SparseVector, dense
from common.data.fields import concatenate
from common.errors import UserError
from common.learning.arithmetic import DEFAULT, Arithmetic, need_compiler
from common.learning.errors import NoMemoryError, NotFiniteError, TaskError, one_line, shortage
from common.learning.feed import feed_of
from common.learning.named_outputs import detached
from common.learning.outputs import (
    check_gradient,
    check_losses,
    check_metrics,
    check_outputs,
    check_same_metrics,
    count_scores,
    guest,
)
from common.learning.parameters import FlatModel, has_batch_norm, is_finite

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor, nn

    from common.core.messages import Vector
    from common.data.fields import Field
    from common.learning.feed import Pass, Records
    from common.learning.optimizers import Reduction
    from common.learning.tasks import Task

# Number of gradients after which passes grow again, if memory did not suffice before.
GROW_AFTER = 100

# Response to a lack of memory: compute a batch in parts, or give up.
OutOfMemory: TypeAlias = Literal["chunk", "hold"]
# (passes, columns) float64. Each row has the sum of the pass's losses, the sum of each metric over
# the samples that have a value, the number of these samples for each metric, and the counts of its
# scores.
Sums: TypeAlias = "npt.NDArray[np.float64]"
# Names of metrics, sums, gradient.
_Found: TypeAlias = "tuple[list[str], Sums, Vector | SparseVector | Tensor]"


@dataclass(frozen=True, slots=True)
class GradientSum:
    """One worker's part of an update. Every number is a sum over the samples."""

    # (P + B,) float32: the gradient, then (change of the buffers) x samples. Numbers that are left
    # out are zero. A tensor is on the model's device.
    numbers: Vector | SparseVector | Tensor
    samples: int
    loss_sum: float
    # Without metrics for which no sample has a value.
    metric_sums: dict[str, MetricSum]
    seconds: float  # compute time
    # Only for tasks with two classes. See `common.core.scores`.
    scores: tuple[int, ...] = ()
    # Parameters that any record reached. See `FlatModel.reached`.
    reached: int = ALL_REACHED
    # True if some pass was computed in parts for lack of memory.
    cut: bool = False

    @property
    def tensor(self) -> Tensor:
        """The sum as a dense tensor, on the model's device if it was left there."""
        numbers = self.numbers
        return numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(dense(numbers))

    @property
    def sparse(self) -> Vector | SparseVector:
        """The sum on the host. Numbers that are left out are zero."""
        numbers = self.numbers
        if isinstance(numbers, torch.Tensor):
            return cast("Vector", numbers.numpy(force=True))
        return numbers

    @property
    def vector(self) -> Vector:
        """The sum as a dense vector on the host."""
        return dense(self.sparse)


class GradientComputer:
    """Computes gradients on one device.

    If the arithmetic is deterministic, the same batches at the same weights give the same bits on
    the same kind of device, whatever was computed before. To ensure this, every batch starts from
    the round's buffers and from random numbers seeded by its own data. Neighbouring batches share a
    pass if the model has no buffers and the task draws no random numbers, because each record is
    then computed on its own. Which batches share one follows from their sizes alone. Only a lack of
    memory changes bits, if the job permits parts: batches are then summed in parts, which are
    rounded in another order.

    The result has the change of the buffers, not their new value: a buffer that does not change
    keeps its bits, while averages of `buffer x samples` would drift.

    Attributes:
        model: The model on the device, with the weights loaded last.
        has_batch_norm: True if a batch needs two samples or more.
        largest_pass: Number of records of the largest pass of the last gradient.
        oom: The job's option `oom`. May change between two gradients.
        on_device: True to leave gradients on the device. May change between two gradients.
    """

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        device: torch.device,
        *,
        arithmetic: Arithmetic = DEFAULT,
        reduction: Reduction = "mean",
        oom: OutOfMemory | None = None,
        pass_records: int = 1,
    ) -> None:
        """Move the module to the device and prepare it for training.

        Args:
            task: The task.
            module: The task's network. This object owns it from now on.
            device: See `resolve_device`.
            arithmetic: Precision of gradients, and reproducibility of their bits.
            reduction: Reduction of a batch's gradient for local steps.
            oom: Response to a lack of memory. Optional. If unset, `hold` for a module with batch
                normalization, whose statistics depend on the records of a pass; otherwise `chunk`.
            pass_records: Maximum number of records of batches that share a pass.

        Raises:
            UserError: If the module cannot be trained. See `training_state`.
        """
        self._task = task
        self._device = device
        self._arithmetic = arithmetic
        self._reduction = reduction
        self._most_together = pass_records
        self._feed = feed_of(device)
        self.oom = oom
        self.on_device = False
        self.model = FlatModel(module.to(device))
        self.has_batch_norm = has_batch_norm(module)
        # Minimum number of records per pass.
        self._least = 2 if self.has_batch_norm else 1
        # Buffers at the start of the round.
        self._buffers = self.model.buffers.clone()
        # True once the task has drawn random numbers.
        self._draws = False
        # Maximum number of records per pass, once memory did not suffice for more.
        self._most = 0
        # Gradients computed since `_most` last changed.
        self._since = 0
        # True if the attempt under way computes some pass in parts.
        self._in_parts = False
        # Number of reductions of `_most` since the last call of `take_cuts`.
        self._cuts = 0
        self.largest_pass = 0

    def load(self, weights: bytes | memoryview | Vector | Tensor) -> None:
        """Load a model's weights.

        Raises:
            CorruptError: If their length is not this model's.
        """
        self.model.load(weights)
        self._buffers.copy_(self.model.buffers)

    def write(self, changes: SparseVector) -> None:
        """Overwrite some of the weights that were loaded last.

        Raises:
            CorruptError: If the vector's length is not this model's.
        """
        self.model.write(changes)
        self._buffers.copy_(self.model.buffers)

    def compute(self, batches: Sequence[Records], local_rate: float = 0.0) -> GradientSum:
        """Sum the gradients of some batches.

        Args:
            batches: Columns per batch, contiguous and writable, as `concatenate` makes them.
            local_rate: Learning rate of local steps: after each batch, the weights take a plain
                step by its gradient, so the next gradient is computed there. At the end the loaded
                weights are restored. If 0, all gradients are computed at the loaded weights.

        Raises:
            TaskError: If the task raises on a batch.
            WrongTaskError: If the return value of one of its methods is unusable for any batch.
            NotFiniteError: If a loss or the gradient is not finite, or a metric is infinite.
            NoMemoryError: If memory does not suffice for the smallest pass, or for any pass if the
                job does not permit parts.
            ValueError: If there is no batch, or one without samples.
            UserError: If the module does not write its buffers in place, or freezes parameters.
        """
        counts = [_samples_of(batch) for batch in batches]
        if not counts or not all(counts):
            raise ValueError("a gradient needs at least one batch, and each at least one sample")
        started = time.perf_counter()
        with self._arithmetic.applied(self._device):
            while True:
                self.largest_pass, self._in_parts = 0, False
                try:
                    found = None if self._draws else self._unseeded(batches, local_rate)
                    names, sums, vector = found or self._seeded(batches, local_rate)
                    break
                except (MemoryError, torch.OutOfMemoryError) as error:
                    # The traceback keeps tensors in memory until this block ends.
                    reason = shortage(error)
                self._cut(self.largest_pass or max(counts), reason)
        self._grow()
        loss_sum, *rest = map(math.fsum, sums[:, : 1 + 2 * len(names)].T.tolist())
        totals, with_value = rest[: len(names)], rest[len(names) :]
        return GradientSum(
            vector,
            sum(counts),
            loss_sum,
            {
                name: MetricSum(total, int(count))
                for name, total, count in zip(names, totals, with_value, strict=True)
                if count
            },
            time.perf_counter() - started,
            tuple(sums[:, 1 + 2 * len(names) :].sum(0).astype(np.int64).tolist()),
            self.model.reached,
            self._in_parts,
        )

    def compile(self, fields: Sequence[Field], batch_size: int, group_size: int) -> None:
        """Compile the module by `torch.compile`, and compute passes of the usual sizes with zeros.

        A module's first pass compiles it for one number of records, and its first pass of another
        size for any number; a few records may need another program. All are compiled here, so no
        later gradient takes longer.

        Args:
            fields: Fields of the records.
            batch_size: Number of records of a full batch.
            group_size: Number of batches of an update (K).

        Raises:
            UserError: If a compiler is missing, or torch cannot compile the module.
            NoMemoryError: See `compute`.
        """
        need_compiler(self._device)
        from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 -- it takes seconds

        module = self.model.module
        # `nn.Module.compile` has no effect on containers of torch such as `nn.Sequential`.
        module.forward = torch.compile(module.forward)
        shared = max(self._most_together // batch_size, 1) if self._shares else 1
        largest = batch_size * min(shared, group_size)
        for count in dict.fromkeys(max(largest // part, self._least) for part in (1, 2, 16)):
            zeros = {
                field.name: np.zeros((count, *field.shape), field.numpy_dtype) for field in fields
            }
            try:
                self.compute([zeros])
            except TaskError as error:
                # Other errors concern zeros alone, such as a label that must be 1 or more.
                if isinstance(error.__cause__, TorchDynamoException):
                    raise UserError(
                        "compile: torch cannot compile the module; set `compile: false`:"
                        f" {one_line(error.__cause__)}"
                    ) from error
            except NotFiniteError:
                continue

    def take_cuts(self) -> int:
        """Return how often passes were made smaller since the last call, for lack of memory."""
        cuts, self._cuts = self._cuts, 0
        return cuts

    def _cut(self, largest: int, reason: str) -> None:
        """Halve the number of records per pass.

        The gradient is a sum, so parts of a batch give the same result up to rounding, except with
        batch normalization.

        Args:
            largest: Number of records of the largest pass.
            reason: The memory that was requested and free, with the error: see `shortage`.

        Raises:
            NoMemoryError: If passes cannot be smaller, or the job does not permit parts.
        """
        self.model.clear_gradient()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        what = "one record does not fit" if largest == 1 else f"{largest:,} records do not fit"
        if self._is_whole:
            raise NoMemoryError(
                f"{what} ({reason}); set `oom: chunk` to compute a batch in parts, use machines"
                " with more memory, or lower `batch_size`, which counts for later batches"
            )
        # Both halves need enough records for batch normalization.
        if largest < 2 * self._least:
            raise NoMemoryError(
                f"{what} ({reason}); use a smaller model or smaller records, or machines with more"
                " memory"
            )
        self._most, self._since = largest // 2, 0
        self._cuts += 1

    def _grow(self) -> None:
        """Raise the number of records per pass by a half after `GROW_AFTER` gradients."""
        self._since += 1
        if self._most and self._since >= GROW_AFTER:
            self._most, self._since = self._most + -(-self._most // 2), 0

    @property
    def _shares(self) -> bool:
        """True if batches may share a pass, unless the task draws random numbers."""
        return not (self.model.buffer_count or self.has_batch_norm)

    @property
    def _is_whole(self) -> bool:
        """True if no pass may be computed in parts."""
        return self.oom == "hold" or (self.oom is None and self.has_batch_norm)

    def _parts(self, batches: Pass) -> list[Pass]:
        """Cut the records of a pass into equal parts that fit into memory, usually a single one."""
        count, parts = sum(map(_samples_of, batches)), 1
        if self._most and not self._is_whole:
            parts = max(min(-(-count // self._most), count // self._least), 1)
        self.largest_pass = max(self.largest_pass, -(-count // parts))
        if parts == 1:
            return [batches]
        self._in_parts = True
        records = concatenate(batches) if len(batches) > 1 else batches[0]
        edges = pairwise(count * part // parts for part in range(parts + 1))
        return [
            [{name: column[start:end] for name, column in records.items()}] for start, end in edges
        ]

    def _together(self, batches: Sequence[Records]) -> list[Pass]:
        """Let neighbouring batches share a pass while it has at most `pass_records` records."""
        passes, room = list[list["Records"]](), 0
        for batch in batches:
            count = _samples_of(batch)
            if count > room:
                passes.append([])
                room = self._most_together
            passes[-1].append(batch)
            room -= count
        return [*passes]

    def _unseeded(self, batches: Sequence[Records], local_rate: float) -> _Found | None:
        """Pass small batches forward and back together, without seeding.

        Returns:
            Metric names, sums of each pass, and the gradient. None if there was an error, which a
                pass batch by batch then locates, or if the task draws random numbers, which each
                batch must seed.
        """
        before = _generator(self._device).get_state()
        finite = False
        with suppress(TaskError, ValueError, UserError):
            apart = not self._shares or local_rate
            passes = _alone(batches) if apart else self._together(batches)
            names, sums, vector = self._passes(passes, local_rate)
            finite = bool(np.isfinite(sums).all()) and is_finite(vector)
        if not torch.equal(before, _generator(self._device).get_state()):
            self._draws = True
            _generator(self._device).set_state(before)
            return None
        return (names, sums, vector) if finite else None

    def _seeded(self, batches: Sequence[Records], local_rate: float) -> _Found:
        """Pass each batch forward and back on its own, then restore torch's generators."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            names, sums, vector = self._passes(_alone(batches), local_rate, seeded=True)
        owners = [n for n, each in enumerate(_alone(batches)) for _ in self._parts(each)]
        for index, row in zip(owners, sums, strict=True):
            if not np.isfinite(row).all():
                raise NotFiniteError(_infinite(names, row), index)
        if not is_finite(vector):
            raise NotFiniteError("the gradient", 0 if len(batches) == 1 else None)
        return names, sums, vector

    def _passes(self, passes: Sequence[Pass], local_rate: float, *, seeded: bool = False) -> _Found:
        self.model.clear_gradient()
        totals = []
        parts = [self._parts(batches) for batches in passes]
        columns = self._feed(chain.from_iterable(parts))
        with self._local_steps(local_rate) if local_rate else nullcontext(_stay) as step:
            for index, batches in enumerate(passes):
                for part in parts[index]:
                    records = next(columns)
                    if seeded:
                        _seed(self._device, part[0])
                    totals.append(self._add(index, records))
                step(sum(map(_samples_of, batches)))
        self.model.check_module()
        names = totals[0][0]
        for found, _ in totals:
            check_same_metrics(self._task, found, names)
        sums: Sums = torch.stack([total for _, total in totals]).numpy(force=True)
        take = self.model.take_gradient if self.on_device else self.model.read_gradient
        return names, sums, take()

    @contextmanager
    def _local_steps(self, local_rate: float) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes one local step. At the end, restore the weights."""
        model = self.model
        parameters = model.state[: model.parameter_count]
        start, total = parameters.clone(), torch.zeros_like(model.gradient)

        def step(samples: int) -> None:
            total.add_(model.gradient)
            divisor = samples if self._reduction == "mean" else 1
            parameters.add_(model.gradient[: len(parameters)], alpha=-local_rate / divisor)
            model.gradient.zero_()

        try:
            yield step
        finally:
            parameters.copy_(start)
        model.gradient.copy_(total)

    def _add(self, index: int, records: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
        """Add the part of a pass to the gradient. Return metric names and a row of `Sums`."""
        if self.model.buffer_count:
            self.model.buffers.copy_(self._buffers)
        with guest(self._task, index):
            losses, metrics, scores = self._run(records)
        if self.model.buffer_count:
            moved = self.model.buffers - self._buffers
            self.model.gradient[self.model.parameter_count :].add_(moved, alpha=len(losses))
        names = sorted(metrics)
        sums = [losses.sum(dtype=torch.float64)[None]]
        if names:
            columns = [metrics[name].to(losses.device, torch.float64) for name in names]
            values = torch.stack(columns)
            # A NaN means that the sample has no value of the metric.
            sums += [values.nansum(1), values.isnan().logical_not().sum(1)]
        return names, torch.cat(sums if scores is None else [*sums, scores])

    def _run(
        self, records: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Pass records forward and back; return losses and metrics, (n,) each, and score counts."""
        count = len(next(iter(records.values())))
        with self._arithmetic.forward(self._device):
            outputs = self._task.forward(self.model.module, records)
            check_outputs(self._task, outputs)
            losses = self._task.losses(outputs, records)
        check_losses(self._task, losses, count)
        check_gradient(self._task, outputs, losses)
        torch.autograd.backward(losses.sum())
        with torch.no_grad():
            outputs = detached(outputs)
            metrics = self._task.metrics(outputs, records)
            scores = count_scores(self._task, outputs, records, count)
        check_metrics(self._task, metrics, count)
        return losses.detach(), metrics, scores


def _infinite(names: Sequence[str], row: npt.NDArray[np.float64]) -> str:
    """Name the loss if it is not finite in a row of `Sums`, otherwise the first such metric."""
    if not math.isfinite(row[0]):
        return "the loss"
    totals = zip(names, row[1:].tolist(), strict=False)
    metric = next((name for name, total in totals if not math.isfinite(total)), "")
    return f"metric {metric!r}"


def _stay(samples: int) -> None:
    """Take no step between batches."""


def _samples_of(batch: Records) -> int:
    return len(next(iter(batch.values()), ()))


def _alone(batches: Sequence[Records]) -> list[Pass]:
    """Give each batch a pass of its own."""
    return [[batch] for batch in batches]


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def _seed(device: torch.device, batch: Records) -> None:
    """Seed dropout and augmentation from the batch's first record, so all workers draw the same."""
    seed = _samples_of(batch)
    for column in batch.values():
        seed = zlib.crc32(column[:1].tobytes(), seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _generator(device).manual_seed(seed)
