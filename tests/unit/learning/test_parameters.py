"""A flat model equals the original one, and its vectors share its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from common.core.vectors import SparseVector, dense
from common.errors import CorruptError, UserError
from common.learning.parameters import GIVEN_AWAY, FlatModel, is_finite
from tests.unit.learning.examples import normalised

if TYPE_CHECKING:
    from common.core.messages import Vector


def test_flat_vector_has_parameters_first_and_then_float_buffers() -> None:
    module = normalised()
    parameters = [parameter.detach().clone().ravel() for parameter in module.parameters()]
    floats = [b.clone().ravel() for b in module.buffers() if b.is_floating_point()]
    flat = FlatModel(module)
    assert flat.parameter_count == sum(len(parameter) for parameter in parameters)
    assert flat.buffer_count == 3 + 5 + 5
    assert np.array_equal(flat.vector, torch.cat([*parameters, *floats]).numpy())


def test_flat_vector_shares_memory_with_the_module() -> None:
    module = normalised()
    flat = FlatModel(module)
    flat.vector[:] = np.arange(len(flat.vector))
    assert module[1].bias.tolist() == [15, 16, 17, 18, 19]  # type: ignore[index] # a Sequential
    with torch.no_grad():
        next(module.parameters()).fill_(-1)
    assert (flat.vector[:15] == -1).all()
    assert np.shares_memory(np.frombuffer(flat.weights(), np.float32), flat.vector)


def test_backward_pass_adds_to_the_flat_gradient() -> None:
    module = nn.Linear(2, 1)
    flat = FlatModel(module)
    for _ in range(2):
        module(torch.tensor([[3.0, 5.0]])).sum().backward()
    assert flat.gradient.tolist() == [6, 10, 2]


class RowLookup(nn.Module):
    """Row lookups between ordinary weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.rows = nn.Embedding(50, 3, sparse=True)
        self.unshared = nn.Embedding(40, 1, sparse=True)
        self.bias = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return (n, 3) outputs."""
        found: torch.Tensor = self.rows(numbers) * self.scale + self.unshared(numbers) + self.bias
        return found


def test_sparse_gradient_equals_torch_and_omits_zero_rows() -> None:
    """Rows that one round has touched are zero again in the next."""
    module, plain = RowLookup(), RowLookup()
    model = FlatModel(module)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        batches = [torch.randint(0, 40, (30,), generator=generator) ** 2 // 40 for _ in range(2)]
        factors = torch.randn(30, 3, generator=generator)
        model.clear_gradient()
        for parameter, own in zip(plain.parameters(), module.parameters(), strict=True):
            parameter.data, parameter.grad = own.data, torch.zeros_like(parameter)
        for batch in batches:
            (module(batch) * factors).sum().backward()
            (plain(batch) * factors).sum().backward()
        model.gradient[-2:] += seed  # movement of the buffers
        found = model.read_gradient()
        assert isinstance(found, SparseVector)
        assert len(found.blocks) == 1 + 4 * len(np.unique(torch.cat(batches))) + 3 + 2
        assert (np.diff(found.blocks) > 0).all()
        wanted = [p.grad.ravel() for p in plain.parameters() if p.grad is not None]
        whole = torch.cat([*wanted, torch.full((2,), float(seed))])
        assert dense(found).tobytes() == whole.numpy().tobytes()


def test_gradient_is_dense_if_the_whole_table_is_used_too() -> None:
    module = nn.Embedding(3, 2, sparse=True)
    model = FlatModel(module)
    (module(torch.tensor([1])).sum() + module.weight.sum()).backward()
    found = model.read_gradient()
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [1, 1, 2, 2, 1, 1]
    model.clear_gradient()
    assert not model.gradient.any()


def test_load_accepts_any_kind_of_bytes() -> None:
    flat = FlatModel(nn.Linear(2, 1))
    wanted = np.array([1, 2, 3], np.float32)
    # Not aligned, as in the middle of a message.
    shifted = memoryview(b"x" + wanted.tobytes())[1:]
    for weights in (wanted, wanted.tobytes(), shifted):
        flat.vector[:] = 0
        flat.load(weights)
        assert flat.vector.tolist() == [1, 2, 3]


def test_write_overwrites_only_the_given_weights() -> None:
    model = FlatModel(nn.Linear(3, 2))
    before = model.vector.copy()
    model.write(SparseVector(8, np.array([0, 3]), np.array([[1, 2], [3, 4]], np.float32)))
    assert model.vector.tolist() == [1, 2, *before[2:6].tolist(), 3, 4]
    with pytest.raises(CorruptError, match="of 9 numbers do not fit one of 8"):
        model.write(SparseVector(9, np.array([0]), np.array([[1]], np.float32)))


@pytest.mark.parametrize("size", [0, 8, 11, 16])
def test_load_of_another_length_is_rejected_with_both_lengths(size: int) -> None:
    flat = FlatModel(nn.Linear(2, 1))
    before = flat.vector.copy()
    with pytest.raises(CorruptError, match=f"{size} bytes .* 12 bytes"):
        flat.load(bytes(size))
    assert np.array_equal(flat.vector, before)


def test_tied_weights_are_stored_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    flat = FlatModel(module)
    assert flat.parameter_count == 9
    module(torch.ones(1, 3)).sum().backward()
    assert module[1].weight.grad is module[0].weight.grad
    assert flat.gradient.abs().sum() > 0


def test_a_frozen_parameter_is_not_in_the_vector() -> None:
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)  # noqa: FBT003 -- torch's own signature
    flat = FlatModel(module)
    module(torch.ones(1, 2)).sum().backward()
    assert flat.gradient.tolist() == [1, 1]
    assert flat.base.tensors.keys() == {"bias"}


def test_module_of_another_precision_is_rejected_with_its_parameter() -> None:
    with pytest.raises(UserError, match=r"'0.weight' is torch.float64"):
        FlatModel(nn.Sequential(nn.Linear(2, 2, dtype=torch.float64)))


def test_module_without_parameters_is_rejected() -> None:
    with pytest.raises(UserError, match="no parameters"):
        FlatModel(nn.ReLU())


def test_integer_buffer_that_affects_the_model_is_rejected() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("seen", torch.tensor(0))
    with pytest.raises(UserError, match="'seen'"):
        FlatModel(module)
    with pytest.raises(UserError, match="num_batches_tracked"):
        FlatModel(nn.BatchNorm1d(2, momentum=None))


def test_non_persistent_buffer_is_ignored() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("order", torch.arange(5), persistent=False)
    assert FlatModel(module).buffer_count == 0


def test_replaced_buffer_is_detected() -> None:
    module = nn.BatchNorm1d(2)
    flat = FlatModel(module)
    module(torch.randn(4, 2))
    flat.check_module()
    module.running_mean = torch.zeros(2)
    with pytest.raises(UserError, match="'running_mean'"):
        flat.check_module()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flat_vector_of_a_gpu_model_is_a_copy_on_the_host() -> None:
    flat = FlatModel(nn.Linear(2, 1).cuda())
    flat.load(np.array([1, 2, 3], np.float32))
    assert flat.state.tolist() == flat.vector.tolist() == [1, 2, 3]


def test_large_gradient_is_handed_over_and_its_memory_reused_on_return() -> None:
    module = nn.Linear(GIVEN_AWAY // 2, 2)
    module.register_buffer("mean", torch.zeros(3))
    flat = FlatModel(module)

    def gradient(of: float) -> Vector:
        flat.clear_gradient()
        module(torch.full((1, GIVEN_AWAY // 2), of)).sum().backward()
        flat.gradient[flat.parameter_count :] += of
        return dense(flat.read_gradient())

    def expected(of: float) -> Vector:
        parts = np.full(GIVEN_AWAY, of), np.ones(2), np.full(3, of)
        return np.concatenate(parts).astype(np.float32)

    first, second = gradient(3.0), gradient(5.0)
    assert np.array_equal(first, expected(3.0))
    assert np.array_equal(second, expected(5.0))
    flat.give_back(first)
    third = gradient(7.0)
    assert np.shares_memory(third, first)
    assert not np.shares_memory(third, second)
    assert np.array_equal(third, expected(7.0))
    assert np.array_equal(second, expected(5.0))
    fourth = gradient(9.0)  # no memory was released
    assert not np.shares_memory(fourth, third)
    assert np.array_equal(fourth, expected(9.0))


def test_give_back_of_a_foreign_vector_is_ignored() -> None:
    flat = FlatModel(nn.Linear(GIVEN_AWAY, 1))
    flat.give_back(np.ones(GIVEN_AWAY, np.float32))
    flat.clear_gradient()
    assert len(flat.gradient) == GIVEN_AWAY + 1
    assert not flat.gradient.any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 70_000, 99_999])
def test_is_finite_finds_a_single_non_finite_number(wrong: float, place: int) -> None:
    vector = np.ones(100_000, np.float32)
    assert is_finite(vector)
    vector[place] = wrong
    assert not is_finite(vector)


def test_is_finite_is_true_for_finite_numbers_whose_sum_overflows() -> None:
    assert is_finite(np.full(1000, 3e38, np.float32))
    assert is_finite(np.empty(0, np.float32))
    assert not is_finite(np.array([np.inf, -np.inf], np.float32))
