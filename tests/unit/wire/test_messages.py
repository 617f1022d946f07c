"""Every message is decoded as it was encoded, and invalid ones are refused."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace as with_

from common.core.batching import MAX_SKIPPED, Batcher, Cut, DecodedRun, most_group_size
from common.core.job_placement import JobDemand, WorkerPlacement
from common.core.messages import (
    GENESIS,
    Assignment,
    AttemptId,
    AuditRecord,
    Batch,
    BatchReady,
    Broken,
    CheckpointStored,
    ControlRecord,
    Copy,
    Drifted,
    Evaluated,
    Failed,
    Gradient,
    GradientReady,
    GroupOrders,
    GroupReply,
    GroupStatus,
    Lead,
    LeaderStatus,
    Member,
    Membership,
    MetricSum,
    ModelId,
    Opened,
    Quarantined,
    Reduce,
    Reduced,
    Reference,
    Replayed,
    Reply,
    Requeued,
    Schema,
    SchemaFound,
    SchemaKind,
    Skipped,
    SpanExpired,
    StateReport,
    Stored,
    Synchrony,
    TriggerId,
    UpdateApplied,
    UpdateTrigger,
    WorkerId,
    WorkerLeaving,
)
from common.core.spans import Address, LogPosition, Partition, Span, address_of
from common.errors import FutureFormatError, WireError
from common.spot.provisioning.records import PlanRecord
from common.wire import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable

# --- strategies ----------------------------------------------------------------------------------

counts = st.integers(0, 2**63 - 1)
some = st.integers(1, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
sums = st.floats(-1e300, 1e300)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = texts.filter(bool)
workers = names.map(WorkerId)
partitions = st.builds(Partition, names, st.integers(0, 1000))
epochs = st.integers(-1, 2**31 - 1)
positions = st.dictionaries(partitions, counts, max_size=4)
metrics = st.dictionaries(texts, finite, max_size=3)
# Sums for messages with at least one sample; exactly one sample has a value.
metric_sums = st.dictionaries(texts, st.builds(MetricSum, sums, st.just(1)), max_size=3)
models = st.builds(ModelId, counts, counts) | st.just(GENESIS)


@st.composite
def addresses(draw: st.DrawFn) -> Address:
    places = draw(st.lists(partitions, min_size=1, max_size=3, unique=True))
    starts = [draw(st.integers(0, 2**40)) for _ in places]
    return address_of(
        Span(
            *place,
            start,
            end := start + draw(st.integers(1, 300)),
            draw(counts),
            draw(epochs),
            draw(st.integers(-1, end)),
            draw(epochs),
        )
        for place, start in zip(places, starts, strict=True)
    )


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    address = draw(addresses())
    span = draw(st.sampled_from(address))
    offsets = draw(st.sets(st.integers(span.start, span.end - 1), max_size=3))
    room = sum(each.end - each.start for each in address) - len(offsets)
    skipped = tuple(Skipped(*span.place, offset, draw(texts)) for offset in offsets)
    if draw(st.booleans()) and offsets:  # one entry for all
        first, *rest = sorted(offsets)
        gaps = tuple(b - a for a, b in pairwise((first, *rest)))
        skipped = (Skipped(*span.place, first, draw(texts), gaps),)
    samples = draw(st.integers(0, room))
    return {"worker": draw(workers), "address": address, "samples": samples, "skipped": skipped}


batches = st.builds(lambda offset, content: Batch(offset, **content), counts, contents())
groups = st.lists(batches, min_size=1, max_size=3, unique_by=lambda batch: batch.offset).map(tuple)
offsets = st.lists(counts, min_size=1, max_size=4, unique=True).map(tuple)

openings = st.builds(
    Opened, partitions, st.none() | counts, st.integers(1, 2**63 - 1), texts, counts, epochs
)
ready = st.builds(
    lambda content, first, last: BatchReady(**content, first_arrival_s=first, last_arrival_s=last),
    contents(),
    finite,
    finite,
)
expired = st.builds(SpanExpired, workers, addresses())
rates = st.floats(0, 1e9)
synchronies = st.builds(Synchrony, st.integers(1, 2**40), counts, st.booleans(), rates)
audits = (
    st.builds(
        Lead,
        *(st.integers(-1, 2**40), models, names, st.integers(2**41, 2**53)),
        exact=st.sampled_from([UNSET, True]),
    )
    | st.builds(
        UpdateApplied,
        counts,
        st.integers(1, 2**40),
        groups,
        counts,
        finite,
        metrics,
        texts,
        counts,
        st.floats(0, 1e9),
        st.dictionaries(names, counts, max_size=2),
    )
    | st.builds(
        lambda update, synchrony, stale, scale: with_(
            update,
            by=AttemptId(update.epoch, 1 + stale, update.version),
            digest=stale,
            copies=1 + stale,
            synchrony=synchrony,
            base=max(update.version - 1 - stale, 0),
            parts=(1,) * len(update.batches),
            scale=scale,
            rate=scale,
        ),
        st.builds(UpdateApplied, counts, st.integers(1, 2**40), groups, counts, finite),
        synchronies,
        st.integers(0, 9),
        rates,
    )
    | st.builds(Quarantined, counts, batches, texts, counts)
    | st.builds(Requeued, batches, names, finite)
    | st.builds(Replayed, batches, names, finite)
    | st.builds(CheckpointStored, counts, counts)
    | st.builds(
        Evaluated,
        models,
        finite,
        counts,
        metrics,
        st.dictionaries(names, metrics, max_size=2),
    )
    | st.builds(Drifted, models, finite, names, finite, finite)
)
leader_statuses = st.builds(
    LeaderStatus,
    counts,
    counts,
    positions,
    st.just(0),
    counts,
    counts,
    positions,
    st.text(max_size=64),
    st.lists(openings, max_size=2).map(lambda some: {each.partition: (each,) for each in some}),
    st.dictionaries(partitions, st.builds(LogPosition, counts, texts, epochs), max_size=2),
    st.just(UNSET)
    | st.builds(
        GroupStatus,
        st.lists(workers, max_size=3).map(tuple),
        st.dictionaries(workers, texts, max_size=2),
        st.integers(0, 3),
        st.lists(workers, max_size=3).map(tuple),
    ),
)
triggers = st.builds(
    UpdateTrigger,
    st.builds(TriggerId, counts, st.integers(1, 2**40)),
    models,
    st.lists(st.builds(Assignment, workers, groups, st.just(0.0) | rates), max_size=3).map(tuple),
    st.none() | st.integers(0, 9).map(lambda numbers: bytes(4 * numbers)),
    awaits=st.sampled_from([UNSET, 0]),
) | st.builds(
    lambda model, changes: UpdateTrigger(
        TriggerId(3, 1), ModelId(3, model + 1), (), since=ModelId(3, model), changes=changes
    ),
    st.integers(0, 9),
    st.binary(max_size=9),
)
members = st.builds(Member, workers, counts)
groups_of_members = st.lists(members, min_size=1, max_size=3, unique=True).map(tuple)
slices = st.just(UNSET) | st.sets(st.integers(0, 99), max_size=3).map(sorted).map(tuple)
attempts = st.builds(AttemptId, counts, st.integers(1, 2**40), st.integers(1, 2**40))


@st.composite
def triggers_of_groups(draw: st.DrawFn) -> UpdateTrigger:
    model = ModelId(draw(counts), draw(st.integers(0, 2**40)))
    there = draw(groups_of_members)
    owner = st.integers(0, len(there) - 1).map(lambda rank: (rank,))
    owners = st.just(UNSET) | st.lists(owner, min_size=1, max_size=4).map(tuple)
    membership = Membership(draw(st.integers(1, 2**40)), there, draw(owners))
    parts = tuple(((2 * rank,), (2 * rank + 1,)) for rank, _ in enumerate(membership.members))
    attempt = AttemptId(model.epoch, membership.number, model.version + 1)
    copies = draw(st.lists(st.builds(Copy, members, st.none() | members, slices), max_size=2))
    orders = GroupOrders(
        ModelId(draw(counts), model.version) if model.version else GENESIS,
        membership,
        draw(st.none() | attempts),
        draw(counts),
        draw(st.none() | st.just(Reduce(attempt, parts, 9, 0.5, 0.1, 2.0))),
        tuple(copies),
        draw(st.booleans()),
        draw(st.none() | members),
        draw(st.none() | members),
        draw(st.lists(members, max_size=2).map(tuple)),
        draw(st.just(UNSET) | models),
    )
    return UpdateTrigger(TriggerId(model.epoch, 1), model, (), group=orders)


vectors = st.lists(st.floats(width=32), min_size=1, max_size=9).map(
    lambda numbers: np.array(numbers, np.float32)
)
gradients = st.builds(
    Gradient,
    *(workers, models, offsets, some, sums, metric_sums, st.floats(0, 1e9)),
    *(st.just(UNSET) | rates, st.just(UNSET) | rates),
    vector=vectors,
)
failures = st.builds(
    Failed, workers, models, offsets, st.sampled_from(["raised", "expired", "task"]), texts, texts
)
group_replies: st.SearchStrategy[GroupReply] = (
    st.builds(
        GradientReady,
        *(workers, models, offsets, some, sums, metric_sums, st.floats(0, 1e9)),
        *(st.just(UNSET) | rates, st.just(UNSET) | rates),
        life=counts,
    )
    | st.builds(
        lambda worker, life, attempt, digest: Reduced(
            worker, ModelId(attempt.epoch, attempt.version - 1), life, attempt, digest
        ),
        *(workers, counts, attempts, counts),
    )
    | st.builds(
        lambda worker, life, attempt, reason, unreachable: Broken(
            worker, ModelId(attempt.epoch, attempt.version - 1), life, attempt, reason, unreachable
        ),
        *(workers, counts, attempts, st.sampled_from(["left", "lacks"]), groups_of_members),
    )
    | st.builds(
        StateReport,
        *(workers, models, counts, st.builds(TriggerId, counts, counts), st.none() | models),
        *(counts, groups_of_members | st.just(()), st.just(""), counts, slices),
        *(st.sampled_from([UNSET, "reliable"]), st.just(UNSET) | st.floats(0, 1e9)),
        st.just(UNSET) | counts,
    )
    | st.builds(Stored, workers, models, counts, models, slices)
)
workers_leaving = st.builds(WorkerLeaving, workers, models, offsets | st.just(()))

durations = st.floats(0, 1e9)
demands = st.builds(
    JobDemand,
    names,
    counts,
    counts,
    durations,
    durations,
    st.integers(1, 2**40),
    st.floats(1e-3, 1e3),
    st.booleans(),
    counts,
    durations,
    texts,
)
several = st.lists(texts, max_size=3).map(tuple)
placements = st.builds(
    WorkerPlacement, workers, counts, texts, durations, st.booleans(), several, several, texts
)


schemas = st.builds(
    SchemaFound,
    id=st.integers(0, 2**32 - 1),
    schema=st.builds(
        Schema,
        kind=st.sampled_from(get_args(SchemaKind)),
        text=st.text(),
        references=st.lists(st.builds(Reference, st.text(), st.text()), max_size=2).map(tuple),
    ),
)


class Way(NamedTuple):
    """Encoder and decoder of one kind of message."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    messages: st.SearchStrategy[Any]


