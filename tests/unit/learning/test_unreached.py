"""Parameters that no batch of an update reached stay as torch leaves those without a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from torch import Tensor, nn

from common.core.messages import ALL_REACHED, reached_bits, reached_mask
from common.learning.checkpoint import named_weights, whole_of
from common.learning.gradients import GradientComputer
from common.learning.optimizers import STATE_NAMES, Ftrl, OptimizerSettings
from common.learning.parameters import GIVEN_AWAY, FlatModel, layout_of
from common.learning.sliced_trainer import SlicedTrainer
from common.learning.trainer import Trainer, unpacked
from common.wire.vectors import smallest
from tests.ulps import assert_within_ulps
from tests.unit.learning.examples import CPU

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from common.core.messages import Vector
    from common.data.fields import Columns
    from common.learning.optimizers import OptimizerName

ROUND, SAMPLES, BRANCHES = 1, 4, 3
RATE = 0.05
# Optimizers with decay, and the same ones as torch makes them for tensors one by one.
OPTIMIZERS: dict[OptimizerName, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"weight_decay": 0.1}, partial(torch.optim.SGD, fused=True)),
    "momentum": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        partial(torch.optim.SGD, fused=True),
    ),
    "adam": ({"weight_decay": 0.1}, partial(torch.optim.Adam, fused=True)),
    "adamw": ({"weight_decay": 0.1}, partial(torch.optim.AdamW, fused=True)),
    "adagrad": ({"weight_decay": 0.1}, partial(torch.optim.Adagrad, fused=True)),
    "ftrl": ({"l1": 0.001, "l2": 0.1}, Ftrl),
}


class Branching(nn.Module):
    """A first layer, one of several branches for the whole batch, and a last layer.

    Args:
        width: Size of the layers. Tensors of multiples of 16 numbers have the same bits wherever
            they lie in a vector.
        sparse: True if the first branch begins with an embedding of sparse gradients.
    """

    def __init__(self, width: int, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.first = nn.Linear(width, width)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width))
            for _ in range(BRANCHES)
        )
        self.rows = nn.Embedding(9, width, sparse=sparse)
        self.last = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor, row: Tensor, branch: int) -> Tensor:
        """Map (n, width) to (n,)."""
        inside = self.first(x)
        if branch < BRANCHES:
            inside = self.branches[branch](inside) + (self.rows(row) if branch == 0 else 0.0)
        outputs: Tensor = self.last(inside).squeeze(1)
        return outputs


@dataclass
class BranchTask:
    """Squared error of a network whose branch the first record of a batch names."""

    network: nn.Module

    def build(self) -> nn.Module:
        """Return the given network."""
        return self.network

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n,) predictions."""
        outputs: Tensor = module(records["x"], records["row"], int(records["branch"][0]))
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n,) squared errors."""
        return (outputs - records["y"]) ** 2

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return no metrics."""
        del outputs, records
        return {}


def batch_of(seed: int, width: int, branch: int) -> Columns:
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(SAMPLES, width)).astype(np.float32),
        "y": random.normal(size=SAMPLES).astype(np.float32),
        "row": random.permutation(9)[:SAMPLES],
        "branch": np.full(SAMPLES, branch),
    }


class PlainLoop:
    """The same training in plain torch, with one tensor per parameter."""

    def __init__(self, network: nn.Module, name: OptimizerName) -> None:
        options, make = OPTIMIZERS[name]
        self.network = network
        self.task = BranchTask(network)
        # The fused momentum of torch fails if only some tensors of an optimizer have taken a step.
        self.optimizers = {
            key: make([parameter], lr=RATE, **options)
            for key, parameter in network.named_parameters()
        }

    def update(self, batches: Sequence[Columns]) -> set[str]:
        """Take one step, and return the names of parameters without a gradient."""
        self.network.zero_grad(set_to_none=True)
        for batch in batches:
            records = {name: torch.from_numpy(column) for name, column in batch.items()}
            outputs = self.task.forward(self.network, records)
            torch.autograd.backward(self.task.losses(outputs, records).sum())
        unreached = set()
        for name, parameter in self.network.named_parameters():
            if parameter.grad is None:
                unreached.add(name)
            else:
                parameter.grad /= SAMPLES * len(batches)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return unreached


