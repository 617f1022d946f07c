"""Optimizers by name, with the options that a job may set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch
from msgspec import Meta

from common.data.decoders import converted
from common.errors import UserError
from common.learning.checkpoint import optimizer_kind

if TYPE_CHECKING:
    from torch import Tensor

OptimizerName: TypeAlias = Literal["sgd", "momentum", "adam", "adamw", "adagrad", "ftrl"]
# Reduction of a gradient summed over samples.
Reduction: TypeAlias = Literal["mean", "sum"]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """An optimizer, its learning rate and its options."""

    name: OptimizerName
    learning_rate: float
    options: Mapping[str, object] = field(default_factory=dict)
    # Gradients with a larger norm, after `reduction`, are scaled down to this norm.
    clip_norm: float | None = None

    @property
    def kind(self) -> str:
        """See `optimizer_kind`."""
        return optimizer_kind(self.name, self.options.get("momentum"))


class _Plain(torch.optim.Optimizer):
    """Methods of torch optimizers without the wrappers for torch's compiler.

    The wrappers load the compiler even if it is not used: 1.2 s of processor time, 150 MB.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class PlainSgd(_Plain, torch.optim.SGD):
    """Stochastic gradient descent, with or without momentum."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


class PlainAdam(_Plain, torch.optim.Adam):
    """Adam."""

    step = torch.no_grad()(unwrap(torch.optim.Adam.step))


class PlainAdamW(PlainAdam, torch.optim.AdamW):
    """Adam with weight decay that is not part of the gradient."""


class PlainAdagrad(_Plain, torch.optim.Adagrad):
    """Adagrad."""

    step = torch.no_grad()(unwrap(torch.optim.Adagrad.step))


class Ftrl(_Plain):
    """FTRL-Proximal, per coordinate (McMahan et al., "Ad Click Prediction", 2013, algorithm 1).

    Let n_t be the sum of the squares of g_1 to g_t, and eta_t = rate / (1 + sqrt(n_t)). Then w_t
    minimizes the sum of (g_1 + ... + g_t) w, all sigma_s / 2 (w - w_(s-1))^2, and l1 |w| + l2 / 2
    w^2, where sigma_s = 1/eta_s - 1/eta_(s-1) and 1/eta_0 = 0. From weights of zero and at a
    constant rate, this is algorithm 1 with beta = 1, which the paper finds good enough. At any
    rate, without l1 and l2, it is w_t = w_(t-1) - eta_t g_t.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, *, l1: float, l2: float) -> None:
        super().__init__(params, {"lr": lr, "l1": l1, "l2": l2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # nobody gives one
        """Take one step."""
        del closure
        for group in self.param_groups:
            for weights in group["params"]:
                self._move(weights, group)

    def _move(self, weights: Tensor, group: Mapping[str, Any]) -> None:
        state, gradient, l1 = self.state[weights], weights.grad, group["l1"]
        if not state:
            state |= {name: torch.zeros_like(weights) for name in ("linear", "squares", "inverse")}
        linear, squares, inverse = state["linear"], state["squares"], state["inverse"]
        squares.addcmul_(gradient, gradient)
        now = (squares.sqrt() + 1) / group["lr"]
        linear.add_(gradient).addcmul_(now - inverse, weights, value=-1)
        inverse.copy_(now)
        # -linear, shrunk towards zero by l1.
        weights.copy_((linear.clamp(-l1, l1) - linear) / (now + group["l2"]))


class _Sgd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    momentum: Decay = 0.0
    nesterov: bool = False
    weight_decay: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")


class _Momentum(_Sgd, frozen=True, forbid_unknown_fields=True):
    momentum: Annotated[float, Meta(gt=0, lt=1)] = 0.9


class _Adam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0


class _AdamW(_Adam, frozen=True, forbid_unknown_fields=True):
    weight_decay: NotNegative = 0.01


class _Adagrad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    eps: Positive = 1e-10
    weight_decay: NotNegative = 0.0


class _Ftrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    l1: NotNegative = 0.0
    l2: NotNegative = 0.0


class _Kind(NamedTuple):
    """Implementation of an optimizer."""

    options: type[_Sgd | _Adam | _Adagrad | _Ftrl]
    # Takes the parameters, the learning rate and the options.
    make: Callable[..., torch.optim.Optimizer]
    # Names of the state of a parameter after a step. A snapshot has exactly these.
    state: frozenset[str]


_ADAMS = frozenset({"step", "exp_avg", "exp_avg_sq"})
_KINDS = {
    "sgd": _Kind(_Sgd, partial(PlainSgd, fused=True), frozenset()),
    "momentum": _Kind(_Momentum, partial(PlainSgd, fused=True), frozenset({"momentum_buffer"})),
    "adam": _Kind(_Adam, partial(PlainAdam, fused=True), _ADAMS),
    "adamw": _Kind(_AdamW, partial(PlainAdamW, fused=True), _ADAMS),
    "adagrad": _Kind(_Adagrad, partial(PlainAdagrad, fused=True), frozenset({"step", "sum"})),
    "ftrl": _Kind(_Ftrl, Ftrl, frozenset({"linear", "squares", "inverse"})),
}
STATE_NAMES = {name: kind.state for name, kind in _KINDS.items()}


def make_optimizer(
    settings: OptimizerSettings, parameter: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """Make an optimizer for one flat parameter.

    Raises:
        UserError: If the learning rate or an option is invalid.
    """
    _check_learning_rate(settings.learning_rate)
    kind = _KINDS[settings.name]
    try:
        options = converted(dict(settings.options), kind.options)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.options.__struct_fields__)
        raise UserError(f"optimizer {settings.name!r}: {error}; its options are {known}") from error
    return kind.make([parameter], settings.learning_rate, **msgspec.structs.asdict(options))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of all further steps. The optimizer's state stays.

    Raises:
        UserError: If the rate is not positive and finite.
    """
    _check_learning_rate(learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _check_learning_rate(learning_rate: float) -> None:
    if not 0 < learning_rate < float("inf"):
        raise UserError(f"optimizer.learning_rate: must be above 0 and finite, got {learning_rate}")
