"""The stream side of a worker: where it may read, and what it announces (Algorithm 1).

A worker has no source of positions but the leader's status. It begins, and begins again after a
rebalance or a lost race, where that status says that everything below is claimed; and only when it
has decided everything that the worker ever announced on the partition.

    announced   [0:10]  [10:20]  [20:30]             offsets of p; control offsets 4, 7, 9
    status      control 8, claimed[p]=20             4 and 7 decided, 20 is the end of 7: in place
    status      control 8, claimed[p]=15             another worker moved it: place lost
    status      control 10, claimed[p]=35            all three decided: read on from 35

A place is what the leader's status knows of the log: the topic's id, and the leader epoch of the
last record that is claimed. Where the log turns out to be another one, the worker leaves the
partition alone until that status says something else: what to do about it is the leader's to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from common.core import worker_messages as do
from common.core import worker_messages as events
from common.core.batching import Batcher, Cut, DecodedRun
from common.core.liveness import ALIVE, LEAVING, TOO_FEW
from common.core.messages import BatchReady, SpanExpired, TriggerStream, Unsettled
from common.core.spans import Address, LogPosition, Partition, Span, address_of

if TYPE_CHECKING:
    from common.core.messages import LeaderStatus, Positions, WorkerId
    from common.core.settings import WorkerSettings
    from common.core.worker_messages import WorkerCommand, WorkerEvent


# So long a leader's status is ignored that is older than one that was seen. That saves work, no
# more; an older one that keeps coming is the leader's, and the other was forged.
OLDER_S = 3.0
# So long a worker leaves a partition alone whose log lost records, as its reader says: the leader
# makes sure in 3 s and says so. Where it says nothing, the leader's status was forged, or brokers
# disagreed after an election, and it tries again.
LOST_S = 5.0
# So long it waits under a new leader for claims that it made before: that one reads the control
# topic on, and they may be lost with the topic's tail. As long for later ones while nothing is
# decided, and twice as long each further time: perhaps nobody leads, and all that it claims waits.
UNDECIDED_S = 30.0
# Time between two commits of the group's offsets: lag tools look every 10 s or more seldom.
COMMIT_S = 5.0


_FULL = "enough batches wait here"  # why nothing may be read now


class _Lost(NamedTuple):
    """A place at which a partition's log was found to be another one."""

    generation: int
    topic_id: str
    until: float  # when to try there again


class _Full(NamedTuple):
    """What a trigger of the leader must say to give a worker room that waits for it."""

    epoch: int
    below: int  # that of its batches the oldest so far are settled: all below this offset
    waiting: int  # or that no more than so many wait in the whole job

    def is_news(self, epoch: int, unsettled: Unsettled | None) -> bool:
        """Whether one says so, or is of another leader."""
        if unsettled is None or epoch != self.epoch:
            return True
        return unsettled.oldest_unsettled >= self.below or unsettled.waiting <= self.waiting


class _Sent(msgspec.Struct, eq=False, gc=False):
    """An announcement whose outcome is not known, or whose batch is not settled."""

    number: int
    address: Address
    at: float
    offset: int | None = None  # in the control topic, once delivered


class _Settled:
    """The frontier below which every record is settled; the group's offsets say it to lag tools."""

    def __init__(self) -> None:
        self._positions: Positions = {}
        self.commit_at = float("-inf")  # the next time
        # A status whose `claimed` becomes that, once no batch below its control position waits.
        self._next: LeaderStatus | None = None

    def see(self, leader_status: LeaderStatus) -> None:
        """Follow the frontier: all that is claimed belongs to batches below a position."""
        if self._next is None or self._next.epoch != leader_status.epoch:
            self._next = leader_status
        for seen in (self._next, leader_status):
            if seen.control_position <= leader_status.oldest_unsettled:
                self._positions, self._next = seen.claimed, leader_status

    def commit(self, own: Iterable[Partition], now: float) -> Iterator[WorkerCommand]:
        """Commit the frontier of these partitions."""
        positions = {p: self._positions[p] for p in own if p in self._positions}
        if positions:
            self.commit_at = now + COMMIT_S
            yield do.Commit(positions)


