"""An exported network computes what the task does, in programs without this project."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from common.data.digits import load_digits
from common.data.fields import Field
from common.errors import CorruptError, UserError
from common.learning.checkpoint import named_weights
from common.learning.export import ABOUT, export
from common.learning.module_task import ModuleTask
from common.learning.parameters import FlatModel, layout_of
from common.learning.tasks import build_model, make_task
from tests.changes import marks_of
from tests.ulps import assert_within_ulps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from common.learning.tasks import Task

FIELDS = (Field("image", "uint8", (1, 8, 8)), Field("label", "int64"))
ABOUT_IT = {"job": "digits", "version": "12"}


@pytest.fixture(scope="module")
def digits() -> tuple[Task, nn.Module]:
    """Return a briefly trained classifier."""
    task = make_task("image-classifier", {"classes": 10, "height": 8, "width": 8})
    module, train = build_model(task, 0), load_digits().train
    optimizer = torch.optim.Adam(module.parameters(), 2e-3)
    for start in range(0, 1280, 64):
        batch = {name: torch.from_numpy(c[start : start + 64]) for name, c in train.items()}
        optimizer.zero_grad()
        task.losses(task.forward(module, batch), batch).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return task, module.eval()


def weights(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    return named_weights(layout_of(module), FlatModel(module).vector)


# The exporter to ONNX takes seconds to load.
ONCE = marks_of("common/learning/", "tests/unit/learning/test_export.py")


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=ONCE)])
def test_exported_network_classifies_like_torch_for_any_batch_size(
    digits: tuple[Task, nn.Module], tmp_path: Path, suffix: str
) -> None:
    task, module = digits
    path = tmp_path / f"digits{suffix}"
    images = load_digits().held_out["image"]
    with torch.inference_mode():
        right = task.forward(module, {"image": torch.from_numpy(images)}).numpy()
    export(task, weights(module), FIELDS, ABOUT_IT, path)
    if suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        assert [each.name for each in session.get_inputs()] == ["image"]
        assert session.get_modelmeta().custom_metadata_map == ABOUT_IT

        def raised(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
            [outputs] = session.run(["output"], {"image": rows})
            return np.asarray(outputs)
    else:
        extra = {ABOUT: ""}
        program = torch.export.load(path, extra_files=extra).module()
        assert json.loads(extra[ABOUT]) == ABOUT_IT

        def raised(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
            found: npt.NDArray[np.float32] = program(torch.from_numpy(rows)).detach().numpy()
            return found

    for count in (len(images), 1, 7):
        assert_within_ulps(raised(images[:count]), right[:count], 8)


def test_export_with_weights_of_another_network_is_rejected(
    digits: tuple[Task, nn.Module], tmp_path: Path
) -> None:
    task, module = digits
    good = weights(module)
    first = next(iter(good))
    for wrong in (
        {name: value for name, value in good.items() if name != first},
        good | {"other": good[first]},
        good | {first: good[first][:1]},
    ):
        with pytest.raises(CorruptError, match="another network"):
            export(task, wrong, FIELDS, {}, tmp_path / "digits.pt2")


class Several(nn.Module):
    """Two outputs with a row for each record, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, a: Tensor) -> dict[str, Tensor]:
        """Map (n, 2) to (n, 4), (n, 3) and (3,)."""
        hidden = torch.tanh(self.first(a))
        return {"hidden": hidden, "bias": self.last.bias, "logits": self.last(hidden)}


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=ONCE)])
def test_exported_module_has_its_outputs_by_name(tmp_path: Path, suffix: str) -> None:
    task = ModuleTask(Several, "cross_entropy", ("a",), "label")
    module, path = build_model(task, 0).eval(), tmp_path / f"several{suffix}"
    export(task, weights(module), (Field("a", "float32", (2,)), Field("label", "int64")), {}, path)
    for count in (3, 1, 7):
        rows = np.random.default_rng(count).normal(size=(count, 2)).astype(np.float32)
        with torch.inference_mode():
            right = module(torch.from_numpy(rows))
        if suffix == ".onnx":
            session = onnxruntime.InferenceSession(path)
            names = [each.name for each in session.get_outputs()]
            found = dict(zip(names, session.run(names, {"a": rows}), strict=True))
        else:
            outputs = torch.export.load(path).module()(torch.from_numpy(rows))
            found = {name: each.detach().numpy() for name, each in outputs.items()}
        assert list(found) == ["hidden", "logits"]
        for name, each in found.items():
            assert_within_ulps(each, right[name].numpy(), 8)


class Branching:
    """Branches on its inputs, so that no single program can express it."""

    def build(self) -> nn.Module:
        """Make the network."""
        return nn.Linear(2, 1)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Branch."""
        outputs: Tensor = module(records["a"])
        return outputs if outputs.sum() > 0 else -outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Read no other field."""
        return outputs.sum(1) + records["a"].sum(1)

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return only the loss."""
        return {"loss": self.losses(outputs, records)}


def test_export_of_a_data_dependent_network_is_rejected_in_one_line(tmp_path: Path) -> None:
    task = Branching()
    path = tmp_path / "model.pt2"
    fields = (Field("a", "float32", (2,)),)
    with pytest.raises(UserError, match="cannot be exported") as raised:
        export(task, weights(task.build()), fields, {}, path)
    assert "\n" not in str(raised.value)
    assert not path.exists()
