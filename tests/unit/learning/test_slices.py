"""Slices make the same steps as the whole vector, bit for bit, and have matching digests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.learning.checkpoint import joined
from common.learning.optimizers import STATE_NAMES, OptimizerSettings, Step
from common.learning.slices import BLOCK, Slice, cut, digest, lengths, part_of
from common.learning.trainer import Trainer
from tests.ulps import assert_within_ulps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.core.messages import Vector
    from common.learning.optimizers import OptimizerName, Reduction

RATE = 0.01
SAMPLES = 7


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Yield a function that sets torch's threads, among which torch splits each step."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def drawn(size: int, seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@given(size=st.integers(0, 20 * BLOCK), count=st.integers(1, 9))
def test_slices_cover_everything_once_and_differ_by_a_block(size: int, count: int) -> None:
    slices = cut(size, count)

    assert [n for place in slices for n in range(place.start, place.stop)] == list(range(size))
    assert all(place.start % BLOCK == 0 or place.start == size for place in slices)
    sizes = [place.stop - place.start for place in slices]
    assert max(sizes) - min(sizes) < 2 * BLOCK


def test_lengths_of_ranks_follow_their_order() -> None:
    slices = cut(3 * BLOCK + 5, 3)

    assert lengths(slices, [1, 1, 3], 4) == [0, 2 * BLOCK, 0, BLOCK + 5]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", STATE_NAMES)
@pytest.mark.parametrize(("count", "of_torch"), [(3, 1), (3, 2), (70, 1)])
def test_step_over_slices_equals_the_whole_step_bit_for_bit(
    threads: Callable[[int], None],
    name: OptimizerName,
    count: int,
    of_torch: int,
    reduction: Reduction,
) -> None:
    threads(of_torch)
    # Parameters end and buffers begin inside one slice; some of the 70 slices hold only buffers.
    parameters, buffers = 60 * BLOCK + 37, 5 * BLOCK + 3
    settings = OptimizerSettings(name, RATE)
    weights = drawn(parameters + buffers, 0)
    whole = Trainer(weights, parameters, settings, reduction)
    slices = [Slice(place, [parameters], settings, reduction) for place in cut(len(weights), count)]
    current = torch.from_numpy(weights)

    for update in range(3):
        total = drawn(len(weights), update + 1)
        whole.add(update, total, SAMPLES)
        whole.apply(update, RATE / (update + 1))
        following = torch.empty_like(current)
        for each in slices:
            place = each.place
            # A failed attempt changes nothing.
            for _ in range(2):
                rate = RATE / (update + 1)
                each.prepare(
                    *(current[place], torch.tensor(total[place]), SAMPLES, Step(rate)),
                    *(following[place], 0.0),
                )
            each.commit()
        current = following
        assert torch.equal(current, whole.vector)


@pytest.mark.parametrize("name", STATE_NAMES)
def test_slice_resumes_from_its_part_of_the_state(name: OptimizerName) -> None:
    settings, size = OptimizerSettings(name, RATE), 5 * BLOCK + 3
    weights, total = torch.tensor(drawn(size, 0)), torch.tensor(drawn(size, 1))
    one = Slice(slice(0, size), [size], settings)
    following = torch.empty_like(weights)
    one.prepare(weights, total.clone(), SAMPLES, Step(RATE), following, 0.0)
    one.commit()
    slices = [Slice(place, [size], settings) for place in cut(size, 2)]
    for each in slices:
        each.restore(part_of(one.state, each.place))
    assert {key: value.tobytes() for key, value in one.state.items()} == {
        key: value.tobytes() for key, value in joined([each.state for each in slices]).items()
    }

    weights = following
    after, expected = torch.empty_like(weights), torch.empty_like(weights)
    one.prepare(weights, total.clone(), SAMPLES, Step(RATE), expected, 0.0)
    for each in slices:
        place = each.place
        each.prepare(weights[place], total[place].clone(), SAMPLES, Step(RATE), after[place], 0.0)

    assert torch.equal(after, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("share", [0.1, 10.0])  # limit / norm
def test_gradient_of_slices_is_clipped_by_the_norm_of_all(
    reduction: Reduction, share: float
) -> None:
    # The positions behind the parameters are buffers.
    size, parameters = 3 * BLOCK, 3 * BLOCK - 20
    weights, total = drawn(size, 0), drawn(size, 1)
    scale = SAMPLES if reduction == "mean" else 1
    norm = float(np.linalg.norm(total[:parameters].astype(np.float64))) / scale
    settings = OptimizerSettings("sgd", RATE, clip_norm=share * norm)
    whole = Trainer(weights, parameters, settings, reduction)
    whole.add(0, total, SAMPLES)
    whole.apply(0)
    slices = [Slice(place, [parameters], settings, reduction) for place in cut(size, 2)]
    parts = [torch.tensor(total[each.place]) for each in slices]

    square = sum(each.square(part) for each, part in zip(slices, parts, strict=True))
    found = square**0.5 / scale
    following = torch.empty(size)
    for each, part in zip(slices, parts, strict=True):
        before = torch.from_numpy(weights[each.place])
        each.prepare(before, part, SAMPLES, Step(RATE), following[each.place], found)

    # Slices add up the norm's squares in another order. So the factor, the clipped gradient, the
    # step and the weight may each round differently.
    assert_within_ulps(found, norm, 1)
    expected = np.frombuffer(whole.weights(), np.float32)
    assert_within_ulps(
        following.numpy(), expected, 4, scale=np.maximum(abs(weights), abs(expected))
    )
    if share > 1:
        assert torch.equal(following, whole.vector)


@given(size=st.integers(0, 5 * BLOCK), count=st.integers(1, 4), seed=st.integers(0, 9))
def test_digests_of_slices_add_up_to_the_whole_digest(size: int, count: int, seed: int) -> None:
    vector = torch.tensor(drawn(size, seed))

    parts = [digest(vector[place], place.start) for place in cut(size, count)]

    assert sum(parts) % 2**64 == digest(vector)


@given(size=st.integers(0, 5 * BLOCK), blocks=st.integers(0, 2**40), seed=st.integers(0, 9))
def test_digest_is_the_sum_of_block_sums_times_odd_weights(
    size: int, blocks: int, seed: int
) -> None:
    vector = drawn(size, seed)
    words = np.pad(vector, (0, -size % BLOCK)).view(np.uint64).reshape(-1, BLOCK // 2)
    sums = [sum(block) for block in words.tolist()]
    weights = [(2 * (blocks + n) + 1) * 0x9E3779B97F4A7C15 for n in range(len(sums))]

    found = digest(torch.from_numpy(vector), blocks * BLOCK)

    assert found == sum(a * b for a, b in zip(sums, weights, strict=True)) % 2**64


@given(data=st.data())
def test_digest_reveals_a_torn_copy(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4 * BLOCK))
    before, after = torch.tensor(drawn(size, 1)), torch.tensor(drawn(size, 2))
    torn = after.clone()
    torn[data.draw(st.integers(0, size - 1)) :] = before[-1:]

    assert digest(after) == digest(after.clone())
    assert digest(torn) != digest(after)
    swapped = torch.cat([after[BLOCK : 2 * BLOCK], after[:BLOCK], after[2 * BLOCK :]])
    assert (digest(swapped) == digest(after)) == (size <= BLOCK)
    after[0] = -after[0]
    assert digest(torn) != digest(after)
