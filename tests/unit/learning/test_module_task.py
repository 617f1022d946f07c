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

import doll
from common.data.fields import Field
from common.errors import GivenError, TaskMissingError, UserError
from common.jobs.job_file import parse_job
from common.jobs.spec import job_from_json
from common.learning.errors import TaskError, WrongTaskError
from common.learning.evaluate import evaluate
from common.learning.gradients import GradientComputer
from common.learning.inputs import forward_of
from common.learning.module_task import ModuleTask
from common.learning.named_outputs import detached, outputs_of, tensors_of
from common.learning.optimizers import OptimizerSettings
from common.learning.outputs import check_outputs
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, make_task, task_of
from common.learning.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.data.fields import Columns
    from common.jobs.spec import JobSpec
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
    made: dict[Form, Callable[[], object]] = {
        "tensor": lambda: logits,
        "tuple": lambda: (logits, hidden),
        "list": lambda: [logits, hidden],
        "named tuple": lambda: Named(logits, hidden),
        "dict": lambda: {"hidden": hidden, "logits": logits},
        "dataclass": lambda: Output(logits, hidden),
        "hugging face": lambda: ModelOutput(logits, (hidden,)),
    }
    return made[form]()


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
    return make_task(entrypoint, {"module": entrypoint, **options}, (entrypoint,))


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


def learned(task: Task, updates: int = UPDATES) -> tuple[bytes, list[float], dict[str, Any]]:
    """Return the weights after some updates, the losses, and the metrics of the last update."""
    network = build_model(task, seed=7)
    model = FlatModel(network)
    settings = OptimizerSettings("adam", 0.01)
    trainer = Trainer(model.vector.copy(), model.parameter_count, settings)
    computer, losses = GradientComputer(task, network, CPU), list[float]()
    for number in range(updates):
        computer.load(trainer.weights())
        found = computer.compute([batch_of(number)])
        assert isinstance(found.vector, np.ndarray)
        trainer.step(torch.from_numpy(found.vector), found.samples)
        losses.append(found.loss_sum)
    return bytes(trainer.weights()), losses, dict(found.metric_sums)


