"""A worker's orders, from triggers that are late, repeated, or from a deposed leader."""

from msgspec.structs import replace

from common.core.messages import (
    GENESIS,
    Assignment,
    GroupOrders,
    Membership,
    ModelId,
    TriggerId,
    TriggerStream,
    UpdateTrigger,
    WorkerId,
    WorkerLeaving,
)
from common.core.order_queue import Assignments, Compute
from tests.unit.core.examples import A, B, batch


def trigger(epoch: int, number: int, version: int, **orders: tuple[int, ...]) -> UpdateTrigger:
    """Return a trigger with these batches for these workers."""
    return UpdateTrigger(
        TriggerId(epoch, number),
        ModelId(epoch, version),
        tuple(Assignment(WorkerId(w), tuple(map(batch, offsets))) for w, offsets in orders.items()),
    )


def taken(orders: Assignments) -> list[tuple[int, ...]]:
    """Return the batches of all remaining orders."""
    return [tuple(batch.offset for batch in c.batches) for c in iter(orders.next, None)]


def test_worker_receives_its_own_orders_in_order() -> None:
    orders = Assignments(A)
    orders.receive([trigger(0, 1, 5, a=(1, 2), b=(3,)), trigger(0, 2, 5, a=(4,))])

    assert orders.last_trigger == TriggerId(0, 2)
    assert orders.next() == Compute(ModelId(0, 5), (batch(1), batch(2)), None)
    assert orders.next() == Compute(ModelId(0, 5), (batch(4),), None)
    assert orders.next() is None


def test_order_may_request_the_squared_gradient() -> None:
    orders, received = Assignments(A), trigger(0, 1, 5, a=(1,))
    order = replace(received.orders[0], squared=True)
    orders.receive([replace(received, orders=(order,))])
    compute = orders.next()
    assert compute is not None
    assert compute.squared


def test_process_skips_orders_for_another_process_with_its_name() -> None:
    # The first order may have ended the process that it was for.
    orders = Assignments(A, "second")
    old, own, anybody = (trigger(0, number, 5, a=(number,)) for number in (1, 2, 3))
    lives = {old: "first", own: "second"}
    for each, life in lives.items():
        [order] = each.orders
        orders.receive([replace(each, orders=(replace(order, life=life),))])
    orders.receive([anybody])

    assert orders.last_trigger == TriggerId(0, 3)
    assert taken(orders) == [(2,), (3,)]


def test_repeated_or_late_trigger_is_ignored() -> None:
    # ids     0-1   0-3   0-2   0-3
    # taken   0-1   0-3   -     -
    orders = Assignments(A)
    orders.receive([trigger(0, 1, 5, a=(1,)), trigger(0, 3, 5, a=(3,))])
    orders.receive([trigger(0, 2, 5, a=(2,)), trigger(0, 3, 5, a=(3,))])

    assert taken(orders) == [(1,), (3,)]


def test_trigger_of_deposed_leader_is_ignored() -> None:
    orders = Assignments(A)
    orders.receive([trigger(7, 1, 5, a=(1,)), trigger(3, 99, 9, a=(2,))])

    assert len(orders) == 1
    assert orders.last_trigger == TriggerId(7, 1)


def test_layout_changes_only_by_a_leader_whose_status_was_seen() -> None:
    # trigger  7-1, 32 slices │ forged, epoch 2^60 │ 8-1, no slices │ 9-1, 32 slices
    # variable own            │ forged             │ whole          │ successor
    def of(epoch: int, slices: int) -> UpdateTrigger:
        orders_of = GroupOrders(GENESIS, Membership(1), slices=slices)
        return replace(trigger(epoch, 1, 5), group=orders_of)

    orders = Assignments(A)
    own, whole, successor, forged = of(7, 32), of(8, 0), of(9, 32), trigger(1 << 60, 1, 1)
    orders.listen(TriggerStream("", 7))
    assert orders.believed([own, forged], 32) == [own]
    assert orders.believed([own, whole], 32) == [own]
    # The last trigger has the present layout again, so none needs confirmation.
    assert orders.believed([own, whole, successor], 32) == [own, whole, successor]
    orders.listen(TriggerStream("", 8))
    assert orders.believed([whole, forged], 32) == [whole]
    assert orders.believed([forged], 32) == []
    orders.listen(TriggerStream("", 9))
    # The leader in force is another one, so its predecessor's change of layout is not believed.
    assert orders.believed([whole], 32) == []
    # The worker has no slices already, so the trigger changes nothing and is believed.
    assert orders.believed([whole], 0) == [whole]


def test_another_trigger_stream_restarts_ids_and_drops_old_orders() -> None:
    # stream   ""              "other"
    # ids      7-1   9-1       3-1
    orders = Assignments(A)
    orders.receive([trigger(7, 1, 5, a=(1,)), trigger(9, 1, 5, a=(2,))])
    orders.listen(TriggerStream("other", 3))
    orders.receive([trigger(3, 1, 5, a=(3,))])
    orders.listen(TriggerStream("other", 3))

    assert taken(orders) == [(3,)]
    assert (orders.stream, orders.last_trigger) == ("other", TriggerId(3, 1))


