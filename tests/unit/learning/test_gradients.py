"""A gradient equals autograd's, for exactly its batches at exactly the round's weights."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import cycle
from math import inf, nan
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common.core.scores import BINS
from common.core.vectors import SparseVector
from common.errors import CorruptError, UserError
from common.learning.arithmetic import Arithmetic
from common.learning.errors import NotFiniteError, TaskError, WrongTaskError
from common.learning.gradients import GradientComputer
from common.learning.models import RunningNorm
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import GIVEN_AWAY, has_batch_norm
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from tests.ulps import assert_within_ulps
from tests.unit.learning.examples import (
    CPU,
    Counting,
    Regression,
    image_task,
    images,
    normalised,
    points,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.data.fields import Columns


def computer(network: nn.Module) -> GradientComputer:
    return GradientComputer(Regression(network), network, CPU, pass_records=1000)


@pytest.mark.parametrize("pass_records", [1, 1 << 20])
def test_binary_scores_are_counted_over_all_batches(pass_records: int) -> None:
    task = make_task("logistic-regression", {"features": 3, "classes": 2})
    batches = [
        {"features": batch["x"], "label": (batch["y"] > 0).astype(np.int64)}
        for batch in (points(1, 5), points(2, 9))
    ]
    found = GradientComputer(task, build_model(task, 0), CPU, pass_records=pass_records)
    scores = np.array(found.compute(batches).scores).reshape(2, BINS)
    positives = sum(int(batch["label"].sum()) for batch in batches)
    assert scores[:, BINS // 2 - 1].tolist() == [14 - positives, positives]  # weights are zero
    assert found.compute(batches).metric_sums.keys() == {"accuracy"}


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (None, "binary_scores returned None"),
        ((torch.zeros(4), torch.zeros(3)), "labels of binary_scores has"),
    ],
)
def test_invalid_binary_scores_raise_wrong_task_error(scores: object, said: str) -> None:
    class Scored(Counting):
        def binary_scores(self, outputs: Tensor, records: Mapping[str, Tensor]) -> object:
            del outputs, records
            return scores

    task = Scored()
    with pytest.raises(WrongTaskError, match=said):
        GradientComputer(task, task.build(), CPU).compute([{"id": np.arange(4)}])


def test_gradient_equals_plain_autograd_summed_over_all_batches() -> None:
    task = image_task()
    batches = [images(seed, count) for seed, count in ((1, 16), (2, 16), (3, 5))]
    found = GradientComputer(task, build_model(task, seed=3), CPU).compute(batches)

    module = build_model(task, seed=3)
    pixels = torch.from_numpy(np.concatenate([batch["image"] for batch in batches])).float() / 255
    labels = torch.from_numpy(np.concatenate([batch["label"] for batch in batches]))
    outputs = module(pixels)
    loss = cross_entropy(outputs, labels, reduction="sum")
    torch.autograd.backward(loss)
    expected = torch.cat([p.grad.ravel() for p in module.parameters() if p.grad is not None])

    assert_within_ulps(found.vector, expected.numpy(), 4)
    assert found.samples == 37
    assert_within_ulps(found.loss_sum, loss.item(), 4)
    assert found.metric_sums == {"accuracy": (float((outputs.argmax(1) == labels).sum()), 37)}
    assert found.vector.dtype == np.float32


class Seeing(Regression):
    """Records the number of records of each pass."""

    passes: list[int]

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return the network's outputs."""
        self.passes.append(len(records["x"]))
        return super().forward(module, records)


def test_small_batches_share_a_pass_and_large_ones_do_not() -> None:
    # Three batches of 4 records. If a pass has room for two of them, the passes are 4 + 4 | 4.
    batches = [points(seed, 4) for seed in (1, 2, 3)]
    found = []
    for room in (1, 11, 12):
        task = Seeing(nn.Linear(3, 1))
        task.passes = []
        torch.nn.init.constant_(task.network.weight, 0.5)  # type: ignore[arg-type]
        torch.nn.init.zeros_(task.network.bias)  # type: ignore[arg-type]
        computer = GradientComputer(task, task.network, CPU, pass_records=room)
        found.append((task.passes, computer.compute(batches)))
    assert [passes for passes, _ in found] == [[4, 4, 4], [8, 4], [12]]
    for _, each in found[1:]:
        assert_within_ulps(each.vector, found[0][1].vector, 4)
        assert_within_ulps(each.loss_sum, found[0][1].loss_sum, 4)
        assert each.samples == 12


