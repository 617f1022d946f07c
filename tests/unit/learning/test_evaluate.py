"""Evaluation returns means over all records and changes nothing."""

from __future__ import annotations

from math import isfinite, nan
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from common.learning.errors import TaskError
from common.learning.evaluate import evaluate, per_record
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model
from tests.ulps import assert_within_ulps
from tests.unit.learning.examples import Regression, image_task, images, normalised, points

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_evaluate_returns_record_means_for_any_batch_size(batch_size: int) -> None:
    task = image_task()
    model = FlatModel(build_model(task, seed=0))
    records = images(1, 20)
    found = evaluate(task, model, model.weights(), records, batch_size)
    tensors = {name: torch.from_numpy(column) for name, column in records.items()}
    outputs = task.forward(model.module, tensors)
    assert found.keys() == {"loss", "accuracy"}
    assert_within_ulps(found["loss"], task.losses(outputs, tensors).mean().item(), 4)
    accuracy = task.metrics(outputs, tensors)["accuracy"].mean().item()
    assert_within_ulps(found["accuracy"], accuracy, 4)


def test_evaluate_changes_neither_buffers_nor_mode() -> None:
    network = normalised().train()
    model = FlatModel(network)
    weights = model.vector.copy()
    first = evaluate(Regression(network), model, weights, points(1, 30), 8)
    assert np.array_equal(model.vector, weights)
    assert network.training
    assert evaluate(Regression(network), model, weights, points(1, 30), 8) == first


def test_per_record_evaluates_each_record_in_order() -> None:
    task = image_task()
    model = FlatModel(build_model(task, seed=0))
    records = images(1, 20)
    columns = per_record(task, model, records, 7).columns
    for index in (0, 6, 7, 19):
        alone = {name: column[index : index + 1] for name, column in records.items()}
        expected = evaluate(task, model, model.weights(), alone, 1)
        assert columns.keys() == expected.keys()
        for name, values in columns.items():
            assert_within_ulps(values[index], expected[name], 4)


def test_evaluate_omits_nan_metric_values_and_reports_the_loss() -> None:
    class Partial(Regression):
        def metrics(
            self, outputs: torch.Tensor, records: Mapping[str, torch.Tensor]
        ) -> dict[str, torch.Tensor]:
            del records
            numbers = torch.arange(len(outputs))
            return {"half": torch.where(numbers % 2 == 0, 3.0, nan), "none": outputs * nan}

    network = nn.Linear(3, 1)
    model = FlatModel(network)
    found = evaluate(Partial(network), model, model.weights(), points(1, 7), 4)
    assert found == {"half": 3.0, "loss": found["loss"]}
    assert isfinite(found["loss"])


def test_binary_scores_are_evaluated_over_all_batches() -> None:
    task = image_task(classes=2)
    model = FlatModel(build_model(task, seed=0))
    found = evaluate(task, model, model.weights(), images(1, 20, classes=2), 7)
    whole = evaluate(task, model, model.weights(), images(1, 20, classes=2), 20)
    assert {"loss", "accuracy", "auc", "recall"} <= found.keys() == whole.keys()
    for name, value in whole.items():
        assert_within_ulps(found[name], value, 4)


def test_exception_of_a_task_is_reported_with_its_batch() -> None:
    task = image_task()
    model = FlatModel(build_model(task, seed=0))
    records = images(1, 20)
    records["label"][13] = 10
    with pytest.raises(
        TaskError, match="batch 1: ValueError: label: a number is outside"
    ) as raised:
        per_record(task, model, records, 10)
    assert raised.value.batch_index == 1


def test_per_record_rejects_losses_with_one_mean() -> None:
    class Averaged(Regression):
        def losses(
            self, outputs: torch.Tensor, records: Mapping[str, torch.Tensor]
        ) -> torch.Tensor:
            return super().losses(outputs, records).mean()

    network = nn.Linear(3, 1)
    with pytest.raises(TaskError, match=r"losses has shape \(\): one value per sample is needed"):
        per_record(Averaged(network), FlatModel(network), points(1, 8), 8)


def test_evaluate_without_records_raises() -> None:
    network = nn.Linear(3, 1)
    model = FlatModel(network)
    with pytest.raises(ValueError, match="no records"):
        evaluate(Regression(network), model, model.weights(), points(1, 0), 8)
