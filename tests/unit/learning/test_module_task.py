"""A torch module with a loss by name learns what a task written by hand learns."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as functions
from torch import Tensor, nn

from common.data.fields import Field
from common.errors import UserError
from common.learning.errors import WrongTaskError
from common.learning.gradients import GradientComputer
from common.learning.inputs import forward_of
from common.learning.optimizers import OptimizerSettings
from common.learning.outputs import check_outputs, detached, outputs_of, tensors_of
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.data.fields import Columns
    from common.learning.tasks import Task

HERE = __name__
CPU = torch.device("cpu")
FIELDS = (Field("x", "float32", (6,)), Field("y", "float32", (2,)), Field("label", "int64"))
UPDATES = 200
Form = Literal["tensor", "tuple", "list", "named tuple", "dict", "dataclass", "hugging face"]
FORMS: tuple[Form, ...] = (
    *("tensor", "tuple", "list", "named tuple", "dict", "dataclass", "hugging face"),
)
Named = namedtuple("Named", ["logits", "hidden"])  # noqa: PYI024 -- as in people's models


@dataclass
class Output:
    """Outputs as a dataclass."""

    logits: Tensor
    hidden: Tensor | None = None
    loss: Tensor | None = None


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """Outputs as those of Hugging Face: a dict that is a dataclass, and lacks what is None."""

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits
        if self.hidden is not None:
            self["hidden"] = self.hidden

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 -- as in a dict
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.logits, self.hidden)


def in_form(form: Form, logits: Tensor, hidden: Tensor) -> object:
    return {
        "tensor": lambda: logits,
        "tuple": lambda: (logits, hidden),
        "list": lambda: [logits, hidden],
        "named tuple": lambda: Named(logits, hidden),
        "dict": lambda: {"hidden": hidden, "logits": logits},
        "dataclass": lambda: Output(logits, hidden),
        "hugging face": lambda: ModelOutput(logits, (hidden,)),
    }[form]()


class Net(nn.Module):
    """Two inputs, and outputs in a form."""

    def __init__(self, outputs: int = 3, form: Form = "tensor") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 5), nn.Linear(5, outputs)
        self.form: Form = form

    def forward(self, x: Tensor, y: Tensor) -> object:
        """Map (n, 6) and (n, 2) to (n, outputs)."""
        hidden = torch.tanh(self.first(torch.cat([x, y], 1)))
        return in_form(self.form, self.last(hidden), hidden)


@dataclass
class ByHand:
    """The same task, written by hand."""

    def build(self) -> nn.Module:
        """Make the network."""
        return Net()

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return logits, (n, 3)."""
        logits: Tensor = module(records["x"], records["y"])
        return logits

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy, (n,)."""
        return functions.cross_entropy(outputs, records["label"], reduction="none")

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the accuracy, (n,)."""
        return {"accuracy": (outputs.argmax(1) == records["label"]).float()}


def task_named(name: str, **options: object) -> Task:
    entrypoint = f"{HERE}:{name}"
    return make_task(entrypoint, options, (entrypoint,))


def classifier(form: Form = "tensor") -> Task:
    options = {"loss": "cross_entropy", "inputs": ["x", "y"], "target": "label", "form": form}
    return task_named("Net", **options)


def batch_of(seed: int, count: int = 4) -> Columns:
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(count, 6)).astype(np.float32),
        "y": random.normal(size=(count, 2)).astype(np.float32),
        "label": random.integers(0, 3, count),
        "value": random.normal(size=count).astype(np.float32),
    }


def learned(task: Task) -> tuple[bytes, list[float], dict[str, Any]]:
    """Return the weights after some updates, the losses, and the metrics of the last update."""
    network = build_model(task, seed=7)
    model = FlatModel(network)
    settings = OptimizerSettings("adam", 0.01)
    trainer = Trainer(model.vector.copy(), model.parameter_count, settings)
    computer, losses = GradientComputer(task, network, CPU), list[float]()
    for number in range(UPDATES):
        computer.load(trainer.weights())
        found = computer.compute([batch_of(number)])
        assert isinstance(found.vector, np.ndarray)
        trainer.step(found.vector, found.samples)
        losses.append(found.loss_sum)
    return bytes(trainer.weights()), losses, dict(found.metric_sums)