WAYS = {
    "claim": Way(wire.encode_claim, wire.decode_claim, ready | expired | openings),
    "audit": Way(wire.encode_audit, wire.decode_audit, audits),
    "schema": Way(wire.encode_schema, wire.decode_schema, schemas),
    "leader status": Way(wire.encode_leader_status, wire.decode_leader_status, leader_statuses),
    "trigger": Way(wire.encode_trigger, wire.decode_trigger, triggers | triggers_of_groups()),
    "reply": Way(
        partial(wire.encode_reply, "digits"),
        wire.decode_reply,
        gradients | failures | workers_leaving | group_replies,
    ),
    "job demand": Way(wire.encode_demand, wire.decode_demand, demands),
    "worker placement": Way(wire.encode_placement, wire.decode_placement, placements),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def reason_of(way: Way, data: bytes) -> str:
    """Return the decoder's reason for refusing these bytes, or an empty string."""
    try:
        way.decode(data)
    except WireError as error:
        return str(error)
    return ""


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(WAYS.keys() - {"reply"}))
@given(data=st.data())
def test_message_is_decoded_as_it_was_encoded(kind: str, data: st.DataObject) -> None:
    message = data.draw(WAYS[kind].messages)
    assert WAYS[kind].decode(WAYS[kind].encode(message)) == message


