"""Options of built-in tasks: invalid ones are refused without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.errors import UserError
from common.learning.task_options import ImageClassifierOptions, options_of


@pytest.mark.parametrize(
    ("height", "width", "network", "said"),
    [
        (15, 28, "cnn-28", "cnn-small"),
        (15, 28, "cnn-32", "cnn-small"),
        (1, 8, "cnn-small", "2x2"),
        (1, 8, "auto", "2x2"),
        (4, 8, "resnet-32", "at least 5x5; use cnn-small"),
    ],
)
def test_image_too_small_for_its_network_is_rejected(
    height: int, width: int, network: str, said: str
) -> None:
    options = {"classes": 10, "height": height, "width": width, "network": network}
    with pytest.raises(UserError, match=said):
        options_of("image-classifier", options)


@pytest.mark.parametrize(
    ("shape", "network"),
    [((1, 28, 28), "cnn-28"), ((3, 32, 32), "cnn-32"), ((1, 16, 16), "cnn-small")],
)
def test_auto_network_is_chosen_by_the_image_shape(
    shape: tuple[int, int, int], network: str
) -> None:
    options = options_of(
        "image-classifier",
        {"classes": 10, **dict(zip(("channels", "height", "width"), shape, strict=True))},
    )
    assert isinstance(options, ImageClassifierOptions)
    assert options.fitting == network


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("tabular-mlp", {"features": 4, "classes": 2, "hidden": [0]}, "hidden"),
        ("tabular-mlp", {"features": 4}, "classes"),
        ("logistic-regression", {"features": 2**40, "classes": 2}, "features"),
        ("logistic-regression", {"features": 4, "classes": 2, "depth": 3}, "its options are"),
        (
            "sparse-logistic",
            {"normalise": True},
            "has no option `normalise`, .* omitted values",
        ),
        ("guessing", {}, "must be one of image-classifier"),
    ],
)
def test_invalid_task_options_are_rejected(
    name: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        options_of(name, options)


def test_admin_service_imports_without_torch() -> None:
    peek = "import sys, services.admin.app; print('torch' in sys.modules)"
    answer = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", peek], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"