def test_module_learns_bit_for_bit_what_a_task_by_hand_learns() -> None:
    assert learned(classifier()) == learned(ByHand())


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_every_form_learn_the_same(form: Form) -> None:
    assert learned(classifier(form))[0] == learned(ByHand())[0]


@pytest.mark.parametrize(
    ("loss", "metric"),
    [
        ("binary_cross_entropy_with_logits", "accuracy"),
        ("mse_loss", "absolute_error"),
        ("l1_loss", "absolute_error"),
        ("smooth_l1_loss", "absolute_error"),
        ("huber_loss", "absolute_error"),
    ],
)
def test_one_output_is_compared_with_a_target_of_one_number(loss: str, metric: str) -> None:
    task = task_named("Net", loss=loss, inputs=["x", "y"], target="value", outputs=1)
    network, batch = build_model(task, 0), batch_of(0)
    batch["value"] = (batch["value"] > 0).astype(np.float32)
    found = GradientComputer(task, network, CPU).compute([batch])
    tensors = {name: torch.from_numpy(column) for name, column in batch.items()}
    with torch.no_grad():
        logits = network(tensors["x"], tensors["y"]).squeeze(1)
    expected = getattr(functions, loss)(logits, tensors["value"], reduction="sum").item()
    assert found.loss_sum == pytest.approx(expected, rel=1e-5)
    assert [*found.metric_sums] == [metric]


def test_loss_of_several_numbers_is_their_mean() -> None:
    task = task_named("Net", loss="mse_loss", inputs=["x", "y"], target="y", outputs=2)
    predicted, target = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert task.losses(predicted, {"y": target}).tolist() == [2.5]
    assert task.metrics(predicted, {"y": target})["absolute_error"].tolist() == [1.5]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"inputs": ["x"], "target": "label"}, "missing required field `loss`"),
        ({"loss": "hinge", "inputs": ["x"], "target": "label"}, "hinge"),
        ({"loss": "mse_loss", "inputs": [], "target": "label"}, "inputs"),
        (
            {"loss": "mse_loss", "inputs": ["x"], "target": "y", "width": 3},
            "refuses its options {'width': 3}",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        task_named("Net", **options)


def test_outputs_are_named() -> None:
    logits, hidden = torch.ones(2, 3), torch.ones(2, 5)
    names = {form: list(tensors_of(in_form(form, logits, hidden))) for form in FORMS}
    assert names == {
        "tensor": ["output"],
        "tuple": ["output_0", "output_1"],
        "list": ["output_0", "output_1"],
        "named tuple": ["logits", "hidden"],
        "dict": ["hidden", "logits"],
        "dataclass": ["logits", "hidden"],
        "hugging face": ["logits"],
    }
    assert list(outputs_of({"logits": logits, "loss": torch.ones(())}, 2)) == ["logits"]


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_detached_without_a_change_of_form(form: Form) -> None:
    given = in_form(form, torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True))
    found = detached(given)
    assert type(found) is type(given)
    assert tensors_of(found).keys() == tensors_of(given).keys()
    assert not any(tensor.requires_grad for tensor in tensors_of(found).values())
    if isinstance(found, ModelOutput):
        assert found.hidden is not None
        assert not found.hidden[0].requires_grad


@pytest.mark.parametrize("outputs", [None, 3.5, {}, (), {"loss": 1.0}, [[torch.ones(1)]]])
def test_outputs_without_a_tensor_are_refused(outputs: object) -> None:
    with pytest.raises(WrongTaskError, match="a tensor is needed, or a tuple, dict or dataclass"):
        check_outputs(classifier(), outputs)


def test_server_learns_the_names_and_shapes_of_outputs() -> None:
    task = classifier("dict")
    found = forward_of(task, build_model(task, 0).eval(), FIELDS)
    assert found.outputs == {"hidden": (5,), "logits": (3,)}
    assert [field.name for field in found.fields] == ["x", "y"]
