"""Estimates from a job's topics: updates made, arrivals, gradient times, machines.

Every estimate has an uncertainty. Before the first batches, arrivals are unknown. They are assumed
to be twice what the deadline requires, so that a policy neither gives up nor buys too much in the
seconds until they are known. A gradient is assumed to take so long that half of the workers just
keep up, because a user who requests more of them has outages in mind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import UNSET

from common.core.history import History
from common.core.job_completion import LOSS_WINDOW
from common.core.messages import BatchReady, Lead, ModelId, Opened, UpdateApplied
from common.spot.policies.policy import ON_DEMAND
from common.spot.provisioning.autoscale import FleetSize, RoundTimes, workers_wanted
from common.spot.provisioning.availability import Availability
from common.spot.provisioning.records import (
    Ended,
    EstimateRecord,
    Left,
    PlanRecord,
    SlotAssigned,
    Started,
)
from common.spot.provisioning.startup_times import StartUps
from common.spot.theory.capacity import HEADROOM
from common.spot.theory.estimates import Estimate, pooled_prior, rate_from_counts
from common.spot.theory.losses import LossTally
from common.spot.theory.speeds import SpeedTally
from common.spot.theory.streams import StreamTally
from common.spot.theory.tallies import GradientTally, TransferTally
from common.spot.theory.work import Pool, Rates, gb_per_hour

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, ControlRecord
    from common.core.spans import Partition
    from common.spot.provisioning.events import HeartbeatsSeen
    from common.spot.provisioning.fleet_ledger import FleetLedger, Instance
    from common.spot.provisioning.settings import ProvisionerSettings

# Probability of intervals that users see.
INTERVAL = 0.9
# Largest relative standard deviation of an estimate that is no guess.
SURE = 0.2
# Ratio of assumed arrivals to those that the deadline requires, before any batch.
AHEAD = 2.0
# Mean number of batches per slot before arrivals are estimated, because the first batches come from
# a few streams only.
BATCHES = 2
# Machines change. The updates of a minute are enough for the mean.
GRADIENT_HALF_LIFE_S = 600.0
# Arrivals drift. At a record per second, the estimate is still good to 3 %.
RATE_HALF_LIFE_S = 600.0
# If the records of more updates than this have arrived, the next update need not wait for records.
BACKLOG = 2
# Time after which a dead worker's partition has another worker.
ORPHANED_S = 60.0
# Number of versions that are kept for rollbacks, which go back by seconds only.
VERSIONS_KEPT = 1000
# A pool's measured speed is used if it differs by more than this share from the market file's.
# Smaller differences are noise, and would make a policy order and release machines repeatedly.
OTHER_SPEED = 0.1
# Growth of the number of updates that justifies another fit, which takes a tenth of a second.
FIT_AGAIN = 1.05


class _Made(NamedTuple):
    """State of a job after an update."""

    version: int = 0
    # Samples in all updates so far.
    samples: int = 0
    # Value of `UpdateApplied.progress`, as for all progress below.
    progress: float = 0.0


class _LossFit(NamedTuple):
    loss: float
    # Updates at the time of the fit.
    made: float
    # Version at which the curve reaches the loss; None if unknown.
    version: float | None


class Estimator:
    """All inputs of a policy that are not in the job's settings.

    Attributes:
        settings: May be replaced when the job's settings change.
        start_ups: Start-up times of machines, by pool.
    """

    def __init__(self, settings: ProvisionerSettings) -> None:
        self.settings = settings
        self.start_ups = StartUps()
        self._history = History()
        # Last updates.
        self._made = [_Made()]
        self._gradients = GradientTally(GRADIENT_HALF_LIFE_S)
        self._timed = False
        self._transfer = TransferTally()
        self._losses = LossTally()
        self._loss_fit: _LossFit | None = None
        # Arrivals by partition, under `reassign`.
        self._by_place: dict[Partition, StreamTally] = {}
        # Time of the last batch of each partition, under `reassign`.
        self._last_batch_s: dict[Partition, float] = {}
        # Arrivals by slot, under `hold`.
        self._by_slot: dict[int, StreamTally] = {}
        self._ends: dict[Partition, int] = {}
        self._batches = 0
        # Records so far, by the streams' ends.
        self._arrived: int | None = None
        self._availability = Availability()
        # Number of serving machines; under `hold`, those with a slot.
        self._running = 0
        # Pool of each machine that ever ran, by the name of its worker.
        self._pools: dict[str, str] = {}
        self._tally_of_speeds: tuple[tuple[Pool, ...], SpeedTally] | None = None
        self._round_times = RoundTimes()
        # K of the last update.
        self._group_size = settings.group_size
        # Number of serving machines by slot.
        self._on: dict[int, int] = {}
        self._slots = {f"{settings.job}-w{slot}": slot for slot in range(settings.workers)}

    # --- input ---------------------------------------------------------------------------------

    def claims(self, claims: Iterable[ControlRecord | None], now_s: float) -> None:
        """Add batch indicators, in the order of the control topic.

        As in the coordinator, an indicator is skipped if it begins below the end of an earlier one.
        """
        for claim in claims:
            if claim is None or isinstance(claim, Opened):
                continue
            if any(span.start < self._ends.get(span.place, 0) for span in claim.address):
                continue
            self._ends |= {span.place: span.end for span in claim.address}
            if isinstance(claim, BatchReady) and (claim.samples or claim.skipped):
                # Other claims have no records: they are at the end of a log.
                self._batch(claim, now_s)

    def streams(self, records: int) -> None:
        """Set the number of records in the streams since the job began."""
        self._arrived = records

    def updates(self, records: Iterable[tuple[int, AuditRecord | None]], now_s: float) -> None:
        """Add the audit trail, from its beginning on."""
        for offset, record in records:
            if offset < self._history.position or not self._history.feed(offset, record):
                continue
            if isinstance(record, UpdateApplied):
                samples = self.samples + record.samples
                self._made.append(_Made(record.version, samples, record.progress))
                del self._made[:-VERSIONS_KEPT]
                self._losses.add(record.progress, record.loss)
                synchrony = record.synchrony
                self._group_size = (
                    self.settings.group_size if synchrony is UNSET else synchrony.group_size
                )
                if record.moved is not UNSET:
                    share = self._group_size / self.settings.group_size
                    self._transfer.add(record.progress, record.moved, share)
                batches = len(record.batches)
                if record.gradient_s > 0 and batches:
                    self._timed = True
                    made = self._made_by_pool(record)
                    # mu_C is that of the first pool: a machine of speed 2 takes half of it.
                    relative = float((made / self._speeds()).sum()) / batches
                    self._gradients.add(now_s, record.gradient_s * batches / relative, batches)
                    self._speed_tally.add(now_s, made.tolist(), record.gradient_s)
            elif isinstance(record, Lead):
                self._take_back(record.base)
            self._history.forget_before(self._made[0].version)
        if self.settings.balanced:
            self._round_times.observe(
                FleetSize(self._running, self._group_size),
                self.version,
                float(self.gradient(now_s).value),
                now_s,
                backlog=(self.waiting or 0) > BACKLOG,
            )

    def fleet(self, record: PlanRecord, ledger: FleetLedger) -> None:
        """Add a valid record of the plans topic, after the ledger has folded it."""
        instance = None
        if isinstance(record, (Started, SlotAssigned, Left, Ended)):
            instance = ledger.machines[record.launch]
            self._on_instance(record, instance)
        self._availability.feed(record, instance)

    def workers_seen(self, seen: HeartbeatsSeen, ledger: FleetLedger) -> None:
        """Add the current heartbeats."""
        self.start_ups.unique = self.settings.on_preemption == "reassign"
        self.start_ups.workers_seen(seen, ledger.running, self.settings.grace_s)

    def unwanted(self, at_s: float) -> None:
        """Stop counting missing machines as unavailable, because the job is paused or over."""
        self._availability.unwanted(at_s)

    # --- estimates -----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """J, the number of updates so far."""
        return self._history.head.version

    @property
    def progress(self) -> float:
        """Number of updates so far in units of the job's own K, as its stop rule counts them."""
        return self._made[-1].progress

    @property
    def samples(self) -> int:
        """Number of samples in all updates so far."""
        return self._made[-1].samples

    @property
    def waiting(self) -> float | None:
        """Number of updates whose records have arrived; None if unknown."""
        if self._arrived is None:
            return None
        return max(self._arrived - self.samples, 0) / (
            self.settings.group_size * self.settings.batch_size
        )

    def arrivals(self, now_s: float) -> Estimate:
        """Estimate the sum of all lambda_A,n; the standard deviation of a guess is its value."""
        each = self._each(now_s)
        if each is None:
            guess_per_s = self._guess_per_s()
            return Estimate(guess_per_s, guess_per_s, "gamma")
        value = float(np.sum(each.value))
        return Estimate(value, float(np.sqrt(np.sum(np.square(each.std)))), "gamma")

    def arrivals_known(self, now_s: float) -> bool:
        """Return True if arrivals are measured, not guessed."""
        return self._each(now_s) is not None and surely(self.arrivals(now_s))

    def rates_per_s(self, now_s: float) -> Rates:
        """Return (N_tot,) lambda_A,n of each slot under `hold`, else even shares."""
        each = self._each(now_s)
        if each is not None and np.ndim(each.value):
            return np.asarray(each.value)
        workers = self.settings.workers
        return np.full(workers, float(self.arrivals(now_s).value) / workers)

    def gradient(self, now_s: float) -> Estimate:
        """Estimate mu_C; before any update, the time with which half of the workers keep up."""
        if self._timed:
            mean = self._gradients.mean(now_s)
            std = float(mean.std)
            return Estimate(mean.value, std if math.isfinite(std) else float(mean.value), "log")
        settings = self.settings
        interval_s = settings.group_size * settings.batch_size / float(self.arrivals(now_s).value)
        rounds = math.ceil(settings.group_size / max(settings.workers // 2, 1))
        guess_s = interval_s / HEADROOM / rounds
        return Estimate(guess_s, guess_s, "log")

    def workers_wanted(self, most: int, now_s: float) -> int:
        """Return the number of workers that are worth their cost, at most `most`.

        If it is unknown, return the current number.
        """
        now, group_size = self.settings.workers, self._group_size
        update_s = self._round_times.update_s(group_size, float(self.gradient(now_s).value))
        if update_s is None:
            return min(now, most)
        known, arrivals = self.arrivals_known(now_s), float(self.arrivals(now_s).value)
        updates_per_s = arrivals / group_size / self.settings.batch_size if known else 0.0
        return workers_wanted(update_s, now, most, updates_per_s)

    def updates_to_loss(self) -> float | None:
        """Estimate the number of updates until the job stops at its loss.

        None if it has no such stop, or if the losses so far are too few.
        """
        loss, made, fit = self.settings.loss, self.progress, self._loss_fit
        if loss is None:
            return None
        if fit is None or fit.loss != loss or made >= FIT_AGAIN * fit.made:
            # The seed makes the plan the same in every process.
            rng = np.random.default_rng(self.version)
            fit = self._loss_fit = _LossFit(loss, made, self._losses.version_at(loss, SURE, rng))
        if fit.version is None:
            return None
        # The job stops at a mean of `LOSS_WINDOW` losses, which lags behind the curve.
        return max(fit.version - made, 0.0) + LOSS_WINDOW / 2

    @property
    def update_mb(self) -> float:
        """The megabytes that a machine moves for an update: measured, else by a formula."""
        measured = self._transfer.mean()
        return self.settings.update_mb if measured is None else float(measured.value)

    def pools(self, usd_per_hour: Mapping[str, float], now_s: float) -> tuple[Pool, ...]:
        """Return the market's pools with current prices and observed availability and start-ups."""
        settings = self.settings
        per_update = settings.group_size * settings.batch_size
        updates_per_s = float(self.arrivals(now_s).value) / per_update
        moved = gb_per_hour(self.update_mb, updates_per_s)
        on_demand, *spot = (
            replace(
                pool,
                usd_per_hour=usd_per_hour.get(pool.name, pool.usd_per_hour),
                gb_per_hour=moved if pool.transfer_usd_per_gb else 0.0,
                start_up_s=self.start_ups.start_up_s(pool),
            )
            for pool in settings.pools
        )
        speeds = self._speeds().tolist()
        seen = (
            replace(
                pool,
                speed=speed,
                availability=float(self._availability.availability(pool, now_s).value),
                cycle_s=float(self._availability.cycle(pool, now_s).value),
            )
            for pool, speed in zip(spot, speeds[ON_DEMAND + 1 :], strict=True)
        )
        return (on_demand, *seen)

    def believed(self, now_s: float) -> dict[str, EstimateRecord]:
        """Return all estimates by name, with their 90 % intervals."""
        estimates = {"arrivals_per_s": self.arrivals(now_s), "gradient_s": self.gradient(now_s)}
        if (update_mb := self._transfer.mean()) is not None:
            estimates["update_mb"] = update_mb
        for pool in self.settings.pools[ON_DEMAND + 1 :]:
            estimates[f"availability.{pool.name}"] = self._availability.availability(pool, now_s)
            estimates[f"cycle_s.{pool.name}"] = self._availability.cycle(pool, now_s)
        return {name: _believed(estimate) for name, estimate in estimates.items()}

    def guesses(self, now_s: float) -> str:
        """Describe the unknown inputs; empty if all are known."""
        guessed = []
        if not self.arrivals_known(now_s):
            guessed.append(f"arrivals are assumed to be {float(self.arrivals(now_s).value):.4g}/s")
        if not self._timed:
            guessed.append(
                f"a gradient is assumed to take {float(self.gradient(now_s).value):.3g} s"
            )
        if self.settings.loss is not None and self.updates_to_loss() is None:
            guessed.append(
                f"the number of updates until the loss is {self.settings.loss:g} is unknown"
            )
        return f"not measured yet: {', '.join(guessed)}" if guessed else ""

    # --- internals -----------------------------------------------------------------------------

    def _batch(self, claim: BatchReady, now_s: float) -> None:
        """Count a batch: for its worker's slot under `hold`, else for each of its partitions.

        Partitions move between workers, and a worker that catches up reads them one after the
        other. A total rate would only be that of the few partitions that were read so far.
        """
        first_s, last_s = claim.first_arrival_s, claim.last_arrival_s
        if self.settings.on_preemption == "hold":
            slot = self._slots.get(claim.worker)
            if slot is None:
                # This worker was started by hand, so no slot of ours takes its stream over.
                return
            tally = self._by_slot.setdefault(slot, StreamTally(now_s, RATE_HALF_LIFE_S))
            tally.batch(claim.address, claim.samples, first_s, last_s, now_s)
        else:
            length = sum(span.end - span.start for span in claim.address)
            for span in claim.address:
                samples = round(claim.samples * (span.end - span.start) / length)
                tally = self._by_place.setdefault(span.place, StreamTally(now_s, RATE_HALF_LIFE_S))
                tally.batch(span, samples, first_s, last_s, now_s)
                self._last_batch_s[span.place] = now_s
        self._batches += 1

    def _on_instance(
        self, record: Started | SlotAssigned | Left | Ended, instance: Instance
    ) -> None:
        """Update the serving machines. The silence of a stream without a reader is not counted."""
        spare = instance.slot is None and self.settings.on_preemption == "hold"
        left_before = instance.left and isinstance(record, Ended)
        if instance.started_s is None or spare or left_before:
            # This machine never ran, or does not read now.
            return
        self._pools[instance.member] = instance.pool
        step = -1 if isinstance(record, (Left, Ended)) else 1
        before, self._running = self._running, self._running + step
        if bool(before) != bool(self._running):
            change = StreamTally.returned if self._running else StreamTally.gone
            for each in self._by_place.values():
                change(each, record.at_s)
        if instance.slot is None:
            return
        on_slot = self._on[instance.slot] = self._on.get(instance.slot, 0) + step
        tally = self._by_slot.get(instance.slot)
        if tally is not None:
            (tally.returned if on_slot else tally.gone)(record.at_s)

    @property
    def _speed_tally(self) -> SpeedTally:
        """The tally for the market's pools; another market file starts a new tally."""
        pools = self.settings.pools
        if self._tally_of_speeds is None or self._tally_of_speeds[0] != pools:
            tally = SpeedTally([pool.speed for pool in pools], GRADIENT_HALF_LIFE_S)
            self._tally_of_speeds = pools, tally
        return self._tally_of_speeds[1]

    def _speeds(self) -> Rates:
        """Return (P,) speeds of the market's pools: measured, or as in the market file."""
        said = np.array([pool.speed for pool in self.settings.pools])
        found = self._speed_tally.speeds
        speeds: Rates = np.where(np.abs(found / said - 1) > OTHER_SPEED, found, said)
        return speeds

    def _made_by_pool(self, update: UpdateApplied) -> Rates:
        """Return (P,) gradients of an update. Workers started by hand count for the first pool."""
        names = [pool.name for pool in self.settings.pools]
        made = np.zeros(len(names))
        for batch in update.batches:
            pool = self._pools.get(batch.worker, "")
            made[names.index(pool) if pool in names else ON_DEMAND] += 1
        return made

    def _take_back(self, base: ModelId) -> None:
        while len(self._made) > 1 and self._made[-1].version > base.version:
            self._made.pop()
        made = self._made[-1]
        # The rollback goes farther back than the kept updates, so the numbers are scaled.
        if made.version > base.version:
            share = base.version / made.version
            made = _Made(base.version, int(made.samples * share), made.progress * share)
            self._made = [made]
        self._losses.take_back(made.progress)
        self._loss_fit = None

    def _each(self, now_s: float) -> Estimate | None:
        """Return one total rate, or one for each slot; None if too little is known."""
        unreported = self.settings.batch_size - 1
        if self._batches < BATCHES * self.settings.workers:
            return None
        if self.settings.on_preemption == "reassign":
            return self._of_places(now_s)
        counts = np.zeros((self.settings.workers, 2))  # records, seconds
        tallies = {slot: tally for slot, tally in self._by_slot.items() if slot < len(counts)}
        for slot, tally in tallies.items():
            counts[slot] = tally.counts(now_s)
        if not counts.sum(axis=0).all():
            return None
        prior = pooled_prior(counts[:, 0], counts[:, 1])
        each = rate_from_counts(counts[:, 0], counts[:, 1], prior)
        value, std = np.array(each.value), np.array(each.std)
        for slot, tally in tallies.items():
            estimate = tally.rate(now_s, unreported, prior)
            value[slot], std[slot] = estimate.value, estimate.std
        return Estimate(value, std, "gamma")

    def _of_places(self, now_s: float) -> Estimate | None:
        """Add up all partitions. Unread ones are assumed to be as fast as the others."""
        counts = np.array([tally.counts(now_s) for tally in self._by_place.values()])
        unseen = max(self.settings.partitions - len(counts), 0)
        if unseen > len(counts) or not counts.sum(axis=0).all():
            return None
        prior = pooled_prior(counts[:, 0], counts[:, 1])
        last_s = max(self._last_batch_s.values())
        value, variance = unseen * prior.records / prior.seconds, 0.0
        for place, tally in self._by_place.items():
            # For `ORPHANED_S`, the silence of a single partition means that it has no reader, not
            # that it has no records.
            silent_s = max(now_s - last_s, now_s - self._last_batch_s[place] - ORPHANED_S)
            as_of_s = min(self._last_batch_s[place] + max(silent_s, 0.0), now_s)
            estimate = tally.rate(as_of_s, self.settings.batch_size - 1, prior)
            value += float(estimate.value)
            variance += float(estimate.std) ** 2
        return Estimate(value, math.sqrt(variance), "gamma")

    def _guess_per_s(self) -> float:
        settings = self.settings
        if settings.updates is not None and settings.deadline_at_s is not None:
            length_s = max(settings.deadline_at_s - settings.submitted_s, 1.0)
            records = settings.updates * settings.group_size * settings.batch_size
            return AHEAD * records / length_s
        # A batch each second from each slot.
        return float(settings.workers * settings.batch_size)


def surely(estimate: Estimate) -> bool:
    """Return True if an estimate is more than a guess."""
    return float(estimate.relative_std) <= SURE


def _believed(estimate: Estimate) -> EstimateRecord:
    low, high = estimate.interval(INTERVAL)
    numbers = (float(estimate.value), float(estimate.std), max(float(low), 0.0), float(high))
    return EstimateRecord(*numbers)
