"""Messages to bytes and back: the one door through which bytes of another process come in.

Kafka carries JSON, which any Kafka tool shows; Redis carries msgpack; a gradient's vector travels
behind its header as raw little-endian float32, or sparse (`common.wire.vectors`). Both directions
check that a message makes sense: a nonsense record in the audit trail would be there for ever.

What is decided stays in Kafka for programs yet to be written. Such a program may add fields that
this one may ignore. A record that this program must not ignore, or would misread, carries a
`"format"` above 1, and is refused.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Generic, NoReturn, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import UNSET

from common.core.messages import (
    MOST_TRACEBACK,
    AttemptId,
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
    Member,
    Membership,
    ModelId,
    Opened,
    Quarantined,
    Reduced,
    Replayed,
    Reply,
    Requeued,
    Slices,
    SpanExpired,
    StateReport,
    Stored,
    UpdateApplied,
    UpdateTrigger,
    Vector,
    WorkerLeaving,
)
from common.core.schemas import SchemaFound
from common.core.scores import BINS
from common.core.spans import Address, Partition, Span, address_of
from common.core.spread import JobDemand, WorkerPlacement
from common.core.vectors import SparseVector
from common.errors import FutureFormatError, WireError
from common.wire.vectors import decode_sparse, encode_sparse

_LONGEST_S = 1e9  # decades; a sum of such durations is finite
_LATEST_S = 1e11  # since 1970: the year 5138
_FASTEST_PER_S = 1e12  # records; products with it are finite
_LARGEST_SUM = 1e300  # of losses, metrics, squares: sums of these are finite, those of float32 less
_STAGES = 3  # of AgileML
_NAME = 64  # characters of a name that we make: 16
_ADDRESS = 64  # characters of host:port, numeric
_EPOCHS = 2**31  # Kafka's leader epochs are signed 32-bit
_POSITIONS = 2**63  # Kafka's offsets are signed 64-bit, and msgpack ends there too


def _need(holds: bool, field: str, found: object, expected: str) -> None:  # noqa: FBT001 -- a condition
    if not holds:
        raise WireError(f"{field} is {reprlib.repr(found)}, expected {expected}")


def _check_count(field: str, value: int, least: int = 0) -> None:
    _need(least <= value < _POSITIONS, field, value, f"a whole number from {least} to 2^63 - 1")


def _check_epoch(field: str, value: int) -> None:
    _need(-1 <= value < _EPOCHS, field, value, "a leader epoch from 0 to 2^31 - 1, or -1")


def _check_finite(field: str, value: float) -> None:
    _need(math.isfinite(value), field, value, "a finite number")


def _check_sum(field: str, value: float) -> None:
    well = -_LARGEST_SUM <= value <= _LARGEST_SUM
    _need(well, field, value, f"a number from -{_LARGEST_SUM:g} to {_LARGEST_SUM:g}")


def _check_rate(field: str, value: float) -> None:
    _need(0 <= value < math.inf, field, value, "a finite number, not below 0")


def _check_seconds(field: str, value: float) -> None:
    _need(0 <= value <= _LONGEST_S, field, value, f"a duration, at most {_LONGEST_S:g} s")


def _check_metrics(field: str, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        _check_finite(f"{field}[{name!r}]", value)


def _check_measured(field: str, measured: Mapping[str, int], most: int) -> None:
    for name, samples in measured.items():
        expected = f"a number of samples from 1 to {most}"
        _need(1 <= samples <= most, f"{field}[{name!r}]", samples, expected)


def _check_worker(worker: str) -> None:
    _need(bool(worker), "worker", worker, "a name")


def check_model(field: str, model: ModelId) -> None:
    """Refuse a name that no model can have."""
    _check_count(f"{field}.epoch", model.epoch, -1)
    _check_count(f"{field}.version", model.version)
    _need(model.epoch >= 0 or model.version == 0, field, model, "version 0 where nobody led yet")


def _is_well(span: Span) -> bool:
    topic, partition, start, end, generation, before, known, epoch = span
    return (
        topic != ""
        and 0 <= partition < _POSITIONS
        and 0 <= start < end < _POSITIONS
        and 0 <= generation < _POSITIONS
        and -1 <= known <= end
        and -1 <= before < _EPOCHS
        and -1 <= epoch < _EPOCHS
    )


def _check_address(address: Address) -> None:
    """Look at speed whether all is well: an update is looked at some 160 times on its way."""
    places = [span[:2] for span in address]
    sorted_once = all(before < after for before, after in pairwise(places))
    if not (address and sorted_once and all(map(_is_well, address))):
        _refuse_address(address)


def _refuse_address(address: Address) -> NoReturn:
    """Say what is wrong with an address."""
    for span in address:
        _need(bool(span.topic), "address.topic", span, "a span of a named topic")
        _check_count("address.partition", span.partition)
        _check_count("address.end", span.end)
        _check_count("address.generation", span.generation)
        _need(-1 <= span.known <= span.end, "address.known", span, "at most its end, or -1")
        _check_epoch("address.before", span.before)
        _check_epoch("address.epoch", span.epoch)
    try:
        address_of(address)
    except ValueError as error:
        raise WireError(f"address is {reprlib.repr(address)}: {error}") from error
    raise WireError(
        f"address is {reprlib.repr(address)}, expected spans sorted by topic and partition"
    )


def _check_batch(batch: BatchReady | Batch) -> None:
    if len(batch.address) == 1 and not batch.skipped and batch.worker:  # the common road
        (span,) = batch.address
        if _is_well(span) and 0 <= batch.samples <= span.end - span.start:
            return
    _check_worker(batch.worker)
    _check_address(batch.address)
    left_out = _check_skipped(batch) if batch.skipped else 0
    room = sum(span.end - span.start for span in batch.address) - left_out
    _need(0 <= batch.samples <= room, "samples", batch.samples, f"0 to {room}, what its spans hold")


def _check_skipped(batch: BatchReady | Batch) -> int:
    """Look at the bad records of a batch; returns how many they are."""
    spans = {span.place: span for span in batch.address}
    seen = set[tuple[Partition, int]]()
    records = 0
    for skipped in batch.skipped:
        place = Partition(skipped.topic, skipped.partition)
        span = spans.get(place)
        forward = all(gap > 0 for gap in skipped.gaps)
        _need(forward, "skipped", skipped, "gaps of at least 1 between its offsets")
        last = skipped.offset + sum(skipped.gaps)
        inside = span is not None and span.start <= skipped.offset <= last < span.end
        _need(inside, "skipped", skipped, "offsets inside the batch's own spans")
        records += skipped.records
        seen.update((place, offset) for offset in skipped.offsets)
        _need(len(seen) == records, "skipped", skipped, "each offset once")
    return records


_IDS = 2**32  # of schemas, in the four bytes before a record


def check_schema(found: SchemaFound) -> None:
    """Refuse a schema of an id that no record can name."""
    _need(0 <= found.id < _IDS, "id", found.id, f"below {_IDS}")


def check_control(record: ControlRecord) -> None:
    """Refuse a claim whose address, samples or skipped records cannot be, or such an opening."""
    match record:
        case BatchReady():
            _check_batch(record)
            _check_finite("first_arrival_s", record.first_arrival_s)
            _check_finite("last_arrival_s", record.last_arrival_s)
        case SpanExpired():
            _check_worker(record.worker)
            _check_address(record.address)
        case Opened():
            _check_opened(record)


def _check_opened(record: Opened, least: int = 1) -> None:
    """Look at speed whether all is well: a leader's status has one of each partition."""
    (topic, index), after = record.partition, record.after
    well = bool(topic) and 0 <= index < _POSITIONS and 0 <= record.start < _POSITIONS
    well = well and (after is None or 0 <= after < _POSITIONS)
    if well and least <= record.generation < _POSITIONS and -1 <= record.epoch < _EPOCHS:
        return
    _need(bool(record.partition.topic), "partition.topic", record.partition, "of a named topic")
    _check_count("partition.index", record.partition.index)
    if record.after is not None:
        _check_count("after", record.after)
    _check_count("generation", record.generation, least)
    _check_count("start", record.start)
    _check_epoch("epoch", record.epoch)


