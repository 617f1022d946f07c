"""The fields that a prediction needs are observed, not declared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from common.data.fields import Field
from common.learning.inputs import forward_of
from common.learning.tasks import build_model
from tests.unit.learning.examples import image_task

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS = (Field("a", "float32", (2,)), Field("b", "int64"), Field("label", "int64"))


class Joined:
    """Reads all fields except the label."""

    def build(self) -> nn.Module:
        """Make the network."""
        return nn.Linear(3, 4)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Add up two fields."""
        found = [records["a"], records["b"].float()[:, None]]
        outputs: Tensor = module(nn.functional.pad(found[0] + found[1], (0, 1)))
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Read the label."""
        return outputs.sum(1) - records["label"]

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return only the loss."""
        return {"loss": self.losses(outputs, records)}


class Picky(Joined):
    """Refuses zeros."""

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Add up two fields."""
        if not records["a"].all():
            raise ValueError("zero")
        return super().forward(module, records)


def test_label_is_not_an_input() -> None:
    task = image_task()
    fields = (Field("image", "uint8", task.inputs()["image"].shape or ()), Field("label", "int64"))  # type: ignore[attr-defined]
    found = forward_of(task, build_model(task, 0).eval(), fields)
    assert [field.name for field in found.fields] == ["image"]
    assert [len(shape) for shape in found.outputs.values()] == [1]


def test_inputs_of_a_custom_task_are_observed() -> None:
    found = forward_of(Joined(), Joined().build(), FIELDS)
    assert [field.name for field in found.fields] == ["a", "b"]
    assert found.outputs == {"output": (4,)}


def test_task_that_rejects_zeros_gets_all_fields_as_inputs() -> None:
    found = forward_of(Picky(), Picky().build(), FIELDS)
    assert (found.fields, found.outputs) == (FIELDS, {})
