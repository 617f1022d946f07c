"""Check the return values of a task's methods: outputs, and a loss and metrics per sample.

Scores of two classes are also counted by bins, as `common.core.scores` expects.

A task must not return means: summed with other batches' means, they would give samples different
weights. Such a mistake concerns all batches, so the error names no batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from common.core.scores import BIN_WIDTH, BINS, WINDOWED
from common.learning.errors import (
    TaskError,
    WrongTaskError,
    lacks_memory,
    one_line,
    what_was_raised,
)
from common.learning.named_outputs import tensors_of

if TYPE_CHECKING:
    from common.learning.tasks import Task

# Rule of Prometheus for names of labels. MLflow accepts such names, too.
_METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# MLflow allows 250 characters, with the folder.
_LONGEST_METRIC = 100


@contextmanager
def guest(task: Task, index: int = 0) -> Iterator[None]:
    """Run a task's code, which may raise anything, on the batch with this index.

    Raises:
        TaskError: If the code raises.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, TaskError):
        # The machine failed, not the data, or a check has already named the error.
        raise
    except (Exception, SystemExit) as error:
        if lacks_memory(error):
            raise MemoryError(one_line(error)) from error
        # Leaves out the frame of this function.
        caught = error.__traceback__ and error.__traceback__.tb_next
        raise TaskError(index, what_was_raised(error, task, caught)) from error


def check_outputs(task: Task, outputs: object) -> None:
    """Check the return value of `forward`.

    Raises:
        WrongTaskError: If it contains no tensor.
    """
    if not isinstance(outputs, Tensor) and not tensors_of(outputs):
        what = (
            f"forward returned {_kind(outputs)}: a tensor is needed, or a tuple, dict or dataclass"
            " of tensors"
        )
        raise WrongTaskError(task, "forward", what)


def check_losses(task: Task, losses: object, count: int) -> None:
    """Check the return value of `losses` for `count` samples.

    Raises:
        WrongTaskError: If it does not have the shape (count,) and a floating-point type.
    """
    _check_column(task, "losses", "losses", losses, count)
    assert isinstance(losses, Tensor)  # noqa: S101 -- checked above
    if not losses.dtype.is_floating_point:
        what = f"losses has dtype {losses.dtype}: float32, float16 or bfloat16 is needed"
        raise WrongTaskError(task, "losses", what)


def check_gradient(task: Task, outputs: object, losses: Tensor) -> None:
    """Check that a gradient can flow from the losses to the network.

    Raises:
        WrongTaskError: If it cannot, as after `detach`, `no_grad`, NumPy or `torch.tensor`.
    """
    if losses.grad_fn is None:
        learns = any(tensor.requires_grad for tensor in tensors_of(outputs).values())
        method = "losses" if learns else "forward"
        what = (
            f"the loss has no gradient: {method} cut it off from the network, for example with"
            " detach(), no_grad(), NumPy or torch.tensor()"
        )
        raise WrongTaskError(task, method, what)


def check_metrics(task: Task, metrics: object, count: int) -> None:
    """Check the return value of `metrics` for `count` samples.

    Raises:
        WrongTaskError: If it does not map legal names to (count,) real numbers.
    """
    if not isinstance(metrics, Mapping):
        what = f"metrics returned {_kind(metrics)}: a dict of tensors is needed, {{}} for none"
        raise WrongTaskError(task, "metrics", what)
    for name, column in metrics.items():
        if not isinstance(name, str):
            what = f"metrics has a key {name!r}: names of metrics are strings"
            raise WrongTaskError(task, "metrics", what)
        _check_name(task, name)
        _check_column(task, "metrics", f"metric {name!r}", column, count)
        if column.dtype.is_complex:
            what = f"metric {name!r} has dtype {column.dtype}: real numbers are needed"
            raise WrongTaskError(task, "metrics", what)


def _check_name(task: Task, name: str) -> None:
    scored = getattr(task, "binary_scores", None) is not None
    if name == "loss" or name.startswith("doll") or (scored and name in WINDOWED):
        what = f"metric {name!r} has a reserved name: rename it"
    elif not _METRIC.fullmatch(name) or len(name) > _LONGEST_METRIC:
        what = (
            f"metric {name[: _LONGEST_METRIC + 1]!r} has a name that no label can have: use"
            f" letters, digits and _, no digit first, at most {_LONGEST_METRIC} characters"
        )
    else:
        return
    raise WrongTaskError(task, "metrics", what)


def check_scores(task: Task, scores: object, count: int) -> None:
    """Check the return value of `binary_scores` for `count` samples.

    Raises:
        WrongTaskError: If it is not two columns of real numbers.
    """
    if not isinstance(scores, tuple) or len(scores) != 2:
        what = f"binary_scores returned {_kind(scores)}: logits and labels are needed, two tensors"
        raise WrongTaskError(task, "binary_scores", what)
    for name, column in zip(
        ("the logits of binary_scores", "the labels of binary_scores"), scores, strict=True
    ):
        _check_column(task, "binary_scores", name, column, count)
        if column.dtype.is_complex:
            raise WrongTaskError(task, "binary_scores", f"{name} have dtype {column.dtype}")


def check_same_metrics(task: Task, names: list[str], first: list[str]) -> None:
    """Check that a batch has the same metrics as the first one.

    Raises:
        WrongTaskError: If they differ.
    """
    if names != first:
        what = f"metrics returned {names} for one batch and {first} for another"
        raise WrongTaskError(task, "metrics", what)


def _check_column(task: Task, method: str, name: str, column: object, count: int) -> None:
    if not isinstance(column, Tensor):
        what = f"{name} is {_kind(column)}: a tensor with one value per sample is needed"
        raise WrongTaskError(task, method, what)
    if column.shape != (count,):
        what = f"{name} has shape {tuple(column.shape)}: one value per sample is needed, ({count},)"
        raise WrongTaskError(task, method, what)


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


class BinaryScores(Protocol):
    """A task with two classes. It is also measured by AUC, precision and similar."""

    def binary_scores(
        self,
        outputs: Any,  # noqa: ANN401 -- whatever `forward` returns
        records: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return logits of the second class, (n,), and True for records of that class, (n,)."""


@cache
def _edges(device: torch.device) -> Tensor:
    """Return the edges between bins, (BINS - 1,). An edge belongs to the bin below it."""
    return BIN_WIDTH * torch.arange(1 - BINS // 2, BINS // 2, device=device)


def count_scores(
    task: Task, outputs: object, records: Mapping[str, Tensor], count: int
) -> Tensor | None:
    """Count records of each class by bin, (2 * BINS,); None if the task has no `binary_scores`.

    Args:
        task: The task.
        outputs: Outputs of its `forward`.
        records: The records of the outputs.
        count: Number of records, n.

    Raises:
        WrongTaskError: If they are not for n records.
    """
    # An isinstance check of the protocol takes 20 us.
    if getattr(task, "binary_scores", None) is None:
        return None
    found = cast("BinaryScores", task).binary_scores(outputs, records)
    check_scores(task, found, count)
    logits, second = found
    bins = torch.bucketize(logits.contiguous(), _edges(logits.device)).add_(
        second.bool(), alpha=BINS
    )
    return torch.bincount(bins, minlength=2 * BINS)
