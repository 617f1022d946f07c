"""Assignment of batches to workers: first choice, deadline, and reassignment.

The model does not depend on which worker computes a batch, so the leader may reassign batches
freely.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import ceil, inf
from typing import TYPE_CHECKING

import msgspec

from common.core.messages import Assignment, Batch, Failed, WorkerId

if TYPE_CHECKING:
    from common.core.messages import Gradient, GradientReady
    from common.core.poison import Suspects
    from common.core.rounds import Round

# Factor on a deadline for each reassignment of a batch.
GROWTH = 1.5
# Maximum number of times that a deadline grows. The longest deadline is 17 times the first.
MOST_GROWTHS = 7
# Number of recent gradient times: a few rounds of a small fleet.
RECENT_TIMES = 64
# Number of a worker's newest gradient times, whose median is its usual time. Two slow gradients of
# five change the median little, and three rounds are enough to notice that a machine became slow.
OWN_TIMES = 5
# Number of gradient times needed to consider a worker slow. The first gradient of a process is
# slow because it also warms the process up.
BELIEVED_TIMES = 3
# If a worker's last gradient time is older than this, the worker gets one of its own batches as a
# trial. So no worker is idle for 5 s. A trial costs little, because other workers compute the
# batch, too.
TRIED_AGAIN_S = 4.0
# Time to read a batch from Kafka that the worker does not have in memory.
READ_BACK_S = 0.01
# Reassign a batch only to a worker at least this many times faster than its current owner. Usual
# times of equal workers rarely differ by more.
FASTER = 1.75
# Quantile of recent times. One slow gradient in twenty may cost a needless reassignment.
QUANTILE = 0.95


class GradientTimes:
    """Times of recent gradients, which deadlines and the choice of workers depend on.

    Args:
        floor_s: Shortest deadline, in seconds. It is the deadline while no time is known.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        # Seconds per batch, of all workers.
        self._recent = deque[float](maxlen=RECENT_TIMES)
        # The recent times, sorted on demand. Empty if the order is not known.
        self._ordered = list[float]()
        # Newest seconds per batch of each worker.
        self._own = dict[WorkerId, deque[float]]()
        # Median of each worker's own times. It is missing while a worker seems to be slow, but has
        # fewer than `BELIEVED_TIMES` of them.
        self._usual = dict[WorkerId, float]()
        # When a worker's last time was observed, or its last trial began.
        self._asked_at = dict[WorkerId, float]()
        # Usual time of the fastest worker, computed on demand.
        self._fastest_s: float | None = None

    def observe(self, worker: WorkerId, seconds: float, batches: int, now: float) -> None:
        """Record that `batches` gradients, computed one after the other, took `seconds`."""
        each_s = seconds / max(batches, 1)
        self._recent.append(each_s)
        self._ordered.clear()
        self._fastest_s = None
        self._asked_at[worker] = now
        own = self._own.get(worker)
        if own is None:
            own = self._own[worker] = deque(maxlen=OWN_TIMES)
        own.append(each_s)
        usual_s = sorted(own)[(len(own) - 1) // 2]
        if len(own) < BELIEVED_TIMES and usual_s > FASTER * self._share_s(0.5):
            self._usual.pop(worker, None)
        else:
            self._usual[worker] = usual_s

    def tried(self, worker: WorkerId, now: float) -> None:
        """Record that a worker is tried with one batch."""
        self._asked_at[worker] = now

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that left or died, because another machine may reuse its name."""
        for known in (self._own, self._usual, self._asked_at):
            known.pop(worker, None)
        self._fastest_s = None

    def is_old(self, worker: WorkerId, now: float) -> bool:
        """Return True if a worker had no time and no trial for longer than `TRIED_AGAIN_S`."""
        return now - self._asked_at.get(worker, -inf) > TRIED_AGAIN_S

    def is_known(self, worker: WorkerId) -> bool:
        """Return True if a worker has enough times to rate it by them."""
        return worker in self._usual

    def usual_s(self, worker: WorkerId) -> float:
        """Return a worker's median time per batch, or that of all workers if it is unknown."""
        usual_s = self._usual.get(worker)
        return self._share_s(0.5) if usual_s is None else usual_s

    def fastest_s(self) -> float:
        """Return the usual time of the fastest worker, or 0 while no time is known."""
        if self._fastest_s is None:
            self._fastest_s = min(self._usual.values(), default=self._share_s(0.5))
        return self._fastest_s

    def _share_s(self, share: float) -> float:
        """Return the time that this share of recent gradients did not exceed, or 0 if none."""
        if not self._ordered:
            self._ordered = sorted(self._recent)
        return self._ordered[int(share * (len(self._ordered) - 1))] if self._ordered else 0.0

    def allowed_s(self, batches: int, attempt: int) -> float:
        """Return the time that a worker gets for `batches`; `attempt` counts from 0."""
        growth = GROWTH ** min(attempt, MOST_GROWTHS)
        return (self._floor_s + self._share_s(QUANTILE) * batches) * growth


class Dispatch(msgspec.Struct, eq=False, gc=False):
    """An order in progress: batches of one round that one worker still has to compute."""

    worker: WorkerId
    # Number of the round of all batches.
    round: int
    offsets: set[int]
    # Oldest version at which the gradient may be computed.
    version: int
    deadline: float
    # True if the order has one batch, so that a failure is caused by that batch.
    alone: bool
    # Expected time of the reply.
    usual_at: float

    def left_s(self, now: float) -> float:
        """Return the time until the gradient is expected.

        A worker that is already late is expected to take as long again as it is late.
        """
        return abs(self.usual_at - now)


class _Fleet:
    """Living workers and their load during one pass of assignments.

    Args:
        live: Workers that may get batches.
        busy_s: Time that each worker is expected to compute its current orders.
    """

    def __init__(self, live: Iterable[WorkerId], busy_s: Mapping[WorkerId, float]) -> None:
        # Number of awaited batches.
        self.loads = dict.fromkeys(live, 0)
        self.free_s = {worker: busy_s.get(worker, 0.0) for worker in self.loads}
        # Lower bound of all values in `free_s`.
        self.soonest_s = min(self.free_s.values(), default=0.0)
        # Workers with a suspect batch, which get no other batch.
        self.closed = set[WorkerId]()
        # Workers of unknown speed, or on trial, that have a batch. Other workers are preferred for
        # the next one.
        self.full = set[WorkerId]()
        # The worker on trial: others would compute its batch sooner.
        self.tried: WorkerId | None = None

    def open_to(self, *, alone: bool) -> Collection[WorkerId]:
        """Return the workers that may get a batch. If `alone`, only those without any batch."""
        if not self.closed and not alone:
            return self.loads
        return [w for w in self.loads if w not in self.closed and not (alone and self.loads[w])]

    def give(self, worker: WorkerId, seconds: float) -> None:
        """Assign one more batch, which takes the worker `seconds`."""
        self.loads[worker] += 1
        self.free_s[worker] += seconds


class BatchAssigner:
    """Orders of all workers in a leader's rounds.

    Args:
        rounds: Rounds in flight by number, oldest first. The owner adds and removes them.
        suspects: Batches that may be poison.
        times: Gradient times of the workers.
    """

    def __init__(
        self, rounds: Mapping[int, Round], suspects: Suspects, times: GradientTimes
    ) -> None:
        self._rounds = rounds
        self._suspects = suspects
        self._times = times
        # Awaited orders. None of their batches has a gradient, and no batch is in two of them. A
        # batch may also be in a late order: one past its deadline, or passed on to an idle
        # worker that would be faster. The late worker may still compute it.
        self.hands = list[Dispatch]()
        self._late = list[Dispatch]()
        # Orders whose batches others computed first, by worker. The worker may still compute
        # them until its next reply.
        self._outrun = dict[WorkerId, Dispatch]()
        # The newest order given as a trial.
        self._trial: Dispatch | None = None
        # Results of `relieve`: no order needs to be passed on before `_relief_at`, and `_uneven` is
        # True if one should be passed on once enough workers are idle.
        self._relief_at = -inf
        self._uneven = False
        # True if an order got no reply within the longest deadline. The worker may be stuck behind
        # an entry of the trigger stream that Redis has lost, so the next trigger goes to another
        # stream.
        self.unanswered = False

    def awaits(self, version: int) -> int:
        """Return the oldest version at which a gradient is awaited, or `version` if none is."""
        return min([hand.version for hand in self.hands], default=version)

    @property
    def awaited(self) -> int:
        """Number of batches with an outstanding gradient, if none of them can be reassigned now.

        0 if some batch is unassigned, if its worker is late, or if the next idle worker would get
        it.
        """
        todo = sum([len(round_.todo) for round_ in self._rounds.values()])
        given = sum([len(hand.offsets) for hand in self.hands])
        return todo if todo == given and not (self._late or self._uneven) else 0

    def oldest_asked(self, version: int) -> int:
        """Return the oldest version that a worker may still compute at, awaited or not."""
        return min([hand.version for hand in (*self.hands, *self._late)], default=version)

    def loads(self) -> Counter[WorkerId]:
        """Return the number of batches in each worker's orders that are not late."""
        loads = Counter[WorkerId]()
        for hand in self.hands:
            loads[hand.worker] = loads.get(hand.worker, 0) + len(hand.offsets)
        return loads

    def idle(self, live: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Return the workers without an order."""
        return frozenset(live).difference([h.worker for h in (*self.hands, *self._late)])

    def orders(
        self, now: float, live: Collection[WorkerId], version: int
    ) -> tuple[Assignment, ...]:
        """Assign each unassigned batch to a worker, if one may get it now, at this version."""
        # No batch is in two orders, so equal counts mean that all batches are assigned.
        todo = sum([len(round_.todo) for round_ in self._rounds.values()])
        if todo == sum([len(hand.offsets) for hand in self.hands]):
            # The usual case.
            return ()
        return self._hand_out(now, live, version)

    def _hand_out(
        self, now: float, live: Collection[WorkerId], version: int
    ) -> tuple[Assignment, ...]:
        held = {offset for hand in self.hands for offset in hand.offsets}
        suspects = self._suspects.offsets
        fleet = _Fleet(live, self._busy_s(now))
        for hand in self.hands:
            if hand.worker in fleet.loads:
                fleet.loads[hand.worker] += len(hand.offsets)
            if not suspects.isdisjoint(hand.offsets):
                fleet.closed.add(hand.worker)
        orders = list[Assignment]()
        for round_ in self._rounds.values():
            lacking = [batch for offset, batch in round_.todo.items() if offset not in held]
            for worker, batches in self._assign(round_, lacking, fleet, now).items():
                attempt = max([len(round_.asked[batch.offset]) for batch in batches]) - 1
                deadline = now + self._times.allowed_s(fleet.loads[worker], attempt)
                usual_at = now + fleet.free_s[worker]
                orders.append(self._give(round_, worker, batches, version, deadline, usual_at))
                if worker == fleet.tried:
                    self._trial = self.hands[-1]
        return tuple(orders)

    def _assign(
        self, round_: Round, lacking: Sequence[Batch], fleet: _Fleet, now: float
    ) -> dict[WorkerId, list[Batch]]:
        """Choose a worker for each batch. The batches of a worker keep the order of the round."""
        suspects, chosen = self._suspects.offsets, dict[int, WorkerId]()
        for batch in self._soonest_first(lacking, fleet):
            suspect = batch.offset in suspects
            open_to = fleet.open_to(alone=suspect)
            if not open_to:
                # Assigned as soon as a worker is free.
                continue
            worker = chosen[batch.offset] = self._choose(round_, batch, open_to, fleet, now)
            own = worker == (round_.worker or batch.worker)
            fleet.give(worker, self._times.usual_s(worker) + (0.0 if own else READ_BACK_S))
            if suspect:
                fleet.closed.add(worker)
        given = dict[WorkerId, list[Batch]]()
        for batch in lacking:
            if batch.offset in chosen:
                given.setdefault(chosen[batch.offset], []).append(batch)
        return given

    def relieve(
        self, now: float, live: Collection[WorkerId], version: int
    ) -> tuple[Assignment, ...]:
        """Pass orders of slower workers on to idle workers.

        The first gradient counts. The leader no longer waits for the original order, so none of its
        batches becomes a suspect if the slower worker never replies. All batches of an order are
        passed on or none, because a gradient counts whole or not at all.
        """
        if not self._uneven and now < self._relief_at:
            # The usual case.
            return ()
        fastest_s = self._times.fastest_s()
        self._relief_at, self._uneven = -inf, False
        if not fastest_s or len(live) < 2:
            return ()
        busy = {hand.worker for hand in (*self.hands, *self._late, *self._outrun.values())}
        idle = [worker for worker in live if worker not in busy]
        orders, due, suspects = list[Assignment](), inf, self._suspects.offsets
        for hand in sorted(self.hands, key=lambda hand: -hand.left_s(now)):
            if suspects and not suspects.isdisjoint(hand.offsets):
                # A batch that may kill its worker must not go to a second one.
                continue
            # The best case: all other workers are idle, and as fast as the fastest.
            needed_s = FASTER * (fastest_s + READ_BACK_S) * ceil(len(hand.offsets) / len(live))
            if hand.left_s(now) >= needed_s:
                # Each worker that becomes idle may change this result.
                self._uneven = True
                if not idle:
                    continue
                shares = self._share_out(hand, idle)
                needed_s = FASTER * max(end_s for _, end_s in shares.values())
                if hand.left_s(now) >= needed_s:
                    orders += self._pass_on(hand, shares, now, version)
                    idle = [worker for worker in idle if worker not in shares]
                    # The new orders should be finished by then.
                    due = min(due, now + needed_s)
                    continue
            due = min(due, hand.usual_at + needed_s)
        self._relief_at = max(due, now + READ_BACK_S)
        return tuple(orders)

    def _share_out(
        self, hand: Dispatch, idle: Iterable[WorkerId]
    ) -> dict[WorkerId, tuple[list[Batch], float]]:
        """Divide the batches of an order among idle workers.

        Returns:
            The batches of each worker, and the time it would usually need for them.
        """
        todo, usual_s = self._rounds[hand.round].todo, self._times.usual_s
        each_s = {worker: usual_s(worker) + READ_BACK_S for worker in idle}
        free_s = dict.fromkeys(each_s, 0.0)
        shares = dict[WorkerId, list[Batch]]()
        for offset in sorted(hand.offsets):
            worker = min(each_s, key=lambda worker: (free_s[worker] + each_s[worker], worker))
            free_s[worker] += each_s[worker]
            shares.setdefault(worker, []).append(todo[offset])
        return {worker: (batches, free_s[worker]) for worker, batches in shares.items()}

    def _pass_on(
        self,
        hand: Dispatch,
        shares: Mapping[WorkerId, tuple[list[Batch], float]],
        now: float,
        version: int,
    ) -> Iterator[Assignment]:
        """Move an order's batches to the workers in `shares`, and stop waiting for the order."""
        self.hands.remove(hand)
        self._late.append(hand)
        round_ = self._rounds[hand.round]
        for worker, (batches, usual_s) in shares.items():
            attempt = max([len(round_.asked[batch.offset]) for batch in batches])
            deadline = now + self._times.allowed_s(len(batches), attempt)
            yield self._give(round_, worker, batches, version, deadline, now + usual_s)

    def _give(
        self,
        round_: Round,
        worker: WorkerId,
        batches: Sequence[Batch],
        version: int,
        deadline: float,
        usual_at: float,
    ) -> Assignment:
        """Record batches of a round as assigned to a worker, and return the order for it."""
        offsets = {batch.offset for batch in batches}
        hand = Dispatch(
            worker, round_.number, offsets, version, deadline, len(offsets) == 1, usual_at
        )
        self.hands.append(hand)
        self._relief_at = -inf
        squared = round_.settings.group_sizes is not None
        return Assignment(worker, tuple(batches), round_.synchrony.local_rate, squared)

    def _busy_s(self, now: float) -> dict[WorkerId, float]:
        """Return the time that each worker is expected to compute its current orders."""
        busy_s = dict[WorkerId, float]()
        for hand in (*self.hands, *self._late, *self._outrun.values()):
            busy_s[hand.worker] = max(busy_s.get(hand.worker, 0.0), hand.left_s(now))
        return busy_s

    def _soonest_first(self, batches: Iterable[Batch], fleet: _Fleet) -> list[Batch]:
        """Sort batches by when their holder would finish them. Batches of absent workers come last.

        A worker then gets its own batches before those of slower workers.
        """
        done_s = dict(fleet.free_s)
        keys = list[tuple[float, int, Batch]]()
        for place, batch in enumerate(batches):
            done_s[batch.worker] = at = done_s.get(batch.worker, inf) + self._times.usual_s(
                batch.worker
            )
            keys.append((at, place, batch))
        return [batch for _, _, batch in sorted(keys)]

    def receive(self, reply: Gradient | GradientReady | Failed, now: float) -> None:
        """Record the speed that a reply shows, even if the reply does not count.

        A worker whose gradients always arrive too late must be recognised as slow.
        """
        self._outrun.pop(reply.worker, None)
        if not isinstance(reply, Failed):
            self._times.observe(reply.worker, reply.seconds, len(reply.batches), now)

    def end(self, round_: Round) -> None:
        """Remove all orders of a round that is applied or put back."""
        self._keep(lambda hand: hand.round != round_.number)

    def release(self, worker: WorkerId, but: Collection[int] = ()) -> None:
        """Remove the orders and times of a worker that leaves.

        Args:
            worker: The leaving worker.
            but: Batches whose gradients it will still send.
        """
        self._outrun.pop(worker, None)
        self._times.forget(worker)
        self._keep(lambda hand: hand.worker != worker or not hand.offsets.isdisjoint(but))

    def recall(self) -> None:
        """Remove all orders, because none of them reached a worker."""
        self.hands.clear()
        self._late.clear()
        self._outrun.clear()
        for round_ in self._rounds.values():
            round_.asked.clear()

    def due(self) -> float | None:
        """Return the next deadline, or when an idle worker may get a slower one's order."""
        if not self.hands:
            return None
        deadline = min([hand.deadline for hand in self.hands])
        return min(deadline, self._relief_at) if self._relief_at > -inf else deadline

    def overdue(self, now: float) -> tuple[frozenset[WorkerId], tuple[Round, ...]]:
        """Mark overdue orders as late, so that their batches are reassigned.

        Returns:
            The workers that are late, and the rounds of their orders.
        """
        late = [hand for hand in self.hands if hand.deadline <= now]
        if late:
            self.hands = [hand for hand in self.hands if hand.deadline > now]
            self._late += late
            self.unanswered |= any(map(self._is_unanswered, late))
        of = {hand.round for hand in late}
        rounds = tuple(round_ for number, round_ in self._rounds.items() if number in of)
        return frozenset(hand.worker for hand in late), rounds

    def _is_unanswered(self, hand: Dispatch) -> bool:
        """Return True if a batch of an order has had the longest deadline."""
        asked = self._rounds[hand.round].asked
        return any(len(asked.get(offset, ())) > MOST_GROWTHS for offset in hand.offsets)

    def _choose(
        self,
        round_: Round,
        batch: Batch,
        open_to: Collection[WorkerId],
        fleet: _Fleet,
        now: float,
    ) -> WorkerId:
        """Return the worker that should compute a batch.

        This is the batch's holder, unless another worker would finish it much sooner or the batch
        was assigned before. Otherwise it is, of the workers that were assigned this batch the
        fewest times, the one that would finish first. A holder whose last time is old gets one of
        its own unassigned batches as a trial, although another worker would finish sooner. It gets
        a trial only if it has no other batch and no other trial is in flight.
        """
        asked = round_.asked.setdefault(batch.offset, [])
        times, free_s, full = self._times, fleet.free_s, fleet.full
        holder, fastest_s = round_.worker or batch.worker, times.fastest_s()
        margin_s = FASTER * fastest_s + READ_BACK_S
        first = not asked and holder in open_to
        chosen = holder

        def done_s(worker: WorkerId) -> float:
            if worker == holder:
                return free_s[worker] + times.usual_s(worker)
            return free_s[worker] + FASTER * times.usual_s(worker) + READ_BACK_S

        def rank(worker: WorkerId) -> tuple[int, bool, float, int, bool, WorkerId]:
            other = worker != holder
            loads = fleet.loads[worker]
            return asked.count(worker), worker in full, done_s(worker), loads, other, worker

        # If a single worker computes the group, no other worker waits for it.
        stays = first and (
            bool(round_.worker)
            or (holder not in full and done_s(holder) <= fleet.soonest_s + margin_s)
        )
        if not stays:
            fleet.soonest_s = min(free_s.values())
            chosen = min(open_to, key=rank)
            if first and chosen != holder and self._may_try(holder, fleet, now):
                times.tried(holder, now)
                chosen = fleet.tried = holder
        if (
            fastest_s
            and not round_.worker
            and (fleet.tried == chosen or not times.is_known(chosen))
        ):
            full.add(chosen)
        asked.append(chosen)
        return chosen

    def _may_try(self, worker: WorkerId, fleet: _Fleet, now: float) -> bool:
        """Return True if a worker may get one batch as a trial, though others would be faster."""
        trial = self._trial
        in_flight = trial is not None and (trial in self.hands or trial in self._late)
        idle = not fleet.loads[worker] and fleet.tried is None
        return idle and not in_flight and self._times.is_old(worker, now)

    def settle(self, offsets: Collection[int], worker: WorkerId | None = None) -> None:
        """Stop waiting for these batches, and remove orders that have no batch left.

        Args:
            offsets: Batches that are counted or were removed from their round.
            worker: The worker that computed them.
        """
        for offset in offsets:
            # Usually the first order, because replies arrive in that order.
            for hand in self.hands:
                if offset in hand.offsets:
                    hand.offsets.remove(offset)
                    if not hand.offsets:
                        self.hands.remove(hand)
                        if hand.worker != worker:
                            self._outrun.setdefault(hand.worker, hand)
                    break
        if self._late:
            for hand in self._late:
                hand.offsets.difference_update(offsets)
                if not hand.offsets and hand.worker != worker:
                    self._outrun.setdefault(hand.worker, hand)
            self._late = [hand for hand in self._late if hand.offsets]

    def drop(self, worker: WorkerId, offsets: Iterable[int], version: int) -> bool:
        """Remove a worker's orders with one of these batches. Return True if any was removed.

        Orders at a later version stay, because a reply at this version cannot answer them.
        """
        offsets = set(offsets)
        return self._keep(
            lambda hand: (
                hand.worker != worker or hand.version > version or hand.offsets.isdisjoint(offsets)
            )
        )

    def given_to(self, worker: WorkerId) -> list[Dispatch]:
        """Return a worker's orders, late or not."""
        return [hand for hand in (*self.hands, *self._late) if hand.worker == worker]

    def _keep(self, stands: Callable[[Dispatch], bool]) -> bool:
        """Remove all orders that do not satisfy `stands`. Return True if any was removed."""
        before = len(self.hands) + len(self._late)
        self.hands = list(filter(stands, self.hands))
        self._late = list(filter(stands, self._late))
        return len(self.hands) + len(self._late) < before
