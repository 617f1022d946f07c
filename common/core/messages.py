"""Messages and ids of the protocol, which cross process boundaries.

Facts are named as facts (`BatchReady`), orders as orders (`UpdateTrigger`). Decisions travel
through Kafka and survive. Everything else travels through Redis and may be lost:
docs/explain/protocol.md.

Messages, events and commands never form reference cycles, so the garbage collector need not track
them (`gc=False`). A leader keeps and drops thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, UnsetType

from common.core.field_types import (
    Count,
    Finite,
    HostPort,
    KafkaEpoch,
    NonEmpty,
    Ordinal,
    OrNone,
    Rate,
    Seconds,
    Square,
    Sum,
    Time,
)
from common.core.spans import Address, LogPosition, Partition, Span

WorkerId = NewType("WorkerId", str)
# Next offset to read, by partition.
Positions: TypeAlias = dict[Partition, Count]
Vector: TypeAlias = npt.NDArray[np.float32]  # (P + B,) parameters, then buffers
# State of a job requested by its owner.
Wanted: TypeAlias = Literal["running", "paused", "stopped"]
# Start position in a recreated topic. Empty if the owner has not chosen one.
ReadFrom: TypeAlias = Literal["", "earliest", "latest"]


class ModelId(NamedTuple):
    """Name of a model: the leader that made it and its version.

    A version alone is ambiguous. After a takeover two leaders may each have made a version 17, and
    a gradient of one does not apply to the other.
    """

    # e, the number of the leadership that made the model, see `Lead`.
    epoch: OrNone
    # J, the number of updates applied.
    version: Count


# The initial weights, built from the job's specification before there was a leader.
GENESIS = ModelId(-1, 0)


# Numbers per millisecond.
CHANCES = 4096


def unused_number(at_s: float, random_bits: int) -> int:
    """Return a number that was never used and never will be, even if a log loses its tail.

    Offsets are reused after a loss of records. Two of a job's numbers are equal only if they are
    drawn in the same millisecond, and then with a probability of 1 in 4096.

    Args:
        at_s: Current time, in seconds since 1970.
        random_bits: 12 random bits, 0 to 4095.
    """
    return int(at_s * 1000) * CHANCES + random_bits


def drawn_at_s(number: int) -> float:
    """Return the time at which `unused_number` drew a number, in seconds since 1970."""
    return number // CHANCES / 1000


class TriggerId(NamedTuple):
    """Trigger id, ordered across leaders: triggers of a deposed leader come before later ones."""

    epoch: OrNone
    # Counter of this leader's triggers, from 1.
    number: Count


class TriggerStream(NamedTuple):
    """Redis stream of a leader's triggers, as its status names it."""

    # Empty for the job's first stream.
    name: str = ""
    # Epoch of the leader. -1 if no status has been seen.
    epoch: int = -1


class Member(NamedTuple):
    """One process of a group that adds up gradients. A restarted process is a different member."""

    worker: NonEmpty[WorkerId]
    # Random number drawn at process start.
    life: Count


class AttemptId(NamedTuple):
    """One attempt at an update. A membership makes at most one attempt per version.

    Collectives are matched by call order, so a second attempt could receive messages of the first.
    """

    # Epoch of the leader.
    epoch: Count
    # Number of the membership.
    membership: Ordinal
    version: Ordinal  # J, after the update


# --- control topic: claims of workers, openings of partitions ----------------------------------


