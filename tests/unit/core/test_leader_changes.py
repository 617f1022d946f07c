"""Changes of a running job by its owner: the updates at which K, deadline and rate change."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from common.core import commands as do
from common.core import events
from common.core.messages import Failed
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import A, B, C, answer, gradient, of_kind, the

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.settings import CoordinatorSettings

K3 = changed(group_size=3, revision=1)
K1 = changed(group_size=1, revision=1)


def leading(settings: CoordinatorSettings = QUIET) -> Bench:
    """Return a leader that sees A and B."""
    bench = Bench(settings)
    bench.lead()
    bench.see(A, B)
    return bench


def change(bench: Bench, settings: CoordinatorSettings) -> tuple[CoordinatorCommand, ...]:
    """Change the job's settings."""
    return bench.feed(events.SettingsChanged(settings))


def test_round_in_flight_keeps_its_k_and_the_next_uses_the_new_one() -> None:
    # batches   a0 b1: round, K=2     a2 b3     K=3      gradients: J=1      a4: J=2 of a2 b3 a4
    bench = leading()
    bench.announce(A, B)
    bench.announce(A, B)
    assert change(bench, K3) == ()
    first = the(bench.compute(), do.Apply).update
    assert (len(first.batches), first.revision) == (2, 0)
    # Two batches wait, and a group takes three.
    assert of_kind(bench.said, do.PostTrigger)[1:] == []
    bench.announce(A)
    second = the(bench.compute(), do.Apply).update
    assert (len(second.batches), second.revision, second.short) == (3, 1, "")


def test_change_between_updates_takes_effect_at_once() -> None:
    bench = leading(K3)
    bench.announce(A, B)
    said = change(bench, replace(QUIET, revision=2))
    assert len(the(said, do.PostTrigger).trigger.orders) == 2
    assert the(bench.compute(), do.Apply).update.revision == 2


def test_smaller_k_splits_waiting_batches_into_several_updates() -> None:
    bench = leading(K3)
    bench.announce(A, B)
    change(bench, replace(K1, revision=2))
    assert len(the(bench.compute(), do.Apply).update.batches) == 1
    assert len(the(bench.compute(), do.Apply).update.batches) == 1
    assert bench.model.version == 2


def test_last_of_two_changes_during_a_round_takes_effect() -> None:
    bench = leading()
    bench.announce(A, B, A)
    change(bench, K3)
    change(bench, replace(K1, revision=2))
    bench.compute()
    assert the(bench.compute(), do.Apply).update.revision == 2


def test_change_takes_effect_while_a_job_is_paused() -> None:
    bench = leading()
    bench.feed(events.WantedChanged("paused"))
    bench.announce(A)
    change(bench, K1)
    assert of_kind(bench.said, do.PostTrigger) == []
    assert of_kind(bench.feed(events.WantedChanged("running")), do.PostTrigger) != []
    assert the(bench.compute(), do.Apply).update.revision == 1


def test_update_uses_learning_rate_of_its_revision() -> None:
    bench = leading(changed(learning_rate=0.5))
    bench.announce(A, B)
    bench.announce(A, B)
    assert change(bench, changed(learning_rate=0.25, revision=1)) == ()
    for revision, rate in ((0, 0.5), (1, 0.25)):
        apply = the(bench.compute(), do.Apply)
        assert (apply.update.revision, apply.learning_rate) == (revision, rate)


def test_new_leader_uses_learning_rate_of_the_revision_it_knows() -> None:
    # c1 dies between the change and the next update. c2 knows of the change; c3 learns of it later.
    one = leading(changed(learning_rate=0.5))
    change(one, changed(learning_rate=0.25, revision=1))
    two = Bench(changed(learning_rate=0.5), updates=one.updates, control=one.control)
    change(two, changed(learning_rate=0.25, revision=1))
    two.lead()
    two.see(A, B)
    two.announce(A, B)
    assert the(two.compute(), do.Apply).learning_rate == 0.25

    late = Bench(changed(learning_rate=0.5), updates=one.updates, control=one.control, name="c3")
    late.lead()
    late.see(A, B)
    late.read_control()
    late.announce(A, B)
    change(late, changed(learning_rate=0.25, revision=1))
    for revision, rate in ((0, 0.5), (1, 0.25)):
        apply = the(late.compute(), do.Apply)
        assert (apply.update.revision, apply.learning_rate) == (revision, rate)


