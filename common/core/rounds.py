"""Rounds: updates in flight, each from its K batches to its K gradients.

A gradient message counts whole or not at all: if and only if its batches wait in one round, none of
them has been counted, and its weights are not too old for that round. So whatever comes twice, late
or from a ghost, an update is made of exactly its batches. Who computes them does not matter, so
work is handed out again freely.

What is too old is one rule. A round of base v, the oldest version that one of its gradients is
taken at, and of staleness s must be applied while the newest version is at most v + s. `fits` says
whether all rounds in flight can be, one after the other; it guards the three steps that could make
that impossible: to begin a round, to apply another one before it, to count a gradient of older
weights. With s = 0 that is one round in flight, all of it at the version before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import nan
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from common.core.messages import (
    Assignment,
    Batch,
    GradientReady,
    MetricSum,
    Synchrony,
    UpdateApplied,
    WorkerId,
)
from common.core.traffic import UpdateTraffic
from common.core.tuning import Scatter, rate_scale

if TYPE_CHECKING:
    from common.core.messages import Failed, Gradient
    from common.core.poison import Suspects
    from common.core.scores import Counts
    from common.core.settings import CoordinatorSettings, Mode

GROWTH = 1.5  # of a deadline with each time that a batch is handed out again
MOST_GROWTHS = 7  # times that it grows: to 17 times the first deadline, and no power overflows
RECENT_TIMES = 64  # gradient times remembered: a few rounds of a small fleet
SMOOTHING = 0.2  # weight of the newest time in what is usual: the last few count
# Messages after which a worker's time is forgotten, where none was its own, and as many more as a
# few rounds of all have: who is asked for nothing, being slow, would never be seen to be fast.
TRIED_AGAIN, ROUNDS = 256, 4
READ_BACK_S = 0.01  # that a worker needs to read a batch from Kafka which it does not hold
# So many times as fast as its holder must be who is given a batch instead: times of equal workers,
# as smoothed, seldom differ by as much.
FASTER = 1.5
QUANTILE = 0.95  # of recent times: one slow gradient in twenty may cost a needless re-dispatch


class GradientTimes:
    """How long a batch's gradient may take before somebody else is asked.

    Args:
        floor_s: Shortest deadline, and the whole of it while no time is known.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._recent = deque[float](maxlen=RECENT_TIMES)  # seconds per batch
        self._quantile_s: float | None = 0.0  # None: to be found when it is asked for
        self._usual = dict[WorkerId, float]()  # seconds per batch, smoothed
        self._heard = dict[WorkerId, int]()  # of whom, at which message last; the eldest first
        self._messages = 0
        self._usual_s = 0.0  # likewise, of all
        self._fastest_s: float | None = 0.0  # None: likewise

    def observe(self, worker: WorkerId, seconds: float, batches: int) -> None:
        """Take in a measured time of `batches` gradients computed one after the other."""
        each_s = seconds / max(batches, 1)
        usual, heard = self._usual, self._heard
        self._recent.append(each_s)
        self._quantile_s = self._fastest_s = None
        before_s = self._usual_s if usual else each_s
        self._usual_s = before_s + SMOOTHING * (each_s - before_s)
        before_s = usual.get(worker, each_s)
        usual[worker] = before_s + SMOOTHING * (each_s - before_s)
        self._messages = number = self._messages + 1
        heard.pop(worker, None)
        heard[worker] = number
        eldest = next(iter(heard))
        if number - heard[eldest] > TRIED_AGAIN + ROUNDS * len(heard):
            del usual[eldest], heard[eldest]

    def usual_s(self, worker: WorkerId) -> float:
        """What a batch takes this worker; what it takes on the whole where that is not known."""
        return self._usual.get(worker, self._usual_s)

    def fastest_s(self) -> float:
        """What a batch takes the fastest worker; 0 while nobody's time is known."""
        if self._fastest_s is None:
            self._fastest_s = min(self._usual.values())
        return self._fastest_s

    def allowed_s(self, batches: int, attempt: int) -> float:
        """Time for `batches` in one worker's hands, the `attempt`-th time (from 0)."""
        if self._quantile_s is None:
            ordered = sorted(self._recent)
            self._quantile_s = ordered[int(QUANTILE * (len(ordered) - 1))]
        growth = GROWTH ** min(attempt, MOST_GROWTHS)
        return (self._floor_s + self._quantile_s * batches) * growth


