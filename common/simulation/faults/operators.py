"""Simulated operators, who requeue and replay batches, rightly or wrongly.

A tool reads the updates topic, which may have changed before the tool's record is written. The
batch may not be quarantined, or may be another one at the same offset. The record may come twice or
much later. Only a replay waits for the outcome, and then produces records.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from common.core.history import History
from common.core.ledger import Ledger
from common.core.messages import Batch, Replayed, Requeued
from common.core.snapshots import genesis

if TYPE_CHECKING:
    from common.simulation.faults.world import World

# Number of newest records that a tool may not have read.
STALE = 6
# Share of invalid requests.
WRONG = 0.2
# Share of records that are written twice.
AGAIN = 0.2
LATE_S = 3.0
# Time between polls of an operator who waits for quarantined batches.
WATCH_S = 0.3


class Operators:
    """Everyone who works on the job by hand."""

    def __init__(self, world: World) -> None:
        self.world = world

    def act(self, kind: type[Requeued | Replayed], until: float) -> None:
        """Requeue or replay batches. Waits until `until` for some to be quarantined."""
        world = self.world
        end = max(len(world.updates) - world.draw.randint(0, STALE), 0)
        quarantined = list(self._read(end).quarantined.values())
        if not quarantined and world.now < until and not world.faults_over:
            world.later(WATCH_S, lambda: self.act(kind, until))
            return
        if world.chance(WRONG) or not quarantined:
            self._send(kind, self._nonsense())
        for record in quarantined:
            if world.chance(0.7):
                self._send(kind, record.batch)

    def take_all_back(self, times: int) -> None:
        """Requeue all poison, repeatedly: the task is assumed to be fixed."""
        for batch in self._read(len(self.world.updates)).poison:
            self._send(Requeued, batch)
        if times > 1:
            self.world.later(WATCH_S, lambda: self.take_all_back(times - 1))

    def _read(self, end: int) -> History:
        history = History()
        for offset, record in enumerate(islice(self.world.updates, end)):
            history.feed(offset, record)
        return history

    def _nonsense(self) -> Batch | None:
        """Return a batch that is claimed and perhaps used, or one that never existed."""
        world = self.world
        ledger = Ledger.of(genesis(world.streams.first, world.streams.known))
        decided = [ledger.decide(offset, claim).batch for offset, claim in enumerate(world.control)]
        batches = [batch for batch in decided if batch is not None]
        if not batches:
            return None
        batch = world.draw.choice(batches)
        return replace(batch, worker="ghost") if world.chance(0.5) else batch

    def _send(self, kind: type[Requeued | Replayed], batch: Batch | None) -> None:
        if batch is None:
            return
        world = self.world
        record = kind(batch, "operator", world.now)
        world.later(world.jitter(world.scenario.kafka_s), lambda: self._land(record))
        if world.chance(AGAIN):
            world.later(world.draw.uniform(0, LATE_S), lambda: self._land(record))

    def _land(self, record: Requeued | Replayed) -> None:
        world = self.world
        position = len(world.updates)
        world.append_audit(record)
        counts = self._read(position).feed(position, record)
        world.say(f"operator: {type(record).__name__} {'counts' if counts else 'is void'}", record)
        if isinstance(record, Requeued):
            world.figures.requeued += counts
        # The replay produces the records again.
        elif counts:
            world.figures.replayed.add(record.batch)
