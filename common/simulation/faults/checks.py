"""Check the invariants of the protocol in a simulated world, using only Kafka's content.

These are, as numbered in docs/explain/protocol.md: 1 no record is lost or used twice, 2 one chain
of weights, 3 exactly K batches, 5 every replay decides the same, 6 everything drains, 7 queues are
bounded. (4, no batch starves, is checked by `SimulatedCoordinator`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from msgspec import UNSET

from common.core.history import History
from common.core.ledger import Ledger
from common.core.messages import (
    GENESIS,
    Batch,
    BatchReady,
    Claim,
    Lead,
    ModelId,
    Opened,
    UpdateApplied,
)
from common.core.snapshots import genesis
from common.core.spans import Address, Partition
from common.simulation.faults.scenario import CUTS, DEADLY, STORES

if TYPE_CHECKING:
    from common.core.messages import Skipped
    from common.simulation.faults.world import Token, World

# Faults that may make a batch look like poison, or unreadable.
HARMFUL = {*DEADLY, *STORES, *CUTS, "retention"}
# Least `max_failures` at which an innocent batch is never quarantined. A batch may get one failure
# if it is assigned to a worker whose death is not known yet.
SURE = 3
Place: TypeAlias = tuple[Partition, int]  # one record


class Violation(Exception):  # noqa: N818 -- a finding, not an error of the check
    """An invariant does not hold."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


def effective_updates(world: World) -> tuple[list[UpdateApplied], tuple[Batch, ...]]:
    """Fold the updates topic into the updates that made the model, and the quarantined batches."""
    history, by_name = History(), dict[tuple[int, int], UpdateApplied]()
    for offset, record in enumerate(world.updates):
        counts = history.feed(offset, record)
        if counts and isinstance(record, UpdateApplied):
            by_name[record.epoch, record.version] = record
    updates = [by_name[model.epoch, model.version] for model in history.path[1:]]
    return updates, tuple(record.batch for record in history.quarantined.values())


def check_audit(world: World) -> None:
    """Check what holds at any moment: one chain of weights, and no batch used twice.

    A quarantined batch is in no update.
    """
    updates, quarantined = effective_updates(world)
    by_name = {token[0]: token for token in world.nodes}
    if world.scenario.group:
        results, named = world.group.results, by_name
        by_name = {}
        for update in updates:
            model = ModelId(update.epoch, update.version)
            by_name[model] = named[model] if update.by is UNSET else results[update.by][0]  # type: ignore[assignment]
        _check_states(world, by_name)
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
    if trained & world.figures.replayed:
        raise Violation("replayed and trained", f"{trained & world.figures.replayed}")


def _check_states(world: World, by_name: dict[ModelId, Token]) -> None:
    """Check that each version was made from the one before it, and that members hold this one."""
    before: Token | None = None
    for model, token in by_name.items():
        if before is not None and world.nodes[token].parent != before:
            raise Violation("two chains", f"{model} was made of {world.nodes[token].parent}")
        if world.group.truth.get(model, token) != token:
            raise Violation("two contents", f"{model} is {world.group.truth[model]}, not {token}")
        before = token


def refused_claims(world: World) -> int:
    """Count the claims that changed nothing."""
    ledger = Ledger.of(genesis(world.streams.first, world.streams.known))
    decisions = [ledger.decide(offset, claim) for offset, claim in enumerate(world.control)]
    return sum(not decision.accepted for decision in decisions)


def check_drained(world: World) -> None:
    """Check the end: every record is in exactly one place, and every replay agrees."""
    check_audit(world)
    _check_switched(world)
    _check_taken_back(world)
    _check_remembered(world)
    updates, quarantined = effective_updates(world)
    used, accepted, ledger = _replay(world)
    claimed = ledger.claimed
    settled = list[Batch]()
    for batch in [*(batch for update in updates for batch in update.batches), *quarantined]:
        claim = accepted.get(batch.offset)
        if claim is not None and claim.without_skipped() == batch.without_skipped():
            settled.append(accepted.pop(batch.offset))
        elif batch not in quarantined or not world.figures.topic_losses:
            raise Violation("false audit", f"batch {batch.offset} was never accepted so")
    most_waiting = 0 if world.scenario.linger else world.revisions[-1].largest_group - 1
    if len(accepted) > most_waiting:
        raise Violation("batch lost", f"{sorted(accepted)} wait, and nobody trains on them")
    for batch in (*settled, *accepted.values()):
        used.update(_records(world, ledger, batch.address, batch.skipped))
        _check_content(world, ledger, batch)
    for partition, records in world.streams.records.items():
        for offset, _ in records:
            times, expected = used[partition, offset], offset < claimed.get(partition, 0)
            if times != expected:
                kind = "record used twice" if times else "record lost"
                raise Violation(kind, f"{partition}@{offset} is used {times} times")
    _check_quarantined(world, quarantined)