class Dispatch(msgspec.Struct, eq=False, gc=False):
    """What one order put into one worker's hands and is still expected back."""

    worker: WorkerId
    round: int  # that all of it is of
    offsets: set[int]
    version: int  # of the weights that it is computed at, or of later ones
    deadline: float
    alone: bool  # the order was of one batch: what went wrong with it is this batch's doing
    usual_at: float  # when its worker would usually be done with it


def fits(deadlines: Iterable[int], version: int) -> bool:
    """Whether rounds can all be applied in time, one after the other.

    Args:
        deadlines: Of each round: the newest version at which it may still be applied.
        version: The newest there is.
    """
    return all(version + place <= last for place, last in enumerate(sorted(deadlines)))


class Round:
    """The batches of one update, and which have been counted.

    Args:
        number: Counts this leader's rounds.
        mode: What it goes by to its end, whatever the job changes or switches to.
        live: How many workers there are.
        settings: Of the job, to its end likewise.
        batches: The group, fairest first.
        worker: Who is asked for all of it first; None: each batch's own.
    """

    def __init__(
        self,
        number: int,
        mode: Mode,
        live: int,
        settings: CoordinatorSettings,
        batches: Iterable[Batch],
        worker: WorkerId | None = None,
    ) -> None:
        self.number = number
        self.mode = mode
        self.synchrony = mode.synchrony(live)
        self.settings = settings
        self.worker = worker
        self.todo = {batch.offset: batch for batch in batches}  # without a gradient yet
        self.counted = dict[int, Batch]()  # whose gradient is in the sum
        self.asked = dict[int, list[WorkerId]]()  # who has been asked for a batch so far
        self.lingered = self.missing > 0  # it began with fewer
        self.short = ""  # why it is applied with fewer than K, once that is decided
        self.ready = list[GradientReady]()  # those that count and stay where they were computed
        self._clear()

    def _clear(self) -> None:
        """No gradient counts."""
        self.parts = list[int]()  # how many batches each gradient message was of
        self.samples = 0
        self._squares = 0.0  # see `Scatter`
        self.seconds = 0.0  # of all gradients counted
        self.loss_sum = 0.0
        self.metric_sums = dict[str, MetricSum]()
        self.scores: Counts | None = None  # of a task of two classes
        self.base: int | None = None  # the oldest version that one of them was taken at

    def __len__(self) -> int:
        return len(self.todo) + len(self.counted)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """All of them."""
        return (*self.todo.values(), *self.counted.values())

    @property
    def missing(self) -> int:
        """How many batches it lacks."""
        return self.synchrony.group_size - len(self.todo) - len(self.counted)

    @property
    def asked_again(self) -> bool:
        """Whether some batch was handed out more than once."""
        return max(map(len, self.asked.values()), default=0) > 1

    def waits_for(self, orders: Iterable[Assignment]) -> bool:
        """Whether some of what is ordered is of its batches without a gradient."""
        return any(batch.offset in self.todo for order in orders for batch in order.batches)

    def fill(self, batches: Iterable[Batch]) -> None:
        """Take further batches in, in place of some that were quarantined."""
        self.todo.update((batch.offset, batch) for batch in batches)

    def add(self, gradient: Gradient | GradientReady) -> None:
        """Take in a gradient that counts."""
        offsets, samples = gradient.batches, gradient.samples
        for offset in offsets:
            self.counted[offset] = self.todo.pop(offset)
        if isinstance(gradient, GradientReady):
            self.ready.append(gradient)
        self.parts.append(len(offsets))
        version = gradient.model.version
        self.base = version if self.base is None else min(self.base, version)
        self.samples += samples
        self._squares += nan if gradient.square is UNSET else gradient.square / samples
        self.seconds += gradient.seconds
        self.loss_sum += gradient.loss_sum
        for name, (total, count) in gradient.metric_sums.items():
            before, among = self.metric_sums.get(name, (0.0, 0))
            self.metric_sums[name] = MetricSum(before + total, among + count)
        if gradient.scores:
            scores = np.array(gradient.scores)
            self.scores = scores if self.scores is None else self.scores + scores

    def uncount(self, lost: Callable[[GradientReady], bool]) -> bool:
        """Forget gradients that are lost with their members: their batches have none any more.

        Args:
            lost: Whether one is.

        Returns:
            Whether one was.
        """
        rest = [gradient for gradient in self.ready if not lost(gradient)]
        if len(rest) == len(self.ready):
            return False
        self.ready = []
        self.todo |= self.counted
        self.counted = {}
        self._clear()
        for gradient in rest:
            self.add(gradient)
        return True

    @property
    def scatter(self) -> Scatter:
        """What its gradients say of noise; NaN where not all of them say how large they are."""
        return Scatter(len(self.parts), len(self.counted), self.samples, self._squares)

    @property
    def averages(self) -> bool:
        """Whether it averages models: messages weigh by how far each worker walked."""
        return self.synchrony.local_rate > 0 and self.settings.reduction == "mean"

    @property
    def learning_rate(self) -> float | None:
        """At which its step is taken, times the update's scale; None: as the trainer was made."""
        if self.averages:
            return self.synchrony.local_rate
        own = self.mode.learning_rate
        return self.settings.mode.learning_rate if own is None else own

    def _scale(self, staleness: int, before: float, noise_scale: float | None) -> float:
        scale = 1.0
        if self.averages:
            # With m = K / p steps of a worker, a step at rate m x local rate by the mean of all
            # gradients is the mean of the workers' copies.
            scale = len(self.counted) / len(self.parts)
        elif self.mode.learning_rate is None and self.settings.rate_by_group:
            own = self.settings.mode.group_size
            scale = rate_scale(self.mode.group_size, own, noise_scale)
        scale *= self.settings.schedule.share(before)
        return scale / (1 + staleness) if self.mode.damped else scale

    @property
    def share(self) -> float:
        """As how many updates of the job's own K it counts, short or not."""
        return self.mode.group_size / self.settings.mode.group_size

    def update(
        self, epoch: int, version: int, before: float, noise_scale: float | None = None
    ) -> UpdateApplied:
        """The update that its counted batches make.

        Args:
            epoch: Of the leader.
            version: J, after it.
            before: Updates of the job's own K, before it.
            noise_scale: Of gradients, in batches, where that is known.
        """
        skipped = Counter[str]()
        for batch in self.counted.values():
            if batch.skipped:
                for left_out in batch.skipped:
                    skipped[left_out.topic] += left_out.records
        base = version - 1 if self.base is None else self.base
        progress, rate = before + self.share, self.learning_rate
        scale = self._scale(version - 1 - base, before, noise_scale)
        plain = self.synchrony == Synchrony(self.settings.mode.group_size)
        sums = self.metric_sums
        measured = {n: each.samples for n, each in sums.items() if each.samples != self.samples}
        return UpdateApplied(
            epoch=epoch,
            version=version,
            batches=tuple([b.without_skipped() if b.skipped else b for b in self.counted.values()]),
            samples=self.samples,
            loss=self.loss_sum / self.samples,
            metrics={name: total / count for name, (total, count) in sums.items()},
            short=self.short,
            revision=self.settings.revision,
            gradient_s=self.seconds / len(self.counted),
            skipped=dict(skipped),
            synchrony=UNSET if plain else self.synchrony,
            base=UNSET if base == version - 1 else base,
            parts=tuple(self.parts) if self.synchrony.local_rate else UNSET,
            scale=UNSET if scale == 1 else scale,
            rate=UNSET if rate is None else rate * scale,
            equivalent=UNSET if progress == version else progress,
            measured=measured or UNSET,
        )


