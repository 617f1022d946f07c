"""The nouns of the protocol: every message and id that crosses a process.

Facts are named as facts (`BatchReady`), orders as orders (`UpdateTrigger`). What is decided travels
through Kafka and survives; the rest travels through Redis and may vanish: docs/explain/protocol.md.

No message, event or command refers to what refers to it, so the garbage collector need not follow
them (`gc=False`): a leader keeps and lets go of thousands.
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
Positions: TypeAlias = dict[Partition, Count]  # a position per partition: the next offset to read
Vector: TypeAlias = npt.NDArray[np.float32]  # (P + B,) parameters, then buffers
Wanted: TypeAlias = Literal["running", "paused", "stopped"]  # of a job, by its owner
ReadFrom: TypeAlias = Literal["", "earliest", "latest"]  # a topic that was created anew; empty: not


class ModelId(NamedTuple):
    """Weights by name: who made them and which version they are.

    A model is never named by its version alone: after a takeover two leaders may each have made a
    version 17, and a gradient of one is worth nothing to the other.
    """

    epoch: OrNone  # e, the number of the maker's leadership: see `Lead`
    version: Count  # J, updates applied so far


GENESIS = ModelId(-1, 0)  # the weights that the job's specification makes, before anyone led


CHANCES = 4096  # numbers of one millisecond


def unused_number(at_s: float, random_bits: int) -> int:
    """A number that nobody has used, nor ever will again, whatever a log loses of its tail.

    Offsets come again where records were lost. Of the numbers of one job two are the same only if
    they are drawn in the same millisecond, and then by a chance of 1 in 4096.

    Args:
        at_s: Now, in seconds since 1970.
        random_bits: 12 of them: from 0 to 4095.
    """
    return int(at_s * 1000) * CHANCES + random_bits


def drawn_at_s(number: int) -> float:
    """Time at which `unused_number` drew a number, in seconds since 1970."""
    return number // CHANCES / 1000


class TriggerId(NamedTuple):
    """Order of triggers, across leaders: an id never goes back, whoever wakes up."""

    epoch: OrNone
    number: Count  # counts this leader's triggers from 1


class TriggerStream(NamedTuple):
    """Where a leader posts its triggers, as its status says."""

    name: str = ""  # empty: the first one of the job
    epoch: int = -1  # the leader's; -1: no status was seen


class Member(NamedTuple):
    """A process among those that add gradients up: whoever comes back under a name is another."""

    worker: NonEmpty[WorkerId]
    life: Count  # random, at the process's start


class AttemptId(NamedTuple):
    """One attempt at an update; a membership makes at most one at each version.

    Collectives match by the order of calls: a second one could meet the first.
    """

    epoch: Count  # of its leader
    membership: Ordinal  # its number
    version: Ordinal  # J, after the update


# --- the control topic: what workers claim, of which logs --------------------------------------


class Skipped(NamedTuple):
    """Records inside a span that do not decode; every reader of the span leaves them out.

    A claim names those of one partition that fail for the same reason together: a thousand records
    that were written by one broken program take a few kilobytes.
    """

    topic: str
    partition: int
    offset: Count  # of the first
    reason: str
    # From each to the next: 8 and 13 follow offset 7 by gaps of 1 and 5.
    gaps: tuple[Ordinal, ...] = ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of all of them, increasing."""
        return tuple(accumulate((self.offset, *self.gaps)))

    @property
    def records(self) -> int:
        """How many they are."""
        return 1 + len(self.gaps)


class BatchReady(msgspec.Struct, frozen=True, gc=False, tag="batch-ready"):
    """Worker *n* holds a batch: the batch indicator S_B;j,n (Algorithm 1, line 8)."""

    worker: NonEmpty[WorkerId]
    address: Address  # where its records are; at most one span per partition
    samples: Count  # records that decoded: b, or fewer where a batch was closed early
    skipped: tuple[Skipped, ...] = ()
    first_arrival_s: Finite = 0.0  # Kafka timestamps of its records, for estimates of lambda_A
    last_arrival_s: Finite = 0.0


