"""One update in flight: what counts, who is asked, and who is blamed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.core.messages import Assignment, Batch, ModelId, WorkerId
from common.core.rounds import GradientTimes, Round, Suspects
from tests.unit.core.examples import SAMPLES, A, B, C, answer, batch, gradient

MODEL = ModelId(3, 7)
FLOOR_S = 0.5
LIMIT = 1  # strikes
LATE_S = 1000.0  # past every deadline


def round_of(*batches: Batch, suspects: Suspects | None = None) -> Round:
    return Round(MODEL, batches, suspects or Suspects(LIMIT), GradientTimes(FLOOR_S))


def asked(orders: tuple[Assignment, ...]) -> dict[WorkerId, list[int]]:
    return {order.worker: [b.offset for b in order.batches] for order in orders}


# --- what counts -----------------------------------------------------------------------------


def test_a_gradient_counts_whole_or_not_at_all() -> None:
    round_ = round_of(batch(0), batch(1), batch(2))
    assert round_.count(gradient(A, MODEL, [batch(0)])) == ""
    assert round_.count(gradient(B, MODEL, [batch(0), batch(1)])) == "batches [0] do not wait"
    assert round_.count(gradient(B, MODEL, [batch(1), batch(9)])) == "batches [9] do not wait"
    assert round_.count(gradient(B, MODEL, [batch(1), batch(1)])) == "names a batch twice, or none"
    assert round_.count(gradient(B, MODEL, [])) == "names a batch twice, or none"

    assert round_.counted == (batch(0),)
    assert (round_.samples, round_.loss_sum) == (SAMPLES, 2.0 * SAMPLES)
    assert round_.metric_sums == {"right": 1.0 * SAMPLES}


@pytest.mark.parametrize("model", [ModelId(3, 6), ModelId(2, 7), ModelId(-1, 0)])
def test_a_gradient_of_another_model_does_not_count(model: ModelId) -> None:
    round_ = round_of(batch(0))
    assert round_.count(gradient(A, model, [batch(0)])).startswith(f"of model {tuple(model)}")
    assert round_.todo == (batch(0),)


def test_a_gradient_over_fewer_samples_does_not_count_and_its_order_is_void() -> None:
    round_ = round_of(batch(0))
    (order,) = round_.orders(0.0, {A})
    short = replace(answer(order, MODEL), samples=SAMPLES - 1)
    assert round_.count(short) == "has not the batches' samples"
    assert asked(round_.orders(0.0, {A, B})) == {B: [0]}


# --- who is asked ----------------------------------------------------------------------------


def test_the_holder_is_asked_first_then_whoever_was_asked_least() -> None:
    #          asked   late    asked   late    asked
    # batch 0  A       A       B       B       C
    # batch 1  C
    round_ = round_of(batch(0, A), batch(1, C))
    assert asked(round_.orders(0.0, {A, B, C})) == {A: [0], C: [1]}
    assert not round_.asked_again
    assert round_.count(gradient(C, MODEL, [batch(1)])) == ""
    assert round_.overdue(LATE_S)
    assert asked(round_.orders(LATE_S, {A, B, C})) == {B: [0]}
    assert round_.asked_again
    assert round_.overdue(2 * LATE_S)
    assert asked(round_.orders(2 * LATE_S, {A, B, C})) == {C: [0]}
    assert round_.count(gradient(A, MODEL, [batch(0)])) == ""  # late, and as good as any


def test_each_time_that_a_batch_is_handed_out_again_it_gets_longer() -> None:
    round_, now, allowed_s = round_of(batch(0)), 0.0, list[float]()
    for _ in range(4):
        round_.orders(now, {A})
        due = round_.due()
        assert due is not None
        assert not round_.overdue(due - 0.001)
        assert round_.overdue(due)
        allowed_s.append(due - now)
        now = due
    assert allowed_s == pytest.approx([0.5, 0.75, 1.125, 1.6875])


def test_who_never_got_an_order_is_asked_as_if_for_the_first_time() -> None:
    round_ = round_of(batch(0, A))
    for now in (0.0, 1.0, 2.0):
        round_.orders(now, {A, B})
        round_.overdue(LATE_S)
    round_.recall()
    assert asked(round_.orders(10.0, {A, B})) == {A: [0]}
    assert round_.due() == 10.0 + FLOOR_S
    assert not round_.asked_again
    assert round_.count(gradient(B, MODEL, [batch(0)])) == ""  # one got there after all


@given(st.lists(st.floats(0, 1e3), max_size=80), st.integers(1, 50), st.integers(0, 10_000))
def test_deadlines_grow_with_batches_and_attempts_and_stay_finite(
    seconds: list[float], batches: int, attempt: int
) -> None:
    times = GradientTimes(FLOOR_S)
    for each in seconds:
        times.observe(each, batches=1)
    allowed_s = times.allowed_s(batches, attempt)
    assert FLOOR_S <= allowed_s <= times.allowed_s(batches + 1, attempt)
    assert allowed_s <= times.allowed_s(batches, attempt + 1)
    assert allowed_s <= 20 * times.allowed_s(batches, attempt=0)


# --- suspects --------------------------------------------------------------------------------


def test_a_suspect_travels_alone_and_only_then_earns_strikes() -> None:
    # asked    A: 0 1   (died)   A: 0   (raised)   A: 0   (died)
    # strikes       0 0               1                 2 > 1: poison
    suspects = Suspects(LIMIT)
    round_ = round_of(batch(0), batch(1), suspects=suspects)
    assert asked(round_.orders(0.0, {A})) == {A: [0, 1]}
    assert round_.vanish(A) == ()
    assert suspects.strikes == {0: 0, 1: 0}

    assert asked(round_.orders(0.0, {A})) == {A: [0]}
    assert round_.orders(0.0, {A}) == ()  # nothing travels with it
    assert round_.fail(A, [0]) == ()
    assert suspects.strikes == {0: 1, 1: 0}

    assert asked(round_.orders(0.0, {A, B})) == {B: [0], A: [1]}
    assert round_.count(gradient(A, MODEL, [batch(1)])) == ""
    assert suspects.strikes == {0: 1}  # a gradient acquits
    assert round_.vanish(B) == (batch(0),)


def test_nobody_is_blamed_for_leaving_or_for_data_that_could_not_be_had() -> None:
    suspects = Suspects(LIMIT)
    round_ = round_of(batch(0), suspects=suspects)
    round_.orders(0.0, {A})
    round_.release(A)
    assert asked(round_.orders(0.0, {B})) == {B: [0]}
    round_.requeue(B, [0])
    assert asked(round_.orders(0.0, {C})) == {C: [0]}
    assert round_.fail(A, [0]) == ()  # it has nothing in hand
    assert suspects.strikes == {}


def test_a_worker_that_dies_after_its_deadline_is_not_forgotten() -> None:
    # deadlines are shorter than the time in which a death is noticed:
    # asked    A: 0   (overdue)   B: 0   (A has died)   (B answers)
    # strikes                                0 1            acquitted
    suspects = Suspects(LIMIT)
    round_ = round_of(batch(0), suspects=suspects)
    round_.orders(0.0, {A, B})
    assert round_.overdue(LATE_S)
    assert asked(round_.orders(LATE_S, {A, B})) == {B: [0]}
    assert round_.vanish(A) == ()
    assert suspects.strikes == {0: 1}

    assert round_.count(gradient(B, MODEL, [batch(0)])) == ""
    assert suspects.strikes == {}


def test_what_is_overdue_may_be_what_a_worker_dies_of() -> None:
    # asked    A: 0   (overdue, given to B)   A: 1   (A has died: of 0 or of 1?)
    suspects = Suspects(LIMIT)
    round_ = round_of(batch(0), suspects=suspects)
    round_.orders(0.0, {A})
    round_.overdue(LATE_S)
    assert asked(round_.orders(LATE_S, {B})) == {B: [0]}
    round_.fill([batch(1)])
    assert asked(round_.orders(LATE_S, {A})) == {A: [1]}

    assert round_.vanish(A) == ()
    assert suspects.strikes == {0: 0, 1: 0}  # suspected, not struck


def test_a_failure_is_about_its_own_order_whatever_else_is_overdue() -> None:
    suspects = Suspects(LIMIT)
    round_ = round_of(batch(0), suspects=suspects)
    round_.orders(0.0, {A})
    round_.overdue(LATE_S)
    round_.orders(LATE_S, {B})
    round_.fill([batch(1)])
    round_.orders(LATE_S, {A})

    round_.fail(A, [1])  # it raised

    assert suspects.strikes == {1: 1}