def test_incomplete_round_is_abandoned_for_a_change() -> None:
    # K=3: a0 b1 are counted, a2 has expired, and no worker reads more under the smaller bound
    bench = leading(K3)
    bench.announce(A, B, A)
    a, b = bench.orders
    both = [batch for batch in a.batches if batch.offset == 0]
    bench.feed(events.RepliesRead((Failed(A, bench.model, (0, 2), "unreadable"),)))
    bench.feed(events.RepliesRead((answer(b, bench.model), gradient(A, bench.model, both))))
    bench.feed(events.RepliesRead((Failed(B, bench.model, (2,), "expired"),)))
    assert of_kind(bench.said, do.Apply) == []
    said = change(bench, replace(QUIET, revision=2))
    assert said.index(do.DiscardSum(1)) < said.index(of_kind(said, do.PostTrigger)[0])
    update = the(bench.compute(), do.Apply).update
    assert sorted(batch.offset for batch in update.batches) == [0, 1]
    assert (update.revision, update.short) == (2, "")


def test_postponed_deadline_does_not_end_the_job_despite_a_round_in_flight() -> None:
    bench = leading(replace(QUIET, stop_at=10.0, deadline_floor_s=99.0))
    bench.announce(A, B)
    change(bench, replace(QUIET, stop_at=20.0, revision=1))
    assert of_kind(bench.tick(15.0), do.CopyWeights) == []
    assert the(bench.compute(), do.Apply).update.revision == 0
    said = bench.tick(20.0) + bench.read_updates()
    assert the(said, do.Finish) == do.Finish("its deadline has passed", 1)


def test_removed_deadline_does_not_end_the_job() -> None:
    bench = leading(replace(QUIET, stop_at=10.0))
    change(bench, replace(QUIET, revision=1))
    assert of_kind(bench.tick(99.0), do.Finish) == []


def test_earlier_deadline_waits_for_the_round_in_flight() -> None:
    bench = leading(replace(QUIET, deadline_floor_s=99.0))
    bench.announce(A, B)
    bench.now = 5.0
    change(bench, replace(QUIET, stop_at=4.0, revision=1))
    assert of_kind(bench.tick(6.0), do.Finish) == []
    said = bench.compute()
    assert the(said, do.Apply).update.version == 1
    assert the(bench.read_updates(), do.Finish) == do.Finish("its deadline has passed", 1)


def test_deadline_in_the_past_ends_an_idle_job() -> None:
    bench = leading()
    bench.now = 5.0
    said = change(bench, replace(QUIET, stop_at=4.0, revision=1))
    assert the(said, do.Finish).reason == "its deadline has passed"


def test_job_that_ends_ignores_changes() -> None:
    bench = leading(changed(stop_updates=1, learning_rate=0.5))
    bench.announce(A, B)
    change(bench, changed(K1, learning_rate=0.25))
    said = bench.compute() + bench.read_updates()
    assert the(said, do.Finish) == do.Finish("1 updates applied", 0)
    assert the(said, do.Apply).learning_rate == 0.5


def test_update_reports_mean_gradient_time() -> None:
    # a: two batches in 0.1 s, b: one in 0.1 s
    bench = leading(K3)
    bench.announce(A, B, A)
    replies = tuple(answer(order, bench.model) for order in bench.orders)
    said = bench.feed(events.RepliesRead(replies))
    assert the(said, do.Apply).update.gradient_s == sum(r.seconds for r in replies) / 3


@given(
    st.lists(
        st.one_of(
            st.sampled_from(("batch", "compute")),
            st.integers(1, 4),
        ),
        max_size=40,
    )
)
def test_every_update_has_k_of_its_revision(
    steps: list[str | int],
) -> None:
    bench, of_revision = leading(), [QUIET.mode.group_size]
    for step in steps:
        if isinstance(step, int):
            of_revision.append(step)
            revision = len(of_revision) - 1
            change(bench, changed(group_size=step, revision=revision))
        elif step == "batch":
            bench.announce(A, B, C)
        elif of_kind(bench.said, do.PostTrigger):
            bench.compute()
        bench.read_updates()
    updates = [apply.update for apply in of_kind(bench.said, do.Apply)]
    assert all(len(each.batches) == of_revision[each.revision] for each in updates)
    used = [batch.offset for each in updates for batch in each.batches]
    assert len(set(used)) == len(used)