def tensors_of(snapshot: bytes) -> dict[str, dict[str, Any]]:
    """Return weights and state by parameter."""
    held = unpacked(snapshot)
    found = {"weights": named_weights(held.kind.layout, held.weights)}
    for key, value in held.state.items():
        if key == "step":
            steps = np.broadcast_to(value, len(held.kind.layout))
            found[key] = {each.names[0]: n for each, n in zip(held.kind.layout, steps, strict=True)}
        else:
            found[key] = named_weights(held.kind.layout, value)
    return {name: {key: found[key][name] for key in found} for name in found["weights"]}


def unchanged(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """True if weights and state have the same bits. State that was not made yet is zero."""
    return all(
        value.tobytes() == before.get(key, np.zeros_like(value)).tobytes()
        for key, value in now.items()
    )


def start_of(network: nn.Module, name: OptimizerName) -> tuple[Vector, int, OptimizerSettings]:
    model = FlatModel(network)
    return (
        model.vector.copy(),
        model.parameter_count,
        OptimizerSettings(name, RATE, OPTIMIZERS[name][0]),
    )


class Chain:
    """A trainer and slices that take the same updates as a plain loop."""

    def __init__(self, name: OptimizerName, width: int, *, sparse: bool) -> None:
        self.width = width
        self.plain = PlainLoop(Branching(width, sparse=False), name)
        network = Branching(width, sparse=sparse)
        self.computer = GradientComputer(BranchTask(network), network, CPU)
        layout = self.layout = layout_of(network)
        parts = start_of(Branching(width, sparse=False), name)
        self.trainer = Trainer(*parts, layout=layout)
        self.slices = SlicedTrainer(*parts, layout=layout, count=2)

    def update(self, batches: Sequence[Columns]) -> int:
        """Take one step, and return the mask of reached parameters."""
        total, mask = np.zeros(len(self.trainer.weights()) // 4, np.float32), 0
        self.computer.load(self.trainer.weights())
        for batch in batches:
            found = self.computer.compute([batch])
            reached = reached_mask(reached_bits(found.reached))
            self.trainer.add(ROUND, smallest(found.sparse), found.samples, reached)
            total, mask = total + found.vector, mask | reached
        self.trainer.apply(ROUND)
        # A prepared step that is not committed changes nothing.
        for _ in range(2):
            sums = {n: torch.tensor(total[place]) for n, place in enumerate(self.slices.places)}
            self.slices.prepare(sums, SAMPLES * len(batches), 0.0, reached=mask)
        self.slices.commit(range(2))
        return mask

    def found(self) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Return weights and state of the trainer, and of the slices."""
        parts = [self.slices.snapshot((n,), whole=False) for n in range(2)]
        return tensors_of(self.trainer.snapshot()), tensors_of(whole_of(parts))

    def synchronise(self) -> None:
        """Start the next update of the plain loop and of the slices from the trainer's weights."""
        self.slices.following.copy_(self.trainer.vector)
        weights = named_weights(self.layout, self.slices.following.numpy().copy())
        for name, parameter in self.plain.network.named_parameters():
            parameter.data = torch.from_numpy(weights[name])


def check_reached(
    chain: Chain, key: str, parameter: nn.Parameter, found: Sequence[Mapping[str, Any]]
) -> None:
    """Compare one parameter with that of the plain loop."""
    state, expected = chain.plain.optimizers[key].state[parameter], parameter.detach().numpy()
    for each in found:
        assert each.get("step", 0) == (state.get("step", 0) if "step" in each else 0), key
        if chain.width == 16:
            assert each["weights"].tobytes() == expected.tobytes(), key
            assert all(np.array_equal(each[n], state[n]) for n in state.keys() & each.keys()), key
        else:
            # The end of a tensor may be rounded otherwise.
            assert_within_ulps(each["weights"], expected, 4)


@pytest.mark.parametrize("name", STATE_NAMES)
@given(
    updates=st.lists(
        st.lists(st.integers(0, BRANCHES), min_size=1, max_size=3), min_size=1, max_size=5
    ),
    width=st.sampled_from([16, 5]),
    sparse=st.booleans(),
)
@settings(max_examples=6)
def test_update_equals_plain_torch_where_batches_do_not_reach_all_parameters(
    name: OptimizerName, updates: list[list[int]], width: int, *, sparse: bool
) -> None:
    chain = Chain(name, width, sparse=sparse)
    before = chain.found()
    for number, branches in enumerate(updates):
        batches = [batch_of(9 * number + n, width, each) for n, each in enumerate(branches)]
        unreached = chain.plain.update(batches)
        mask = chain.update(batches)
        after = chain.found()
        for place, (key, parameter) in enumerate(chain.plain.network.named_parameters()):
            assert (key in unreached) == (not mask >> place & 1)
            found = [each[key] for each in after]
            check_reached(chain, key, parameter, found)
            if key in unreached:
                for one, other in zip(found, before, strict=True):
                    assert unchanged(one, other[key])
        chain.synchronise()
        before = after


@pytest.mark.parametrize("sparse", [False, True])
def test_local_steps_reach_what_any_of_their_batches_reaches(*, sparse: bool) -> None:
    network = Branching(16, sparse=sparse)
    computer = GradientComputer(BranchTask(network), network, CPU)
    batches = [batch_of(number, 16, branch) for number, branch in enumerate((0, 2, 2))]
    found = computer.compute(batches, local_rate=RATE)
    names = [name for name, _ in network.named_parameters()]
    unreached = {name for place, name in enumerate(names) if not found.reached >> place & 1}
    assert unreached == {name for name in names if name.startswith("branches.1.")}
    gradient = named_weights(layout_of(network), found.vector)
    assert all(gradient[name].any() == (name not in unreached) for name in names)


@pytest.mark.parametrize("name", STATE_NAMES)
def test_snapshot_with_unequal_steps_continues_bit_for_bit(name: OptimizerName) -> None:
    network = Branching(16, sparse=False)
    parts, layout = start_of(network, name), layout_of(network)
    subject, heir = (Trainer(*parts, layout=layout) for _ in range(2))
    slices = SlicedTrainer(*parts, layout=layout, count=2)
    drawn = np.random.default_rng(0).normal(size=(6, len(parts[0]))).astype(np.float32)
    for number, mask in enumerate((0b11, 0b1, ALL_REACHED)):
        subject.add(ROUND, drawn[number], 3, mask)
        subject.apply(ROUND)
    heir.restore(subject.snapshot())
    slices.restore(subject.snapshot(), (0, 1))
    for number, mask in enumerate((ALL_REACHED, 0b110, ALL_REACHED), start=3):
        for each in (subject, heir):
            each.add(ROUND, drawn[number], 3, mask)
            each.apply(ROUND)
        totals = {n: torch.tensor(drawn[number][place]) for n, place in enumerate(slices.places)}
        slices.prepare(totals, 3, 0.0, reached=mask)
        slices.commit((0, 1))
    assert heir.snapshot() == subject.snapshot()
    assert whole_of([slices.snapshot((n,), whole=False) for n in (0, 1)]) == subject.snapshot()


def test_update_without_any_reached_parameter_changes_only_buffers() -> None:
    subject = Trainer(np.ones(5, np.float32), 4, OptimizerSettings("adamw", 0.1))
    subject.add(ROUND, np.array([0, 0, 0, 0, 2], np.float32), 2, 0)
    subject.apply(ROUND)
    assert np.frombuffer(subject.weights(), np.float32).tolist() == [1, 1, 1, 1, 2]


class _Nothing(torch.autograd.Function):
    """Passes a sum on without a gradient."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        del ctx
        return inputs.sum()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> None:
        del ctx, gradient


@pytest.mark.parametrize("size", [3, GIVEN_AWAY])
def test_model_counts_zero_gradients_as_reached_and_missing_ones_not(size: int) -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(size)) for _ in range(4)])
    model = FlatModel(module)
    for used, mask in (({0, 1}, 0b1), ({2}, 0b100), ({0, 1, 2, 3}, 0b1101), (set[int](), 0)):
        model.clear_gradient()
        losses = [(0 * each).sum() for each in module]
        losses[1] = _Nothing.apply(module[1])  # type: ignore[no-untyped-call] # torch's
        if used:
            torch.autograd.backward(sum(losses[n] for n in used))
        assert model.reached == mask
        model.read_gradient()
        assert model.reached == mask
    model.clear_gradient()
    torch.autograd.backward(sum(each.sum() for each in module))
    assert model.reached == ALL_REACHED


def test_mask_without_missing_parameters_has_no_bits() -> None:
    assert reached_bits(ALL_REACHED) is UNSET
    for mask in (0, 1, 0b101, 1 << 70):
        bits = reached_bits(mask)
        assert isinstance(bits, bytes)
        assert reached_mask(bits) == mask
    assert reached_mask(UNSET) | 0b1 == ALL_REACHED
