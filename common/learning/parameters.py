"""All trained numbers of a model in one flat vector, and all its gradients in another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import InitVar, dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from common.core.messages import ALL_REACHED
from common.core.vectors import SparseVector, numbers_in, squared_norm, write_to
from common.errors import CorruptError, GivenError, OtherModelError, UserError
from common.learning.base import OTHER_TASK, Base
from common.learning.checkpoint import Layout, TensorSlice, difference

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from common.core.messages import Vector


# Gradients from this size on are handed over with their memory instead of copied. The copy would
# take as long as pointing some hundreds of parameters to new memory.
GIVEN_AWAY = 1 << 20


@dataclass(slots=True)
class _Part:
    """The part of the gradient of one parameter that may be nonzero."""

    parameter: Tensor
    place: slice
    # Gradient of all parameters.
    vector: InitVar[Tensor]
    everywhere: bool
    # (rows, width) view, with rows along the parameter's first dimension.
    gradient: Tensor = field(init=False)
    # Rows that may be nonzero. Not used if `everywhere`.
    rows: npt.NDArray[np.bool_] = field(init=False)
    # Number of changes of the gradient before the first backward pass.
    changes: int = field(init=False)

    def __post_init__(self, vector: Tensor) -> None:
        self.use(vector)
        self.rows = np.zeros(len(self.gradient), bool)

    def take(self, gradient: Tensor | None) -> Tensor | None:
        """Add a sparse gradient, and return zeros in its place. This is a hook of the parameter.

        torch takes ten times as long to add a sparse gradient with repeated rows.
        """
        # Torch also calls the hook if an operation has no gradient for the parameter.
        if gradient is None:
            return None
        if not gradient.is_sparse or gradient.sparse_dim() != 1:
            self.everywhere = True
            return None
        # The public methods of a sparse tensor sort it first, and sum equal rows in another order.
        [rows], values = gradient._indices(), gradient._values()  # noqa: SLF001
        self.gradient.index_add_(0, rows, values.reshape(len(rows), -1))
        self.rows[rows.numpy()] = True
        return torch.zeros_like(gradient)

    def indices(self) -> npt.NDArray[np.int64]:
        """Return indexes of the vector that may be nonzero, ascending."""
        if self.everywhere:
            return np.arange(self.place.start, self.place.stop)
        rows, width = np.flatnonzero(self.rows), self.gradient.shape[1]
        return np.ravel(self.place.start + rows[:, None] * width + np.arange(width))

    def clear(self) -> None:
        """Set the gradient to zero."""
        if self.everywhere:
            self.gradient.zero_()
        else:
            rows = np.flatnonzero(self.rows)
            self.gradient.numpy()[rows] = 0
            self.rows[rows] = False
        self.changes = self.gradient._version  # noqa: SLF001 -- no other way costs as little

    def use(self, vector: Tensor) -> None:
        """Make the gradient a part of a vector.

        Only a detached view has its own count of changes. A backward pass that reaches the
        parameter adds to the gradient, and so raises the count, even if it adds zeros.
        """
        self.parameter.grad = vector[self.place].view(self.parameter.shape).data
        self.gradient = _rows(self.parameter.grad)
        self.changes = self.gradient._version  # noqa: SLF001 -- as above

    @property
    def is_reached(self) -> bool:
        """True if a backward pass has reached the parameter since the gradient was cleared."""
        return self.gradient._version != self.changes  # noqa: SLF001 -- as above


class FlatModel:
    """A module whose trained numbers are views into one vector: see `training_state`.

    The parameters come first, in the module's own order, then the buffers. Each parameter's `.grad`
    is a view of the gradient vector, so backward passes add to it directly. Therefore it is zeroed
    in place and never set to None. On the CPU, adding a sparse gradient (`Embedding` with
    `sparse=True`) takes time only for its rows.

    Attributes:
        module: The network. It can be used as usual.
        state: (P + B,) float32 parameters, then buffers, on the module's device.
        gradient: (P + B,) float32. Backward passes add to the first P numbers; the others are the
            caller's. After it was read, the next `clear_gradient` may replace its memory.
        parameter_count: P
        buffer_count: B
        layout: Names, shapes and types of the vector's tensors, in its order.
        base: The tensors outside the vector. No update changes them.
    """

    def __init__(self, module: nn.Module) -> None:
        """Put the module into training mode, and move its trained numbers into the vector.

        Their values stay.

        Raises:
            UserError: If the module cannot be trained this way. See `training_state`.
        """
        parameters, buffers = training_state(module)
        self.module = module
        self.layout = layout_of(module)
        self.base = frozen_base(module)
        self.parameter_count = sum(parameter.numel() for parameter in parameters.values())
        self.buffer_count = sum(buffer.numel() for buffer in buffers.values())
        size, device = self.parameter_count + self.buffer_count, next(module.parameters()).device
        self.state = torch.empty(size, device=device)
        self.gradient = torch.zeros(size, device=device)
        self._buffers = buffers
        self._requires_grad = [parameter.requires_grad for parameter in module.parameters()]
        self._parts = list[_Part]()
        on_host = device.type == "cpu"
        start = 0
        for tensor in (*parameters.values(), *buffers.values()):
            place = slice(start, start + tensor.numel())
            start = place.stop
            view = self.state[place].view(tensor.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            if tensor.requires_grad:
                part = _Part(tensor, place, self.gradient, everywhere=not on_host)
                self._parts.append(part)
                if on_host:
                    tensor.register_hook(part.take)  # type: ignore[no-untyped-call] # torch's
        self._host = self.state if on_host else torch.empty(size, pin_memory=True)
        # True while a caller owns the gradient's memory.
        self._given = False
        # Memory that callers have returned.
        self._spare: list[Tensor] = []

    @property
    def vector(self) -> Vector:
        """The model's numbers on the host, (P + B,) float32: its own memory, or a copy of a GPU's.

        The next call overwrites such a copy.
        """
        if self._host is not self.state:
            self._host.copy_(self.state)
        return cast("Vector", self._host.numpy())

    def weights(self) -> memoryview:
        """Return the bytes of `vector` for sending, without a copy."""
        return self.vector.data.cast("B")

    def check(self, layout: Layout) -> None:
        """Check that weights of a layout fit this model.

        Raises:
            OtherModelError: If they do not.
        """
        if found := difference(layout, self.layout):
            raise OtherModelError(f"the stored model is not the task's: {found}; {OTHER_TASK}")

    def load(self, weights: bytes | memoryview | Vector | Tensor) -> None:
        """Load parameters and buffers.

        Raises:
            CorruptError: If their length is not this model's.
        """
        given: Tensor | npt.NDArray[np.uint8]
        given = weights if isinstance(weights, torch.Tensor) else np.frombuffer(weights, np.uint8)
        if given.nbytes != self.state.nbytes:
            raise CorruptError(
                f"weights of {given.nbytes} bytes do not fit a model of {self.state.nbytes} bytes "
                f"({self.parameter_count} parameters and {self.buffer_count} buffers, float32)"
            )
        if isinstance(given, torch.Tensor):
            self.state.copy_(given)
            return
        self._host.numpy()[:] = given.view(np.float32)
        if self._host is not self.state:
            self.state.copy_(self._host)

    def write(self, changes: SparseVector) -> None:
        """Overwrite some parameters and buffers.

        Raises:
            CorruptError: If the vector's length is not this model's.
        """
        if changes.size != len(self.state):
            raise CorruptError(
                f"changes for a model of {changes.size} numbers do not fit one of {len(self.state)}"
            )
        if self._host is self.state:
            write_to(self._host.numpy(), changes)
        else:
            blocks, values = (torch.from_numpy(np.array(part)) for part in changes[1:])
            state = self.state.view(-1, values.shape[1])
            state[blocks.to(state.device)] = values.to(state.device)

    def clear_gradient(self) -> None:
        """Set the gradient to zero, as required before the first backward pass."""
        if self._given:
            self._take_memory()
            return
        for part in self._parts:
            part.clear()
        self.gradient[self.parameter_count :].zero_()

    def _take_memory(self) -> None:
        """Move the gradient to other memory, set to zero."""
        self.gradient = self._spare.pop().zero_() if self._spare else torch.zeros_like(self.state)
        for part in self._parts:
            part.use(self.gradient)
        self._given = False

    @property
    def reached(self) -> int:
        """Parameters that backward passes reached since `clear_gradient`: bits as of `Reached`.

        As in torch, a parameter is also reached if its gradient is zero.
        """
        unreached = [n for n, part in enumerate(self._parts) if not part.is_reached]
        if not unreached:
            return ALL_REACHED
        return (1 << len(self._parts)) - 1 - sum(1 << n for n in unreached)

    def take_gradient(self) -> Tensor:
        """Return the gradient on the model's device, (P + B,) float32. The caller then owns it."""
        if len(self.gradient) < GIVEN_AWAY or not all(part.everywhere for part in self._parts):
            return self.gradient.clone()
        self._given = True
        return self.gradient

    def read_gradient(self) -> Vector | SparseVector:
        """Return the gradient on the host, which the caller then owns.

        It is sparse if the gradient of any parameter is.
        """
        if all(part.everywhere for part in self._parts):
            if self._host is self.state:
                return cast("Vector", self.take_gradient().numpy())
            # Copying 100 MB takes 2 ms into pinned memory that is reused, and 58 ms into new memory
            # (H200). Torch reuses this memory once nothing refers to it.
            host = torch.empty_like(self.gradient, device="cpu", pin_memory=True)
            return cast("Vector", host.copy_(self.gradient).numpy())
        buffers = np.arange(self.parameter_count, len(self.gradient))
        indices = np.concatenate([*(part.indices() for part in self._parts), buffers])
        values = self.gradient.numpy()[indices]
        return SparseVector(len(self.gradient), indices, values[:, None])

    def give_back(self, gradient: Vector | Tensor) -> None:
        """Return the memory of a gradient that was read, for reuse. Any thread may call this."""
        memory = torch.as_tensor(gradient)
        if memory.device == self.state.device and GIVEN_AWAY <= len(memory) == len(self.state):
            self._spare[:] = [memory]

    @property
    def buffers(self) -> Tensor:
        """View of the buffers, (B,) float32."""
        return self.state[self.parameter_count :]

    def check_module(self) -> None:
        """Check that the module trains what it did at first, and writes its buffers in place.

        Raises:
            UserError: If it has frozen or released a parameter, or replaced a buffer.
        """
        if [each.requires_grad for each in self.module.parameters()] != self._requires_grad:
            raise UserError(
                "requires_grad of a parameter has changed: freeze parameters in build(), because "
                "a job trains the same ones until it ends"
            )
        for name, buffer in self._buffers.items():
            if self.module.get_buffer(name) is not buffer:
                raise UserError(
                    f"buffer {name!r} was replaced by a new tensor, so its changes would be lost;"
                    " write into it with copy_() or another in-place operation"
                )


