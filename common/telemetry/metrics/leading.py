"""What a coordinator tells of one job that it takes part in, and of itself as the job's leader."""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from prometheus_client import Counter, Histogram

from common.telemetry.metrics import catalogue

if TYPE_CHECKING:
    from common.core.messages import Synchrony, UpdateApplied
    from common.telemetry.metrics.meters import Meters
    from common.telemetry.metrics.metric import Kind, Metric

Stage: TypeAlias = Literal["wait", "gradients", "apply"]
Refused: TypeAlias = Literal["gradient", "failed", "farewell", "malformed"]

SHORT = ("linger", "missing", "quarantined")
STAGES: tuple[Stage, ...] = ("wait", "gradients", "apply")
REFUSED: tuple[Refused, ...] = ("gradient", "failed", "farewell", "malformed")
QUARANTINED = ("poison", "expired")
# A worker names a task's metrics in its gradients, and each name is a series: a ghost must not
# make them many. The tasks that we ship have one.
MOST_METRICS = 16
MOST_WORKERS = 100  # likewise; who has fewest batches is left out
RECENT_GRADIENTS = 1000  # over which workers are compared: ten rounds of a hundred workers


class RecentGradient(NamedTuple):
    """One that counted."""

    worker: str
    batches: int
    seconds: float


class WorkerFigures(NamedTuple):
    """What one worker does, of late."""

    batches_per_s: float  # while it computes
    share: float  # of all batches


def by_worker(gradients: Iterable[RecentGradient]) -> dict[str, WorkerFigures]:
    """Compare those workers who had most batches."""
    batches, seconds = Counts[str](), dict[str, float]()
    for each in gradients:
        batches[each.worker] += each.batches
        seconds[each.worker] = seconds.get(each.worker, 0.0) + each.seconds
    return {
        worker: WorkerFigures(count / max(seconds[worker], 1e-9), count / batches.total())
        for worker, count in batches.most_common(MOST_WORKERS)
    }


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """What the ends of a job's logs say; None where it is not known."""

    records: Mapping[str, int]  # arrived since the job's first position, by stream
    lag: Mapping[str, int]  # of those, claimed by nobody yet
    arrivals_per_s: float | None = None
    sufficient: float | None = None  # Proposition 1: stable below 1
    necessary: float | None = None  # unstable from 1 on


@dataclass(slots=True)
class Leading:
    """What is true of a leader now; nobody reads it any more once it leads no longer."""

    epoch: int
    version: int
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the newest update
    waiting: int | None = None
    live: int | None = None
    synchrony: Synchrony | None = None  # of the newest update
    staleness: int | None = None  # likewise
    learning_rate: float | None = None  # likewise
    busy: float | None = None  # share of their time that workers computed
    group_size: int | None = None  # K of an update that would begin now
    members: int | None = None  # that add up among themselves
    left_out: int | None = None  # workers that cannot be members
    gradients: deque[RecentGradient] = field(default_factory=lambda: deque(maxlen=RECENT_GRADIENTS))
    streams: StreamFigures | None = None


def lines(kind: Kind) -> list[Metric]:
    """What coordinators alone tell."""
    own = ("coordinator",)
    return [line for line in catalogue.CATALOGUE if (line.kind, line.told_by) == (kind, own)]


class Instruments:
    """The counters and histograms of a process, made from their lines of the catalogue."""

    def __init__(self, meters: Meters) -> None:
        self._counters = {line: meters.counter(line) for line in lines("counter")}
        self._histograms = {line: meters.histogram(line) for line in lines("histogram")}
        self._of = dict[str, list[tuple[Counter | Histogram, tuple[str, ...]]]]()

    def counter(self, line: Metric, job: str, *more: str) -> Counter:
        """That of a job, from now on with a zero to count from."""
        counter, labels = self._counters[line], (job, *more)
        self._of.setdefault(job, []).append((counter, labels))
        return counter.labels(*labels)

    def histogram(self, line: Metric, job: str, *more: str) -> Histogram:
        """That of a job."""
        histogram, labels = self._histograms[line], (job, *more)
        self._of.setdefault(job, []).append((histogram, labels))
        return histogram.labels(*labels)

    def forget(self, job: str) -> None:
        """Tell nothing of a job any more."""
        for instrument, labels in self._of.pop(job, ()):
            instrument.remove(*labels)


