"""A leader's errors: poison, divergence, pauses, and the end of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from common.core import commands as do
from common.core import events
from common.core.job_completion import LOSS_WINDOW
from common.core.messages import (
    GENESIS,
    Assignment,
    Failed,
    FailedReason,
    Lead,
    ModelId,
    Quarantined,
    WorkerId,
)
from common.core.snapshots import Snapshot
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import FIRST, A, B, C, P, answer, batch, of_kind, the
from tests.unit.core.leaders import update
from tests.unit.core.test_leader import asked, leading


def fail(
    bench: Bench, order: Assignment, reason: FailedReason
) -> tuple[do.CoordinatorCommand, ...]:
    """Let a worker report a failed order."""
    offsets = tuple(each.offset for each in order.batches)
    return bench.feed(
        events.RepliesRead((Failed(order.worker, bench.model, offsets, reason, "why"),))
    )


# --- quarantine ------------------------------------------------------------------------------


def test_batch_above_its_limit_of_failures_is_quarantined_and_the_group_filled_up() -> None:
    # b1       raises     asked again   raises: poison
    # failures 1          alone         2 > 1             c2 takes its place: J=1 of a0 c2
    bench = leading(replace(QUIET, max_failures=1))
    bench.announce(A, B, C)
    a, b = bench.orders
    assert asked(fail(bench, b, "raised")) == {C: [1]}
    said = fail(bench, bench.orders[0], "raised")
    record = Quarantined(0, batch(1, B), "poison: raised: why", number=1)
    assert the(said, do.AppendAudit) == do.AppendAudit(record)
    assert asked(said) == {C: [2]}

    bench.compute()
    said = bench.feed(events.RepliesRead((answer(a, bench.model),)))
    assert set(the(said, do.Apply).update.batches) == {batch(0, A), batch(2, C)}


def test_batch_is_dead_lettered_only_after_its_quarantine_was_read_back() -> None:
    bench = leading()
    bench.announce(A, B)
    said = fail(bench, bench.orders[1], "expired")
    record = the(said, do.AppendAudit).record
    assert record == Quarantined(0, batch(1, B), "expired", number=1)
    assert of_kind(bench.said, do.DeadLetterBatch) == []
    assert the(bench.read_updates(), do.DeadLetterBatch).record == record


def test_batch_that_kills_its_workers_is_poison() -> None:
    bench = leading(replace(QUIET, max_failures=1))
    bench.announce(A, B)
    bench.see(A, C)  # B is dead
    # C, which had the order next, is dead, too.
    bench.see(A)
    record = Quarantined(
        0, batch(1, B), "poison: its workers died while they computed it", number=1
    )
    assert bench.updates[-1] == record
    assert bench.leader_status.waiting == 2
    bench.tick(0.1)
    assert bench.leader_status.waiting == 1


# --- poison that the task causes ----------------------------------------------------------------

TRACEBACK = "Traceback ...\n  File \"my_tasks.py\", line 12, in losses\nKeyError: 'lable'"


def raise_on_all(bench: Bench, most: int = 1000) -> int:
    """Let the task raise on every order until none follows; return the quarantined batches."""
    answered = set[object]()
    for _ in range(most):
        triggers = [c.trigger for c in of_kind(bench.said, do.PostTrigger)]
        orders = [(t.id, order) for t in triggers for order in t.orders]
        todo = [(key, order) for key, order in orders if (key, order.worker) not in answered]
        if not todo:
            break
        answered |= {(key, order.worker) for key, order in todo}
        failures = tuple(
            Failed(o.worker, bench.model, (o.batches[0].offset,), "raised", "KeyError", TRACEBACK)
            for _, o in todo
        )
        bench.feed(events.RepliesRead(failures))
        bench.read_updates()
    return len([r for r in bench.updates if isinstance(r, Quarantined)])


WORKERS = tuple(WorkerId(f"w{number}") for number in range(20))


@pytest.mark.parametrize("max_failures", [0, 1, 5])
@pytest.mark.parametrize("workers", [1, 4, 20])
def test_task_that_always_raises_holds_the_job_after_three_batches(
    max_failures: int, workers: int
) -> None:
    # All batches of a group of 20 are suspects, at up to 20 workers at once.
    bench = leading(changed(group_size=20, max_failures=max_failures), *WORKERS[:workers])
    bench.announce(*WORKERS, *WORKERS)

    assert raise_on_all(bench) == 3

    hold = the(bench.said, do.Hold)
    assert hold.reason.startswith(
        "3 batches in a row are poison: raised: KeyError; correct the task"
    )
    assert hold.detail == TRACEBACK
    # Workers that still have orders are overdue, but no order is posted again.
    bench.tick(100.0)
    assert raise_on_all(bench) == 3
    assert bench.leader_status.waiting == 37


def test_job_resumed_after_poison_is_held_again_only_after_as_much_poison() -> None:
    bench = leading(changed(max_failures=0, group_size=2))
    bench.announce(*WORKERS)
    assert raise_on_all(bench) == 3

    for times in (2, 3):
        # The jobs topic now says `paused`.
        bench.feed(events.WantedChanged("paused"))
        bench.feed(events.WantedChanged("running"))
        assert raise_on_all(bench) == 3 * times
        assert len(of_kind(bench.said, do.Hold)) == times


def test_update_between_poison_batches_resets_the_count() -> None:
    bench = leading(changed(max_failures=0, group_size=1, poison_in_a_row=2))
    for _ in range(10):
        bench.announce(A, B)
        fail(bench, bench.orders[0], "raised")
        bench.compute()
        bench.read_updates()

    assert of_kind(bench.said, do.Hold) == []


def test_poison_above_a_tenth_of_last_hundred_batches_holds_the_job() -> None:
    bench = leading(changed(max_failures=0, group_size=1))
    for number in range(1, 12):
        assert of_kind(bench.said, do.Hold) == []
        bench.announce(*[A] * 9)
        fail(bench, bench.orders[0], "raised")
        for _ in range(8):
            bench.compute()
            bench.read_updates()
        assert (number <= 10) == (of_kind(bench.said, do.Hold) == [])

    assert the(bench.said, do.Hold).reason.startswith("11 of the last 91 batches are poison")


def test_poison_of_a_tenth_of_the_batches_never_holds_the_job() -> None:
    bench = leading(changed(max_failures=0, group_size=1))
    for _ in range(30):
        bench.announce(*[A] * 10)
        fail(bench, bench.orders[0], "raised")
        for _ in range(9):
            bench.compute()
            bench.read_updates()

    assert of_kind(bench.said, do.Hold) == []


def test_batches_that_kill_their_workers_count_as_poison() -> None:
    bench = leading(changed(max_failures=0, group_size=2, poison_in_a_row=2))
    bench.announce(A, B)
    # A and B died, each with an order for one batch only.
    bench.see(C)

    assert the(bench.said, do.Hold).reason.startswith(
        "2 batches in a row are poison: its workers died while they computed it"
    )


def test_expired_batches_do_not_hold_the_job() -> None:
    bench = leading(changed(group_size=1))
    bench.announce(*[A] * 20)
    for _ in range(20):
        fail(bench, bench.orders[0], "expired")
        bench.read_updates()

    assert of_kind(bench.said, do.Hold) == []


def test_task_wrong_for_any_data_holds_the_job_at_once() -> None:
    bench = leading(replace(QUIET, max_failures=0))
    bench.announce(A, B)
    order = bench.orders[0]
    failed = Failed(order.worker, bench.model, (0,), "task", "losses has shape ()", TRACEBACK)

    said = bench.feed(events.RepliesRead((failed,)))

    hold = the(said, do.Hold)
    assert (
        hold.reason == "the task is wrong: losses has shape (); correct the task and resume the job"
    )
    assert hold.detail == TRACEBACK
    assert of_kind(bench.updates, Quarantined) == []
    # A's message arrives late: C has replaced A, the task is fixed, and the job resumed.
    bench.feed(events.WantedChanged("paused"))
    bench.see(B, C)
    bench.feed(events.WantedChanged("running"))
    assert of_kind(bench.feed(events.RepliesRead((failed,))), do.Hold) == []
    bench.compute()
    assert the(bench.said, do.Apply).update.version == 1


@pytest.mark.parametrize("reason", ["model_missing", "unreadable"])
def test_failures_not_caused_by_data_are_not_counted(reason: FailedReason) -> None:
    bench = leading(replace(QUIET, max_failures=0))
    bench.announce(A, B)
    for _ in range(5):
        fail(bench, next(o for o in bench.orders if o.batches[0].offset == 1), reason)
    assert len(bench.updates) == 1  # the Lead
    assert (
        the(bench.feed(events.WantedChanged("stopped")), do.PublishSnapshot).snapshot.failure_counts
        == {}
    )


def test_completely_quarantined_round_ends() -> None:
    bench = leading()
    bench.announce(A, B)
    a, b = bench.orders
    fail(bench, a, "expired")
    fail(bench, b, "expired")
    assert of_kind(bench.said, do.Apply) == []
    assert asked(bench.announce(A, B)) == {A: [2], B: [3]}


def test_batch_put_back_and_quarantined_is_forgotten() -> None:
    bench = leading(replace(QUIET, on_missing="proceed"))
    bench.announce(A, B)
    bench.feed(events.RepliesRead((answer(bench.orders[0], bench.model),)))
    bench.tick(0.5)  # J=1 of a0, and b1 waits again
    bench.announce(A)
    bench.feed(events.RepliesRead((Failed(A, bench.model, (1,), "expired"),)))
    bench.feed(events.WantedChanged("stopped"))
    bench.read_updates()
    assert (bench.published[-1].returned, bench.published[-1].waiting) == ((), (batch(2, A),))


# --- hold, pause, resume ---------------------------------------------------------------------


def test_half_round_that_is_not_finite_holds_the_job_and_loses_no_batch() -> None:
    bench = leading()
    bench.announce(A, B)
    a, b = bench.orders
    assert of_kind(fail(bench, a, "not_finite"), do.Hold) == []
    said = fail(bench, b, "not_finite")
    assert the(said, do.Hold).reason == (
        "diverged: 2 batches in a row are not finite (why); lower"
        " the learning rate and submit the job again"
    )
    assert of_kind(said, do.DiscardSum) == [do.DiscardSum(1)]
    assert of_kind(bench.announce(A), do.PostTrigger) == []
    assert bench.leader_status.waiting == 3
    # The only record is the Lead; nothing was quarantined.
    assert len(bench.updates) == 1

    said = bench.feed(events.WantedChanged("running"))
    assert sorted(asked(said).values()) == [[0], [1]]


def test_retried_bad_batch_is_not_divergence() -> None:
    bench = leading(replace(QUIET, max_failures=2))
    bench.announce(A, B)
    for _ in range(3):
        fail(bench, next(o for o in bench.orders if o.batches[0].offset == 1), "not_finite")
    assert of_kind(bench.said, do.Hold) == []
    assert bench.updates[-1] == Quarantined(0, batch(1, B), "poison: not_finite: why", number=1)


def test_one_bad_batch_in_each_of_two_rounds_is_not_divergence() -> None:
    bench = leading(replace(QUIET, max_failures=0))
    for _ in range(2):
        bench.announce(A, B, A)
        a, b = bench.orders
        # The batch is poison, so the third one joins the round.
        fail(bench, b, "not_finite")
        bench.compute()
        bench.feed(events.RepliesRead((answer(a, bench.model),)))
    assert bench.model.version == 2
    assert of_kind(bench.said, do.Hold) == []


def test_required_hold_stops_the_leader_until_resumed() -> None:
    bench = leading()
    bench.announce(A, B)
    reason = "the control topic ends below what was read"
    said = bench.feed(events.HoldRequired(reason))
    assert said == (do.Hold(reason), do.StepDown(reason), do.ReleaseLease())
    assert bench.feed(events.HoldRequired(reason)) == ()
    # No replica leads until an operator has looked.
    assert bench.tick(10.0) == ()
    assert bench.feed(events.WantedChanged("paused")) == ()
    assert bench.tick(11.0) == ()
    bench.feed(events.WantedChanged("running"))
    assert bench.tick(12.0) == (do.AskLease(1.0),)


def test_leader_whose_own_record_is_behind_a_hole_holds_the_job() -> None:
    # updates   0: Lead   1: J=1, lost before it was read   1: J=2, which followed it
    bench = leading()
    bench.announce(A, B, A, B)
    bench.compute()
    bench.compute()
    del bench.updates[1]

    said = bench.read_updates()

    hold, step_down, release = said
    assert isinstance(hold, do.Hold)
    assert "number 1" in hold.reason
    assert "`doll job resume`" in hold.reason
    assert (step_down, release) == (do.StepDown(hold.reason), do.ReleaseLease())
    assert bench.published == []


def test_repeated_own_record_is_not_a_loss() -> None:
    bench = leading()
    bench.announce(A, B)
    bench.compute()
    bench.updates.append(bench.updates[-1])

    assert of_kind(bench.read_updates(), do.Hold) == []
    assert bench.machine.leader is not None


def test_torn_snapshot_is_tried_again_after_resume() -> None:
    torn = Snapshot(0, ModelId(0, 1), 2, 0, FIRST)
    bench = Bench(updates=[Lead(-1, GENESIS, "c0", 0), update(0, 1)])
    held = events.LeaseAnswered(held=True)
    bench.feed(held)
    assert bench.find("hot", torn) == (do.RestoreSnapshot(torn),)
    assert bench.feed(events.SnapshotTorn(torn)) == (do.FindSnapshots("hot"),)
    assert of_kind(bench.find("hot", torn), do.RestoreSnapshot) == []
    bench.feed(events.HoldRequired("no checkpoint can be read"))
    bench.feed(events.WantedChanged("running"))
    bench.feed(held)
    assert bench.find("hot", torn) == (do.RestoreSnapshot(torn),)


def test_failing_job_that_its_owner_stops_is_finished() -> None:
    bench = leading()
    bench.machine.on(events.HoldRequired("a checkpoint of another model"), 0.0)
    bench.feed(events.WantedChanged("stopped"))
    said = bench.feed(events.HoldRequired("a checkpoint of another model"))
    reason = "stopped by its owner; a checkpoint of another model"
    assert said == (do.Finish(reason, stopped=True), do.ReleaseLease())


def test_pause_lets_the_round_in_flight_finish() -> None:
    bench = leading()
    bench.announce(A, B, A, B)
    assert bench.feed(events.WantedChanged("paused")) == ()
    said = bench.compute()
    assert the(said, do.Apply).update.version == 1
    assert of_kind(said, do.PostTrigger) == []
    assert asked(bench.feed(events.WantedChanged("running"))) == {A: [2], B: [3]}


# --- the end ---------------------------------------------------------------------------------


def test_stopped_job_ends_with_a_checkpoint_that_waits_for_its_audit() -> None:
    # J=1 is applied and not read back, a2 b3 are in flight: stop
    bench = leading()
    bench.announce(A, B, A, B)
    bench.compute()
    said = bench.feed(events.WantedChanged("stopped"))
    assert said == (do.DiscardSum(2), do.CopyWeights())
    # The only command writes a leader status; no round begins.
    assert bench.announce(A, B)[1:] == ()
    published, finish, release = bench.read_updates()
    assert isinstance(published, do.PublishSnapshot)
    assert published.checkpoint
    assert [each.offset for each in published.snapshot.waiting] == [2, 3]
    assert published.snapshot.settled[P] == 20
    assert (finish, release) == (do.Finish("stopped by its owner", stopped=True), do.ReleaseLease())
    assert bench.machine.finished
    assert bench.machine.due() == float("inf")
    assert bench.tick(100.0) == ()


def test_job_ends_after_its_updates() -> None:
    bench = leading(replace(QUIET, stop_updates=2))
    bench.announce(A, B, A, B, A, B)
    bench.compute()
    said = bench.compute()
    assert of_kind(said, do.PostTrigger) == []
    assert of_kind(said, do.Finish) == []
    assert the(bench.read_updates(), do.Finish).reason == "2 updates applied"


@pytest.mark.parametrize(("stop_loss", "ends"), [(2.0, True), (1.9, False)])
def test_job_ends_when_loss_is_low_for_a_complete_window(stop_loss: float, *, ends: bool) -> None:
    bench = leading(replace(QUIET, stop_loss=stop_loss))
    for _ in range(LOSS_WINDOW):
        assert not bench.machine.finished
        bench.announce(A, B)
        bench.compute()
        bench.read_updates()
    assert bench.machine.finished == ends


def test_job_ends_at_its_deadline() -> None:
    bench = leading(replace(QUIET, stop_at=5.0))
    bench.announce(A, B)
    bench.tick(4.95)
    assert bench.machine.due() <= 5.0
    assert not bench.machine.finished
    assert the(bench.tick(5.0), do.Finish).reason == "its deadline has passed"
    assert len(bench.published[-1].waiting) == 2


def test_ending_job_wakes_only_for_its_leader_status() -> None:
    bench = leading(replace(QUIET, stop_at=1.0))
    bench.announce(A, B)
    bench.compute()
    # The checkpoint waits until the update's record is read back.
    bench.tick(2.0)
    assert not bench.machine.finished
    assert bench.machine.due() > 2.0


# --- memory -----------------------------------------------------------------------------------


def test_batch_too_large_for_one_worker_goes_to_another_without_blame() -> None:
    bench = leading()
    bench.announce(A, B)
    a, _ = bench.orders
    said = fail(bench, a, "memory")
    assert asked(said) == {C: [0]}
    assert of_kind(said, do.AppendAudit) == []


def test_batch_too_large_for_all_live_workers_holds_the_job() -> None:
    # a0   a: memory   b: memory   c: memory, and nobody is left
    bench = leading()
    bench.announce(A, B)
    a, b = bench.orders
    bench.feed(events.RepliesRead((answer(b, bench.model),)))
    for order in (a, structs.replace(a, worker=B)):
        said = fail(bench, order, "memory")
        assert of_kind(said, do.Hold) == []
    said = fail(bench, structs.replace(a, worker=C), "memory")
    assert the(said, do.Hold).reason == "the memory of no live worker suffices: why"


def test_repeated_report_of_too_little_memory_holds_nothing() -> None:
    bench = leading()
    bench.announce(A, B)
    a, _ = bench.orders
    for _ in range(5):
        assert of_kind(fail(bench, a, "memory"), do.Hold) == []
