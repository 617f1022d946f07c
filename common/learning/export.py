"""Write a trained network to a file that needs none of our code: `torch.export` or ONNX."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from common.errors import CorruptError, UserError
from common.learning.errors import one_line
from common.learning.inputs import forward_of, zeros_of
from common.learning.named_outputs import OUTPUT, tensors_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    import numpy.typing as npt

    from common.data.fields import Field
    from common.learning.inputs import Forward
    from common.learning.tasks import Task

# Name of the file in a `.pt2` that describes it. An `.onnx` has this in its metadata.
ABOUT = "about.json"


class _Forward(nn.Module):
    """The task's `forward` on columns in the order of its fields."""

    def __init__(self, task: Task, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self._task = task
        self._names = tuple(field.name for field in forward.fields)
        self._outputs = tuple(forward.outputs)

    def forward(self, *columns: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the output, (n, ...), or several by name."""
        records = dict(zip(self._names, columns, strict=True))
        tensors = tensors_of(self._task.forward(self.module, records))
        outputs = {name: tensors[name] for name in self._outputs or tensors}
        return outputs[OUTPUT] if outputs.keys() == {OUTPUT} else outputs


def export(
    task: Task,
    weights: Mapping[str, npt.NDArray[Any]],
    fields: Sequence[Field],
    about: Mapping[str, str],
    path: Path,
) -> None:
    """Write `forward` in evaluation mode, for any number of records.

    Args:
        task: The task.
        weights: Tensors of the network by their names in the `state_dict`.
        fields: Fields of the records. The file takes those that `forward` reads, in this order.
        about: Metadata for the file.
        path: The suffix is the format: `.pt2` or `.onnx`.

    Raises:
        CorruptError: If the weights do not fit the network.
        UserError: If the network cannot be exported, or the file cannot be written.
    """
    module = task.build()
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    try:
        missing = module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise CorruptError(f"the weights belong to another network: {one_line(error)}") from error
    # Counters are not weights. See `training_state`.
    lost = [name for name in missing.missing_keys if not name.endswith("num_batches_tracked")]
    if lost or missing.unexpected_keys:
        names = ", ".join([*lost, *missing.unexpected_keys])
        raise CorruptError(f"the weights belong to another network: {names}")
    module.eval()
    forward = forward_of(task, module, fields)
    columns = tuple(zeros_of(forward.fields).values())
    rows = torch.export.Dim("records")
    try:
        program = torch.export.export(
            _Forward(task, module, forward),
            columns,
            dynamic_shapes={"columns": tuple({0: rows} for _ in columns)},
        )
        if path.suffix == ".onnx":
            written = torch.onnx.export(
                program,
                input_names=[field.name for field in forward.fields],
                output_names=list(forward.outputs),
                dynamo=True,
                verbose=False,
            )
            assert written is not None  # noqa: S101 -- never None with `dynamo`
            written.model.metadata_props.update(about)
            written.save(path)
        else:
            metadata = {ABOUT: json.dumps(dict(about))}
            torch.export.save(program, path, extra_files=metadata)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    # The network is the user's code, and exporters may raise anything.
    except Exception as error:
        raise UserError(f"this network cannot be exported: {one_line(error)}") from error
