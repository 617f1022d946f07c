"""Data sets that `doll produce` can send: loading, fields, and streams of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from common.data.codecs import make_codec
from common.data.digits import load_digits
from common.data.fields import DTYPE_NAMES, DtypeName, Field
from common.data.readers import read_records
from common.data.records import Records, batches
from common.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_WRITTEN = ("tensor", "json")
# Number of records encoded at once, which takes a few milliseconds, including warps.
_ENCODED_AT_ONCE = 256


def load(
    source: str,
    *,
    label: str | None = None,
    leave_out: Sequence[str] = (),
    rows: bool = False,
    texts: Sequence[str] = (),
    held_out: bool = False,
) -> Records:
    """Load `digits` or a file.

    Args:
        source: `digits`, or the path of a file.
        label: Optional. Label's column of a CSV file. If unset, the last one.
        leave_out: Columns of a CSV file that are not features.
        rows: True to send the rows of a CSV file unchanged.
        texts: Patterns of columns whose cells are texts, for `rows`.
        held_out: True for the test set of the digits.

    Raises:
        UserError: If the source does not exist, or its content does not match its name.
    """
    if source == "digits":
        if label is not None or leave_out or rows:
            raise UserError("digits: has no columns; remove --label, --leave-out and --rows")
        split = load_digits()
        return split.held_out if held_out else split.train
    if held_out:
        raise UserError(
            "--held-out: only `digits` has a test set; give the file of the test records"
        )
    return read_records(
        Path(source),
        label=label,
        leave_out=leave_out,
        rows=rows,
        texts=texts,
    )


def is_parquet(source: str) -> bool:
    """Return True for a Parquet file, or for a place that may hold some."""
    return source.startswith("s3://") or source.endswith(".parquet") or Path(source).is_dir()


def fields_of(data: Records) -> tuple[Field, ...]:
    """Return the fields of the records, in the order of the data set.

    Raises:
        UserError: If an array has a type that records cannot have.
    """
    for name, array in data.items():
        if array.dtype.name not in DTYPE_NAMES:
            known = ", ".join(DTYPE_NAMES)
            raise UserError(f"field {name!r}: must be one of {known}, got {array.dtype}")
    return tuple(
        Field(name, cast("DtypeName", array.dtype.name), array.shape[1:])
        for name, array in data.items()
    )


def describe(codec: str, fields: Sequence[Field]) -> str:
    """Return the line of a job file that describes these records."""
    described = ", ".join(
        f"{field.name}: {{dtype: {field.dtype}"
        + (f", shape: {list(field.shape)}}}" if field.shape else "}")
        for field in fields
    )
    return f"records: {{codec: {codec}, fields: {{{described}}}}}"


def stream(
    data: Records,
    codec: str,
    rng: np.random.Generator,
    *,
    repeat: bool = False,
    in_order: bool = False,
    warp: bool = False,
) -> Iterator[bytes]:
    """Return the records as bytes, once or forever.

    Raises:
        UserError: If the codec or a field is invalid, or there are no images to warp.
    """
    image = data.get("image")
    if warp and (image is None or image.ndim != 4 or image.dtype.name != "uint8"):
        raise UserError(
            f"--warp: needs a field `image` of uint8 (channels, height, width), got {[*data]}"
        )
    # Only the owner of a schema writes records with it.
    if codec not in _WRITTEN:
        raise UserError(f"--codec: must be {' or '.join(_WRITTEN)}, got {codec!r}")
    encode = _as_they_are if "row" in data else make_codec(codec, fields_of(data)).encode
    several = batches(
        data,
        _ENCODED_AT_ONCE,
        rng,
        passes=None if repeat else 1,
        shuffled=not in_order,
        warped=warp,
    )
    return (value for batch in several for value in encode(batch))


def _as_they_are(records: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
    values: list[bytes] = records["row"].tolist()
    return values
