"""Conditions under which a gradient counts.

A gradient message counts whole or not at all. It counts if and only if all its batches wait in one
round, none of them has been counted, and its weights are not too old for that round. An update
therefore consists of exactly its batches, even if gradients arrive twice, late or from a worker
that is believed dead.

`fits` guards the three steps that could make the weights of some round too old: beginning a round,
applying another round first, and counting a gradient of older weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET, UnsetType

from common.core.batch_assignment import BatchAssigner, GradientTimes
from common.core.messages import WorkerId
from common.core.rounds import Round, fits

if TYPE_CHECKING:
    from common.core.messages import Batch, Failed, Gradient, GradientReady, Traffic
    from common.core.poison import Suspects
    from common.core.settings import CoordinatorSettings, Mode

# Number of versions after which a silent worker is forgotten.
VERSIONS_KEPT = 1000


class _LastTraffic(NamedTuple):
    version: int
    traffic: Traffic


class UpdateTraffic:
    """Mean traffic of a worker per update, computed from the workers' own counts.

    Each gradient contains the total bytes that its worker has moved. The difference of two totals
    of one process is the traffic of the updates between them. A lost message therefore loses
    nothing, and a late or duplicate message adds nothing.
    """

    def __init__(self) -> None:
        # Last count of each worker, oldest first.
        self._last: dict[WorkerId, _LastTraffic] = {}
        # Sums over all workers since the last `take`.
        self._moved = self._updates = 0

    def observe(self, worker: WorkerId, traffic: Traffic, version: int) -> None:
        """Add a worker's count.

        Args:
            worker: The worker.
            traffic: Its count.
            version: Version of the weights that it had at that time.
        """
        before = self._last.get(worker)
        if before is not None and before.traffic.life == traffic.life:
            moved, updates = traffic.total - before.traffic.total, version - before.version
            if updates <= 0 or moved < 0:
                return
            self._moved += moved
            self._updates += updates
        self._last.pop(worker, None)
        self._last[worker] = _LastTraffic(version, traffic)
        eldest, last = next(iter(self._last.items()))
        if version - last.version > VERSIONS_KEPT:
            del self._last[eldest]

    def take(self) -> int | UnsetType:
        """Return the mean traffic per update since the last call. Unset if nothing was counted."""
        moved, updates, self._moved, self._updates = self._moved, self._updates, 0, 0
        return round(moved / updates) if updates else UNSET


class Rounds:
    """A leader's rounds in flight, oldest first.

    Args:
        suspects: Batches that may be poison.
        times: Gradient times of the workers.
    """

    def __init__(self, suspects: Suspects, times: GradientTimes) -> None:
        self._suspects = suspects
        # Traffic of the gradients that count.
        self.traffic = UpdateTraffic()
        self._rounds = dict[int, Round]()
        self.assigner = BatchAssigner(self._rounds, suspects, times)
        self._begun = 0
        # Batches without a finite gradient since the last finite one of any batch.
        self.not_finite = set[int]()
        # Workers whose memory is too small, by batch.
        self.too_large = dict[int, set[WorkerId]]()

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[Round]:
        return iter(tuple(self._rounds.values()))

    @property
    def wait_for_gradients(self) -> bool:
        """True if every round only waits for gradients: none can be filled, applied or put back."""
        return not [r for r in self._rounds.values() if not r.todo or r.missing > 0]

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Batches of all rounds."""
        return tuple(batch for round_ in self._rounds.values() for batch in round_.batches)

    def of(self, offset: int) -> Round | None:
        """Return the round in which a batch waits for its gradient."""
        for round_ in self._rounds.values():
            if offset in round_.todo:
                return round_
        return None

    @property
    def size(self) -> int:
        """Number of batches in all rounds."""
        return sum([len(round_) for round_ in self._rounds.values()])

    @property
    def oldest(self) -> int | None:
        """Control offset of the oldest batch."""
        return min(
            [o for r in self._rounds.values() for part in (r.todo, r.counted) for o in part],
            default=None,
        )

    def begin(
        self,
        mode: Mode,
        live: int,
        settings: CoordinatorSettings,
        batches: Iterable[Batch],
        worker: WorkerId | None = None,
    ) -> Round:
        """Begin a round. The arguments are those of `Round`."""
        self._begun += 1
        round_ = Round(self._begun, mode, live, settings, batches, worker)
        self._rounds[round_.number] = round_
        return round_

    def end(self, round_: Round) -> None:
        """Remove a round that is applied or put back."""
        del self._rounds[round_.number]
        self.assigner.end(round_)

    def may_begin(self, staleness: int, version: int) -> bool:
        """True if one more round could be applied in time without delaying the others."""
        if not any([staleness, *(each.synchrony.staleness for each in self._rounds.values())]):
            # One round at a time: the usual case.
            return not self._rounds
        return fits([*self._deadlines(version).values(), version + staleness], version)

    def may_apply(self, round_: Round, version: int) -> bool:
        """True if all other rounds can still be applied in time after this one."""
        deadlines = self._deadlines(version + 1)
        del deadlines[round_.number]
        return fits(deadlines.values(), version + 1)

    def _deadlines(self, version: int, besides: Collection[int] = ()) -> dict[int, int]:
        """Return the newest version at which each round may still be applied.

        Args:
            version: The newest version, which unassigned batches will be computed at.
            besides: Batches whose order has been answered.
        """
        bases = {
            number: version if round_.base is None else round_.base
            for number, round_ in self._rounds.items()
        }
        for hand in self.assigner.hands:
            # A late worker does not delay others: its gradient counts if there is still time.
            if hand.version >= bases[hand.round]:
                continue
            if not hand.offsets.issubset(besides):
                bases[hand.round] = hand.version
        return {n: base + self._rounds[n].synchrony.staleness for n, base in bases.items()}

    def count(self, gradient: Gradient | GradientReady, version: int) -> tuple[Round | None, str]:
        """Count a gradient message, if it counts.

        Args:
            gradient: A gradient of this leader's weights.
            version: The newest version.

        Returns:
            The round that it counts in, or the reason why it does not count.
        """
        offsets = gradient.batches
        if len(offsets) != 1 and (len(set(offsets)) != len(offsets) or not offsets):
            return None, "the gradient names a batch twice, or no batch"
        round_ = self._of_any(offsets)
        reason = self._why_not(round_, gradient, version)
        if reason or round_ is None:
            # The order is void. Its other batches are reassigned.
            self.assigner.drop(gradient.worker, offsets, gradient.model.version)
            return None, reason
        if gradient.traffic is not UNSET:
            self.traffic.observe(gradient.worker, gradient.traffic, gradient.model.version)
        round_.add(gradient)
        self.assigner.settle(offsets, gradient.worker)
        self._suspects.clear(offsets)
        self.not_finite.clear()
        for offset in offsets:
            self.too_large.pop(offset, None)
        return round_, ""

    def _of_any(self, offsets: Iterable[int]) -> Round | None:
        """Return the round of the first of these batches that waits for its gradient."""
        for offset in offsets:
            for round_ in self._rounds.values():
                if offset in round_.todo:
                    return round_
        return None

    def _why_not(
        self, round_: Round | None, gradient: Gradient | GradientReady, version: int
    ) -> str:
        """Return why a gradient does not count in a round. Empty if it does."""
        offsets, taken_at = gradient.batches, gradient.model.version
        todo = {} if round_ is None else round_.todo
        samples = 0
        for offset in offsets:
            if offset not in todo:
                return (
                    f"batches {[each for each in offsets if each not in todo]} wait for no gradient"
                )
            samples += todo[offset].samples
        if round_ is None or gradient.samples != samples:
            return "the gradient's number of samples is not that of its batches"
        if (local_rate := gradient.local_rate or 0.0) != round_.synchrony.local_rate:
            return (
                f"the gradient was computed with local rate {local_rate:g}, expected"
                f" {round_.synchrony.local_rate:g}"
            )
        if taken_at == version:
            # The gradient does not shorten any deadline.
            return ""
        deadlines = self._deadlines(version, offsets)
        last = taken_at + round_.synchrony.staleness
        deadlines[round_.number] = min(deadlines[round_.number], last)
        return "" if fits(deadlines.values(), version) else f"version {taken_at} is too old"

    def requeue(self, worker: WorkerId, offsets: Iterable[int], version: int) -> bool:
        """Take an order back without blame: the worker leaves, or could not get data or model.

        Args:
            worker: The worker with the order.
            offsets: The batches of the report.
            version: Version at which the worker tried. Later orders are not affected.

        Returns:
            True if the worker had an order for any of these batches.
        """
        return self.assigner.drop(worker, offsets, version)

    def fail(self, worker: WorkerId, offsets: Iterable[int], version: int) -> tuple[Batch, ...]:
        """Take an order back and blame these batches. Return those that are poison now.

        Args:
            worker: The worker with the order.
            offsets: The batches to blame.
            version: Version at which the worker tried. Later orders are not affected.
        """
        offsets = set(offsets)
        hands = [h for h in self.assigner.given_to(worker) if h.version <= version]
        alone = {offset for hand in hands if hand.alone for offset in hand.offsets}
        blamed = {offset for hand in hands for offset in hand.offsets} & offsets
        self.assigner.drop(worker, offsets, version)
        return self._blame(blamed, alone)

    def worker_lost(self, worker: WorkerId) -> tuple[Batch, ...]:
        """Process the death of a worker. Return the batches that are poison now."""
        hands = self.assigner.given_to(worker)
        in_hand = {offset for hand in hands for offset in hand.offsets}
        alone = in_hand if len(in_hand) == 1 and all(hand.alone for hand in hands) else set[int]()
        self.assigner.release(worker)
        return self._blame(in_hand, alone)

    def settle(self, offset: int) -> Batch | None:
        """Remove a batch from its round for quarantine, or return None if it is in no round."""
        round_ = self.of(offset)
        if round_ is None:
            return None
        self._suspects.clear([offset])
        self.too_large.pop(offset, None)
        self.assigner.settle([offset])
        return round_.todo.pop(offset)

    def give_up(self, round_: Round) -> tuple[Batch, ...]:
        """Remove all uncounted batches from a round (`on_missing: proceed`)."""
        missing = tuple(round_.todo.values())
        self.assigner.settle(round_.todo)
        round_.todo.clear()
        return missing

    def _blame(self, offsets: set[int], alone: set[int]) -> tuple[Batch, ...]:
        """Suspect these batches. Return those that are poison now."""
        poison = [o for o in sorted(offsets) if self._suspects.blame(o, alone=o in alone)]
        return tuple(round_.todo[o] for o in poison if (round_ := self.of(o)) is not None)


