"""What a job's owner may choose about the protocol, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, floor, pi, sqrt
from typing import Literal, TypeAlias

from msgspec import UNSET, UnsetType

from common.core.messages import Synchrony


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of the stream side of a worker."""

    batch_size: int  # b
    # Batches announced and not settled; at least K, so that one survivor can fill a group.
    bound: int
    batch_linger_s: float | None = None  # close a partial batch after this; None: never (the paper)
    group_size: int = 1  # largest K: the addresses of so many batches must fit into one record
    min_batch: int = 1  # samples that a partial batch needs before the linger closes it
    # Offsets without a record at a log's end are claimed after this, unless a record follows: while
    # transactions come one after the other, their markers go with the next batch.
    end_linger_s: float = 1.0
    heartbeat_s: float = 0.3  # between signs of life; a beat's validity is a few of these
    leader_status_s: float = 0.1  # between looks at the leader's status while all goes well
    leader_status_hungry_s: float = 0.01  # while the worker waits for a position or for room


@dataclass(frozen=True, slots=True)
class Mode:
    """How rounds are made: as the job's own block says, or as one of its rules."""

    group_size: int  # K
    learning_rate: float | None = None  # None: a rule's is the job's, that one as the trainer's
    staleness: int = 0  # these three as in `Synchrony`, but
    staleness_per_worker: int = 0  # so much more for each worker that lives
    single_worker: bool = False
    local_rate: float = 0.0
    damped: bool = False  # a step by stale gradients is smaller: over 1 + how stale they are

    def synchrony(self, live: int = 0) -> Synchrony:
        """How its rounds are made while so many workers live."""
        staleness = self.staleness + self.staleness_per_worker * live
        return Synchrony(self.group_size, staleness, self.single_worker, self.local_rate)

    def makes(self, synchrony: Synchrony) -> bool:
        """Whether a round of its may have had this synchrony, however many workers lived."""
        staleness = synchrony.staleness if self.staleness_per_worker else self.staleness
        return synchrony == Synchrony(
            self.group_size, staleness, self.single_worker, self.local_rate
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """The mode of rounds that begin while something holds; of the two, one is given."""

    mode: Mode
    busy_below: float | None = None  # workers compute for less of their time: see `Switch.busy`
    workers_from: int | None = None  # so many workers live, or more

    def holds(self, live: int, busy: float) -> bool:
        """Whether it does while so many workers live, busy for this share of their time."""
        if self.workers_from is not None:
            return live >= self.workers_from
        return self.busy_below is not None and busy < self.busy_below


Stage: TypeAlias = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class SliceSettings:
    """How the weights are cut into slices, each with owners."""

    count: int  # of the slices
    owners: int = 2  # of each, where so many can own some
    servers: int | None = None  # how many own some, of spot machines; None: half of those
    stage: Stage | None = None  # None: by how many machines are of which tier


@dataclass(frozen=True, slots=True)
class AggregationSettings:
    """How workers add gradients up among themselves."""

    # That an update waits for a member which copies the weights; None: by their size.
    heal_s: float | None = None
    first_attempt_s: float | None = None  # that a collective may take, until one was measured
    offer_every_updates: int | None = None  # to evaluators; None: there are none
    slices: SliceSettings | None = None  # None: every member holds everything

    @staticmethod
    def of(slices: int | UnsetType) -> AggregationSettings | None:
        """Those of a leader of whom a `Lead` alone is known."""
        if slices is UNSET:
            return None
        return AggregationSettings(slices=SliceSettings(slices) if slices else None)


def slices_of(among: AggregationSettings | None) -> int | UnsetType:
    """Who holds the weights, as a `Lead` says it; UNSET: the coordinator."""
    if among is None:
        return UNSET
    return 0 if among.slices is None else among.slices.count


ScheduleKind: TypeAlias = Literal["constant", "step", "cosine", "inverse_sqrt"]


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """How the learning rate rises, and how it then falls, by how far the model is alone.

    A leader that takes over, and whoever replays, so finds the same. What counts is `progress`, in
    updates of the job's own K, and not the version: it says how many records were learned from, and
    `stop.updates` counts by it, too. Where rules or a tuner take another K, versions are other
    steps.
    """

    kind: ScheduleKind = "constant"
    warmup: int = 0  # updates in which it rises to all of it, in a line
    updates: int = 1  # n, from then on: to each step, to the cosine's end, to 1 / sqrt(2)
    factor: float = 0.1  # of a step
    final: float = 0.01  # below which no step and no cosine falls: at zero nothing is learned

    def share(self, progress: float) -> float:
        """Of the learning rate, above 0 and at most 1.

        Args:
            progress: Updates of the job's own K before this one.
        """
        warm = min((progress + 1) / self.warmup, 1.0) if self.warmup else 1.0
        return warm * self._decayed(max(progress - self.warmup, 0.0) / self.updates)

    def _decayed(self, time: float) -> float:
        match self.kind:
            case "constant":
                return 1.0
            case "step":
                return max(float(self.factor ** floor(time)), self.final)
            case "cosine":
                return self.final + (1 - self.final) * (1 + cos(pi * min(time, 1.0))) / 2
            case "inverse_sqrt":
                return 1 / sqrt(1 + time)


CONSTANT = RateSchedule()


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Settings of a job's coordinator; its owner may change some while it runs.

    Those are the modes, the workers' bound, and the deadline (`stop_at`).
    """

    mode: Mode  # of rounds that begin while no rule holds
    bound: int  # the workers' bound, to end a round that no worker can fill
    revision: int = 0  # of these settings: an update says under which it was made
    rules: tuple[Rule, ...] = ()  # the first that holds counts
    # Rounds for which a rule, or that none holds, is kept at least, and over which workers are seen
    # to be busy.
    rule_rounds: int = 20
    reduction: Literal["mean", "sum"] = "mean"  # what is done with the sum of an update
    # The learning rate is that of the job's own K: by another one, `tuning.rate_scale` of it.
    rate_by_group: bool = False
    schedule: RateSchedule = CONSTANT  # of the learning rate
    group_sizes: tuple[int, int] | None = None  # within which K is tuned while no rule holds
    group_linger_s: float | None = None  # apply fewer than K after this; None: never (the paper)
    on_missing: Literal["redispatch", "proceed"] = "redispatch"
    deadline_floor_s: float = 0.5  # shortest time that a worker gets for its part of a round
    max_failures: int = 5
    poison_in_a_row: int = 3  # poison batches without an update between them that hold the job
    poison_share: float = 0.1  # of the last hundred settled batches; more poison holds it, too
    stop_updates: int | None = None
    stop_loss: float | None = None  # on the mean prequential loss of recent updates
    stop_at: float | None = None  # on the clock that `now` comes from
    # Audit records on their way before the next round waits: 20 ms of rounds that take one.
    unread_audits: int = 20
    hot_every_s: float | None = 1.0
    hot_every_updates: int | None = None
    checkpoint_every_s: float | None = 300.0
    checkpoint_every_updates: int | None = 200
    checkpoint_every_control_records: int = 100_000  # what a takeover replays at most, about 20 MB
    lease_ttl_s: float = 1.0  # how long a leader is waited for that is frozen, or cut off
    leader_status_s: float = 0.1
    # Between two that say what was decided since: with every other look at the beats, in one
    # packet.
    leader_status_news_s: float = 0.05
    alive_s: float = 0.025  # between looks at the workers' beats: how late a death is noticed
    idle_s: float = 0.5  # instead of both, while no worker lives and no round is in flight
    aggregation: AggregationSettings | None = None  # None: the coordinator adds gradients up
    heartbeats_grace_s: float = 1.5  # all beats gone for this long: the workers are

    @property
    def slices(self) -> int | UnsetType:
        """Who is to hold the weights, as a `Lead` says it."""
        return slices_of(self.aggregation)
