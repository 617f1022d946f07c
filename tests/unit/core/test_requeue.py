"""A requeued batch waits again exactly once, under every leader and from every snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace as with_

from common.core import commands as do
from common.core import events
from common.core.messages import (
    GENESIS,
    AuditRecord,
    Lead,
    ModelId,
    Quarantined,
    Replayed,
    Requeued,
)
from common.core.snapshots import Snapshot
from tests.unit.core.bench import QUIET, Bench
from tests.unit.core.examples import FIRST, A, B, C, P, batch, gradient, ready, span, the
from tests.unit.core.test_leader import asked, leading
from tests.unit.core.test_leader_failures import fail

if TYPE_CHECKING:
    from common.core.messages import ControlRecord
    from common.core.settings import CoordinatorSettings
    from tests.unit.core.leaders import Topic

LAX = replace(QUIET, max_failures=0, poison_in_a_row=100, poison_share=1.0)
FIRST_LEAD = Lead(-1, GENESIS, "c0#1", 0)
# Batches 0 and 1 are the claims on the first 20 records of P. Batch 1 is poison.
POISON = Quarantined(0, batch(1, B), "poison: raised: why", number=1)
REQUEUED = Requeued(batch(1, B), "ada", 1.0)
REPLAYED = Replayed(batch(1, B), "ada", 1.0)
CLAIMS = [ready(A, span(P, 0, 10)), ready(B, span(P, 10, 20))]
# Published by the leader of epoch 0 after it had read two claims and the quarantine.
BEHIND = Snapshot(
    0, GENESIS, 2, 2, FIRST | {P: 20}, waiting=(batch(0, A),), poison=(batch(1, B),), number=1
)
# Published by the same leader before the quarantine.
AHEAD = with_(BEHIND, updates_position=1, waiting=(batch(0, A), batch(1, B)), poison=(), number=0)


def quarantining(settings: CoordinatorSettings = LAX) -> Bench:
    """Return a leader of two batches, with the second one quarantined because it raised."""
    bench = leading(settings)
    bench.announce(A, B)
    fail(bench, bench.orders[1], "raised")
    return bench


def updating() -> Bench:
    """Return a leader whose third batch completed a group. It has not read its records back yet."""
    bench = quarantining(replace(LAX, hot_every_updates=1))
    bench.announce(C)
    replies = tuple(gradient(w, bench.model, [batch(o, w)]) for w, o in ((A, 0), (C, 2)))
    bench.feed(events.RepliesRead(replies))
    assert bench.updates[1:] == [POISON, with_(the(bench.said, do.Apply).update, number=2)]
    assert bench.published == []
    return bench


def successor(snapshot: Snapshot, *updates: AuditRecord) -> Bench:
    """Return the successor of a leader that wrote these records and published that snapshot."""
    bench = Bench(LAX, updates=[FIRST_LEAD, *updates], control=list(CLAIMS), name="c2")
    bench.lead(snapshot)
    bench.see(A, B)
    bench.read_control()
    return bench


def waiting(bench: Bench) -> dict[object, list[int]]:
    """Return the offsets of the batches that each worker has orders for."""
    return {order.worker: [b.offset for b in order.batches] for order in bench.orders}


def test_requeued_batch_is_trained_like_a_new_one() -> None:
    bench = quarantining()
    bench.read_updates()
    bench.updates.append(REQUEUED)

    said = bench.read_updates()

    # B did not answer its order.
    assert asked(said) == {C: [1]}
    replies = tuple(gradient(w, bench.model, [batch(o, h)]) for w, o, h in ((A, 0, A), (C, 1, B)))
    said = bench.feed(events.RepliesRead(replies))
    assert the(said, do.Apply).update.batches == (batch(0, A), batch(1, B))


def test_requeued_batch_may_be_quarantined_and_requeued_again() -> None:
    bench = quarantining()
    for _ in range(3):
        bench.read_updates()
        bench.updates.append(REQUEUED)
        said = bench.read_updates()
        assert list(asked(said).values()) == [[1]]
        fail(bench, bench.orders[0], "raised")

    again = [with_(POISON, number=number) for number in (1, 2, 3, 4)]
    assert [record for record in bench.updates if isinstance(record, Quarantined)] == again


@pytest.mark.parametrize(
    "record",
    [
        Requeued(batch(0, A), "ada", 1.0),  # it waits
        Requeued(batch(7, A), "ada", 1.0),  # never claimed
        Requeued(with_(batch(1, B), samples=9), "ada", 1.0),  # another batch at that offset
        REPLAYED,
    ],
)
def test_invalid_requeue_changes_nothing(record: AuditRecord) -> None:
    bench = quarantining()
    bench.read_updates()
    bench.updates.append(record)
    bench.read_updates()

    # The orders are as they were at first.
    assert waiting(bench) == {A: [0], B: [1]}
    bench.tick(0.1)
    assert bench.leader_status.waiting == 1


def test_repeated_requeue_counts_once() -> None:
    bench = quarantining()
    bench.read_updates()
    bench.updates += [REQUEUED, REQUEUED]
    bench.read_updates()

    assert bench.leader_status.waiting == 2


def test_replayed_batch_cannot_be_requeued() -> None:
    bench = quarantining()
    bench.read_updates()
    bench.updates += [REPLAYED, REQUEUED]
    bench.read_updates()
    bench.tick(0.1)

    assert bench.leader_status.waiting == 1


# --- takeovers -----------------------------------------------------------------------------------


def test_new_leader_knows_a_requeue_after_its_snapshot() -> None:
    # updates   0: Lead   1: poison b1   2: requeued b1   3: Lead
    # snapshot                         ^ without b1
    assert successor(BEHIND, POISON, REQUEUED).leader_status.waiting == 2


def test_batch_quarantined_and_requeued_after_the_snapshot_waits_once() -> None:
    # updates   0: Lead   1: poison b1   2: requeued b1   3: Lead
    # snapshot          ^ b1 waits in it
    assert successor(AHEAD, POISON, REQUEUED).leader_status.waiting == 2


@pytest.mark.parametrize("snapshot", [BEHIND, AHEAD])
def test_new_leader_accepts_requeue_of_a_batch_quarantined_earlier(
    snapshot: Snapshot,
) -> None:
    bench = successor(snapshot, POISON)
    assert bench.leader_status.waiting == 1
    bench.updates.append(REQUEUED)
    bench.read_updates()

    assert bench.leader_status.waiting == 2


@pytest.mark.parametrize(
    "order_of_events", ["before it leads", "before its claim", "after its claim"]
)
def test_requeued_batch_whose_claim_is_replayed_later_waits_once(order_of_events: str) -> None:
    # The snapshot knows that b1 is quarantined, but its control position is below b1's claim.
    snapshot = with_(
        BEHIND,
        control_position=1,
        claimed=FIRST | {P: 10},
        quarantined=(batch(1, B),),
        waiting=(batch(0, A),),
    )
    before = [REQUEUED] if order_of_events == "before it leads" else []
    bench = Bench(LAX, updates=[FIRST_LEAD, POISON, *before], control=list(CLAIMS), name="c2")
    bench.lead(snapshot)
    if order_of_events == "after its claim":
        bench.read_control()
        assert bench.leader_status.waiting == 1
    if not before:
        bench.updates.append(REQUEUED)
        bench.read_updates()
    bench.read_control()

    assert bench.leader_status.waiting == 2


def test_quarantine_does_not_apply_to_another_batch_at_its_offset() -> None:
    # control   0: A [0:10]   1: B [10:20], quarantined, then lost   1: C [10:15]
    snapshot = with_(
        BEHIND, control_position=1, claimed=FIRST | {P: 10}, quarantined=(batch(1, B),)
    )
    now = with_(ready(C, span(P, 10, 15)), samples=5)
    topic: Topic = [FIRST_LEAD, POISON]
    bench = Bench(replace(LAX, hot_every_s=1.0), updates=topic, control=[CLAIMS[0], now], name="c2")
    bench.lead(snapshot)
    bench.read_control()
    assert bench.leader_status.waiting == 2

    # A lost batch cannot be requeued.
    bench.updates.append(REQUEUED)
    bench.read_updates()
    assert bench.leader_status.waiting == 2
    bench.tick(bench.now + 1.0)
    (written,) = bench.published
    assert (written.quarantined, written.poison) == ((), ())


def test_quarantine_of_a_lost_claim_is_forgotten() -> None:
    snapshot = with_(
        BEHIND, control_position=1, claimed=FIRST | {P: 10}, quarantined=(batch(1, B),)
    )
    # C's claim is refused, because it leaves a gap. Then the lost claim arrives again.
    control: list[ControlRecord | None] = [
        CLAIMS[0],
        ready(C, span(P, 11, 21)),
        CLAIMS[1],
    ]
    bench = Bench(LAX, updates=[FIRST_LEAD, POISON], control=control, name="c2")
    bench.lead(snapshot)
    bench.read_control()

    assert bench.leader_status.waiting == 2


def test_requeue_resets_the_failure_count() -> None:
    snapshot = with_(AHEAD, failure_counts={1: 7})
    bench = successor(snapshot, POISON, REQUEUED)
    bench.read_updates()

    said = bench.feed(events.WantedChanged("stopped"))
    assert the(said, do.PublishSnapshot).snapshot.failure_counts == {}


# --- unpublished snapshots -----------------------------------------------------------------------


def test_snapshot_published_after_a_requeue_has_the_batch_waiting() -> None:
    # updates   0: Lead   1: poison b1   2: requeued b1   3: J=1 of b0 b2
    # copied                                                            ^ without b1
    bench = updating()
    bench.updates.insert(2, REQUEUED)
    bench.read_updates()

    (snapshot,) = bench.published
    assert snapshot.updates_position == 4
    assert (snapshot.waiting, snapshot.poison) == ((batch(1, B),), ())


def test_snapshot_names_batches_that_may_be_requeued() -> None:
    bench = updating()
    bench.read_updates()

    (snapshot,) = bench.published
    assert (snapshot.waiting, snapshot.poison) == ((), (batch(1, B),))
    later = Bench(LAX, updates=[*bench.updates, REQUEUED], control=list(bench.control), name="c2")
    later.lead(snapshot)
    assert later.leader_status.waiting == 1


def test_snapshot_does_not_wait_for_a_requeue() -> None:
    bench = updating()
    bench.updates.insert(2, REQUEUED)
    # Read the quarantine and the requeue, not the update.
    bench.read_updates(2)
    assert bench.published == []

    bench.read_updates()
    assert bench.published[0].made == ModelId(0, 1)
