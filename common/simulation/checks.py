"""The invariants of the protocol, checked on a simulated world from Kafka's content alone.

Numbers as in docs/protocol.md: 1 nothing lost or twice, 2 one chain of weights, 3 exactly K, 5 replay,
6 everything drains, 7 bounded queues. (4, no starvation, is a property test of the grouping rule.)
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from common.core.history import History
from common.core.ledger import Ledger
from common.core.messages import GENESIS, Batch, BatchReady, UpdateApplied
from common.core.spans import Address, Partition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.simulation.world import World


class Violation(Exception):  # noqa: N818 -- it is what was found, not what went wrong in finding it
    """An invariant does not hold."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


def effective_updates(world: World) -> tuple[list[UpdateApplied], dict[int, Batch]]:
    """Fold the updates topic: the updates that made the model, and what is quarantined."""
    history, by_name = History(), dict[tuple[int, int], UpdateApplied]()
    for offset, record in enumerate(world.updates):
        counts = history.feed(offset, record)
        if counts and isinstance(record, UpdateApplied):
            by_name[record.epoch, record.version] = record
    updates = [by_name[model.epoch, model.version] for model in history.path[1:]]
    return updates, {o: record.batch for o, record in history.quarantined.items()}


def check_audit(world: World) -> None:
    """At any moment: one chain of weights, no batch in two updates, or in one and quarantined."""
    updates, quarantined = effective_updates(world)
    by_name = {token[0]: token for token in world.nodes}
    last = GENESIS
    used = Counter(quarantined.keys())
    for update in updates:
        token = by_name[update.epoch, update.version]  # type: ignore[index]
        node = world.nodes[token]
        if node.parent[0] != last:
            raise Violation(
                "two chains", f"{tuple(token[0])} was made from {tuple(node.parent[0])}"
            )
        last = token[0]
        offsets = [batch.offset for batch in update.batches]
        if sorted(offsets) != sorted(node.batches):
            raise Violation("false audit", f"J={update.version} names {offsets}")
        used.update(offsets)
    twice = [offset for offset, times in used.items() if times > 1]
    if twice:
        raise Violation("batch used twice", f"control offsets {twice}")


def check_drained(world: World) -> None:
    """At the end: every record in exactly one place, and every replay agrees."""
    check_audit(world)
    updates, quarantined = effective_updates(world)
    ledger = Ledger(dict.fromkeys(world.partitions, 0))
    used = Counter[tuple[Partition, int]]()
    bad = set[tuple[Partition, int]]()
    accepted = dict[int, Address]()
    for offset, claim in enumerate(world.control):
        stated = world.standings.get(ledger.position)
        if stated is not None and stated != ledger.claimed:
            raise Violation("replay differs", f"at cpos {ledger.position}: stated {stated}")
        decision = ledger.decide(offset, claim)
        if not decision.accepted or claim is None:
            continue
        skipped = {(s.topic, s.partition, s.offset) for s in getattr(claim, "skipped", ())}
        places = {(world.partitions[p], o) for _, p, o in skipped}
        bad |= places
        used.update(places)
        if decision.batch is None:
            used.update(set(_records(world, claim.address)) - places)
        else:
            accepted[offset] = claim.address
    settled = [batch for update in updates for batch in update.batches] + list(quarantined.values())
    for batch in settled:
        if accepted.get(batch.offset) != batch.address:
            raise Violation("false audit", f"batch {batch.offset} was never accepted so")
        control = world.control[batch.offset]
        skipped = set(control.skipped) if isinstance(control, BatchReady) else set()
        places = {(world.partitions[s.partition], s.offset) for s in skipped}
        used.update(set(_records(world, batch.address)) - places)
    for partition, records in world.records.items():
        for offset, _ in records:
            times = used[partition, offset]
            if times != 1:
                kind = "record lost" if times == 0 else "record used twice"
                raise Violation(kind, f"{partition}@{offset} is used {times} times")
    if bad - world.dead_letters:
        raise Violation("no dead letter", f"{sorted(bad - world.dead_letters)[:3]}")


def _records(world: World, address: Address) -> Iterable[tuple[Partition, int]]:
    for span in address:
        for offset, _ in world.records[span.place]:
            if span.start <= offset < span.end:
                yield span.place, offset
