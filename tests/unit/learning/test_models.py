"""The networks have the layers of the paper and about the sizes that we say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.learning.models import IMAGE_NETWORKS, cnn_28, cnn_32, cnn_small


@pytest.mark.parametrize(
    ("network", "weights", "dense"),
    [(cnn_28(1, 28, 28, 47), 232_239, 2), (cnn_32(3, 32, 32, 10), 256_830, 3)],
)
def test_a_network_of_the_paper_has_two_convolutions_and_its_dense_layers(
    network: nn.Module, weights: int, dense: int
) -> None:
    kinds = [type(layer) for layer in network.modules()]
    assert kinds.count(nn.Conv2d) == 2
    assert kinds.count(nn.Linear) == dense
    assert sum(parameter.numel() for parameter in network.parameters()) == weights


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
@pytest.mark.parametrize("side", [16, 17, 28, 33])
def test_every_network_takes_every_size_from_16_up(name: str, side: int) -> None:
    network = IMAGE_NETWORKS[name](2, side, side + 1, 5)
    assert network(torch.zeros(3, 2, side, side + 1)).shape == (3, 5)


@pytest.mark.parametrize("side", [2, 3, 8])
def test_the_small_network_takes_small_images(side: int) -> None:
    assert cnn_small(1, side, side, 10)(torch.zeros(3, 1, side, side)).shape == (3, 10)
