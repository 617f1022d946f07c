"""A worker's reading state: positions and claims (Algorithm 1).

The leader's status is the worker's only source of positions. A worker starts a partition at the
offset below which, by that status, everything is claimed. It starts there again after a rebalance
or a lost race, once the leader has decided all claims that the worker ever made on the partition.

    announced   [0:10]  [10:20]  [20:30]             offsets of p; control offsets 4, 7, 9
    status      control 8, claimed[p]=20             4 and 7 decided, 20 is the end of 7: in place
    status      control 8, claimed[p]=15             another worker moved it: place lost
    status      control 10, claimed[p]=35            all three decided: read on from 35

A place includes what the status knows of the log: the topic's id and the leader epoch of the last
claimed record. If the log turns out to be a different one, the worker does not read the partition
until the status changes, because the leader decides how to continue.
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


# Time during which a status older than the newest one is ignored. This only saves work: if older
# ones keep arriving, they are the leader's, and the newer one was forged.
OLDER_S = 3.0
# Time that a worker does not read a partition whose log lost records according to its reader.
# The leader confirms a loss within 3 s. If it does not, its status was forged or brokers
# disagreed after an election, and the worker tries again.
LOST_S = 5.0
# Time after a new leader's first status at which a worker gives up earlier claims that are still
# undecided, because the control topic may have lost them. A worker gives up later claims after this
# time without any decision, and then after twice as long each time, because the job may have no
# leader meanwhile.
UNDECIDED_S = 30.0
# Interval between commits of the group's offsets. Lag tools poll every 10 s or less often.
COMMIT_S = 5.0


# A reason for not reading.
_FULL = "enough of this worker's batches wait"


class _Lost(NamedTuple):
    """A place at which a partition's log turned out to be a different one."""

    generation: int
    topic_id: str
    # Time of the next attempt.
    until: float


class _Full(NamedTuple):
    """Content of a trigger that would give room to a worker whose bound is reached."""

    epoch: int
    # Enough of the worker's oldest batches are settled once all below this offset are.
    below: int
    # There is also room once at most this number of batches waits in the whole job.
    waiting: int

    def is_news(self, epoch: int, unsettled: Unsettled | None) -> bool:
        """Return True if a trigger gives room or comes from another leader."""
        if unsettled is None or epoch != self.epoch:
            return True
        return unsettled.oldest_unsettled >= self.below or unsettled.waiting <= self.waiting


class _Sent(msgspec.Struct, eq=False, gc=False):
    """A claim that is not decided, or whose batch is not settled."""

    number: int
    address: Address
    at: float
    # Control offset. None until delivered.
    offset: int | None = None