def _check_offsets(offsets: Iterable[int]) -> None:
    listed = tuple(offsets)
    once = len(set(listed)) == len(listed)
    if listed and once and min(listed) >= 0 and max(listed) < _POSITIONS:
        return
    for offset in listed:
        _check_count("batches.offset", offset)
    _need(bool(listed), "batches", listed, "at least one batch")
    _need(once, "batches", listed, "each batch once")


def _check_batches(batches: tuple[Batch, ...]) -> None:
    _check_offsets(batch.offset for batch in batches)
    for batch in batches:
        _check_batch(batch)


def check_audit(record: AuditRecord) -> None:  # noqa: C901 -- one case per record
    """Refuse a decision that nobody can have made, and an evaluation of nothing."""
    match record:
        case Lead():
            _check_count("after", record.after, -1)
            check_model("base", record.base)
            _need(bool(record.candidate), "candidate", record.candidate, "a unique name")
            _check_count("epoch", record.epoch, -1)
            _check_count("after_loss", record.after_loss)
            later = record.epoch < 0 or record.epoch > record.after
            _need(later, "epoch", record.epoch, f"above {record.after}, the one before")
        case UpdateApplied():
            _check_count("epoch", record.epoch)
            _check_count("version", record.version, 1)
            _check_count("number", record.number)
            _check_batches(record.batches)
            _check_count("samples", record.samples)
            _check_finite("loss", record.loss)
            _check_metrics("metrics", record.metrics)
            _check_count("revision", record.revision)
            _check_seconds("gradient_s", record.gradient_s)
            _check_made(record)
            for stream, records in record.skipped.items():
                _check_count(f"skipped[{stream!r}]", records)
        case Quarantined():
            _check_count("epoch", record.epoch)
            _check_count("number", record.number)
            _check_batches((record.batch,))
        case Requeued() | Replayed():
            _check_batches((record.batch,))
            _need(bool(record.by), "by", record.by, "who asked for it")
            _check_finite("at_s", record.at_s)
        case CheckpointStored():
            _check_count("epoch", record.epoch)
            _check_count("version", record.version)
        case Evaluated():
            check_model("model", record.model)
            _check_finite("at_s", record.at_s)
            _check_count("records", record.records)
            _check_metrics("test", record.test)
            for stream, metrics in record.prequential.items():
                _check_metrics(f"prequential[{stream!r}]", metrics)
        case Drifted():
            check_model("model", record.model)
            _need(bool(record.stream), "stream", record.stream, "a name")
            for field in ("at_s", "before", "after"):
                _check_finite(field, getattr(record, field))