@given(failures | workers_leaving | group_replies)
def test_reply_without_numbers_is_decoded_as_it_was_encoded(
    reply: Failed | WorkerLeaving | GroupReply,
) -> None:
    assert wire.decode_reply(wire.encode_reply("digits", reply)) == ("digits", reply)


@given(gradients)
def test_gradient_is_decoded_bit_by_bit_as_an_aligned_read_only_view(gradient: Gradient) -> None:
    data = wire.encode_reply("digits", gradient)
    job, back = wire.decode_reply(data)
    assert job == "digits"
    assert isinstance(back, Gradient)
    for field in set(Gradient.__struct_fields__) - {"vector"}:
        assert getattr(back, field) == getattr(gradient, field)
    assert back.vector.tobytes() == gradient.vector.tobytes()
    assert back.vector.dtype == np.float32
    assert back.vector.flags.aligned
    assert not back.vector.flags.writeable
    assert np.shares_memory(back.vector, np.frombuffer(data, np.uint8))


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_unframe_returns_what_was_framed(header: bytes, body: bytes) -> None:
    parts = wire.unframe(wire.frame(header, body))
    assert tuple(map(bytes, parts)) == (header, body)


def test_claims_and_audit_records_are_plain_json() -> None:
    claim = SpanExpired(WorkerId("w1"), (Span("clicks", 0, 10, 20),))
    assert (
        wire.encode_claim(claim)
        == b'{"type":"span-expired","worker":"w1","address":[["clicks",0,10,20,0,-1,-1,-1]]}'
    )


