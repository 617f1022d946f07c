"""Optimizers by name, each with the options that a job may set."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import unwrap
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
import torch
from msgspec import Meta

from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

OptimizerName: TypeAlias = Literal["sgd", "momentum", "adam"]
NotNegative = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Which optimizer, and how it is set."""

    name: OptimizerName
    learning_rate: float
    options: Mapping[str, object] = field(default_factory=dict)


class _Plain(torch.optim.Optimizer):
    """What torch has of an optimizer without what it adds for its compiler.

    For that it loads the compiler, whether that is used or not: 1.2 s of processor time, 150 MB.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class PlainSgd(_Plain, torch.optim.SGD):
    """Stochastic gradient descent, with and without momentum."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


class PlainAdam(_Plain, torch.optim.Adam):
    """Adam."""

    step = torch.no_grad()(unwrap(torch.optim.Adam.step))


class _Sgd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weight_decay: NotNegative = 0.0

    def make(self, parameter: torch.nn.Parameter, learning_rate: float) -> torch.optim.Optimizer:
        return PlainSgd([parameter], learning_rate, weight_decay=self.weight_decay, fused=True)


class _Momentum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    momentum: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0

    def make(self, parameter: torch.nn.Parameter, learning_rate: float) -> torch.optim.Optimizer:
        return PlainSgd(
            [parameter],
            learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=True,
        )


class _Adam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: NotNegative = 0.0

    def make(self, parameter: torch.nn.Parameter, learning_rate: float) -> torch.optim.Optimizer:
        return PlainAdam(
            [parameter],
            learning_rate,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )


_KINDS: dict[str, type[_Sgd | _Momentum | _Adam]] = {
    "sgd": _Sgd,
    "momentum": _Momentum,
    "adam": _Adam,
}
OPTIMIZER_NAMES = tuple(_KINDS)

# What each keeps per parameter once it has made a step; a snapshot must hold exactly these.
STATE_NAMES: dict[str, frozenset[str]] = {
    "sgd": frozenset(),
    "momentum": frozenset({"momentum_buffer"}),
    "adam": frozenset({"step", "exp_avg", "exp_avg_sq"}),
}


def make_optimizer(
    settings: OptimizerSettings, parameter: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """Make an optimizer of one flat parameter.

    Raises:
        UserError: If there is no such optimizer or an option makes no sense.
    """
    if settings.name not in _KINDS:
        known = ", ".join(OPTIMIZER_NAMES)
        raise UserError(f"optimizer {settings.name!r} is none of {known}")
    _check_learning_rate(settings.learning_rate)
    kind = _KINDS[settings.name]
    try:
        options = msgspec.convert(dict(settings.options), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise UserError(f"optimizer {settings.name!r}: {error}; its options are {known}") from error
    return options.make(parameter, settings.learning_rate)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Take all further steps at this rate; what the optimizer keeps per parameter stays.

    Raises:
        UserError: If it is not above zero and finite.
    """
    _check_learning_rate(learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _check_learning_rate(learning_rate: float) -> None:
    if not 0 < learning_rate < float("inf"):
        raise UserError(f"optimizer.learning_rate {learning_rate} is not above zero")