def _check_made(update: UpdateApplied) -> None:
    """Check how an update was made, as far as the record says it."""
    _check_measured("measured", update.measured or {}, update.samples)
    if synchrony := update.synchrony:
        _check_count("synchrony.group_size", synchrony.group_size, 1)
        _check_count("synchrony.staleness", synchrony.staleness)
        _check_rate("synchrony.local_rate", synchrony.local_rate)
    if update.base is not UNSET:
        _need(0 <= update.base < update.version, "base", update.base, "a version before it")
    if update.parts is not UNSET:
        whole = min(update.parts, default=0) > 0 and sum(update.parts) == len(update.batches)
        _need(whole, "parts", update.parts, f"{len(update.batches)} batches in all")
    if update.scale is not UNSET:
        _check_rate("scale", update.scale)
    if update.rate is not UNSET:
        _check_rate("rate", update.rate)
    if update.equivalent is not UNSET:
        _check_rate("equivalent", update.equivalent)
    if update.by is not UNSET:
        _check_attempt("by", update.by)
        own = update.by.epoch == update.epoch and update.by.version == update.version
        _need(own, "by", update.by, "an attempt of this leader at this version")
    if update.digest is not UNSET:
        _check_count("digest", update.digest)
    if update.copies is not UNSET:
        _check_count("copies", update.copies, 1)
    _check_count("moved", update.moved or 0)


def _check_attempt(field: str, attempt: AttemptId) -> None:
    _check_count(f"{field}.epoch", attempt.epoch)
    _check_count(f"{field}.membership", attempt.membership, 1)
    _check_count(f"{field}.version", attempt.version, 1)


def _check_member(field: str, member: Member) -> None:
    _need(bool(member.worker), f"{field}.worker", member.worker, "a name")
    _check_count(f"{field}.life", member.life)


def _check_slices(field: str, slices: Slices) -> None:
    numbers = slices or ()
    ascending = all(one < other for one, other in pairwise((-1, *numbers)))
    _need(ascending, field, numbers, "numbers from 0, ascending")