def test_batches_of_a_network_with_batch_norm_share_no_pass() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    task = Seeing(nn.Sequential(norm, nn.Linear(3, 1)))
    task.passes = []
    computer = GradientComputer(task, task.network, CPU, pass_records=100)
    computer.compute([points(1, 4), points(2, 4)])
    assert (computer.has_batch_norm, task.passes) == (True, [4, 4])


@pytest.mark.parametrize(
    ("layers", "normalise"),
    [
        ((nn.SyncBatchNorm(2), nn.LazyBatchNorm1d(), nn.BatchNorm3d(2)), True),
        ((nn.LayerNorm(2), nn.InstanceNorm1d(2), RunningNorm(2)), False),
    ],
)
def test_batch_norm_is_found_at_any_depth(
    layers: tuple[nn.Module, ...],
    normalise: bool,  # noqa: FBT001 -- what is expected
) -> None:
    for layer in layers:
        assert has_batch_norm(nn.Sequential(nn.Sequential(layer))) == normalise


def test_non_finite_batch_in_a_shared_pass_is_named() -> None:
    batches = [points(1, 4), points(2, 4), points(3, 4)]
    batches[1]["y"][2] = np.inf
    with pytest.raises(NotFiniteError) as caught:
        computer(nn.Linear(3, 1)).compute(batches)
    assert caught.value.batch_index == 1


def test_gradient_counts_every_record_exactly_once() -> None:
    task = Counting(ids=5)
    batches = [{"id": np.array([0, 1, 1])}, {"id": np.array([3, 1])}]
    assert GradientComputer(task, task.build(), CPU).compute(batches).vector.tolist() == [
        1,
        3,
        0,
        1,
        0,
    ]


def test_gradient_bits_do_not_depend_on_earlier_computations() -> None:
    fresh, used = computer(normalised()), computer(normalised())
    weights = fresh.model.vector.copy()
    torch.manual_seed(5)
    for seed in range(3):
        used.compute([points(seed, 8), points(seed + 10, 8)])
    with pytest.raises(NotFiniteError):
        used.compute([{**points(7, 8), "y": np.full(8, np.nan, np.float32)}])
    used.load(weights)
    batches = [points(20, 8), points(21, 6)]
    assert np.array_equal(used.compute(batches).vector, fresh.compute(batches).vector)
    assert np.array_equal(used.compute(batches).vector, fresh.compute(batches).vector)


