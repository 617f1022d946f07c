"""Tasks are made by name, and invalid settings of a job are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from common.data.fields import Field
from common.errors import TaskMissingError, UserError
from common.jobs.spec import BUILT_IN_TASKS
from common.learning.task_options import TASK_NAMES
from common.learning.tasks import build_model, check_fields, make_task
from tests.ulps import assert_within_ulps
from tests.unit.learning.examples import Counting, image_task

if TYPE_CHECKING:
    from pathlib import Path

IMAGE = Field("image", "uint8", (1, 8, 8))
LABEL = Field("label", "int64")


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("images", {}, "image-classifier, logistic-regression, tabular-mlp, linear-regr"),
        ("image-classifier", {}, "classes"),
        ("image-classifier", {"classes": 10, "depth": 3}, "depth.*channels"),
        ("image-classifier", {"classes": 10, "height": "28"}, "height"),
        ("image-classifier", {"classes": 10, "height": 0}, "height"),
        ("image-classifier", {"classes": 10, "network": "resnet"}, "network"),
        ("image-classifier", {"classes": 10, "height": 8, "network": "cnn-28"}, "cnn-small"),
        ("logistic-regression", {"classes": 2}, "features"),
        ("tabular-mlp", {"classes": 2, "features": 3, "hidden": [4, -1]}, "hidden"),
        ("linear-regression", {"features": 3, "loss": "hinge"}, "hinge.*loss"),
        ("linear-regression", {"features": 3, "loss": "huber", "delta": 0}, "delta"),
        ("linear-regression", {"features": 3, "delta": 2}, "delta: requires `loss: huber`"),
        ("linear-regression", {"features": 3, "classes": 2}, "its options are features, target"),
        ("sparse-logistic", {"entries": 39}, "features"),
        ("matrix-factorisation", {"users": 3, "items": 2, "regularisation": -1}, "regularisation"),
        ("lda", {"words": 9, "entries": 3, "topics": 2, "documents": 5, "alpha": 0}, "alpha"),
    ],
)
def test_invalid_task_is_rejected_with_the_problem(
    name: str, options: dict[str, object], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        make_task(name, options)


def test_names_of_the_built_in_tasks_are_exported() -> None:
    assert TASK_NAMES == (
        "image-classifier",
        "logistic-regression",
        "tabular-mlp",
        "linear-regression",
        "sparse-logistic",
        "matrix-factorisation",
        "lda",
    )
    assert tuple(BUILT_IN_TASKS) == TASK_NAMES


def test_entrypoint_is_imported_only_if_it_is_allowed() -> None:
    entrypoint = "tests.unit.learning.examples:Counting"
    with pytest.raises(TaskMissingError, match="not among the allowed"):
        make_task(entrypoint, {"ids": 3}, allowed=["tests.unit.learning.examples:Regression"])
    assert make_task(entrypoint, {"ids": 3}, allowed=[entrypoint]) == Counting(ids=3)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("x = 1", "has no attribute 'Mine'"),
        (
            "import common.prices",
            "No module named 'common.prices'; 'common' is also a package of DOLL",
        ),
        (
            "from common.errors import Price",
            "cannot import name 'Price'.*; 'common' is also a package",
        ),
        ("import common\ncommon.prices()", "has no attribute 'prices'; 'common' is also a package"),
    ],
)
def test_entrypoint_that_is_not_installed_raises_task_missing_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    entrypoint = _module(tmp_path, monkeypatch, source)
    with pytest.raises(TaskMissingError, match=expected):
        make_task(entrypoint, {}, allowed=[entrypoint])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{}['typo']", "importing it raised KeyError: 'typo'"),
        ("def Mine(: pass", "importing it raised SyntaxError"),
        ("def Mine(**options): raise RuntimeError('no')", "refuses its options .*RuntimeError: no"),
        (
            "class Mine:\n    def build(self): ...\n    losses = 3",
            "no method forward and no losses",
        ),
    ],
)
def test_entrypoint_that_raises_or_lacks_a_method_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    entrypoint = _module(tmp_path, monkeypatch, source)
    with pytest.raises(UserError, match=expected) as caught:
        make_task(entrypoint, {}, allowed=[entrypoint])
    assert not isinstance(caught.value, TaskMissingError)


def _module(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """Return an entrypoint in a module of this source, under a name that no other test uses."""
    name = f"{folder.name.replace('-', '_')}_task"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    return f"{name}:Mine"


class Unbuildable(Counting):
    """A task without a model."""

    def build(self) -> nn.Module:
        """Allocate more memory than there is."""
        return nn.Linear(2**40, 2**20)


def test_model_that_cannot_be_built_is_a_user_error_with_its_line() -> None:
    with pytest.raises(UserError, match=r"build\(\) of the task raised .*test_tasks.py, line \d+"):
        build_model(Unbuildable(), seed=0)


@pytest.mark.parametrize(
    ("entrypoint", "options"),
    [
        ("tests.unit.learning.nowhere:Task", {}),
        ("tests.unit.learning.examples:Nothing", {}),
        ("tests.unit.learning.examples:Counting", {"colour": 1}),
    ],
)
def test_entrypoint_that_does_not_work_is_a_user_error(
    entrypoint: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=entrypoint):
        make_task(entrypoint, options, allowed=[entrypoint])


def test_weights_depend_on_the_seed_alone() -> None:
    task = image_task()
    first = build_model(task, seed=7).state_dict()
    before = torch.rand(3)
    torch.manual_seed(1)
    drawn = torch.get_rng_state()
    second = build_model(task, seed=7).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(before, torch.rand(3))
    torch.set_rng_state(drawn)
    other = build_model(task, seed=8).state_dict()
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_build_model_leaves_the_torch_generator_unchanged() -> None:
    state = torch.get_rng_state()
    build_model(image_task(), seed=7)
    assert torch.equal(torch.get_rng_state(), state)


def test_image_classifier_treats_bytes_and_fractions_alike() -> None:
    task = image_task()
    module = build_model(task, seed=0)
    pixels = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    as_bytes = task.forward(module, {"image": pixels})
    as_fractions = task.forward(module, {"image": pixels / 255})
    assert_within_ulps(as_bytes.detach(), as_fractions.detach(), 8)


def test_image_classifier_losses_and_accuracy_are_per_sample() -> None:
    task = image_task(classes=3)
    outputs = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    records = {"label": torch.tensor([0, 1], dtype=torch.uint8)}
    expected = cross_entropy(outputs, records["label"].long(), reduction="none")
    assert torch.equal(task.losses(outputs, records), expected)
    assert task.metrics(outputs, records)["accuracy"].tolist() == [1, 0]


@pytest.mark.parametrize("label", [-1, 3])
def test_label_outside_the_classes_is_rejected(label: int) -> None:
    with pytest.raises(ValueError, match="label: a number is outside"):
        image_task(classes=3).losses(torch.zeros(2, 3), {"label": torch.tensor([0, label])})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ([LABEL], "'image'"),
        ([IMAGE], "'label'"),
        ([Field("image", "uint8", (8, 8)), LABEL], r"\[8, 8\].*\[1, 8, 8\]"),
        ([IMAGE, Field("label", "float32")], "'label'"),
    ],
)
def test_fields_that_a_task_cannot_read_are_rejected(fields: list[Field], named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_fields(image_task(), fields)


def test_readable_fields_and_tasks_without_inputs_pass_the_check() -> None:
    check_fields(image_task(), [LABEL, IMAGE, Field("more", "int8")])
    check_fields(Counting(), [LABEL])