def check_leader_status(leader_status: LeaderStatus) -> None:
    """Refuse positions that no leader can have reached."""
    for field in ("epoch", "control_position", "oldest_unsettled", "waiting", "live"):
        _check_count(field, getattr(leader_status, field))
    _need(
        len(leader_status.triggers) <= _NAME,
        "triggers",
        leader_status.triggers,
        f"<= {_NAME} characters",
    )
    _need(
        leader_status.oldest_unsettled <= leader_status.control_position,
        "oldest_unsettled",
        leader_status.oldest_unsettled,
        f"<= {leader_status.control_position}",
    )
    if leader_status.group is not UNSET:
        stage = leader_status.group.stage
        _need(0 <= stage <= _STAGES, "group.stage", stage, f"0 to {_STAGES}")
    for field in ("claimed", "settled"):
        for partition, position in getattr(leader_status, field).items():
            if not 0 <= position < _POSITIONS:
                _check_count(f"{field}[{partition}]", position)
    for partition, openings in leader_status.opened.items():
        for opened in openings:
            _check_opened(opened, least=0)  # 0: as the job was submitted
            own = opened.partition == partition
            _need(own, "opened", opened, "of the partition that it stands under")
    for partition, position in leader_status.known.items():
        if not (0 <= position.offset < _POSITIONS and -1 <= position.epoch < _EPOCHS):
            _check_count(f"known[{partition}].offset", position.offset)
            _check_epoch(f"known[{partition}].epoch", position.epoch)


def check_trigger(trigger: UpdateTrigger) -> None:
    """Refuse orders that nobody could carry out."""
    _check_count("id.epoch", trigger.id.epoch)
    _check_count("id.number", trigger.id.number, 1)
    check_model("model", trigger.model)
    for order in trigger.orders:
        _check_worker(order.worker)
        _check_batches(order.batches)
        _check_rate("local_rate", order.local_rate)
    if trigger.awaits is not UNSET:
        known = 0 <= trigger.awaits <= trigger.model.version
        _need(known, "awaits", trigger.awaits, f"at most {trigger.model.version}")
    if (trigger.since is UNSET) != (trigger.changes is UNSET):
        raise WireError("trigger: since and changes come together")
    if trigger.since is not UNSET:
        check_model("since", trigger.since)
        earlier = trigger.since.epoch == trigger.model.epoch and trigger.since < trigger.model
        _need(earlier, "since", trigger.since, f"an earlier version than {trigger.model}")
    if trigger.unsettled is not None:
        for field, count in trigger.unsettled._asdict().items():
            _check_count(f"unsettled.{field}", count)
        last, oldest = trigger.unsettled.control_position, trigger.unsettled.oldest_unsettled
        _need(oldest <= last, "unsettled.oldest_unsettled", oldest, f"<= {last}")
    if trigger.weights is not None:
        _need(len(trigger.weights) % 4 == 0, "weights", len(trigger.weights), "4 bytes per number")
    if trigger.group is not UNSET:
        _check_group(trigger.group, trigger.model)


def _check_group(group: GroupOrders, model: ModelId) -> None:
    """Look at what members are told."""
    check_model("group.made", group.made)
    same = group.made.version == model.version
    _need(same, "group.made", group.made, f"version {model.version}, the trigger's")
    _check_count("group.origin", group.origin)
    _check_membership(group.membership)
    for member in group.stores:
        _check_member("group.stores", member)
    if group.stores_of is not UNSET:
        check_model("group.stores_of", group.stores_of)
    if group.by is not None:
        _check_attempt("group.by", group.by)
    for field in ("hot", "offer"):
        if (asked := getattr(group, field)) is not None:
            _check_member(f"group.{field}", asked)
    for copy in group.copies:
        _check_member("group.copies.member", copy.member)
        if copy.source is not None:
            _check_member("group.copies.source", copy.source)
        _check_slices("group.copies.slices", copy.slices)
    for worker, address in group.addresses.items():
        _check_worker(worker)
        _need(0 < len(address) <= _ADDRESS, "group.addresses", address, "host:port")
    if group.reduce is not None:
        members, owners = group.membership.members, group.membership.owners or ()
        attempt, parts = group.reduce.attempt, group.reduce.parts
        next_one = (model.epoch, group.membership.number, model.version + 1)
        _need(attempt == next_one, "group.reduce.attempt", attempt, f"{next_one}")
        _need(len(parts) == len(members), "group.reduce.parts", parts, "some of each member")
        _need(() not in owners, "group.membership.owners", owners, "an owner of each slice")
        _check_offsets(offset for part in parts for message in part for offset in message)
        _check_count("group.reduce.samples", group.reduce.samples, 1)
        _check_rate("group.reduce.local_rate", group.reduce.local_rate)
        _check_rate("group.reduce.learning_rate", group.reduce.learning_rate or 0.0)
        _check_rate("group.reduce.scale", group.reduce.scale)


