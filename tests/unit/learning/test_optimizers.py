"""Optimizers follow their formulas, and unknown options are refused by name."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.learning.optimizers import (
    STATE_NAMES,
    OptimizerName,
    OptimizerSettings,
    make_optimizer,
    set_learning_rate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NESTEROV: dict[str, Any] = {"momentum": 0.8, "nesterov": True}


def stepped(settings: OptimizerSettings, steps: int = 2) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    parameter.grad = torch.tensor([0.5, -1.0])
    optimizer = make_optimizer(settings, parameter)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def weights_of(optimizer: torch.optim.Optimizer) -> list[float]:
    parameter: torch.nn.Parameter = optimizer.param_groups[0]["params"][0]
    return parameter.tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (OptimizerSettings("sgd", 0.1), [1 - 0.1 * 0.5 * 2, 2 + 0.1 * 2]),
        # The velocities are 0.5, and then 0.9 * 0.5 + 0.5.
        (OptimizerSettings("momentum", 0.1), [1 - 0.1 * (0.5 + 0.95), 2 + 0.1 * (1 + 1.9)]),
        (OptimizerSettings("momentum", 0.1, {"momentum": 0.5}), [1 - 0.125, 2 + 0.25]),
        # With a constant gradient, each step of Adam has the length of the learning rate.
        (OptimizerSettings("adam", 0.1), [0.8, 2.2]),
    ],
)
def test_optimizer_steps_follow_the_formula(
    settings: OptimizerSettings, expected: list[float]
) -> None:
    assert weights_of(stepped(settings)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", STATE_NAMES)
def test_optimizer_state_has_the_documented_names(name: str) -> None:
    optimizer = stepped(OptimizerSettings(name, 0.1))  # type: ignore[arg-type] # a known name
    (parameter,) = optimizer.param_groups[0]["params"]
    kept = {key for key, value in optimizer.state[parameter].items() if value is not None}
    assert kept == STATE_NAMES[name]


@pytest.mark.parametrize(
    ("name", "rate", "options", "named"),
    [
        ("sgd", 0.1, {"beta": 0.9}, "beta.*momentum.*weight_decay"),
        ("sgd", 0.1, {"nesterov": True}, "nesterov needs a momentum"),
        ("ftrl", 0.1, {"l1": -1.0}, "l1"),
        ("adam", 0.1, {"betas": [0.9, 1.0]}, "betas"),
        ("adam", 0.1, {"eps": "small"}, "eps"),
        ("sgd", 0.0, {}, "learning_rate"),
        ("sgd", float("nan"), {}, "learning_rate"),
    ],
)
def test_invalid_optimizer_settings_are_rejected_by_name(
    name: str, rate: float, options: dict[str, object], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        stepped(OptimizerSettings(name, rate, options))  # type: ignore[arg-type] # from a job file


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("sgd", {"weight_decay": 0.1}, partial(torch.optim.SGD, weight_decay=0.1)),
        ("sgd", NESTEROV, partial(torch.optim.SGD, **NESTEROV)),
        ("momentum", {}, partial(torch.optim.SGD, momentum=0.9)),
        ("adam", {"weight_decay": 0.1}, partial(torch.optim.Adam, weight_decay=0.1)),
        ("adamw", {}, torch.optim.AdamW),
        ("adagrad", {"eps": 1e-6}, partial(torch.optim.Adagrad, eps=1e-6)),
    ],
)
def test_optimizer_equals_torch_bit_for_bit(
    name: OptimizerName,
    options: dict[str, object],
    theirs: Callable[..., torch.optim.Optimizer],
) -> None:
    both = [torch.nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2)]
    optimizers = (
        make_optimizer(OptimizerSettings(name, 0.1, options), both[0]),
        theirs([both[1]], lr=0.1, fused=True),
    )
    for step in range(5):
        for parameter, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            parameter.grad = torch.tensor([0.3, -0.7 * step])
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    assert both[0].tolist() == both[1].tolist()


def test_ftrl_equals_algorithm_1_of_its_paper() -> None:
    alpha, beta, l1, l2 = 0.5, 1.0, 0.3, 0.1
    settings = OptimizerSettings("ftrl", alpha, {"l1": l1, "l2": l2})
    parameter = torch.nn.Parameter(torch.zeros(50))
    optimizer = make_optimizer(settings, parameter)
    random = np.random.default_rng(0)
    z, n = np.zeros((2, 50))
    for _ in range(30):
        w = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2) * (abs(z) > l1)
        assert parameter.detach().numpy() == pytest.approx(w, abs=1e-5)
        g = random.normal(size=50) * (random.random(50) < 0.2)
        parameter.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / alpha
        z += g - sigma * w
        n += g**2
    # L1 makes some parameters exactly zero.
    assert 0 < (parameter == 0).sum() < 50


def test_ftrl_without_penalties_steps_at_the_rate_of_each_step() -> None:
    parameter = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = make_optimizer(OptimizerSettings("ftrl", 1.0), parameter)
    weights, squares = np.array([3.0, -2.0]), np.zeros(2)
    for step, rate in enumerate((0.1, 0.4, 0.05, 0.05)):
        gradient = np.array([1.0 + step, 0.0])
        squares += gradient**2
        weights -= rate / (1 + np.sqrt(squares)) * gradient
        set_learning_rate(optimizer, rate)
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        assert parameter.tolist() == pytest.approx(weights, rel=1e-5)


def test_optimizers_do_not_load_the_torch_compiler() -> None:
    code = """
import sys
import torch
from common.learning.optimizers import STATE_NAMES, OptimizerSettings, make_optimizer
for name in STATE_NAMES:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer(OptimizerSettings(name, 0.1), parameter)
    parameter.grad = torch.ones(1)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 -- our own code