class Rounds:
    """A leader's rounds in flight, oldest first, and who has which of their batches in hand.

    Args:
        suspects: Batches that may be poison.
        times: How long a gradient may take.
    """

    def __init__(self, suspects: Suspects, times: GradientTimes) -> None:
        self._suspects = suspects
        self._times = times
        self.traffic = UpdateTraffic()  # of whose gradients count
        self._rounds = dict[int, Round]()
        # Whose batches are all without a gradient yet. No batch is in two that are in time; in one
        # that is late, past its deadline, it may be too: its worker may be at it still.
        self._hands = list[Dispatch]()
        self._late = list[Dispatch]()
        self._begun = 0
        # Batches that gave no finite gradient since the last finite one of any batch.
        self.not_finite = set[int]()

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[Round]:
        return iter(tuple(self._rounds.values()))

    @property
    def wait_for_gradients(self) -> bool:
        """Whether all do, and for nothing else: none can be filled, applied or put back."""
        return not [r for r in self._rounds.values() if not r.todo or r.missing > 0]

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Of all rounds."""
        return tuple(batch for round_ in self._rounds.values() for batch in round_.batches)

    def of(self, offset: int) -> Round | None:
        """The round in which a batch waits for its gradient."""
        for round_ in self._rounds.values():
            if offset in round_.todo:
                return round_
        return None

    @property
    def size(self) -> int:
        """How many batches that is."""
        return sum([len(round_) for round_ in self._rounds.values()])

    @property
    def oldest(self) -> int | None:
        """Control offset of the one of them that has waited longest."""
        return min(
            [o for r in self._rounds.values() for part in (r.todo, r.counted) for o in part],
            default=None,
        )

    # --- begin, end, and when they may --------------------------------------------------------

    def begin(
        self,
        mode: Mode,
        live: int,
        settings: CoordinatorSettings,
        batches: Iterable[Batch],
        worker: WorkerId | None = None,
    ) -> Round:
        """Put a further round in flight; its arguments are those of `Round`."""
        self._begun += 1
        round_ = Round(self._begun, mode, live, settings, batches, worker)
        self._rounds[round_.number] = round_
        return round_

    def end(self, round_: Round) -> None:
        """It is applied, or put back."""
        del self._rounds[round_.number]
        self._keep(lambda hand: hand.round != round_.number)

    def may_begin(self, staleness: int, version: int) -> bool:
        """Whether a further round could be applied in time, and all others still."""
        if not any([staleness, *(each.synchrony.staleness for each in self._rounds.values())]):
            return not self._rounds  # one after the other, as most jobs have it
        return fits([*self._deadlines(version).values(), version + staleness], version)

    def may_apply(self, round_: Round, version: int) -> bool:
        """Whether all others can still be applied in time after this one."""
        deadlines = self._deadlines(version + 1)
        del deadlines[round_.number]
        return fits(deadlines.values(), version + 1)

    def awaits(self, version: int) -> int:
        """The oldest version at which a gradient is still waited for."""
        return min([hand.version for hand in self._hands], default=version)

    @property
    def awaited(self) -> int:
        """Of how many batches gradients are to come, where nobody else can be asked for one.

        0 where some batch is in nobody's hands, or its worker is late.
        """
        todo = sum([len(round_.todo) for round_ in self._rounds.values()])
        given = sum([len(hand.offsets) for hand in self._hands])
        return todo if todo == given and not self._late else 0

    def oldest_asked(self, version: int) -> int:
        """The oldest version at which somebody may still compute, waited for or not."""
        return min([hand.version for hand in (*self._hands, *self._late)], default=version)

    def loads(self) -> Counter[WorkerId]:
        """How many batches each worker has in hand, but for those that are late."""
        loads = Counter[WorkerId]()
        for hand in self._hands:
            loads[hand.worker] = loads.get(hand.worker, 0) + len(hand.offsets)
        return loads

    def idle(self, live: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Who has nothing in hand."""
        return frozenset(live).difference([h.worker for h in (*self._hands, *self._late)])

    def _deadlines(self, version: int, besides: Collection[int] = ()) -> dict[int, int]:
        """The newest version at which each round may still be applied.

        Args:
            version: The newest there is, at which all is computed that nobody is asked for yet.
            besides: Batches whose order is answered.
        """
        bases = {
            number: version if round_.base is None else round_.base
            for number, round_ in self._rounds.items()
        }
        for hand in self._hands:
            # Who is late does not hold others up: what it sends counts if there is still time.
            if hand.version >= bases[hand.round]:
                continue
            if not hand.offsets.issubset(besides):
                bases[hand.round] = hand.version
        return {n: base + self._rounds[n].synchrony.staleness for n, base in bases.items()}

    # --- work out, gradients in ---------------------------------------------------------------

    def orders(
        self, now: float, live: Collection[WorkerId], version: int
    ) -> tuple[Assignment, ...]:
        """Hand out every batch that is in nobody's hands and can travel now, at this version."""
        # What is awaited of one worker, nobody else is asked for: so counts say whether all is.
        todo = sum([len(round_.todo) for round_ in self._rounds.values()])
        if todo == sum([len(hand.offsets) for hand in self._hands]):
            return ()  # which is so most of the times
        return self._hand_out(now, live, version)

    def _hand_out(
        self, now: float, live: Collection[WorkerId], version: int
    ) -> tuple[Assignment, ...]:
        held = {offset for hand in self._hands for offset in hand.offsets}
        suspects = self._suspects.offsets
        loads = dict.fromkeys(live, 0)
        free_s = dict.fromkeys(loads, 0.0)  # until each would usually be done with all that it has
        usual_s = self._times.usual_s
        closed = set[WorkerId]()  # has a suspect in hand: nothing may travel with it
        for hand in self._hands:
            if hand.worker in loads:
                loads[hand.worker] += len(hand.offsets)
                free_s[hand.worker] = max(free_s[hand.worker], hand.usual_at - now)
            if not suspects.isdisjoint(hand.offsets):
                closed.add(hand.worker)
        orders = list[Assignment]()
        for round_ in self._rounds.values():
            given = dict[WorkerId, list[Batch]]()
            lacking = [batch for offset, batch in round_.todo.items() if offset not in held]
            # The slow last: others do theirs once these have their own.
            lacking.sort(key=lambda batch: usual_s(batch.worker))
            for batch in lacking:
                suspect = batch.offset in suspects
                open_to: Collection[WorkerId] = loads
                if closed or suspect:
                    open_to = [w for w in loads if w not in closed and not (suspect and loads[w])]
                if not open_to:
                    continue  # asked again as soon as a hand empties
                worker, free_s_then = self._choose(round_, batch, open_to, loads, free_s)
                given.setdefault(worker, []).append(batch)
                loads[worker] += 1
                free_s[worker] = free_s_then
                if suspect:
                    closed.add(worker)
            number, rate = round_.number, round_.synchrony.local_rate
            squared = round_.settings.group_sizes is not None
            for worker, batches in given.items():
                offsets = {batch.offset for batch in batches}
                attempt = max([len(round_.asked[offset]) for offset in offsets]) - 1
                deadline = now + self._times.allowed_s(loads[worker], attempt)
                alone, usual_at = len(offsets) == 1, now + free_s[worker]
                self._hands.append(
                    Dispatch(worker, number, offsets, version, deadline, alone, usual_at)
                )
                orders.append(Assignment(worker, tuple(batches), rate, squared))
        return tuple(orders)

    def count(self, gradient: Gradient | GradientReady, version: int) -> tuple[Round | None, str]:
        """Count a gradient message: the round that it is of, or why it does not count.

        Args:
            gradient: Of this leader's weights.
            version: The newest there is.
        """
        offsets = gradient.batches
        if len(offsets) != 1 and (len(set(offsets)) != len(offsets) or not offsets):
            return None, "names a batch twice, or none"
        round_ = self._of_any(offsets)
        reason = self._why_not(round_, gradient, version)
        if reason or round_ is None:
            # Its order is void. What else was in it goes to somebody else.
            self._drop(gradient.worker, offsets, gradient.model.version)
            return None, reason
        self._times.observe(gradient.worker, gradient.seconds, len(offsets))
        if gradient.traffic is not UNSET:
            self.traffic.observe(gradient.worker, gradient.traffic, gradient.model.version)
        round_.add(gradient)
        self._let_go(offsets)
        self._suspects.clear(offsets)
        self.not_finite.clear()
        return round_, ""

    def _of_any(self, offsets: Iterable[int]) -> Round | None:
        """The round of the first of these batches that waits for its gradient."""
        for offset in offsets:
            for round_ in self._rounds.values():
                if offset in round_.todo:
                    return round_
        return None

    def _why_not(
        self, round_: Round | None, gradient: Gradient | GradientReady, version: int
    ) -> str:
        """Why a gradient does not count in a round; empty where it does."""
        offsets, taken_at = gradient.batches, gradient.model.version
        todo = {} if round_ is None else round_.todo
        samples = 0
        for offset in offsets:
            if offset not in todo:
                return f"batches {[each for each in offsets if each not in todo]} do not wait"
            samples += todo[offset].samples
        if round_ is None or gradient.samples != samples:
            return "has not the batches' samples"
        if (walked := gradient.local_rate or 0.0) != round_.synchrony.local_rate:
            return f"was taken on a walk at rate {walked:g}, not {round_.synchrony.local_rate:g}"
        if taken_at == version:
            return ""  # no deadline comes nearer by it
        deadlines = self._deadlines(version, offsets)
        last = taken_at + round_.synchrony.staleness
        deadlines[round_.number] = min(deadlines[round_.number], last)
        return "" if fits(deadlines.values(), version) else f"of version {taken_at}, too old"

    def requeue(self, worker: WorkerId, offsets: Iterable[int], version: int) -> bool:
        """Take an order back without blame: the worker leaves, or could not get data or model.

        Args:
            worker: Who had it.
            offsets: The batches that it is about.
            version: At which the worker tried; what it was asked later stands.

        Returns:
            Whether it had any of these batches in hand.
        """
        return self._drop(worker, offsets, version)

    def fail(self, worker: WorkerId, offsets: Iterable[int], version: int) -> tuple[Batch, ...]:
        """Take an order back, blaming these batches of it; returns those that are poison now.

        Args:
            worker: Who had it.
            offsets: The batches that it is about.
            version: At which the worker tried; what it was asked later stands.
        """
        offsets = set(offsets)
        hands = [h for h in self._given_to(worker) if h.version <= version]
        alone = {offset for hand in hands if hand.alone for offset in hand.offsets}
        blamed = {offset for hand in hands for offset in hand.offsets} & offsets
        self._drop(worker, offsets, version)
        return self._blame(blamed, alone)

    def vanish(self, worker: WorkerId) -> tuple[Batch, ...]:
        """A worker died without notice; returns the batches that are poison now."""
        hands = self._given_to(worker)
        in_hand = {offset for hand in hands for offset in hand.offsets}
        alone = in_hand if len(in_hand) == 1 and all(hand.alone for hand in hands) else set[int]()
        self.release(worker)
        return self._blame(in_hand, alone)

    def release(self, worker: WorkerId, but: Collection[int] = ()) -> None:
        """A worker leaves as announced: what it had in hand goes to others.

        Args:
            worker: Who leaves.
            but: Batches that it still sends a gradient of.
        """
        self._keep(lambda hand: hand.worker != worker or not hand.offsets.isdisjoint(but))

    def recall(self) -> None:
        """Take all orders back, as if nobody had been asked: they did not get anywhere."""
        self._hands.clear()
        self._late.clear()
        for round_ in self._rounds.values():
            round_.asked.clear()

    def due(self) -> float | None:
        """The earliest deadline that has not passed, or None where there is none."""
        return min([hand.deadline for hand in self._hands], default=None)

    def overdue(self, now: float) -> tuple[frozenset[WorkerId], tuple[Round, ...]]:
        """Ask others too for what is past its deadline.

        Returns:
            In whose hands it is, and of which rounds.
        """
        late = [hand for hand in self._hands if hand.deadline <= now]
        if late:
            self._hands = [hand for hand in self._hands if hand.deadline > now]
            self._late += late
        of = {hand.round for hand in late}
        rounds = tuple(round_ for number, round_ in self._rounds.items() if number in of)
        return frozenset(hand.worker for hand in late), rounds

    def settle(self, offset: int) -> Batch | None:
        """Take a batch out for good (quarantine); None if it waits in no round."""
        round_ = self.of(offset)
        if round_ is None:
            return None
        self._suspects.clear([offset])
        self._let_go([offset])
        return round_.todo.pop(offset)

    def give_up(self, round_: Round) -> tuple[Batch, ...]:
        """Take all uncounted batches out of a round (`on_missing: proceed`)."""
        missing = tuple(round_.todo.values())
        self._let_go(round_.todo)
        round_.todo.clear()
        return missing

    def _choose(
        self,
        round_: Round,
        batch: Batch,
        open_to: Collection[WorkerId],
        loads: Mapping[WorkerId, int],
        free_s: Mapping[WorkerId, float],
    ) -> tuple[WorkerId, float]:
        """Who was asked least for it, and would have it done first; mostly that is its holder.

        Returns:
            The worker, and in what time it would usually be done with this, too.
        """
        asked = round_.asked.setdefault(batch.offset, [])
        holder, usual_s = round_.worker or batch.worker, self._times.usual_s
        holder_s, first = usual_s(holder), not asked and holder in open_to
        if first and (round_.worker or holder_s <= FASTER * self._times.fastest_s()):
            asked.append(holder)  # nobody waits for it, or nobody is so much faster
            return holder, free_s[holder] + holder_s

        def done_s(worker: WorkerId) -> float:
            return free_s[worker] + usual_s(worker) + (0.0 if worker == holder else READ_BACK_S)

        def rank(worker: WorkerId) -> tuple[int, bool, float, int, bool, WorkerId]:
            other = worker != holder
            no_faster = first and other and usual_s(worker) * FASTER > holder_s
            return asked.count(worker), no_faster, done_s(worker), loads[worker], other, worker

        chosen = min(open_to, key=rank)
        asked.append(chosen)
        return chosen, done_s(chosen)

    def _let_go(self, offsets: Collection[int]) -> None:
        """Nobody is to compute these batches any more; hands that are empty then go."""
        for offset in offsets:
            for hand in self._hands:  # of the first mostly: answers come in the order of orders
                if offset in hand.offsets:
                    hand.offsets.remove(offset)
                    if not hand.offsets:
                        self._hands.remove(hand)
                    break
        if self._late:
            for hand in self._late:
                hand.offsets.difference_update(offsets)
            self._late = [hand for hand in self._late if hand.offsets]

    def _blame(self, offsets: set[int], alone: set[int]) -> tuple[Batch, ...]:
        """Suspect these batches; returns those that are poison now."""
        poison = [o for o in sorted(offsets) if self._suspects.blame(o, alone=o in alone)]
        return tuple(round_.todo[o] for o in poison if (round_ := self.of(o)) is not None)

    def _drop(self, worker: WorkerId, offsets: Iterable[int], version: int) -> bool:
        """Void a worker's orders that a message at this version about these batches may answer."""
        offsets = set(offsets)
        return self._keep(
            lambda hand: (
                hand.worker != worker or hand.version > version or hand.offsets.isdisjoint(offsets)
            )
        )

    def _given_to(self, worker: WorkerId) -> list[Dispatch]:
        return [hand for hand in (*self._hands, *self._late) if hand.worker == worker]

    def _keep(self, stands: Callable[[Dispatch], bool]) -> bool:
        """Take all other orders back; whether there were some."""
        before = len(self._hands) + len(self._late)
        self._hands = list(filter(stands, self._hands))
        self._late = list(filter(stands, self._late))
        return len(self._hands) + len(self._late) < before


