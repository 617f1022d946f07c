"""A leader in trouble: poison, divergence, pauses, and the end of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.core import commands as do
from common.core import events
from common.core.goal import LOSS_WINDOW
from common.core.messages import GENESIS, Failed, FailedReason, Lead, ModelId, Order, Quarantined
from common.core.snapshots import Snapshot
from tests.unit.core.bench import QUIET, Bench
from tests.unit.core.examples import FIRST, A, B, C, P, answer, batch, of_kind, the
from tests.unit.core.leaders import update
from tests.unit.core.test_leader import asked, leading


def fail(bench: Bench, order: Order, reason: FailedReason) -> tuple[do.CoordinatorCommand, ...]:
    """Let an order give no gradient."""
    offsets = tuple(each.offset for each in order.batches)
    return bench.feed(
        events.RepliesRead((Failed(order.worker, bench.model, offsets, reason, "why"),))
    )


# --- quarantine ------------------------------------------------------------------------------


def test_past_its_strikes_a_batch_is_quarantined_and_the_group_filled_up() -> None:
    # b1      raises     asked again   raises: poison
    # strikes 1          alone         2 > 1             c2 comes in: J=1 of a0 c2
    bench = leading(replace(QUIET, strikes=1))
    bench.announce(A, B, C)
    a, b = bench.orders
    assert asked(fail(bench, b, "raised")) == {C: [1]}
    said = fail(bench, bench.orders[0], "raised")
    record = Quarantined(0, batch(1, B), "poison: raised: why")
    assert the(said, do.AppendAudit) == do.AppendAudit(record)
    assert asked(said) == {C: [2]}

    bench.compute()
    said = bench.feed(events.RepliesRead((answer(a, bench.model),)))
    assert set(the(said, do.Apply).update.batches) == {batch(0, A), batch(2, C)}


def test_a_batch_is_dead_lettered_only_after_its_quarantine_was_read_back() -> None:
    bench = leading()
    bench.announce(A, B)
    said = fail(bench, bench.orders[1], "expired")
    record = the(said, do.AppendAudit).record
    assert record == Quarantined(0, batch(1, B), "expired")
    assert of_kind(bench.said, do.DeadLetterBatch) == []
    assert the(bench.read_updates(), do.DeadLetterBatch).record == record


def test_a_batch_whose_workers_die_of_it_is_poison() -> None:
    bench = leading(replace(QUIET, strikes=1))
    bench.announce(A, B)
    bench.see(A, C)  # B is dead
    bench.see(A)  # C, asked after it, too
    record = Quarantined(0, batch(1, B), "poison: its workers died of it")
    assert bench.updates[-1] == record
    assert bench.standing.waiting == 2
    bench.tick(0.1)
    assert bench.standing.waiting == 1


@pytest.mark.parametrize("reason", ["model_missing", "unreadable"])
def test_failures_that_are_not_the_datas_fault_earn_no_strike(reason: FailedReason) -> None:
    bench = leading(replace(QUIET, strikes=0))
    bench.announce(A, B)
    for _ in range(5):
        fail(bench, next(o for o in bench.orders if o.batches[0].offset == 1), reason)
    assert len(bench.updates) == 1  # the Lead
    assert (
        the(bench.feed(events.WantedChanged("stopped")), do.PublishSnapshot).snapshot.strikes == {}
    )


def test_a_round_that_was_quarantined_whole_is_over() -> None:
    bench = leading()
    bench.announce(A, B)
    a, b = bench.orders
    fail(bench, a, "expired")
    fail(bench, b, "expired")
    assert of_kind(bench.said, do.Apply) == []
    assert asked(bench.announce(A, B)) == {A: [2], B: [3]}


def test_nothing_is_remembered_of_a_batch_that_was_put_back_and_then_quarantined() -> None:
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


def test_when_half_of_a_round_is_not_finite_the_job_is_held_and_no_batch_is_lost() -> None:
    bench = leading()
    bench.announce(A, B)
    a, b = bench.orders
    assert of_kind(fail(bench, a, "not_finite"), do.Hold) == []
    said = fail(bench, b, "not_finite")
    assert the(said, do.Hold).reason.startswith("diverged: 2 batches of one round are not finite")
    assert of_kind(said, do.DiscardSum) == [do.DiscardSum()]
    assert of_kind(bench.announce(A), do.PostTrigger) == []
    assert bench.standing.waiting == 3
    assert len(bench.updates) == 1  # the Lead: nothing was quarantined

    said = bench.feed(events.WantedChanged("running"))
    assert sorted(asked(said).values()) == [[0], [1]]


def test_one_bad_batch_is_no_divergence_however_often_it_is_tried() -> None:
    bench = leading(replace(QUIET, strikes=2))
    bench.announce(A, B)
    for _ in range(3):
        fail(bench, next(o for o in bench.orders if o.batches[0].offset == 1), "not_finite")
    assert of_kind(bench.said, do.Hold) == []
    assert bench.updates[-1] == Quarantined(0, batch(1, B), "poison: not_finite: why")


def test_one_bad_batch_in_each_of_two_rounds_is_no_divergence() -> None:
    bench = leading(replace(QUIET, strikes=0))
    for _ in range(2):
        bench.announce(A, B, A)
        a, b = bench.orders
        fail(bench, b, "not_finite")  # poison: the third batch comes in
        bench.compute()
        bench.feed(events.RepliesRead((answer(a, bench.model),)))
    assert bench.model.version == 2
    assert of_kind(bench.said, do.Hold) == []


def test_trouble_holds_the_job() -> None:
    bench = leading()
    bench.announce(A, B)
    reason = "the control topic ends below what was read"
    said = bench.feed(events.Trouble(reason))
    assert said == (do.Hold(reason), do.StepDown(reason), do.ReleaseLease())
    assert bench.feed(events.Trouble(reason)) == ()
    assert bench.tick(10.0) == ()  # nobody leads before a person has looked
    assert bench.feed(events.WantedChanged("paused")) == ()
    assert bench.tick(11.0) == ()
    bench.feed(events.WantedChanged("running"))
    assert bench.tick(12.0) == (do.AskLease(),)


def test_what_was_torn_may_be_mended_before_a_person_resumes() -> None:
    torn = Snapshot(0, ModelId(0, 1), 2, 0, FIRST)
    bench = Bench(updates=[Lead(-1, GENESIS, "c0"), update(0, 1)])
    held = events.LeaseAnswered(held=True)
    bench.feed(held)
    assert bench.find("hot", torn) == (do.RestoreSnapshot(torn),)
    assert bench.feed(events.SnapshotTorn(torn)) == (do.FindSnapshots("hot"),)
    assert of_kind(bench.find("hot", torn), do.RestoreSnapshot) == []
    bench.feed(events.Trouble("no checkpoint can be read"))
    bench.feed(events.WantedChanged("running"))
    bench.feed(held)
    assert bench.find("hot", torn) == (do.RestoreSnapshot(torn),)


def test_a_job_in_trouble_that_its_owner_stops_is_finished() -> None:
    bench = leading()
    bench.machine.on(events.Trouble("a checkpoint of another model"), 0.0)
    bench.feed(events.WantedChanged("stopped"))
    said = bench.feed(events.Trouble("a checkpoint of another model"))
    reason = "stopped by its owner; a checkpoint of another model"
    assert said == (do.Finish(reason), do.ReleaseLease())


def test_a_pause_lets_the_round_in_flight_finish() -> None:
    bench = leading()
    bench.announce(A, B, A, B)
    assert bench.feed(events.WantedChanged("paused")) == ()
    said = bench.compute()
    assert the(said, do.Apply).update.version == 1
    assert of_kind(said, do.PostTrigger) == []
    assert asked(bench.feed(events.WantedChanged("running"))) == {A: [2], B: [3]}


# --- the end ---------------------------------------------------------------------------------


def test_a_stopped_job_ends_with_a_checkpoint_that_waits_for_its_audit() -> None:
    # J=1 is applied and not read back, a2 b3 are in flight: stop
    bench = leading()
    bench.announce(A, B, A, B)
    bench.compute()
    said = bench.feed(events.WantedChanged("stopped"))
    assert said == (do.DiscardSum(), do.CopyWeights())
    assert bench.announce(A, B)[1:] == ()  # a standing, and no round
    published, finish, release = bench.read_updates()
    assert isinstance(published, do.PublishSnapshot)
    assert published.checkpoint
    assert [each.offset for each in published.snapshot.waiting] == [2, 3]
    assert published.snapshot.settled[P] == 20
    assert (finish, release) == (do.Finish("stopped by its owner"), do.ReleaseLease())
    assert bench.machine.finished
    assert bench.machine.due() == float("inf")
    assert bench.tick(100.0) == ()


def test_a_job_ends_after_its_updates() -> None:
    bench = leading(replace(QUIET, stop_updates=2))
    bench.announce(A, B, A, B, A, B)
    bench.compute()
    said = bench.compute()
    assert of_kind(said, do.PostTrigger) == []
    assert of_kind(said, do.Finish) == []
    assert the(bench.read_updates(), do.Finish).reason == "2 updates applied"


@pytest.mark.parametrize(("stop_loss", "ends"), [(2.0, True), (1.9, False)])
def test_a_job_ends_when_its_loss_was_low_for_a_whole_window(
    stop_loss: float, *, ends: bool
) -> None:
    bench = leading(replace(QUIET, stop_loss=stop_loss))
    for _ in range(LOSS_WINDOW):
        assert not bench.machine.finished
        bench.announce(A, B)
        bench.compute()
        bench.read_updates()
    assert bench.machine.finished == ends


def test_a_job_ends_at_its_deadline() -> None:
    bench = leading(replace(QUIET, stop_at=5.0))
    bench.announce(A, B)
    bench.tick(4.95)
    assert bench.machine.due() <= 5.0
    assert not bench.machine.finished
    assert the(bench.tick(5.0), do.Finish).reason == "its deadline has come"
    assert len(bench.published[-1].waiting) == 2


def test_a_job_that_is_ending_asks_for_no_time_but_that_of_its_standing() -> None:
    bench = leading(replace(QUIET, stop_at=1.0))
    bench.announce(A, B)
    bench.compute()
    bench.tick(2.0)  # the checkpoint waits for its audit
    assert not bench.machine.finished
    assert bench.machine.due() > 2.0
