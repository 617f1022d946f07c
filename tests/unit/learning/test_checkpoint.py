"""Weights are saved by name, as plain PyTorch knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from common.errors import CorruptError
from common.learning.checkpoint import (
    Layout,
    TensorSlice,
    difference,
    digest_of,
    named_weights,
    pack,
    save_weights,
    unnamed,
    unpack,
    weights_in,
    with_optimizer,
)
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel, layout_of
from common.learning.tasks import build_model
from common.learning.trainer import Trainer
from tests.unit.learning.examples import image_task, normalised

if TYPE_CHECKING:
    from common.data.fields import Columns


def test_plain_pytorch_loads_saved_weights() -> None:
    trained = FlatModel(normalised())
    trained.vector[:] = np.random.default_rng(0).uniform(0.1, 1, size=len(trained.vector))
    data = save_weights(layout_of(normalised()), trained.vector, {})
    plain = normalised()
    plain.load_state_dict(safetensors.torch.load(data))
    expected = trained.module.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_named_weights_have_the_names_of_the_state_dict() -> None:
    module = build_model(image_task(), seed=0)
    named = named_weights(layout_of(module), FlatModel(module).vector)
    assert {name: value.shape for name, value in named.items()} == {
        name: tuple(value.shape) for name, value in module.state_dict().items()
    }


def test_tied_weights_are_saved_under_every_name() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    named = named_weights(layout_of(module), np.arange(9, dtype=np.float32))
    assert sorted(named) == ["0.weight", "1.weight"]
    assert np.array_equal(named["0.weight"], named["1.weight"])
    data = save_weights(layout_of(module), np.ones(9, np.float32), {})
    module.load_state_dict(safetensors.torch.load(data))


def test_saved_file_has_its_metadata_and_is_deterministic() -> None:
    layout, about = layout_of(nn.Linear(2, 1)), {f"key {n}": 'Jörg "\\ \n' * n for n in range(9)}
    files = {save_weights(layout, np.arange(3, dtype=np.float32), about) for _ in range(20)}
    (data,) = files
    assert unpack(data)[1] == {"format": "pt", **about}
    loaded = safetensors.torch.load(data)
    assert (loaded["weight"].tolist(), loaded["bias"].tolist()) == ([[0, 1]], [2])


def test_vector_of_another_model_is_rejected_with_both_lengths() -> None:
    with pytest.raises(CorruptError, match=r"of 4 .* 3 numbers"):
        named_weights(layout_of(nn.Linear(2, 1)), np.zeros(4, np.float32))


def test_trainer_snapshot_contains_the_layout_of_its_weights() -> None:
    """It names parameters, buffers and tied weights; the optimizer's state is not among them."""
    module = normalised()
    layout, model = layout_of(module), FlatModel(module)
    settings = OptimizerSettings("adam", 0.1)
    trainer = Trainer(model.vector, model.parameter_count, settings, "mean", layout)
    trainer.add(1, np.ones_like(model.vector), 1)
    trainer.apply(1)
    weights, kind = weights_in(trainer.snapshot())
    found = kind.layout
    assert found == layout
    assert save_weights(found, weights, {}) == save_weights(layout_of(module), weights, {})
    saved = {name for name in module.state_dict() if "num_batches" not in name}
    assert set(named_weights(found, weights)) == saved


def test_snapshot_without_a_layout_is_rejected() -> None:
    trainer = Trainer(np.ones(3, np.float32), 2, OptimizerSettings("sgd", 0.1))
    head = {"optimizer": "sgd", "parameters": 2, "buffers": 1}
    old = pack({"weights": np.ones(3, np.float32)}, {"trainer": msgspec.json.encode(head).decode()})
    for read in (weights_in, trainer.restore, lambda data: with_optimizer(data, "adam")):
        with pytest.raises(CorruptError, match="missing required field `layout`"):
            read(old)


@pytest.mark.parametrize("layout", [unnamed(3, 0), unnamed(2, 2), (), unnamed(2, 1)[:1]])
def test_snapshot_with_a_layout_of_other_weights_is_rejected(layout: Layout) -> None:
    trainer = Trainer(np.ones(3, np.float32), 2, OptimizerSettings("sgd", 0.1))
    head = {"optimizer": "sgd", "parameters": 2, "buffers": 1, "layout": layout}
    forged = pack(
        {"weights": np.ones(3, np.float32)}, {"trainer": msgspec.json.encode(head).decode()}
    )
    with pytest.raises(CorruptError, match=r"the layout has \d numbers, expected \d"):
        trainer.restore(forged)


PIECE = TensorSlice(("0.weight",), (2, 3))


@pytest.mark.parametrize(
    ("stored", "own", "said"),
    [
        (PIECE, PIECE, ""),
        (PIECE, TensorSlice(("2.weight",), (2, 3)), "the parameter '2.weight' (2, 3) float32"),
        (PIECE, TensorSlice(("0.weight",), (3, 2)), "the parameter '0.weight' (3, 2) float32"),
        (PIECE, TensorSlice(("0.weight",), (2, 3), "float16"), "'0.weight' (2, 3) float16"),
        (PIECE, TensorSlice(("0.weight",), (2, 3), is_buffer=True), "the buffer '0.weight' (2, 3)"),
        (
            PIECE,
            TensorSlice(("0.weight", "tied"), (2, 3)),
            "the parameter '0.weight'/'tied' (2, 3)",
        ),
        (PIECE, None, "at place 2 it has the parameter '0.weight' (2, 3) float32, but the task's"),
        (None, PIECE, "at place 2 it has no tensor, but the task's model has the parameter '0.we"),
    ],
)
def test_difference_names_the_first_mismatch_of_two_layouts(
    stored: TensorSlice | None, own: TensorSlice | None, said: str
) -> None:
    first = TensorSlice(("bias",), (2,))
    layouts = [(first, *([each] if each else [])) for each in (stored, own)]
    found = difference(layouts[0], layouts[1])
    assert said in found
    assert (found == "") == (said == "")
    assert (digest_of(layouts[0]) == digest_of(layouts[1])) == (said == "")


@pytest.mark.parametrize(
    ("tensors", "head"),
    [({}, "{}"), ({"weights": np.ones(3)}, "{}"), ({"weights": np.ones(3, np.float32)}, "[")],
)
def test_invalid_snapshot_is_corrupt(tensors: Columns, head: str) -> None:
    with pytest.raises(CorruptError, match="snapshot"):
        weights_in(pack(tensors, {"trainer": head}))


def test_packed_tensors_and_metadata_round_trip_writable() -> None:
    tensors: Columns = {"a": np.arange(6).reshape(2, 3), "b": np.array(2.5)}
    found, metadata = unpack(pack(tensors, {"version": "3"}))
    assert metadata == {"version": "3"}
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert all(value.flags.writeable for value in found.values())


@given(data=st.binary(max_size=100))
def test_arbitrary_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        unpack(data)
