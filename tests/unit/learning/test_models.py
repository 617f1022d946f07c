"""The networks have the layers of the paper and about the documented sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, cross_entropy, linear, relu

from common.data.readers import read_records
from common.data.records import take
from common.learning.gradients import GradientComputer
from common.learning.models import IMAGE_NETWORKS, RunningNorm, cnn_28, cnn_32, cnn_small
from common.learning.optimizers import OptimizerSettings
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from tests.ulps import assert_within_ulps
from tests.unit.learning.examples import CPU

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.mark.parametrize(
    ("network", "weights", "dense"),
    [(cnn_28(1, 28, 28, 47), 232_239, 2), (cnn_32(3, 32, 32, 10), 256_830, 3)],
)
def test_paper_network_has_two_convolutions_and_its_dense_layers(
    network: nn.Module, weights: int, dense: int
) -> None:
    kinds = [type(layer) for layer in network.modules()]
    assert kinds.count(nn.Conv2d) == 2
    assert kinds.count(nn.Linear) == dense
    assert sum(parameter.numel() for parameter in network.parameters()) == weights


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
@pytest.mark.parametrize("side", [16, 17, 28, 33])
def test_image_network_accepts_every_size_from_16_up(name: str, side: int) -> None:
    network = IMAGE_NETWORKS[name](2, side, side + 1, 5)
    assert network(torch.zeros(3, 2, side, side + 1)).shape == (3, 5)


CIFAR = Path(__file__).parents[4] / "shared" / "data" / "images" / "cifar10-train-0000-0999.bin.xz"


def plain_resnet_32(weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Return (n, 10) logits by the paper's text, from named weights."""

    def normalised(inputs: Tensor, name: str, stride: int = 1) -> Tensor:
        before, _, number = name.rpartition(".")
        outputs = conv2d(inputs, weights[f"{name}.weight"], None, stride, 1)
        name = f"{before}.{int(number) + 1}".removeprefix(".")
        return batch_norm(
            outputs, None, None, weights[f"{name}.weight"], weights[f"{name}.bias"], training=True
        )

    outputs = relu(normalised(images, "0"))
    for block in range(15):
        shortcut, stride = outputs, 1
        if block in (5, 10):
            empty = torch.zeros_like(outputs[:, : outputs.shape[1] // 2])
            shortcut, stride = torch.cat([empty, outputs, empty], 1)[:, :, ::2, ::2], 2
        inner = relu(normalised(outputs, f"{block + 3}.residual.0", stride))
        outputs = relu(normalised(inner, f"{block + 3}.residual.3") + shortcut)
    return linear(outputs.mean((2, 3)), weights["20.weight"], weights["20.bias"])


@pytest.mark.parametrize(
    "real",
    [False, pytest.param(True, marks=pytest.mark.skipif(not CIFAR.exists(), reason="not here"))],
)
def test_resnet_32_equals_that_of_its_paper(*, real: bool) -> None:
    random = np.random.default_rng(0)
    made = {
        "image": random.integers(0, 256, (4, 3, 32, 32), np.uint8),
        "label": np.arange(4),
    }
    batch = take(read_records(CIFAR), np.arange(4)) if real else made
    sizes = {"channels": 3, "height": 32, "width": 32}
    task = make_task("image-classifier", {"classes": 10, "network": "resnet-32", **sizes})
    computer = GradientComputer(task, build_model(task, 0), CPU)
    assert computer.model.parameter_count == 464_154
    weights = {
        name: weight.detach().clone().requires_grad_()
        for name, weight in computer.model.module.named_parameters()
    }
    logits = plain_resnet_32(weights, torch.from_numpy(batch["image"]) * (1 / 255))
    loss = cross_entropy(logits, torch.from_numpy(batch["label"]), reduction="sum")
    torch.autograd.backward(loss)
    found = computer.compute([batch])
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-4)
    gradients = [weight.grad for weight in weights.values()]
    wanted = torch.cat([each.ravel() for each in gradients if each is not None]).numpy()
    error = found.vector[:464_154] - wanted
    assert np.linalg.norm(error) < 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("side", [2, 3, 8])
def test_cnn_small_accepts_small_images(side: int) -> None:
    assert cnn_small(1, side, side, 10)(torch.zeros(3, 1, side, side)).shape == (3, 10)


def test_running_norm_does_not_depend_on_how_batches_are_split() -> None:
    """Batches of 8, 32 per update, in one or two messages, with features far from zero."""
    options = {"features": 3, "classes": 2, "normalise": True}
    task = make_task("logistic-regression", options)
    scales, states = np.array([1e3, 1e-2, 1.0]), []
    for local_rate, cuts in ((0.0, [4]), (0.0, [1, 3]), (0.1, [4])):
        computer = GradientComputer(task, build_model(task, 0), CPU)
        subject = Trainer(computer.model.vector, 8, OptimizerSettings("sgd", 0.1))
        seen = list[np.ndarray[Any, Any]]()
        for step in range(60):
            random = np.random.default_rng(step)
            batches = [
                {
                    "features": (random.normal(5.0, 1.0, (8, 3)) * scales).astype(np.float32),
                    "label": random.integers(0, 2, 8),
                }
                for _ in range(4)
            ]
            seen += [batch["features"] for batch in batches]
            computer.load(subject.weights())
            for held in (batches[: cuts[0]], batches[cuts[0] :]):
                if held:
                    part = computer.compute(held, local_rate)
                    subject.add(0, part.vector, part.samples)
            subject.apply(0)
        computer.load(subject.weights())
        states.append({name: it.numpy() for name, it in computer.model.module.named_buffers()})
    records = np.concatenate(seen)
    for state in states:
        assert state["0.updates"] == 60
        assert state["0.mean"] == pytest.approx(records.mean(0), rel=1e-4)
        assert state["0.variance"] == pytest.approx(records.var(0), rel=0.02)
    assert states[1]["0.variance"] == pytest.approx(states[0]["0.variance"], rel=1e-4)
    # Local steps move only weights.
    assert np.array_equal(states[2]["0.mean"], states[0]["0.mean"])


def test_running_norm_treats_records_separately_after_its_first_batch() -> None:
    norm = RunningNorm(2)
    records = torch.from_numpy(np.random.default_rng(0).normal(7.0, 3.0, (40, 2))).float()
    # The first batch is normalized by its own mean.
    assert norm(records).mean().item() == pytest.approx(0.0, abs=1e-5)
    for _ in range(5):
        norm(records)
    whole = norm.eval()(records)
    assert_within_ulps(norm(records[:1]), whole[:1], 1)
    assert whole.std(0).tolist() == pytest.approx([1.0, 1.0], rel=0.1)
    assert norm.updates.item() == 6