class _Settled:
    """Frontier below which every record is settled. Committed to the group for lag tools."""

    def __init__(self) -> None:
        self._positions: Positions = {}
        # Time of the next commit.
        self.commit_at = float("-inf")
        # The status whose `claimed` becomes the frontier once no batch below its control position
        # waits.
        self._next: LeaderStatus | None = None

    def see(self, leader_status: LeaderStatus) -> None:
        """Advance the frontier to the `claimed` of the newest status whose claims are all settled.

        A status contains the claims below its control position.
        """
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
    """A worker's reading state. `on` processes events, and `due` returns when it needs a `Tick`."""

    def __init__(self, worker: WorkerId, settings: WorkerSettings) -> None:
        self._id = worker
        self._settings = settings
        sizes = settings.batch_size, settings.batch_linger_s, settings.group_size
        self._batcher = Batcher(*sizes, settings.min_batch)
        # Partitions assigned by the group, with the generation and `claimed` that each must have
        # unless another worker moves it. None until the partition is placed.
        self._own = dict[Partition, tuple[int, int] | None]()
        # Topic ids of placed partitions, if known.
        self._topic_ids = dict[Partition, str]()
        self._lost = dict[Partition, _Lost]()
        # End of a log if it is above the last record, and the time since which it is.
        self._ends = dict[Partition, tuple[int, float]]()
        self._announced = 0
        self._underway = dict[int, _Sent]()  # not delivered yet, by number
        self._undecided = deque[_Sent]()
        # Batches in memory: claimed and not yet settled.
        self._held = deque[_Sent]()
        self._seen: LeaderStatus | None = None
        # Taken from the status or a later trigger.
        self._unsettled: Unsettled | None = None
        self._seen_at = float("-inf")
        # When the current leader's first status arrived.
        self._led_since = float("-inf")
        # Time of the last decision.
        self._still_since = float("-inf")
        self._patience_s = UNDECIDED_S
        self._reading = False
        # The trigger content that gives room, if that is the only reason for not reading.
        self._full: _Full | None = None
        # True if an unread status may give room.
        self._news = False
        self._leaving = False
        self._beat_at = float("-inf")
        self._leader_status_at = float("-inf")
        self._settled = _Settled()

    @property
    def room(self) -> int:
        """Number of samples that may be read now without exceeding the bound."""
        batches = self._settings.bound - self._waiting
        return max(batches * self._settings.batch_size - self._batcher.samples, 0)

    @property
    def batch_size(self) -> int:
        """b, the number of samples in a batch."""
        return self._settings.batch_size

    @property
    def _waiting(self) -> int:
        """Upper bound of the worker's batches that wait for an update.

        This may be less than the batches in memory: some may have been refused, but no message says
        which. Refused batches are dropped when the oldest unsettled batch of the job is younger. If
        they counted, this worker could stop reading for ever while a group lacks the very batch
        that it does not read. No more can wait than wait in the whole job, plus the undecided ones.
        """
        waiting = self._unsettled.waiting if self._unsettled is not None else 0
        return min(len(self._held), waiting + len(self._undecided))

    @property
    def triggers(self) -> TriggerStream:
        """Stream of the leader's triggers."""
        seen = self._seen
        return TriggerStream() if seen is None else TriggerStream(seen.triggers, seen.epoch)

    def is_news(self, epoch: int, unsettled: Unsettled | None) -> bool:
        """Return True if a trigger's counts of unsettled batches must be processed at once.

        A trigger that gives no room can wait for the next event. Any thread may call this method.
        """
        # Read once, because the worker may resume reading meanwhile.
        full = self._full
        return full is None or full.is_news(epoch, unsettled)

    def topic_id(self, span: Span) -> str:
        """Return Kafka's id of the topic that a span belongs to. Empty if unknown."""
        return self._seen.topic_id(span) if self._seen is not None else ""

    def position(self, partition: Partition) -> int | None:
        """Return the next offset to read from a partition, or None if it is not read."""
        return self._batcher.position(partition)

    def on(self, event: WorkerEvent, now: float) -> tuple[WorkerCommand, ...]:
        """Process an event and return the resulting commands in order."""
        # Half of all events. Nothing else follows from them.
        if isinstance(event, events.Delivered):
            self._underway.pop(event.number).offset = event.offset
            return ()
        # These events arrive for every batch, so they avoid the cost of a generator.
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
        """Return the latest time of the next `Tick`."""
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
                # A later epoch means that the log lost its end after `claimed`, and was written to
                # again. Other records here were claimed as expired: retention had deleted them.
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
            # Leader epochs never decrease within one log.
            return list(self._leave_alone(run.partition, now + LOST_S))
        if self._ends:
            # The batch with this run also covers the offsets without records before it.
            self._ends.pop(run.partition, None)
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
        """Apply a trigger's counts of unsettled batches.

        If it is another leader's trigger, or has no counts, request the status.

        A trigger carries no positions, so it does not affect the worker's place.
        """
        seen = self._seen
        if unsettled is None or seen is None or epoch != seen.epoch:
            self._news = True
        elif unsettled.control_position >= seen.control_position:
            self._unsettled = unsettled
            return self._forget(unsettled.oldest_unsettled)
        return []

    def _place(self, leader_status: LeaderStatus, now: float) -> Iterator[WorkerCommand]:
        """Drop places that the leader's status contradicts, and take places that are free."""
        positions = dict[Partition, LogPosition]()
        undecided = {span.place for sent in self._undecided for span in sent.address}
        underway = self._underway.values()
        arriving = {
            (span.place, (span.generation, span.end)) for sent in underway for span in sent.address
        }
        for partition, sure in self._own.items():
            claimed = leader_status.claimed.get(partition)
            if claimed is None:
                # Not a partition of this job, or not yet.
                continue
            generation = leader_status.generation(partition)
            stands = (generation, claimed)
            if sure == stands:
                # The place is confirmed.
                continue
            if sure is not None and (partition, stands) in arriving:
                # An own claim was decided before its delivery report arrived. The next status
                # confirms it.
                continue
            if sure is not None:
                # Another worker moved the partition, or a claim was refused.
                self._own[partition] = None
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
        """Return True if the log of this place turned out to be a different one."""
        lost = self._lost.get(partition)
        if lost is None or now >= lost.until:
            return False
        return (lost.generation, lost.topic_id) == (generation, known.topic_id)

    def _decide(self, control_position: int) -> None:
        """Process the decisions below this position.

        If all claims were accepted, `claimed` is the end of the last one.
        """
        while self._undecided:
            sent = self._undecided[0]
            if sent.offset is None or sent.offset >= control_position:
                return
            self._undecided.popleft()
            for span in sent.address:
                # All undecided claims on a placed partition were made since it was placed.
                place = span.place
                if self._own.get(place) is not None:
                    self._own[place] = span.generation, span.end

    def _forget(self, oldest_unsettled: int) -> list[WorkerCommand]:
        # Usually the oldest ones, unless the control topic was recreated.
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
        """Stop waiting for claims that the control topic seems to have lost."""
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
        """Stop reading a partition whose log is not the one that its place describes."""
        stands = self._own.get(partition)
        if stands is None:
            # The event refers to an earlier place.
            return
        self._lost[partition] = _Lost(stands[0], self._topic_ids[partition], until)
        self._own[partition] = None
        yield from self._drop(partition)

    def _drop(self, partition: Partition) -> Iterator[WorkerCommand]:
        self._batcher.drop(partition)
        self._ends.pop(partition, None)
        yield do.Unplace(partition)

    # --- claims ------------------------------------------------------------------------------

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
        """Claim the records that retention deleted, then read from `start`.

        A partition's claims are made in order, so the open batch is claimed first. If that is too
        small for a batch, it is claimed as expired, because Kafka deleted these records, too.
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
        # If nothing was expired here, the gap is below `claimed`, above the last known record.
        begin = LogPosition(max(start, position), self._topic_ids[partition])
        yield do.Place({partition: begin})

    def _reach(self, partition: Partition, end: int, now: float) -> None:
        """Add offsets without a record to the partition's open batch, or keep them for later."""
        position = self._batcher.position(partition)
        if position is None or end <= position:
            # Another worker has the partition by now, or the event is late.
            return
        if not self._batcher.reach(partition, end):
            _, since = self._ends.get(partition, (end, now))
            self._ends[partition] = end, since

    def _claim_ends(self, now: float) -> Iterator[WorkerCommand]:
        """Claim the ends of logs that no record followed, so that the job reaches lag 0."""
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
        """Return why nothing may be read now. Empty if reading is allowed."""
        if self._leaving:
            return "leaving"
        unsettled = self._unsettled
        if unsettled is None:
            return "no coordinator has published the job's status yet"
        # This check alone usually decides, and it is cheap.
        enough = self._enough
        if len(self._held) >= enough and self._waiting >= enough:
            return _FULL
        if unsettled.waiting > (unsettled.live + 1) * self._settings.bound:
            return "enough batches of the job wait"
        return ""

    @property
    def _enough(self) -> int:
        """Number of the worker's batches that may wait.

        Once full, the worker resumes only when the room justifies a poll of Kafka. But it resumes
        earlier if its batches alone cannot fill a group, so that no group waits for it.
        """
        bound = self._settings.bound
        return bound if self._reading else max(self._settings.group_size, bound - bound // 4)

    def _until(self) -> _Full | None:
        """Return the trigger content that would give room, or None if any trigger might."""
        if self._seen is None:
            return None
        # Settling this batch and those before it gives enough room.
        last = self._held[len(self._held) - self._enough]
        if last.offset is None:
            return None
        waiting = self._enough - len(self._undecided) - 1
        return _Full(self._seen.epoch, last.offset + 1, waiting)

    def _look_every_s(self) -> float:
        hungry = None in self._own.values() or (self._news and not self._reading)
        return self._settings.leader_status_hungry_s if hungry else self._settings.leader_status_s
