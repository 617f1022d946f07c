"""Open Inference Protocol, version 2, as JSON (github.com/open-inference).

Input tensors are a job's fields by name, or `record`, whose texts are records as in the streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from common.data.fields import Columns, Field, concatenate
from common.data.registered import RegisteredCodec
from common.errors import UserError, decoded

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.data.codecs import Codec
    from common.kafka.schemas import JobSchemas

RECORD = "record"
_DATATYPES = {
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16)},
    **{f"int{bits}": f"INT{bits}" for bits in (32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (32, 64)},
    "bool": "BOOL",
}


# Maximum number of records per request. The network computes them in one pass, so this limits its
# outputs and memory.
MOST_RECORDS = 10_000
# Decoders of flat data, by dtype. They are in C, bound the size, and check the type of each number.
_DATA: dict[str, msgspec.json.Decoder[list[Any]]] = {
    "uint8": msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, le=2**8 - 1)]]),
    "int8": msgspec.json.Decoder(list[Annotated[int, Meta(ge=-(2**7), le=2**7 - 1)]]),
    "int16": msgspec.json.Decoder(list[Annotated[int, Meta(ge=-(2**15), le=2**15 - 1)]]),
    "int32": msgspec.json.Decoder(list[Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]]),
    "int64": msgspec.json.Decoder(list[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]]),
    "float32": msgspec.json.Decoder(list[float]),
    "float64": msgspec.json.Decoder(list[float]),
    "bool": msgspec.json.Decoder(list[bool]),
}
_RECORDS = msgspec.json.Decoder(list[str])
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=64)]
    # Row-major, flat or nested.
    data: msgspec.Raw


class Request(msgspec.Struct):
    """Inference request; the requested outputs and parameters are ignored."""

    inputs: Annotated[list[_Tensor], Meta(min_length=1)]
    id: Annotated[str, Meta(max_length=1000)] = ""


class Output(msgspec.Struct):
    """Output tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    # Row-major, flat.
    data: list[float]


class Response(msgspec.Struct, omit_defaults=True):
    """Answer, with the version that made it."""

    model_name: str
    model_version: str
    outputs: list[Output]
    parameters: dict[str, Any]
    id: str = ""


class Described(msgspec.Struct):
    """Tensor in a model's metadata."""

    name: str
    datatype: str
    # -1 is any number.
    shape: tuple[int, ...]


class Metadata(msgspec.Struct):
    """Metadata of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Described]
    outputs: list[Described]


_REQUEST = msgspec.json.Decoder(Request)


class Inputs:
    """Converter from requests and records to the columns that a model reads.

    Args:
        fields: Fields that the model reads.
        codec: Codec of the job's records.
        schemas: Schemas of the job, for records with a schema registry.
        is_text: True if records are texts, so that requests can contain them.
    """

    def __init__(
        self, fields: Sequence[Field], codec: Codec, schemas: JobSchemas, *, is_text: bool
    ) -> None:
        self._fields = {field.name: field for field in fields}
        self._codec = codec
        self._schemas = schemas
        self._is_text = is_text

    def described(self) -> list[Described]:
        """Return the input tensors for the metadata."""
        found = [
            Described(field.name, _DATATYPES[field.dtype], (-1, *field.shape))
            for field in self._fields.values()
        ]
        return [*found, Described(RECORD, "BYTES", (-1,))] if self._is_text else found

    def read(self, body: bytes | bytearray) -> tuple[Columns, str]:
        """Return the columns of a request, one row per record, and its id.

        Raises:
            UserError: If this model cannot answer the request.
        """
        request = decoded(_REQUEST.decode, body, "not an inference request", UserError)
        given = {tensor.name: tensor for tensor in request.inputs}
        if self._is_text and RECORD in given:
            return self._decoded(given[RECORD]), request.id
        columns = {name: _column(field, given.get(name)) for name, field in self._fields.items()}
        if len({len(column) for column in columns.values()}) != 1:
            counts = ", ".join(f"{name}: {len(column)}" for name, column in columns.items())
            raise UserError(f"inputs have different numbers of records: {counts}")
        return columns, request.id

    def decode(self, values: Sequence[bytes | None]) -> tuple[Columns, dict[int, str]]:
        """Return the columns of decoded records, and the reason for each one that did not decode.

        Raises:
            UnavailableError: If a schema is unknown and its registry is unavailable.
        """
        if isinstance(self._codec, RegisteredCodec):
            self._schemas.teach(self._codec, values)
        decoded = self._codec.decode(values)
        columns = {name: decoded.records[name] for name in self._fields}
        return concatenate([columns]), dict(decoded.skipped)

    def _decoded(self, tensor: _Tensor) -> Columns:
        _check_records(RECORD, tensor.shape)
        data = bytes(tensor.data)
        # Each text has two unescaped quotes. The decoder builds all texts before it checks their
        # number.
        count = data.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"') // 2
        if tensor.shape not in ((count,), (count, 1)):
            raise UserError(f"input {RECORD!r}: must have {tensor.shape} texts, got {count:,}")
        texts = decoded(_RECORDS.decode, data, f"input {RECORD!r}", UserError)
        columns, wrong = self.decode([text.encode() for text in texts])
        for index, reason in wrong.items():
            raise UserError(f"record {index}: {reason}")
        return columns


def _check_records(name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor without records or with too many.

    Raises:
        UserError: If the number of records is out of range.
    """
    if not shape or not 1 <= shape[0] <= MOST_RECORDS:
        raise UserError(
            f"input {name!r}: must have 1 to {MOST_RECORDS:,} records, got shape {shape}; send"
            " several requests"
        )


def _column(field: Field, tensor: _Tensor | None) -> npt.NDArray[Any]:
    """Return the values of one field, (n, *shape).

    Raises:
        UserError: If the tensor is missing or does not match the field.
    """
    if tensor is None:
        raise UserError(f"input {field.name!r} is missing")
    datatype, shape = _DATATYPES[field.dtype], tensor.shape
    if tensor.datatype != datatype:
        raise UserError(f"input {field.name!r}: datatype {tensor.datatype}, expected {datatype}")
    if shape[1:] != field.shape:
        raise UserError(f"input {field.name!r}: shape {shape}, expected (n, {field.shape})")
    _check_records(field.name, shape)
    what = f"input {field.name!r}: its data are not {datatype}"
    decode = _DATA[field.dtype].decode
    numbers = decoded(lambda data: decode(_flat(data, shape)), tensor.data, what, UserError)
    with np.errstate(over="ignore"):
        found = np.array(numbers, field.numpy_dtype).reshape(shape)
    if not np.isfinite(found).all():
        raise UserError(f"input {field.name!r}: a number is not {datatype}")
    return found


def _flat(data: msgspec.Raw, shape: tuple[int, ...]) -> bytes:
    """Return a tensor's data without inner lists, so that one bounded decoder reads any nesting.

    Raises:
        ValueError: If size or nesting of the data does not match the shape.
    """
    structure, commas = bytes(data).translate(None, _NO_STRUCTURE), prod(shape) - 1
    if structure.count(b",") != commas:
        raise ValueError(f"{structure.count(b',') + 1:,} elements in shape {shape}")
    if structure.count(b"[") == 1:
        return bytes(data)
    expected = b"," * (shape[-1] - 1)
    for size in reversed(shape[:-1]):
        expected = b",".join([b"[%b]" % expected] * size)
    if structure != b"[%b]" % expected:
        raise ValueError(f"must be one list, or nested as shape {shape}")
    return b"[%b]" % bytes(data).translate(None, b"[]")
