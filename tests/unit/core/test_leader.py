"""A leader at work: when rounds begin, and what it sends to workers and successors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace as with_

from common.core import commands as do
from common.core import events
from common.core.batch_assignment import GROWTH, MOST_GROWTHS
from common.core.liveness import ALIVE, Heartbeat
from common.core.messages import (
    GENESIS,
    BatchReady,
    Failed,
    LeaderStatus,
    ModelId,
    Opened,
    Skipped,
    TriggerId,
    WorkerLeaving,
)
from common.core.scores import BINS
from common.core.snapshots import Snapshot
from common.core.spans import LogPosition, Partition
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import (
    FIRST,
    SAMPLES,
    A,
    B,
    C,
    P,
    Q,
    answer,
    batch,
    of_kind,
    span,
    the,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.commands import CoordinatorCommand
    from common.core.messages import WorkerId
    from common.core.settings import CoordinatorSettings


def leading(settings: CoordinatorSettings = QUIET, *workers: WorkerId) -> Bench:
    """Return a leader that sees A, B and C, or these workers."""
    bench = Bench(settings)
    bench.lead()
    bench.see(*(workers or (A, B, C)))
    return bench


def asked(commands: Iterable[CoordinatorCommand]) -> dict[WorkerId, list[int]]:
    """Return the batches per worker that the only trigger among these commands requests."""
    orders = the(commands, do.PostTrigger).trigger.orders
    return {order.worker: [b.offset for b in order.batches] for order in orders}


# --- rounds ----------------------------------------------------------------------------------


def test_update_of_two_classes_reports_auc_of_the_last_minute() -> None:
    bench = leading()
    for found, now in (((0,) * 32 + (SAMPLES,), 1.0), ((SAMPLES,), 30.0), ((SAMPLES,), 200.0)):
        bench.tick(now)
        bench.announce(A, B)
        first, second = (answer(order, bench.model) for order in bench.orders)
        negatives = found + (0,) * (2 * BINS - len(found))
        positives = (0,) * BINS + (SAMPLES,) + (0,) * (BINS - 1)  # all of them in the lowest bin
        replies = with_(first, scores=negatives), with_(second, scores=positives)
        bench.feed(events.RepliesRead(replies))
    metrics = [apply.update.metrics for apply in of_kind(bench.said, do.Apply)]
    assert [each["auc"] for each in metrics] == [0.0, 0.25, 0.5]
    assert {each["right"] for each in metrics} == {1.0}


def test_new_leader_publishes_model_and_status_and_reads_heartbeats() -> None:
    bench = Bench()
    begin, model, leader_status, look, copy, publish = bench.lead()
    assert isinstance(begin, do.Begin)
    assert model == do.PublishModel(ModelId(0, 0))
    assert leader_status == do.PutLeaderStatus(LeaderStatus(0, 0, FIRST, 0, 0, 0, FIRST))
    assert look == do.ReadHeartbeats()
    assert copy == do.CopyWeights()
    first = Snapshot(0, GENESIS, 1, 0, FIRST)
    assert publish == do.PublishSnapshot(first, checkpoint=False)


OWN, OTHER = "a" * 16, "b" * 16


def test_worker_of_another_model_gets_no_order_and_the_status_says_why() -> None:
    # beats    A: own, B: other    A: own, B: own
    # asked    A for all           both
    bench = Bench(QUIET)
    bench.digest = OWN
    bench.lead()
    bench.feed(events.WorkersSeen({A: Heartbeat(ALIVE, OWN), B: Heartbeat(ALIVE, OTHER)}))
    left_out = bench.leader_status.left_out
    assert left_out.keys() == {B}
    assert f"(layout {OTHER}, expected {OWN})" in left_out[B]
    bench.announce(A)
    assert asked(bench.announce(B)) == {A: [0, 1]}
    bench.feed(events.RepliesRead(tuple(answer(o, bench.model) for o in bench.orders)))
    bench.see(A, B, digest=OWN)
    assert bench.leader_status.left_out == {}
    bench.announce(A)
    assert asked(bench.announce(B)) == {A: [2], B: [3]}


def test_orders_of_worker_restarted_with_another_model_go_to_others() -> None:
    bench = Bench(QUIET)
    bench.digest = OWN
    bench.lead()
    bench.see(A, B, digest=OWN)
    bench.announce(A)
    assert asked(bench.announce(B)) == {A: [0], B: [1]}
    beats = {A: Heartbeat(ALIVE, OWN), B: Heartbeat(ALIVE, OTHER)}
    assert asked(bench.feed(events.WorkersSeen(beats))) == {A: [1]}
    assert bench.machine.leader is not None
    assert bench.machine.leader.failure_counts == {}


def test_orders_are_for_a_process_and_are_given_again_to_its_successor() -> None:
    bench = leading(QUIET, A)
    bench.feed(events.WorkersSeen({A: Heartbeat(ALIVE, life="1")}))
    [order] = the(bench.announce(A, A), do.PostTrigger).trigger.orders
    assert (order.life, len(order.batches)) == ("1", 2)

    said = bench.feed(events.WorkersSeen({A: Heartbeat(ALIVE, life="2")}))
    [again] = the(said, do.PostTrigger).trigger.orders
    assert again == with_(order, life="2")
    # A successor proves no death, so nobody is blamed.
    assert bench.machine.leader is not None
    assert bench.machine.leader.failure_counts == {}


def test_kth_batch_starts_a_round_and_last_gradient_completes_update() -> None:
    bench = leading()
    assert of_kind(bench.announce(A), do.PostTrigger) == []
    trigger = the(bench.announce(B), do.PostTrigger).trigger
    assert (trigger.id, trigger.model) == (TriggerId(0, 1), ModelId(0, 0))

    a, b = trigger.orders
    assert bench.feed(events.RepliesRead((answer(a, bench.model),))) == (
        do.AddGradient(1, answer(a, bench.model)),
    )
    _, apply, audit, model = bench.feed(events.RepliesRead((answer(b, bench.model),)))
    assert isinstance(apply, do.Apply)
    assert audit == do.AppendAudit(with_(apply.update, number=1))
    assert model == do.PublishModel(ModelId(0, 1), whole=False)
    assert (apply.update.epoch, apply.update.version, apply.update.short) == (0, 1, "")
    assert apply.update.batches == (batch(0, A), batch(1, B))
    assert (apply.update.samples, apply.update.loss) == (20, 2.0)
    assert apply.update.metrics == {"right": 1.0}


def test_next_round_starts_only_when_no_update_is_in_flight() -> None:
    # batches  a0 b1 begin a round      a2 b3 wait      gradients of 0, 1: a2 b3 begin
    bench = leading()
    assert asked(bench.announce(A, B)) == {A: [0], B: [1]}
    assert of_kind(bench.announce(A, B), do.PostTrigger) == []
    old = bench.orders
    said = bench.compute()
    assert asked(said) == {A: [2], B: [3]}
    made = do.PublishModel(bench.model, whole=False)
    assert said.index(made) < said.index(of_kind(said, do.PostTrigger)[0])

    stale = answer(old[0], ModelId(0, 0))  # a repeated message
    assert bench.feed(events.RepliesRead((stale,))) == (
        do.Drop(stale, "batches [0] wait for no gradient"),
    )


def test_round_waits_while_too_many_audit_records_are_unread() -> None:
    bench = leading(replace(QUIET, unread_audits=1))
    for _ in range(2):
        bench.announce(A, B)
        bench.compute()
    assert of_kind(bench.announce(A, B), do.PostTrigger) == []
    assert asked(bench.read_updates(1)) == {A: [4], B: [5]}


def test_short_group_starts_after_its_linger() -> None:
    bench = leading(replace(QUIET, group_linger_s=1.0))
    bench.now = 0.5
    bench.announce(A)
    assert of_kind(bench.tick(1.4), do.PostTrigger) == []
    assert asked(bench.tick(1.5)) == {A: [0]}
    update = the(bench.compute(), do.Apply).update
    assert (update.short, len(update.batches)) == ("linger", 1)


def test_group_linger_starts_with_the_last_batch_or_update() -> None:
    # a0 b1 a2 at 0.0   J=1 of a0 b1 at 0.8   a2 goes at 1.8
    bench = leading(replace(QUIET, group_linger_s=1.0, deadline_floor_s=9.0))
    bench.announce(A, B, A)
    bench.now = 0.8
    bench.compute()
    assert of_kind(bench.tick(1.7), do.PostTrigger) == []
    assert asked(bench.tick(1.8)) == {A: [2]}


def test_lingering_round_accepts_batches_before_its_gradients() -> None:
    bench = leading(replace(QUIET, group_linger_s=1.0))
    bench.announce(A)
    bench.tick(1.0)
    (first,) = bench.orders
    assert asked(bench.announce(B)) == {B: [1]}
    bench.compute()
    (update,) = of_kind(bench.feed(events.RepliesRead((answer(first, bench.model),))), do.Apply)
    assert (update.update.short, len(update.update.batches)) == ("", 2)


# --- reassignment ----------------------------------------------------------------------------


def test_batches_of_a_dead_worker_are_reassigned_with_the_model() -> None:
    bench = leading()
    bench.announce(A, B)
    bench.see(A, C)
    said = bench.said[-2:]
    assert said[0] == do.PublishModel(bench.model)
    assert asked(said) == {C: [1]}


def test_leaving_worker_may_finish_and_is_not_blamed() -> None:
    bench = leading(replace(QUIET, max_failures=0))
    bench.announce(A, B)
    bench.see(A, C, leaving=[B])
    assert len(of_kind(bench.said, do.PostTrigger)) == 1  # A may still compute it
    bench.see(A, C)
    assert asked(bench.said[-2:]) == {C: [1]}
    said = bench.feed(events.WantedChanged("stopped"))
    assert the(said, do.PublishSnapshot).snapshot.failure_counts == {}


def test_overdue_orders_are_reassigned_with_the_model() -> None:
    bench = leading(QUIET, A, B)
    bench.announce(A, B)
    assert of_kind(bench.tick(0.4), do.PostTrigger) == []
    said = bench.tick(0.5)
    assert asked(said) == {A: [1], B: [0]}
    assert of_kind(said, do.PublishModel) == [do.PublishModel(bench.model)]


def test_trigger_moves_to_new_stream_if_orders_stay_unanswered() -> None:
    # The worker may have read a forged trigger with a higher id, which Redis has lost since.
    bench = leading(QUIET, A)
    bench.announce(A, A)
    moved, now = list[bool](), 0.0
    for _ in range(MOST_GROWTHS + 2):
        now += QUIET.deadline_floor_s * GROWTH**MOST_GROWTHS
        moved.append(the(bench.tick(now), do.PostTrigger).moves)
    assert moved == [False] * MOST_GROWTHS + [True] * 2


def test_trigger_stays_in_its_stream_while_failures_arrive() -> None:
    bench = leading(QUIET, A)
    bench.announce(A, A)
    for _ in range(3 * MOST_GROWTHS):
        said = bench.feed(events.RepliesRead((Failed(A, bench.model, (0,), "unreadable"),)))
        assert not any(each.moves for each in of_kind(said, do.PostTrigger))


def test_missing_model_is_published_again() -> None:
    bench = leading()
    bench.announce(A, B)
    failed = Failed(B, bench.model, (1,), "model_missing")
    said = bench.feed(events.RepliesRead((failed,)))
    assert said[:2] == (do.Drop(failed, "model_missing"), do.PublishModel(bench.model))
    assert asked(said) == {C: [1]}


def test_on_missing_proceed_puts_a_batch_back_once_and_then_awaits_it() -> None:
    # round   a0 b1       overdue: J=1 of a0     b1 a2       overdue     J=2 of b1 a2
    # answers a0                                 a2          b1 asked again
    bench = leading(replace(QUIET, on_missing="proceed", hot_every_updates=1), A, B)
    bench.announce(A, B)
    bench.feed(events.RepliesRead((answer(bench.orders[0], bench.model),)))
    update = the(bench.tick(0.5), do.Apply).update
    assert (update.short, update.batches) == ("missing", (batch(0, A),))
    bench.read_updates()
    assert (bench.published[-1].returned, bench.published[-1].waiting) == ((1,), (batch(1, B),))

    bench.feed(events.RepliesRead((Failed(B, bench.model, (1,), "raised"),)))  # it lives
    assert asked(bench.announce(A)) == {A: [2], B: [1]}
    mine = next(order for order in bench.orders if order.worker == A)
    bench.feed(events.RepliesRead((answer(mine, bench.model),)))
    said = bench.tick(9.0)
    assert (of_kind(said, do.Apply), asked(said)) == ([], {A: [1]})
    update = the(bench.compute(), do.Apply).update
    assert (update.short, len(update.batches)) == ("", 2)
    bench.read_updates()
    assert bench.published[-1].returned == ()


# --- leaving and silent workers ----------------------------------------------------------------


def test_unfinished_batches_of_leaving_worker_are_reassigned_at_once() -> None:
    # a has an order for 0 and 2. It leaves, and finishes neither.
    bench = leading(changed(group_size=3), A, B)
    bench.announce(A, B, A)
    first, second = bench.orders
    assert [len(first.batches), len(second.batches)] == [2, 1]
    assert asked(bench.feed(events.RepliesRead((WorkerLeaving(A, bench.model),)))) == {B: [0, 2]}
    bench.feed(events.RepliesRead((answer(second, bench.model),)))
    update = the(bench.compute(), do.Apply).update
    assert {b.offset for b in update.batches} == {0, 1, 2}


def test_batches_that_leaving_worker_finishes_are_not_reassigned() -> None:
    bench = leading(QUIET, A, B)
    bench.announce(A, B)
    assert bench.feed(events.RepliesRead((WorkerLeaving(A, bench.model, (0,)),))) == ()
    said = bench.compute()
    assert the(said, do.Apply).update.version == 1
    # A leaving worker gets no new order.
    assert asked(bench.announce(A, B)) == {B: [2, 3]}


def test_overdue_worker_gets_orders_last_until_it_answers() -> None:
    bench = leading(QUIET, A, B)
    bench.announce(A, B)
    bench.feed(events.RepliesRead((answer(bench.orders[0], bench.model),)))
    late = bench.model
    assert asked(bench.tick(0.6)) == {A: [1]}  # b is late
    bench.compute()
    assert asked(bench.announce(A, B)) == {A: [2, 3]}
    bench.feed(events.RepliesRead((Failed(B, late, (1,), "raised"),)))
    bench.compute()
    assert asked(bench.announce(A, B)) == {A: [4], B: [5]}


def test_emptied_board_gets_model_and_snapshot_again() -> None:
    bench = leading(QUIET, A, B)
    bench.announce(A, B)
    bench.compute()
    assert bench.feed(events.BoardWiped()) == (do.PublishModel(ModelId(0, 1)), do.CopyWeights())
    said = bench.read_updates()
    assert the(said, do.PublishSnapshot).snapshot.made == ModelId(0, 1)
    # No heartbeat has arrived yet, so workers get time.
    bench.see()
    assert asked(bench.announce(A, B)) == {A: [2], B: [3]}


@pytest.mark.parametrize("event", [events.BoardWiped(), events.OrdersLost()])
def test_orders_that_the_board_lost_are_posted_again_at_once(
    event: events.CoordinatorEvent,
) -> None:
    # The orders are posted at 0 and, because no answer comes, again at 0.5, 1.25, 2.4 and 4.1. The
    # next time would be 6.6.
    bench = leading(QUIET, A, B)
    bench.announce(A, B)
    while bench.now < 5.0:
        bench.tick(bench.now + 0.05)
    said = bench.feed(event)
    assert asked(said) == {A: [0], B: [1]}
    model, trigger = of_kind(said, do.PublishModel), of_kind(said, do.PostTrigger)
    # Model and trigger are lost, so both are posted again, the model first.
    assert said.index(model[0]) < said.index(trigger[0])
    assert the(bench.compute(), do.Apply).update.version == 1


@pytest.mark.parametrize("event", [events.BoardWiped(), events.OrdersLost()])
def test_leader_without_round_posts_nothing_when_the_board_returns(
    event: events.CoordinatorEvent,
) -> None:
    bench = leading(QUIET, A, B)
    assert of_kind(bench.feed(event), do.PostTrigger) == []


# --- reports ---------------------------------------------------------------------------------


def test_leader_status_reports_decided_claims_and_waiting_batches() -> None:
    # control    0: a  1: b  2: a again, refused  3: a
    bench = leading()
    bench.announce(A)
    known = {P: LogPosition(10)}
    assert bench.leader_status == LeaderStatus(0, 1, {P: 10, Q: 0}, 0, 1, 3, FIRST, known=known)
    bench.announce(B)
    bench.read_control(bench.control[0])
    known = {P: LogPosition(20)}
    assert bench.leader_status == LeaderStatus(0, 3, {P: 20, Q: 0}, 0, 2, 3, FIRST, known=known)
    bench.announce(A)
    bench.compute()
    bench.tick(0.1)
    known = {P: LogPosition(30)}
    assert bench.leader_status == LeaderStatus(0, 4, {P: 30, Q: 0}, 3, 1, 3, FIRST, known=known)


def test_snapshot_counts_round_in_flight_as_waiting() -> None:
    bench = leading(replace(QUIET, checkpoint_every_s=1.0))
    bench.announce(A, B, C)
    bench.feed(events.RepliesRead((answer(bench.orders[0], bench.model),)))
    bench.tick(1.0)
    (snapshot,) = bench.published
    assert snapshot.waiting == (batch(0, A), batch(1, B), batch(2, C))
    assert (snapshot.made, snapshot.control_position) == (ModelId(-1, 0), 3)


def test_settled_offsets_are_reported_once_their_checkpoint_is_published() -> None:
    bench = leading(replace(QUIET, checkpoint_every_updates=1))
    bench.announce(A, B, C)
    bench.compute()
    assert bench.published == []
    bench.read_updates()
    assert bench.published[-1].settled == {P: 20, Q: 0}
    bench.tick(0.1)
    assert bench.leader_status.settled == {P: 20, Q: 0}


def test_bad_records_are_dead_lettered_once_their_claim_is_accepted() -> None:
    bad = (Skipped("s", 0, 3, "no label"),)
    claim = BatchReady(A, (span(P, 0, 10),), 9, bad)
    bench = leading()
    said = bench.read_control(claim, claim)
    assert the(said, do.DeadLetterRecords) == do.DeadLetterRecords(bad)


# --- changed streams -------------------------------------------------------------------------


def test_added_partitions_are_opened_from_their_beginning() -> None:
    bench = leading()
    added = Partition(P.topic, 2)
    seen = events.StreamsSeen({P: "id", Q: "id", added: "id"}, 99)
    opened = Opened(added, None, 99, "id", 0, -1)
    assert of_kind(bench.feed(seen), do.OpenPartition) == [do.OpenPartition(opened)]
    bench.feed(events.ControlRead(((0, opened),)))
    assert bench.leader_status.claimed == {**FIRST, added: 0}
    assert bench.leader_status.generation(added) == 99
    assert of_kind(bench.feed(seen), do.OpenPartition) == []


def test_snapshot_records_opened_partitions() -> None:
    bench = leading(replace(QUIET, checkpoint_every_s=1.0))
    opened = Opened(Partition(P.topic, 2), None, 99, "id", 0, -1)
    bench.feed(events.ControlRead(((0, opened),)))
    bench.tick(1.0)
    assert bench.published[-1].opened == {opened.partition: (opened,)}
    assert bench.published[-1].known == {opened.partition: LogPosition(0, "id", -1)}
