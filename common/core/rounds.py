"""A round: one update in flight, from its K batches to its K gradients.

A gradient message counts whole or not at all: if and only if it is of the round's model and none of
its batches has been counted. So whatever comes twice, late or from a ghost, an update is made of
exactly its batches. Who computes them does not matter, so work is handed out again freely.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import Assignment, Batch, UpdateApplied, WorkerId

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from common.core.messages import Failed, Gradient, ModelId

GROWTH = 1.5  # of a deadline with each time that a batch is handed out again
MOST_GROWTHS = 7  # times that it grows: to 17 times the first deadline, and no power overflows
RECENT_TIMES = 64  # gradient times remembered: a few rounds of a small fleet
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

    def observe(self, seconds: float, batches: int) -> None:
        """Take in a measured time of `batches` gradients computed one after the other."""
        self._recent.append(seconds / max(batches, 1))
        self._quantile_s = None

    def allowed_s(self, batches: int, attempt: int) -> float:
        """Time for `batches` in one worker's hands, the `attempt`-th time (from 0)."""
        if self._quantile_s is None:
            ordered = sorted(self._recent)
            self._quantile_s = ordered[int(QUANTILE * (len(ordered) - 1))]
        growth = GROWTH ** min(attempt, MOST_GROWTHS)
        return (self._floor_s + self._quantile_s * batches) * growth


class Suspects:
    """Batches that may be poison: their message died with its worker, raised, or was not finite.

    A suspect travels alone from then on, and only what happens to it alone earns strikes: company
    could have been the cause.

    Args:
        limit: Strikes that a batch may have; one more is poison.
        strikes: Where a snapshot left off, by control offset.
    """

    def __init__(self, limit: int, strikes: Mapping[int, int] | None = None) -> None:
        self._limit = limit
        self._strikes = dict(strikes or {})

    @property
    def strikes(self) -> dict[int, int]:
        """Strikes of every suspect; a copy."""
        return dict(self._strikes)

    def __contains__(self, offset: object) -> bool:
        return offset in self._strikes

    def blame(self, offset: int, *, alone: bool) -> bool:
        """Suspect a batch, and strike it if it was alone; True where that makes it poison."""
        self._strikes[offset] = self._strikes.get(offset, 0) + alone
        return self._strikes[offset] > self._limit

    def clear(self, offsets: Iterable[int]) -> None:
        """Acquit batches that gave a gradient, or forget those that are settled."""
        for offset in offsets:
            self._strikes.pop(offset, None)


@dataclass(slots=True, eq=False)
class Dispatch:
    """What one order put into one worker's hands and is still expected back."""

    worker: WorkerId
    offsets: set[int]
    deadline: float
    alone: bool  # the order was of one batch: what went wrong with it is this batch's doing
    late: bool = False  # past its deadline: others are asked too, but it may be at it still


