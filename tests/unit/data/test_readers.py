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


def test_idx_images_come_with_their_labels(tmp_path: Path) -> None:
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
def test_idx_that_is_not_whole_is_refused(
    tmp_path: Path, images: bytes, labels: bytes, found: str
) -> None:
    with pytest.raises(UserError) as caught:
        read_records(write_idx(tmp_path, images, labels))
    assert found in str(caught.value)


def test_cifar10_is_a_label_and_three_planes(tmp_path: Path) -> None:
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
def test_cifar10_that_is_none_is_refused(tmp_path: Path, data: bytes, found: str) -> None:
    path = tmp_path / "some.bin"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_records(path)
    assert found in str(caught.value)


def test_documents_are_words_and_how_often_each_comes(tmp_path: Path) -> None:
    path = tmp_path / "some.dat.gz"
    path.write_bytes(gzip.compress(b"2 7:1 3:4\n1 9:2\n0\n"))
    records = read_records(path)
    assert records["index"].tolist() == [[7, 3], [9, 0], [0, 0]]
    assert records["value"].tolist() == [[1, 4], [2, 0], [0, 0]]
    assert [column.dtype.name for column in records.values()] == ["int32", "float32"]


@pytest.mark.parametrize(
    "line", [b"2 7:1", b"1 7", b"1 7:x", b"1 7:-1", b"x", b"1 7:1:1", b"1 99999999999:1"]
)
def test_what_is_no_document_is_refused_by_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "some.dat"
    path.write_bytes(b"1 1:1\n" + line)
    with pytest.raises(UserError, match="line 2 is not `words number:count"):
        read_records(path)


def test_a_numpy_archive_is_its_arrays(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez(path, a=np.arange(3), b=np.ones((3, 2)))
    assert {name: array.shape for name, array in read_records(path).items()} == {
        "a": (3,),
        "b": (3, 2),
    }


def test_an_archive_of_objects_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez(path, a=np.array([{}], dtype=object))
    with pytest.raises(UserError, match="is not a numpy archive of plain arrays"):
        read_records(path)


@pytest.mark.parametrize("name", ["gone.csv", "gone.npz", "gone-images-idx3-ubyte.gz"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"there is no such file"):
        read_records(tmp_path / name)


def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"a,b\n")
    (tmp_path / "a.csv.xz").write_bytes(b"a,b\n")
    for name in ("a.csv.gz", "a.csv.xz"):
        with pytest.raises(UserError, match="cannot be read"):
            read_records(tmp_path / name)


def test_name_without_a_reader_gets_the_names_that_are_offered(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="built-in set `digits`"):
        read_records(tmp_path / "some.parquet")
