"""Gradients on a machine whose memory is too small for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.learning.errors import NoMemoryError
from common.learning.gradients import GROW_AFTER, GradientComputer
from common.learning.tasks import build_model
from tests.ulps import assert_within_ulps

CPU = torch.device("cpu")
RNG = np.random.default_rng(3)
BATCHES = [{"x": RNG.normal(size=(n, 3)).astype(np.float32)} for n in (8, 5)]


class SmallMachine:
    """Predicts x[0]; imitates an error of PyTorch if a pass has more than `most` records."""

    def __init__(
        self, most: int, error: type[Exception] = torch.OutOfMemoryError, *, norm: bool = False
    ) -> None:
        self.most = most
        self.error = error
        self.norm = norm
        # Number of records of each pass.
        self.passes = list[int]()

    def build(self) -> nn.Module:
        """Return the network."""
        norm = [nn.BatchNorm1d(4)] if self.norm else []
        return nn.Sequential(nn.Linear(3, 4), *norm, nn.Linear(4, 1))

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n, 1).

        Raises:
            Exception: If memory does not suffice.
        """
        outputs: Tensor = module(records["x"])
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n,)."""
        self.passes.append(len(outputs))
        if len(outputs) > self.most:
            # A backward pass may run out of memory halfway.
            outputs.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call] # torch's
            raise self.error("cannot allocate memory: tried 20 MiB, 12 MiB are free")
        return (outputs[:, 0] - records["x"][:, 0]).square()

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return one metric per record."""
        del records
        return {"output": outputs[:, 0]}


def computer(task: SmallMachine) -> GradientComputer:
    return GradientComputer(task, build_model(task, 1), CPU, together_bytes=0)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_batch_that_does_not_fit_is_summed_in_parts(most: int, error: type[Exception]) -> None:
    expected = computer(SmallMachine(8)).compute(BATCHES)
    task = SmallMachine(most, error)
    subject = computer(task)
    found = subject.compute(BATCHES)
    assert_within_ulps(found.vector, expected.vector, 64)
    assert found.samples == 13
    assert list(found.metric_sums) == ["output"]
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert subject.take_cuts() > 0
    assert subject.take_cuts() == 0
    task.passes.clear()
    subject.compute(BATCHES)
    assert max(task.passes) <= most, "the computer remembers how much fits"


def test_passes_grow_again_after_a_while() -> None:
    task = SmallMachine(4)
    subject = computer(task)
    for _ in range(GROW_AFTER):
        subject.compute(BATCHES)
    task.most = 8
    task.passes.clear()
    for _ in range(2 * GROW_AFTER):
        subject.compute(BATCHES)
    assert max(task.passes) == 8


def test_one_record_that_does_not_fit_is_an_error_with_what_was_asked_and_free() -> None:
    expected = r"one record does not fit \(.*tried 20 MiB, 12 MiB are free.*\); use a smaller model"
    with pytest.raises(NoMemoryError, match=expected):
        computer(SmallMachine(0)).compute(BATCHES)


def test_batch_normalization_forbids_parts() -> None:
    task = SmallMachine(7, norm=True)
    with pytest.raises(NoMemoryError, match=r"8 records do not fit .* lower `batch_size`"):
        computer(task).compute(BATCHES)
    assert task.passes == [8]


def test_local_steps_are_taken_once_per_batch() -> None:
    expected = computer(SmallMachine(8)).compute(BATCHES, 0.1)
    found = computer(SmallMachine(3)).compute(BATCHES, 0.1)
    assert_within_ulps(found.vector, expected.vector, 256)