@pytest.mark.parametrize("union", [ControlRecord, AuditRecord, Reply, SchemaFound, PlanRecord])
def test_messages_and_fields_are_named_as_in_the_code(union: Any) -> None:  # noqa: ANN401 -- a type
    for kind in get_args(union) or (union,):
        words = re.findall("[A-Z][a-z]+", kind.__name__)
        assert kind.__struct_config__.tag == "-".join(words).lower()
        assert kind.__struct_encode_fields__ == kind.__struct_fields__
    assert LeaderStatus.__struct_encode_fields__ == LeaderStatus.__struct_fields__


# --- later formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["claim", "audit", "schema"])
@given(data=st.data())
def test_record_of_a_later_format_raises_future_format(kind: str, data: st.DataObject) -> None:
    whole = WAYS[kind].encode(data.draw(WAYS[kind].messages))
    later = msgspec.json.encode(msgspec.json.decode(whole) | {"format": 2, "more": []})
    with pytest.raises(FutureFormatError, match="of format 2, expected at most 1"):
        WAYS[kind].decode(later)


def test_unknown_record_of_a_later_format_raises_future_format() -> None:
    with pytest.raises(FutureFormatError, match="'merged' of format 2"):
        wire.decode_claim(b'{"type":"merged","format":2}')


@pytest.mark.parametrize(
    "data", [b'{"format":2}', b'{"type":"batch-ready","format":"2"}', b'"format"']
)
def test_invalid_format_field_raises_wire_error(data: bytes) -> None:
    with pytest.raises(WireError) as refused:
        wire.decode_claim(data)
    assert not isinstance(refused.value, FutureFormatError)


