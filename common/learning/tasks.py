"""Tasks: a network, its inputs from records, and the loss and metrics of each sample."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as functions
from torch import Tensor, nn

from common.data.fields import LABELS, NUMBERS, DescribedRecords, Field, Input
from common.errors import GivenError, TaskMissingError, UserError
from common.learning.errors import lacks_memory, one_line, what_was_raised
from common.learning.lda import TopicModel
from common.learning.models import (
    IMAGE_NETWORKS,
    RunningNorm,
    linear,
    multilayer_perceptron,
)
from common.learning.module_task import ModuleTask
from common.learning.parameters import FlatModel, frozen_base, training_state
from common.learning.sparse_tasks import MatrixFactorisation, SparseLogistic, check_inside
from common.learning.task_options import (
    MAX_MODEL_MIB,
    ImageClassifierOptions,
    LdaOptions,
    LinearRegressionOptions,
    LogisticRegressionOptions,
    MatrixFactorisationOptions,
    Options,
    SparseLogisticOptions,
    TabularMlpOptions,
    module_options_of,
    options_of,
)


class Task(Protocol):
    """A learning problem. It must compute each record on its own, so that samples can be summed."""

    def build(self) -> nn.Module:
        """Make the network. Initial weights must come from torch's generator."""

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        """Run the network on n records; return a tensor, or a tuple, dict or dataclass of some."""

    def losses(self, outputs: Any, records: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        """Return the loss of each sample, (n,). The gradient is that of their sum."""

    def metrics(self, outputs: Any, records: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ANN401
        """Return values per sample, (n,) each. Their mean over the samples is the metric."""


class DescribedTask(Protocol):
    """A job's description of its task and its records."""

    @property
    def task_name(self) -> str:
        """Name of a built-in task, or an entrypoint."""

    @property
    def task_options(self) -> Mapping[str, object]:
        """Options for making the task."""

    @property
    def records(self) -> DescribedRecords:
        """Description of the records."""


# Changes the values of a module's tensors.
SetValues: TypeAlias = Callable[[nn.Module], object]

_OUR_PACKAGES = ("common", "services")
# Dimensions of a batch of images.
_IMAGES = ("record", "channel", "row", "column")
_METHODS = ("build", "forward", "losses", "metrics")


@runtime_checkable
class DescribesInputs(Protocol):
    """A task that declares its inputs, so that `check_fields` can check them before it runs."""

    def inputs(self) -> Mapping[str, Input]:
        """Return the record fields that the task reads, by name."""


def _joined(
    fields: Sequence[str], shape: tuple[int, ...] | None, records: Mapping[str, Tensor]
) -> Tensor:
    """Return the field of this shape, (n, *shape), or several fields joined, (n, features)."""
    if shape is not None:
        return records[fields[0]].float()
    columns = [records[field].float() for field in fields]
    return torch.cat([each.reshape(len(each), -1) for each in columns], 1)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Cross-entropy and accuracy for any network."""

    network: Callable[[], nn.Module]
    fields: tuple[str, ...]  # joined if several
    shape: tuple[int, ...] | None  # shape of a single field
    classes: int
    # Factor for uint8 inputs.
    byte_scale: float = 1.0

    def build(self) -> nn.Module:
        """Make the network."""
        return self.network()

    def inputs(self) -> Mapping[str, Input]:
        """Return the input fields and the label, an integer from 0 up."""
        inputs = {field: Input(self.shape, NUMBERS) for field in self.fields}
        return inputs | {"label": Input((), LABELS)}

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return logits, (n, classes)."""
        inputs = _joined(self.fields, self.shape, records)
        if records[self.fields[0]].dtype == torch.uint8:
            inputs = inputs * self.byte_scale
        if inputs.is_cuda and inputs.ndim == len(_IMAGES):
            # Convolutions on a GPU are fastest in this layout.
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        outputs: Tensor = module(inputs)
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy, (n,).

        Raises:
            ValueError: If a label is not a class.
        """
        labels = check_inside("label", records["label"], self.classes)
        return functions.cross_entropy(outputs, labels, reduction="none")

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return 1 for records whose most likely class is the label, otherwise 0, (n,)."""
        return {"accuracy": (outputs.argmax(1) == records["label"].long()).float()}


class TwoClasses(Classifier):
    """A classifier that also has binary scores. See `common.learning.outputs`."""

    def binary_scores(
        self, outputs: Tensor, records: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return logits of class 1, (n,), and True for records of class 1, (n,)."""
        return outputs[:, 1] - outputs[:, 0], records["label"] == 1


@dataclass(frozen=True, slots=True)
class Regression:
    """Prediction of a number."""

    network: Callable[[], nn.Module]
    # Joined if several.
    fields: tuple[str, ...]
    # Shape of a single field.
    shape: tuple[int, ...] | None
    target: str
    loss: Literal["squared", "huber", "absolute"]
    # Error above which the Huber loss is linear.
    delta: float

    def build(self) -> nn.Module:
        """Make the network."""
        return self.network()

    def inputs(self) -> Mapping[str, Input]:
        """Return the input fields and the target, a number."""
        inputs = {field: Input(self.shape, NUMBERS) for field in self.fields}
        return inputs | {self.target: Input((), NUMBERS)}

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return predictions, (n,)."""
        outputs: Tensor = module(_joined(self.fields, self.shape, records))
        return outputs.squeeze(1)

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return half the squared error, the Huber loss or the absolute error, (n,)."""
        target = records[self.target].float()
        match self.loss:
            case "squared":
                return (outputs - target) ** 2 / 2
            case "huber":
                return functions.huber_loss(outputs, target, reduction="none", delta=self.delta)
            case "absolute":
                return (outputs - target).abs()

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the absolute error, (n,)."""
        return {"absolute_error": (outputs - records[self.target].float()).abs()}


def _classifier(classes: int) -> type[Classifier]:
    return TwoClasses if classes == 2 else Classifier


def _image_classifier(options: ImageClassifierOptions) -> Classifier:
    shape, classes = (options.channels, options.height, options.width), options.classes
    network = IMAGE_NETWORKS[options.fitting]
    return _classifier(classes)(
        lambda: network(*shape, classes), ("image",), shape, classes, byte_scale=1 / 255
    )


def _normalised(features: int, network: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(RunningNorm(features), network())


def _tabular(
    options: LogisticRegressionOptions | TabularMlpOptions | LinearRegressionOptions,
) -> Task:
    features, fields = options.features, options.inputs
    shape = (features,) if fields == ("features",) else None
    network: Callable[[], nn.Module]
    match options:
        case LogisticRegressionOptions():
            network = partial(linear, features, options.classes)
        case TabularMlpOptions():
            network = partial(multilayer_perceptron, features, options.hidden, options.classes)
        case LinearRegressionOptions():
            network = partial(linear, features, 1)
    if options.normalise:
        network = partial(_normalised, features, network)
    if isinstance(options, LinearRegressionOptions):
        delta = 1.0 if options.delta is None else options.delta
        return Regression(network, fields, shape, options.target, options.loss, delta)
    return _classifier(options.classes)(network, fields, shape, options.classes)


def _built_in(options: Options) -> Task:
    match options:
        case ImageClassifierOptions():
            return _image_classifier(options)
        case LogisticRegressionOptions() | TabularMlpOptions() | LinearRegressionOptions():
            return _tabular(options)
        case SparseLogisticOptions(features, entries):
            return SparseLogistic(features, entries)
        case MatrixFactorisationOptions(users, items, rank, regularisation):
            return MatrixFactorisation(users, items, rank, regularisation)
        case LdaOptions(words, entries, topics, documents, alpha, eta, iterations):
            prior = 1 / topics
            return TopicModel(
                words, entries, topics, documents, alpha or prior, eta or prior, iterations
            )


def task_of(described: DescribedTask, allowed: Collection[str]) -> Task:
    """Make a job's task, and check it against the fields of the records.

    Args:
        described: The job.
        allowed: Entrypoints that this process may import (DOLL_TASKS).

    Raises:
        UserError: If it cannot be made, or the records lack a field that it reads.
    """
    task = make_task(described.task_name, described.task_options, allowed)
    check_fields(task, described.records.described())
    return task


def make_task(name: str, options: Mapping[str, object], allowed: Collection[str] = ()) -> Task:
    """Make a task by name, or of the class `package.module:Name` with the options.

    Args:
        name: Name of a built-in task, or an entrypoint.
        options: Options of the task. With an option `module`, the class is a torch module.
        allowed: Entrypoints that may be imported. Others are never imported.

    Raises:
        TaskMissingError: If this process may not import it, or it is not installed here.
        UserError: If there is no such task, it raises, or an option is invalid.
    """
    if ":" in name:
        return _imported(name, options, allowed)
    task = _built_in(options_of(name, options))
    with torch.device("meta"):
        # Invalid sizes of a network raise here, not later.
        task.build()
    return task


def build_model(task: Task, seed: int) -> nn.Module:
    """Make the network of a task. The same seed gives the same weights on all machines.

    Raises:
        UserError: If the task raises or returns no module, or memory does not suffice.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            module = task.build()
        # The task is the user's code and may raise anything.
        except (Exception, SystemExit) as error:
            raised = what_was_raised(error, task, error.__traceback__)
            raise UserError(f"build() of the task raised {raised.summary}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"build() of the task returned a {type(module).__name__}, not a module")
    return module


def fit_base(
    model: FlatModel, task: Task, seed: int, digest: str, read: Callable[[str], bytes]
) -> None:
    """Make a model's frozen tensors those with a digest.

    Args:
        model: The task's model, built with the job's seed.
        task: The task.
        seed: The job's seed.
        digest: SHA-256 of the wanted tensors.
        read: Reads a base by its digest, such as `CheckpointStore.base`.

    Raises:
        OtherModelError: If the task's own base is another one; names the first difference.
        UnavailableError: If object storage is unavailable.
    """
    if model.base.digest != digest:
        model.base.adopt(read(digest), lambda: frozen_base(build_model(task, seed + 1)))


def check_fields(task: Task, fields: Sequence[Field]) -> None:
    """Check that the records have the fields that the task reads, if the task declares them.

    Raises:
        UserError: If a field is missing or has another shape or dtype.
    """
    if not isinstance(task, DescribesInputs):
        return
    described = {field.name: field for field in fields}
    for name, (shape, dtypes) in task.inputs().items():
        field = described.get(name)
        if field is None:
            known = ", ".join(described)
            raise UserError(f"the task reads a field {name!r}; the records have {known}")
        if shape is not None and field.shape != shape:
            raise UserError(
                f"field {name!r} has shape {list(field.shape)}, but the task reads {list(shape)};"
                " change the field or the options of the task"
            )
        if field.dtype not in dtypes:
            raise UserError(
                f"field {name!r} is {field.dtype}, but the task reads {' or '.join(dtypes)}"
            )


def _taken_name(error: ImportError | AttributeError) -> str:
    """Return a hint if a package of the task's code has the same name as one of ours."""
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
    else:
        package = getattr(error.obj, "__name__", "")
    return f"; {package!r} is also a package of DOLL, so rename yours" * (package in _OUR_PACKAGES)


def _imported(entrypoint: str, options: Mapping[str, object], allowed: Collection[str]) -> Task:
    if entrypoint not in allowed:
        known = ", ".join(sorted(allowed)) or "none"
        raise TaskMissingError(
            f"task {entrypoint!r} is not among the allowed entrypoints (DOLL_TASKS): {known}"
        )
    module_name, _, attribute = entrypoint.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise TaskMissingError(
            f"task {entrypoint!r} cannot be imported here: {one_line(error)}{_taken_name(error)}"
        ) from error
    # A module is the user's code and may raise anything.
    except (Exception, SystemExit) as error:
        raise UserError(f"task {entrypoint!r}: importing it raised {one_line(error)}") from error
    is_network = isinstance(factory, type) and issubclass(factory, nn.Module)
    if "module" in options:
        if isinstance(factory, type) and not is_network:
            problem = f"{entrypoint!r} is no torch module; name a task's class in `entrypoint`"
            raise GivenError(("task.module",), problem)
        return _module_task(entrypoint, factory, options)
    if is_network:
        problem = f"{entrypoint!r} is a torch module, not a task; name it in `module`"
        raise GivenError(("task.entrypoint",), problem)
    try:
        task: Task = factory(**options)
    # A factory is the user's code, too.
    except (Exception, SystemExit) as error:
        raise UserError(
            f"task {entrypoint!r} refuses its options {dict(options)}: {one_line(error)}"
        ) from error
    lacking = [name for name in _METHODS if not callable(getattr(task, name, None))]
    if lacking:
        raise UserError(f"task {entrypoint!r} has no method {' and no '.join(lacking)}")
    return task


def _module_task(
    entrypoint: str, network: Callable[..., nn.Module], options: Mapping[str, object]
) -> ModuleTask:
    read, arguments = module_options_of(options)
    try:
        signature(network).bind(**arguments)
    except TypeError as error:
        problem = f"{entrypoint!r} refuses its arguments {arguments}: {error}"
        raise GivenError(("task.module",), problem) from error
    return ModuleTask(network, read.loss, read.inputs, read.target, arguments)


# --- size of a model, before memory is allocated ------------------------------------------------

MIB = 1 << 20


def check_size(task: Task) -> None:
    """Refuse a model that is too large, if its size is known without allocating it.

    Raises:
        UserError: If the model is too large. The message has its size and the limit.
    """
    size_mb = model_mb(task)
    if size_mb is not None and size_mb > MAX_MODEL_MIB:
        raise UserError(
            f"the model takes {size_mb:,.0f} MiB, more than {MAX_MODEL_MIB:,}: make it smaller"
        )


def model_mb(task: Task) -> float | None:
    """Return the MiB of a model's parameters and buffers; None if unknown without allocating it."""
    module = _without_memory(task)
    return None if module is None else _mb(module)


def try_model(
    task: Task, seed: int, check: Callable[[nn.Module], object] = training_state
) -> float | None:
    """Return the MiB of a model, allocating it if necessary; None if memory does not suffice.

    The caller must limit the memory of this process.

    Args:
        task: The task.
        seed: Seed of the weights.
        check: Raises an error if the module is unsuitable.

    Raises:
        UserError: If the task does not build a module that can be trained.
    """
    module = _without_memory(task)
    if module is None:
        try:
            module = build_model(task, seed)
        except UserError as error:
            if lacks_memory(error.__cause__):
                return None
            raise
    check(module)
    return _mb(module)


def _without_memory(task: Task) -> nn.Module | None:
    """Return the model on the device "meta", without memory; None if it cannot be built there."""
    try:
        with torch.device("meta"):
            module = task.build()
    except Exception:  # noqa: BLE001 -- the user's code may not support this device
        return None
    return module if isinstance(module, nn.Module) else None


def _mb(module: nn.Module) -> float:
    tensors = chain(module.parameters(), module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB
