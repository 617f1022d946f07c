"""Gradients on a machine whose memory is too small for a whole batch."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.learning.errors import NoMemoryError, enough_memory, shortage
from common.learning.gradients import GROW_AFTER, GradientComputer, OutOfMemory
from common.learning.tasks import build_model
from tests.ulps import assert_within_ulps

GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of"
    " which 1.20 GiB is free."
)
HOST = "DefaultCPUAllocator: can't allocate memory"
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
            raise self.error(GPU if self.error is not RuntimeError else f"{HOST}: 8 bytes")
        return (outputs[:, 0] - records["x"][:, 0]).square()

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return one metric per record."""
        del records
        return {"output": outputs[:, 0]}


def computer(task: SmallMachine, oom: OutOfMemory | None = None) -> GradientComputer:
    return GradientComputer(task, build_model(task, 1), CPU, oom=oom)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_batch_that_does_not_fit_is_summed_in_parts(most: int, error: type[Exception]) -> None:
    expected = computer(SmallMachine(8)).compute(BATCHES)
    task = SmallMachine(most, error)
    subject = computer(task)
    found = subject.compute(BATCHES)
    assert_within_ulps(found.vector, expected.vector, 64)
    assert (expected.cut, found.cut) == (False, True)
    assert found.samples == 13
    assert list(found.metric_sums) == ["output"]
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert subject.take_cuts() > 0
    assert subject.take_cuts() == 0
    task.passes.clear()
    subject.compute(BATCHES)
    assert max(task.passes) <= most, "the computer remembers how much fits"
    assert subject.compute(BATCHES).cut
    assert not subject.compute([{"x": BATCHES[0]["x"][:1]}]).cut


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
    expected = r"one record does not fit \(requested 2.00 GiB, free 1.20 GiB; .*\); use a smaller"
    with pytest.raises(NoMemoryError, match=expected):
        computer(SmallMachine(0)).compute(BATCHES)


def test_batches_that_share_a_pass_are_cut_down_to_one_record() -> None:
    batches = [{"x": batch["x"][:1]} for batch in BATCHES]
    task = SmallMachine(1)
    subject = GradientComputer(task, build_model(task, 1), CPU, pass_records=2)
    assert subject.compute(batches).samples == 2
    assert task.passes == [2, 1, 1]


@pytest.mark.parametrize(("norm", "oom"), [(True, None), (True, "hold"), (False, "hold")])
def test_hold_reports_the_lack_of_memory_without_parts(norm: bool, oom: OutOfMemory | None) -> None:  # noqa: FBT001 -- a case of a test
    task = SmallMachine(7, norm=norm)
    expected = (
        r"8 records do not fit \(requested 2.00 GiB, free 1.20 GiB; .*\); set `oom: chunk` .*,"
        r" use machines with more memory, or lower `batch_size`"
    )
    with pytest.raises(NoMemoryError, match=expected):
        computer(task, oom).compute(BATCHES)
    assert task.passes == [8]


def test_hold_replaces_parts_between_two_gradients() -> None:
    task = SmallMachine(3)
    subject = computer(task)
    subject.compute(BATCHES)
    subject.oom = "hold"
    task.passes.clear()
    with pytest.raises(NoMemoryError, match="8 records"):
        subject.compute(BATCHES)
    assert task.passes == [8]


@pytest.mark.parametrize("count", range(4, 12))
def test_chunk_gives_batch_normalization_two_records_per_pass(count: int) -> None:
    task = SmallMachine(3, norm=True)
    subject = computer(task, "chunk")
    batch = {"x": RNG.normal(size=(count, 3)).astype(np.float32)}
    assert subject.compute([batch]).samples == count
    task.passes.clear()
    subject.compute([batch])
    assert sum(task.passes) == count
    assert {2, 3}.issuperset(task.passes)


def test_three_records_that_do_not_fit_cannot_be_cut_with_batch_normalization() -> None:
    with pytest.raises(NoMemoryError, match=r"3 records do not fit .*; use a smaller model"):
        computer(SmallMachine(2, norm=True), "chunk").compute([{"x": BATCHES[0]["x"][:3]}])


def test_parts_with_batch_normalization_equal_batches_of_their_records() -> None:
    halves = [{"x": part} for part in np.split(BATCHES[0]["x"], 2)]
    expected = computer(SmallMachine(4, norm=True)).compute(halves)
    found = computer(SmallMachine(4, norm=True), "chunk").compute(BATCHES[:1])
    assert_within_ulps(found.vector, expected.vector, 4)


def test_frozen_statistics_do_not_forbid_parts() -> None:
    task = SmallMachine(3, norm=True)
    network = task.build()
    network.train = partial(nn.Module.train, network, mode=False)  # type: ignore[method-assign] # as a task overrides it
    subject = GradientComputer(task, network, CPU)
    assert subject.compute(BATCHES).samples == 13
    assert not subject.has_batch_norm


@pytest.mark.parametrize(
    ("error", "asked", "free"),
    [
        (torch.OutOfMemoryError(GPU), "2.00 GiB", "1.20 GiB"),
        (MemoryError("Unable to allocate 3.20 GiB for an array"), "3.20 GiB", r"\d+\.\d\d .iB"),
        (RuntimeError(f"{HOST}: you tried to allocate 8589934592 bytes."), "8.00 GiB", ".+B"),
        (RuntimeError(f"{HOST}: you tried to allocate 900 bytes."), "900 B", ".+B"),
        (MemoryError(), "an unknown amount", r"\d+\.\d\d .iB"),
    ],
)
def test_lack_of_memory_is_reported_with_readable_quantities(
    error: Exception, asked: str, free: str
) -> None:
    expected = rf"memory does not suffice for the model \(requested {asked}, free {free}; .*Error"
    with pytest.raises(NoMemoryError, match=expected), enough_memory("the model"):
        raise error


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="a typo"), enough_memory("the model"):
        raise RuntimeError("a typo")


def test_free_memory_obeys_the_limit_of_the_process() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    near = (pages * resource.getpagesize()) + (64 << 20)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (near, limits[1]))
        found = shortage(MemoryError())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert re.search(r"free \d\d\.\d\d MiB; MemoryError", found)


def test_local_steps_are_taken_once_per_batch() -> None:
    expected = computer(SmallMachine(8)).compute(BATCHES, 0.1)
    found = computer(SmallMachine(3)).compute(BATCHES, 0.1)
    assert_within_ulps(found.vector, expected.vector, 256)