def test_unknown_fields_are_ignored() -> None:
    claim = SpanExpired(WorkerId("format"), (Span("clicks", 0, 10, 20),))
    more = wire.encode_claim(claim)[:-1] + b',"more":1,"format":1}'
    assert wire.decode_claim(more) == claim


def test_default_mode_is_not_encoded() -> None:
    assert wire.encode_audit(UPDATE).endswith(b'"number":0}')
    order = Assignment(WorkerId("w1"), (BATCH,))
    trigger = wire.encode_trigger(UpdateTrigger(TriggerId(3, 1), MODEL, (order,)))
    for word in (
        b"local_rate",
        b"awaits",
        b"synchrony",
        b"base",
        b"parts",
        b"scale",
        b"rate",
        b"since",
        b"changes",
    ):
        assert word not in trigger + WIRED + wire.encode_audit(UPDATE)


# --- what fits into Kafka ------------------------------------------------------------------------

# A producer's default limit.
KAFKA_BYTES = 1_000_000


@pytest.mark.parametrize("group_size", [1, 30, most_group_size(["t" * 249])])
@pytest.mark.parametrize("reason", ["torn", "\x01"])
def test_largest_claims_and_their_update_fit_into_a_kafka_record(
    group_size: int, reason: str
) -> None:
    # 3,000 partitions with the longest names and the highest offsets. Each has three bad records.
    batcher = Batcher(10**6, None, group_size)
    cuts = list[Cut]()
    for index in range(3000):
        place, start = Partition("t" * 249, index), 2**62
        batcher.place(place, start)
        bad = tuple(Skipped(*place, start + n, f"{index}.{n} {reason * 300}") for n in range(3))
        cuts += batcher.add(DecodedRun(place, (start + 3,), bad, 0.0, 0.0), now=0.0)
    claims = [
        BatchReady(WorkerId("w" * 60), cut.address, cut.samples, cut.skipped, 1e9 / 3, 1e9 / 3)
        for cut in cuts
    ]
    largest = max(claims, key=lambda claim: len(wire.encode_claim(claim)))
    assert len(wire.encode_claim(largest)) < KAFKA_BYTES
    widest = max(claims, key=lambda claim: len(claim.address))
    update = UpdateApplied(
        2**62,
        2**62,
        tuple(
            Batch(2**62 + n, widest.worker, widest.address, widest.samples)
            for n in range(group_size)
        ),
        group_size,
        0.5,
        {f"metric-{n}": 1 / 3 for n in range(20)},
        skipped={"t" * 249: group_size * MAX_SKIPPED},
        synchrony=Synchrony(2**62, 2**62, single_worker=True, local_rate=1 / 3),
        base=2**62 - 1,
        parts=(1,) * group_size,
        scale=1 / 3,
        rate=1 / 3,
    )
    assert len(wire.encode_audit(update)) < KAFKA_BYTES


# --- refusals ------------------------------------------------------------------------------------


@every_way
@given(data=st.binary(max_size=200))
@example(data=b"")
@example(data=b"\xff")
@example(data=b"[" * 100_000)
@example(data=b'{"a":' + b"[" * 100_000)
@example(data=b"\x81\xa1a" + b"\x91" * 100_000)
@example(data=wire.frame(b"\x81\xa6vector" + b"\x91" * 100_000, b""))
@example(data=wire.frame(b"\x81\xa6vector\xdd\xff\xff\xff\xff", b""))
@example(data=b'{"type":"batch-ready","worker":"\xff"}')
def test_arbitrary_bytes_raise_only_wire_error(way: Way, data: bytes) -> None:
    assert reason_of(way, data)


@every_way
@given(data=st.data())
def test_damaged_message_is_refused_or_decoded_as_another(way: Way, data: st.DataObject) -> None:
    whole = way.encode(data.draw(way.messages))
    cut = whole[: data.draw(st.integers(0, len(whole)), label="cut")]
    reason_of(way, cut)
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, len(whole) - 1), label="byte")] ^= 1 << data.draw(
        st.integers(0, 7), label="bit"
    )
    reason_of(way, bytes(flipped))