def test_module_learns_bit_for_bit_what_a_task_by_hand_learns() -> None:
    assert learned(classifier()) == learned(ByHand())


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_every_form_learn_the_same(form: Form) -> None:
    assert learned(classifier(form), 5)[0] == learned(ByHand(), 5)[0]


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_every_form_are_evaluated_the_same(form: Form) -> None:
    found = [
        evaluate(task, FlatModel(network), FlatModel(network).vector, batch_of(0, 9), 4)
        for task in (classifier(form), ByHand())
        for network in [build_model(task, 0)]
    ]
    assert found[0] == found[1]
    assert found[0].keys() == {"accuracy", "loss"}


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
        ({"loss": "hinge", "inputs": ["x"], "target": "label"}, "'hinge' .* is one of cross_ent"),
        ({"loss": "mse_loss", "target": "label"}, "missing required field `inputs`"),
        ({"loss": "mse_loss", "inputs": [], "target": "label"}, "length >= 1 .*inputs"),
        ({"loss": "mse_loss", "inputs": ["x"]}, "missing required field `target`"),
        (
            {"loss": "mse_loss", "inputs": ["x"], "target": "y", "width": 3},
            "task.module: .*:Net' refuses its arguments {'width': 3}: got an unexpected keyword",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        task_named("Net", **options)


class NoModule:
    """A class that is no torch module."""


class Raises(nn.Module):
    """A module with a mistake."""

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        if early:
            raise KeyError("width")
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Raise.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{len(x)} are too many")


def nothing(**_: object) -> None:
    """Make nothing, although a job names this function as a module."""


def test_module_that_this_process_may_not_import_is_refused() -> None:
    with pytest.raises(TaskMissingError, match="not among the allowed"):
        make_task("nets:Net", {"module": "nets:Net", "loss": "l1_loss"}, (f"{HERE}:Net",))


def test_class_under_the_wrong_option_is_refused_with_the_right_one() -> None:
    options = {"loss": "cross_entropy", "inputs": ["x"], "target": "label"}
    with pytest.raises(GivenError, match=r"task.module: .*NoModule' is no torch module; .*entryp"):
        task_named("NoModule", **options)
    entrypoint = f"{HERE}:Net"
    with pytest.raises(GivenError, match=r"task.entrypoint: .*Net' is a torch module, .*`module`"):
        make_task(entrypoint, {}, (entrypoint,))
    with pytest.raises(UserError, match="returned a NoneType, not a module"):
        build_model(task_named("nothing", **options), 0)


def test_mistake_in_a_module_is_reported_with_its_place_in_the_module() -> None:
    options = {"loss": "mse_loss", "inputs": ["x"], "target": "value"}
    with pytest.raises(UserError, match=r"KeyError: 'width' \(test_module_task.py, .* __init__\)"):
        build_model(task_named("Raises", **options, early=True), 0)
    task = task_named("Raises", **options, early=False)
    computer = GradientComputer(task, build_model(task, 0), CPU)
    with pytest.raises(TaskError) as raised:
        computer.compute([batch_of(0)])
    assert raised.value.summary.startswith("ValueError: 4 are too many (test_module_task.py, line")
    assert "in forward)" in raised.value.summary


@pytest.mark.parametrize(
    ("loss", "target", "outputs", "needed"),
    [
        ("mse_loss", "value", 3, "has shape (4, 3): mse_loss with the target 'value' needs (4,)"),
        ("mse_loss", "y", 1, "has shape (4, 1): mse_loss with the target 'y' needs (4, 2)"),
        ("cross_entropy", "pixels", 3, "with the target 'pixels' needs (4, classes, 5)"),
    ],
)
def test_output_of_the_wrong_shape_is_refused_whatever_the_batch(
    loss: str, target: str, outputs: int, needed: str
) -> None:
    task = task_named("Net", loss=loss, inputs=["x", "y"], target=target, outputs=outputs)
    batch = batch_of(0) | {"pixels": np.zeros((4, 5), np.int64)}
    with pytest.raises(WrongTaskError) as refused:
        GradientComputer(task, build_model(task, 0), CPU).compute([batch])
    assert needed in refused.value.summary
    assert "(test_module_task.py, line" in refused.value.summary
    assert refused.value.batch_index is None


def test_label_that_is_no_class_quarantines_only_its_batch() -> None:
    task = classifier()
    batch = batch_of(0) | {"label": np.array([0, 1, 2, 3])}
    with pytest.raises(TaskError, match=r"label: a number is outside 0..2") as raised:
        GradientComputer(task, build_model(task, 0), CPU).compute([batch])
    assert raised.value.batch_index == 0


def test_check_task_tries_a_module_without_any_server() -> None:
    task = doll.ModuleTask(Net, "cross_entropy", ("x", "y"), "label", {"form": "dict"})
    found = doll.check_task(task, batch_of(0))
    assert (found.samples, [*found.metrics]) == (4, ["accuracy"])


JOB = """
name: nets
streams: [nets]
records:
  codec: json
  fields: {x: {dtype: float32, shape: [6]}, y: {dtype: float32, shape: [2]}, label: {dtype: int64}}
task: {module: "tests.unit.learning.test_module_task:Net", LOSS, INPUTS, TARGET}
batch_size: 2
group_size: 1
optimizer: {name: sgd, learning_rate: 0.1}
"""


def job(loss: str = "cross_entropy", inputs: str = "x, y", target: str = "label") -> JobSpec:
    text = JOB.replace("LOSS", f"loss: {loss}").replace("INPUTS", f"inputs: [{inputs}]")
    return parse_job(text.replace("TARGET", f"target: {target}"))


def test_job_file_names_a_module() -> None:
    spec = job()
    assert spec.task_name == f"{HERE}:Net"
    task = task_of(spec, (spec.task_name,))
    assert task == ModuleTask(Net, "cross_entropy", ("x", "y"), "label", {})
    assert job_from_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss": "hinge"}, r"task: Invalid enum value 'hinge' - at `\$.loss`; .*cross_entropy"),
        ({"inputs": ""}, r"task: .*length >= 1 - at `\$.inputs`"),
        ({"inputs": "x, z"}, r"task.inputs: .* the records \(x, y, label\), got 'z'"),
        ({"target": "spent"}, r"task.target: must be fields .*got 'spent'"),
    ],
)
def test_job_file_with_an_invalid_module_is_refused_by_field(
    options: dict[str, str], problem: str
) -> None:
    with pytest.raises(GivenError, match=problem):
        job(**options)


def test_classes_of_a_target_with_fractions_are_refused() -> None:
    spec = job(target="x")
    with pytest.raises(UserError, match="field 'x' is float32, but the task reads uint8"):
        task_of(spec, (spec.task_name,))


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