def has_batch_norm(module: nn.Module) -> bool:
    """Return True if some part of a module normalises by the samples of its batch.

    In evaluation mode, batch normalization uses its running statistics instead, if it has any.
    """
    return any(
        isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        for part in module.modules()
    )


def is_finite(vector: Vector | SparseVector | Tensor) -> bool:
    """Return True if all numbers of a vector are finite, in the time it takes to read them.

    If a number is not finite, neither is the sum. If only the sum overflows, all numbers are
    checked. A tensor is checked on its device.
    """
    numbers = torch.as_tensor(vector if isinstance(vector, torch.Tensor) else numbers_in(vector))
    return isfinite(numbers.sum().item()) or bool(numbers.isfinite().all())


def square_of(vector: Tensor) -> float:
    """Return the squared norm of a vector, which is finite if its numbers are.

    Args:
        vector: (n,) float32
    """
    if vector.device.type == "cpu":
        return squared_norm(vector.numpy(), len(vector))
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64).square())


def _rows(gradient: Tensor) -> Tensor:
    """Return a (rows, width) view by the first dimension."""
    return gradient.flatten(1) if gradient.ndim > 1 else gradient.view(-1, 1)


def training_state(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Return what an update changes: parameters that require a gradient, and float buffers.

    Buffers count if they are persistent and their module is in training mode. So the module is put
    into training mode first; a task that overrides `train` can keep parts in evaluation mode.
    Integer buffers cannot be averaged over batches and are left out. The only one that changes in
    common networks is the counter `num_batches_tracked`, which is unused if batch normalisation has
    a fixed momentum. Buffers with `persistent=False` are constants.

    Raises:
        UserError: If there is nothing to train, trained numbers are not float32 or share memory
            with frozen ones, or an integer buffer may matter.
    """
    module.train()
    parameters = {n: each for n, each in module.named_parameters() if each.requires_grad}
    if not parameters:
        raise UserError("the module has no parameters to train")
    saved = module.state_dict(keep_vars=True)
    buffers = {}
    for name, buffer in module.named_buffers():
        owner = module.get_submodule(name.rpartition(".")[0])
        if name not in saved or not owner.training or is_counter(owner, name):
            continue
        if not buffer.is_floating_point():
            raise UserError(
                f"buffer {name!r} is {buffer.dtype} and might change, but only float32 is"
                " averaged over batches; register a constant with persistent=False, and give batch"
                " normalisation a momentum"
            )
        buffers[name] = buffer
    trained = {**parameters, **buffers}
    for name, tensor in trained.items():
        if tensor.dtype != torch.float32:
            raise UserError(
                f"{name!r} is {tensor.dtype}: trained parameters and buffers must be float32"
            )
    # Tensors on the device "meta" have no memory.
    places = {each.data_ptr(): name for name, each in trained.items() if not each.is_meta}
    ours = set(map(id, trained.values()))
    for name, tensor in saved.items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in ours and tensor.numel():
            other = places.get(tensor.data_ptr())
            if other is not None and not tensor.is_meta:
                raise UserError(
                    f"{name!r} is frozen and shares memory with {other!r}, which is trained: "
                    "use one parameter for both"
                )
    return parameters, buffers


# Modules that normalize their inputs. `_NormBase` is the base of all kinds of batch and instance
# normalization.
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class TensorOptions(NamedTuple):
    """Options of one parameter tensor. None stands for the optimizer's own."""

    learning_rate: float | None = None
    weight_decay: float | None = None


class ParameterGroup(Protocol):
    """Options of all parameters whose dotted names match a pattern."""

    match: str
    learning_rate: float | None
    weight_decay: float | None


def tensor_options(
    module: nn.Module, groups: Sequence[ParameterGroup], no_decay: Collection[str]
) -> tuple[TensorOptions, ...]:
    """Return the options of each parameter tensor of a module. Empty if none has its own.

    Args:
        module: The module.
        groups: Groups of parameters. The first one that matches a parameter applies.
        no_decay: Kinds of parameters without weight decay: "norms", "biases".

    Raises:
        GivenError: If a group matches no trained parameter.
        UserError: If the module cannot be trained. See `training_state`.
    """
    parameters, _ = training_state(module)
    if not groups and not no_decay:
        return ()
    # Tied weights have several names.
    names = {id(each): list[str]() for each in parameters.values()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.get(id(parameter), []).append(name)
    every = [*chain.from_iterable(names.values())]
    for number, group in enumerate(groups):
        if not any(fnmatchcase(name, group.match) for name in every):
            close = get_close_matches(group.match, every, n=3, cutoff=0.0)
            raise GivenError(
                (f"optimizer.groups[{number}].match",),
                f"must match a trained parameter, got {group.match!r}; the nearest names are"
                f" {', '.join(close)}",
            )
    norms = {id(each) for m in module.modules() if isinstance(m, _NORMS) for each in m.parameters()}
    found = []
    for each in parameters.values():
        own = names[id(each)]
        matching = (g for g in groups if any(fnmatchcase(name, g.match) for name in own))
        first = next(matching, None)
        rate, decay = (first.learning_rate, first.weight_decay) if first else (None, None)
        is_bias = "bias" in own[0].rpartition(".")[2].split("_")
        if ("norms" in no_decay and id(each) in norms) or ("biases" in no_decay and is_bias):
            decay = 0.0
        found.append(TensorOptions(rate, decay))
    return tuple(found)


def is_counter(owner: nn.Module, name: str) -> bool:
    """Return True if a buffer only counts batches, and nothing computes with it."""
    return name.endswith("num_batches_tracked") and getattr(owner, "momentum", None) is not None


def frozen_base(module: nn.Module) -> Base:
    """Return the tensors of a module's `state_dict` that no update changes.

    Batch counters are left out: see `training_state`.

    Raises:
        UserError: If the module cannot be trained. See `training_state`.
    """
    parameters, buffers = training_state(module)
    trained = set(map(id, (*parameters.values(), *buffers.values())))
    return Base(
        {
            name: tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
            and id(tensor) not in trained
            and not is_counter(module.get_submodule(name.rpartition(".")[0]), name)
        }
    )


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of the module's flat vector, by the names of its `state_dict`.

    Raises:
        UserError: If the module cannot be trained. See `training_state`.
    """
    parameters, buffers = training_state(module)
    names = dict[int, list[str]]()
    # Matched by identity, because tied weights have one place in the vector and several names.
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(
        TensorSlice(
            tuple(names.get(id(tensor), ())),
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            is_buffer,
        )
        for is_buffer, group in ((False, parameters), (True, buffers))
        for tensor in group.values()
    )