class Verdict(NamedTuple):
    """Consequences of a failure."""

    # Batches that can never be used.
    hopeless: tuple[Batch, ...] = ()
    # Reason for the quarantine.
    reason: str = ""
    # Reason to hold the job without blaming a batch, or empty.
    hold: str = ""


def judge(failed: Failed, rounds: Rounds, live: Collection[WorkerId]) -> Verdict:
    """Take the failed order back and decide whether its batches are to blame.

    Args:
        failed: A failure of this leader's order that is still awaited.
        rounds: Rounds in flight.
        live: Workers that may get orders.
    """
    version = failed.model.version
    there = {o: round_ for o in failed.batches if (round_ := rounds.of(o)) is not None}
    if failed.reason not in ("raised", "not_finite"):
        had = rounds.requeue(failed.worker, failed.batches, version)
        # A late or duplicate report may refer to a task that was repaired since.
        if failed.reason == "task" and had:
            return Verdict(
                hold=f"the task is wrong: {failed.detail}; correct the task and resume the job"
            )
        if failed.reason == "memory" and had:
            for offset in there:
                rounds.too_large.setdefault(offset, set()).add(failed.worker)
            if live and any(rounds.too_large[offset].issuperset(live) for offset in there):
                return Verdict(hold=f"the memory of no live worker suffices: {failed.detail}")
        if failed.reason != "expired":
            return Verdict()
        return Verdict(tuple(round_.todo[o] for o, round_ in there.items()), "expired")
    poison = rounds.fail(failed.worker, failed.batches, version)
    if failed.reason == "not_finite" and there:
        rounds.not_finite.update(there)
        count = len(rounds.not_finite)
        most = max(round_.synchrony.group_size for round_ in there.values())
        # It is implausible that half of the data is bad at once.
        if count >= max(2, (most + 1) // 2):
            rounds.not_finite.clear()
            return Verdict(
                hold=f"diverged: {count} batches in a row are not finite ({failed.detail}); lower"
                " the learning rate and submit the job again"
            )
    return Verdict(poison, f"poison: {failed.reason}: {failed.detail}")