class Round:
    """The batches of one update, who has them in hand, and which have been counted.

    Args:
        model: The weights that all gradients must be taken at.
        batches: The group, fairest first.
        suspects: Shared by all rounds of a leader.
        times: Likewise.
    """

    def __init__(
        self, model: ModelId, batches: Iterable[Batch], suspects: Suspects, times: GradientTimes
    ) -> None:
        self.model = model
        self._suspects = suspects
        self._times = times
        self._todo = {batch.offset: batch for batch in batches}
        self._counted = dict[int, Batch]()
        self._hands = list[Dispatch]()
        self._asked = dict[int, list[WorkerId]]()  # who has been asked for a batch so far
        self.not_finite = set[int]()  # batches that gave no finite gradient
        self.samples = 0
        self.seconds = 0.0  # of all gradients counted
        self.loss_sum = 0.0
        self.metric_sums = dict[str, float]()

    @property
    def todo(self) -> tuple[Batch, ...]:
        """Batches without a gradient yet."""
        return tuple(self._todo.values())

    @property
    def counted(self) -> tuple[Batch, ...]:
        """Batches whose gradient is in the sum."""
        return tuple(self._counted.values())

    @property
    def asked_again(self) -> bool:
        """Whether some batch was handed out more than once."""
        return any(len(asked) > 1 for asked in self._asked.values())

    def __len__(self) -> int:
        return len(self._todo) + len(self._counted)

    def fill(self, batches: Iterable[Batch]) -> None:
        """Take further batches in, in place of some that were quarantined."""
        self._todo.update((batch.offset, batch) for batch in batches)

    def orders(self, now: float, live: Collection[WorkerId]) -> tuple[Assignment, ...]:
        """Hand out every batch that is in nobody's hands and can travel now."""
        awaited = [hand for hand in self._hands if not hand.late]
        held = {offset for hand in awaited for offset in hand.offsets}
        loads = dict.fromkeys(sorted(live), 0)
        closed = set[WorkerId]()  # has a suspect in hand: nothing may travel with it
        for hand in awaited:
            if hand.worker in loads:
                loads[hand.worker] += len(hand.offsets)
            if any(offset in self._suspects for offset in hand.offsets):
                closed.add(hand.worker)
        given = dict[WorkerId, list[Batch]]()
        for batch in self._todo.values():
            if batch.offset in held:
                continue
            suspect = batch.offset in self._suspects
            open_to: Collection[WorkerId] = loads
            if closed or suspect:
                open_to = [w for w in loads if w not in closed and not (suspect and loads[w])]
            if not open_to:
                continue  # asked again as soon as a hand empties
            worker = self._choose(batch, open_to, loads)
            given.setdefault(worker, []).append(batch)
            loads[worker] += 1
            if suspect:
                closed.add(worker)
        return tuple(
            self._give(worker, batches, loads[worker], now) for worker, batches in given.items()
        )

    def count(self, gradient: Gradient) -> str:
        """Count a gradient message, or say why it does not count (empty where it does)."""
        if gradient.model != self.model:
            return f"of model {tuple(gradient.model)}, not {tuple(self.model)}"
        if len(set(gradient.batches)) != len(gradient.batches) or not gradient.batches:
            return "names a batch twice, or none"
        again = [offset for offset in gradient.batches if offset not in self._todo]
        if again or gradient.samples != sum([self._todo[o].samples for o in gradient.batches]):
            # Its order is void. What else was in it goes to somebody else.
            self._drop(gradient.worker, gradient.batches)
            return f"batches {again} do not wait" if again else "has not the batches' samples"
        self._times.observe(gradient.seconds, len(gradient.batches))
        for offset in gradient.batches:
            self._counted[offset] = self._todo.pop(offset)
        self._let_go(gradient.batches)
        self._suspects.clear(gradient.batches)
        self.samples += gradient.samples
        self.seconds += gradient.seconds
        self.loss_sum += gradient.loss_sum
        for name, value in gradient.metric_sums.items():
            self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value
        return ""

    def update(self, epoch: int, short: str, revision: int) -> UpdateApplied:
        """The update that its counted batches make.

        Args:
            epoch: Of the leader.
            short: Why they are fewer than K, empty where they are not.
            revision: Of the settings that it was made under.
        """
        skipped = Counter[str]()
        for batch in self.counted:
            for left_out in batch.skipped:
                skipped[left_out.topic] += left_out.records
        return UpdateApplied(
            epoch=epoch,
            version=self.model.version + 1,
            batches=tuple(batch.without_skipped() for batch in self.counted),
            samples=self.samples,
            loss=self.loss_sum / self.samples,
            metrics={name: total / self.samples for name, total in self.metric_sums.items()},
            short=short,
            revision=revision,
            gradient_s=self.seconds / len(self._counted),
            skipped=dict(skipped),
        )

    def requeue(self, worker: WorkerId, offsets: Iterable[int]) -> bool:
        """Take an order back without blame: the worker leaves, or could not get data or model.

        Returns:
            Whether it had any of these batches in hand.
        """
        return self._drop(worker, offsets)

    def fail(self, worker: WorkerId, offsets: Iterable[int]) -> tuple[Batch, ...]:
        """Take an order back, blaming these batches of it; returns those that are poison now."""
        offsets = set(offsets)
        hands = [hand for hand in self._hands if hand.worker == worker]
        alone = {offset for hand in hands if hand.alone for offset in hand.offsets}
        blamed = {offset for hand in hands for offset in hand.offsets} & offsets
        self._drop(worker, offsets)
        return self._blame(blamed, alone)

    def vanish(self, worker: WorkerId) -> tuple[Batch, ...]:
        """A worker died without notice; returns the batches that are poison now."""
        hands = [hand for hand in self._hands if hand.worker == worker]
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
        self._hands = [h for h in self._hands if h.worker != worker or (h.offsets & set(but))]

    def recall(self) -> None:
        """Take all orders back, as if nobody had been asked: they did not get anywhere."""
        self._hands.clear()
        self._asked.clear()

    def due(self) -> float | None:
        """The earliest deadline that has not passed, or None where there is none."""
        return min((hand.deadline for hand in self._hands if not hand.late), default=None)

    def overdue(self, now: float) -> frozenset[WorkerId]:
        """Ask others too for what is past its deadline; returns in whose hands it is."""
        late = [hand for hand in self._hands if not hand.late and hand.deadline <= now]
        for hand in late:
            hand.late = True
        return frozenset(hand.worker for hand in late)

    def settle(self, offset: int) -> Batch | None:
        """Take a batch out of the round for good (quarantine); None if it has no place in it."""
        batch = self._todo.pop(offset, None)
        if batch is not None:
            self._suspects.clear([offset])
            self._let_go([offset])
        return batch

    def give_up(self) -> tuple[Batch, ...]:
        """Take all uncounted batches out of the round (`on_missing: proceed`)."""
        missing = self.todo
        self._todo, self._hands = {}, []
        return missing

    def _choose(
        self, batch: Batch, open_to: Collection[WorkerId], loads: Mapping[WorkerId, int]
    ) -> WorkerId:
        """The holder the first time; then who was asked least for it, and has least to do."""
        asked = self._asked.setdefault(batch.offset, [])
        if not asked and batch.worker in open_to:
            worker = batch.worker
        else:
            worker = min(open_to, key=lambda w: (asked.count(w), loads[w], w != batch.worker, w))
        asked.append(worker)
        return worker

    def _give(self, worker: WorkerId, batches: list[Batch], load: int, now: float) -> Assignment:
        """Put batches into a worker's hands, which then hold `load` of them."""
        offsets = {batch.offset for batch in batches}
        attempt = max([len(self._asked[offset]) for offset in offsets]) - 1
        allowed_s = self._times.allowed_s(load, attempt)
        self._hands.append(Dispatch(worker, offsets, now + allowed_s, alone=len(offsets) == 1))
        return Assignment(worker, tuple(batches))

    def _let_go(self, offsets: Collection[int]) -> None:
        """Nobody is to compute these batches any more; hands that are empty then go."""
        touched = [hand for hand in self._hands if not hand.offsets.isdisjoint(offsets)]
        for hand in touched:
            hand.offsets.difference_update(offsets)
            if not hand.offsets:
                self._hands.remove(hand)

    def _blame(self, offsets: set[int], alone: set[int]) -> tuple[Batch, ...]:
        """Suspect these batches; returns those that are poison now."""
        poison = [o for o in sorted(offsets) if self._suspects.blame(o, alone=o in alone)]
        return tuple(self._todo[offset] for offset in poison)

    def _drop(self, worker: WorkerId, offsets: Iterable[int]) -> bool:
        """Void a worker's orders that hold any of these batches: one message answers an order."""
        offsets, before = set(offsets), len(self._hands)
        self._hands = [h for h in self._hands if h.worker != worker or not (h.offsets & offsets)]
        return len(self._hands) < before


