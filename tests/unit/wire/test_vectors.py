"""Sparse vectors are decoded bit by bit and never longer than dense ones; bad ones are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.core.messages import Gradient, ModelId, Vector, WorkerId
from common.core.vectors import SparseVector, add_to, numbers_in, squared_norm
from common.errors import WireError
from common.wire.messages import decode_reply, encode_reply
from common.wire.vectors import decode_sparse, encode_sparse, encoded_bytes, smallest

ODD = np.array([0x80000000, 0x7FC01234, 0xFF800000, 0x00000001], np.uint32)  # -0.0, NaN, -inf, tiny


@st.composite
def vectors(draw: st.DrawFn) -> Vector:
    """Draw blocks of some width, some of them zero, and sometimes with a zero inside a block."""
    width, every = draw(st.integers(1, 9)), draw(st.integers(1, 200))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.9, 1.0]))
    values = random.normal(size=(every, width)).astype(np.float32)
    values[random.random((every, width)) < draw(st.sampled_from([0.0, 0.05]))] = 0
    # The product leaves -0.0 for negative numbers.
    values *= random.random((every, 1)) < share
    flat = values.ravel()
    if draw(st.booleans()):
        odd = random.integers(0, len(flat), len(ODD))
        flat.view(np.uint32)[odd] = ODD
    return flat


def dense(vector: SparseVector) -> Vector:
    whole = np.zeros(vector.size, np.float32)
    whole.reshape(-1, vector.values.shape[1])[vector.blocks] = vector.values
    return whole


def embedded(rows: int, width: int, touched: int, seed: int = 0) -> Vector:
    """Return the gradient of an embedding with lookups of `touched` rows."""
    random = np.random.default_rng(seed)
    table = np.zeros((rows, width), np.float32)
    table[random.choice(rows, touched, replace=False)] = random.normal(size=(touched, width))
    return table.ravel()


def every_hundredth(size: int) -> Vector:
    vector = np.zeros(size, np.float32)
    vector[99::100] = 1
    return vector


def far_apart() -> Vector:
    vector = np.zeros(200_000, np.float32)
    vector[[0, 70_001]] = 1
    return vector


@given(vectors())
@example(np.zeros(5, np.float32))
def test_vector_is_decoded_bit_by_bit_and_never_longer_than_dense(vector: Vector) -> None:
    found = smallest(vector)
    if not isinstance(found, SparseVector):
        assert found is vector
        return
    data = encode_sparse(found)
    assert len(data) < vector.nbytes
    back = decode_sparse(memoryview(data))
    assert back.shape == vector.shape
    assert dense(back).tobytes() == vector.tobytes()
    assert not back.values.flags.writeable


@given(vectors(), st.integers(1, 3))
def test_sparse_input_is_sent_like_its_dense_vector(vector: Vector, width: int) -> None:
    vector = vector[: len(vector) // width * width]
    rows = vector.reshape(-1, width)
    there = np.flatnonzero(rows.view(np.uint32).any(axis=1) | (np.arange(len(rows)) % 5 == 0))
    found = smallest(SparseVector(len(vector), there, rows[there]))
    wanted = smallest(vector)
    assert type(found) is type(wanted)
    if isinstance(found, SparseVector) and isinstance(wanted, SparseVector):
        assert encode_sparse(found) == encode_sparse(wanted)
    else:
        assert numbers_in(found).tobytes() == vector.tobytes()


@given(st.lists(vectors(), min_size=1, max_size=4))
def test_sum_of_sparse_vectors_has_the_bits_of_the_dense_sum(several: list[Vector]) -> None:
    size = min(map(len, several))
    wanted, found = np.zeros(size, np.float32), np.zeros(size, np.float32)
    with np.errstate(invalid="ignore"):
        for vector in several:
            wanted += vector[:size]
            add_to(found, smallest(vector[:size]))
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("vector", "length"),
    [
        # (head 20) + bytes for the gap before each block + 4 for each of its numbers
        (embedded(100_000, 1, 1000), 20 + 1000 * (2 + 4)),
        (embedded(50_000, 20, 120), 20 + 120 * (2 + 80)),
        (every_hundredth(100_000), 20 + 1000 * (1 + 4)),
        (far_apart(), 20 + 2 * (4 + 4)),
        # One bit per block, because more than one block in 8 is there.
        (embedded(1_120, 20, 200), 20 + 1_120 // 8 + 200 * 80),
        (embedded(3_200, 1, 1600), 20 + 3_200 // 8 + 1600 * 4),
        (np.zeros(10**6, np.float32), 20),
    ],
)
def test_shortest_of_numbers_rows_and_bitmap_is_used(vector: Vector, length: int) -> None:
    found = smallest(vector)
    assert isinstance(found, SparseVector)
    assert len(encode_sparse(found)) == length


def test_nearly_dense_vector_is_sent_dense() -> None:
    vector = embedded(100, 1, 97)
    assert smallest(vector) is vector


def replied(vector: Vector | SparseVector) -> bytes:
    return encode_reply(
        "j", Gradient(WorkerId("w"), ModelId(3, 0), (7,), 9, 1.0, {}, 0.1, vector=vector)
    )


@given(vectors())
def test_gradient_may_carry_sparse_or_dense_vector(vector: Vector) -> None:
    for sent in (vector, smallest(vector)):
        job, back = decode_reply(replied(sent))
        assert job == "j"
        assert isinstance(back, Gradient)
        assert type(back.vector) is type(sent)
        found = dense(back.vector) if isinstance(back.vector, SparseVector) else back.vector
        assert found.tobytes() == vector.tobytes()


def test_encoding_of_a_dense_gradient_is_stable() -> None:
    header = (
        b"\x92\xa1j\x89\xa4type\xa8gradient\xa6worker\xa1w\xa5model\x92\x03\x00\xa7batches\x91\x07"
        b"\xa7samples\x09\xa8loss_sum\xcb?\xf0\0\0\0\0\0\0\xabmetric_sums\x80\xa7seconds"
        b"\xcb?\xb9\x99\x99\x99\x99\x99\x9a\xa6vector\xc0"
    )
    padding = bytes(-(4 + len(header)) % 16)
    wanted = struct.pack("<I", len(header)) + header + padding + struct.pack("<3f", 0, 1, 0)
    assert replied(np.array([0, 1, 0], np.float32)) == wanted


def head(size: int, width: int, count: int, gap_bytes: int = 4) -> bytes:
    return struct.pack("<QIII", size, width, count, gap_bytes)


def gaps(*between: int) -> bytes:
    return struct.pack(f"<{len(between)}I", *between)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"short", "5 bytes, expected at least 20"),
        (head(0, 1, 0), "0 blocks of 1 in a vector of 0"),
        (head(64, 0, 1), "blocks of 0"),
        (head(65, 2, 0), "in a vector of 65"),
        (head(2**33, 1, 0), "in a vector of 8589934592"),
        (head(64, 32, 3) + bytes(12 + 3 * 128), "3 blocks of 32 in a vector of 64"),
        (head(64, 1, 1, 3) + gaps(3) + bytes(4), "gaps of 3 bytes"),
        (head(64, 1, 1) + gaps(3), "24 bytes for 1 blocks of 1, expected 28"),
        (head(64, 1, 1) + gaps(3) + bytes(8), "32 bytes for 1 blocks of 1, expected 28"),
        (head(64, 1, 1) + gaps(64) + bytes(4), "blocks are not 1 below 64"),
        (head(64, 1, 2) + gaps(63, 0) + bytes(8), "blocks are not 2 below 64"),
        (head(64, 1, 2) + gaps(5, 2**32 - 1) + bytes(8), "blocks are not 2 below 64"),
        (head(64, 1, 3, 0) + gaps(3, 0) + bytes(12), "blocks are not 3 below 64"),
        (head(33, 1, 3, 0) + gaps(3, 4) + bytes(12), "blocks are not 3 below 33"),
    ],
)
def test_invalid_sparse_vector_is_refused(data: bytes, expected: str) -> None:
    with pytest.raises(WireError, match=expected):
        decode_sparse(memoryview(data))


@given(vectors(), st.data())
def test_damaged_sparse_vector_is_refused_or_decoded_as_another(
    vector: Vector, data: st.DataObject
) -> None:
    whole = bytearray(replied(smallest(vector)))
    whole[data.draw(st.integers(0, len(whole) - 1), label="byte")] ^= 1 << data.draw(
        st.integers(0, 7), label="bit"
    )
    try:
        _, back = decode_reply(bytes(whole[: data.draw(st.integers(0, len(whole)), label="cut")]))
    except WireError:
        return
    if isinstance(back, Gradient) and isinstance(back.vector, SparseVector):
        count, width = back.vector.values.shape
        assert len(back.vector.blocks) == count
        assert (back.vector.blocks < back.vector.size // width).all()


@given(vectors(), st.integers(0, 1800))
def test_squared_norm_is_the_same_for_sparse_and_dense(vector: Vector, count: int) -> None:
    whole = np.nan_to_num(vector, posinf=1.0, neginf=-1.0)
    expected = float((whole[:count].astype(np.float64) ** 2).sum())
    assert squared_norm(smallest(whole), count) == pytest.approx(expected)


def test_squared_norm_of_largest_numbers_is_finite() -> None:
    assert squared_norm(np.full(3, 3e38, np.float32), 3) == pytest.approx(2.7e77)


@given(vectors())
def test_encoded_bytes_matches_the_encoded_length(vector: Vector) -> None:
    found = smallest(vector)
    length = len(encode_sparse(found)) if isinstance(found, SparseVector) else found.nbytes
    assert encoded_bytes(found) == length
