"""Weights leave by name, as plain PyTorch knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from common.errors import CorruptError
from common.learning.checkpoint import named_weights, pack, save_weights, unpack
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model
from tests.unit.learning.examples import image_task, normalised

if TYPE_CHECKING:
    from common.learning.fields import Columns


def test_plain_pytorch_loads_what_was_saved() -> None:
    trained = FlatModel(normalised())
    trained.vector[:] = np.random.default_rng(0).uniform(0.1, 1, size=len(trained.vector))
    data = save_weights(normalised(), trained.vector)
    plain = normalised()
    plain.load_state_dict(safetensors.torch.load(data))
    inputs = torch.randn(4, 3)
    assert torch.equal(plain.eval()(inputs), trained.module.eval()(inputs))


def test_weights_have_the_names_of_the_state_dict() -> None:
    module = build_model(image_task(), seed=0)
    named = named_weights(module, FlatModel(module).vector)
    assert {name: value.shape for name, value in named.items()} == {
        name: tuple(value.shape) for name, value in module.state_dict().items()
    }


def test_tied_weights_are_saved_under_each_of_their_names() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    named = named_weights(module, np.arange(9, dtype=np.float32))
    assert sorted(named) == ["0.weight", "1.weight"]
    assert np.array_equal(named["0.weight"], named["1.weight"])
    module.load_state_dict(safetensors.torch.load(save_weights(module, np.ones(9, np.float32))))


def test_a_vector_of_another_model_is_refused_with_both_lengths() -> None:
    with pytest.raises(CorruptError, match=r"of 4 .* 3 numbers"):
        named_weights(nn.Linear(2, 1), np.zeros(4, np.float32))


def test_packed_tensors_and_metadata_come_back_writable() -> None:
    tensors: Columns = {"a": np.arange(6).reshape(2, 3), "b": np.array(2.5)}
    found, metadata = unpack(pack(tensors, {"version": "3"}))
    assert metadata == {"version": "3"}
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert all(value.flags.writeable for value in found.values())


@given(data=st.binary(max_size=100))
def test_other_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        unpack(data)
