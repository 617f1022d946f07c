"""Groups of parameters step as torch's `param_groups` do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from common.errors import GivenError
from common.learning.checkpoint import named_weights, whole_of
from common.learning.optimizers import STATE_NAMES, Ftrl, OptimizerSettings
from common.learning.parameters import FlatModel, TensorOptions, layout_of, tensor_options
from common.learning.sliced_trainer import SlicedTrainer
from common.learning.trainer import Trainer, unpacked
from tests.ulps import assert_within_ulps

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.learning.optimizers import OptimizerName

RATE = 0.05


@dataclass
class Group:
    """A group of a job file."""

    match: str
    learning_rate: float | None = None
    weight_decay: float | None = None


class Encoder(nn.Module):
    """Layers of several kinds. `tied` shares its weight with `head`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(7, 37), nn.BatchNorm1d(37), nn.LayerNorm(37))
        self.attention = nn.MultiheadAttention(37, 1)
        self.head = nn.Linear(37, 37)
        self.tied = nn.Linear(37, 37, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)


NAMES = [name for name, each in Encoder().named_parameters() if each.requires_grad]
# Each optimizer with options, and as torch makes it.
OPTIMIZERS: dict[OptimizerName, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"weight_decay": 0.1}, partial(torch.optim.SGD, fused=True)),
    "momentum": (
        {"momentum": 0.9, "weight_decay": 0.1},
        partial(torch.optim.SGD, fused=True),
    ),
    "adam": ({"weight_decay": 0.1}, partial(torch.optim.Adam, fused=True)),
    "adamw": ({"weight_decay": 0.1}, partial(torch.optim.AdamW, fused=True)),
    "adagrad": ({"weight_decay": 0.1}, partial(torch.optim.Adagrad, fused=True)),
    "ftrl": ({"l1": 0.001, "l2": 0.1}, Ftrl),
}


def options_of(*groups: Group, no_decay: tuple[str, ...] = ()) -> dict[str, TensorOptions]:
    """Return the options of each parameter of the encoder."""
    return dict(zip(NAMES, tensor_options(Encoder(), groups, no_decay), strict=True))


@pytest.mark.parametrize("name", STATE_NAMES)
def test_groups_step_as_those_of_torch_with_the_schedule_of_their_own_rates(
    name: OptimizerName,
) -> None:
    options, make = OPTIMIZERS[name]
    decay = None if name == "ftrl" else 0.3
    groups = (
        Group("encoder.0.*", 0.01, decay),
        Group("*.weight", weight_decay=decay) if decay else Group("*.weight", 0.02),
        Group("attention.*", 0.2),
    )
    no_decay = () if decay is None else ("norms", "biases")
    module = Encoder()
    tensors = tensor_options(module, groups, no_decay)
    assert len(set(tensors)) >= 3
    model = FlatModel(module)
    settings = OptimizerSettings(name, RATE, options, tensors=tensors)
    parts = model.vector.copy(), model.parameter_count, settings, "mean", layout_of(module)
    whole, slices = Trainer(*parts), SlicedTrainer(*parts, count=3)  # type: ignore[arg-type] # "mean"
    cut = partial(named_weights, layout_of(module))
    own = {name: nn.Parameter(torch.from_numpy(cut(parts[0])[name].copy())) for name in NAMES}
    theirs = make(
        [
            {"params": [parameter], "lr": each.learning_rate or RATE}
            | ({} if each.weight_decay is None else {"weight_decay": each.weight_decay})
            for parameter, each in zip(own.values(), tensors, strict=True)
        ],
        lr=RATE,
        **options,
    )
    rates = [group["lr"] for group in theirs.param_groups]
    for step, scale in enumerate((1.0, 0.5, 0.25, 1.0)):
        drawn = np.random.default_rng(step).normal(size=len(parts[0])).astype(np.float32)
        whole.add(0, drawn, 2)
        whole.apply(0, None, scale)
        totals = {n: torch.tensor(drawn[place]) for n, place in enumerate(slices.places)}
        slices.prepare(totals, 2, 0.0, None, scale)
        slices.commit(range(3))
        for key, gradient in cut(drawn / np.float32(2)).items():
            if key in own:
                own[key].grad = torch.from_numpy(gradient.copy())
        for group, rate in zip(theirs.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        theirs.step()
    for snapshot in (whole.snapshot(), whole_of([slices.snapshot(range(3), whole=False)])):
        held = unpacked(snapshot)
        for key, parameter in own.items():
            assert_within_ulps(cut(held.weights)[key], parameter.detach().numpy(), 4)
        assert held.state.get("step", np.float32(4)) == 4


def test_changed_learning_rate_of_a_job_leaves_the_rates_of_groups() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    tensors = tensor_options(module, [Group("1.*", 0.5)], ())
    subject = Trainer(
        np.zeros(4, np.float32),
        4,
        OptimizerSettings("sgd", 0.25, tensors=tensors),
        layout=layout_of(module),
    )
    subject.add(0, np.ones(4, np.float32), 1)
    subject.apply(0, 0.125)
    assert np.frombuffer(subject.weights(), np.float32).tolist() == [-0.125, -0.125, -0.5, -0.5]


def test_norms_and_biases_have_no_decay() -> None:
    none = {name for name, each in options_of(no_decay=("norms",)).items() if each[1] == 0}
    assert none == {f"encoder.{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")}
    none = {name for name, each in options_of(no_decay=("biases",)).items() if each[1] == 0}
    assert none == {name for name in NAMES if name.endswith("bias")}
    assert "attention.in_proj_bias" in none
    both = options_of(Group("*", 0.1, 0.2), no_decay=("norms", "biases"))
    assert both["encoder.2.weight"] == both["head.bias"] == TensorOptions(0.1, 0.0)
    assert both["head.weight"] == TensorOptions(0.1, 0.2)


def test_first_group_that_matches_a_parameter_applies() -> None:
    found = options_of(Group("encoder.*.bias", weight_decay=0.5), Group("encoder.*", 0.1))
    assert found["encoder.0.bias"] == TensorOptions(None, 0.5)
    assert found["encoder.0.weight"] == TensorOptions(0.1, None)
    assert found["head.weight"] == TensorOptions()
    # Tied weights match by any of their names.
    assert options_of(Group("tied.weight", 0.1))["head.weight"] == TensorOptions(0.1)


@pytest.mark.parametrize(
    ("pattern", "nearest"), [("encodr.0.*", "encoder.0"), ("frozen.*", "encoder")]
)
def test_group_without_trained_parameters_is_rejected_with_the_nearest_names(
    pattern: str, nearest: str
) -> None:
    with pytest.raises(GivenError, match=rf"^optimizer\.groups\[1\]\.match: .*{nearest}"):
        options_of(Group("head.*", 0.1), Group(pattern, 0.1))


def test_module_without_groups_has_no_options() -> None:
    assert tensor_options(Encoder(), (), ()) == ()
