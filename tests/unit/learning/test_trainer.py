"""The trainer's chain of weights: exact sums, and snapshots that resume bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as functions
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from common.core.vectors import SparseVector, dense
from common.errors import CorruptError, UserError
from common.learning.checkpoint import Kind, pack, unnamed, whole_of, with_optimizer
from common.learning.gradients import GradientComputer
from common.learning.optimizers import (
    STATE_NAMES,
    OptimizerName,
    OptimizerSettings,
    make_optimizer,
)
from common.learning.parameters import FlatModel, layout_of
from common.learning.sliced_trainer import SlicedTrainer
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from tests.ulps import assert_within_ulps
from tests.unit.learning.examples import CPU, Counting, Regression, normalised, points

if TYPE_CHECKING:
    from common.core.messages import Vector
    from common.learning.optimizers import Reduction

SGD = OptimizerSettings("sgd", 1.0)
PARAMETERS, BUFFERS = 40, 3
ROUND = 7


def trainer(
    name: OptimizerName = "sgd",
    parameters: int = PARAMETERS,
    buffers: int = BUFFERS,
    learning_rate: float = 0.01,
) -> Trainer:
    start = np.random.default_rng(0).normal(size=parameters + buffers).astype(np.float32)
    return Trainer(start, parameters, OptimizerSettings(name, learning_rate))


def weights_of(subject: Trainer) -> Vector:
    return np.frombuffer(bytes(subject.weights()), np.float32)


def train(subject: Trainer, first: int, last: int, *, learning_rate: float | None = None) -> None:
    for step in range(first, last):
        random = np.random.default_rng(step)
        for samples in (256, 100):
            subject.add(ROUND, random.normal(size=PARAMETERS + BUFFERS).astype(np.float32), samples)
        subject.apply(ROUND, learning_rate)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_update_steps_by_the_mean_or_the_sum_over_its_samples(reduction: str) -> None:
    subject = Trainer(np.zeros(2, np.float32), 2, SGD, reduction)  # type: ignore[arg-type] # known
    subject.add(ROUND, np.array([8, 0], np.float32), 3)
    subject.add(ROUND, np.array([0, 4], np.float32), 1)
    subject.apply(ROUND)
    assert weights_of(subject).tolist() == ([-2, -1] if reduction == "mean" else [-8, -4])


def test_update_uses_its_own_learning_rate() -> None:
    subject = Trainer(np.zeros(1, np.float32), 1, SGD, "sum")
    for rate, weight in ((1.0, -1.0), (0.5, -1.5), (2.0, -3.5), (None, -4.5)):
        subject.add(ROUND, np.ones(1, np.float32), 1)
        subject.apply(ROUND, rate)
        assert weights_of(subject).tolist() == [weight]
    for rate, weight in ((2.0, -5.5), (None, -6.0)):
        subject.add(ROUND, np.ones(1, np.float32), 1)
        subject.apply(ROUND, rate, scale=0.5)
        assert weights_of(subject).tolist() == [weight]


@pytest.mark.parametrize("name", STATE_NAMES)
def test_training_equals_a_plain_torch_loop_bit_for_bit(name: OptimizerName) -> None:
    """An update has two batches of 8; the loop adds up gradients and clips their mean once."""
    network = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(network.weight)
    task, parameter = Regression(network), nn.Parameter(network.weight.detach().clone().flatten())
    settings = OptimizerSettings(name, 0.05, clip_norm=0.8)
    optimizer = make_optimizer(settings, parameter)
    computer = GradientComputer(task, network, CPU)
    subject = Trainer(computer.model.vector, 3, settings)
    clipped = 0
    for step in range(12):
        batches = [points(2 * step + place, 8) for place in range(2)]
        computer.load(subject.weights())
        part = computer.compute(batches)
        subject.add(ROUND, part.vector, part.samples)
        subject.apply(ROUND)

        optimizer.zero_grad()
        for batch in batches:
            x, y = (torch.from_numpy(batch[name]) for name in "xy")
            losses = (functions.linear(x, parameter[None])[:, 0] - y) ** 2
            torch.autograd.backward(losses.sum())
        assert parameter.grad is not None
        parameter.grad /= 16
        clipped += nn.utils.clip_grad_norm_(parameter, 0.8).item() > 0.8
        optimizer.step()
        assert weights_of(subject).tobytes() == parameter.detach().numpy().tobytes()
    assert 0 < clipped < 12


@pytest.mark.parametrize("name", STATE_NAMES)
def test_changed_learning_rate_equals_that_of_a_new_trainer(name: OptimizerName) -> None:
    # Both keep the optimizer's state of the earlier steps.
    changed, made = trainer(name, learning_rate=0.01), trainer(name, learning_rate=0.002)
    train(changed, 0, 3)
    made.restore(changed.snapshot())
    train(changed, 3, 6, learning_rate=0.002)
    train(made, 3, 6)
    assert weights_of(changed).tolist() == weights_of(made).tolist()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_learning_rate_is_rejected(rate: float) -> None:
    subject = trainer()
    subject.add(ROUND, np.ones(PARAMETERS + BUFFERS, np.float32), 1)
    with pytest.raises(UserError, match="learning_rate"):
        subject.apply(ROUND, rate)


def test_trainer_counts_every_record_of_a_stream_once() -> None:
    task = Counting(ids=12)
    computer = GradientComputer(task, task.build(), CPU)
    subject = Trainer(computer.model.vector, 12, SGD, "sum")
    for ids in np.arange(12).reshape(3, 2, 2):
        computer.load(subject.weights())
        part = computer.compute([{"id": batch} for batch in ids])
        subject.add(ROUND, part.vector, part.samples)
        subject.apply(ROUND)
    assert (weights_of(subject) == -1).all()


def test_buffers_move_by_the_average_weighted_by_samples() -> None:
    subject = Trainer(np.array([0, 10], np.float32), 1, SGD)
    subject.add(ROUND, np.array([0, 3 * 2], np.float32), 3)  # moved by +2 over 3 samples
    subject.add(ROUND, np.array([0, 1 * -2], np.float32), 1)
    subject.apply(ROUND)
    assert weights_of(subject).tolist() == [0, 11]


def test_buffer_that_no_batch_moves_stays_the_same_bit_for_bit() -> None:
    network = normalised()
    computer = GradientComputer(Regression(network), network, CPU)
    split = computer.model.parameter_count
    subject = Trainer(computer.model.vector, split, OptimizerSettings("sgd", 0.01))
    constant = computer.model.vector[split : split + 3].copy()
    for step in range(50):
        computer.load(subject.weights())
        part = computer.compute([points(step, 7), points(step + 100, 5)])
        subject.add(ROUND, part.vector, part.samples)
        subject.apply(ROUND)
    assert np.array_equal(weights_of(subject)[split : split + 3], constant)


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
def test_batch_statistics_do_not_depend_on_how_batches_are_split(
    counts: list[int], data: st.DataObject
) -> None:
    network = normalised()
    computer = GradientComputer(Regression(network), network, CPU)
    split = computer.model.parameter_count
    batches = [points(seed, count + 1) for seed, count in enumerate(counts)]
    order = data.draw(st.permutations(range(len(batches))))
    cut = data.draw(st.integers(0, len(batches)))
    start, results = computer.model.vector.copy(), []
    for holders in ([list(range(len(batches)))], [order[:cut], order[cut:]]):
        subject = Trainer(start, split, SGD)
        computer.load(subject.weights())
        for held in filter(None, holders):
            part = computer.compute([batches[index] for index in held])
            subject.add(ROUND, part.vector, part.samples)
        subject.apply(ROUND)
        results.append(weights_of(subject)[split:])
    assert_within_ulps(results[0], results[1], 4)


def test_sparse_gradient_adds_like_a_dense_one() -> None:
    subject, undisturbed = trainer(), trainer()
    size = PARAMETERS + BUFFERS
    part = SparseVector(size, np.array([3, 41]), np.array([[2], [-5]], np.float32))
    whole = np.zeros(size, np.float32)
    whole[[3, 41]] = 2, -5
    for each, vector in ((subject, part), (undisturbed, whole)):
        each.add(ROUND, vector, 3)
        each.add(ROUND, np.ones(size, np.float32), 5)
        each.apply(ROUND)
    assert np.array_equal(weights_of(subject), weights_of(undisturbed))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("touched", [1, 4, 40])  # parameters of 80
def test_sums_of_sparse_gradients_have_the_bits_of_dense_ones(
    reduction: Reduction, touched: int
) -> None:
    """One trainer adds dense gradients, the other the same as sparse ones, except three of them."""
    size = 83
    start = np.random.default_rng(0).normal(size=size).astype(np.float32)
    settings = OptimizerSettings("momentum", 0.1)
    subjects = [Trainer(start, 80, settings, reduction) for _ in range(2)]
    for round_ in range(6):
        random = np.random.default_rng(round_)
        for part in range(2 + round_ % 2):
            blocks = np.sort(random.choice(size, touched, replace=False))
            some = SparseVector(size, blocks, random.normal(size=(touched, 1)).astype(np.float32))
            samples = int(random.integers(1, 9))
            subjects[0].add(round_, dense(some), samples)
            subjects[1].add(round_, dense(some) if round_ + part == 5 else some, samples)
        for subject in subjects:
            if round_ == 2:
                subject.discard(round_)
            else:
                subject.apply(round_)
        assert weights_of(subjects[1]).tobytes() == weights_of(subjects[0]).tobytes()


def test_square_of_a_round_excludes_buffers() -> None:
    subject = trainer()
    subject.add(ROUND, np.full(PARAMETERS + BUFFERS, 2, np.float32), 5)
    subject.add(ROUND, np.full(PARAMETERS + BUFFERS, 1, np.float32), 3)
    assert subject.square(ROUND) == 9 * PARAMETERS


def test_discarded_gradients_have_no_effect() -> None:
    subject, undisturbed = trainer(), trainer()
    subject.add(ROUND, np.full(PARAMETERS + BUFFERS, 9, np.float32), 5)
    subject.discard(ROUND)
    train(subject, 0, 1)
    train(undisturbed, 0, 1)
    assert np.array_equal(weights_of(subject), weights_of(undisturbed))


def test_each_round_has_its_own_sum() -> None:
    # added     1: +1   2: +10   1: +2   3: +100
    # applied                                      2: 10    1: 3    (3 is discarded)
    subject = Trainer(np.zeros(1, np.float32), 1, SGD, "sum")
    for round_, value in ((1, 1), (2, 10), (1, 2), (3, 100)):
        subject.add(round_, np.array([value], np.float32), 1)
    for round_, weight in ((2, -10.0), (1, -13.0)):
        subject.apply(round_)
        assert weights_of(subject).tolist() == [weight]
    subject.discard(3)
    # Reuses the memory of another round.
    subject.add(4, np.ones(1, np.float32), 1)
    subject.apply(4)
    assert weights_of(subject).tolist() == [-14.0]


def test_apply_without_samples_raises() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        trainer().apply(ROUND)


@pytest.mark.parametrize("name", STATE_NAMES)
@pytest.mark.parametrize("first", [0, 1, 5])
def test_restored_trainer_continues_bit_for_bit(name: OptimizerName, first: int) -> None:
    # whole:    0 ────────────────── first + 5
    # broken:   0 ── first │ restore, after other steps ── first + 5
    whole, broken, heir = trainer(name), trainer(name), trainer(name)
    train(whole, 0, first + 5)
    train(broken, 0, first)
    snapshot = broken.snapshot()
    train(heir, 50, 53)
    heir.add(ROUND, np.ones(PARAMETERS + BUFFERS, np.float32), 1)
    heir.restore(snapshot)
    train(heir, first, first + 5)
    assert np.array_equal(weights_of(heir), weights_of(whole))
    assert heir.snapshot() == whole.snapshot()


def test_snapshot_is_a_copy() -> None:
    subject = trainer("adam")
    train(subject, 0, 1)
    snapshot, then = subject.snapshot(), weights_of(subject)
    train(subject, 1, 3)
    subject.restore(snapshot)
    assert np.array_equal(weights_of(subject), then)


def test_restore_of_another_model_or_optimizer_is_rejected() -> None:
    subject = trainer("adam")
    before = subject.snapshot()
    for other, found in (
        (trainer("momentum"), "momentum, 40 parameters, 3 buffers"),
        (trainer("adam", parameters=PARAMETERS + 1), "adam, 41 parameters, 3 buffers"),
    ):
        with pytest.raises(CorruptError, match=f"contains {found}, but .* has adam, 40 parameters"):
            subject.restore(other.snapshot())
    assert subject.snapshot() == before


class InOrder(nn.Module):
    """Two layers of one size, registered in a given order; `forward` is always the same."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))


