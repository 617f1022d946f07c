"""Which worker computes a batch, until when, and who else is asked if that takes too long.

It does not matter for the model which worker computes a batch, so the leader may reassign batches
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

GROWTH = 1.5  # of a deadline with each time that a batch is handed out again
MOST_GROWTHS = 7  # times that it grows: to 17 times the first deadline, and no power overflows
RECENT_TIMES = 64  # gradient times remembered: a few rounds of a small fleet
# Newest times of one worker that its usual time is the median of: two slow gradients out of five
# change it little, and three rounds are enough to notice that a machine became slow.
OWN_TIMES = 5
# Times that it takes to believe that a worker is slow: the first gradient of a process warms it up.
BELIEVED_TIMES = 3
# A worker whose last time is older than this is tried with one batch that it holds. So no worker
# has nothing to do for 5 s, and a trial costs little, since others compute its batch, too.
TRIED_AGAIN_S = 4.0
READ_BACK_S = 0.01  # that a worker needs to read a batch from Kafka which it does not hold
# Time of a batch at another worker, over its usual time there, at which that worker gets it instead
# of the holder. Usual times of equal workers seldom differ by more.
FASTER = 1.75
QUANTILE = 0.95  # of recent times: one slow gradient in twenty may cost a needless re-dispatch


class GradientTimes:
    """Times that recent gradients took. Deadlines and the choice of workers depend on them.

    Args:
        floor_s: Shortest deadline, in seconds. It is the deadline while no time is known.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        # Seconds per batch, of all workers.
        self._recent = deque[float](maxlen=RECENT_TIMES)
        # The recent times, sorted. The list is empty until somebody needs it.
        self._ordered = list[float]()
        # Newest seconds per batch of each worker.
        self._own = dict[WorkerId, deque[float]]()
        # Median of a worker's own times. It is missing while a slow worker has too few of them.
        self._usual = dict[WorkerId, float]()
        # When a worker's last time was observed, or its last trial began.
        self._asked_at = dict[WorkerId, float]()
        # Usual time of the fastest worker, or None until somebody needs it.
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
    """What one order put into one worker's hands and is still expected back."""

    worker: WorkerId
    round: int  # that all of it is of
    offsets: set[int]
    version: int  # of the weights that it is computed at, or of later ones
    deadline: float
    alone: bool  # the order was of one batch: what went wrong with it is this batch's doing
    usual_at: float  # when its worker would usually be done with it

    def left_s(self, now: float) -> float:
        """Return in what time its gradient is expected.

        A worker that is later than usual is taken to need as long again as it is late.
        """
        return abs(self.usual_at - now)


class _Fleet:
    """The live workers, and what each has to do, while batches are handed out.

    Args:
        live: Workers that may be asked.
        busy_s: For how long each is expected to compute what it has been asked to.
    """

    def __init__(self, live: Iterable[WorkerId], busy_s: Mapping[WorkerId, float]) -> None:
        self.loads = dict.fromkeys(live, 0)  # batches that are waited for
        self.free_s = {worker: busy_s.get(worker, 0.0) for worker in self.loads}
        self.soonest_s = min(self.free_s.values(), default=0.0)  # at most the least of them
        self.closed = set[WorkerId]()  # has a suspect in hand: nothing may travel with it
        self.full = set[WorkerId]()  # has the one batch that an unknown worker gets
        self.tried: WorkerId | None = None  # has a batch that others would compute sooner

    def open_to(self, *, alone: bool) -> Collection[WorkerId]:
        """Return the workers that a batch may go to; a suspect must travel alone."""
        if not self.closed and not alone:
            return self.loads
        return [w for w in self.loads if w not in self.closed and not (alone and self.loads[w])]

    def give(self, worker: WorkerId, seconds: float) -> None:
        """Put one more batch into a worker's hands, which takes it so many seconds."""
        self.loads[worker] += 1
        self.free_s[worker] += seconds