def _check_membership(membership: Membership) -> None:
    _check_count("group.membership.number", membership.number)
    members = membership.members
    for member in members:
        _check_member("group.membership.members", member)
    _need(len(set(members)) == len(members), "group.membership.members", members, "each once")
    for ranks in membership.owners or ():
        well = len(set(ranks)) == len(ranks) and set(ranks) <= set(range(len(members)))
        _need(well, "group.membership.owners", ranks, f"ranks of {len(members)} members, each once")


def check_reply(reply: Reply) -> None:
    """Refuse a reply that is about nothing or is not finite."""
    _check_worker(reply.worker)
    check_model("model", reply.model)
    match reply:
        case WorkerLeaving(finishing=finishing):
            for offset in finishing:
                _check_count("finishing", offset)
        case Gradient() | GradientReady() | Failed():
            _check_answer(reply)
        case Reduced() | Broken() | StateReport() | Stored():
            _check_count("life", reply.life)
            _check_word(reply)


def _check_square(square: float) -> None:
    _need(0 <= square <= _LARGEST_SUM, "square", square, f"from 0 to {_LARGEST_SUM:g}")


def _check_began(began_s: float) -> None:
    _need(0 <= began_s <= _LATEST_S, "began_s", began_s, f"seconds since 1970, <= {_LATEST_S:g}")


def _check_word(reply: Reduced | Broken | StateReport | Stored) -> None:
    """Look at what a member says of what it holds."""
    if isinstance(reply, Reduced | Broken):
        _check_attempt("attempt", reply.attempt)
        last = reply.attempt.version - 1
        _need(reply.model.version == last, "model", reply.model, f"of version {last}")
    if isinstance(reply, Reduced):
        _check_count("digest", reply.digest)
        _check_square(reply.square or 0.0)
    if isinstance(reply, StateReport | Broken):
        for member in reply.unreachable:
            _check_member("unreachable", member)
    if isinstance(reply, StateReport):
        _check_count("heard.epoch", reply.heard.epoch, -1)
        _check_count("heard.number", reply.heard.number)
        _check_count("origin", reply.origin)
        _check_count("numbers", reply.numbers)
        _need(len(reply.address) <= _ADDRESS, "address", reply.address, "host:port")
        _check_began(reply.began_s or 0.0)
        _check_count("room", reply.room or 0)
    if isinstance(reply, StateReport | Stored):
        _check_slices("slices", reply.slices)
        if reply.made is not None:
            check_model("made", reply.made)


def _check_answer(reply: Gradient | GradientReady | Failed) -> None:
    """Look at what became of an order."""
    _check_offsets(reply.batches)
    if isinstance(reply, GradientReady):
        _check_count("life", reply.life)
    if isinstance(reply, Gradient | GradientReady):
        _check_count("samples", reply.samples)
        _check_sum("loss_sum", reply.loss_sum)
        for name, (total, samples) in reply.metric_sums.items():
            _check_sum(f"metric_sums[{name!r}]", total)
            _check_measured("metric_sums", {name: samples}, reply.samples)
        _check_seconds("seconds", reply.seconds)
        _check_rate("local_rate", reply.local_rate or 0.0)
        _check_square(reply.square or 0.0)
        if traffic := reply.traffic or ():
            _check_count("traffic.life", traffic.life)
            _check_count("traffic.total", traffic.total)
        if scores := reply.scores or ():
            well = len(scores) == 2 * BINS and min(scores) >= 0 and sum(scores) == reply.samples
            _need(well, "scores", scores, f"{2 * BINS} counts of {reply.samples} records in all")
    if isinstance(reply, Failed):
        length = len(reply.traceback)
        _need(length <= MOST_TRACEBACK, "traceback", length, f"at most {MOST_TRACEBACK} characters")


def check_demand(demand: JobDemand) -> None:
    """Refuse a need that no job can have: it would take workers from all others."""
    _need(bool(demand.job), "job", demand.job, "a name")
    for field in ("number", "backlog", "target"):
        _check_count(field, getattr(demand, field))
    _check_count("most_workers", demand.most_workers, 1)
    for field in ("arrivals_per_s", "worker_records_per_s"):
        value = getattr(demand, field)
        _need(0 <= value <= _FASTEST_PER_S, field, value, f"at most {_FASTEST_PER_S:g} a second")
    _check_seconds("unserved_s", demand.unserved_s)
    _need(0 < demand.weight <= _FASTEST_PER_S, "weight", demand.weight, "a positive number")


