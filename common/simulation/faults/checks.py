"""The invariants of the protocol, checked on a simulated world from Kafka's content alone.

Numbers as in docs/protocol.md: 1 nothing lost or twice, 2 one chain of weights, 3 exactly K,
5 replay, 6 everything drains, 7 bounded queues. (4, no starvation, is a property of grouping.)
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from common.core.history import History
from common.core.ledger import Ledger
from common.core.messages import GENESIS, Batch, BatchReady, Opened, UpdateApplied
from common.core.spans import Partition
from common.simulation.faults.scenario import DEADLY, STORES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core.messages import Positions, Skipped
    from common.core.spans import Address
    from common.simulation.faults.world import World

HARMFUL = {*DEADLY, *STORES, "retention"}  # what may make a batch look like poison, or unreadable
SURE = 3  # strikes: work given to a worker whose death is not known yet earns an innocent batch one
Place: TypeAlias = tuple[Partition, int]  # one record


class Violation(Exception):  # noqa: N818 -- it is what was found, not what went wrong in finding it
    """An invariant does not hold."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


def effective_updates(world: World) -> tuple[list[UpdateApplied], tuple[Batch, ...]]:
    """Fold the updates topic: the updates that made the model, and what is quarantined."""
    history, by_name = History(), dict[tuple[int, int], UpdateApplied]()
    for offset, record in enumerate(world.updates):
        counts = history.feed(offset, record)
        if counts and isinstance(record, UpdateApplied):
            by_name[record.epoch, record.version] = record
    updates = [by_name[model.epoch, model.version] for model in history.path[1:]]
    return updates, tuple(record.batch for record in history.quarantined.values())


def check_audit(world: World) -> None:
    """At any moment: one chain of weights, no batch in two updates, or in one and quarantined."""
    updates, quarantined = effective_updates(world)
    by_name = {token[0]: token for token in world.nodes}
    last = GENESIS
    used = Counter(quarantined)
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
        used.update(batch.without_skipped() for batch in update.batches)
    twice = [batch for batch, times in used.items() if times > 1]
    if twice:
        raise Violation("batch used twice", f"{twice}")
    trained = used.keys() - set(quarantined)
    if trained & world.replayed:
        raise Violation("replayed and trained", f"{trained & world.replayed}")


def refused_claims(world: World) -> int:
    """Count the claims that changed nothing."""
    ledger = Ledger(world.first)
    decisions = [ledger.decide(offset, claim) for offset, claim in enumerate(world.control)]
    return sum(not decision.accepted for decision in decisions)


def check_drained(world: World) -> None:
    """At the end: every record in exactly one place, and every replay agrees."""
    check_audit(world)
    updates, quarantined = effective_updates(world)
    used, accepted, claimed = _replay(world)
    settled = list[Batch]()
    for batch in [*(batch for update in updates for batch in update.batches), *quarantined]:
        claim = accepted.get(batch.offset)
        if claim is not None and claim.without_skipped() == batch.without_skipped():
            settled.append(accepted.pop(batch.offset))
        elif batch not in quarantined or not world.topic_losses:
            raise Violation("false audit", f"batch {batch.offset} was never accepted so")
    most_waiting = 0 if world.scenario.linger else world.revisions[-1].group_size - 1
    if len(accepted) > most_waiting:
        raise Violation("batch lost", f"{sorted(accepted)} wait, and nobody trains on them")
    for batch in (*settled, *accepted.values()):
        used.update(_records(world, batch.address, batch.skipped))
    for partition, records in world.records.items():
        for offset, _ in records:
            times, expected = used[partition, offset], offset < claimed.get(partition, 0)
            if times != expected:
                kind = "record used twice" if times else "record lost"
                raise Violation(kind, f"{partition}@{offset} is used {times} times")
    _check_quarantined(world, quarantined)


def _check_quarantined(world: World, quarantined: tuple[Batch, ...]) -> None:
    """Each has its dead letter; and where only poison kills, no innocent batch is among them."""
    unwritten = set(quarantined) - world.dead_batches
    if unwritten:
        raise Violation("no dead letter", f"of quarantined batches {unwritten}")
    scenario = world.scenario
    if scenario.strikes < SURE or any(fault.kind in HARMFUL for fault in scenario.faults):
        return
    for batch in quarantined:
        if not any(poison.lies_in(batch.address) for poison in scenario.poisons):
            raise Violation("innocent quarantined", f"{batch}")


def _replay(world: World) -> tuple[Counter[Place], dict[int, Batch], Positions]:
    """Decide the control topic afresh: records that need no update, accepted batches, `claimed`."""
    ledger = Ledger(world.first)
    used = Counter[Place]()
    accepted: dict[int, Batch] = {}
    for offset, claim in enumerate(world.control):
        stated = world.standings.get(world.control.position(ledger.position))
        if stated is not None and stated != ledger.claimed:
            raise Violation("replay differs", f"at cpos {ledger.position}: stated {stated}")
        decision = ledger.decide(offset, claim)
        if not decision.accepted or claim is None or isinstance(claim, Opened):
            continue
        skipped = claim.skipped if isinstance(claim, BatchReady) else ()
        bad = {(Partition(s.topic, s.partition), o) for s in skipped for o in s.offsets}
        if bad - world.dead_letters:
            raise Violation("no dead letter", f"of records {sorted(bad - world.dead_letters)[:3]}")
        used.update(bad)
        if decision.batch is None:
            used.update(_records(world, claim.address, skipped))
        else:
            accepted[offset] = decision.batch
    return used, accepted, ledger.claimed


def _records(
    world: World, address: Address, skipped: tuple[Skipped, ...]
) -> Iterator[tuple[Partition, int]]:
    """What a reader of an address trains on."""
    left_out = {(s.topic, s.partition, o) for s in skipped for o in s.offsets}
    for span in address:
        for offset, _ in world.records[span.place]:
            if span.start <= offset < span.end and (*span.place, offset) not in left_out:
                yield span.place, offset
