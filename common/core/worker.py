"""The stream side of a worker: where it may read, and what it announces (Algorithm 1).

A worker has no source of positions but the leader's standing. It begins, and begins again after a
rebalance or a lost race, where the standing says that everything below is claimed; and only when
that standing has decided everything that the worker ever announced on the partition.

    announced   [0:10]  [10:20]  [20:30]             offsets of p; control offsets 4, 7, 9
    standing    cpos=8, claimed[p]=20                4 and 7 decided, 20 is the end of 7: in place
    standing    cpos=8, claimed[p]=15                another worker moved it: place lost
    standing    cpos=10, claimed[p]=35               all three decided: read on from 35
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.core import commands as do
from common.core import events
from common.core.batching import Batcher
from common.core.messages import BatchReady, SpanExpired
from common.core.spans import Partition, address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core.batching import Cut
    from common.core.commands import WorkerCommand
    from common.core.events import WorkerEvent
    from common.core.messages import Standing, WorkerId
    from common.core.settings import WorkerSettings
    from common.core.spans import Address


# So long a standing is ignored that is older than one that was seen. That saves work, no more; an
# older one that keeps coming is the leader's, and the other was forged.
OLDER_S = 3.0


@dataclass(slots=True)
class _Sent:
    """An announcement whose outcome is not known, or whose batch is not settled."""

    number: int
    address: Address
    offset: int | None = None  # in the control topic, once delivered


class Worker:
    """One worker's stream side; `on` takes events, `due` says when it wants a `Tick`."""

    def __init__(self, worker: WorkerId, settings: WorkerSettings) -> None:
        self._id = worker
        self._settings = settings
        self._batcher = Batcher(settings.batch_size, settings.batch_linger_s, settings.group_size)
        # Partitions that the group gave to this worker, and where each must stand while nobody else
        # moves it: generation and `claimed`; None until it is placed.
        self._own = dict[Partition, tuple[int, int] | None]()
        self._ends = dict[Partition, tuple[int, float]]()  # reached, without a record below; when
        self._announced = 0
        self._underway = dict[int, _Sent]()  # not delivered yet, by number
        self._undecided = deque[_Sent]()
        self._held = deque[_Sent]()  # batches in memory: announced, not below the horizon
        self._seen: Standing | None = None
        self._seen_at = float("-inf")
        self._reading = False
        self._news = False  # a standing that was not seen yet may give room
        self._leaving = False
        self._beat_at = float("-inf")
        self._standing_at = float("-inf")

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
        waiting = self._seen.waiting if self._seen is not None else 0
        return min(len(self._held), waiting + len(self._undecided))

    @property
    def triggers(self) -> str:
        """The stream of triggers that the standing names."""
        return self._seen.triggers if self._seen is not None else ""

    def position(self, partition: Partition) -> int | None:
        """Where it reads a partition next, None while it does not."""
        return self._batcher.position(partition)

    def on(self, event: WorkerEvent, now: float) -> tuple[WorkerCommand, ...]:
        """Take in an event; returns what to do, in order."""
        commands = list(self._on(event, now))
        reason = self._why_not()
        if (not reason) != self._reading:
            self._reading = not reason
            commands.append(do.SetReading(self._reading, reason))
        return tuple(commands)

    def due(self) -> float:
        """When it wants a `Tick` at the latest."""
        times = [self._beat_at + self._settings.beat_s, self._standing_at + self._look_every_s()]
        linger = self._batcher.due()
        if not self._leaving:
            times += [] if linger is None else [linger]
            times += [since + self._settings.end_linger_s for _, since in self._ends.values()]
        return min(times)

    def _on(  # noqa: C901, PLR0912 -- one case per event, each a few lines
        self, event: WorkerEvent, now: float
    ) -> Iterator[WorkerCommand]:
        match event:
            case events.Decoded(run):
                if self._batcher.position(run.partition) is None:
                    yield do.DropRows(run.partition)
                else:
                    self._ends.pop(run.partition, None)  # its offsets are this run's first
                    for cut in self._batcher.add(run, now):
                        yield from self._announce(cut)
            case events.Delivered(number, offset):
                self._underway.pop(number).offset = offset
            case events.Tick():
                yield from self._tick(now)
            case events.Assigned(partitions):
                self._own.update(dict.fromkeys(partitions))
            case events.Revoked(partitions):
                for partition in partitions:
                    self._own.pop(partition, None)
                    yield from self._drop(partition)
            case events.FellBehind(partition, start):
                yield from self._expire(partition, start)
            case events.EndReached(partition, end):
                self._reach(partition, end, now)
            case events.StandingSeen(standing):
                if standing is not None:
                    yield from self._stand(standing, now)
            case events.RoundBegan():
                self._news = True
            case events.SizesChanged(batch_size, bound, group_size) if not self._leaving:
                self._settings = replace(
                    self._settings, batch_size=batch_size, bound=bound, group_size=group_size
                )
                full = self._batcher.resize(batch_size, group_size)
                if full is not None:
                    yield from self._announce(full)
            case events.Leaving():
                self._leaving = True
                yield do.Beat("leaving")

    def _tick(self, now: float) -> Iterator[WorkerCommand]:
        if now >= self._beat_at + self._settings.beat_s:
            self._beat_at = now
            yield do.Beat("leaving" if self._leaving else "alive")
        if now >= self._standing_at + self._look_every_s():
            self._standing_at = now
            self._news = False
            yield do.LookAtStanding()
        linger = self._batcher.due()
        if linger is not None and now >= linger and not self._leaving:
            yield from self._close()
        if not self._leaving:
            yield from self._claim_ends(now)

    # --- positions ---------------------------------------------------------------------------

    def _stand(self, standing: Standing, now: float) -> Iterator[WorkerCommand]:
        older = self._seen is not None and standing.cpos < self._seen.cpos
        if older and now < self._seen_at + OLDER_S:
            return
        self._seen, self._seen_at = standing, now
        self._decide(standing.cpos)
        yield from self._forget(standing.horizon)
        positions = dict[Partition, int]()
        undecided = {span.place for sent in self._undecided for span in sent.address}
        underway = self._underway.values()
        arriving = {
            (span.place, (span.generation, span.end)) for sent in underway for span in sent.address
        }
        for partition, sure in self._own.items():
            claimed = standing.claimed.get(partition)
            if claimed is None:
                continue  # not a partition of this job, or not yet
            generation = standing.generation(partition)
            stands = (generation, claimed)
            if sure == stands:
                continue  # all is well
            if sure is not None and (partition, stands) in arriving:
                continue  # its own, decided before the delivery report came: the next one tells
            if sure is not None:
                self._own[partition] = None  # somebody else moved it, or a claim was refused
                yield from self._drop(partition)
            if partition not in undecided:
                self._own[partition] = stands
                self._ends.pop(partition, None)
                known = standing.known.get(partition)
                self._batcher.place(partition, claimed, generation, known)
                positions[partition] = claimed
        if positions:
            yield do.Place(positions)
        covered = {p: standing.settled[p] for p in self._own if p in standing.settled}
        if covered:
            yield do.Commit(covered)

    def _decide(self, cpos: int) -> None:
        """Announcements below `cpos` are decided; if all were accepted, `claimed` is their end."""
        while self._undecided:
            sent = self._undecided[0]
            if sent.offset is None or sent.offset >= cpos:
                return
            self._undecided.popleft()
            for span in sent.address:
                # While a partition is placed, all undecided claims on it were made since.
                if self._own.get(span.place) is not None:
                    self._own[span.place] = span.generation, span.end

    def _forget(self, horizon: int) -> Iterator[WorkerCommand]:
        gone = list[_Sent]()
        # Control offsets grow with the announcements, so the oldest come first.
        while self._held and (offset := self._held[0].offset) is not None and offset < horizon:
            gone.append(self._held.popleft())
        if gone:
            yield do.Forget(tuple(sent.address for sent in gone))

    def _drop(self, partition: Partition) -> Iterator[WorkerCommand]:
        self._batcher.drop(partition)
        self._ends.pop(partition, None)
        yield do.DropRows(partition)

    # --- announcements -----------------------------------------------------------------------

    def _announce(self, cut: Cut) -> Iterator[WorkerCommand]:
        claim = BatchReady(
            self._id, cut.address, cut.samples, cut.skipped, cut.first_arrival_s, cut.last_arrival_s
        )
        self._held.append(self._send(cut.address))
        yield do.Announce(self._announced, claim, cut.counts)

    def _close(self) -> Iterator[WorkerCommand]:
        cut = self._batcher.close()
        if cut is not None:
            yield from self._announce(cut)

    def _expire(self, partition: Partition, start: int) -> Iterator[WorkerCommand]:
        """Claim what retention deleted, so that the partition goes on; then read from `start`."""
        position = self._batcher.position(partition)
        if position is None or start <= position:
            return
        if self._batcher.has_open(partition):
            yield from self._close()  # claims go in order: what was read comes first
        address = address_of([self._batcher.pass_over(partition, start)])
        self._send(address)
        yield do.Announce(self._announced, SpanExpired(self._id, address), (0,))
        self._ends.pop(partition, None)
        yield do.Place({partition: start})

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
            self._send(address)
            yield do.Announce(self._announced, BatchReady(self._id, address, samples=0), (0,))

    def _send(self, address: Address) -> _Sent:
        self._announced += 1
        sent = _Sent(self._announced, address)
        self._undecided.append(sent)
        self._underway[sent.number] = sent
        return sent

    # --- pace --------------------------------------------------------------------------------

    def _why_not(self) -> str:
        """Why nothing may be read now; empty where it may."""
        if self._leaving:
            return "leaving"
        if self._seen is None:
            return "no leader has taken a stand yet"
        if self._waiting >= self._settings.bound:
            return "enough batches wait here"
        if self._seen.waiting > (self._seen.live + 1) * self._settings.bound:
            return "enough batches wait in the whole job"
        return ""

    def _look_every_s(self) -> float:
        hungry = None in self._own.values() or (self._news and not self._reading)
        return self._settings.standing_hungry_s if hungry else self._settings.standing_s
