"""Frozen tensors: outside the vector, the same for a whole job, and part of a pulled model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from common.errors import CorruptError, OtherModelError, UnavailableError, UserError
from common.jobs.build import share_base
from common.learning.base import Base
from common.learning.checkpoint import merged, save_weights, weights_in
from common.learning.gradients import GradientComputer
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model
from common.learning.trainer import Trainer
from common.storage.memory import MemoryBlobs
from common.storage.store import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

SEED = 5
CPU = torch.device("cpu")


class Frozen(nn.Module):
    """A frozen backbone of several types, a trained head, and batch normalisation of both kinds."""

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 4)
        nn.init.constant_(self.backbone.bias, scale)
        self.quantised = nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)
        self.rounded = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        self.still, self.moving = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        for part in (self.backbone, self.still):
            part.requires_grad_(False)  # noqa: FBT003 -- torch's own signature
        self.head = nn.Linear(4, 1)

    def train(self, mode: bool = True) -> Frozen:  # noqa: FBT001, FBT002 -- as torch has it
        """Keep one part in evaluation mode."""
        super().train(mode)
        self.still.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 1)."""
        found: Tensor = self.head(self.moving(self.still(self.backbone(x))))
        return found


@dataclass
class FrozenTask:
    """Predicts x[0]."""

    scale: float = 1.0

    def build(self) -> nn.Module:
        """Make the network."""
        return Frozen(scale=self.scale)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n, 1)."""
        outputs: Tensor = module(records["x"])
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n,)."""
        return (outputs[:, 0] - records["x"][:, 0]).square()

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return none."""
        del outputs, records
        return {}


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSettings("sgd", 0.05, {"weight_decay": 0.1}),
        OptimizerSettings("momentum", 0.05, {"weight_decay": 0.1}),
        OptimizerSettings("adam", 0.05, {"weight_decay": 0.1}),
        OptimizerSettings("adamw", 0.05, {"weight_decay": 0.1}),
        OptimizerSettings("adagrad", 0.05, {"weight_decay": 0.1}),
        OptimizerSettings("ftrl", 0.05, {"l1": 0.1, "l2": 0.1}),
    ],
    ids=lambda each: each.name,
)
def test_frozen_tensors_keep_their_bits_over_131_updates(optimizer: OptimizerSettings) -> None:
    task = FrozenTask()
    computer = GradientComputer(task, build_model(task, SEED), CPU)
    model = computer.model
    before = copies(model.module)
    trainer = Trainer(
        model.vector, model.parameter_count, optimizer, "mean", model.layout, model.base.digest
    )
    draws = np.random.default_rng(1)
    for update in range(131):
        batch = {"x": draws.normal(size=(8, 3)).astype(np.float32)}
        computer.load(trainer.weights())
        trainer.add(update, computer.compute([batch]).sparse, 8)
        trainer.apply(update)
    computer.load(trainer.weights())
    after = copies(model.module)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    trained = {"head.weight", "head.bias", "moving.weight", "moving.bias"}
    statistics = {"moving.running_mean", "moving.running_var"}
    assert moved - {"moving.num_batches_tracked"} == trained | statistics
    assert {name for piece in model.layout for name in piece.names} == trained | statistics
    assert "backbone.weight" in model.base.tensors
    assert "still.running_var" in model.base.tensors


def test_layer_of_half_precision_may_be_frozen_and_not_trained() -> None:
    module = Frozen()
    assert module.rounded.dtype == FlatModel(module).base.tensors["rounded"].dtype == torch.bfloat16
    other = nn.Linear(2, 1, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"'weight' is torch.bfloat16"):
        FlatModel(other)


def test_frozen_parameter_that_shares_memory_with_a_trained_one_is_refused() -> None:
    trained, frozen = nn.Linear(3, 3), nn.Linear(3, 3)
    frozen.weight = nn.Parameter(trained.weight.data, requires_grad=False)
    module = nn.Sequential(trained, frozen)
    with pytest.raises(UserError, match=r"'1.weight' is frozen and shares memory with '0.weight'"):
        FlatModel(module)


def test_module_that_freezes_a_parameter_while_it_trains_is_refused() -> None:
    class Toggling(FrozenTask):
        def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
            [*module.parameters()][-1].requires_grad = False
            return super().forward(module, records)

    task = Toggling()
    computer = GradientComputer(task, build_model(task, SEED), CPU)
    with pytest.raises(UserError, match="requires_grad"):
        computer.compute([{"x": np.ones((4, 3), np.float32)}])


def test_digest_depends_on_each_frozen_tensor_and_on_nothing_that_is_trained() -> None:
    task = FrozenTask()
    model = FlatModel(build_model(task, SEED))
    digest = model.base.digest
    with torch.no_grad():
        model.state.add_(1.0)
    assert (
        Base(model.base.tensors).digest == digest == FlatModel(build_model(task, SEED)).base.digest
    )
    for name, tensor in model.base.tensors.items():
        others = {**model.base.tensors, name: tensor + 1}
        assert Base(others).digest != digest, name
    assert FlatModel(nn.Linear(2, 1)).base.digest == ""


@pytest.fixture
def store() -> CheckpointStore:
    """The storage of a job."""
    return CheckpointStore(MemoryBlobs(), "job")


def test_second_process_takes_over_random_tensors_of_the_first(store: CheckpointStore) -> None:
    task = FrozenTask()
    first, second = FlatModel(build_model(task, SEED)), FlatModel(build_model(task, SEED))
    share_base(first, task, SEED, store, write=True)
    # Another kind of processor would round differently.
    with torch.no_grad():
        second.base.tensors["backbone.weight"].add_(1e-7)
    second = FlatModel(second.module)
    assert second.base.digest != first.base.digest
    share_base(second, task, SEED, store, write=True)
    assert store.base_digest() == second.base.digest == first.base.digest
    mine, theirs = second.module.state_dict(), first.module.state_dict()
    assert torch.equal(mine["backbone.weight"], theirs["backbone.weight"])


def test_process_with_other_code_is_refused_with_the_first_difference(
    store: CheckpointStore,
) -> None:
    task, other = FrozenTask(), FrozenTask(scale=2.0)
    share_base(FlatModel(build_model(task, SEED)), task, SEED, store, write=True)
    model = FlatModel(build_model(other, SEED))
    before = copies(model.module)
    with pytest.raises(OtherModelError, match=r"the frozen 'backbone.bias'"):
        share_base(model, other, SEED, store, write=True)
    assert all(torch.equal(before[name], each) for name, each in copies(model.module).items())


def test_values_of_a_file_are_taken_over_whatever_the_task_builds(store: CheckpointStore) -> None:
    task, other = FrozenTask(), FrozenTask(scale=2.0)
    first, second = FlatModel(build_model(task, SEED)), FlatModel(build_model(other, SEED))
    first.base.from_file = True
    share_base(first, task, SEED, store, write=True)
    share_base(second, other, SEED, store, write=False)
    assert store.base_digest() == second.base.digest == first.base.digest
    assert copies(second.module)["backbone.bias"].tolist() == [1.0] * 4
    # A base of another shape or type is still of another model.
    with pytest.raises(OtherModelError, match=r"the frozen 'backbone.bias' is not the"):
        Base({"still": torch.ones(1)}).adopt(store.base(store.base_digest()), lambda: second.base)


def test_worker_without_rights_to_write_uses_its_own_until_one_is_stored(
    store: CheckpointStore,
) -> None:
    task = FrozenTask()
    share_base(FlatModel(build_model(task, SEED)), task, SEED, store, write=False)
    assert store.base_digest() == ""


@pytest.mark.parametrize("damage", ["altered", "missing", "another pointer", "torn pointer"])
def test_damaged_base_is_never_used(damage: str) -> None:
    blobs, task = MemoryBlobs(), FrozenTask()
    store, model = CheckpointStore(blobs, "job"), FlatModel(build_model(task, SEED))
    share_base(model, task, SEED, store, write=True)
    [file] = [name for name in blobs.names("job/base/") if name.endswith(".safetensors")]
    with torch.no_grad():
        model.base.tensors["backbone.weight"].add_(1e-7)
    other = FlatModel(model.module)
    data = bytearray(blobs.content[file])
    if damage == "altered":
        # The last bytes are those of a frozen tensor, so the file still parses.
        data[-1] ^= 1
        blobs.put(file, bytes(data))
    elif damage == "missing":
        blobs.delete(file)
    else:
        pointer = b"another 1234" if damage == "another pointer" else b"\xff\x00"
        blobs.put("job/base/digest", pointer)
    before = copies(other.module)
    with pytest.raises(CorruptError):
        share_base(other, task, SEED, store, write=True)
    assert all(torch.equal(before[name], each) for name, each in copies(other.module).items())


@pytest.mark.parametrize("stored", [b"", b"garbage", bytes(100)])
def test_garbage_instead_of_a_base_is_corrupt(stored: bytes) -> None:
    base = FlatModel(Frozen()).base
    with pytest.raises(CorruptError, match="do not hold a base"):
        base.adopt(stored, lambda: base)


def test_file_of_trained_and_frozen_tensors_loads_into_the_plain_module(tmp_path: Path) -> None:
    task = FrozenTask()
    model = FlatModel(build_model(task, SEED))
    trainer = Trainer(
        model.vector + 1,
        model.parameter_count,
        OptimizerSettings("adam", 0.1),
        layout=model.layout,
        base=model.base.digest,
    )
    weights, kind = weights_in(trainer.snapshot())
    assert kind.base == model.base.digest
    data = merged(save_weights(kind.layout, weights, {"b": "2", "a": "1"}), model.base.save())
    module = Frozen()
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "a": "1", "b": "2"}
    missing = module.load_state_dict(safetensors.torch.load(data), strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    loaded, own = module.state_dict(), model.module.state_dict()
    assert torch.equal(loaded["backbone.weight"], own["backbone.weight"])
    assert torch.equal(loaded["rounded"], own["rounded"])
    assert torch.equal(loaded["head.bias"], own["head.bias"] + 1)


def test_first_writer_without_the_right_to_list_stores_its_base() -> None:
    class NoList(MemoryBlobs):
        """Like S3 without `s3:ListBucket`."""

        def get(self, name: str) -> bytes | None:
            """Refuse to say that a name does not exist."""
            if (data := super().get(name)) is None:
                raise UnavailableError("403", "storage")
            return data

    task, store = FrozenTask(), CheckpointStore(NoList(), "job")
    model = FlatModel(build_model(task, SEED))
    share_base(model, task, SEED, store, write=True)
    assert store.base_digest() == model.base.digest
