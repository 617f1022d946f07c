"""Data sets as records and as streams: each record once a pass, ordered and warped by the seed."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.digits import load_digits
from common.data.records import batches, count
from common.data.warp import Strength, warp


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 3), st.integers(0, 9))
def test_each_pass_yields_every_record_once(n: int, size: int, passes: int, seed: int) -> None:
    rows = np.arange(n)
    stream = batches({"row": rows}, size, np.random.default_rng(seed), passes=passes)
    given_rows = np.concatenate([batch["row"] for batch in stream]).reshape(passes, n)
    assert all(sorted(one_pass) == rows.tolist() for one_pass in given_rows)


def test_unshuffled_batches_keep_the_order_of_the_data_set() -> None:
    stream = batches({"row": np.arange(5)}, 2, np.random.default_rng(0), passes=1, shuffled=False)
    assert [batch["row"].tolist() for batch in stream] == [[0, 1], [2, 3], [4]]


def test_endless_batches_are_reproducible_by_seed() -> None:
    digits = load_digits().train
    first, again = (
        list(islice(batches(digits, 100, np.random.default_rng(5), warped=True), 40))
        for _ in range(2)
    )
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
        np.testing.assert_array_equal(one["label"], other["label"])


def test_digits_are_split_the_same_way_in_every_run() -> None:
    split = load_digits()
    assert (count(split.train), count(split.held_out)) == (1438, 359)
    assert split.train["image"].shape == (1438, 1, 8, 8)
    assert split.train["image"].dtype == np.uint8
    assert split.train["image"].max() == 255
    assert split.held_out["label"][:8].tolist() == [6, 6, 6, 2, 5, 6, 6, 2]
    assert set(split.held_out["label"].tolist()) == set(range(10))


@given(st.integers(1, 4), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9))
def test_warp_of_zero_strength_leaves_images_unchanged(
    n: int, channels: int, height: int, width: int
) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, channels, height, width), np.uint8)
    np.testing.assert_array_equal(warp(images, rng, Strength(0, 0, 0, 0, 0)), images)


def test_warp_differs_per_image_and_is_the_same_for_all_channels() -> None:
    digit = load_digits().train["image"][:1]
    images = np.repeat(np.repeat(digit, 50, axis=0), 3, axis=1)
    warped = warp(images, np.random.default_rng(0))
    assert len({image.tobytes() for image in warped}) == 50
    np.testing.assert_array_equal(warped[:, 0], warped[:, 2])


def test_warp_does_not_modify_its_input() -> None:
    images = load_digits().train["image"][:10]
    before = images.copy()
    warp(images, np.random.default_rng(0))
    np.testing.assert_array_equal(images, before)


def test_warp_by_a_plain_shift_is_exact() -> None:
    # With these bounds, a warp is only a shift. Among many images there are shifts of both signs.
    images = np.zeros((200, 1, 5, 5), np.uint8)
    images[:, :, 2, 2] = 200
    warped = warp(images, np.random.default_rng(1), Strength(0, 0, 0, 0.5, 0))
    # Bilinear weights of a point that stays inside sum to one, up to rounding of four pixels.
    assert warped.sum(axis=(1, 2, 3), dtype=np.int64) == pytest.approx(np.full(200, 200), abs=2)