class BatchAssigner:
    """Who has which batches of a leader's rounds in hand.

    Args:
        rounds: In flight, by number, oldest first; whoever begins and ends them changes it.
        suspects: Batches that may be poison.
        times: How long a gradient may take.
    """

    def __init__(
        self, rounds: Mapping[int, Round], suspects: Suspects, times: GradientTimes
    ) -> None:
        self._rounds = rounds
        self._suspects = suspects
        self._times = times
        # Orders that are waited for, whose batches are all without a gradient yet. No batch is in
        # two of them. It may be in a late one, too: past its deadline, or given to an idle worker
        # who would compute it sooner. The late worker may still be at it.
        self.hands = list[Dispatch]()
        self._late = list[Dispatch]()
        # Orders whose batches others computed first, by worker, until that worker says something:
        # it may still be at it.
        self._outrun = dict[WorkerId, Dispatch]()
        self._trial: Dispatch | None = None  # the newest order that only tries a worker
        # What `relieve` found: until when no order needs to be passed on, if none is given, and
        # whether one would be as soon as enough workers are idle.
        self._relief_at = -inf
        self._uneven = False
        # True if an order was not answered even in the longest time. Its worker may wait behind an
        # entry of the stream of triggers that Redis has lost, so the next trigger moves.
        self.unanswered = False

    def awaits(self, version: int) -> int:
        """The oldest version at which a gradient is still waited for."""
        return min([hand.version for hand in self.hands], default=version)

    @property
    def awaited(self) -> int:
        """Number of batches whose gradients are to come, if nobody else can be asked for one.

        0 if some batch is in nobody's hands, if its worker is late, or if the next idle worker
        would get it.
        """
        todo = sum([len(round_.todo) for round_ in self._rounds.values()])
        given = sum([len(hand.offsets) for hand in self.hands])
        return todo if todo == given and not (self._late or self._uneven) else 0

    def oldest_asked(self, version: int) -> int:
        """The oldest version at which somebody may still compute, waited for or not."""
        return min([hand.version for hand in (*self.hands, *self._late)], default=version)

    def loads(self) -> Counter[WorkerId]:
        """How many batches each worker has in hand, but for those that are late."""
        loads = Counter[WorkerId]()
        for hand in self.hands:
            loads[hand.worker] = loads.get(hand.worker, 0) + len(hand.offsets)
        return loads

    def idle(self, live: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Who has nothing in hand."""
        return frozenset(live).difference([h.worker for h in (*self.hands, *self._late)])

    def orders(
        self, now: float, live: Collection[WorkerId], version: int
    ) -> tuple[Assignment, ...]:
        """Hand out every batch that is in nobody's hands and can travel now, at this version."""
        # What is awaited of one worker, nobody else is asked for: so counts say whether all is.
        todo = sum([len(round_.todo) for round_ in self._rounds.values()])
        if todo == sum([len(hand.offsets) for hand in self.hands]):
            return ()  # which is so most of the times
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
        """Choose who computes which batches of a round, each in the order of the round."""
        suspects, chosen = self._suspects.offsets, dict[int, WorkerId]()
        for batch in self._soonest_first(lacking, fleet):
            suspect = batch.offset in suspects
            open_to = fleet.open_to(alone=suspect)
            if not open_to:
                continue  # asked again as soon as a hand empties
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
        """Give idle workers the batches of orders that slower workers have.

        The gradient that arrives first counts. The leader waits no more for an order that it has
        passed on, so it suspects none of its batches if the slower worker never answers. It passes
        on all batches of an order or none, because a gradient counts whole or not at all.
        """
        if not self._uneven and now < self._relief_at:
            return ()  # which is so most of the times
        fastest_s = self._times.fastest_s()
        self._relief_at, self._uneven = -inf, False
        if not fastest_s or len(live) < 2:
            return ()
        busy = {hand.worker for hand in (*self.hands, *self._late, *self._outrun.values())}
        idle = [worker for worker in live if worker not in busy]
        orders, due, suspects = list[Assignment](), inf, self._suspects.offsets
        for hand in sorted(self.hands, key=lambda hand: -hand.left_s(now)):
            if suspects and not suspects.isdisjoint(hand.offsets):
                continue  # a batch that may kill its worker is not given to a second one
            # The shortest time: all others are idle, and as fast as the fastest.
            needed_s = FASTER * (fastest_s + READ_BACK_S) * ceil(len(hand.offsets) / len(live))
            if hand.left_s(now) >= needed_s:
                self._uneven = True  # each worker that becomes idle may change what is found here
                if not idle:
                    continue
                shares = self._share_out(hand, idle)
                needed_s = FASTER * max(end_s for _, end_s in shares.values())
                if hand.left_s(now) >= needed_s:
                    orders += self._pass_on(hand, shares, now, version)
                    idle = [worker for worker in idle if worker not in shares]
                    due = min(due, now + needed_s)  # by then these should be done
                    continue
            due = min(due, hand.usual_at + needed_s)
        self._relief_at = max(due, now + READ_BACK_S)
        return tuple(orders)

    def _share_out(
        self, hand: Dispatch, idle: Iterable[WorkerId]
    ) -> dict[WorkerId, tuple[list[Batch], float]]:
        """Share the batches of an order out among idle workers.

        Returns:
            The batches of each, and in what time it would usually be done with them.
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
        """Give an order's batches to others as shared out, and stop waiting for the order."""
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
        """Put batches of a round into a worker's hands; returns the order that says so."""
        offsets = {batch.offset for batch in batches}
        hand = Dispatch(
            worker, round_.number, offsets, version, deadline, len(offsets) == 1, usual_at
        )
        self.hands.append(hand)
        self._relief_at = -inf
        squared = round_.settings.group_sizes is not None
        return Assignment(worker, tuple(batches), round_.synchrony.local_rate, squared)

    def _busy_s(self, now: float) -> dict[WorkerId, float]:
        """Return for how long each worker is expected to compute what it has been asked to."""
        busy_s = dict[WorkerId, float]()
        for hand in (*self.hands, *self._late, *self._outrun.values()):
            busy_s[hand.worker] = max(busy_s.get(hand.worker, 0.0), hand.left_s(now))
        return busy_s

    def _soonest_first(self, batches: Iterable[Batch], fleet: _Fleet) -> list[Batch]:
        """Sort batches by when their holder would be done with them; those of who is gone last.

        So a worker gets its own batches before it gets those of slower workers.
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
        """Learn what a worker's answer says of its speed, whether or not it counts.

        A worker whose gradients always come too late to count must be seen to be slow.
        """
        self._outrun.pop(reply.worker, None)
        if not isinstance(reply, Failed):
            self._times.observe(reply.worker, reply.seconds, len(reply.batches), now)

    def end(self, round_: Round) -> None:
        """Take back all orders of a round that is applied or put back."""
        self._keep(lambda hand: hand.round != round_.number)

    def release(self, worker: WorkerId, but: Collection[int] = ()) -> None:
        """Take back what a worker had in hand, which leaves as announced, and what is known of it.

        Args:
            worker: Who leaves.
            but: Batches that it still sends a gradient of.
        """
        self._outrun.pop(worker, None)
        self._times.forget(worker)
        self._keep(lambda hand: hand.worker != worker or not hand.offsets.isdisjoint(but))

    def recall(self) -> None:
        """Take all orders back, as if nobody had been asked: they did not get anywhere."""
        self.hands.clear()
        self._late.clear()
        self._outrun.clear()
        for round_ in self._rounds.values():
            round_.asked.clear()

    def due(self) -> float | None:
        """Return when a deadline passes, or an idle worker may get a slower one's order."""
        if not self.hands:
            return None
        deadline = min([hand.deadline for hand in self.hands])
        return min(deadline, self._relief_at) if self._relief_at > -inf else deadline

    def overdue(self, now: float) -> tuple[frozenset[WorkerId], tuple[Round, ...]]:
        """Ask others too for what is past its deadline.

        Returns:
            In whose hands it is, and of which rounds.
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
        """Return True if one of an order's batches has had the longest time."""
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

        It is the batch's holder, unless another worker would be done with it much sooner or the
        batch was assigned before. Otherwise it is, of the workers that were assigned this batch the
        fewest times, the one that would be done first. A holder whose last time is old gets a batch
        of its own that nobody had before, as a trial, although another worker would be done sooner.
        It gets a trial only if it has no other batch and no other trial is under way.
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

        # Nobody waits for the group of a lone worker.
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
        """Return True if a worker may be tried with one batch, though others would be faster."""
        trial = self._trial
        in_flight = trial is not None and (trial in self.hands or trial in self._late)
        idle = not fleet.loads[worker] and fleet.tried is None
        return idle and not in_flight and self._times.is_old(worker, now)

    def let_go(self, offsets: Collection[int], worker: WorkerId | None = None) -> None:
        """Wait for these batches no more; orders without any batch then go.

        Args:
            offsets: Batches that are counted, or out of their round.
            worker: Who computed them.
        """
        for offset in offsets:
            for hand in self.hands:  # the first, usually: answers come in the order of orders
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
        """Void a worker's orders that a message at this version about these batches may answer."""
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
        """Take all other orders back; whether there were some."""
        before = len(self.hands) + len(self._late)
        self.hands = list(filter(stands, self.hands))
        self._late = list(filter(stands, self._late))
        return len(self.hands) + len(self._late) < before