class Worker:
    """One worker's stream side; `on` takes events, `due` says when it wants a `Tick`."""

    def __init__(self, worker: WorkerId, settings: WorkerSettings) -> None:
        self._id = worker
        self._settings = settings
        sizes = settings.batch_size, settings.batch_linger_s, settings.group_size
        self._batcher = Batcher(*sizes, settings.min_batch)
        # Partitions that the group gave to this worker, and where each must stand while nobody else
        # moves it: generation and `claimed`; None until it is placed.
        self._own = dict[Partition, tuple[int, int] | None]()
        self._topic_ids = dict[Partition, str]()  # of those that it reads, as far as known
        self._lost = dict[Partition, _Lost]()
        self._ends = dict[Partition, tuple[int, float]]()  # reached, without a record below; when
        self._announced = 0
        self._underway = dict[int, _Sent]()  # not delivered yet, by number
        self._undecided = deque[_Sent]()
        self._held = deque[_Sent]()  # batches in memory: announced, not below the horizon
        self._seen: LeaderStatus | None = None
        self._unsettled: Unsettled | None = None  # as that says, or a later trigger
        self._seen_at = float("-inf")
        self._led_since = float("-inf")  # by whose status it is
        self._still_since = float("-inf")  # nothing was decided
        self._patience_s = UNDECIDED_S
        self._reading = False
        self._full: _Full | None = None  # why it does not read, where only that gives it room
        self._news = False  # a leader's status that was not seen yet may give room
        self._leaving = False
        self._beat_at = float("-inf")
        self._leader_status_at = float("-inf")
        self._settled = _Settled()

    @property
    def room(self) -> int:
        """Samples that may be read now without passing the bound."""
        batches = self._settings.bound - self._waiting
        return max(batches * self._settings.batch_size - self._batcher.samples, 0)

    @property
    def batch_size(self) -> int:
        """b: samples in a batch."""
        return self._settings.batch_size

    @property
    def _waiting(self) -> int:
        """How many of its batches may be waiting for an update.

        Not all that it holds: some may have been refused, and nothing says which. They go when the
        oldest unsettled batch of the job is younger, so counting them could stop this worker for
        ever while a group lacks the very batch that it does not read. No more can wait than wait
        in the whole job, and what is not decided yet.
        """
        waiting = self._unsettled.waiting if self._unsettled is not None else 0
        return min(len(self._held), waiting + len(self._undecided))

    @property
    def triggers(self) -> TriggerStream:
        """Where the leader's triggers are."""
        seen = self._seen
        return TriggerStream() if seen is None else TriggerStream(seen.triggers, seen.epoch)

    def is_news(self, epoch: int, unsettled: Unsettled | None) -> bool:
        """Whether to take in at once what a trigger says of room; for any thread.

        What gives no room can wait: until there is something else to do, or a later one does.
        """
        full = self._full  # once: it may read again meanwhile
        return full is None or full.is_news(epoch, unsettled)

    def topic_id(self, span: Span) -> str:
        """Kafka's id of the topic that a span was claimed of; empty: not known."""
        return self._seen.topic_id(span) if self._seen is not None else ""

    def position(self, partition: Partition) -> int | None:
        """Where it reads a partition next, None while it does not."""
        return self._batcher.position(partition)

    def on(self, event: WorkerEvent, now: float) -> tuple[WorkerCommand, ...]:
        """Take in an event; returns what to do, in order."""
        if isinstance(event, events.Delivered):  # half of all events, and nothing follows from it
            self._underway.pop(event.number).offset = event.offset
            return ()
        # These come for every batch: they are not worth a generator each.
        if isinstance(event, events.Decoded):
            commands = self._take(event.run, now)
        elif isinstance(event, events.RoundBegan):
            commands = self._update_capacity(event.epoch, event.unsettled)
        else:
            commands = list(self._on(event, now))
        reason = self._why_not()
        if (not reason) != self._reading:
            self._reading = not reason
            commands.append(do.SetReading(self._reading, reason))
        self._full = self._until() if reason == _FULL else None
        return tuple(commands)

    def due(self) -> float:
        """When it wants a `Tick` at the latest."""
        beat_at = self._beat_at + self._settings.heartbeat_s
        look_at = self._leader_status_at + self._look_every_s()
        due = min(beat_at, look_at)
        if self._leaving:
            return due
        for _, since in self._ends.values():
            due = min(due, since + self._settings.end_linger_s)
        linger = None if self._settings.batch_linger_s is None else self._batcher.due()
        return due if linger is None else min(due, linger)

    def _on(  # noqa: C901, PLR0912 -- one case per event, each a few lines
        self, event: WorkerEvent, now: float
    ) -> Iterator[WorkerCommand]:
        match event:
            case events.Tick():
                yield from self._tick(now)
            case events.Assigned(partitions):
                self._own.update(dict.fromkeys(partitions))
            case events.Revoked(partitions):
                for partition in partitions:
                    self._own.pop(partition, None)
                    yield from self._drop(partition)
            case events.FellBehind(partition, start):
                yield from self._expire(partition, start, now)
            case events.Truncated(partition, recreated):
                yield from self._leave_alone(partition, inf if recreated else now + LOST_S)
            case events.RecordBelow(partition, epoch):
                # After `claimed` was the log's end it lost that, and was written to again. Records
                # that were there before are claimed, as nothing: retention had deleted them.
                if 0 <= self._batcher.epoch(partition) < epoch:
                    yield from self._leave_alone(partition, now + LOST_S)
            case events.EndReached(partition, end):
                self._reach(partition, end, now)
            case events.LeaderStatusSeen(leader_status):
                if leader_status is not None:
                    yield from self._stand(leader_status, now)
            case events.SizesChanged(batch_size, bound, group_size) if not self._leaving:
                self._settings = replace(
                    self._settings, batch_size=batch_size, bound=bound, group_size=group_size
                )
                full = self._batcher.resize(batch_size, group_size)
                if full is not None:
                    yield self._announce(full, now)
            case events.Leaving():
                self._leaving = True
                yield from self._settled.commit(self._own, now)
                yield do.SendHeartbeat(LEAVING)

    def _tick(self, now: float) -> Iterator[WorkerCommand]:
        if now >= self._beat_at + self._settings.heartbeat_s:
            self._beat_at = now
            waits = TOO_FEW if self._batcher.waits_for_more(now) else ALIVE
            yield do.SendHeartbeat(LEAVING if self._leaving else waits)
        if now >= self._leader_status_at + self._look_every_s():
            self._leader_status_at = now
            self._news = False
            yield do.ReadLeaderStatus()
        linger = self._batcher.due()
        if linger is not None and now >= linger and not self._leaving:
            yield from self._close(now)
        if not self._leaving:
            yield from self._claim_ends(now)

    def _take(self, run: DecodedRun, now: float) -> list[WorkerCommand]:
        if self._batcher.position(run.partition) is None:
            return [do.Unplace(run.partition)]
        if 0 <= run.epoch < self._batcher.epoch(run.partition):
            # In one log they never go back.
            return list(self._leave_alone(run.partition, now + LOST_S))
        if self._ends:
            self._ends.pop(run.partition, None)  # its offsets are this run's first
        return [self._announce(cut, now) for cut in self._batcher.add(run, now)]

    # --- positions ---------------------------------------------------------------------------

    def _stand(self, leader_status: LeaderStatus, now: float) -> Iterator[WorkerCommand]:
        seen = self._seen
        older = seen is not None and (
            leader_status.epoch < seen.epoch
            or leader_status.control_position < seen.control_position
        )
        if older and now < self._seen_at + OLDER_S:
            return
        if seen is None or leader_status.epoch != seen.epoch:
            self._led_since = now
        if seen is None or (leader_status.epoch, leader_status.control_position) != (
            seen.epoch,
            seen.control_position,
        ):
            self._still_since, self._patience_s = now, UNDECIDED_S
        self._seen, self._seen_at = leader_status, now
        said = leader_status
        self._unsettled = Unsettled(
            said.control_position, said.oldest_unsettled, said.waiting, said.live
        )
        self._decide(leader_status.control_position)
        yield from self._forget(leader_status.oldest_unsettled)
        yield from self._give_up(now)
        yield from self._place(leader_status, now)
        self._settled.see(leader_status)
        if now >= self._settled.commit_at:
            yield from self._settled.commit(self._own, now)

    def _update_capacity(self, epoch: int, unsettled: Unsettled | None) -> list[WorkerCommand]:
        """Take over what a trigger says; where that is no news of this leader, look for its status.

        It says nothing of positions, so whether this worker is in its place is as known as before.
        """
        seen = self._seen
        if unsettled is None or seen is None or epoch != seen.epoch:
            self._news = True
        elif unsettled.control_position >= seen.control_position:
            self._unsettled = unsettled
            return self._forget(unsettled.oldest_unsettled)
        return []

    def _place(self, leader_status: LeaderStatus, now: float) -> Iterator[WorkerCommand]:
        """Leave places that the leader's status has no more, and take those that are free."""
        positions = dict[Partition, LogPosition]()
        undecided = {span.place for sent in self._undecided for span in sent.address}
        underway = self._underway.values()
        arriving = {
            (span.place, (span.generation, span.end)) for sent in underway for span in sent.address
        }
        for partition, sure in self._own.items():
            claimed = leader_status.claimed.get(partition)
            if claimed is None:
                continue  # not a partition of this job, or not yet
            generation = leader_status.generation(partition)
            stands = (generation, claimed)
            if sure == stands:
                continue  # all is well
            if sure is not None and (partition, stands) in arriving:
                continue  # its own, decided before the delivery report came: the next one tells
            if sure is not None:
                self._own[partition] = None  # somebody else moved it, or a claim was refused
                yield from self._drop(partition)
            known = leader_status.place(partition)
            if partition in undecided or self._is_lost(partition, generation, known, now):
                continue
            self._own[partition] = stands
            self._lost.pop(partition, None)
            self._ends.pop(partition, None)
            self._topic_ids[partition] = known.topic_id
            self._batcher.place(partition, claimed, generation, known)
            positions[partition] = known
        if positions:
            yield do.Place(positions)

    def _is_lost(
        self, partition: Partition, generation: int, known: LogPosition, now: float
    ) -> bool:
        """Whether its log was found to be another one than this place is of."""
        lost = self._lost.get(partition)
        if lost is None or now >= lost.until:
            return False
        return (lost.generation, lost.topic_id) == (generation, known.topic_id)

    def _decide(self, control_position: int) -> None:
        """Claims below this position are decided; if all were accepted, `claimed` is their end."""
        while self._undecided:
            sent = self._undecided[0]
            if sent.offset is None or sent.offset >= control_position:
                return
            self._undecided.popleft()
            for span in sent.address:
                # While a partition is placed, all undecided claims on it were made since.
                place = span.place
                if self._own.get(place) is not None:
                    self._own[place] = span.generation, span.end

    def _forget(self, oldest_unsettled: int) -> list[WorkerCommand]:
        # Mostly the oldest come first; not where the control topic was created anew meanwhile.
        gone = [s for s in self._held if (at := s.offset) is not None and at < oldest_unsettled]
        if not gone:
            return []
        if gone[-1] is self._held[len(gone) - 1]:
            for _ in gone:
                self._held.popleft()
        else:
            self._held = deque(
                s for s in self._held if s.offset is None or s.offset >= oldest_unsettled
            )
        return [do.Forget(tuple([sent.address for sent in gone]))]

    def _give_up(self, now: float) -> Iterator[WorkerCommand]:
        """Wait no longer for claims that the control topic seems to have lost."""
        before = self._led_since if now >= self._led_since + UNDECIDED_S else float("-inf")
        if now >= self._still_since + self._patience_s:
            before = max(before, now - self._patience_s)
        gone = [s for s in self._undecided if s.at < before and s.offset is not None]
        if gone:
            self._patience_s *= 2
        for sent in gone:
            self._undecided.remove(sent)
            for span in sent.address:
                if self._own.get(span.place) is not None:
                    self._own[span.place] = None
                    yield from self._drop(span.place)
        forgotten = [sent for sent in gone if sent in self._held]
        for sent in forgotten:
            self._held.remove(sent)
        if forgotten:
            yield do.Forget(tuple(sent.address for sent in forgotten))

    def _leave_alone(self, partition: Partition, until: float) -> Iterator[WorkerCommand]:
        """Read nothing of a partition whose log is another one than its place knows."""
        stands = self._own.get(partition)
        if stands is None:
            return  # it was told of an earlier place
        self._lost[partition] = _Lost(stands[0], self._topic_ids[partition], until)
        self._own[partition] = None
        yield from self._drop(partition)

    def _drop(self, partition: Partition) -> Iterator[WorkerCommand]:
        self._batcher.drop(partition)
        self._ends.pop(partition, None)
        yield do.Unplace(partition)

    # --- announcements -----------------------------------------------------------------------

    def _announce(self, cut: Cut, now: float) -> do.Announce:
        claim = BatchReady(
            self._id, cut.address, cut.samples, cut.skipped, cut.first_arrival_s, cut.last_arrival_s
        )
        self._held.append(self._send(cut.address, now))
        return do.Announce(self._announced, claim, cut.counts, cut.rows)

    def _close(self, now: float) -> Iterator[WorkerCommand]:
        cut = self._batcher.close()
        if cut is not None:
            yield self._announce(cut, now)

    def _expire(self, partition: Partition, start: int, now: float) -> Iterator[WorkerCommand]:
        """Claim what retention deleted, so that the partition continues; then read from `start`.

        Claims of a partition go in order. What is open is claimed before; but if it is too small
        for a batch, it is claimed as expired, because Kafka deleted these records, too.
        """
        position = self._batcher.position(partition)
        if position is None:
            return
        if start > position:
            if self._batcher.has_open(partition) and not self._batcher.is_too_small:
                yield from self._close(now)
            address = address_of([self._batcher.expire(partition, start)])
            self._send(address, now)
            yield do.Announce(self._announced, SpanExpired(self._id, address), (0,))
            self._ends.pop(partition, None)
        # Else what expired is below `claimed`, above the last record that is known.
        begin = LogPosition(max(start, position), self._topic_ids[partition])
        yield do.Place({partition: begin})

    def _reach(self, partition: Partition, end: int, now: float) -> None:
        """Offsets at a log's end hold no record: they go with what is open there, or wait."""
        position = self._batcher.position(partition)
        if position is None or end <= position:
            return  # it is another worker's by now, or it was told of an earlier end late
        if not self._batcher.reach(partition, end):
            _, since = self._ends.get(partition, (end, now))
            self._ends[partition] = end, since

    def _claim_ends(self, now: float) -> Iterator[WorkerCommand]:
        """Claim the ends of logs that no record followed, or the job would lag there for ever."""
        for partition, (end, since) in tuple(self._ends.items()):
            if now < since + self._settings.end_linger_s:
                continue
            del self._ends[partition]
            address = address_of([self._batcher.pass_over(partition, end)])
            self._send(address, now)
            yield do.Announce(self._announced, BatchReady(self._id, address, samples=0), (0,))

    def _send(self, address: Address, now: float) -> _Sent:
        self._announced += 1
        sent = _Sent(self._announced, address, now)
        self._undecided.append(sent)
        self._underway[sent.number] = sent
        return sent

    # --- pace --------------------------------------------------------------------------------

    def _why_not(self) -> str:
        """Why nothing may be read now; empty where it may."""
        if self._leaving:
            return "leaving"
        unsettled = self._unsettled
        if unsettled is None:
            return "no leader has taken a stand yet"
        # It waits for no more than it holds; which is told at once, and mostly says it all.
        enough = self._enough
        if len(self._held) >= enough and self._waiting >= enough:
            return _FULL
        if unsettled.waiting > (unsettled.live + 1) * self._settings.bound:
            return "enough batches wait in the whole job"
        return ""

    @property
    def _enough(self) -> int:
        """So many of its batches may wait.

        Once it is full it waits for room that is worth a look at Kafka; as long as a group can be
        made of what waits here alone, nobody waits for it meanwhile.
        """
        bound = self._settings.bound
        return bound if self._reading else max(self._settings.group_size, bound - bound // 4)

    def _until(self) -> _Full | None:
        """What gives it room where enough batches wait here; None: anything may."""
        if self._seen is None:
            return None
        last = self._held[len(self._held) - self._enough]  # it and those before it are room enough
        if last.offset is None:
            return None
        waiting = self._enough - len(self._undecided) - 1
        return _Full(self._seen.epoch, last.offset + 1, waiting)

    def _look_every_s(self) -> float:
        hungry = None in self._own.values() or (self._news and not self._reading)
        return self._settings.leader_status_hungry_s if hungry else self._settings.leader_status_s