class SpanExpired(msgspec.Struct, frozen=True, gc=False, tag="span-expired"):
    """Retention deleted these records unread: claimed all the same, so that the rest goes on."""

    worker: NonEmpty[WorkerId]
    address: Address


Claim: TypeAlias = BatchReady | SpanExpired


class Opened(msgspec.Struct, frozen=True, gc=False, tag="opened"):
    """A leader begins a partition's next generation, or the first one of a partition that is new.

    Counts only if `after` is the generation in force, so that twice is once. A generation is a
    number that never comes again: claims of an earlier one can never fit into a later one.
    """

    partition: Partition
    after: Count | None  # the generation in force; None: the job has no such partition yet
    generation: Count
    topic_id: str  # Kafka's, in its text form; empty: not known
    start: Count  # where its records begin
    epoch: KafkaEpoch  # of the last record below `start`; -1: there is none


ControlRecord: TypeAlias = Claim | Opened
Openings: TypeAlias = dict[Partition, tuple[Opened, ...]]  # those that counted, oldest first
LogPositions: TypeAlias = dict[Partition, LogPosition]  # after the last record that is claimed


def topic_id_of(opened: Openings, span: Span) -> str:
    """Return Kafka's id of the topic that a span was claimed of; empty: not known."""
    openings = opened.get(span.place, ())
    return next((each.topic_id for each in openings if each.generation == span.generation), "")


class Batch(msgspec.Struct, frozen=True, gc=False):
    """An accepted batch: its identity is its control offset, its content its address."""

    offset: Count
    worker: NonEmpty[WorkerId]  # who announced it and probably still has it in memory
    address: Address
    samples: Count
    skipped: tuple[Skipped, ...] = ()

    def without_skipped(self) -> Batch:
        """The batch as an update names it: which records did not decode stands in its claim."""
        return msgspec.structs.replace(self, skipped=()) if self.skipped else self


# --- the updates topic: what leaders decide --------------------------------------------------


SynchronisationMode: TypeAlias = Literal["synchronous", "stale", "asynchronous", "averaging"]


