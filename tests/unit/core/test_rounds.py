"""Updates in flight: which gradients count, who gets orders, and who is blamed."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from common.core.batch_assignment import GradientTimes
from common.core.gradient_counting import Rounds
from common.core.messages import (
    Assignment,
    Batch,
    Gradient,
    GradientReady,
    MetricSum,
    ModelId,
    WorkerId,
)
from common.core.poison import Suspects
from common.core.rounds import Round, fits
from common.core.settings import CoordinatorSettings, Mode
from tests.unit.core.examples import SAMPLES, A, B, C, answer, batch, gradient

MODEL = ModelId(3, 7)
FLOOR_S = 0.5
LIMIT = 1  # failures
LATE_S = 1000.0  # past every deadline


class _One:
    """A single round in flight at one version, with one short method per action."""

    def __init__(self, *batches: Batch, suspects: Suspects | None = None) -> None:
        self.rounds = Rounds(suspects or Suspects(LIMIT), GradientTimes(FLOOR_S))
        settings = CoordinatorSettings(Mode(len(batches)), bound=len(batches))
        self.round: Round = self.rounds.begin(settings.mode, 0, settings, batches)

    def count(self, gradient: Gradient | GradientReady) -> str:
        return self.rounds.count(gradient, MODEL.version)[1]

    def orders(self, now: float, live: set[WorkerId]) -> tuple[Assignment, ...]:
        return self.rounds.assigner.orders(now, live, MODEL.version)

    def overdue(self, now: float) -> bool:
        return bool(self.rounds.assigner.overdue(now)[0])

    def fail(self, worker: WorkerId, offsets: list[int]) -> tuple[Batch, ...]:
        return self.rounds.fail(worker, offsets, MODEL.version)


def asked(orders: tuple[Assignment, ...]) -> dict[WorkerId, list[int]]:
    return {order.worker: [b.offset for b in order.batches] for order in orders}


# --- what counts -----------------------------------------------------------------------------


def test_gradient_counts_completely_or_not_at_all() -> None:
    one = _One(batch(0), batch(1), batch(2))
    assert one.count(gradient(A, MODEL, [batch(0)])) == ""
    assert one.count(gradient(B, MODEL, [batch(0), batch(1)])) == "batches [0] wait for no gradient"
    assert one.count(gradient(B, MODEL, [batch(1), batch(9)])) == "batches [9] wait for no gradient"
    assert (
        one.count(gradient(B, MODEL, [batch(1), batch(1)]))
        == "the gradient names a batch twice, or no batch"
    )
    assert one.count(gradient(B, MODEL, [])) == "the gradient names a batch twice, or no batch"

    assert one.round.counted == {0: batch(0)}
    assert (one.round.samples, one.round.loss_sum) == (SAMPLES, 2.0 * SAMPLES)
    assert one.round.metric_sums == {"right": (1.0 * SAMPLES, SAMPLES)}


def test_metric_of_an_update_is_the_mean_over_the_samples_that_have_a_value() -> None:
    one = _One(batch(0), batch(1))
    first = {"half": MetricSum(4.0, 2), "all": MetricSum(1.0, SAMPLES)}
    second = {"all": MetricSum(3.0, SAMPLES)}
    for number, each in enumerate((first, second)):
        answer = replace(gradient(A, MODEL, [batch(number)]), metric_sums=each)
        assert one.count(answer) == ""

    update = one.round.update(1, 1, 0.0)
    assert update.metrics == {"half": 2.0, "all": 4.0 / (2 * SAMPLES)}
    assert update.measured == {"half": 2}
    assert (update.samples_with("half"), update.samples_with("all")) == (2, 2 * SAMPLES)


def test_update_counts_gradients_in_parts_except_lost_ones() -> None:
    one = _One(batch(0), batch(1), batch(2))
    one.orders(0.0, {A, B})
    for number, (worker, cut) in enumerate(((A, True), (B, True), (B, UNSET))):
        assert one.count(replace(ready(worker, [batch(number)]), cut=cut)) == ""
    assert one.round.update(3, 8, 8.0).cut == 2
    assert one.round.uncount(lambda gradient: gradient.worker == A)
    assert one.count(ready(A, [batch(0)])) == ""
    assert one.round.update(3, 8, 8.0).cut == 1
    assert one.round.uncount(lambda gradient: gradient.batches == (1,))
    assert one.count(ready(B, [batch(1)])) == ""
    assert one.round.update(3, 8, 8.0).cut is UNSET


def test_scores_of_a_round_add_up_even_if_an_older_worker_sends_none() -> None:
    one = _One(batch(0), batch(1), batch(2))
    for offset, scores in ((0, (1,) * 128), (1, UNSET), (2, (2,) * 128)):
        sent = replace(gradient(A, MODEL, [batch(offset)]), scores=scores)
        assert one.count(sent) == ""
    assert one.round.scores is not None
    assert one.round.scores.tolist() == [3] * 128


def test_gradient_of_older_weights_does_not_count_and_its_order_stands() -> None:
    one = _One(batch(0))
    one.orders(0.0, {A})
    assert one.count(gradient(A, ModelId(3, 6), [batch(0)])) == "version 6 is too old"
    assert one.round.todo == {0: batch(0)}
    assert one.orders(0.0, {A, B}) == ()


def test_gradient_of_fewer_samples_does_not_count_and_voids_its_order() -> None:
    one = _One(batch(0))
    (order,) = one.orders(0.0, {A})
    short = replace(answer(order, MODEL), samples=SAMPLES - 1)
    assert one.count(short) == "the gradient's number of samples is not that of its batches"
    assert asked(one.orders(0.0, {A, B})) == {B: [0]}


# --- assignment ------------------------------------------------------------------------------


def test_order_goes_first_to_the_holder_then_to_the_least_asked_worker() -> None:
    #          asked   late    asked   late    asked
    # batch 0  A       A       B       B       C
    # batch 1  C
    one = _One(batch(0, A), batch(1, C))
    assert asked(one.orders(0.0, {A, B, C})) == {A: [0], C: [1]}
    assert not one.round.asked_again
    assert one.count(gradient(C, MODEL, [batch(1)])) == ""
    assert one.overdue(LATE_S)
    assert asked(one.orders(LATE_S, {A, B, C})) == {B: [0]}
    assert one.round.asked_again
    assert one.overdue(2 * LATE_S)
    assert asked(one.orders(2 * LATE_S, {A, B, C})) == {C: [0]}
    assert one.count(gradient(A, MODEL, [batch(0)])) == ""  # late, but valid


def test_deadline_of_a_batch_grows_with_each_attempt() -> None:
    one, now, allowed_s = _One(batch(0)), 0.0, list[float]()
    for _ in range(4):
        one.orders(now, {A})
        due = one.rounds.assigner.due()
        assert due is not None
        assert not one.overdue(due - 0.001)
        assert one.overdue(due)
        allowed_s.append(due - now)
        now = due
    assert allowed_s == pytest.approx([0.5, 0.75, 1.125, 1.6875])


def test_recalled_orders_are_assigned_as_if_for_the_first_time() -> None:
    one = _One(batch(0, A))
    for now in (0.0, 1.0, 2.0):
        one.orders(now, {A, B})
        one.overdue(LATE_S)
    one.rounds.assigner.recall()
    assert asked(one.orders(10.0, {A, B})) == {A: [0]}
    assert one.rounds.assigner.due() == 10.0 + FLOOR_S
    assert not one.round.asked_again
    # B answers an order from before the recall.
    assert one.count(gradient(B, MODEL, [batch(0)])) == ""


@given(st.lists(st.floats(0, 1e3), max_size=80), st.integers(1, 50), st.integers(0, 10_000))
def test_deadlines_grow_with_batches_and_attempts_and_stay_finite(
    seconds: list[float], batches: int, attempt: int
) -> None:
    times = GradientTimes(FLOOR_S)
    for each in seconds:
        times.observe(A, each, batches=1, now=0.0)
    allowed_s = times.allowed_s(batches, attempt)
    assert FLOOR_S <= allowed_s <= times.allowed_s(batches + 1, attempt)
    assert allowed_s <= times.allowed_s(batches, attempt + 1)
    assert allowed_s <= 20 * times.allowed_s(batches, attempt=0)


# --- slow and idle workers --------------------------------------------------------------------


class _Timed:
    """Rounds of one version, with known gradient times for some of the workers.

    Args:
        each_s: Gradient times per batch of each worker, in order.
    """

    def __init__(self, each_s: dict[WorkerId, list[float]]) -> None:
        self.suspects = Suspects(LIMIT)
        self.rounds = Rounds(self.suspects, GradientTimes(FLOOR_S))
        for worker, times in each_s.items():
            for seconds in times:
                self.answer(worker, seconds, 0.0)

    def begin(self, *batches: Batch) -> Round:
        settings = CoordinatorSettings(Mode(len(batches)), bound=len(batches))
        return self.rounds.begin(settings.mode, 0, settings, batches)

    def answer(self, worker: WorkerId, seconds: float, now: float, *batches: Batch) -> str:
        reply = replace(gradient(worker, MODEL, batches or [batch(99)]), seconds=seconds)
        self.rounds.assigner.receive(reply, now)
        return self.rounds.count(reply, MODEL.version)[1]

    def orders(self, now: float, *live: WorkerId) -> dict[WorkerId, list[int]]:
        return asked(self.rounds.assigner.orders(now, set(live), MODEL.version))

    def relieve(self, now: float, *live: WorkerId) -> dict[WorkerId, list[int]]:
        return asked(self.rounds.assigner.relieve(now, set(live), MODEL.version))


@pytest.mark.parametrize(
    ("times", "usual_s"),
    [
        ([1.0, 1.2, 40.0, 1.1], 1.1),
        ([1.0, 40.0, 40.0, 1.1, 1.2], 1.2),
        # A first gradient is expected to take as long as those of others.
        ([40.0], 1.0),
        ([40.0, 40.0], 1.0),
        ([40.0, 40.0, 40.0], 40.0),
        ([1.0, 40.0, 40.0, 40.0], 40.0),
        ([0.5], 0.5),
    ],
)
def test_usual_time_of_a_worker_is_changed_little_by_single_outliers(
    times: list[float], usual_s: float
) -> None:
    known = GradientTimes(FLOOR_S)
    for each in [1.0] * 9:
        known.observe(B, each, batches=1, now=0.0)
    for each in times:
        known.observe(A, each, batches=1, now=0.0)
    assert known.usual_s(A) == usual_s


def test_batches_of_a_slow_worker_go_to_others_until_it_is_tried_with_one() -> None:
    timed = _Timed({A: [4.0] * 3, B: [1.0], C: [1.0]})
    round_ = timed.begin(batch(0, A), batch(1, A), batch(2, B), batch(3, C))
    assert timed.orders(0.0, A, B, C) == {B: [0, 2], C: [1, 3]}
    for offset in range(4):
        timed.answer(B if offset in (0, 2) else C, 1.0, 4.0, batch(offset))
    timed.rounds.end(round_)

    timed.begin(batch(4, A), batch(5, A), batch(6, B), batch(7, C))
    assert timed.orders(4.1, A, B, C) == {A: [4], B: [5, 6], C: [7]}
    assert timed.relieve(4.1, A, B, C) == {}
    timed.answer(C, 1.0, 5.1, batch(7))
    assert timed.relieve(5.1, A, B, C) == {C: [4]}


def test_only_one_slow_worker_at_a_time_is_tried() -> None:
    timed = _Timed({A: [40.0] * 3, B: [40.0] * 3, C: [1.0] * 5})
    timed.begin(batch(0, A), batch(1, B), batch(2, C))
    assert timed.orders(10.0, A, B, C) == {A: [0], C: [1, 2]}
    timed.begin(batch(3, B))
    assert timed.orders(10.0, A, B, C) == {C: [3]}
    assert timed.answer(A, 40.0, 50.0, batch(0)) == ""
    timed.begin(batch(4, B))
    assert timed.orders(50.0, A, B, C) == {B: [4]}


def test_unknown_worker_gets_one_batch_until_its_time_is_known() -> None:
    timed = _Timed({B: [1.0]})
    timed.begin(batch(0, A), batch(1, A), batch(2, A), batch(3, B))
    assert timed.orders(0.0, A, B) == {A: [0], B: [1, 2, 3]}


def test_order_of_a_slower_worker_is_passed_on_and_the_first_gradient_counts() -> None:
    timed = _Timed({A: [1.0], B: [1.0]})
    one = timed.begin(batch(0, A), batch(1, B))
    timed.orders(0.0, A, B)
    assert timed.answer(B, 1.0, 1.0, batch(1)) == ""
    assert timed.relieve(1.0, A, B) == {}
    due = timed.rounds.assigner.due()
    assert due is not None
    assert timed.relieve(due, A, B) == {}  # its deadline comes first

    assert timed.relieve(3.0, A, B) == {B: [0]}
    assert not one.asked_again
    assert timed.rounds.assigner.overdue(3.0) == (frozenset(), ())  # no suspect
    assert timed.orders(3.0, A, B) == timed.relieve(3.0, A, B) == {}
    assert timed.answer(A, 3.5, 3.5, batch(0)) == ""
    assert timed.answer(B, 1.0, 4.0, batch(0)) == "batches [0] wait for no gradient"
    assert timed.suspects.failure_counts == {}
    assert timed.relieve(4.0, A, B) == {}
    assert timed.rounds.assigner.due() is None


def test_order_of_several_batches_is_divided_among_idle_workers() -> None:
    timed = _Timed({A: [10.0] * 3, B: [1.0], C: [1.0]})
    timed.begin(batch(0, A), batch(1, A))
    timed.orders(0.0, A)
    assert timed.relieve(0.0, A, B, C) == {B: [0], C: [1]}


def test_suspect_batch_is_not_passed_on() -> None:
    timed = _Timed({A: [10.0] * 3, B: [1.0]})
    timed.begin(batch(0, A))
    timed.suspects.blame(0, alone=False)
    timed.orders(0.0, A)
    assert timed.relieve(0.0, A, B) == {}


def test_overtaken_worker_is_busy_until_it_answers() -> None:
    timed = _Timed({A: [1.0], B: [1.0], C: [1.0]})
    timed.begin(batch(0, A), batch(1, B), batch(2, C))
    timed.orders(0.0, A, B, C)
    timed.answer(B, 1.0, 1.0, batch(1))
    timed.relieve(3.0, A, B)
    timed.answer(B, 1.0, 4.0, batch(0))  # A still computes it
    timed.answer(C, 4.0, 4.0, batch(2))

    timed.begin(batch(3, A), batch(4, B), batch(5, C))
    assert timed.orders(4.0, A, B, C) == {B: [3, 4], C: [5]}
    timed.answer(A, 4.5, 4.5, batch(0))
    timed.begin(batch(6, A))
    assert timed.orders(4.5, A, B, C) == {A: [6]}


def test_returning_worker_has_no_known_time() -> None:
    timed = _Timed({A: [10.0] * 3, B: [1.0] * 4})
    timed.rounds.worker_lost(A)
    timed.begin(batch(0, A), batch(1, B))
    assert timed.orders(0.0, A, B) == {A: [0], B: [1]}


# --- gradients that stay with their workers ---------------------------------------------------


def ready(worker: WorkerId, batches: list[Batch], loss: float = 1.0) -> GradientReady:
    samples = sum(each.samples for each in batches)
    offsets = tuple(each.offset for each in batches)
    sums = {"right": MetricSum(loss, samples)}
    return GradientReady(worker, MODEL, offsets, samples, loss * samples, sums, 0.1, life=1)


def test_counted_batches_of_a_lost_member_are_reassigned() -> None:
    one = _One(batch(0), batch(1), batch(2))
    one.orders(0.0, {A, B})
    assert one.count(ready(A, [batch(0)], loss=1.0)) == ""
    assert one.count(ready(B, [batch(1)], loss=3.0)) == ""
    assert one.count(ready(A, [batch(2)], loss=1.0)) == ""

    assert one.round.uncount(lambda gradient: gradient.worker == A)
    assert not one.round.uncount(lambda gradient: gradient.worker == A)
    assert (one.round.todo, one.round.counted) == ({0: batch(0), 2: batch(2)}, {1: batch(1)})

    assert asked(one.orders(1.0, {B})) == {B: [0, 2]}
    assert one.count(ready(B, [batch(0), batch(2)], loss=3.0)) == ""
    update = one.round.update(3, 8, 8.0)
    assert (update.samples, update.loss, update.metrics) == (3 * SAMPLES, 3.0, {"right": 6 / 30})
    assert [each.offset for each in update.batches] == [1, 0, 2]


# --- suspects --------------------------------------------------------------------------------


def test_suspect_travels_alone_and_only_then_counts_failures() -> None:
    # asked     A: 0 1   (died)   A: 0   (raised)   B: 0   (died)
    # failures       0 0               1                 2 > 1: poison
    suspects = Suspects(LIMIT)
    one = _One(batch(0), batch(1), suspects=suspects)
    assert asked(one.orders(0.0, {A})) == {A: [0, 1]}
    assert one.rounds.worker_lost(A) == ()
    assert suspects.failure_counts == {0: 0, 1: 0}

    assert asked(one.orders(0.0, {A})) == {A: [0]}
    assert one.orders(0.0, {A}) == ()  # a suspect travels alone
    assert one.fail(A, [0]) == ()
    assert suspects.failure_counts == {0: 1, 1: 0}

    assert asked(one.orders(0.0, {A, B})) == {B: [0], A: [1]}
    assert one.count(gradient(A, MODEL, [batch(1)])) == ""
    assert suspects.failure_counts == {0: 1}  # a gradient acquits
    assert one.rounds.worker_lost(B) == (batch(0),)


def test_leaving_or_unreadable_data_blames_no_batch() -> None:
    suspects = Suspects(LIMIT)
    one = _One(batch(0), suspects=suspects)
    one.orders(0.0, {A})
    one.rounds.assigner.release(A)
    assert asked(one.orders(0.0, {B})) == {B: [0]}
    one.rounds.requeue(B, [0], MODEL.version)
    assert asked(one.orders(0.0, {C})) == {C: [0]}
    assert one.fail(A, [0]) == ()  # it has no order
    assert suspects.failure_counts == {}


def test_death_after_the_deadline_counts_as_failure_of_the_batch() -> None:
    # The deadline of A's order passes before the leader notices A's death.
    # asked     A: 0   (overdue)   B: 0   (A has died)   (B answers)
    # failures                              1              none
    suspects = Suspects(LIMIT)
    one = _One(batch(0), suspects=suspects)
    one.orders(0.0, {A, B})
    assert one.overdue(LATE_S)
    assert asked(one.orders(LATE_S, {A, B})) == {B: [0]}
    assert one.rounds.worker_lost(A) == ()
    assert suspects.failure_counts == {0: 1}

    assert one.count(gradient(B, MODEL, [batch(0)])) == ""
    assert suspects.failure_counts == {}


def test_overdue_batch_is_suspected_when_its_worker_dies() -> None:
    # asked    A: 0   (overdue, given to B)   A: 1   (A has died: of 0 or of 1?)
    suspects = Suspects(LIMIT)
    one = _One(batch(0), suspects=suspects)
    one.orders(0.0, {A})
    one.overdue(LATE_S)
    assert asked(one.orders(LATE_S, {B})) == {B: [0]}
    one.round.fill([batch(1)])
    assert asked(one.orders(LATE_S, {A})) == {A: [1]}

    assert one.rounds.worker_lost(A) == ()
    assert suspects.failure_counts == {0: 0, 1: 0}  # suspected, not counted


def test_failure_counts_only_for_its_own_order() -> None:
    suspects = Suspects(LIMIT)
    one = _One(batch(0), suspects=suspects)
    one.orders(0.0, {A})
    one.overdue(LATE_S)
    one.orders(LATE_S, {B})
    one.round.fill([batch(1)])
    one.orders(LATE_S, {A})

    one.fail(A, [1])  # it raised

    assert suspects.failure_counts == {1: 1}


# --- several in flight -----------------------------------------------------------------------


class _Several:
    """Rounds in flight, all of one staleness, each begun at its own version."""

    def __init__(self, staleness: int, suspects: Suspects | None = None) -> None:
        self.rounds = Rounds(suspects or Suspects(LIMIT), GradientTimes(FLOOR_S))
        self.settings = CoordinatorSettings(Mode(2), bound=4)
        self.staleness = staleness

    def begin(self, *batches: Batch, local_rate: float = 0.0) -> Round:
        mode = Mode(2, staleness=self.staleness, local_rate=local_rate)
        return self.rounds.begin(mode, 0, self.settings, batches)


@given(st.lists(st.integers(0, 6), max_size=5), st.integers(0, 3))
def test_rounds_fit_if_there_is_an_order_in_which_each_is_applied_in_time(
    deadlines: list[int], version: int
) -> None:
    in_time = any(
        all(version + place <= last for place, last in enumerate(order))
        for order in permutations(deadlines)
    )
    assert fits(deadlines, version) == in_time


def test_two_rounds_of_one_version_fit_only_with_staleness_1() -> None:
    for staleness in (0, 1):
        several = _Several(staleness)
        several.begin(batch(0))
        assert several.rounds.may_begin(staleness, 7) == (staleness == 1)
        assert not several.rounds.may_begin(0, 7) or staleness == 1


def test_message_counts_in_the_one_round_of_all_its_batches() -> None:
    several = _Several(1)
    one, two = several.begin(batch(0), batch(1)), several.begin(batch(2))
    assert several.rounds.count(gradient(A, MODEL, [batch(0), batch(2)]), 7) == (
        None,
        "batches [2] wait for no gradient",
    )
    assert several.rounds.count(gradient(A, MODEL, [batch(2)]), 7) == (two, "")
    assert several.rounds.count(gradient(A, MODEL, [batch(1), batch(0)]), 7) == (one, "")
    assert (list(one.counted), list(two.counted)) == ([1, 0], [2])


def test_oldest_counted_weights_are_the_base_of_the_update() -> None:
    # Version 7, s=2: a gradient of version 5 must be applied at once; one of version 4 is too old.
    several = _Several(2)
    round_ = several.begin(batch(0), batch(1))
    reason = several.rounds.count(gradient(A, ModelId(3, 4), [batch(0)]), 7)[1]
    assert reason == "version 4 is too old"
    for version, offset in ((5, 0), (7, 1)):
        assert several.rounds.count(gradient(A, ModelId(3, version), [batch(offset)]), 7)[1] == ""
    update = round_.update(3, 8, 8.0)
    assert (update.base, update.staleness) == (5, 2)
    further = several.begin(batch(2))
    assert not several.rounds.may_apply(further, 7)
    assert several.rounds.may_apply(round_, 7)


def test_order_is_voided_by_an_answer_that_is_not_older() -> None:
    several = _Several(9)
    several.begin(batch(0))
    several.rounds.assigner.orders(0.0, {A}, 7)
    assert not several.rounds.requeue(A, [0], 6)
    assert several.rounds.fail(A, [0], 6) == ()
    # The gradient was begun later than ordered, at newer weights.
    assert several.rounds.requeue(A, [0], 8)


def test_deadline_covers_all_orders_of_a_worker_in_any_round() -> None:
    several = _Several(1)
    several.begin(batch(0, A), batch(1, A))
    several.rounds.assigner.receive(gradient(C, MODEL, [batch(0)]), 0.0)  # 0.1 s for a batch
    several.rounds.count(gradient(C, MODEL, [batch(0)]), 7)
    several.rounds.assigner.orders(0.0, {A}, 7)
    several.begin(batch(2, A))
    several.rounds.assigner.orders(0.0, {A}, 7)
    assert several.rounds.assigner.loads() == {A: 2}
    due = [several.rounds.assigner.due()]
    several.rounds.count(gradient(A, MODEL, [batch(1)]), 7)
    due.append(several.rounds.assigner.due())
    assert due == pytest.approx([FLOOR_S + 0.1, FLOOR_S + 0.2])


def test_suspect_of_another_round_travels_alone() -> None:
    suspects = Suspects(LIMIT)
    several = _Several(1, suspects)
    several.begin(batch(0, A))
    several.rounds.assigner.orders(0.0, {A}, 7)
    several.rounds.worker_lost(A)
    several.begin(batch(1, A))
    assert asked(several.rounds.assigner.orders(0.0, {A}, 7)) == {A: [0]}
    assert several.rounds.assigner.orders(0.0, {A}, 7) == ()
    assert asked(several.rounds.assigner.orders(0.0, {A, B}, 7)) == {B: [1]}


def test_batches_of_an_order_are_of_one_round() -> None:
    several = _Several(1)
    several.begin(batch(0, A), batch(1, A))
    several.begin(batch(2, A), local_rate=0.5)
    orders = several.rounds.assigner.orders(0.0, {A}, 7)
    assert [([b.offset for b in o.batches], o.local_rate) for o in orders] == [
        ([0, 1], 0.0),
        ([2], 0.5),
    ]


def test_late_worker_is_busy_but_no_longer_awaited() -> None:
    several = _Several(3)
    several.begin(batch(0, A))
    several.rounds.assigner.orders(0.0, {A, B}, 5)
    assert (several.rounds.assigner.awaits(7), several.rounds.assigner.oldest_asked(7)) == (5, 5)
    # A gradient of version 5 must be applied by version 8.
    assert not several.rounds.may_begin(0, 9)
    several.rounds.assigner.overdue(LATE_S)
    assert (several.rounds.assigner.awaits(7), several.rounds.assigner.oldest_asked(7)) == (7, 5)
    assert several.rounds.assigner.idle({A, B}) == {B}
    assert several.rounds.assigner.loads() == {}
    assert several.rounds.may_begin(0, 9)