SPAN = Span("clicks", 0, 10, 20)
BATCH = Batch(7, WorkerId("w1"), (SPAN,), 10)
UPDATE = UpdateApplied(3, 1, (BATCH,), 10, 0.5)
MODEL = ModelId(3, 0)
VECTOR = np.ones(2, np.float32)
GRADIENT = Gradient(WorkerId("w1"), MODEL, (7,), 10, 1.0, {}, 0.1, vector=VECTOR)
WIRED = wire.encode_reply("digits", GRADIENT)

NONSENSE = {
    "an empty span": (
        "claim",
        SpanExpired(WorkerId("w"), (Span("t", 0, 5, 5),)),
        "is empty or ends before its start",
    ),
    "a backwards span": (
        "claim",
        BatchReady(WorkerId("w"), (Span("t", 0, 5, 3),), 1),
        "is empty or ends before its start",
    ),
    "two spans of a partition": (
        "claim",
        BatchReady(WorkerId("w"), (SPAN, Span("clicks", 0, 20, 30)), 1),
        "one partition",
    ),
    "spans out of order": (
        "claim",
        BatchReady(WorkerId("w"), (SPAN, Span("ads", 0, 1, 2)), 1),
        "sorted",
    ),
    "more samples than offsets": (
        "claim",
        BatchReady(WorkerId("w"), (SPAN,), 11),
        "at most what its spans hold",
    ),
    "a skipped record outside the spans": (
        "claim",
        BatchReady(WorkerId("w"), (SPAN,), 1, (Skipped("clicks", 0, 20, "no json"),)),
        "inside the batch's own spans",
    ),
    "skipped records that continue outside the spans": (
        "claim",
        BatchReady(WorkerId("w"), (SPAN,), 1, (Skipped("clicks", 0, 18, "no json", (1, 1)),)),
        "inside the batch's own spans",
    ),
    "a skipped record twice": (
        "claim",
        BatchReady(
            WorkerId("w"),
            (SPAN,),
            1,
            (Skipped("clicks", 0, 12, "torn", (5,)), Skipped("clicks", 0, 17, "no label")),
        ),
        "each offset once",
    ),
    "a name that is not Unicode": (
        "claim",
        BatchReady(WorkerId("\ud800"), (SPAN,), 1),
        "not Unicode",
    ),
    "an infinite arrival time": (
        "claim",
        BatchReady(WorkerId("w"), (SPAN,), 1, (), float("inf")),
        "first_arrival_s",
    ),
    "an epoch that goes back": ("audit", Lead(7, GENESIS, "c", 7), "Lead.epoch"),
    "a base version without a leader": ("audit", Lead(-1, ModelId(-1, 4), "c", 0), "Lead.base"),
    "a loss that is not a number": (
        "audit",
        UpdateApplied(3, 1, (BATCH,), 10, float("nan")),
        "`float`, got `null` - at `$.loss`",
    ),
    "a metric of more samples than the update has": (
        "audit",
        UpdateApplied(3, 1, (BATCH,), 10, 0.5, {"accuracy": 0.5}, measured={"accuracy": 11}),
        "measured['accuracy'] is 11, expected at most 10 samples",
    ),
    "a batch twice in an update": (
        "audit",
        UpdateApplied(3, 1, (BATCH, BATCH), 20, 0.5),
        "each batch once",
    ),
    "scores of more records than the batch has": (
        "reply",
        Gradient(WorkerId("w1"), MODEL, (7,), 10, 1.0, {}, 0.1, vector=VECTOR, scores=(1,) * 128),
        "expected 128 counts of 10 records in all",
    ),
    "an update whose base is not below it": (
        "audit",
        with_(UPDATE, base=1),
        "UpdateApplied.base is 1, expected a version before it",
    ),
    "parts that do not cover all batches": (
        "audit",
        with_(UPDATE, parts=(2,)),
        "UpdateApplied.parts",
    ),
    "a trigger that awaits a later version": (
        "trigger",
        UpdateTrigger(TriggerId(3, 1), MODEL, (), awaits=1),
        "UpdateTrigger.awaits is 1, expected at most 0",
    ),
    "changes without a base": (
        "trigger",
        UpdateTrigger(TriggerId(3, 1), MODEL, (), changes=b""),
        "since and changes come together",
    ),
    "changes whose base is not older": (
        "trigger",
        UpdateTrigger(TriggerId(3, 1), MODEL, (), since=MODEL, changes=b""),
        "UpdateTrigger.since",
    ),
    "an oldest unsettled batch above the decided claims": (
        "leader status",
        LeaderStatus(3, 5, {}, 6, 0, 0, {}),
        "LeaderStatus.oldest_unsettled",
    ),
    "a trigger without a number": (
        "trigger",
        UpdateTrigger(TriggerId(3, 0), MODEL, ()),
        "UpdateTrigger.id",
    ),
    "weights that end within a number": (
        "trigger",
        UpdateTrigger(TriggerId(3, 1), MODEL, (), b"abc"),
        "UpdateTrigger.weights",
    ),
    "a gradient without a vector": (
        "reply",
        Gradient(WorkerId("w"), MODEL, (7,), 10, 1.0, {}, 0.1),
        "Gradient.vector",
    ),
    "a vector of doubles": (
        "reply",
        Gradient(WorkerId("w"), MODEL, (7,), 10, 1.0, {}, 0.1, vector=np.ones(2)),
        "float64",
    ),
}