@pytest.mark.parametrize(
    "make",
    [
        normalised,
        # Its gradient is handed over with its memory.
        lambda: nn.Sequential(nn.Linear(3, GIVEN_AWAY // 4), nn.Linear(GIVEN_AWAY // 4, 1)),
    ],
    ids=["small", "large"],
)
def test_gradient_left_on_the_device_has_the_bits_of_the_one_on_the_host(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(1)
    network = make()
    host, device = computer(copy.deepcopy(network)), computer(network)
    device.on_device = True
    kept = list[tuple[Tensor, bytes]]()
    for seed in range(3):
        batches = [points(seed, 8), points(seed + 10, 8)]
        found, wanted = device.compute(batches), host.compute(batches).vector.tobytes()
        assert isinstance(found.numbers, Tensor)
        kept.append((found.tensor, wanted))
        # Later gradients leave earlier ones as they are.
        assert all(tensor.numpy().tobytes() == bits for tensor, bits in kept)
        assert found.vector.tobytes() == wanted


def test_sparse_gradient_left_on_the_device_is_dense() -> None:
    task = Counting()
    host, device = (GradientComputer(task, nn.Embedding(10, 1, sparse=True), CPU) for _ in "ab")
    device.on_device = True
    for ids in ([1, 1, 3], [7, 3], [2]):
        batches = [{"id": np.array(ids, np.int64)}]
        expected = host.compute(batches)
        assert isinstance(expected.numbers, SparseVector)
        assert device.compute(batches).tensor.tolist() == expected.tensor.tolist()


def test_update_does_not_depend_on_how_batches_are_split_or_ordered() -> None:
    one, other = computer(normalised()), computer(normalised())
    batches = [points(seed, count) for seed, count in ((1, 8), (2, 8), (3, 4))]
    together = one.compute(batches)
    apart = [other.compute([batches[2]]), other.compute([batches[1], batches[0]])]
    assert_within_ulps(together.vector, apart[0].vector + apart[1].vector, 4)


def test_dropout_masks_depend_on_the_batch_alone() -> None:
    network = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 1))
    batch = {name: np.ones_like(column) for name, column in points(1, 4).items()}
    other = {name: column + 1e-6 for name, column in batch.items()}
    before = torch.get_rng_state()
    subject = computer(network)
    vectors = [subject.compute([part]).vector for part in (batch, other, batch)]
    assert not np.allclose(vectors[0], vectors[1], rtol=1e-3)
    assert np.array_equal(vectors[0], vectors[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_each_batch_moves_the_buffers_from_the_round_start() -> None:
    subject = computer(normalised())
    batches = [points(1, 8), points(2, 4)]
    start = subject.model.buffers.clone()
    found = subject.compute(batches).vector[subject.model.parameter_count :]

    expected = torch.zeros_like(start)
    for batch in batches:
        network = normalised().train()
        network(torch.from_numpy(batch["x"]))
        floats = [b.ravel() for b in network.buffers() if b.is_floating_point()]
        expected += len(batch["y"]) * (torch.cat(floats) - start)
    assert_within_ulps(found, expected.numpy(), 4)
    assert (found[:3] == 0).all()  # the constant does not move


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_non_finite_loss_names_its_batch(bad: int) -> None:
    batches = [points(seed, 4) for seed in range(3)]
    batches[bad]["y"][1] = np.inf
    with pytest.raises(NotFiniteError) as caught:
        computer(nn.Linear(3, 1)).compute(batches)
    assert caught.value.batch_index == bad


class Cliff(nn.Module):
    """A finite loss whose slope is infinite at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (n, 1) square roots."""
        return (inputs[:, :1] * self.weight).sqrt()


@pytest.mark.parametrize(("count", "index"), [(1, 0), (2, None)])
def test_non_finite_gradient_names_its_batch_if_it_has_only_one(
    count: int, index: int | None
) -> None:
    batch: Columns = {"x": np.zeros((2, 3), np.float32), "y": np.ones(2, np.float32)}
    with pytest.raises(NotFiniteError) as caught:
        computer(Cliff()).compute([batch] * count)
    assert caught.value.batch_index == index


def test_exception_of_the_task_is_a_task_error_with_its_batch() -> None:
    task = image_task(classes=4)
    subject = GradientComputer(task, build_model(task, seed=0), CPU)
    with pytest.raises(TaskError, match=r"batch 1.*label: a number is outside") as caught:
        subject.compute([images(1, 4), {**images(2, 4), "label": np.full(4, 9)}])
    assert caught.value.batch_index == 1
    assert isinstance(caught.value.__cause__, ValueError)


class Typo(Regression):
    """Names a field that does not exist."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Look for the field in a helper function."""
        return (outputs - _labels(records)) ** 2


def _labels(records: Mapping[str, Tensor]) -> Tensor:
    return records["lable"]


def test_task_error_has_the_line_of_the_users_code() -> None:
    network = nn.Linear(3, 1)
    with pytest.raises(TaskError) as caught:
        GradientComputer(Typo(network), network, CPU).compute([points(1, 4)])
    error, line = caught.value, _labels.__code__.co_firstlineno + 1
    assert error.summary == f"KeyError: 'lable' (test_gradients.py, line {line}, in _labels)"
    assert error.origin[:3] == ("KeyError", __file__, line)
    assert "return (outputs - _labels(records)) ** 2" in error.traceback
    assert error.traceback.endswith("KeyError: 'lable'\n")
    assert "common/learning" not in error.traceback


class Mismatched(Regression):
    """Causes an error inside PyTorch."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Pass labels of the wrong size to PyTorch."""
        return cross_entropy(outputs, records["y"].long()[:2], reduction="none")


def test_pytorch_error_has_the_line_of_the_task_that_called_it() -> None:
    network = nn.Linear(3, 1)
    with pytest.raises(TaskError) as caught:
        GradientComputer(Mismatched(network), network, CPU).compute([points(1, 4)])
    assert caught.value.origin.file == __file__
    assert caught.value.origin.function == "losses"


class Returning(Regression):
    """A task whose methods return what a test needs."""

    def __init__(
        self,
        outputs: Callable[[Tensor], object] = lambda outputs: outputs,
        losses: Callable[[Tensor], object] = lambda losses: losses,
        metrics: Callable[[Tensor], object] = lambda error: {"error": error},
    ) -> None:
        super().__init__(nn.Linear(3, 1))
        self._change = outputs, losses, metrics

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return changed outputs."""
        return cast("Tensor", self._change[0](super().forward(module, records)))

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return changed losses."""
        return cast("Tensor", self._change[1](super().losses(outputs, records)))

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return changed metrics."""
        return cast("dict[str, Tensor]", self._change[2]((outputs - records["y"]).abs()))


@pytest.mark.parametrize(
    ("task", "expected", "method"),
    [
        (Returning(losses=torch.Tensor.mean), "losses has shape (): one value per", "losses"),
        (Returning(losses=lambda x: x[:2]), "losses has shape (2,): one value per", "losses"),
        (Returning(losses=lambda x: x[:, None]), "losses has shape (4, 1)", "losses"),
        (Returning(losses=lambda x: x > 0), "losses has dtype torch.bool", "losses"),
        (Returning(losses=lambda x: x.tolist()), "losses is an object of type list", "losses"),
        (Returning(losses=lambda _: None), "losses is None", "losses"),
        (
            Returning(outputs=lambda x: x.tolist()),
            "forward returned an object",
            "forward",
        ),
        (
            Returning(metrics=lambda x: {"error": x.mean()}),
            "metric 'error' has shape",
            "metrics",
        ),
        (Returning(metrics=lambda _: {"error": 0.5}), "metric 'error' is an object", "metrics"),
        (Returning(metrics=lambda x: {7: x}), "metrics has a key 7", "metrics"),
        (Returning(metrics=lambda x: {"e": x * 1j}), "metric 'e' has dtype torch.compl", "metrics"),
        (Returning(metrics=lambda x: x), "metrics returned an object of type Tensor", "metrics"),
        (Returning(metrics=lambda x: {"loss": x}), "metric 'loss' has a reserved", "metrics"),
        (Returning(metrics=lambda x: {"doll_up": x}), "metric 'doll_up' has a res", "metrics"),
        (Returning(metrics=lambda x: {"top-5": x}), "metric 'top-5' has a name that", "metrics"),
        (Returning(metrics=lambda x: {"": x}), "metric '' has a name that no label", "metrics"),
        (Returning(metrics=lambda x: {"a" * 101: x}), "metric 'aaaaaaaaaaaaaaaaaaa", "metrics"),
        (Returning(losses=torch.Tensor.detach), "the loss has no gradient: losses", "losses"),
        (
            Returning(losses=lambda x: torch.tensor(x.tolist(), requires_grad=True)),
            "the loss has no gradient: losses",
            "losses",
        ),
        (Returning(outputs=torch.Tensor.detach), "the loss has no gradient: forward", "forward"),
    ],
)
def test_invalid_return_value_is_a_wrong_task_error_without_a_batch(
    task: Returning, expected: str, method: str
) -> None:
    computer = GradientComputer(task, task.network, CPU)
    with pytest.raises(WrongTaskError) as caught:
        computer.compute([points(1, 4)])
    assert caught.value.batch_index is None
    assert caught.value.summary.startswith(expected)
    line = getattr(Returning, method).__code__.co_firstlineno
    assert caught.value.summary.endswith(f" (test_gradients.py, line {line}, in {method})")


def test_metric_named_like_a_score_is_rejected_if_the_task_has_scores() -> None:
    class Scored(Returning):
        def binary_scores(
            self, outputs: Tensor, records: Mapping[str, Tensor]
        ) -> tuple[Tensor, Tensor]:
            return outputs, records["y"] > 0

    for kind, refused in ((Returning, False), (Scored, True)):
        task = kind(metrics=lambda x: {"recall": x})
        with pytest.raises(WrongTaskError, match="reserved") if refused else nullcontext():
            GradientComputer(task, task.network, CPU).compute([points(1, 4)])


@pytest.mark.parametrize("pass_records", [1, 1 << 20])
def test_metric_sums_exclude_nan_values(pass_records: int) -> None:
    task = Returning(metrics=lambda x: {"half": _every_other(x), "none": x * nan, "all": x * 0 + 1})
    computer = GradientComputer(task, task.network, CPU, pass_records=pass_records)
    found = computer.compute([points(1, 4), points(2, 6)])
    assert found.metric_sums == {"all": (10.0, 10), "half": (5.0, 5)}
    assert found.samples == 10
    assert np.isfinite(found.vector).all()


def _every_other(column: Tensor) -> Tensor:
    """Return 1 for records with even numbers, and no value for the others."""
    return torch.where(torch.arange(len(column)) % 2 == 0, 1.0, nan)


@pytest.mark.parametrize(
    ("losses", "metrics", "said"),
    [
        (lambda x: x * inf, lambda x: {"error": x * inf}, "the loss is not finite for batch 0"),
        (lambda x: x, lambda x: {"a": x, "b": x * inf}, "metric 'b' is not finite for batch 0"),
    ],
)
def test_not_finite_error_names_the_loss_or_the_metric(
    losses: Callable[[Tensor], Tensor], metrics: Callable[[Tensor], object], said: str
) -> None:
    task = Returning(losses=losses, metrics=metrics)
    with pytest.raises(NotFiniteError, match=said):
        GradientComputer(task, task.network, CPU).compute([points(1, 4)])


def test_metrics_that_differ_between_batches_raise_wrong_task_error() -> None:
    names = cycle(["a", "b"])
    task = Returning(metrics=lambda x: {next(names): x})
    with pytest.raises(WrongTaskError, match=r"\['b'\] for one batch and \['a'\] for another"):
        GradientComputer(task, task.network, CPU).compute([points(1, 4), points(2, 4)])


def test_order_of_metrics_does_not_matter() -> None:
    orders = iter([("a", "b"), ("b", "a")])
    task = Returning(metrics=lambda x: {name: x + ord(name) for name in next(orders)})
    found = GradientComputer(task, task.network, CPU).compute([points(1, 4), points(2, 4)])
    assert found.metric_sums["b"].total - found.metric_sums["a"].total == pytest.approx(8)


class Replacing(nn.Linear):
    """Replaces its buffer by a new tensor."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Count, but in a new tensor."""
        self.seen = self.seen + 1
        return super().forward(inputs)


def test_module_that_replaces_its_buffers_is_rejected() -> None:
    with pytest.raises(UserError, match="'seen'"):
        computer(Replacing()).compute([points(1, 4)])


@pytest.mark.parametrize("batches", [[], [points(1, 0)], [{}]])
def test_compute_without_samples_raises(batches: list[Columns]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        computer(nn.Linear(3, 1)).compute(batches)


def test_load_of_weights_of_another_model_is_rejected() -> None:
    with pytest.raises(CorruptError):
        computer(nn.Linear(3, 1)).load(bytes(12))


def test_bfloat16_gradient_is_close_and_in_float32() -> None:
    task = image_task()
    exact = GradientComputer(task, build_model(task, seed=0), CPU)
    rough = GradientComputer(
        task, build_model(task, seed=0), CPU, arithmetic=Arithmetic("bfloat16")
    )
    batch = images(1, 64)
    wanted, found = exact.compute([batch]).vector, rough.compute([batch]).vector
    assert found.dtype == np.float32
    assert not np.array_equal(found, wanted)
    assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_gradient_is_close_to_the_cpu_and_reproducible() -> None:
    task = image_task()
    batches = [images(1, 64), images(2, 32)]
    on_cpu = GradientComputer(task, build_model(task, seed=0), CPU).compute(batches)
    device = torch.device("cuda", 0)
    gpu = GradientComputer(
        task, build_model(task, seed=0), device, arithmetic=Arithmetic(deterministic=True)
    )
    first, second = gpu.compute(batches), gpu.compute(batches)
    assert np.allclose(first.vector, on_cpu.vector, rtol=1e-2, atol=1e-2)
    assert np.array_equal(first.vector, second.vector)


def test_operation_without_reproducible_bits_is_an_error_of_a_deterministic_job() -> None:
    def put(losses: Tensor) -> Tensor:
        return losses.clone().put_(torch.tensor([0]), losses[:1].detach())

    for deterministic in (None, True, False):
        task = Returning(losses=put)
        refused = pytest.raises(TaskError, match="deterministic")
        subject = GradientComputer(
            task, task.network, CPU, arithmetic=Arithmetic(deterministic=deterministic)
        )
        with nullcontext() if deterministic is False else refused:
            subject.compute([points(1, 4)])
        assert torch.get_deterministic_debug_mode() == 0


# --- local steps: model averaging ----------------------------------------------------------------


def line(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_walk_takes_each_gradient_after_the_steps_before_it(
    reduction: Literal["mean", "sum"],
) -> None:
    network, batches = line(), [points(seed, count) for seed, count in ((1, 4), (2, 6), (3, 5))]
    subject = GradientComputer(Regression(network), network, CPU, reduction=reduction)
    before = subject.model.vector.copy()
    found = subject.compute(batches, local_rate=0.125)
    assert np.array_equal(subject.model.vector, before)  # after the local steps

    weights, expected = before.copy(), np.zeros_like(before)
    for batch in batches:
        subject.load(weights)
        part = subject.compute([batch])
        expected += part.vector
        weights -= 0.125 * part.vector / (part.samples if reduction == "mean" else 1)
    assert_within_ulps(found.vector, expected, 4)
    assert not np.allclose(found.vector, computed_at(before, batches), rtol=1e-3)
    assert found.samples == 15


def computed_at(
    weights: npt.NDArray[np.float32], batches: list[Columns]
) -> npt.NDArray[np.float32]:
    network = line()
    subject = computer(network)
    subject.load(weights)
    return subject.compute(batches).vector


def test_update_from_walks_is_the_average_of_the_copies() -> None:
    # Two workers make two local steps each: K = 4, p = 2.
    rate, network = 0.125, line()
    subject = computer(network)
    start = subject.model.vector.copy()
    trainer = Trainer(start, subject.model.parameter_count, OptimizerSettings("sgd", 9.0))
    copies = []
    for worker in (0, 2):
        stepped = [points(worker, 4), points(worker + 1, 4)]
        subject.load(start)
        part = subject.compute(stepped, local_rate=rate)
        trainer.add(1, part.vector, part.samples)
        weights = start.copy()
        for batch in stepped:
            subject.load(weights)
            alone = subject.compute([batch])
            weights -= rate * alone.vector / alone.samples
        copies.append(weights)
    trainer.apply(1, rate, scale=4 / 2)
    found = np.frombuffer(bytes(trainer.weights()), np.float32)
    assert_within_ulps(found, (copies[0] + copies[1]) / 2, 4)


def test_walk_with_sum_reduction_counts_every_record_once() -> None:
    task = Counting(ids=12)
    subject = GradientComputer(task, task.build(), CPU, reduction="sum")
    batches = [{"id": ids} for ids in np.arange(12).reshape(3, 4)]
    assert subject.compute(batches, local_rate=0.5).vector.tolist() == [1.0] * 12


def test_failed_walk_names_its_batch_and_restores_the_weights() -> None:
    network = line()
    subject = computer(network)
    before = subject.model.vector.copy()
    wrong = points(2, 4) | {"y": np.full_like(points(2, 4)["y"], np.nan)}
    with pytest.raises(NotFiniteError) as caught:
        subject.compute([points(1, 4), wrong], local_rate=0.5)
    assert caught.value.batch_index == 1
    assert np.array_equal(subject.model.vector, before)