def of_module(module: nn.Module, name: OptimizerName = "adam") -> Trainer:
    model = FlatModel(module)
    settings = OptimizerSettings(name, 0.1)
    return Trainer(model.vector, model.parameter_count, settings, "mean", layout_of(module))


def sliced(module: nn.Module) -> SlicedTrainer:
    model = FlatModel(module)
    settings, layout = OptimizerSettings("adam", 0.1), layout_of(module)
    return SlicedTrainer(model.vector, model.parameter_count, settings, layout=layout, count=2)


def test_restore_of_equal_layers_in_another_order_is_rejected() -> None:
    # place     1            2          3            4
    # stored    one.weight   one.bias   two.weight   two.bias
    # own       two.weight   two.bias   one.weight   one.bias
    stored, own = of_module(InOrder("one", "two")), of_module(InOrder("two", "one"))
    before, snapshot = own.snapshot(), stored.snapshot()
    parts = [sliced(InOrder("one", "two")).snapshot((n,), whole=False) for n in range(2)]
    said = (
        r"at place 1 it has the parameter 'one.weight' \(4, 4\) float32, but the task's model has"
        r" the parameter 'two.weight' \(4, 4\) float32"
    )
    with pytest.raises(CorruptError, match=said):
        own.restore(snapshot)
    for data in (snapshot, whole_of(parts), sliced(InOrder("one", "two")).snapshot((0, 1))):
        with pytest.raises(CorruptError, match=said):
            sliced(InOrder("two", "one")).restore(data, (0, 1))
    assert own.snapshot() == before
    of_module(InOrder("one", "two")).restore(snapshot)


