"""Networks: those of the paper's experiments (section V-A), small ones, and ResNet-32.

The paper names the layers (two convolutions and two dense layers for EMNIST and Infinite MNIST, two
and three for CIFAR-10), but not their sizes. The sizes here are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.nn.functional as functions
from torch import Tensor, nn

from common.learning.task_options import KERNEL, RESNET_BLOCKS, RESNET_STAGES

# Takes channels, height, width and classes.
ImageNetwork: TypeAlias = "Callable[[int, int, int, int], nn.Module]"


def cnn_28(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two convolutions and two dense layers: 232,239 weights on 28x28x1 and 47 classes."""
    convolutions, features = _convolutions(channels, height, width)
    return nn.Sequential(*convolutions, *_dense([features, 168, classes]))


def cnn_32(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two convolutions and three dense layers: 256,830 weights for CIFAR-10."""
    convolutions, features = _convolutions(channels, height, width)
    return nn.Sequential(*convolutions, *_dense([features, 120, 84, classes]))


def cnn_small(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two padded convolutions and two dense layers, for images from 2x2 up."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_dense([32 * (height // 2) * (width // 2), 64, classes]),
    )


def resnet_32(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """He et al. 2015, section 4.2, n = 5, shortcuts without weights: 464,154 for CIFAR-10."""
    # Any size works.
    del height, width
    blocks, inputs = list[nn.Module](), RESNET_STAGES[0]
    for outputs in RESNET_STAGES:
        for _ in range(RESNET_BLOCKS):
            blocks.append(_Residual(inputs, outputs))
            inputs = outputs
    return nn.Sequential(
        *_normalised(channels, RESNET_STAGES[0], 1),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, classes),
    )


IMAGE_NETWORKS: dict[str, ImageNetwork] = {
    "cnn-28": cnn_28,
    "cnn-32": cnn_32,
    "cnn-small": cnn_small,
    "resnet-32": resnet_32,
}


class RunningNorm(nn.Module):
    """Normalise features by the mean and deviation of the records of all updates so far.

    As in batch normalisation, these are buffers, which change by the mean of the update's batches.
    But a record is normalised by the statistics of its model version, in training and later, not by
    those of its batch. Batches of the first update use their own, because no others exist yet. From
    update 1 / FORGOTTEN on, the oldest records are gradually forgotten.
    """

    # Share of the statistics that each update replaces.
    FORGOTTEN = 1e-3
    # The value of batch normalisation. It makes a constant feature 0.
    EPSILON = 1e-5
    mean: Tensor
    variance: Tensor
    updates: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))
        self.register_buffer("updates", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise (n, features) to the same shape."""
        first, seen = self.updates == 0, inputs.mean(0)
        mean = torch.where(first, seen, self.mean)
        # The deviation is from a mean known beforehand. So the variance is a mean over records, and
        # does not depend on their distribution over batches.
        squares = ((inputs - mean) ** 2).mean(0)
        variance = torch.where(first, squares, self.variance)
        outputs = (inputs - mean) * torch.rsqrt(variance + self.EPSILON)
        if self.training:
            share = (1 / (self.updates + 1)).clamp(min=self.FORGOTTEN)
            self.mean.lerp_(seen, share)
            self.variance.lerp_(squares, share)
            self.updates.add_(1)
        return outputs


def linear(features: int, outputs: int) -> nn.Module:
    """One linear layer, initially zero: classes begin with equal probabilities."""
    layer = nn.Linear(features, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def multilayer_perceptron(features: int, hidden: Sequence[int], classes: int) -> nn.Module:
    """Dense layers with ReLU between them."""
    return nn.Sequential(*_dense([features, *hidden, classes]))


def _dense(sizes: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def _normalised(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_uniform_(convolution.weight, nonlinearity="relu")
    return convolution, nn.BatchNorm2d(outputs)


class _Residual(nn.Module):
    """Two convolutions and a shortcut. If the number of channels doubles, the image is halved."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self._added = outputs - inputs  # channels
        self._stride = 2 if self._added else 1
        self.residual = nn.Sequential(
            *_normalised(inputs, outputs, self._stride),
            nn.ReLU(),
            *_normalised(outputs, outputs, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride), rounded up."""
        shortcut = images[:, :, :: self._stride, :: self._stride]
        half = self._added // 2
        shortcut = functions.pad(shortcut, (0, 0, 0, 0, half, half))
        return functions.relu(self.residual(images) + shortcut)


def _convolutions(channels: int, height: int, width: int) -> tuple[list[nn.Module], int]:
    """Return two unpadded convolutions, each with pooling by 2, and their number of features."""
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
