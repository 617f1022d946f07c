"""Options of the built-in tasks in a job file, checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from common.data.decoders import converted
from common.errors import UserError

# Largest model of a job, so that a typo in a size does not use up a machine's memory. Workers need
# ten times as much.
MAX_MODEL_MIB = 16_384

KERNEL = 5
# Two unpadded convolutions with pooling reduce this to 1 x 1.
SMALLEST_UNPADDED = 2 * (2 + KERNEL - 1) + KERNEL - 1
SMALLEST_PADDED = 2
# Channels of each stage, and blocks per stage.
RESNET_STAGES, RESNET_BLOCKS = (16, 32, 64), 5
# Halved twice, it leaves 2 x 2. A single number would have no variance.
SMALLEST_RESNET = 5

_MOST = 2**31 - 1
Size = Annotated[int, Meta(ge=1, le=_MOST)]
Classes = Annotated[int, Meta(ge=2, le=_MOST)]


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a built-in task."""

    def check(self) -> None:
        """Check constraints that types cannot express.

        Raises:
            UserError: If an option does not fit. The message says which.
        """


class ImageClassifierOptions(_Options, frozen=True):
    """Options of `image-classifier`."""

    classes: Classes
    channels: Size = 1
    height: Size = 28
    width: Size = 28
    network: Literal["auto", "cnn-28", "cnn-32", "cnn-small", "resnet-32"] = "auto"

    @property
    def fitting(self) -> str:
        """The chosen network, or the default one for this shape."""
        if self.network != "auto":
            return self.network
        shape = (self.channels, self.height, self.width)
        return {(1, 28, 28): "cnn-28", (3, 32, 32): "cnn-32"}.get(shape, "cnn-small")

    @property
    def parameters(self) -> int:
        """Number of parameters and buffers. A test compares it with `common.learning.models`."""
        if self.fitting == "resnet-32":
            return _resnet(self.channels) + _dense(RESNET_STAGES[-1], self.classes)
        height, width = self.height, self.width
        if self.fitting == "cnn-small":
            kernels, hidden = ((16, 3), (32, 3)), [64]
            height, width = height // 2, width // 2
        else:
            kernels = ((32, KERNEL), (64, KERNEL))
            hidden = [168] if self.fitting == "cnn-28" else [120, 84]
            for _ in range(2):
                height, width = (height - KERNEL + 1) // 2, (width - KERNEL + 1) // 2
        count, inputs = 0, self.channels
        for outputs, kernel in kernels:
            count += outputs * (inputs * kernel**2 + 1)
            inputs = outputs
        return count + _dense(inputs * height * width, *hidden, self.classes)

    def check(self) -> None:
        """Refuse images that are too small for the network."""
        own = {"cnn-small": SMALLEST_PADDED, "resnet-32": SMALLEST_RESNET}
        smallest = own.get(self.fitting, SMALLEST_UNPADDED)
        if min(self.height, self.width) < smallest:
            hint = "" if smallest == SMALLEST_PADDED else "; use cnn-small"
            raise UserError(
                f"images of {self.height}x{self.width} are too small for the network"
                f" {self.fitting}, which needs at least {smallest}x{smallest}{hint}"
            )


class LogisticRegressionOptions(_Options, frozen=True):
    """Options of `logistic-regression`."""

    features: Size
    classes: Classes
    normalise: bool = False
    inputs: tuple[str, ...] = ("features",)

    @property
    def parameters(self) -> int:
        """Number of parameters and buffers, including those of the input normalisation."""
        return _dense(self.features, self.classes) + self.normalise * (2 * self.features + 1)


class TabularMlpOptions(_Options, frozen=True):
    """Options of `tabular-mlp`."""

    features: Size
    classes: Classes
    hidden: tuple[Size, ...] = (64, 64)
    normalise: bool = False
    inputs: tuple[str, ...] = ("features",)

    @property
    def parameters(self) -> int:
        """Number of parameters and buffers, including those of the input normalisation."""
        layers = _dense(self.features, *self.hidden, self.classes)
        return layers + self.normalise * (2 * self.features + 1)