@pytest.mark.parametrize(
    ("kind", "message", "reason"), NONSENSE.values(), ids=map(str, NONSENSE.keys())
)
def test_invalid_message_is_refused(kind: str, message: object, reason: str) -> None:
    with pytest.raises(WireError) as refused:
        WAYS[kind].decode(WAYS[kind].encode(message))
    assert str(refused.value).startswith(kind)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "data", "reasons"),
    [
        ("claim", b'{"type":"merged"}', ["type is 'merged'", "batch-ready, span-expired"]),
        ("claim", b'{"worker":"w"}', ["missing required field `type`"]),
        (
            "claim",
            b'{"type":"span-expired","worker":3,"address":[]}',
            ["$.worker", "`str`", "`int`"],
        ),
        (
            "claim",
            b'{"type":"span-expired","worker":"w","address":[["t",0,1,36893488147419103232]]}',
            ["$.address[0][3]", f"<= {2**63 - 1}"],
        ),
        (
            "audit",
            wire.encode_audit(UPDATE).replace(b'"loss":0.5', b'"loss":null'),
            ["$.loss", "`float`", "`null`"],
        ),
        (
            "audit",
            wire.encode_audit(UPDATE).replace(b'"samples":10', b'"samples":-4'),
            ["$.batches[0].samples"],
        ),
        ("audit", b"{", ["audit"]),
        (
            "reply",
            WIRED[:-1],
            ["Gradient.vector is 7 bytes", "4 for each"],
        ),
        ("reply", WIRED[:3], ["frame: 3 bytes"]),
        ("reply", WIRED[:20], ["ends after 20 bytes"]),
        (
            "reply",
            wire.encode_reply("digits", Failed(WorkerId("w"), MODEL, (7,), "raised")) + b"tail",
            ["followed by 4 bytes"],
        ),
        (
            "reply",
            wire.encode_reply("digits", Failed(WorkerId("w"), MODEL, (7,), "raised")).replace(
                b"raised", b"boring"
            ),
            ["boring", "$.reason"],
        ),
    ],
)
def test_refusal_names_message_field_and_value(kind: str, data: bytes, reasons: list[str]) -> None:
    reason = reason_of(WAYS[kind], data)
    assert all(part in reason for part in reasons), reason


def test_field_of_a_later_format_is_ignored() -> None:
    data = wire.encode_audit(UPDATE)[:-1] + b',"device":"gpu"}'
    assert wire.decode_audit(data) == UPDATE
