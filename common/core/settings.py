"""Settings of the protocol that a job's owner may choose, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, floor, pi, sqrt
from typing import Literal, TypeAlias

from msgspec import UNSET, UnsetType

from common.core.messages import Synchrony


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker's reading side."""

    batch_size: int  # b
    # Maximum number of claimed and unsettled batches. At least K, so that a single worker can fill
    # a group.
    bound: int
    # Time after which a partial batch is closed. None for never, as in the paper.
    batch_linger_s: float | None = None
    # Largest K. The addresses of this number of batches must fit into one record.
    group_size: int = 1
    # Samples that a partial batch needs before the linger closes it.
    min_batch: int = 1
    # Time after which offsets without a record at a log's end are claimed. During consecutive
    # transactions no claim is needed, because the markers belong to the next batch.
    end_linger_s: float = 1.0
    # Interval of heartbeats. A heartbeat is valid for a few intervals.
    heartbeat_s: float = 0.3
    # Interval between polls of the leader's status while the worker reads normally.
    leader_status_s: float = 0.1
    # Interval while the worker waits for a position or for room.
    leader_status_hungry_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Mode:
    """Mode of a round, either the job's own or that of a rule."""

    group_size: int  # K
    # If None, a rule uses the job's rate, and the job's own mode uses the trainer's.
    learning_rate: float | None = None
    # `staleness`, `single_worker` and `local_rate` are as in `Synchrony`.
    staleness: int = 0
    # Additional staleness for each living worker.
    staleness_per_worker: int = 0
    single_worker: bool = False
    local_rate: float = 0.0
    # True if the step is divided by 1 + the staleness of its gradients.
    damped: bool = False

    def synchrony(self, live: int = 0) -> Synchrony:
        """Return the synchrony of its rounds while `live` workers are alive."""
        staleness = self.staleness + self.staleness_per_worker * live
        return Synchrony(self.group_size, staleness, self.single_worker, self.local_rate)

    def makes(self, synchrony: Synchrony) -> bool:
        """True if one of its rounds could have this synchrony, for any number of workers."""
        staleness = synchrony.staleness if self.staleness_per_worker else self.staleness
        return synchrony == Synchrony(
            self.group_size, staleness, self.single_worker, self.local_rate
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """Mode of the rounds that begin while a condition holds. Exactly one condition is set."""

    mode: Mode
    # Upper limit of the share of time that workers compute, see `ModeSelector.busy`.
    busy_below: float | None = None
    # Minimum number of living workers.
    workers_from: int | None = None

    def holds(self, live: int, busy: float) -> bool:
        """True if the condition holds.

        Args:
            live: Number of living workers.
            busy: Share of their time that they compute.
        """
        if self.workers_from is not None:
            return live >= self.workers_from
        return self.busy_below is not None and busy < self.busy_below


Stage: TypeAlias = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class SliceSettings:
    """Division of the weights into slices with owners."""

    count: int  # number of slices
    # Number of owners per slice, if enough machines can own some.
    owners: int = 2
    # Number of spot machines that own slices. None for half of them.
    servers: int | None = None
    # None to choose the stage by the tiers of the machines.
    stage: Stage | None = None


@dataclass(frozen=True, slots=True)
class AggregationSettings:
    """Settings for aggregation among the workers."""

    # Time that an update waits for a member that copies the weights. None to derive it from the
    # size of the weights.
    heal_s: float | None = None
    # Time limit of a collective until one was measured.
    first_attempt_s: float | None = None
    # Progress, in updates, from one version offered to evaluators to the next. None if no version
    # is offered.
    offer_every_updates: int | None = None
    # None if every member holds everything.
    slices: SliceSettings | None = None

    @staticmethod
    def of(slices: int | UnsetType) -> AggregationSettings | None:
        """Return the settings of a leader if only its `Lead.slices` is known."""
        if slices is UNSET:
            return None
        return AggregationSettings(slices=SliceSettings(slices) if slices else None)


def slices_of(among: AggregationSettings | None) -> int | UnsetType:
    """Return the layout of the weights as in `Lead.slices`. UNSET if the coordinator holds them."""
    if among is None:
        return UNSET
    return 0 if among.slices is None else among.slices.count


ScheduleKind: TypeAlias = Literal["constant", "step", "cosine", "inverse_sqrt"]


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """Schedule of the learning rate, as a function of the progress only.

    A new leader and a replay therefore use the same rates. Progress is counted in updates of the
    job's own K, as in `stop.updates`, because it measures the number of records learned from.
    Versions would not, if rules or a tuner change K.
    """

    kind: ScheduleKind = "constant"
    # Updates of linear growth to the full rate.
    warmup: int = 0
    # Number of updates after the warmup: from one step to the next, until the end of the cosine, or
    # until the share of `inverse_sqrt` is 1 / sqrt(2).
    updates: int = 1
    # Factor of a step.
    factor: float = 0.1
    # Lower limit of steps and cosine, because nothing is learned at rate 0.
    final: float = 0.01

    def share(self, progress: float) -> float:
        """Return the factor on the learning rate, above 0 and at most 1.

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
    """Settings of a job's coordinator.

    The owner may change the modes, the workers' bound and the deadline (`stop_at`) while the job
    runs.
    """

    # Mode of rounds that begin while no rule applies.
    mode: Mode
    # The workers' bound, see `WorkerSettings`.
    bound: int
    # Revision of the settings, which each update names.
    revision: int = 0
    # The first rule that holds applies.
    rules: tuple[Rule, ...] = ()
    # Minimum number of rounds between mode switches, and the window for measuring utilization.
    rule_rounds: int = 20
    # Operation on the gradients of an update.
    reduction: Literal["mean", "sum"] = "mean"
    # True if the learning rate is scaled by `modes.rate_scale` when K is not the job's own.
    rate_by_group: bool = False
    schedule: RateSchedule = CONSTANT
    # Bounds of K for the tuner, which runs while no rule applies.
    group_sizes: tuple[int, int] | None = None
    # Time after which fewer than K batches are applied. None for never, as in the paper.
    group_linger_s: float | None = None
    on_missing: Literal["redispatch", "proceed"] = "redispatch"
    # Minimum deadline of an order.
    deadline_floor_s: float = 0.5
    max_failures: int = 5
    # Consecutive poison batches without an update between them at which the job is held.
    poison_in_a_row: int = 3
    # Share of poison in the last hundred settled batches above which the job is held.
    poison_share: float = 0.1
    stop_updates: int | None = None
    # Limit of the mean prequential loss of recent updates.
    stop_loss: float | None = None
    # Deadline, on the clock of `now`.
    stop_at: float | None = None
    # Unread audit records at which no new round begins. At 1 ms per round, 20 ms of rounds.
    unread_audits: int = 20
    hot_every_s: float | None = 1.0
    hot_every_updates: int | None = None
    checkpoint_every_s: float | None = 300.0
    checkpoint_every_updates: int | None = 200
    # Limit of what a takeover replays, about 20 MB.
    checkpoint_every_control_records: int = 100_000
    # Time that a frozen leader keeps its lease.
    lease_ttl_s: float = 1.0
    leader_status_s: float = 0.1
    # Minimum interval between statuses with new decisions. It is twice `alive_s`, so that the
    # status is sent in one packet with every second poll of the heartbeats.
    leader_status_news_s: float = 0.05
    # Interval between polls of the heartbeats, which limits how late a death is noticed.
    alive_s: float = 0.025
    # Interval of polls and statuses while no worker lives and no round is in flight.
    idle_s: float = 0.5
    # None if the coordinator adds up the gradients.
    aggregation: AggregationSettings | None = None
    # Time without any heartbeat after which all workers count as dead.
    heartbeats_grace_s: float = 1.5

    @property
    def slices(self) -> int | UnsetType:
        """Requested layout of the weights, as in `Lead.slices`."""
        return slices_of(self.aggregation)