def check_placement(placement: WorkerPlacement) -> None:
    """Refuse a placement of nobody."""
    _check_worker(placement.worker)
    _check_count("number", placement.number)
    _check_seconds("stay_s", placement.stay_s)


T = TypeVar("T")
_Encoder: TypeAlias = msgspec.json.Encoder | msgspec.msgpack.Encoder
_Decoder: TypeAlias = msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]

_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what msgspec raises

# --- how it is written ---------------------------------------------------------------------------


class _Tagged(msgspec.Struct):
    """What all messages of a union have in common, whatever else a later format puts in them."""

    type: str
    format: int = 1


_TAGGED_JSON = msgspec.json.Decoder(_Tagged)
_TAGGED_MSGPACK = msgspec.msgpack.Decoder(_Tagged)


class Codec(Generic[T]):
    """One kind of message: its decoder knows the types, its check what they cannot say."""

    def __init__(
        self,
        kind: str,
        decoder: _Decoder[T],
        check: Callable[[T], None],
    ) -> None:
        self._json = json = isinstance(decoder, msgspec.json.Decoder)
        self._kind = kind
        self._check = check
        # Of a union, what tells its messages apart.
        self._tags = tuple(each.__struct_config__.tag for each in get_args(decoder.type))
        self._encoder: _Encoder = msgspec.json.Encoder() if json else msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._tagged: _Decoder[_Tagged] = _TAGGED_JSON if json else _TAGGED_MSGPACK

    def encode(self, message: T) -> bytes:
        """Write a message.

        Raises:
            WireError: If it makes no sense, so that no reader could accept it.
        """
        self._examine(message)
        try:
            return self._encoder.encode(message)
        except UnicodeEncodeError as error:
            raise WireError(f"{self._kind}: a text is not Unicode: {error}") from error

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
        if found.format > 1:
            raise FutureFormatError(
                f"{self._kind}: {reprlib.repr(found.type)} of format {found.format},"
                " expected at most 1"
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


_CONTROL = Codec("claim", msgspec.json.Decoder(ControlRecord), check_control)
_AUDIT = Codec("audit", msgspec.json.Decoder(AuditRecord), check_audit)
_SCHEMA = Codec("schema", msgspec.json.Decoder(SchemaFound), check_schema)
_LEADER_STATUS = Codec("leader status", msgspec.msgpack.Decoder(LeaderStatus), check_leader_status)
_TRIGGER = Codec("trigger", msgspec.msgpack.Decoder(UpdateTrigger), check_trigger)
_REPLY = Codec("reply", msgspec.msgpack.Decoder(Reply), check_reply)
_DEMAND = Codec("job demand", msgspec.msgpack.Decoder(JobDemand), check_demand)
_PLACEMENT = Codec("worker placement", msgspec.msgpack.Decoder(WorkerPlacement), check_placement)

encode_claim, decode_claim = _CONTROL.encode, _CONTROL.decode  # and openings
encode_audit, decode_audit = _AUDIT.encode, _AUDIT.decode
encode_schema, decode_schema = _SCHEMA.encode, _SCHEMA.decode
encode_leader_status, decode_leader_status = _LEADER_STATUS.encode, _LEADER_STATUS.decode
encode_trigger, decode_trigger = _TRIGGER.encode, _TRIGGER.decode
encode_demand, decode_demand = _DEMAND.encode, _DEMAND.decode
encode_placement, decode_placement = _PLACEMENT.encode, _PLACEMENT.decode


class _Addressed(msgspec.Struct, frozen=True, array_like=True):
    """The header of a reply: one list takes those of all jobs that a replica leads."""

    job: str
    reply: msgspec.Raw
    sparse: bool = False  # written only if true


_ADDRESSED = msgspec.msgpack.Decoder(_Addressed)


def encode_reply(job: str, reply: Reply) -> bytes:
    """Write a reply to a job's leader; a gradient's dense vector is copied once.

    Raises:
        WireError: If it makes no sense, or its vector is not one of float32.
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
    """Read a job's name and the reply; a gradient's numbers are a read-only, aligned view.

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
    vector = decode_sparse(body) if addressed.sparse else _dense(body)
    return addressed.job, msgspec.structs.replace(reply, vector=vector)


def _dense(body: memoryview) -> Vector:
    if len(body) % 4 or not body:
        raise WireError(f"reply: Gradient.vector is {len(body)} bytes, expected 4 for each number")
    vector: Vector = np.frombuffer(body, dtype="<f4")
    return vector


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
