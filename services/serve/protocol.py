"""The Open Inference Protocol, version 2, as JSON (github.com/open-inference).

Tensors in are a job's fields by name; or `record`, whose texts are records as in its streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from common.errors import UserError
from common.learning.fields import Columns, Field, concatenate
from common.learning.registered import RegisteredCodec

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.learning.codecs import Codec
    from common.topics.schemas import JobSchemas

RECORD = "record"
OUTPUT = "output"
_DATATYPES = {
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16)},
    **{f"int{bits}": f"INT{bits}" for bits in (32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (32, 64)},
    "bool": "BOOL",
}


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    data: list[Any]  # row by row, flat or nested


class Request(msgspec.Struct):
    """What somebody asks; which outputs, and parameters, are not looked at."""

    inputs: Annotated[list[_Tensor], Meta(min_length=1)]
    id: str = ""


class Output(msgspec.Struct):
    """A tensor of an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[float]  # row by row, flat


class Response(msgspec.Struct, omit_defaults=True):
    """An answer, and by which version."""

    model_name: str
    model_version: str
    outputs: list[Output]
    parameters: dict[str, Any]
    id: str = ""


class Described(msgspec.Struct):
    """A tensor, in the metadata of a model."""

    name: str
    datatype: str
    shape: tuple[int, ...]  # -1: any number


class Metadata(msgspec.Struct):
    """What a model is."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Described]
    outputs: list[Described]


_REQUEST = msgspec.json.Decoder(Request)


class Inputs:
    """The columns that a model reads.

    Args:
        fields: Those that it reads.
        codec: Of its records.
        schemas: Of the job, for records of which a registry knows them.
        is_text: Whether records are texts, so that a request may hold them.
    """

    def __init__(
        self, fields: Sequence[Field], codec: Codec, schemas: JobSchemas, *, is_text: bool
    ) -> None:
        self._fields = {field.name: field for field in fields}
        self._codec = codec
        self._schemas = schemas
        self._is_text = is_text

    def described(self) -> list[Described]:
        """For the metadata."""
        found = [
            Described(field.name, _DATATYPES[field.dtype], (-1, *field.shape))
            for field in self._fields.values()
        ]
        return [*found, Described(RECORD, "BYTES", (-1,))] if self._is_text else found

    def read(self, body: bytes | bytearray) -> tuple[Columns, str]:
        """The columns of a request, one row for each record, and its id.

        Raises:
            UserError: If it is not one that this model can answer.
        """
        try:
            request = _REQUEST.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"not an inference request: {error}") from error
        given = {tensor.name: tensor for tensor in request.inputs}
        if self._is_text and RECORD in given:
            return self._decoded(given[RECORD]), request.id
        columns = {name: _column(field, given.get(name)) for name, field in self._fields.items()}
        if len({len(column) for column in columns.values()}) != 1:
            counts = ", ".join(f"{name}: {len(column)}" for name, column in columns.items())
            raise UserError(f"inputs have different numbers of records: {counts}")
        if not len(next(iter(columns.values()))):
            raise UserError("inputs: there are no records")
        return columns, request.id

    def decode(self, values: Sequence[bytes | None]) -> tuple[Columns, dict[int, str]]:
        """The columns of records, and which of them did not decode, and why.

        Raises:
            UnavailableError: If a schema is not known, and its registry is unavailable.
        """
        if isinstance(self._codec, RegisteredCodec):
            self._schemas.teach(self._codec, values)
        decoded = self._codec.decode(values)
        columns = {name: decoded.records[name] for name in self._fields}
        return concatenate([columns]), dict(decoded.skipped)

    def _decoded(self, tensor: _Tensor) -> Columns:
        values = [
            each.encode() if isinstance(each, str) else msgspec.json.encode(each)
            for each in tensor.data
        ]
        if not values or tensor.shape not in ((len(values),), (len(values), 1)):
            raise UserError(f"input {RECORD!r}: {len(values)} records in shape {tensor.shape}")
        columns, wrong = self.decode(values)
        for index, reason in wrong.items():
            raise UserError(f"record {index}: {reason}")
        return columns


def _column(field: Field, tensor: _Tensor | None) -> npt.NDArray[Any]:
    """(n, *shape) of one field.

    Raises:
        UserError: If it is missing, or another than the field.
    """
    if tensor is None:
        raise UserError(f"input {field.name!r} is missing")
    datatype, shape = _DATATYPES[field.dtype], tensor.shape
    if tensor.datatype != datatype:
        raise UserError(f"input {field.name!r}: datatype {tensor.datatype}, expected {datatype}")
    if not shape or shape[1:] != field.shape:
        raise UserError(f"input {field.name!r}: shape {shape}, expected (n, {field.shape})")
    try:
        # As what it is first: to another type it would be rounded, or cut off, in silence.
        found = np.array(tensor.data)
        kind = found.dtype.kind
        if kind not in {"b": "b", "f": "fiu"}.get(field.numpy_dtype.kind, "iu"):
            raise UserError(f"input {field.name!r}: its data are not {datatype}")
        if kind in "iu" and field.numpy_dtype.kind in "iu":
            limits = np.iinfo(field.numpy_dtype)
            if found.min() < limits.min or found.max() > limits.max:
                raise UserError(f"input {field.name!r}: a number is not {datatype}")
        return found.astype(field.numpy_dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise UserError(f"input {field.name!r}: {error}") from error
