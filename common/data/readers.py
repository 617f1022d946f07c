"""Read data sets from files. The file name decides the format and the compression.

| name ends in                      | format          | fields                                    |
| --------------------------------- | --------------- | ----------------------------------------- |
| `images-idx3-ubyte`               | IDX             | image uint8 (n, 1, h, w), label int64     |
| `.bin`                            | CIFAR-10 binary | image uint8 (n, 3, 32, 32), label int64   |
| `.csv`                            | CSV             | features float32 (n, f), label int64, or  |
|                                   |                 | rows as JSON objects: see `tables`        |
| `.dat`                            | LDA-C documents | index int32 (n, m), value float32 (n, m)  |
| `.npz`                            | numpy archive   | the arrays in it                          |

`.gz` or `.xz` may follow all of them except `.npz`.
"""

from __future__ import annotations

import gzip
import lzma
import math
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

import numpy as np

from common.data.records import Records, checked
from common.data.tables import row_records, table_records
from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt


# The only element type of image sets.
_IDX_UBYTE = 0x08
_CIFAR10_SHAPE = (3, 32, 32)
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def read_records(
    path: Path,
    *,
    label: str | None = None,
    leave_out: Sequence[str] = (),
    rows: bool = False,
    texts: Sequence[str] = (),
) -> Records:
    """Read a data set, in the order of the file.

    Args:
        path: The file. The IDX file of labels has the same name and folder as that of the images,
            with `labels-idx1` for `images-idx3`.
        label: CSV only: name or index of the label's column, counted from 0, or from -1 at the end.
            The default is the last column.
        leave_out: CSV only: names or indexes of columns that are not read.
        rows: CSV only: True to read each row as one JSON object.
        texts: With `rows`: patterns of columns whose cells are always texts.

    Raises:
        UserError: If the file does not exist, or does not have the format that its name says.
    """
    kind = _kind(path)
    if kind != ".csv" and (label is not None or leave_out or rows):
        raise UserError(f"{path}: columns can only be chosen in CSV files")
    if rows and label is not None:
        raise UserError(
            f"{path}: --label cannot be used with --rows, which sends rows unchanged; remove"
            " --label"
        )
    if kind == ".npz":
        return _read_npz(path)
    data = read_bytes(path)
    if rows:
        return row_records(data, str(path), leave_out, texts)
    if kind == ".csv":
        return table_records(data, str(path), label=label, leave_out=leave_out)
    if kind in (".dat", ".bin"):
        return (_document_records if kind == ".dat" else _cifar10_records)(data, str(path))
    labels_path = path.with_name(path.name.replace(_IMAGES, _LABELS))
    images = _idx_array(data, str(path))
    return _idx_records(images, _idx_array(read_bytes(labels_path), str(labels_path)), str(path))


def read_bytes(path: Path) -> bytes:
    """Read a whole file, and decompress it if its name ends in .gz or .xz.

    Raises:
        UserError: If it cannot be read or decompressed.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            return gzip.decompress(data)
        return lzma.decompress(data) if path.suffix == ".xz" else data
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _kind(path: Path) -> str:
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    if name.endswith(_IMAGES):
        return _IMAGES
    for kind in (".csv", ".bin", ".dat", ".npz"):
        if name.endswith(kind):
            return kind
    raise UserError(
        f"{path}: unknown file type; use .csv, .npz, CIFAR-10 .bin, LDA-C .dat, *{_IMAGES} beside"
        f" *{_LABELS} (also with .gz or .xz), or the built-in set `digits`"
    )


def _read_npz(path: Path) -> Records:
    try:
        with np.load(path, allow_pickle=False) as archive:
            records = {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: is not a numpy archive of plain arrays: {error}") from error
    return checked(records, str(path))


def _idx_array(data: bytes, source: str) -> npt.NDArray[np.uint8]:
    """Parse an IDX file of unsigned bytes: magic number, size of each dimension, elements.

    Raises:
        UserError: If it has another format, or another length than its header says.
    """
    if len(data) < 4 or data[:3] != bytes((0, 0, _IDX_UBYTE)):
        raise UserError(f"{source}: is not IDX of unsigned bytes; begins with {data[:4].hex()!r}")
    dimensions = data[3]
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise UserError(f"{source}: ends inside its header of {start} bytes")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if math.prod(shape) != len(data) - start:
        raise UserError(f"{source}: shape {shape} does not fit the {len(data) - start} bytes there")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _idx_records(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], source: str
) -> Records:
    """Combine images (n, h, w) and labels (n,).

    Raises:
        UserError: If the arrays have other dimensions.
    """
    if images.ndim != 3 or labels.ndim != 1:
        raise UserError(
            f"{source}: images must be (n, h, w) and labels (n,),"
            f" found {images.shape} and {labels.shape}"
        )
    return checked({"image": images[:, np.newaxis], "label": labels.astype(np.int64)}, source)


def _cifar10_records(data: bytes, source: str) -> Records:
    """Parse the binary form of CIFAR-10: a label byte, then red, green and blue planes.

    Raises:
        UserError: If the length is not a multiple of a record's size, or a label is above 9.
    """
    record_bytes = 1 + math.prod(_CIFAR10_SHAPE)
    if len(data) % record_bytes:
        raise UserError(f"{source}: {len(data)} bytes are not records of {record_bytes} bytes")
    rows = np.frombuffer(data, np.uint8).reshape(-1, record_bytes)
    labels = rows[:, 0].astype(np.int64)
    if len(labels) and labels.max() > 9:
        raise UserError(f"{source}: labels must be 0 to 9, found {labels.max()}")
    return checked({"image": rows[:, 1:].reshape(-1, *_CIFAR10_SHAPE), "label": labels}, source)


def _document_records(data: bytes, source: str) -> Records:
    """Parse documents in the format of lda-c: the count of distinct words, then number:count pairs.

    Shorter documents are padded to the longest one with word 0, count 0.

    Raises:
        UserError: If a line has another format. The message has its number.
    """
    documents = []
    for number, line in enumerate(data.splitlines(), start=1):
        length, *pairs = line.split() or [b"0"]
        try:
            words = np.array([pair.split(b":") for pair in pairs], np.int32).reshape(-1, 2)
            whole = int(length) == len(words) and (words >= 0).all()
        except (ValueError, OverflowError):
            whole = False
        if not whole:
            raise UserError(f"{source}: line {number} is not `words number:count number:count ...`")
        documents.append(words)
    longest = max(map(len, documents), default=0)
    padded = np.zeros((len(documents), longest, 2), np.int32)
    for row, words in zip(padded, documents, strict=True):
        row[: len(words)] = words
    records = {"index": padded[:, :, 0].copy(), "value": padded[:, :, 1].astype(np.float32)}
    return checked(records, source)