class LinearRegressionOptions(_Options, frozen=True):
    """Options of `linear-regression`."""

    features: Size
    target: str = "target"
    loss: Literal["squared", "huber", "absolute"] = "squared"
    # Error above which the Huber loss is linear. Unset for other losses, and for 1.
    delta: Annotated[float, Meta(gt=0)] | None = None
    normalise: bool = False
    inputs: tuple[str, ...] = ("features",)

    @property
    def parameters(self) -> int:
        """Number of parameters and buffers, including those of the input normalisation."""
        return _dense(self.features, 1) + self.normalise * (2 * self.features + 1)

    def check(self) -> None:
        """Refuse a delta that no loss reads."""
        if self.delta is not None and self.loss != "huber":
            raise UserError(f"delta: requires `loss: huber`, got {self.loss!r}; remove it")


class SparseLogisticOptions(_Options, frozen=True):
    """Options of `sparse-logistic`."""

    features: Size
    entries: Size

    @property
    def parameters(self) -> int:
        """Number of weights: one per feature, and the bias."""
        return self.features + 1


class MatrixFactorisationOptions(_Options, frozen=True):
    """Options of `matrix-factorisation`."""

    users: Size
    items: Size
    rank: Size = 20
    regularisation: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def parameters(self) -> int:
        """Number of weights: a row for each user and each item."""
        return (self.users + self.items) * self.rank


class LdaOptions(_Options, frozen=True):
    """Options of `lda`."""

    words: Size
    entries: Size
    topics: Size
    documents: Size
    alpha: Annotated[float, Meta(gt=0)] | None = None
    eta: Annotated[float, Meta(gt=0)] | None = None
    iterations: Size = 100

    @property
    def parameters(self) -> int:
        """Number of weights: one for each word in each topic."""
        return self.words * self.topics


LossName: TypeAlias = Literal[
    "cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
]


class ModuleOptions(msgspec.Struct, frozen=True):
    """Options of a task that is a torch module. All others are arguments of the module."""

    module: str
    loss: LossName
    inputs: Annotated[tuple[str, ...], Meta(min_length=1)]
    target: str


def module_options_of(options: Mapping[str, object]) -> tuple[ModuleOptions, dict[str, object]]:
    """Read the options of a task that is a torch module; return also the module's arguments.

    Raises:
        UserError: If an option is invalid.
    """
    try:
        read = converted(dict(options), ModuleOptions)
    except msgspec.ValidationError as error:
        losses = ", ".join(get_args(LossName))
        raise UserError(
            f"{error}; a torch module needs inputs, target and loss, which is one of {losses}"
        ) from error
    own = ModuleOptions.__struct_fields__
    return read, {name: value for name, value in options.items() if name not in own}


def _resnet(channels: int) -> int:
    """Count ResNet-32's kernels, and per normalisation four numbers per channel and a counter."""
    first = RESNET_STAGES[0]
    layers = [(channels, first)]
    for inputs, outputs in pairwise((first, *RESNET_STAGES)):
        layers += [(inputs, outputs), *[(outputs, outputs)] * (2 * RESNET_BLOCKS - 1)]
    return sum((9 * inputs + 4) * outputs + 2 for inputs, outputs in layers)


def _dense(*sizes: int) -> int:
    """Count weights and biases of consecutive dense layers."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))


Options: TypeAlias = (
    ImageClassifierOptions
    | LogisticRegressionOptions
    | TabularMlpOptions
    | LinearRegressionOptions
    | SparseLogisticOptions
    | MatrixFactorisationOptions
    | LdaOptions
)

BUILT_IN: dict[str, type[Options]] = {
    "image-classifier": ImageClassifierOptions,
    "logistic-regression": LogisticRegressionOptions,
    "tabular-mlp": TabularMlpOptions,
    "linear-regression": LinearRegressionOptions,
    "sparse-logistic": SparseLogisticOptions,
    "matrix-factorisation": MatrixFactorisationOptions,
    "lda": LdaOptions,
}
TASK_NAMES = tuple(BUILT_IN)


def options_of(name: str, options: Mapping[str, object]) -> Options:
    """Read the options of a built-in task.

    Raises:
        UserError: If there is no such task, or an option is invalid.
    """
    if name not in BUILT_IN:
        raise UserError(f"task: must be one of {', '.join(TASK_NAMES)}, got {name!r}")
    kind = BUILT_IN[name]
    if "normalise" in options and "normalise" not in kind.__struct_fields__:
        raise UserError(
            f"task {name!r}: has no option `normalise`, which only logistic-regression, tabular-mlp"
            " and linear-regression have; it would make the omitted values of sparse records"
            " nonzero, and images are scaled already"
        )
    try:
        read = converted(dict(options), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise UserError(f"task {name!r}: {error}; its options are {known}") from error
    read.check()
    return read