def test_whole_of_slices_with_different_layouts_is_rejected() -> None:
    parts = [
        sliced(InOrder(*order)).snapshot((n,), whole=False)
        for n, order in enumerate((("one", "two"), ("two", "one")))
    ]
    with pytest.raises(CorruptError, match="slices belong to no model, or to several"):
        whole_of(parts)


@pytest.mark.parametrize("first", [0, 3])
def test_with_optimizer_keeps_the_state_of_the_same_optimizer(
    first: int,
) -> None:
    other, faster = trainer("adam"), trainer("adam", learning_rate=0.5)
    train(other, 0, first)
    faster.add(ROUND, np.ones(PARAMETERS + BUFFERS, np.float32), 1)
    data, was = with_optimizer(other.snapshot(), "adam")
    assert was == "adam"
    faster.restore(data)
    with pytest.raises(ValueError, match="at least one sample"):
        faster.apply(ROUND)
    assert faster.snapshot() == other.snapshot()


# Adagrad has state from step 0 on.
@pytest.mark.parametrize("name", ["momentum", "adagrad"])
def test_with_optimizer_drops_the_state_of_another_optimizer(
    name: OptimizerName,
) -> None:
    other, subject = trainer("adam"), trainer(name)
    train(other, 0, 3)
    train(subject, 10, 12)
    data, was = with_optimizer(other.snapshot(), name)
    assert was == "adam"
    subject.restore(data)
    assert np.array_equal(weights_of(subject), weights_of(other))
    fresh = trainer(name)
    # The snapshot is now this job's own.
    fresh.restore(subject.snapshot())
    assert fresh.snapshot() == subject.snapshot()
    train(subject, 0, 1)
    train(fresh, 0, 1)
    assert fresh.snapshot() == subject.snapshot()


