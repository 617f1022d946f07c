"""Messages to bytes and back: the one door through which bytes of another process come in.

Kafka carries JSON, which any Kafka tool shows; Redis carries msgpack; a gradient's vector travels
behind its header as raw little-endian float32. Both directions check that a message makes sense: a
nonsense record in the audit trail would be there for ever.

What is decided stays in Kafka for programs yet to be written. Fields that older programs may ignore
are simply added; a record that they must not ignore, or would misread, carries a later `"format"`.
"""

from __future__ import annotations

import reprlib
import struct
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np

from common.core.messages import (
    AuditRecord,
    BatchReady,
    ControlRecord,
    Gradient,
    Lead,
    ModelId,
    Opened,
    Quarantined,
    Replayed,
    Reply,
    Requeued,
    SpanExpired,
    Standing,
    UpdateApplied,
    UpdateTrigger,
    Vector,
)
from common.core.spread import JobDemand, WorkerPlacement
from common.errors import FutureFormatError, WireError
from common.wire_checks import (
    check_audit,
    check_control,
    check_demand,
    check_model,
    check_placement,
    check_reply,
    check_standing,
    check_trigger,
)

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_Encoder: TypeAlias = msgspec.json.Encoder | msgspec.msgpack.Encoder
_Decoder: TypeAlias = msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]

_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what msgspec raises

# --- how it is written ---------------------------------------------------------------------------


class _Tagged(msgspec.Struct):
    """What all messages of a union have in common, whatever else a later format puts in them."""

    type: str
    format: int = 1


FORMAT = 3  # of the records in Kafka: the latest that this program knows


def format_of(message: object) -> int:
    """The oldest format of which a program must be to read a record in Kafka.

    Format 2 names bad records together by reason, and updates leave them to the claims; it takes
    batches out of quarantine, or makes it final. Format 3 numbers epochs, and the updates and
    quarantines of each leader; it says of spans what the log was when they were read, and opens
    partitions.
    """
    match message:
        case Lead(epoch=epoch) if epoch >= 0:
            return 3
        case BatchReady() | SpanExpired() | Opened():
            return 3
        case UpdateApplied() | Quarantined() | Requeued() | Replayed():
            return 3
        case _:
            return 1


class Codec(Generic[T]):
    """One kind of message: its decoder knows the types, its check what they cannot say."""

    def __init__(
        self,
        kind: str,
        decoder: _Decoder[T],
        check: Callable[[T], None],
        tags: tuple[str, ...] = (),
    ) -> None:
        self._json = json = isinstance(decoder, msgspec.json.Decoder)
        self._kind = kind
        self._check = check
        self._tags = tags
        self._encoder: _Encoder = msgspec.json.Encoder() if json else msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._tagged: _Decoder[_Tagged] = (
            msgspec.json.Decoder(_Tagged) if json else msgspec.msgpack.Decoder(_Tagged)
        )

    def encode(self, message: T) -> bytes:
        """Write a message.

        Raises:
            WireError: If it makes no sense, so that no reader could accept it.
        """
        self._examine(message)
        try:
            data = self._encoder.encode(message)
        except UnicodeEncodeError as error:
            raise WireError(f"{self._kind}: a text is not Unicode: {error}") from error
        if self._json and (needed := format_of(message)) > 1:
            return data[:-1] + b',"format":%d}' % needed
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """Read a message.

        Raises:
            WireError: If the bytes are not such a message, or it makes no sense.
            FutureFormatError: If a newer program wrote it.
        """
        if self._json and b'"format"' in bytes(data):
            self._check_format(data)
        try:
            message = self._decoder.decode(data)
        except _MALFORMED as error:
            raise WireError(f"{self._kind}: {self._unknown_tag(data) or error}") from error
        self._examine(message)
        return message

    def _examine(self, message: T) -> None:
        try:
            self._check(message)
        except WireError as error:
            raise WireError(f"{self._kind}: {type(message).__name__}.{error}") from error

    def _check_format(self, data: bytes | memoryview) -> None:
        try:
            found = self._tagged.decode(data)
        except _MALFORMED:
            return  # it will not be read as a message either
        if found.format > FORMAT:
            raise FutureFormatError(
                f"{self._kind}: {reprlib.repr(found.type)} of format {found.format},"
                f" expected at most {FORMAT}"
            )

    def _unknown_tag(self, data: bytes | memoryview) -> str:
        try:
            tag = self._tagged.decode(data).type
        except _MALFORMED:
            return ""
        if not self._tags or tag in self._tags:
            return ""
        known = ", ".join(self._tags)
        return f"type is {reprlib.repr(tag)}, expected {known}"


_CONTROL = Codec(
    "claim", msgspec.json.Decoder(ControlRecord), check_control, ("batch", "expired", "opened")
)
_AUDIT = Codec(
    "audit",
    msgspec.json.Decoder(AuditRecord),
    check_audit,
    ("lead", "update", "quarantined", "requeued", "replayed", "evaluated", "drifted"),
)
_STANDING = Codec("standing", msgspec.msgpack.Decoder(Standing), check_standing)
_TRIGGER = Codec("trigger", msgspec.msgpack.Decoder(UpdateTrigger), check_trigger)
_REPLY = Codec(
    "reply", msgspec.msgpack.Decoder(Reply), check_reply, ("gradient", "failed", "farewell")
)
_DEMAND = Codec("job demand", msgspec.msgpack.Decoder(JobDemand), check_demand)
_PLACEMENT = Codec("worker placement", msgspec.msgpack.Decoder(WorkerPlacement), check_placement)

