"""Optimizers by name, with the options that a job may set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec import Meta

from common.core.messages import ALL_REACHED
from common.data.decoders import converted
from common.errors import UserError
from common.learning.checkpoint import optimizer_kind
from common.learning.parameters import TensorOptions

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

CPU = torch.device("cpu")
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
    # Options of each parameter tensor of the model. Empty if none has its own.
    tensors: tuple[TensorOptions, ...] = ()

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
                if weights.grad is not None:
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


class Step(NamedTuple):
    """Rates of one step, and the tensors that it moves."""

    # Learning rate of tensors without their own.
    rate: float
    # Factor of all learning rates.
    scale: float = 1.0
    # Tensors that the gradient reached, see `reached_mask`.
    reached: int = ALL_REACHED


class _Run(NamedTuple):
    """Neighbouring tensors that are stepped as one."""

    weights: Tensor  # (n,) float32
    gradient: Tensor  # (n,) float32
    # The optimizer's state, changed in place.
    state: dict[str, Tensor]


class FlatOptimizer:
    """Steps a part of a model's flat vector, as torch would step the model's tensors one by one.

    A tensor that no gradient reached keeps its weights and its state. Neighbouring tensors with
    equal numbers of steps are stepped as one.

    The state has an entry for each of `STATE_NAMES`, (n,) float32 for the n numbers of the part.
    Its entry `step` is the number of steps, (), or (T,) if it differs between the T tensors of the
    whole model.

    Args:
        settings: The optimizer.
        sizes: Sizes of the model's T parameter tensors.
        place: Optional. Place of the part in the vector of all parameters. If unset, everything.
        device: Device of the weights, the gradients and the state.

    Raises:
        UserError: If the learning rate or an option is invalid.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        sizes: Sequence[int],
        place: slice | None = None,
        device: torch.device = CPU,
    ) -> None:
        edges = np.append(0, np.cumsum(sizes, dtype=np.int64))
        place = slice(0, int(edges[-1])) if place is None else place
        # Edges of the tensors in this part. Tensors outside are empty.
        self._edges = np.clip(edges, place.start, place.stop) - place.start
        self._names = STATE_NAMES[settings.kind]
        self._zeros = partial(torch.zeros, device=device)
        whole = torch.nn.Parameter(self._zeros(int(self._edges[-1])))
        self._optimizer = make_optimizer(settings, whole)
        self._initial = tuple(self._optimizer.state.pop(whole, ()))
        tensors = settings.tensors or (TensorOptions(),) * len(sizes)
        # Different options, each of a group of the optimizer.
        self._options = [*dict.fromkeys(tensors)]
        self._groups = np.array([self._options.index(each) for each in tensors])
        for _ in self._options[1:]:
            self._optimizer.add_param_group({"params": [torch.nn.Parameter(self._zeros(0))]})
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            if options.weight_decay is not None:
                group["weight_decay"] = options.weight_decay
        # One parameter per run of a step, reused by later steps.
        self._parameters = [whole]

    def initial(self) -> dict[str, Tensor]:
        """Return the state before the first step, which is empty for most optimizers."""
        size = int(self._edges[-1])
        names = self._initial if size else ()
        return {name: self._zeros(() if name == "step" else size) for name in names}

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        step: Step,
    ) -> None:
        """Take one step.

        Args:
            weights: (n,) float32 weights of the part; changed in place.
            gradient: (n,) float32
            state: State of the part; changed in place.
            step: Rates of the step, and the tensors that it moves.

        Raises:
            UserError: If the rate is not positive and finite.
        """
        set_learning_rate(self._optimizer, step.rate * step.scale)
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            if options.learning_rate is not None:
                group["lr"] = options.learning_rate * step.scale
        every = (1 << len(self._edges) - 1) - 1
        differ = "step" in state and state["step"].ndim
        if step.reached & every == every and not differ and len(self._options) == 1:
            self._step([[_Run(weights, gradient, state)]])
        else:
            self._step_some(weights, gradient, state, step.reached & every)

    def _step_some(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], reached: int
    ) -> None:
        count = len(self._edges) - 1
        bits = np.frombuffer(reached.to_bytes(-(-count // 8), "little"), np.uint8)
        chosen = np.unpackbits(bits, count=count, bitorder="little").astype(bool)
        for name in self._names - state.keys():
            state[name] = self._zeros(() if name == "step" else len(weights))
        # The number of steps of a tensor decides which tensors are alike, so it is read here.
        steps = state.get("step", torch.zeros(())).cpu().expand(count).numpy().copy()
        arrays = {name: value for name, value in state.items() if name != "step"}
        runs = [list[_Run]() for _ in self._options]
        for start, stop, before, group in self._runs(chosen, steps):
            place = slice(start, stop)
            own = {name: value[place] for name, value in arrays.items()}
            if "step" in state:
                own["step"] = torch.tensor(before, device=weights.device)
            runs[group].append(_Run(weights[place], gradient[place], own))
        self._step(runs)
        if "step" in state:
            steps += chosen
            same = bool((steps == steps[0]).all())
            state["step"] = torch.tensor(steps[0] if same else steps, device=weights.device)

    def _runs(
        self, chosen: npt.NDArray[np.bool_], steps: npt.NDArray[np.float32]
    ) -> Iterator[tuple[int, int, np.float32, int]]:
        """Yield start, stop, number of steps and group of neighbouring tensors that are alike."""
        starts, stops = self._edges[:-1], self._edges[1:]
        tensors = np.flatnonzero(chosen & (starts < stops))
        if not len(tensors):
            return
        before, after = tensors[:-1], tensors[1:]
        groups = self._groups
        breaks = (stops[before] != starts[after]) | (steps[before] != steps[after])
        breaks |= groups[before] != groups[after]
        firsts, lasts = tensors[np.append(True, breaks)], tensors[np.append(breaks, True)]
        places = starts[firsts].tolist(), stops[lasts].tolist()
        yield from zip(*places, steps[firsts], groups[firsts].tolist(), strict=True)

    def _step(self, runs: Sequence[Sequence[_Run]]) -> None:
        """Step the runs of each group."""
        more = sum(map(len, runs)) - len(self._parameters)
        self._parameters += [torch.nn.Parameter(self._zeros(0)) for _ in range(more)]
        spare = iter(self._parameters)
        for group, own in zip(self._optimizer.param_groups, runs, strict=True):
            group["params"] = []
            for run in own:
                parameter = next(spare)
                parameter.data, parameter.grad = run.weights, run.gradient
                self._optimizer.state[parameter] = run.state
                group["params"].append(parameter)
        self._optimizer.step()
        # The optimizer keeps no memory of its callers.
        for parameter in self._parameters:
            parameter.data, parameter.grad = parameter.data.new_empty(0), None
        self._optimizer.state.clear()


def _check_learning_rate(learning_rate: float) -> None:
    if not 0 < learning_rate < float("inf"):
        raise UserError(f"optimizer.learning_rate: must be above 0 and finite, got {learning_rate}")