def test_sgd_with_momentum_restores_a_momentum_snapshot() -> None:
    start = np.zeros(PARAMETERS + BUFFERS, np.float32)
    by_name = Trainer(start, PARAMETERS, OptimizerSettings("momentum", 0.01))
    by_option = Trainer(start, PARAMETERS, OptimizerSettings("sgd", 0.01, {"momentum": 0.9}))
    train(by_name, 0, 3)
    by_option.restore(by_name.snapshot())
    for subject in (by_name, by_option):
        train(subject, 3, 5)
    assert by_option.snapshot() == by_name.snapshot()


def test_inconsistent_snapshot_is_rejected() -> None:
    whose = Kind("adam", 2, 1, unnamed(2, 1))
    kind = {"trainer": msgspec.json.encode(whose).decode()}
    weights, two, one = (np.zeros(shape, np.float32) for shape in (3, 2, ()))
    state = {"optimizer.exp_avg": two, "optimizer.exp_avg_sq": two, "optimizer.step": one}
    subject = Trainer(weights, 2, OptimizerSettings("adam", 0.1))
    subject.restore(pack({"weights": weights, **state}, kind))
    for tensors, metadata, reason in (
        ({"weights": weights}, {}, "does not name its"),
        ({"weights": weights}, {"trainer": "adam"}, "does not name its"),
        (state, kind, "without weights"),
        ({"weights": two}, kind, "weights are"),
        ({"weights": weights.astype(np.float64)}, kind, "weights are float64"),
        ({"weights": weights, "optimizer.step": one}, kind, "the state of"),
        ({"weights": weights, **state, "optimizer.exp_avg": weights}, kind, "exp_avg has shape"),
    ):
        with pytest.raises(CorruptError, match=reason):
            subject.restore(pack(tensors, metadata))