class Skipped(NamedTuple):
    """Records of a span that do not decode. Every reader of the span skips them.

    One entry covers all such records of one partition with the same reason, so a thousand records
    from one broken producer take a few kilobytes.
    """

    topic: str
    partition: int
    # Offset of the first record.
    offset: Count
    reason: str
    # Distance of each record to the next one: gaps of 1 and 5 after offset 7 mean 8 and 13.
    gaps: tuple[Ordinal, ...] = ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of all skipped records, increasing."""
        return tuple(accumulate((self.offset, *self.gaps)))

    @property
    def records(self) -> int:
        """Number of skipped records."""
        return 1 + len(self.gaps)


class BatchReady(msgspec.Struct, frozen=True, gc=False, tag="batch-ready"):
    """A worker has a batch in memory: the paper's batch indicator S_B;j,n (Algorithm 1, line 8)."""

    worker: NonEmpty[WorkerId]
    # At most one span per partition.
    address: Address
    # Number of records that decoded: b, or fewer if the batch was closed early.
    samples: Count
    skipped: tuple[Skipped, ...] = ()
    # Kafka timestamps, used to estimate lambda_A.
    first_arrival_s: Finite = 0.0
    last_arrival_s: Finite = 0.0


class SpanExpired(msgspec.Struct, frozen=True, gc=False, tag="span-expired"):
    """Claim of records that retention deleted unread, so that the partition can continue."""

    worker: NonEmpty[WorkerId]
    address: Address


Claim: TypeAlias = BatchReady | SpanExpired


class Opened(msgspec.Struct, frozen=True, gc=False, tag="opened"):
    """A leader begins the next generation of a partition, or the first one of a new partition.

    The record counts only if `after` is the generation in force, so a duplicate has no effect.
    Generation numbers are never reused, so a claim of an earlier generation never fits a later one.
    """

    partition: Partition
    # The generation in force, or None if the job does not have the partition yet.
    after: Count | None
    generation: Count
    # Kafka's topic id as text. Empty if unknown.
    topic_id: str
    # First offset of the generation.
    start: Count
    # Leader epoch of the last record below `start`. -1 if there is no such record.
    epoch: KafkaEpoch


ControlRecord: TypeAlias = Claim | Opened
# Openings that counted, oldest first.
Openings: TypeAlias = dict[Partition, tuple[Opened, ...]]
# Positions after the last claimed record.
LogPositions: TypeAlias = dict[Partition, LogPosition]


def topic_id_of(opened: Openings, span: Span) -> str:
    """Return Kafka's id of the topic that a span belongs to. Empty if unknown."""
    openings = opened.get(span.place, ())
    return next((each.topic_id for each in openings if each.generation == span.generation), "")


class Batch(msgspec.Struct, frozen=True, gc=False):
    """An accepted batch. Its control offset identifies it; its address defines its content."""

    offset: Count
    # The worker that claimed the batch and probably still has it in memory.
    worker: NonEmpty[WorkerId]
    address: Address
    samples: Count
    skipped: tuple[Skipped, ...] = ()

    def without_skipped(self) -> Batch:
        """Return the batch as an update names it. Its claim lists the skipped records."""
        return msgspec.structs.replace(self, skipped=()) if self.skipped else self


# --- updates topic: decisions of leaders --------------------------------------------------------


SynchronisationMode: TypeAlias = Literal["synchronous", "stale", "asynchronous", "averaging"]


