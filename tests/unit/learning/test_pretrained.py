"""Pretrained weights: tensors are taken by name, and every other difference is refused."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch
from torch import nn

from common.errors import UserError
from common.learning.pretrained import take

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class Model(nn.Module):
    """A frozen backbone with batch normalisation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.backbone.requires_grad_(False)  # noqa: FBT003 -- torch's own signature
        self.head = nn.Linear(4, 2)


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


def other_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's tensors with other values."""
    return {name: each.detach() + 1 for name, each in module.state_dict().items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.torch.save_file(tensors, path)


def test_tensors_of_the_file_are_taken_and_new_ones_keep_their_values(path: Path) -> None:
    module = Model()
    values, head = other_values(module), module.head.weight.detach().clone()
    values["fc.weight"] = values.pop("head.weight")
    save(path, values)
    found = take(module, path, ["head.*", "fc.*"])
    state = module.state_dict()
    assert torch.equal(state["head.weight"], head)
    for name in found.taken:
        assert torch.equal(state[name], values[name]), name
    assert found.new == ["head.bias", "head.weight"]
    assert found.left == ["fc.weight", "head.bias"]
    assert len(found.taken) == 7
    assert str(found) == (
        "7 taken ('backbone.0.bias', 'backbone.0.weight', 'backbone.1.bias', ...), 2 left in the"
        " file ('fc.weight', 'head.bias'), 2 new ('head.bias', 'head.weight')"
    )


def test_floating_point_tensors_are_converted_to_the_module_s_type(path: Path) -> None:
    module = Model()
    values = other_values(module)
    values["head.weight"] = values["head.weight"].bfloat16()
    save(path, values)
    take(module, path, ())
    assert module.head.weight.dtype == torch.float32
    assert torch.equal(module.head.weight.detach(), values["head.weight"].float())


def test_file_needs_one_name_of_tied_tensors_and_no_batch_counters(path: Path) -> None:
    tied = Tied()
    values = {"embedding.weight": tied.embedding.weight.detach() + 1}
    save(path, values)
    assert take(tied, path, ()).taken == ["embedding.weight", "output.weight"]
    assert torch.equal(tied.output.weight.detach(), values["embedding.weight"])
    module = Model()
    values = other_values(module)
    del values["backbone.1.num_batches_tracked"]
    save(path, values)
    assert take(module, path, ()).new == []


def test_tied_tensor_with_two_values_is_refused(path: Path) -> None:
    save(path, {"embedding.weight": torch.ones(5, 3), "output.weight": torch.zeros(5, 3)})
    with pytest.raises(UserError, match=r"'output.weight' differs from 'embedding.weight'"):
        take(Tied(), path, ())


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("head.bias", None, "'head.bias' is not in the file"),
        ("fc.bias", torch.ones(2), "'fc.bias' is not in the module"),
        ("head.bias", torch.ones(3), r"'head.bias' has shape \[3\], expected \[2\]"),
        ("head.bias", torch.ones(2, dtype=torch.int32), "has type torch.int32, expected torch.flo"),
        ("evil\n\x1b[31m" + "x" * 99, torch.ones(1), r"'evil\\n\\x1b\[31mx+' is not in the module"),
    ],
)
def test_difference_that_no_pattern_names_is_refused(
    path: Path, name: str, tensor: Tensor | None, problem: str
) -> None:
    module = Model()
    values = other_values(module)
    values.pop(name, None)
    save(path, values if tensor is None else values | {name: tensor})
    with pytest.raises(UserError, match=problem):
        take(module, path, ["nothing.*"])
    take(module, path, [name.partition(".")[0][:4] + "*"])


def test_refusal_lists_the_first_differences_and_counts_the_others(path: Path) -> None:
    save(path, {"a": torch.ones(1)})
    with pytest.raises(UserError) as refused:
        take(Model(), path, ())
    assert "'a' is not in the module; 'backbone.0.weight' is not in the file; " in str(
        refused.value
    )
    assert "; and 6 more; correct the task or the file, or name these" in str(refused.value)


class Trap:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("kind", ["empty", "pickle", "torch", "long header", "short", "overlap"])
def test_file_of_another_kind_is_refused_and_never_unpickled(
    path: Path, tmp_path: Path, kind: str
) -> None:
    trap = tmp_path / "sprung"
    save(path, other_values(Model()))
    whole = path.read_bytes()
    if kind == "torch":
        torch.save({"head.bias": Trap(trap)}, path)
    else:
        header = b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}'
        contents = {
            "empty": b"",
            "pickle": pickle.dumps(Trap(trap)),
            "long header": (1 << 60).to_bytes(8, "little") + whole[8:],
            "short": whole[:-1],
            "overlap": len(header).to_bytes(8, "little") + header + b"1234",
        }
        path.write_bytes(contents[kind])
    with pytest.raises(UserError, match="init: the file is not a valid safetensors file: "):
        take(Model(), path, ())
    assert not trap.exists()