class JobMetrics:
    """One job's; belongs to its deciding thread, but for what is said to be for any."""

    def __init__(self, job: str, instruments: Instruments) -> None:
        self.leading: Leading | None = None
        self.held = False
        self.paused = False
        counter, histogram = instruments.counter, instruments.histogram
        self._takeovers = counter(catalogue.TAKEOVERS, job)
        self._updates = counter(catalogue.UPDATES, job)
        self._batches = counter(catalogue.UPDATE_BATCHES, job)
        self._records = counter(catalogue.UPDATE_RECORDS, job)
        self._switches = counter(catalogue.SWITCHES, job)
        self._short = {why: counter(catalogue.SHORT_UPDATES, job, why) for why in SHORT}
        self._stages = {stage: histogram(catalogue.ROUND_STAGE, job, stage) for stage in STAGES}
        self._staleness = {
            counted: histogram(catalogue.STALENESS, job, "yes" if counted else "no")
            for counted in (True, False)
        }
        self._ages = histogram(catalogue.RECORD_AGE, job)
        self._accepted = counter(catalogue.CLAIMS_ACCEPTED, job)
        self._refused_claims = counter(catalogue.CLAIMS_REFUSED, job)
        self._refused = {kind: counter(catalogue.REPLIES_REFUSED, job, kind) for kind in REFUSED}
        self._redispatched = counter(catalogue.REDISPATCHED, job)
        self._quarantined = {
            reason: counter(catalogue.QUARANTINED, job, reason) for reason in QUARANTINED
        }
        self._dead_letters = counter(catalogue.DEAD_LETTERS, job)
        self._memberships = counter(catalogue.MEMBERSHIPS, job)
        self._attempts_broken = counter(catalogue.ATTEMPTS_BROKEN, job)
        self._collectives = histogram(catalogue.COLLECTIVE, job)
        self._repairs = histogram(catalogue.REPAIR, job)

    def begins_to_lead(self, epoch: int, version: int, loss: float | None) -> Leading:
        """It leads from a version on, whose own loss is told where it is known."""
        self._takeovers.inc()
        self.leading = Leading(epoch, version, loss)
        return self.leading

    def leads_no_longer(self) -> None:
        """Another does, or nobody."""
        self.leading = None

    def updated(self, update: UpdateApplied, synchrony: Synchrony, ages_s: Iterable[float]) -> None:
        """An update was applied.

        Args:
            update: Which.
            synchrony: How it was made.
            ages_s: Of the newest record of each of its batches, where that is known.
        """
        self._updates.inc()
        self._batches.inc(len(update.batches))
        self._records.inc(update.samples)
        if update.short in self._short:
            self._short[update.short].inc()
        for age_s in ages_s:
            self._ages.observe(age_s)
        if self.leading is not None:
            self.leading.version = update.version
            self.leading.loss = update.loss
            before = self.leading.synchrony
            self._switches.inc(before is not None and before.mode != synchrony.mode)
            self.leading.synchrony, self.leading.staleness = synchrony, update.staleness
            self.leading.learning_rate = update.rate or None
            names = sorted(update.metrics)[:MOST_METRICS]
            self.leading.metrics = {name: update.metrics[name] for name in names}

    def stands(self, waiting: int, live: int) -> None:
        """So many batches wait, and so many workers live."""
        if self.leading is not None:
            self.leading.waiting, self.leading.live = waiting, live

    def membership_changed(self, changed: bool) -> None:  # noqa: FBT001 -- that is all it says
        """Members were named, others than before or not."""
        self._memberships.inc(changed)

    def attempt_broke(self) -> None:
        """Members did not come to the end of adding an update up."""
        self._attempts_broken.inc()

    def added_up(self, seconds: float, repaired_s: float | None) -> None:
        """They did.

        Args:
            seconds: Since they were told to.
            repaired_s: Since an attempt before that one was given up; None: there was none.
        """
        self._collectives.observe(max(seconds, 0.0))
        if repaired_s is not None:
            self._repairs.observe(max(repaired_s, 0.0))

    def stage_took(self, stage: Stage, seconds: float) -> None:
        """A part of a round is over."""
        self._stages[stage].observe(seconds)

    def gradient_came(self, versions: int, *, counted: bool) -> None:
        """A gradient came that was so many updates older than the model."""
        self._staleness[counted].observe(versions)

    def claims_decided(self, accepted: int, refused: int) -> None:
        """So many batches count, so many claims are without effect."""
        self._accepted.inc(accepted)
        self._refused_claims.inc(refused)

    def refused(self, kind: Refused, messages: int = 1) -> None:
        """What workers sent does not count; for any thread."""
        self._refused[kind].inc(messages)

    def redispatched(self, batches: int) -> None:
        """So many are asked of somebody else."""
        self._redispatched.inc(batches)

    def quarantined(self, reason: str) -> None:
        """A batch is given up: "expired", or "poison: ..." with what happened."""
        kind = reason.partition(":")[0]
        self._quarantined[kind if kind in self._quarantined else "poison"].inc()

    def dead_lettered(self, records: int) -> None:
        """So many were written to dead-letter topics; for any thread."""
        self._dead_letters.inc(records)