class Synchrony(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Group of an update, and how old the weights of its gradients may be."""

    group_size: Ordinal  # K
    # s, the largest number of updates between the weights of a gradient and its own update. 0 is
    # the paper's synchronous rule.
    staleness: Count = 0
    # True if one worker computes the whole group, so that no worker waits for another.
    single_worker: bool = False
    # Learning rate of a worker's steps on its own copy of the weights between the batches of one
    # order (model averaging). 0 if it takes no such steps.
    local_rate: Rate = 0.0

    @property
    def mode(self) -> SynchronisationMode:
        """Name of the mode in a job file."""
        if self.single_worker:
            return "asynchronous"
        if self.local_rate:
            return "averaging"
        return "stale" if self.staleness else "synchronous"


class Lead(msgspec.Struct, frozen=True, gc=False, tag="lead"):
    """A candidate claims leadership. Counts only if `after` is the Lead in force (compare-and-set).

    Takes back every update above `base`.
    """

    # Epoch of the Lead that the candidate found in force, or -1.
    after: OrNone
    # The update contained in the snapshot that the candidate starts from.
    base: ModelId
    # Unique per candidacy, so that a candidate recognises its own record.
    candidate: NonEmpty[str]
    # An `unused_number` above `after`.
    epoch: Count
    # Count of the owner's requests to resume after a loss, as known to this candidate. A count
    # above all earlier ones permits the candidate to ignore snapshots with lost records.
    after_loss: Count = 0
    # Description of the loss. Empty if nothing was lost.
    loss: str = ""
    # True if the Lead counts only with the newest effective update as its base, because members
    # hold the weights of no other version.
    exact: bool | UnsetType = UNSET
    # Number of slices with owners, if members hold the weights. 0 if each member holds everything.
    # Unset if the coordinator holds the weights.
    slices: Count | UnsetType = UNSET


class Traffic(NamedTuple):
    """Bytes of weights and gradients that a worker has sent and received so far."""

    # Random number drawn when the count began. Counts of different lives are independent.
    life: Count
    # A running total in bytes, so lost, late and duplicate messages do not distort it.
    total: Count


class UpdateApplied(msgspec.Struct, frozen=True, gc=False, tag="update-applied"):
    """One model update and exactly the batches that made it (the paper's Algorithm 4, line 11)."""

    epoch: Count
    version: Ordinal  # J, after this update
    # K batches `without_skipped`, or fewer for the reason in `short`.
    batches: NonEmpty[tuple[Batch, ...]]
    samples: Count
    # Mean per sample at the weights before the update (prequential).
    loss: Finite
    # Mean of each task metric over the samples that have a value, at the same weights as the loss.
    # Also contains the `WINDOWED` metrics of `common.core.scores`.
    metrics: dict[str, Finite] = {}
    # Reason for fewer than K batches: "linger", "missing" or "quarantined". Otherwise empty.
    short: str = ""
    # Revision of the job's settings, which include K.
    revision: Count = 0
    # Mean compute time of one batch.
    gradient_s: Seconds = 0.0
    # Number of records that did not decode, by stream.
    skipped: dict[str, Count] = {}
    # Number among this leader's updates and quarantines, from 1. 0 in records of older programs.
    number: Count = 0
    # The following fields are unset if they have their usual value.
    # Default: K of the revision, with all gradients at the version before.
    synchrony: Synchrony | UnsetType = UNSET
    # Oldest version that a gradient was computed at. Default: the version before.
    base: Count | UnsetType = UNSET
    # Number of batches in each gradient message, in the order of `batches`. Default: workers took
    # no local steps.
    parts: tuple[Ordinal, ...] | UnsetType = UNSET
    # Factor on the learning rate of this step. Default: 1.
    scale: Rate | UnsetType = UNSET
    # Learning rate of this step, `scale` included. Default: the trainer's own rate.
    rate: Rate | UnsetType = UNSET
    # Progress of the model in updates of the job's own K, this one included. Default: J.
    equivalent: Rate | UnsetType = UNSET
    # The attempt that made this update. Members that prepared its result may apply it.
    by: AttemptId | UnsetType = UNSET
    # Digest of the prepared result.
    digest: Count | UnsetType = UNSET
    # Number of members that have the whole result.
    copies: Ordinal | UnsetType = UNSET
    # Bytes of weights and gradients that a worker sent and received for one update: the mean of the
    # counts that arrived since the update before.
    moved: Count | UnsetType = UNSET
    # Number of samples that have a value, by metric. A metric that all samples have is left out.
    measured: dict[str, Ordinal] | UnsetType = UNSET
    # Number of gradients that were computed in parts for lack of memory. Default: 0.
    cut: Ordinal | UnsetType = UNSET

    def samples_with(self, metric: str) -> int:
        """Return the number of samples that contribute to the mean of a metric."""
        return (self.measured or {}).get(metric, self.samples)

    @property
    def progress(self) -> float:
        """Progress in updates of the job's own K, whichever K each update used."""
        return float(self.version) if self.equivalent is UNSET else self.equivalent

    @property
    def staleness(self) -> int:
        """Number of updates between the oldest gradient's weights and this update."""
        return 0 if self.base is UNSET else self.version - 1 - self.base

    @property
    def mode(self) -> SynchronisationMode:
        """Synchronisation mode of this update."""
        return self.synchrony.mode if self.synchrony else "synchronous"


class Quarantined(msgspec.Struct, frozen=True, gc=False, tag="quarantined"):
    """A batch that cannot be used. It is settled without training, and no Lead takes that back."""

    epoch: Count
    # The whole batch, so that a requeue needs only this record.
    batch: Batch
    reason: str  # "poison: ..." or "expired"
    # Counted as in `UpdateApplied`.
    number: Count = 0

    @property
    def expired(self) -> bool:
        """True if the records are gone, so that the batch cannot be requeued."""
        return self.reason == "expired"


class Requeued(msgspec.Struct, frozen=True, gc=False, tag="requeued"):
    """An operator ends the quarantine of a batch. It waits for an update again.

    Counts if exactly this batch is quarantined as poison and was not replayed. No Lead takes it
    back. An operator's record has no epoch, because it belongs to no leader.
    """

    batch: Batch
    # Name of the operator, for people.
    by: NonEmpty[str]
    at_s: Finite  # seconds since 1970


class Replayed(msgspec.Struct, frozen=True, gc=False, tag="replayed"):
    """An operator is about to produce the records of a batch again. Its quarantine becomes final.

    Counts if exactly this batch is quarantined as poison and was not replayed before. The writer
    produces the records only after this record counts.
    """

    batch: Batch
    # Name of the operator, for people.
    by: NonEmpty[str]
    at_s: Finite  # seconds since 1970


class Evaluated(msgspec.Struct, frozen=True, gc=False, tag="evaluated"):
    """Evaluation of a version by an evaluator. Does not affect any decision.

    Several evaluators may report the same version. Results of a version that a later Lead took back
    are ignored.
    """

    model: ModelId
    at_s: Finite  # seconds since 1970
    # Number of test records. 0 if there is no test set.
    records: Count
    # Loss and task metrics on the test set, mean per record.
    test: dict[str, Finite]
    # Loss and task metrics by stream, on records that the model learned from next. A version may be
    # reported in parts: first the test set, then each stream as its records arrive.
    prequential: dict[str, dict[str, Finite]] = {}


class Drifted(msgspec.Struct, frozen=True, gc=False, tag="drifted"):
    """A change in the errors of a stream, reported by an evaluator like `Evaluated`."""

    # The version at which the drift was detected.
    model: ModelId
    at_s: Finite  # seconds since 1970
    stream: NonEmpty[str]
    # Mean error per record before the change. The detector has dropped these records.
    before: Finite
    # Mean error per record since the change.
    after: Finite


class CheckpointStored(msgspec.Struct, frozen=True, gc=False, tag="checkpoint-stored"):
    """A checkpoint was written to object storage, and its leader has read it back complete.

    Counts if its leader and its version are in force. A Lead with an older base takes the record
    back. While it counts, no candidate starts below this checkpoint by mistake. The record has no
    number, because it stays true if an earlier record is lost.
    """

    epoch: Count
    version: Count

    @property
    def name(self) -> ModelId:
        """Name of the checkpoint."""
        return ModelId(self.epoch, self.version)


AuditRecord: TypeAlias = (
    Lead
    | UpdateApplied
    | Quarantined
    | Requeued
    | Replayed
    | CheckpointStored
    | Evaluated
    | Drifted
)

# --- Redis: fast, may be lost -------------------------------------------------------------------


class GroupStatus(msgspec.Struct, frozen=True, gc=False):
    """Members that add up gradients, and workers that cannot."""

    members: tuple[WorkerId, ...]
    # Reasons why living workers are not members.
    left_out: dict[WorkerId, str] = {}
    # Stage of AgileML if slices have owners. 0 if they have none or it is unknown.
    stage: Annotated[int, Meta(ge=0, le=3)] = 0
    # Workers that own slices.
    owners: tuple[WorkerId, ...] = ()
    # Members that updates wait for while they copy the weights, with the longest wait in seconds.
    waits: dict[WorkerId, Rate] = {}


class LeaderStatus(msgspec.Struct, frozen=True, gc=False):
    """State of the leader that a worker needs to find its position, in one value."""

    epoch: Count
    # Every control record below this offset has been decided.
    control_position: Count
    # Every record below belongs to exactly one accepted batch, or has expired.
    claimed: Positions
    # Control offset of the oldest unsettled batch, or `control_position` if there is none.
    oldest_unsettled: Count
    # Number of unsettled batches.
    waiting: Count
    # Number of workers that the leader considers alive.
    live: Count
    # Next offset of each partition: a checkpoint covers all records below it. Only for reports of
    # the lag.
    settled: Positions
    # Name of the leader's stream of triggers. Empty for the first stream.
    triggers: Annotated[str, Meta(max_length=64)] = ""
    # A partition without an opening is of generation 0.
    opened: Openings = {}
    # Only partitions whose position is known from a claim or an opening.
    known: LogPositions = {}
    # Only if members hold the weights.
    group: GroupStatus | UnsetType = UNSET
    # Workers that get no work because their model differs, with the reason.
    left_out: dict[WorkerId, str] = {}

    def generation(self, partition: Partition) -> int:
        """Return the generation in force of one of the job's partitions."""
        opened = self.opened.get(partition)
        return opened[-1].generation if opened else 0

    def topic_id(self, span: Span) -> str:
        """Return Kafka's id of the topic that a span belongs to. Empty if unknown."""
        return topic_id_of(self.opened, span)

    def place(self, partition: Partition) -> LogPosition:
        """Return the start position of a reader, with what is known of the last claimed record."""
        claimed = self.claimed[partition]
        known = self.known.get(partition, LogPosition(claimed))
        # Without a leader epoch, a known offset below `claimed` proves nothing. One above it is
        # forged.
        whole = known.epoch >= 0 and known.offset <= claimed
        return known if whole else LogPosition(claimed, known.topic_id)


class Assignment(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One worker's part of a trigger: all these batches form one gradient, sent as one message."""

    worker: NonEmpty[WorkerId]
    batches: tuple[Batch, ...]
    local_rate: Rate = 0.0  # see `Synchrony`
    # True if the gradient must include its squared norm.
    squared: bool = False
    # Token of the worker's process, see `Heartbeat`. Others with its name skip the order: it may
    # have killed the process that it was for. Empty for any process.
    life: str = ""


class Unsettled(NamedTuple):
    """Summary of a job's unsettled batches, which limits how much its workers may read."""

    # Every control record below this offset has been decided.
    control_position: Count
    # Control offset of the oldest unsettled batch, or `control_position` if there is none.
    oldest_unsettled: Count
    # Number of unsettled batches.
    waiting: Count
    # Number of workers that the leader considers alive.
    live: Count


# One bit per parameter tensor, in the order of the model's vector: 1 if the gradient reached the
# tensor. The first tensor has the lowest bit of the first byte, and missing bytes are 0. Unset if
# the gradient reached all tensors.
Reached: TypeAlias = Annotated[bytes, Meta(max_length=1 << 16)] | UnsetType
# The same bits as one number, if all are set.
ALL_REACHED = -1


def reached_mask(reached: Reached) -> int:
    """Return the bits as one number."""
    return ALL_REACHED if reached is UNSET else int.from_bytes(reached, "little")


def reached_bits(mask: int) -> Reached:
    """Return the bits of a number as bytes."""
    if mask == ALL_REACHED:
        return UNSET
    return mask.to_bytes(-(-mask.bit_length() // 8), "little")


# Slices whose optimizer state is meant, ascending. Unset if all are.
Slices: TypeAlias = tuple[Count, ...] | UnsetType
Tier: TypeAlias = Literal["reliable", "spot"]


class Membership(msgspec.Struct, frozen=True, gc=False):
    """Members of one process group, as decided by the leader.

    A later membership of the same leader, or any of a later leader, ends this one and its attempts.
    """

    # Counter of this leader's memberships, from 1. 0 if there is none yet.
    number: Count
    # Members in order of rank.
    members: tuple[Member, ...] = ()
    # Ranks of each slice's owners, which all step it, so that each has its optimizer state. The
    # first one sends the new weights to all members. Unset if each member holds and steps
    # everything.
    owners: tuple[tuple[Count, ...], ...] | UnsetType = UNSET

    def owned(self, member: Member) -> Slices:
        """Return the slices whose optimizer state a member holds after the next step."""
        if self.owners is UNSET:
            return UNSET
        rank = self.members.index(member) if member in self.members else -1
        return tuple(number for number, ranks in enumerate(self.owners) if rank in ranks)


class Reduce(msgspec.Struct, frozen=True, gc=False):
    """Order to all members to add up their gradients now. Each member gets the whole sum."""

    attempt: AttemptId
    # Batches of each gradient message, by rank.
    parts: tuple[tuple[tuple[Count, ...], ...], ...]
    # Number of samples of all gradients.
    samples: Ordinal
    # Local rate at which all gradients were computed, see `Synchrony`.
    local_rate: Rate = 0.0
    # Learning rate of the step, without `scale`. None for the job's own rate.
    learning_rate: Rate | None = None
    scale: Rate = 1.0
    # True if members must report the squared norm of the sum.
    measured: bool = False
    # Parameter tensors that any of the gradients reached.
    reached: Reached = UNSET


class Copy(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Order to a member to copy the state of another."""

    member: Member
    # None to load from storage, or to build version 0 from the specification.
    source: Member | None = None
    # Slices whose optimizer state is copied with the weights. Unset for all.
    slices: Slices = UNSET


class GroupOrders(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The part of a trigger that is for members of a group, besides the orders for gradients."""

    # The version of the trigger's model, as its audit record names it.
    made: ModelId
    membership: Membership
    # The attempt that made the version. Its result may be applied.
    by: AttemptId | None = None
    # Life of the member that made version 0. 0 if no member has made it.
    origin: Count = 0
    reduce: Reduce | None = None
    copies: tuple[Copy, ...] = ()
    # True if all members must report their state.
    report: bool = False
    # The member that must add the weights to the hot snapshot of this version.
    hot: Member | None = None
    # The member that must offer this version to evaluators.
    offer: Member | None = None
    # Members that must store a version. One per slice if slices have owners.
    stores: tuple[Member, ...] = ()
    # The version to store. Unset for the trigger's version.
    stores_of: ModelId | UnsetType = UNSET
    # Addresses of all members that these orders name.
    addresses: dict[NonEmpty[WorkerId], NonEmpty[HostPort]] = {}
    # Number of slices, as in the leader's `Lead`.
    slices: Count = 0

    def named(self) -> Iterator[Member]:
        """Yield the members that these orders name."""
        yield from self.membership.members
        for copy in self.copies:
            yield copy.member
            if copy.source is not None:
                yield copy.source
        yield from self.stores
        yield from (each for each in (self.hot, self.offer) if each is not None)


class UpdateTrigger(msgspec.Struct, frozen=True, gc=False):
    """Compute these gradients at this model or later: the paper's S_C;j,n (Algorithm 4, line 5)."""

    id: TriggerId
    model: ModelId
    orders: tuple[Assignment, ...]
    # Weights of a small model. A large model is fetched by its id.
    weights: bytes | None = None
    # Name of the leading replica, which receives the gradients.
    reply_to: str = ""
    # Unsettled batches at the time of posting, or None if the trigger does not say.
    unsettled: Unsettled | None = None
    # Orders at versions below this are void. Unset for the model's own version.
    awaits: Count | UnsetType = UNSET
    # A worker that has the model `since` applies `changes`: numbers to overwrite, in sparse wire
    # form.
    since: ModelId | UnsetType = UNSET
    changes: bytes | UnsetType = UNSET
    # Only if members hold the weights.
    group: GroupOrders | UnsetType = UNSET
    # Digest of the layout of the leader's model: names, shapes, types and order of its tensors. A
    # worker whose model has another digest computes nothing. Unset if members hold the weights.
    digest: str | UnsetType = UNSET

    @property
    def slices(self) -> int | UnsetType:
        """Layout of the weights, as in the leader's `Lead`."""
        return UNSET if self.group is UNSET else self.group.slices

    def continues(self, model: ModelId | None) -> bool:
        """True if `changes` turn this model into the trigger's."""
        return model is not None and self.since == model


class MetricSum(NamedTuple):
    """A metric summed over the samples that have a value."""

    total: Sum
    samples: Ordinal  # at least 1


class _Reply(msgspec.Struct, frozen=True, gc=False):
    """Fields of every reply."""

    worker: NonEmpty[WorkerId]
    # The model that the reply refers to.
    model: ModelId


class _Computed(_Reply, frozen=True):
    """Fields of a gradient message, with or without its vector."""

    batches: NonEmpty[tuple[Count, ...]]  # control offsets
    samples: Count
    loss_sum: Sum  # sum over the samples
    # Metrics without a value for any sample are left out.
    metric_sums: dict[str, MetricSum]
    # Compute time, which the deadlines of later rounds depend on.
    seconds: Seconds
    # Rate of the local steps between the batches. Unset if there were none.
    local_rate: Rate | UnsetType = UNSET
    # Squared norm of the (P,) gradient, if the order requests it.
    square: Square | UnsetType = UNSET
    # Score counts of a task with two classes, see `common.core.scores`.
    scores: tuple[Count, ...] | UnsetType = UNSET
    # True if some pass was computed in parts for lack of memory. Otherwise unset.
    cut: bool | UnsetType = UNSET
    # Traffic of the worker before this message.
    traffic: Traffic | UnsetType = UNSET
    # Parameter tensors that any record of the batches reached.
    reached: Reached = UNSET


class Gradient(_Computed, frozen=True, tag="gradient"):
    """The gradient of one order: the paper's g_J,k summed over its batches (Algorithm 2, line 7).

    `model` is the one that the gradient was computed at. The vector travels beside the message as
    raw bytes, see `common.wire.messages`.
    """

    # Vector or SparseVector: (P,) gradient summed over the samples, then (B,) buffers x samples.
    vector: Any = None


class GradientReady(_Computed, frozen=True, kw_only=True, tag="gradient-ready"):
    """A gradient that stays in the worker that computed it: `Gradient` without its vector."""

    life: Count  # see `Member`


class _MemberReply(_Reply, frozen=True):
    """Fields of every message from a member."""

    life: Count  # see `Member`


class Reduced(_MemberReply, frozen=True, tag="reduced"):
    """A member has the whole result of an attempt. It applies the result once the audit names it.

    `model` is the one that the result applies to.
    """

    attempt: AttemptId
    # Digest of the result and of the weights that it applies to.
    digest: Count
    # Squared norm of the summed gradients, if requested.
    square: Square | UnsetType = UNSET


BrokenReason: TypeAlias = Literal[
    # Another member left the attempt or was unreachable, or the attempt had ended.
    "left",
    # The member lacks the version, or some of the gradients that it should add.
    "lacks",
    # The sum is not finite. Another attempt would give the same.
    "not_finite",
]


class Broken(_MemberReply, frozen=True, tag="broken"):
    """A member has left an attempt and takes no further part in its membership."""

    attempt: AttemptId
    reason: BrokenReason = "left"
    # Members that it could not reach.
    unreachable: tuple[Member, ...] = ()


class StateReport(_MemberReply, frozen=True, tag="state-report"):
    """Complete state of a member. An older report never overrides a newer one.

    `model` is that of the newest trigger that the member received.
    """

    # Id of that trigger.
    last_trigger: TriggerId
    # The version that the member holds, as its audit record names it, or None.
    made: ModelId | None
    # Origin of version 0, see `GroupOrders`.
    origin: Count = 0
    # Members that it could not copy from.
    unreachable: tuple[Member, ...] = ()
    address: HostPort = ""  # host:port
    # Number of weights and buffers: P + B.
    numbers: Count = 0
    # Slices whose optimizer state it holds at that version.
    slices: Slices = UNSET
    # Tier of its machine. Unset for spot, or if it does not matter.
    tier: Tier | UnsetType = UNSET
    # Start of its process, in seconds since 1970.
    began_s: Time | UnsetType = UNSET
    # Number of slices whose optimizer state fits into its memory. Unset for all.
    room: Count | UnsetType = UNSET


class Stored(_MemberReply, frozen=True, tag="stored"):
    """A member has stored a version, so that others can load it."""

    made: ModelId
    # Stored slices. Unset for the whole version. Empty if the member no longer has the slices that
    # it was asked to store.
    slices: Slices = UNSET


FailedReason: TypeAlias = Literal[
    # The weights were missing in Redis. The leader publishes them again.
    "model_missing",
    # Kafka did not return the records now. Another worker may get them.
    "unreadable",
    # The records are deleted. The leader quarantines the batch.
    "expired",
    # The task raised an exception, or the records do not decode in this worker.
    "raised",
    # The loss or the gradient is not finite.
    "not_finite",
    # The task is wrong for any data. The leader holds the job and blames no batch.
    "task",
    # The worker's memory is too small, even for parts of the batch. Another worker may have more.
    "memory",
]
# Maximum length of a traceback in characters. Its end names the place of the error.
MOST_TRACEBACK = 4000


class Failed(_Reply, frozen=True, tag="failed"):
    """An order that produced no gradient, with the reason."""

    # The batches that the reason applies to.
    batches: NonEmpty[tuple[Count, ...]]
    reason: FailedReason
    detail: str = ""  # one line
    # Traceback of the exception.
    traceback: Annotated[str, Meta(max_length=MOST_TRACEBACK)] = ""


class WorkerLeaving(_Reply, frozen=True, tag="worker-leaving"):
    """A worker leaves. It begins no further gradient, so the leader reassigns its batches at once.

    `model` is that of the newest trigger that it received; its epoch names the leader.
    """

    # Control offsets of the batches whose gradient it still sends.
    finishing: tuple[Count, ...] = ()


GroupReply: TypeAlias = GradientReady | Reduced | Broken | StateReport | Stored
Reply: TypeAlias = Gradient | Failed | WorkerLeaving | GroupReply


SchemaKind: TypeAlias = Literal["AVRO", "PROTOBUF", "JSON"]


class Reference(msgspec.Struct, frozen=True):
    """A schema whose types another schema uses."""

    # Name under which the other schema imports it.
    name: str
    text: str


class Schema(msgspec.Struct, frozen=True):
    """Schema of the bytes of a record."""

    kind: SchemaKind
    text: str
    # Referenced schemas. Each follows those that it uses.
    references: tuple[Reference, ...] = ()


class SchemaFound(msgspec.Struct, frozen=True, tag="schema-found"):
    """Schema that a registry returned for an id. If a job has two, the first one counts."""

    # The schema id in the four bytes before a record.
    id: Annotated[int, Meta(ge=0, lt=2**32)]
    schema: Schema


@dataclass(frozen=True, slots=True)
class Tick:
    """Event of every state machine: the time of `due()` has come.

    A tick evaluates timeouts, so a shell passes in all received events first.
    """
