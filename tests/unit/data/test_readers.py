"""Readers return what was written, and describe what else they found."""

from __future__ import annotations

import gzip
import lzma
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.data.readers import read_records
from common.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def idx(array: npt.NDArray[Any]) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, images: bytes, labels: bytes) -> Path:
    (folder / "t-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    path = folder / "t-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(images))
    return path


def test_idx_reader_returns_images_and_labels(tmp_path: Path) -> None:
    records = read_records(write_idx(tmp_path, idx(IMAGES), idx(np.array([7, 9]))))
    np.testing.assert_array_equal(records["image"], IMAGES[:, np.newaxis])
    assert records["label"].tolist() == [7, 9]
    assert records["image"].dtype == np.uint8
    assert records["label"].dtype == np.int64


@pytest.mark.parametrize(
    ("images", "labels", "found"),
    [
        (b"\x01\x02\x03\x04", idx(np.array([1])), "is not IDX of unsigned bytes"),
        (bytes((0, 0, 8, 3, 0)), idx(np.array([1])), "ends inside its header of 16 bytes"),
        (idx(IMAGES)[:-1], idx(np.array([1])), "does not fit the 23 bytes there"),
        (idx(IMAGES), idx(np.array([1])), "all fields must have the same length"),
        (idx(IMAGES), idx(IMAGES), "labels (n,), found (2, 3, 4) and (2, 3, 4)"),
    ],
)
def test_incomplete_or_invalid_idx_file_is_rejected(
    tmp_path: Path, images: bytes, labels: bytes, found: str
) -> None:
    with pytest.raises(UserError) as caught:
        read_records(write_idx(tmp_path, images, labels))
    assert found in str(caught.value)


def test_cifar10_reader_returns_labels_and_images(tmp_path: Path) -> None:
    planes = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), np.uint8)
    path = tmp_path / "some.bin.xz"
    path.write_bytes(lzma.compress(b"".join(bytes([n]) + planes[n].tobytes() for n in (0, 1))))
    records = read_records(path)
    np.testing.assert_array_equal(records["image"], planes)
    assert records["label"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("data", "found"),
    [(b"123", "3 bytes are not records of 3073 bytes"), (b"\xff" * 3073, "found 255")],
)
def test_invalid_cifar10_file_is_rejected(tmp_path: Path, data: bytes, found: str) -> None:
    path = tmp_path / "some.bin"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_records(path)
    assert found in str(caught.value)


def test_document_reader_returns_word_indices_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "some.dat.gz"
    path.write_bytes(gzip.compress(b"2 7:1 3:4\n1 9:2\n0\n"))
    records = read_records(path)
    assert records["index"].tolist() == [[7, 3], [9, 0], [0, 0]]
    assert records["value"].tolist() == [[1, 4], [2, 0], [0, 0]]
    assert [column.dtype.name for column in records.values()] == ["int32", "float32"]


@pytest.mark.parametrize(
    "line", [b"2 7:1", b"1 7", b"1 7:x", b"1 7:-1", b"x", b"1 7:1:1", b"1 99999999999:1"]
)
def test_invalid_document_is_rejected_with_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "some.dat"
    path.write_bytes(b"1 1:1\n" + line)
    with pytest.raises(UserError, match="line 2 is not `words number:count"):
        read_records(path)


def test_numpy_archive_reader_returns_its_arrays(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez(path, a=np.arange(3), b=np.ones((3, 2)))
    assert {name: array.shape for name, array in read_records(path).items()} == {
        "a": (3,),
        "b": (3, 2),
    }


def test_numpy_archive_of_objects_is_rejected_without_unpickling(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez(path, a=np.array([{}], dtype=object))
    with pytest.raises(UserError, match="is not a numpy archive of plain arrays"):
        read_records(path)


@pytest.mark.parametrize("name", ["gone.csv", "gone.npz", "gone-images-idx3-ubyte.gz"])
def test_missing_file_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"there is no such file"):
        read_records(tmp_path / name)


def test_file_with_a_wrong_compression_suffix_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"a,b\n")
    (tmp_path / "a.csv.xz").write_bytes(b"a,b\n")
    for name in ("a.csv.gz", "a.csv.xz"):
        with pytest.raises(UserError, match="cannot be read"):
            read_records(tmp_path / name)


def test_unknown_file_type_is_rejected_with_the_supported_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="built-in set `digits`"):
        read_records(tmp_path / "some.parquet")
