"""Messages to bytes and back: the only place where bytes of another process are decoded.

Kafka carries JSON, which any Kafka tool can show. Redis carries msgpack. A gradient's vector
follows its header as raw little-endian float32, or sparse (`common.wire.vectors`). Every message is
validated when it is read. A message for Kafka is also validated when it is written, because it
stays there.

Programs of later versions will read the records in Kafka, and may add fields that this version can
ignore. A record that this version must not ignore, or would misread, has a `"format"` above 1 and
is rejected.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Generic, NoReturn, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import UNSET

from common.core.job_placement import JobDemand, WorkerPlacement
from common.core.messages import (
    AuditRecord,
    Batch,
    BatchReady,
    Broken,
    CheckpointStored,
    ControlRecord,
    Drifted,
    Evaluated,
    Failed,
    Gradient,
    GradientReady,
    GroupOrders,
    Lead,
    LeaderStatus,
    ModelId,
    Opened,
    Quarantined,
    Reduced,
    Replayed,
    Reply,
    Requeued,
    SchemaFound,
    Slices,
    SpanExpired,
    StateReport,
    Stored,
    Unsettled,
    UpdateApplied,
    UpdateTrigger,
    Vector,
    WorkerLeaving,
)
from common.core.scores import BINS
from common.core.spans import Address, Partition, address_of
from common.core.vectors import SparseVector
from common.errors import FutureFormatError, WireError, decoded
from common.wire.vectors import decode_sparse, encode_sparse


def need(holds: bool, field: str, found: object, expected: str) -> None:  # noqa: FBT001 -- a condition
    """Reject a message that violates a condition."""
    if not holds:
        raise WireError(f"{field} is {reprlib.repr(found)}, expected {expected}")


# --- constraints that field types cannot express -----------------------------------------------


def _check_model(field: str, model: ModelId) -> None:
    """Reject an impossible model id."""
    need(model.epoch >= 0 or model.version == 0, field, model, "version 0 where nobody led yet")


def _check_address(address: Address) -> int:
    """Reject an invalid address. Return the number of its offsets."""
    offsets, before = 0, ("", -1)
    for topic, partition, start, end, _, _, known, _ in address:
        place = topic, partition
        if start >= end or known > end or place <= before:
            _refuse_address(address)
        offsets += end - start
        before = place
    return offsets


def _refuse_address(address: Address) -> NoReturn:
    """Raise an error that describes what is wrong with an address."""
    for span in address:
        need(span.known <= span.end, "address.known", span, "at most its end")
    try:
        address_of(address)
    except ValueError as error:
        raise WireError(f"address is {reprlib.repr(address)}: {error}") from error
    raise WireError(
        f"address is {reprlib.repr(address)}, expected spans sorted by topic and partition"
    )


def _check_batch(batch: BatchReady | Batch) -> None:
    room = _check_address(batch.address) - (_check_skipped(batch) if batch.skipped else 0)
    need(batch.samples <= room, "samples", batch.samples, "at most what its spans hold")


def _check_skipped(batch: BatchReady | Batch) -> int:
    """Validate the bad records of a batch. Return their number."""
    spans = {span.place: span for span in batch.address}
    seen = set[tuple[Partition, int]]()
    records = 0
    for skipped in batch.skipped:
        place = Partition(skipped.topic, skipped.partition)
        span = spans.get(place)
        last = skipped.offset + sum(skipped.gaps)
        inside = span is not None and span.start <= skipped.offset <= last < span.end
        need(inside, "skipped", skipped, "offsets inside the batch's own spans")
        records += skipped.records
        seen.update((place, offset) for offset in skipped.offsets)
        need(len(seen) == records, "skipped", skipped, "each offset once")
    return records


def _check_offsets(offsets: Sequence[int]) -> None:
    need(len(set(offsets)) == len(offsets), "batches", offsets, "each batch once")


def _check_batches(batches: tuple[Batch, ...]) -> None:
    _check_offsets([batch.offset for batch in batches])
    for batch in batches:
        _check_batch(batch)


def _check_measured(field: str, measured: Mapping[str, int], most: int) -> None:
    for name, samples in measured.items():
        need(samples <= most, f"{field}[{name!r}]", samples, f"at most {most} samples")


def _check_slices(field: str, slices: Slices) -> None:
    ascending = all(one < other for one, other in pairwise(slices or ()))
    need(ascending, field, slices, "numbers from 0, ascending")


def _check_control(record: ControlRecord) -> None:
    match record:
        case BatchReady():
            _check_batch(record)
        case SpanExpired():
            _check_address(record.address)
        case Opened():
            need(record.generation > 0, "generation", record.generation, "at least 1")


def _check_audit(record: AuditRecord) -> None:
    match record:
        case Lead():
            _check_model("base", record.base)
            need(
                record.epoch > record.after,
                "epoch",
                record.epoch,
                f"above {record.after}, the one before",
            )
        case UpdateApplied():
            _check_update(record)
        case Quarantined() | Requeued() | Replayed():
            _check_batch(record.batch)
        case Evaluated() | Drifted():
            _check_model("model", record.model)
        case CheckpointStored():
            pass


def _check_update(update: UpdateApplied) -> None:
    _check_batches(update.batches)
    _check_measured("measured", update.measured or {}, update.samples)
    if update.base is not UNSET:
        need(update.base < update.version, "base", update.base, "a version before it")
    if update.parts is not UNSET:
        whole = sum(update.parts) == len(update.batches)
        need(whole, "parts", update.parts, f"{len(update.batches)} batches in all")
    if by := update.by:
        own = by.epoch == update.epoch and by.version == update.version
        need(own, "by", by, "an attempt of this leader at this version")


def _check_oldest(field: str, status: LeaderStatus | Unsettled) -> None:
    oldest, last = status.oldest_unsettled, status.control_position
    need(oldest <= last, field, oldest, f"<= {last}")


def _check_leader_status(leader_status: LeaderStatus) -> None:
    _check_oldest("oldest_unsettled", leader_status)
    for partition, openings in leader_status.opened.items():
        own = all(opened.partition == partition for opened in openings)
        need(own, "opened", openings, "of the partition that they stand under")


def _check_trigger(trigger: UpdateTrigger) -> None:
    model = trigger.model
    need(trigger.id.epoch >= 0 and trigger.id.number > 0, "id", trigger.id, "an order's")
    _check_model("model", model)
    for order in trigger.orders:
        need(bool(order.batches), "batches", order, "at least one batch")
        _check_batches(order.batches)
    if trigger.awaits is not UNSET:
        known = trigger.awaits <= model.version
        need(known, "awaits", trigger.awaits, f"at most {model.version}")
    if (trigger.since is UNSET) != (trigger.changes is UNSET):
        raise WireError("trigger: since and changes come together")
    if since := trigger.since:
        earlier = since.epoch == model.epoch and since.version < model.version
        need(earlier, "since", since, f"an earlier version than {model}")
    if trigger.unsettled is not None:
        _check_oldest("unsettled.oldest_unsettled", trigger.unsettled)
    if trigger.weights is not None:
        need(len(trigger.weights) % 4 == 0, "weights", len(trigger.weights), "4 bytes per number")
    if trigger.group is not UNSET:
        _check_group(trigger.group, model)


def _check_group(group: GroupOrders, model: ModelId) -> None:
    membership, reduce = group.membership, group.reduce
    members, owners = membership.members, membership.owners or ()
    _check_model("group.made", group.made)
    same = group.made.version == model.version
    need(same, "group.made", group.made, f"version {model.version}, the trigger's")
    need(len(set(members)) == len(members), "group.membership.members", members, "each once")
    for ranks in owners:
        well = len(set(ranks)) == len(ranks) and max(ranks, default=-1) < len(members)
        need(well, "group.membership.owners", ranks, f"ranks of {len(members)} members, each once")
    if group.stores_of:
        _check_model("group.stores_of", group.stores_of)
    for copy in group.copies:
        _check_slices("group.copies.slices", copy.slices)
    if reduce is not None:
        next_one = (model.epoch, membership.number, model.version + 1)
        need(reduce.attempt == next_one, "group.reduce.attempt", reduce.attempt, f"{next_one}")
        whole = len(reduce.parts) == len(members)
        need(whole, "group.reduce.parts", reduce.parts, "some of each member")
        need(() not in owners, "group.membership.owners", owners, "an owner of each slice")
        offsets = [offset for part in reduce.parts for message in part for offset in message]
        need(bool(offsets), "group.reduce.parts", reduce.parts, "at least one batch")
        _check_offsets(offsets)


def _check_reply(reply: Reply) -> None:
    _check_model("model", reply.model)
    match reply:
        case Gradient() | GradientReady():
            _check_gradient(reply)
        case Failed():
            _check_offsets(reply.batches)
        case Reduced() | Broken():
            last = reply.attempt.version - 1
            need(reply.model.version == last, "model", reply.model, f"of version {last}")
        case StateReport() | Stored():
            _check_slices("slices", reply.slices)
            if reply.made is not None:
                _check_model("made", reply.made)
        case WorkerLeaving():
            pass


def _check_gradient(reply: Gradient | GradientReady) -> None:
    _check_offsets(reply.batches)
    for name, metric in reply.metric_sums.items():
        _check_measured("metric_sums", {name: metric.samples}, reply.samples)
    if scores := reply.scores:
        well = len(scores) == 2 * BINS and sum(scores) == reply.samples
        need(well, "scores", scores, f"{2 * BINS} counts of {reply.samples} records in all")


T = TypeVar("T")
_Encoder: TypeAlias = msgspec.json.Encoder | msgspec.msgpack.Encoder
_Decoder: TypeAlias = msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]

# --- codecs -----------------------------------------------------------------------------------


class _Tagged(msgspec.Struct):
    """Fields of every message of a union, in this and in later formats."""

    type: str
    format: int = 1


_TAGGED_JSON = msgspec.json.Decoder(_Tagged)
_TAGGED_MSGPACK = msgspec.msgpack.Decoder(_Tagged)


class MessageCodec(Generic[T]):
    """Codec of one kind of message: a decoder for the types and a check of the constraints."""

    def __init__(
        self, kind: str, decoder: _Decoder[T], check: Callable[[T], None] | None = None
    ) -> None:
        self._json = json = isinstance(decoder, msgspec.json.Decoder)
        self._kind = kind
        self._check = check
        # Tags that distinguish the messages of a union.
        self._tags = tuple(each.__struct_config__.tag for each in get_args(decoder.type))
        self._encoder: _Encoder = msgspec.json.Encoder() if json else msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._tagged: _Decoder[_Tagged] = _TAGGED_JSON if json else _TAGGED_MSGPACK

    def encode(self, message: T) -> bytes:
        """Encode a message.

        Raises:
            WireError: If a text is not Unicode, or the message is for Kafka and no reader would
                accept it.
        """
        try:
            data = self._encoder.encode(message)
        except UnicodeEncodeError as error:
            raise WireError(f"{self._kind}: a text is not Unicode: {error}") from error
        if self._json and self.decode(data) != message:
            raise WireError(f"{self._kind}: {reprlib.repr(message)} is read as another message")
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """Decode a message.

        Raises:
            WireError: If the bytes are not a valid message of this kind.
            FutureFormatError: If a newer program wrote it.
        """
        if self._json and b'"format"' in bytes(data):
            self._check_format(data)
        try:
            message = self._decoder.decode(data)
        except (ValueError, RecursionError) as error:
            raise WireError(f"{self._kind}: {self._unknown_tag(data) or error}") from error
        if self._check is not None:
            try:
                self._check(message)
            except WireError as error:
                raise WireError(f"{self._kind}: {type(message).__name__}.{error}") from error
        return message

    def _check_format(self, data: bytes | memoryview) -> None:
        try:
            found = self._tagged.decode(data)
        except (ValueError, RecursionError):
            # Decoding the whole message will fail, too.
            return
        if found.format > 1:
            raise FutureFormatError(
                f"{self._kind}: {reprlib.repr(found.type)} of format {found.format},"
                " expected at most 1"
            )

    def _unknown_tag(self, data: bytes | memoryview) -> str:
        try:
            tag = self._tagged.decode(data).type
        except (ValueError, RecursionError):
            return ""
        if not self._tags or tag in self._tags:
            return ""
        known = ", ".join(self._tags)
        return f"type is {reprlib.repr(tag)}, expected {known}"


_CONTROL = MessageCodec("claim", msgspec.json.Decoder(ControlRecord), _check_control)
_AUDIT = MessageCodec("audit", msgspec.json.Decoder(AuditRecord), _check_audit)
_SCHEMA = MessageCodec("schema", msgspec.json.Decoder(SchemaFound))
_LEADER_STATUS = MessageCodec(
    "leader status", msgspec.msgpack.Decoder(LeaderStatus), _check_leader_status
)
_TRIGGER = MessageCodec("trigger", msgspec.msgpack.Decoder(UpdateTrigger), _check_trigger)
_REPLY = MessageCodec("reply", msgspec.msgpack.Decoder(Reply), _check_reply)
_DEMAND = MessageCodec("job demand", msgspec.msgpack.Decoder(JobDemand))
_PLACEMENT = MessageCodec("worker placement", msgspec.msgpack.Decoder(WorkerPlacement))

# These two functions are also for `Opened`.
encode_claim, decode_claim = _CONTROL.encode, _CONTROL.decode
encode_audit, decode_audit = _AUDIT.encode, _AUDIT.decode
encode_schema, decode_schema = _SCHEMA.encode, _SCHEMA.decode
encode_leader_status, decode_leader_status = _LEADER_STATUS.encode, _LEADER_STATUS.decode
encode_trigger, decode_trigger = _TRIGGER.encode, _TRIGGER.decode
encode_demand, decode_demand = _DEMAND.encode, _DEMAND.decode
encode_placement, decode_placement = _PLACEMENT.encode, _PLACEMENT.decode


class _Addressed(msgspec.Struct, frozen=True, array_like=True):
    """The header of a reply. One list receives the replies for all jobs that a replica leads."""

    job: str
    reply: msgspec.Raw
    sparse: bool = False  # written only if true


_ADDRESSED = msgspec.msgpack.Decoder(_Addressed)


def encode_reply(job: str, reply: Reply) -> bytes:
    """Encode a reply to a job's leader. A dense gradient vector is copied once.

    Raises:
        WireError: If the reply is invalid, or its vector is not a float32 vector.
    """
    if not isinstance(reply, Gradient):
        return frame(_addressed(job, reply), b"")
    vector, header = reply.vector, msgspec.structs.replace(reply, vector=None)
    if isinstance(vector, SparseVector):
        return frame(_addressed(job, header, sparse=(True,)), encode_sparse(vector))
    if not (isinstance(vector, np.ndarray) and vector.dtype == np.float32 and vector.ndim == 1):
        found = f"{getattr(vector, 'dtype', type(vector))} of shape {getattr(vector, 'shape', '?')}"
        raise WireError(f"reply: Gradient.vector is {found}, expected float32 of one dimension")
    return frame(_addressed(job, header), np.ascontiguousarray(vector, dtype="<f4").data)


def _addressed(job: str, reply: Reply, sparse: tuple[bool, ...] = ()) -> bytes:
    return msgspec.msgpack.encode((job, msgspec.Raw(_REPLY.encode(reply)), *sparse))


def decode_reply(data: bytes | memoryview) -> tuple[str, Reply]:
    """Decode a job's name and a reply. A gradient vector is a read-only, aligned view.

    Raises:
        WireError: If the bytes are not a valid reply.
    """
    header, body = unframe(data)
    addressed = decoded(_ADDRESSED.decode, header, "reply")
    reply: Reply = _REPLY.decode(addressed.reply)
    if not isinstance(reply, Gradient):
        if body:
            kind = type(reply).__name__
            raise WireError(f"reply: {kind} is followed by {len(body)} bytes, expected none")
        return addressed.job, reply
    vector = decode_sparse(body) if addressed.sparse else _dense(body)
    return addressed.job, msgspec.structs.replace(reply, vector=vector)


def _dense(body: memoryview) -> Vector:
    if len(body) % 4 or not body:
        raise WireError(f"reply: Gradient.vector is {len(body)} bytes, expected 4 for each number")
    vector: Vector = np.frombuffer(body, dtype="<f4")
    return vector


# --- an offered model: a name of fixed length, then the weights --------------------------------

_OFFER_NAME = struct.Struct("<qq")
# Reading only this prefix is enough to get the name.
OFFER_NAME_BYTES = _OFFER_NAME.size


def encode_offer(model: ModelId, weights: bytes | memoryview) -> bytes:
    """Encode a model's name, followed by its weights."""
    return _OFFER_NAME.pack(*model) + memoryview(weights).cast("B")


def decode_offer(data: bytes) -> tuple[ModelId, bytes]:
    """Decode a model's name and its weights.

    Raises:
        WireError: If the bytes are not a valid offer.
    """
    if len(data) <= OFFER_NAME_BYTES:
        raise WireError(f"offer: {len(data)} bytes, expected a name and weights")
    model = ModelId(*_OFFER_NAME.unpack_from(data))
    need(model.epoch >= -1 and model.version >= 0, "offer: model", model, "a name of a model")
    _check_model("offer: model", model)
    return model, data[OFFER_NAME_BYTES:]


# --- a header in front of large raw bytes --------------------------------------------------------

_LENGTH = struct.Struct("<I")  # length of the header
# Alignment of the body in the frame: numpy is slow on unaligned floats, and torch rejects them.
_ALIGNMENT = 16


def frame(header: bytes, body: bytes | memoryview) -> bytes:
    """Put a header in front of a body: length, header, zeros up to the alignment, body."""
    padding = bytes(-(_LENGTH.size + len(header)) % _ALIGNMENT)
    return b"".join((_LENGTH.pack(len(header)), header, padding, body))


def unframe(data: bytes | memoryview) -> tuple[memoryview, memoryview]:
    """Split a frame into read-only views of its header and its body.

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