class Verdict(NamedTuple):
    """What a failure proves."""

    hopeless: tuple[Batch, ...] = ()  # batches that can never be used
    reason: str = ""  # why not
    hold: str = ""  # why no batch is to blame and the job must be held; empty where it need not


def judge(failed: Failed, rounds: Rounds) -> Verdict:
    """Take the order back, with or without blame.

    Args:
        failed: Of this leader, and not of an order that is over.
        rounds: In flight.
    """
    version = failed.model.version
    there = {o: round_ for o in failed.batches if (round_ := rounds.of(o)) is not None}
    if failed.reason not in ("raised", "not_finite"):
        had = rounds.requeue(failed.worker, failed.batches, version)
        if failed.reason == "task" and had:  # what comes late or twice is of a task that was mended
            return Verdict(hold=f"the task is wrong: {failed.detail}; mend it and resume the job")
        if failed.reason != "expired":
            return Verdict()
        return Verdict(tuple(round_.todo[o] for o, round_ in there.items()), "expired")
    poison = rounds.fail(failed.worker, failed.batches, version)
    if failed.reason == "not_finite" and there:
        rounds.not_finite.update(there)
        count = len(rounds.not_finite)
        most = max(round_.synchrony.group_size for round_ in there.values())
        if count >= max(2, (most + 1) // 2):  # half of the data cannot be bad at once
            rounds.not_finite.clear()
            return Verdict(
                hold=f"diverged: {count} batches, one after the other, are not finite"
                f" ({failed.detail}); lower the learning rate and start again"
            )
    return Verdict(poison, f"poison: {failed.reason}: {failed.detail}")