encode_claim, decode_claim = _CONTROL.encode, _CONTROL.decode  # and openings
encode_audit, decode_audit = _AUDIT.encode, _AUDIT.decode
encode_standing, decode_standing = _STANDING.encode, _STANDING.decode
encode_trigger, decode_trigger = _TRIGGER.encode, _TRIGGER.decode
encode_demand, decode_demand = _DEMAND.encode, _DEMAND.decode
encode_placement, decode_placement = _PLACEMENT.encode, _PLACEMENT.decode


class _Addressed(msgspec.Struct, frozen=True, array_like=True):
    """The header of a reply: one list takes those of all jobs that a replica leads."""

    job: str
    reply: msgspec.Raw


_ADDRESSED = msgspec.msgpack.Decoder(_Addressed)


def encode_reply(job: str, reply: Reply) -> bytes:
    """Write a reply to a job's leader; a gradient's vector is copied once.

    Raises:
        WireError: If it makes no sense, or its vector is not one of float32.
    """
    if not isinstance(reply, Gradient):
        return frame(_addressed(job, reply), b"")
    vector = reply.vector
    if not (isinstance(vector, np.ndarray) and vector.dtype == np.float32 and vector.ndim == 1):
        found = f"{getattr(vector, 'dtype', type(vector))} of shape {getattr(vector, 'shape', '?')}"
        raise WireError(f"reply: Gradient.vector is {found}, expected float32 of one dimension")
    header = _addressed(job, msgspec.structs.replace(reply, vector=None))
    return frame(header, np.ascontiguousarray(vector, dtype="<f4").data)


def _addressed(job: str, reply: Reply) -> bytes:
    return msgspec.msgpack.encode(_Addressed(job, msgspec.Raw(_REPLY.encode(reply))))


def decode_reply(data: bytes | memoryview) -> tuple[str, Reply]:
    """Read a job's name and the reply; a gradient's vector is a read-only, aligned view of `data`.

    Raises:
        WireError: If the bytes are none, or make no sense.
    """
    header, body = unframe(data)
    try:
        addressed = _ADDRESSED.decode(header)
    except _MALFORMED as error:
        raise WireError(f"reply: {error}") from error
    reply: Reply = _REPLY.decode(addressed.reply)
    if not isinstance(reply, Gradient):
        if body:
            kind = type(reply).__name__
            raise WireError(f"reply: {kind} is followed by {len(body)} bytes, expected none")
        return addressed.job, reply
    if len(body) % 4 or not body:
        raise WireError(f"reply: Gradient.vector is {len(body)} bytes, expected 4 for each number")
    vector: Vector = np.frombuffer(body, dtype="<f4")
    return addressed.job, msgspec.structs.replace(reply, vector=vector)


# --- a model that is offered: its name, of a fixed length, and its weights ------------------------

_OFFER_NAME = struct.Struct("<qq")
OFFER_NAME_BYTES = _OFFER_NAME.size  # whoever knows the name need not fetch the rest


def encode_offer(model: ModelId, weights: bytes | memoryview) -> bytes:
    """Write a model's name and then its weights."""
    return _OFFER_NAME.pack(*model) + memoryview(weights).cast("B")


def decode_offer(data: bytes) -> tuple[ModelId, bytes]:
    """Read a model's name and its weights.

    Raises:
        WireError: If it is none.
    """
    if len(data) <= OFFER_NAME_BYTES:
        raise WireError(f"offer: {len(data)} bytes, expected a name and weights")
    model = ModelId(*_OFFER_NAME.unpack_from(data))
    check_model("offer: model", model)
    return model, data[OFFER_NAME_BYTES:]


# --- a header in front of large raw bytes --------------------------------------------------------

_LENGTH = struct.Struct("<I")  # of the header
_ALIGNMENT = (
    16  # of the body inside the frame: numpy is slow on unaligned floats, torch refuses them
)


def frame(header: bytes, body: bytes | memoryview) -> bytes:
    """Put a header in front of a body: length, header, zeros up to the alignment, body."""
    padding = bytes(-(_LENGTH.size + len(header)) % _ALIGNMENT)
    return b"".join((_LENGTH.pack(len(header)), header, padding, body))


def unframe(data: bytes | memoryview) -> tuple[memoryview, memoryview]:
    """Take a frame apart into read-only views of its header and its body.

    Raises:
        WireError: If the data end before the body begins.
    """
    view = memoryview(data).toreadonly()
    if len(view) < _LENGTH.size:
        raise WireError(f"frame: {len(view)} bytes, expected at least {_LENGTH.size}")
    header_end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    body_start = header_end + -header_end % _ALIGNMENT
    if len(view) < body_start:
        raise WireError(f"frame: ends after {len(view)} bytes, its body begins at {body_start}")
    return view[_LENGTH.size : header_end], view[body_start:]