@given(cut=st.integers(0, 500))
def test_torn_snapshot_is_rejected(cut: int) -> None:
    subject = trainer("adam")
    train(subject, 0, 1)
    snapshot = subject.snapshot()
    with pytest.raises(CorruptError):
        subject.restore(snapshot[: min(cut, len(snapshot) - 1)])
    assert subject.snapshot() == snapshot


def test_logistic_regression_learns_a_separable_problem() -> None:
    task = make_task("logistic-regression", {"features": 2, "classes": 3})
    computer = GradientComputer(task, build_model(task, seed=0), CPU)
    count = computer.model.parameter_count
    subject = Trainer(computer.model.vector, count, OptimizerSettings("adam", 0.05))
    random = np.random.default_rng(1)
    centres = np.array([[3, 0], [-3, 3], [-3, -3]])
    accuracy = 0.0
    for _ in range(100):
        labels = random.integers(0, 3, (4, 32))
        features = (centres[labels] + random.normal(size=(4, 32, 2)) * 0.6).astype(np.float32)
        computer.load(subject.weights())
        part = computer.compute(
            [{"features": x, "label": y} for x, y in zip(features, labels, strict=True)]
        )
        subject.add(ROUND, part.vector, part.samples)
        subject.apply(ROUND)
        accuracy = part.metric_sums["accuracy"].total / part.samples
    assert accuracy >= 0.99