SETTLED_WINDOW = 100  # batches over which the share of poison is judged


class Verdict(NamedTuple):
    """What a failure proves."""

    hopeless: tuple[Batch, ...] = ()  # batches that can never be used
    reason: str = ""  # why not
    hold: str = ""  # why no batch is to blame and the job must be held; empty where it need not


def judge(failed: Failed, round_: Round, group_size: int) -> Verdict:
    """Take the order back, with or without blame.

    Args:
        failed: Of this round's model.
        round_: The round in flight.
        group_size: K
    """
    if failed.reason not in ("raised", "not_finite"):
        had = round_.requeue(failed.worker, failed.batches)
        if failed.reason == "task" and had:  # what comes late or twice is of a task that was mended
            return Verdict(hold=f"the task is wrong: {failed.detail}; mend it and resume the job")
        if failed.reason != "expired":
            return Verdict()
        return Verdict(tuple(b for b in round_.todo if b.offset in failed.batches), "expired")
    if failed.reason == "not_finite":
        round_.not_finite.update(b.offset for b in round_.todo if b.offset in failed.batches)
    poison = round_.fail(failed.worker, failed.batches)
    count = len(round_.not_finite)
    if count >= max(2, (group_size + 1) // 2):  # half of the data cannot be bad at once
        return Verdict(
            hold=f"diverged: {count} batches of one round are not finite;"
            " lower the learning rate and start again"
        )
    return Verdict(poison, f"poison: {failed.reason}: {failed.detail}")


class PoisonLimits:
    """How much of what was settled last is poison: so much at once is the task's fault, not data's.

    A leader counts anew: after a takeover, and after its job was held for it and resumed.

    Args:
        in_a_row: Poison batches without one applied update between them that are too many.
        share: Of the last `SETTLED_WINDOW` settled batches, more than which are too many.
    """

    def __init__(self, in_a_row: int, share: float) -> None:
        self._most_in_a_row = in_a_row
        self._share = share
        self._in_a_row = 0
        self._settled = deque[bool](maxlen=SETTLED_WINDOW)  # whether each was poison

    def forget(self) -> None:
        """Count anew."""
        self._in_a_row = 0
        self._settled.clear()

    def applied(self, batches: int) -> None:
        """An update of so many batches was applied."""
        self._in_a_row = 0
        self._settled.extend([False] * batches)

    def quarantined(self) -> str:
        """A batch turned out to be poison; says why that is too much, empty where it is not."""
        self._in_a_row += 1
        self._settled.append(True)
        if self._in_a_row >= self._most_in_a_row:
            return f"{self._in_a_row} batches in a row"
        count = sum(self._settled)
        # Of a window that is not full yet, too: the first batch of a job may well be bad.
        if count > self._share * SETTLED_WINDOW:
            return f"{count} of the last {len(self._settled)} batches"
        return ""