class Synchrony(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Which batches make an update, and at which weights their gradients may be taken."""

    group_size: Ordinal  # K
    # s: how many updates may lie between the weights of a gradient and its own update; 0: none, the
    # paper's synchronous rule.
    staleness: Count = 0
    single_worker: bool = False  # all batches of a group go to one worker: nobody waits for anybody
    # At which rate a worker moves its own copy of the weights between the batches of one order
    # (model averaging); 0: it does not.
    local_rate: Rate = 0.0

    @property
    def mode(self) -> SynchronisationMode:
        """What a job file calls it."""
        if self.single_worker:
            return "asynchronous"
        if self.local_rate:
            return "averaging"
        return "stale" if self.staleness else "synchronous"


class Lead(msgspec.Struct, frozen=True, gc=False, tag="lead"):
    """A candidate wants to lead: counts only if `after` is the Lead in force (compare-and-set).

    Every update above `base` is taken back.
    """

    after: OrNone  # epoch of the Lead that the candidate found in force, -1 for none
    base: ModelId  # the update contained in the snapshot that it starts from
    candidate: NonEmpty[str]  # unique for each candidacy, to recognise one's own record
    epoch: Count  # `unused_number`, and above `after`
    # Wishes of the job's owner to go on after a loss, as this candidate counts them: one that is
    # above all before it lets snapshots be passed over of which Kafka lost records.
    after_loss: Count = 0
    loss: str = ""  # what was lost, if some were
    # Counts only if its base is the newest effective update: members hold the weights of no other.
    exact: bool | UnsetType = UNSET
    # Where members hold the weights: into how many slices with owners; 0: each holds everything.
    slices: Count | UnsetType = UNSET


class Traffic(NamedTuple):
    """Weights and gradients that a worker has sent and received, since it began to count."""

    life: Count  # random, drawn as the count began: counts of two lives are not one
    total: Count  # bytes, which never get fewer: a message that is lost, late or doubled loses none


class UpdateApplied(msgspec.Struct, frozen=True, gc=False, tag="update-applied"):
    """One model update and exactly the batches that made it (Algorithm 4, line 11)."""

    epoch: Count
    version: Ordinal  # J, after this update
    # K of them, unless `short` says why not; `without_skipped`.
    batches: NonEmpty[tuple[Batch, ...]]
    samples: Count
    loss: Finite  # mean per sample at the weights before the update (prequential)
    # Mean of each task metric over the samples that have a value of it, at the same weights as the
    # loss, and the `WINDOWED` metrics.
    metrics: dict[str, Finite] = {}
    short: str = ""  # why fewer than K batches: "linger", "missing", "quarantined", or ""
    revision: Count = 0  # of the job's settings, K among them, that it was made under
    gradient_s: Seconds = 0.0  # mean compute time of one batch's gradient
    skipped: dict[str, Count] = {}  # records of the batches that did not decode, by stream
    number: Count = 0  # of this leader's updates and quarantines, from 1; 0: an older program's
    # What follows is left out where nothing is to be said.
    synchrony: Synchrony | UnsetType = UNSET  # else K of its revision, at the version before
    base: Count | UnsetType = UNSET  # oldest version that its gradients are of; else the one before
    parts: tuple[Ordinal, ...] | UnsetType = UNSET  # so many of its batches, in order, were walked
    scale: Rate | UnsetType = UNSET  # of the learning rate, for this step; else 1
    rate: Rate | UnsetType = UNSET  # of this step, in all; else as the trainer was made
    # How many updates of the job's own K the model has come to with this one; else as many as J.
    equivalent: Rate | UnsetType = UNSET
    by: AttemptId | UnsetType = UNSET  # of members: whoever has prepared this one may apply it
    digest: Count | UnsetType = UNSET  # of what they prepared
    copies: Ordinal | UnsetType = UNSET  # how many of them have it whole
    # Bytes of weights and gradients that a worker sent and received for an update, as its makers
    # have counted since the update before.
    moved: Count | UnsetType = UNSET
    # By metric, how many samples have a value. Left out are metrics that all samples have one of.
    measured: dict[str, Ordinal] | UnsetType = UNSET

    def samples_with(self, metric: str) -> int:
        """Return the number of samples that a metric is the mean of."""
        return (self.measured or {}).get(metric, self.samples)

    @property
    def progress(self) -> float:
        """Updates of the job's own K: what its owner counts by, whatever K rules named."""
        return float(self.version) if self.equivalent is UNSET else self.equivalent

    @property
    def staleness(self) -> int:
        """How many updates lie between the oldest of its gradients and itself."""
        return 0 if self.base is UNSET else self.version - 1 - self.base

    @property
    def mode(self) -> SynchronisationMode:
        """How workers were synchronised for it."""
        return self.synchrony.mode if self.synchrony else "synchronous"


class Quarantined(msgspec.Struct, frozen=True, gc=False, tag="quarantined"):
    """A batch that cannot be used: settled without training. No Lead takes this back."""

    epoch: Count
    batch: Batch  # whole: if an operator takes it back, it waits again from this record alone
    reason: str  # "poison: ..." or "expired"
    number: Count = 0  # likewise

    @property
    def expired(self) -> bool:
        """Whether its records are gone, so that nobody can take it back."""
        return self.reason == "expired"


class Requeued(msgspec.Struct, frozen=True, gc=False, tag="requeued"):
    """An operator takes a batch out of quarantine: it waits for an update again.

    Counts if exactly this batch is quarantined as poison and was not replayed; no Lead takes it
    back. An operator's record has no epoch: it is of no leader.
    """

    batch: Batch
    by: NonEmpty[str]  # who asked, for people
    at_s: Finite  # since 1970


class Replayed(msgspec.Struct, frozen=True, gc=False, tag="replayed"):
    """An operator is about to produce a batch's records anew: its quarantine is final.

    Counts if exactly this batch is quarantined as poison and was not replayed before. Whoever wrote
    it produces the records only once it counts.
    """

    batch: Batch
    by: NonEmpty[str]  # likewise
    at_s: Finite  # likewise


class Evaluated(msgspec.Struct, frozen=True, gc=False, tag="evaluated"):
    """How good a version is; told by an evaluator, and of no effect on what counts.

    Several may tell the same; a version that a later Lead took back is worth nothing.
    """

    model: ModelId
    at_s: Finite  # since 1970
    records: Count  # of the test set; 0: there is none, and no `test`
    test: dict[str, Finite]  # loss and the task's metrics on the test set, mean per record
    # By stream, likewise, of some of its records that the model learned from next. A version may be
    # told in parts: the test first, streams as their records come.
    prequential: dict[str, dict[str, Finite]] = {}


class Drifted(msgspec.Struct, frozen=True, gc=False, tag="drifted"):
    """A stream's errors are no longer what they were; told as `Evaluated` is."""

    model: ModelId  # at which it was noticed
    at_s: Finite  # since 1970
    stream: NonEmpty[str]
    before: Finite  # mean error per record, of the window that was forgotten
    after: Finite  # of the window that is left


class CheckpointStored(msgspec.Struct, frozen=True, gc=False, tag="checkpoint-stored"):
    """A checkpoint was written to object storage, and its leader has read it back complete.

    Counts if its leader is in force and the version is in force. A Lead with an older base takes
    the record back. While the record counts, nobody starts below this checkpoint by mistake. The
    record has no number: it is as true after a lost record as before one.
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

# --- Redis: fast, and allowed to vanish ------------------------------------------------------


class GroupStatus(msgspec.Struct, frozen=True, gc=False):
    """Who adds gradients up among themselves, and who cannot."""

    members: tuple[WorkerId, ...]
    left_out: dict[WorkerId, str] = {}  # who lives and cannot be one, and why
    # Of AgileML, where slices have owners; 0: not known yet, or they have none.
    stage: Annotated[int, Meta(ge=0, le=3)] = 0
    owners: tuple[WorkerId, ...] = ()  # of slices
    # Who copies the weights while updates wait for it, and how many seconds they do at most.
    waits: dict[WorkerId, Rate] = {}


class LeaderStatus(msgspec.Struct, frozen=True, gc=False):
    """Where the leader stands: what a worker needs to find its place, in one value."""

    epoch: Count
    # Every control record below this offset has been decided.
    control_position: Count
    claimed: Positions  # below it, every record is of one accepted batch, or has expired
    # Control offset of the oldest unsettled batch; `control_position` when none is.
    oldest_unsettled: Count
    waiting: Count  # batches not yet settled
    live: Count  # workers that the leader sees
    settled: Positions  # the frontier that a checkpoint covers, for lag tools
    # Which stream of triggers is the leader's; empty: the first one.
    triggers: Annotated[str, Meta(max_length=64)] = ""
    opened: Openings = {}  # by partition; without any, it is of generation 0
    known: LogPositions = {}  # by partition, where a claim or an opening said it
    group: GroupStatus | UnsetType = UNSET  # where members hold the weights
    left_out: dict[WorkerId, str] = {}  # workers of another model, which get no work, and why

    def generation(self, partition: Partition) -> int:
        """Of a partition of the job: the one in force."""
        opened = self.opened.get(partition)
        return opened[-1].generation if opened else 0

    def topic_id(self, span: Span) -> str:
        """Return Kafka's id of the topic that a span was claimed of; empty: not known."""
        return topic_id_of(self.opened, span)

    def place(self, partition: Partition) -> LogPosition:
        """Where a reader begins: after the last record that is claimed, as far as that is known."""
        claimed = self.claimed[partition]
        known = self.known.get(partition, LogPosition(claimed))
        # Without its leader epoch nothing is gained by looking below; above lies what is forged.
        whole = known.epoch >= 0 and known.offset <= claimed
        return known if whole else LogPosition(claimed, known.topic_id)


class Assignment(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One worker's part of a trigger: one gradient over all these batches, sent as one message."""

    worker: NonEmpty[WorkerId]
    batches: tuple[Batch, ...]
    local_rate: Rate = 0.0  # see `Synchrony`
    squared: bool = False  # its gradient is to say how large it is


class Unsettled(NamedTuple):
    """What waits in a job, as its leader knows: how much more its workers may read."""

    control_position: Count  # every control record below this offset has been decided
    oldest_unsettled: Count  # control offset of a batch; `control_position` when there is none
    waiting: Count  # batches not yet settled
    live: Count  # workers that the leader sees


# Of which slices of the weights the optimizer's state is meant, ascending; left out: of them all.
Slices: TypeAlias = tuple[Count, ...] | UnsetType
Tier: TypeAlias = Literal["reliable", "spot"]


class Membership(msgspec.Struct, frozen=True, gc=False):
    """Who adds gradients up together, as the leader has decided: one process group is made of it.

    A later one of the same leader, or any of a later leader, ends it with what it attempts.
    """

    number: Count  # counts this leader's from 1; 0: none yet
    members: tuple[Member, ...] = ()  # in order of their ranks
    # By slice, the ranks of those who step it: the first sends its weights to all, the others hold
    # its optimizer state as well. Left out: each member holds and steps everything.
    owners: tuple[tuple[Count, ...], ...] | UnsetType = UNSET

    def owned(self, member: Member) -> Slices:
        """Slices of which a member will hold the optimizer's state after the next step."""
        if self.owners is UNSET:
            return UNSET
        rank = self.members.index(member) if member in self.members else -1
        return tuple(number for number, ranks in enumerate(self.owners) if rank in ranks)


class Reduce(msgspec.Struct, frozen=True, gc=False):
    """All members enter at once: each adds these of its gradients, all have the sum of all."""

    attempt: AttemptId
    parts: tuple[tuple[tuple[Count, ...], ...], ...]  # by rank: batches of each gradient message
    samples: Ordinal  # of all gradients
    local_rate: Rate = 0.0  # all were taken on a walk at this rate
    learning_rate: Rate | None = None  # of the step, without its scale; None: the job's
    scale: Rate = 1.0
    measured: bool = False  # they are to say how large the sum is


class Copy(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A member takes over all that another holds."""

    member: Member
    source: Member | None = None  # None: from storage, or made by the specification
    slices: Slices = UNSET  # whose optimizer state comes with the weights; left out: all of it


class GroupOrders(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What members of a group are told by each trigger, beside what they are to compute."""

    made: ModelId  # the version of the trigger's model, as its audit record names it
    membership: Membership
    by: AttemptId | None = None  # that made the version: its result may be applied
    origin: Count = 0  # of version 0: the life of the member that made its weights; 0: nobody yet
    reduce: Reduce | None = None
    copies: tuple[Copy, ...] = ()
    report: bool = False  # all are to say what they hold
    hot: Member | None = None  # is to make the hot snapshot of this version whole
    offer: Member | None = None  # is to offer this version to evaluators
    stores: tuple[Member, ...] = ()  # are to store a version: where slices have owners, by slice
    stores_of: ModelId | UnsetType = UNSET  # which; left out: this one
    # Of all who are named above: where others reach them.
    addresses: dict[NonEmpty[WorkerId], NonEmpty[HostPort]] = {}
    slices: Count = 0  # as the leader's `Lead` says

    def named(self) -> Iterator[Member]:
        """Who is, or is to do something."""
        yield from self.membership.members
        for copy in self.copies:
            yield copy.member
            if copy.source is not None:
                yield copy.source
        yield from self.stores
        yield from (each for each in (self.hot, self.offer) if each is not None)


class UpdateTrigger(msgspec.Struct, frozen=True, gc=False):
    """Compute these gradients at this model or a later one (S_C;j,n; Algorithm 4, line 5)."""

    id: TriggerId
    model: ModelId
    orders: tuple[Assignment, ...]
    weights: bytes | None = None  # a small model travels inside; a large one is fetched by its id
    reply_to: str = ""  # the replica that leads: where gradients go
    unsettled: Unsettled | None = None  # as it is posted; None: it does not say
    # Orders at versions below are void: nobody waits for them any more; left out: the model's.
    awaits: Count | UnsetType = UNSET
    # Whoever has the model `since` overwrites these of its numbers, sparse as the wire writes them.
    since: ModelId | UnsetType = UNSET
    changes: bytes | UnsetType = UNSET
    group: GroupOrders | UnsetType = UNSET  # where members hold the weights
    # Digest of the layout of the leader's model: names, shapes, types and order of its tensors. A
    # worker whose model has another one computes nothing. Unset where members hold the weights.
    digest: str | UnsetType = UNSET

    @property
    def slices(self) -> int | UnsetType:
        """Who holds the weights, as its leader's `Lead` says."""
        return UNSET if self.group is UNSET else self.group.slices

    def continues(self, model: ModelId | None) -> bool:
        """Whether its changes make its model of this one."""
        return model is not None and self.since == model


class MetricSum(NamedTuple):
    """A metric summed over the samples that have a value of it."""

    total: Sum
    samples: Ordinal  # at least 1


class _Reply(msgspec.Struct, frozen=True, gc=False):
    """The fields of every reply."""

    worker: NonEmpty[WorkerId]
    model: ModelId  # that it is about


class _Computed(_Reply, frozen=True):
    """The fields of a gradient, wherever its vector is."""

    batches: NonEmpty[tuple[Count, ...]]  # control offsets
    samples: Count
    loss_sum: Sum  # summed over the samples
    metric_sums: dict[str, MetricSum]  # without the metrics that no sample has a value of
    seconds: Seconds  # compute time, for the deadline of later rounds
    # At which the copy was moved between its batches; left out: it was not.
    local_rate: Rate | UnsetType = UNSET
    # |its (P,) gradient|^2, where the order asks for it
    square: Square | UnsetType = UNSET
    scores: tuple[Count, ...] | UnsetType = UNSET  # of a task of two classes: `common.core.scores`
    traffic: Traffic | UnsetType = UNSET  # of its worker, before this message


class Gradient(_Computed, frozen=True, tag="gradient"):
    """The gradient of one order (g_J,k summed over its batches; Algorithm 2, line 7).

    Its model is the one that it was taken at. The vector travels beside the message, as raw bytes:
    see `common.wire.messages`.
    """

    # Vector or SparseVector: (P,) gradient summed over the samples, then (B,) buffers x samples
    vector: Any = None


class GradientReady(_Computed, frozen=True, kw_only=True, tag="gradient-ready"):
    """The gradient of one order, which stays where it was computed: `Gradient` without vector."""

    life: Count  # see `Member`


class _MemberReply(_Reply, frozen=True):
    """The fields of what a member says."""

    life: Count  # see `Member`


class Reduced(_MemberReply, frozen=True, tag="reduced"):
    """A member has the whole result of an attempt; it applies that once the audit names it.

    Its model is the one that the result is to be applied to.
    """

    attempt: AttemptId
    digest: Count  # of the result, and of the weights that it is to be applied to
    square: Square | UnsetType = UNSET  # |sum of gradients|^2, where that is asked for


BrokenReason: TypeAlias = Literal[
    "left",  # another member had left it, or could not be reached, or it was over
    "lacks",  # it does not hold the version, or not all gradients that it was to add
    "not_finite",  # the sum is not finite: it would be so again
]


class Broken(_MemberReply, frozen=True, tag="broken"):
    """A member has left an attempt, and can take no further part in its membership."""

    attempt: AttemptId
    reason: BrokenReason = "left"
    unreachable: tuple[Member, ...] = ()  # whom it could not reach


class StateReport(_MemberReply, frozen=True, tag="state-report"):
    """What a member holds, whole; an older word never undoes a newer.

    Its model is that of the newest trigger that the member heard.
    """

    last_trigger: TriggerId  # that trigger
    made: ModelId | None  # the version that it holds, as its audit record names it; None: none
    origin: Count = 0  # likewise of version 0: see `GroupOrders`
    unreachable: tuple[Member, ...] = ()  # of whom it could not copy
    address: HostPort = ""  # where others reach it: host:port
    numbers: Count = 0  # of its weights and buffers: P + B
    slices: Slices = UNSET  # whose optimizer state it holds at that version
    tier: Tier | UnsetType = UNSET  # of its machine; left out: spot, or it matters to nobody
    began_s: Time | UnsetType = UNSET  # when its process did, since 1970
    room: Count | UnsetType = UNSET  # slices whose optimizer state it has memory for; left out: all


class Stored(_MemberReply, frozen=True, tag="stored"):
    """A member has stored a version: whoever finds it there can begin with it."""

    made: ModelId
    slices: Slices = UNSET  # of it; none: it was asked for some, and has them no more


FailedReason: TypeAlias = Literal[
    "model_missing",  # the weights were gone from Redis: publish again
    "unreadable",  # Kafka did not give the records now: somebody else may get them
    "expired",  # Kafka will never give them again: quarantine
    "raised",  # the task raised on this data, or it does not decode for this worker
    "not_finite",  # loss or gradient is not finite
    "task",  # the task is wrong whatever the data: the job is held, no batch is to blame
]
MOST_TRACEBACK = 4000  # characters of a traceback that a worker sends: its end says where


class Failed(_Reply, frozen=True, tag="failed"):
    """An order that gave no gradient, and why."""

    batches: NonEmpty[tuple[Count, ...]]  # the batches the reason is about
    reason: FailedReason
    detail: str = ""  # one line
    traceback: Annotated[str, Meta(max_length=MOST_TRACEBACK)] = ""  # of the exception


class WorkerLeaving(_Reply, frozen=True, tag="worker-leaving"):
    """The worker leaves: it begins no further gradient, and others may have its batches at once.

    Its model is that of the newest trigger that it heard; the epoch says which leader is meant.
    """

    finishing: tuple[Count, ...] = ()  # control offsets that it still sends a gradient of


GroupReply: TypeAlias = GradientReady | Reduced | Broken | StateReport | Stored
Reply: TypeAlias = Gradient | Failed | WorkerLeaving | GroupReply


SchemaKind: TypeAlias = Literal["AVRO", "PROTOBUF", "JSON"]


class Reference(msgspec.Struct, frozen=True):
    """A schema that another schema uses types of."""

    name: str  # by which that one imports it
    text: str


class Schema(msgspec.Struct, frozen=True):
    """What a record's bytes mean."""

    kind: SchemaKind
    text: str
    references: tuple[Reference, ...] = ()  # each behind those that it uses


class SchemaFound(msgspec.Struct, frozen=True, tag="schema-found"):
    """What a registry had under an id when a worker of a job met it; of two, the first counts."""

    # In the four bytes before a record.
    id: Annotated[int, Meta(ge=0, lt=2**32)]
    schema: Schema


@dataclass(frozen=True, slots=True)
class Tick:
    """Event of every state machine: nothing happened, but `due()` has come.

    A tick judges what did not happen in time, so a shell hands in all that it has heard first.
    """