def _check_switched(world: World) -> None:
    """Check that the wanted owner has the weights, and that hand-overs took no update back."""
    history = History()
    for offset, record in enumerate(world.updates):
        slices, head, after_loss = history.slices, history.head, history.after_loss
        history.feed(offset, record)
        switched = history.slices != slices and history.head != head
        # The job's owner resumed after a loss, so claims after the snapshot may be lost, too.
        lost = isinstance(record, Lead) and record.after_loss > after_loss
        if switched and not (lost or world.group.met["fallen back"] or world.figures.topic_losses):
            raise Violation("taken back", f"{head} by {record}")
    wanted = world.revisions[-1].slices
    if (None if history.slices is UNSET else history.slices) != wanted:
        raise Violation("not switched", f"{history.slices} leads, wanted {wanted}")


def _check_taken_back(world: World) -> None:
    """Check that a process takes back versions of members only if it was also the last leader.

    Another last leader could know members that still hold these versions.
    """
    if world.figures.topic_losses:
        return
    history, names = History(), dict[int, str]()
    for offset, record in enumerate(world.updates):
        slices, head, after_loss = history.slices, history.head, history.after_loss
        counts = history.feed(offset, record)
        if not (counts and isinstance(record, Lead)):
            continue
        name = names[history.epoch] = record.candidate.rpartition("#")[0]
        if slices is UNSET or history.head == head or record.after_loss > after_loss:
            continue
        if names.get(record.after) != name:
            raise Violation("taken back", f"{head} by {record}, of a leader before")


def _check_remembered(world: World) -> None:
    """Check that no Lead goes below the newest checkpoint that counts, unless the owner says so."""
    if world.figures.topic_losses or world.scenario.torn:
        return
    history = History()
    for offset, record in enumerate(world.updates):
        named, after_loss = history.checkpoint, history.after_loss
        counts = history.feed(offset, record)
        if not (counts and isinstance(record, Lead)) or named is None:
            continue
        if record.base.version < named.version and record.after_loss == after_loss:
            raise Violation("forgotten", f"the checkpoint {named} by {record}")


def _check_quarantined(world: World, quarantined: tuple[Batch, ...]) -> None:
    """Check that each quarantined batch has its dead letter.

    Without faults that may look like poison, each must also contain poison.
    """
    unwritten = set(quarantined) - world.figures.dead_batches
    if unwritten:
        raise Violation("no dead letter", f"of quarantined batches {unwritten}")
    scenario = world.scenario
    if scenario.max_failures < SURE or any(fault.kind in HARMFUL for fault in scenario.faults):
        return
    for batch in quarantined:
        if not any(poison.lies_in(batch.address) for poison in scenario.poisons):
            raise Violation("innocent quarantined", f"{batch}")


def _check_content(world: World, ledger: Ledger, batch: Batch) -> None:
    """Check that a batch has the same records as when its worker claimed it."""
    read = world.figures.contents[batch.worker, batch.address]
    for span in batch.address:
        end = ledger.end_in_log(span)
        had = {each for each in read if each[0] == span.place and each[1] < end}
        has = {
            world.streams.content(span.place, offset)
            for offset, _ in world.streams.records[span.place]
            if span.start <= offset < end
        }
        if had != has:
            raise Violation("other records", f"{batch}: {sorted(had ^ has)[:3]}")


def _replay(world: World) -> tuple[Counter[Place], dict[int, Batch], Ledger]:
    """Decide the control topic again.

    Returns:
        Records that need no update, accepted batches by offset, and the ledger.
    """
    ledger = Ledger.of(genesis(world.streams.first, world.streams.known))
    counted = list[Claim]()
    accepted: dict[int, Batch] = {}
    for offset, claim in enumerate(world.control):
        stated = world.figures.leader_statuses.get(world.control.position(ledger.position))
        if stated is not None and stated != ledger.claimed:
            raise Violation(
                "replay differs", f"at control position {ledger.position}: stated {stated}"
            )
        decision = ledger.decide(offset, claim)
        if not decision.accepted or claim is None or isinstance(claim, Opened):
            continue
        bad = {(Partition(s.topic, s.partition), o) for s in _skipped(claim) for o in s.offsets}
        if silent := bad - world.figures.dead_letters:
            raise Violation("no dead letter", f"of records {sorted(silent)[:3]}")
        counted.append(claim)
        if decision.batch is not None:
            accepted[offset] = decision.batch
    used = Counter[Place]()
    # The ends of spans depend on all generations, so this waits until all are known.
    for claim in counted:
        records = set(_records(world, ledger, claim.address, ()))
        bad = {(Partition(s.topic, s.partition), o) for s in _skipped(claim) for o in s.offsets}
        waits = isinstance(claim, BatchReady) and claim.samples
        used.update(records & bad if waits else records)
    return used, accepted, ledger


def _skipped(claim: Claim) -> tuple[Skipped, ...]:
    return claim.skipped if isinstance(claim, BatchReady) else ()


def _records(
    world: World, ledger: Ledger, address: Address, skipped: tuple[Skipped, ...]
) -> Iterator[tuple[Partition, int]]:
    """Yield the records of an address that the logs have now."""
    left_out = {(s.topic, s.partition, o) for s in skipped for o in s.offsets}
    for span in address:
        for offset, _ in world.streams.records[span.place]:
            if (
                span.start <= offset < ledger.end_in_log(span)
                and (*span.place, offset) not in left_out
            ):
                yield span.place, offset