def test_leader_of_a_lower_epoch_is_followed_if_the_one_before_was_lost() -> None:
    # status     9              3: Kafka lost the Lead of 9, and Redis all triggers
    # triggers     9-1   9-2      3-1
    orders = Assignments(A)
    orders.listen(TriggerStream("", 9))
    orders.receive([trigger(9, 1, 5, a=(1,)), trigger(9, 2, 5, a=(2,))])
    orders.receive([trigger(3, 1, 5, a=(3,))])
    # This may be a leader that resumed after a pause.
    assert orders.last_trigger == TriggerId(9, 2)

    orders.listen(TriggerStream("", 3))
    orders.receive([trigger(3, 1, 5, a=(3,))])
    assert taken(orders) == [(3,)]


def test_leader_of_a_lower_epoch_is_followed_if_no_status_of_the_higher_one_was_seen() -> None:
    # status                3: the previous leader wrote its own after Redis had failed
    # triggers   9-1        3-1
    orders = Assignments(A)
    orders.receive([trigger(9, 1, 5, a=(1,))])
    orders.listen(TriggerStream("", 3))
    orders.receive([trigger(3, 1, 5, a=(3,))])

    assert taken(orders) == [(3,)]


def test_status_older_than_the_triggers_does_not_repeat_them() -> None:
    orders = Assignments(A)
    orders.listen(TriggerStream("", 3))
    for _ in range(3):
        orders.receive([trigger(9, 1, 5, a=(1,))])
        orders.listen(TriggerStream("", 3))
        while orders.next() is not None:
            orders.done()

    assert orders.last_trigger == TriggerId(9, 1)


def test_newer_model_voids_older_orders() -> None:
    orders = Assignments(A)
    orders.receive([trigger(0, 1, 5, a=(1,)), trigger(0, 2, 6, b=(2,))])

    assert orders.next() is None  # no longer awaited


def test_awaited_orders_remain_and_use_the_newest_model() -> None:
    # triggers   version 5: 1, 2    version 7, awaits 5: nothing for a    version 8, awaits 6
    orders = Assignments(A)
    orders.receive([replace(trigger(0, 1, 5, a=(1,)), weights=b"5"), trigger(0, 2, 5, a=(2,))])
    orders.receive([replace(trigger(0, 3, 7, b=(3,)), awaits=5, weights=b"7")])
    assert orders.next() == Compute(ModelId(0, 7), (batch(1),), b"7")
    orders.receive([replace(trigger(0, 4, 8, b=(4,)), awaits=6)])
    assert orders.next() is None
    orders.receive([replace(trigger(1, 1, 9, b=(4,)), awaits=0)])
    assert orders.next() is None


def test_waiting_order_is_awaited_like_the_newest_one_of_its_batches() -> None:
    orders = Assignments(A)
    orders.receive([trigger(0, 1, 5, a=(1, 2)), replace(trigger(0, 2, 7, a=(2,)), awaits=5)])
    orders.receive([replace(trigger(0, 3, 8, b=(3,)), awaits=7)])

    assert taken(orders) == [(1, 2)]


def test_batch_in_progress_is_not_queued_again_while_awaited() -> None:
    orders = Assignments(A)
    orders.receive([trigger(0, 1, 5, a=(1,))])
    orders.next()
    orders.receive([replace(trigger(0, 2, 6, a=(1,)), awaits=5)])
    known = len(orders)
    orders.receive([replace(trigger(0, 3, 7, a=(1,)), awaits=6)])

    assert (known, len(orders)) == (0, 1)


def test_gradient_with_local_steps_is_a_separate_order() -> None:
    orders = Assignments(A)
    stepped = replace(trigger(0, 2, 5), orders=(Assignment(A, (batch(1),), local_rate=0.5),))
    orders.receive([trigger(0, 1, 5, a=(1,)), stepped])

    assert [each.local_rate for each in iter(orders.next, None)] == [0.0, 0.5]


def test_queued_batch_is_not_queued_again() -> None:
    orders = Assignments(A)
    orders.receive([trigger(0, 1, 5, a=(1, 2)), trigger(0, 2, 5, a=(2,)), trigger(0, 3, 5, a=(3,))])

    assert taken(orders) == [(1, 2), (3,)]


def test_batch_in_progress_is_queued_again_only_for_another_model() -> None:
    orders = Assignments(B)
    orders.receive([trigger(0, 1, 5, b=(1, 2))])
    orders.next()
    orders.receive([trigger(0, 2, 5, b=(1,))])
    again = len(orders)
    orders.receive([trigger(0, 3, 6, b=(1,))])

    assert (again, len(orders)) == (0, 1)


def test_answered_order_may_be_queued_again() -> None:
    orders = Assignments(B)
    orders.receive([trigger(0, 1, 5, b=(1,))])
    orders.next()
    orders.done()
    orders.receive([trigger(0, 2, 5, b=(1,))])

    # The first reply may be lost.
    assert len(orders) == 1


def test_leaving_worker_reports_what_it_still_finishes_and_starts_nothing() -> None:
    orders = Assignments(A)
    assert orders.leave() is None  # there was no leader yet
    orders = Assignments(A)
    orders.receive([trigger(0, 1, 5, a=(1, 2)), trigger(0, 2, 5, a=(3,))])
    orders.next()
    assert orders.leave() == WorkerLeaving(A, ModelId(0, 5), (1, 2))
    orders.receive([trigger(0, 3, 5, a=(4,))])
    assert orders.next() is None


def test_leaving_worker_without_work_or_time_finishes_nothing() -> None:
    orders = Assignments(A)
    orders.receive([trigger(0, 1, 5, a=(1,))])
    orders.next()
    assert orders.leave(finish=False) == WorkerLeaving(A, ModelId(0, 5))
    orders.done()
    assert orders.leave() == WorkerLeaving(A, ModelId(0, 5))
