"""The size of a model is known before it is built."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.learning.task_options import options_of
from common.learning.tasks import MIB, make_task, try_model


@given(
    st.sampled_from(["auto", "cnn-28", "cnn-32", "cnn-small", "resnet-32"]),
    st.integers(16, 40),
    st.integers(16, 40),
    st.integers(1, 3),
    st.integers(2, 50),
)
def test_predicted_size_of_an_image_network_equals_that_of_its_layers(
    network: str, height: int, width: int, channels: int, classes: int
) -> None:
    given_options = {
        "network": network,
        "height": height,
        "width": width,
        "channels": channels,
        "classes": classes,
    }
    task = make_task("image-classifier", given_options)
    assert try_model(task, 0) == 4 * options_of("image-classifier", given_options).parameters / MIB


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("logistic-regression", {"features": 41, "classes": 2}),
        ("tabular-mlp", {"features": 41, "classes": 2}),
        ("tabular-mlp", {"features": 7, "classes": 3, "hidden": [5, 6, 7]}),
        ("tabular-mlp", {"features": 7, "classes": 3, "hidden": []}),
        ("logistic-regression", {"features": 41, "classes": 2, "normalise": True}),
        ("tabular-mlp", {"features": 7, "classes": 3, "normalise": True}),
        ("linear-regression", {"features": 7}),
        ("linear-regression", {"features": 7, "normalise": True}),
        ("sparse-logistic", {"features": 1000, "entries": 39}),
        ("matrix-factorisation", {"users": 70, "items": 30, "rank": 5}),
        ("lda", {"words": 100, "entries": 9, "topics": 7, "documents": 50}),
    ],
)
def test_predicted_size_of_other_models_equals_that_of_their_layers(
    name: str, options: dict[str, Any]
) -> None:
    assert try_model(make_task(name, options), 0) == (
        4 * options_of(name, options).parameters / MIB
    )
