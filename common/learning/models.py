"""The networks: those of the paper's experiments (section V-A) and small ones for small data.

The paper names the layers (two convolutions and two dense layers for EMNIST and Infinite MNIST, two
and three for CIFAR-10), not their sizes; the sizes here are ours.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from common.learning.task_options import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ImageNetwork: TypeAlias = (
    "Callable[[int, int, int, int], nn.Module]"  # channels, height, width, classes
)


def cnn_28(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two convolutions and two dense layers: 232,239 weights on 28x28x1 and 47 classes."""
    convolutions, features = _convolutions(channels, height, width)
    return nn.Sequential(*convolutions, *_dense([features, 168, classes]))


def cnn_32(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two convolutions and three dense layers: 256,830 weights for CIFAR-10."""
    convolutions, features = _convolutions(channels, height, width)
    return nn.Sequential(*convolutions, *_dense([features, 120, 84, classes]))


def cnn_small(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two padded convolutions and two dense layers, for images of any size from 2x2 up."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_dense([32 * (height // 2) * (width // 2), 64, classes]),
    )


IMAGE_NETWORKS: dict[str, ImageNetwork] = {
    "cnn-28": cnn_28,
    "cnn-32": cnn_32,
    "cnn-small": cnn_small,
}


def logistic_regression(features: int, classes: int) -> nn.Module:
    """One linear layer that starts at zero: the loss is convex and every class equally likely."""
    linear = nn.Linear(features, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def multilayer_perceptron(features: int, hidden: Sequence[int], classes: int) -> nn.Module:
    """Dense layers with ReLU between them."""
    return nn.Sequential(*_dense([features, *hidden, classes]))


def _dense(sizes: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def _convolutions(channels: int, height: int, width: int) -> tuple[list[nn.Module], int]:
    """Two unpadded convolutions, each halved by pooling; also says how many features they leave."""
    for _ in range(2):
        height, width = (height - KERNEL + 1) // 2, (width - KERNEL + 1) // 2
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 32, KERNEL),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, KERNEL),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    return layers, 64 * height * width
