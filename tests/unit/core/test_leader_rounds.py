"""A leader with several rounds in flight: their begin, their order, and their settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace as with_

from common.core import commands as do
from common.core import events
from common.core.messages import (
    Assignment,
    Failed,
    FailedReason,
    Gradient,
    ModelId,
    Quarantined,
    Synchrony,
    UpdateApplied,
    WorkerId,
    WorkerLeaving,
)
from tests.unit.core.bench import Bench, changed
from tests.unit.core.examples import A, B, C, answer, batch, gradient, of_kind, the
from tests.unit.core.test_leader import asked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.commands import CoordinatorCommand
    from common.core.settings import CoordinatorSettings

STALE = changed(staleness=1, bound=4)
SINGLE_WORKER = changed(group_size=1, staleness=4, single_worker=True)


def leading(settings: CoordinatorSettings, *workers: WorkerId) -> Bench:
    """Return a leader that sees these workers."""
    bench = Bench(settings)
    bench.lead()
    bench.see(*(workers or (A, B)))
    return bench


def send(
    bench: Bench, worker: WorkerId, *offsets: int, version: int | None = None, rate: float = 0.0
) -> tuple[CoordinatorCommand, ...]:
    """Let a worker send the gradient of these batches, at the newest version or another one."""
    model = bench.model if version is None else ModelId(bench.epoch, version)
    reply = gradient(worker, model, map(batch, offsets))
    return bench.feed(events.RepliesRead((with_(reply, local_rate=rate or UNSET),)))


def fail(bench: Bench, worker: WorkerId, offset: int, reason: FailedReason) -> None:
    """Let a worker fail on a batch, at the newest version."""
    bench.feed(events.RepliesRead((Failed(worker, bench.model, (offset,), reason, "why"),)))


def applied(commands: Iterable[CoordinatorCommand]) -> list[tuple[int, list[int]]]:
    """Return the versions, with the batches that made them."""
    updates = [apply.update for apply in of_kind(commands, do.Apply)]
    return [(each.version, sorted(b.offset for b in each.batches)) for each in updates]


# --- which rounds begin, and in which order they are applied ----------------------------------


def test_another_round_starts_for_an_idle_worker() -> None:
    # K=2, s=1      a0 b1: round 1    a2 b3 wait      a is done with 0, b is not with 1: round 2
    bench = leading(STALE)
    bench.announce(A, B)
    assert of_kind(bench.announce(A, B), do.PostTrigger) == []
    assert asked(send(bench, A, 0)) == {A: [2], B: [3]}
    assert of_kind(bench.announce(A, B), do.PostTrigger) == []  # no worker is idle


def test_no_further_round_starts_if_its_batches_are_for_busy_workers() -> None:
    bench = leading(STALE)
    bench.announce(A, B)
    send(bench, A, 0)
    assert of_kind(bench.announce(B, B), do.PostTrigger) == []
    assert asked(bench.announce(A)) == {B: [2], A: [4]}  # 2 is the oldest batch


def test_only_one_round_is_in_flight_with_staleness_0() -> None:
    bench = leading(changed(STALE, staleness=0))
    bench.announce(A, B, A, B)
    assert of_kind(send(bench, A, 0), do.PostTrigger) == []


def test_leader_awaits_all_gradients_of_a_round_once_the_next_has_its_batches() -> None:
    # K=2     a0 b1: round 1     a2     b3: round 2 has its batches     gradients 0, 1: it begins
    bench = leading(changed(STALE, staleness=0))
    leader = bench.machine.leader
    assert leader is not None
    found = [leader.awaited]
    for worker in (A, B, A, B):
        bench.announce(worker)
        found.append(leader.awaited)
    send(bench, A, 0)
    found.append(leader.awaited)
    send(bench, B, 1)
    assert [*found, leader.awaited] == [0, 0, 0, 0, 2, 1, 0]


def test_leader_awaits_nothing_if_another_round_may_start() -> None:
    bench = leading(STALE)
    # Round 2 begins as soon as another worker joins.
    bench.announce(A, B, A, B)
    assert bench.machine.leader is not None
    assert bench.machine.leader.awaited == 0


def test_leader_awaits_nothing_while_a_batch_is_unassigned_or_late() -> None:
    bench = leading(changed(STALE, staleness=0))
    leader = bench.machine.leader
    assert leader is not None
    bench.announce(A, B, A, B)
    late_at = leader.rounds.assigner.due()
    assert late_at is not None
    found = [leader.awaited]
    bench.tick(late_at)
    found.append(leader.awaited)
    bench.feed(events.RepliesRead((WorkerLeaving(A, bench.model), WorkerLeaving(B, bench.model))))
    assert [*found, leader.awaited] == [2, 0, 0]


def test_round_may_overtake_one_other_that_has_time_left() -> None:
    # s=1       round 1: a0 b1     round 2: a2 c3, complete: J=1     round 1 must be J=2
    bench = leading(replace(STALE, bound=8), A, B, C)
    bench.announce(A, B, A, C)
    assert applied(send(bench, A, 0)) == []
    send(bench, C, 3, version=0)
    assert applied(send(bench, A, 2, version=0)) == [(1, [2, 3])]
    bench.announce(A, C)
    assert applied(send(bench, A, 4)) == []
    # Round 3 is complete, but waits: b1 is computed at version 0, so it would be too old for J=3.
    assert applied(send(bench, C, 5)) == []
    said = send(bench, B, 1, version=0)
    assert applied(said) == [(2, [0, 1]), (3, [4, 5])]
    assert [apply.update.staleness for apply in of_kind(said, do.Apply)] == [1, 1]


def test_late_gradient_delays_no_round_and_expires_when_too_old() -> None:
    # K=1, s=1   round 1: b0, late at 0.5, so a gets it at version 1    rounds 2 to 4: a1 a2 a3
    bench = leading(changed(STALE, group_size=1, bound=8), A, B)
    bench.announce(B, A, A, A)
    send(bench, A, 1)
    # B may still send 0, computed at version 0.
    assert applied(send(bench, A, 2)) == []
    bench.tick(0.6)
    assert bench.model.version == 2
    send(bench, A, 3)
    assert the(send(bench, B, 0, version=0), do.Drop).reason == "version 0 is too old"


def test_trigger_names_oldest_awaited_version() -> None:
    bench = leading(replace(STALE, bound=8), A, B, C)
    bench.announce(A, B, A, C)
    send(bench, A, 0)
    send(bench, C, 3)
    # Applies J=1, while b1 is awaited at version 0.
    send(bench, A, 2)
    trigger = the(bench.announce(A, C), do.PostTrigger).trigger
    assert (trigger.model.version, trigger.awaits) == (1, 0)
    send(bench, B, 1, version=0)
    send(bench, A, 4)
    send(bench, C, 5)
    assert the(bench.announce(A, C), do.PostTrigger).trigger.awaits is UNSET  # none is older


def test_waiting_batches_of_every_round_are_unsettled() -> None:
    bench = leading(replace(STALE, checkpoint_every_s=1.0), A, B)
    bench.announce(A, B, A, B)
    send(bench, A, 0)
    bench.tick(1.0)
    assert [each.offset for each in bench.published[-1].waiting] == [0, 1, 2, 3]
    assert (bench.leader_status.waiting, bench.leader_status.oldest_unsettled) == (4, 0)


# --- settings of a round ----------------------------------------------------------------------


def test_change_takes_effect_after_the_next_update_despite_rounds_in_flight() -> None:
    # K=2, rate 1   round 1: a0 b1   round 2: a2 b3   change: K=1, rate 0.5
    # J=1 and J=2 have two batches and rate 1, J=3 and J=4 one and rate 0.5.
    bench = leading(changed(STALE, learning_rate=1.0, bound=8))
    bench.announce(A, B, A, B)
    send(bench, A, 0)
    bench.announce(A, B)
    after = changed(STALE, group_size=1, staleness=0, revision=1, learning_rate=0.5)
    bench.feed(events.SettingsChanged(after))
    send(bench, B, 1)
    bench.feed(events.RepliesRead((answer_of(bench, A, 2), answer_of(bench, B, 3))))
    while len(applies := of_kind(bench.said, do.Apply)) < 4:
        bench.compute()
    made = [(len(a.update.batches), a.update.revision, a.learning_rate) for a in applies]
    assert made == [(2, 0, 1.0), (2, 0, 1.0), (1, 1, 0.5), (1, 1, 0.5)]


def answer_of(bench: Bench, worker: WorkerId, offset: int) -> Gradient:
    """Return the gradient of one batch, at version 0."""
    return gradient(worker, ModelId(bench.epoch, 0), [batch(offset)])


def test_update_describes_its_mode_only_if_it_is_not_the_default() -> None:
    bench = leading(changed(STALE, staleness=0))
    bench.announce(A, B)
    plain = the(bench.compute(), do.Apply).update
    assert (plain.synchrony, plain.base, plain.parts, plain.scale) == (UNSET, UNSET, UNSET, UNSET)
    bench = leading(STALE)
    bench.announce(A, B)
    stale = the(bench.compute(), do.Apply).update
    assert (stale.synchrony, stale.base) == (Synchrony(2, staleness=1), UNSET)


def test_stale_gradients_make_a_smaller_step_if_damped() -> None:
    bench = leading(changed(STALE, damped=True, bound=8), A, B, C)
    bench.announce(A, B, A, C)
    send(bench, A, 0)
    send(bench, C, 3)
    assert the(send(bench, A, 2), do.Apply).update.scale is UNSET
    late = the(send(bench, B, 1, version=0), do.Apply).update
    assert (late.base, late.scale) == (0, 0.5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_averaging_scales_the_step_by_local_steps(reduction: Literal["mean", "sum"]) -> None:
    # K=3: a walks over 0 and 2, b over 1 alone: p = 2 messages
    settings = changed(group_size=3, local_rate=0.25, learning_rate=1.0)
    bench = leading(replace(settings, reduction=reduction), A, B)
    bench.announce(A, B, A)
    assert {order.local_rate for order in bench.orders} == {0.25}
    send(bench, A, 0, 2, rate=0.25)
    apply = the(send(bench, B, 1, rate=0.25), do.Apply)
    assert apply.update.parts == (2, 1)
    assert apply.update.synchrony == Synchrony(3, local_rate=0.25)
    made = (apply.learning_rate, apply.update.scale)
    assert made == ((0.25, 1.5) if reduction == "mean" else (1.0, UNSET))


def test_gradient_of_local_steps_counts_in_no_other_round() -> None:
    bench = leading(changed(local_rate=0.25))
    bench.announce(A, B)
    said = send(bench, A, 0)
    assert the(said, do.Drop).reason == "the gradient was computed with local rate 0, expected 0.25"
    assert asked(said) == {B: [0]}  # its order is void


# --- rounds that lack batches -----------------------------------------------------------------


def test_round_that_lacks_a_batch_does_not_delay_others() -> None:
    # round 1: a0, and b1 expires; round 2: a2 b3, and nothing else waits
    bench = leading(STALE)
    bench.announce(A, B, A, B)
    send(bench, A, 0)
    fail(bench, B, 1, "expired")
    (apply,) = of_kind(bench.said, do.Apply)
    assert (apply.update.short, applied([apply])) == ("quarantined", [(1, [0])])


def test_single_round_that_lacks_a_batch_waits_for_another() -> None:
    bench = leading(STALE)
    bench.announce(A, B)
    send(bench, A, 0)
    fail(bench, B, 1, "expired")
    assert of_kind(bench.said, do.Apply) == []
    bench.announce(B)
    assert applied(send(bench, B, 2)) == [(1, [0, 2])]


def test_completely_quarantined_round_ends_and_the_next_starts() -> None:
    bench = leading(changed(STALE, group_size=1))
    bench.announce(A, B)
    fail(bench, A, 0, "expired")
    fail(bench, B, 1, "expired")
    assert len(of_kind(bench.updates, Quarantined)) == 2
    assert asked(bench.announce(A)) == {A: [2]}


def test_batch_put_back_does_not_rejoin_its_round() -> None:
    # b1 is late, so J=1 is made of a0 alone. b1 waits, and is in the next round.
    bench = leading(replace(STALE, on_missing="proceed"))
    bench.announce(A, B)
    send(bench, A, 0)
    said = bench.tick(0.6)
    assert applied(said) == [(1, [0])]
    assert the(said, do.Apply).update.short == "missing"
    assert asked(bench.announce(A)) == {A: [1, 2]}


def test_incomplete_round_of_an_earlier_k_is_abandoned() -> None:
    # K=3: a0 and c2 are counted when b1 expires. K is 1 by then, so the round is put back, and each
    # of its batches gets a round of its own.
    bench = leading(changed(STALE, group_size=3, bound=9), A, B, C)
    bench.announce(A, B, C)
    bench.feed(events.SettingsChanged(changed(STALE, group_size=1, revision=1)))
    send(bench, A, 0)
    send(bench, C, 2)
    assert of_kind(bench.said, do.DiscardSum) == []  # b1 is still to come
    fail(bench, B, 1, "expired")
    assert of_kind(bench.said, do.DiscardSum) == [do.DiscardSum(1)]
    bench.compute()
    assert {len(apply.update.batches) for apply in of_kind(bench.said, do.Apply)} == {1}


# --- groups of a single worker ----------------------------------------------------------------


def test_single_worker_rounds_proceed_independently() -> None:
    # a: 0, then 2 at once, then 3; b: 1 all the while
    bench = leading(SINGLE_WORKER)
    assert asked(bench.announce(A)) == {A: [0]}
    assert asked(bench.announce(B, A, A)) == {B: [1]}
    for number, following in enumerate((2, 3)):
        said = send(bench, A, (0, 2)[number])
        assert applied(said) == [(number + 1, [(0, 2)[number]])]
        assert asked(said) == {A: [following]}
    late = send(bench, B, 1, version=0)
    assert the(late, do.Apply).update.staleness == 2


def test_single_worker_round_assigns_the_group_to_one_worker() -> None:
    bench = leading(changed(SINGLE_WORKER, group_size=3, bound=6))
    assert asked(bench.announce(A, B, A)) == {A: [0, 2, 1]}  # its own first


def test_batches_of_lost_worker_go_to_the_next_idle_worker() -> None:
    bench = leading(SINGLE_WORKER, A, B)
    bench.announce(B, A, A)
    bench.announce(B)
    # B died with 0 in hand and 3 waiting.
    bench.see(A)
    assert asked(send(bench, A, 1)) == {A: [0]}
    assert asked(send(bench, A, 0)) == {A: [3]}  # before its own 2


def test_batch_overtaken_too_often_goes_first() -> None:
    # b is late and continues to claim. Its batches precede a's own 1, but at most s + 1 times.
    bench = leading(changed(SINGLE_WORKER, staleness=1), A, B)
    bench.announce(B)
    assert asked(bench.tick(0.5)) == {A: [0]}
    bench.announce(A, B, B, B, B)
    following = [asked(send(bench, A, offset))[A] for offset in (0, 2, 3, 1)]
    assert following == [[2], [3], [1], [4]]


def test_batch_overtaken_by_rounds_that_end_together_goes_first() -> None:
    # b's 3 waits while 0, 1 and 2 are computed. One poll returns their gradients. They and a's 4
    # preceded 3, so c gets an order for 3, and not for its own batch.
    bench = leading(changed(SINGLE_WORKER, staleness=2), A, B, C)
    bench.announce(A, B, C, B, A, A, A, C, C)
    offsets = {A: 0, B: 1, C: 2}
    replies = [gradient(worker, bench.model, [batch(offsets[worker])]) for worker in offsets]
    said = bench.feed(events.RepliesRead(tuple(replies)))
    assert asked(said) == {A: [4], C: [3], B: [5]}


def test_staleness_may_grow_with_live_workers() -> None:
    bench = leading(changed(SINGLE_WORKER, staleness=0, staleness_per_worker=4), A, B)
    bench.announce(A)
    bench.compute()
    bench.see(A, B, C)
    bench.announce(A)
    bench.compute()
    made = [apply.update.synchrony for apply in of_kind(bench.said, do.Apply)]
    assert made == [Synchrony(1, staleness, single_worker=True) for staleness in (8, 12)]


# --- failures ---------------------------------------------------------------------------------


def test_divergence_is_detected_over_rounds_of_one_batch() -> None:
    bench = leading(SINGLE_WORKER)
    bench.announce(A, B)
    fail(bench, A, 0, "not_finite")
    assert of_kind(bench.said, do.Hold) == []
    fail(bench, B, 1, "not_finite")
    assert the(bench.said, do.Hold).reason.startswith("diverged: 2 batches in a row")


def test_finite_gradient_in_between_rules_out_divergence() -> None:
    bench = leading(SINGLE_WORKER, A, B, C)
    bench.announce(A, B, C)
    fail(bench, A, 0, "not_finite")
    send(bench, C, 2)
    fail(bench, B, 1, "not_finite")
    assert of_kind(bench.said, do.Hold) == []


def test_failure_counts_for_its_own_order_and_not_a_later_one() -> None:
    # b fails on 1 at version 0. The same message arrives again after 1 was ordered at version 1.
    bench = leading(replace(STALE, max_failures=0, bound=8), A, B, C)
    bench.announce(A, B, A, C)
    send(bench, A, 0)
    late = Failed(B, bench.model, (1,), "unreadable", "why")
    send(bench, C, 3)
    send(bench, A, 2)  # J=1
    bench.feed(events.RepliesRead((late,)))
    again = bench.orders
    bench.feed(events.RepliesRead((late,)))
    assert bench.orders is again


def test_gradient_of_unknown_weights_does_not_count() -> None:
    bench = leading(STALE)
    bench.announce(A, B)
    assert the(send(bench, A, 0, version=1), do.Drop).reason == "its round is over"
    old = gradient(A, ModelId(bench.epoch - 1, 0), [batch(0)])
    assert the(bench.feed(events.RepliesRead((old,))), do.Drop).reason == "its round is over"


# --- properties -------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("batch"), st.just(0), st.just(0)),
            st.tuples(st.just("answer"), st.integers(0, 9), st.integers(0, 5)),
            st.tuples(st.just("change"), st.integers(1, 3), st.integers(0, 3)),
            st.tuples(st.just("tick"), st.integers(1, 9), st.just(0)),
        ),
        max_size=60,
    ),
    single_worker=st.booleans(),
)
def test_updates_have_their_k_and_allowed_staleness_for_any_replies(
    steps: list[tuple[str, int, int]], *, single_worker: bool
) -> None:
    first = changed(staleness=1, single_worker=single_worker)
    bench, of_revision = leading(first, A, B, C), [first]
    # Orders and the versions of their models.
    orders = list[tuple[int, Assignment]]()
    for step, one, two in steps:
        before = len(bench.said)
        if step == "batch":
            bench.announce(A, B, C)
        elif step == "change":
            revision = len(of_revision)
            of_revision.append(
                changed(
                    first, group_size=one, staleness=two, revision=revision, single_worker=two > 1
                )
            )
            bench.feed(events.SettingsChanged(of_revision[-1]))
        elif step == "tick":
            bench.tick(bench.now + one / 5)
        elif orders:
            version, order = orders[one % len(orders)]
            at = min(version + two, bench.model.version)
            bench.feed(events.RepliesRead((answer(order, ModelId(bench.epoch, at)),)))
        for post in of_kind(bench.said[before:], do.PostTrigger):
            orders += [(post.trigger.model.version, order) for order in post.trigger.orders]
        bench.read_updates()
    updates = [apply.update for apply in of_kind(bench.said, do.Apply)]
    for update in updates:
        mode = of_revision[update.revision].mode
        assert len(update.batches) == mode.group_size
        assert update.staleness <= mode.staleness
        assert (update.synchrony or Synchrony(mode.group_size)) == mode.synchrony()
    used = [each.offset for update in updates for each in update.batches]
    assert len(set(used)) == len(used)
    assert [update.version for update in updates] == list(range(1, len(updates) + 1))
    assert all(isinstance(update, UpdateApplied) for update in updates)
