"""Evaluation gives means over all records and leaves everything as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from common.learning.evaluate import evaluate
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model
from tests.unit.learning.examples import Regression, image_task, images, normalised, points


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_the_result_is_the_mean_over_the_records_whatever_the_batch_size(batch_size: int) -> None:
    task = image_task()
    model = FlatModel(build_model(task, seed=0))
    records = images(1, 20)
    found = evaluate(task, model, model.weights(), records, batch_size)
    tensors = {name: torch.from_numpy(column) for name, column in records.items()}
    outputs = task.forward(model.module, tensors)
    assert found == {
        "loss": pytest.approx(task.losses(outputs, tensors).mean().item(), rel=1e-5),
        "accuracy": pytest.approx(task.metrics(outputs, tensors)["accuracy"].mean().item()),
    }


def test_evaluating_changes_neither_buffers_nor_mode() -> None:
    network = normalised().train()
    model = FlatModel(network)
    weights = model.vector.copy()
    first = evaluate(Regression(network), model, weights, points(1, 30), 8)
    assert np.array_equal(model.vector, weights)
    assert network.training
    assert evaluate(Regression(network), model, weights, points(1, 30), 8) == first


def test_nothing_cannot_be_evaluated() -> None:
    network = nn.Linear(3, 1)
    model = FlatModel(network)
    with pytest.raises(ValueError, match="no records"):
        evaluate(Regression(network), model, model.weights(), points(1, 0), 8)
