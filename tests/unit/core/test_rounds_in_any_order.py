"""One update in flight under all mixtures of replies, deaths and delays, against a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from common.core.batch_assignment import GradientTimes
from common.core.gradient_counting import Rounds
from common.core.messages import Assignment, Batch, Gradient, ModelId, WorkerId
from common.core.poison import Suspects
from common.core.settings import CoordinatorSettings, Mode
from tests.unit.core.examples import SAMPLES, A, B, C, answer, batch, gradient

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = ModelId(3, 7)
LIMIT = 1  # failures
LATE_S = 1000.0  # past every deadline


@dataclass
class _Hand:
    """Batches that one order assigned to one worker."""

    worker: WorkerId
    offsets: set[int]
    alone: bool
    late: bool = False


workers = st.sampled_from([A, B, C])
some_offsets = st.lists(st.integers(0, 5), max_size=4)


class _AnyRound(RuleBasedStateMachine):
    """A round of up to five batches, beside a plain account of each worker's orders."""

    @initialize(size=st.integers(1, 5))
    def begin(self, size: int) -> None:
        self.batches = {offset: batch(offset, [A, B, C][offset % 3]) for offset in range(size)}
        self.suspects = Suspects(LIMIT)
        times = GradientTimes(floor_s=0.5)
        self.rounds = Rounds(self.suspects, times)
        settings = CoordinatorSettings(Mode(size), bound=size)
        self.round = self.rounds.begin(settings.mode, 0, settings, self.batches.values())
        self.todo, self.counted, self.poison = set(self.batches), set[int](), set[int]()
        self.hands, self.issued, self.now = list[_Hand](), list[Assignment](), 0.0

    def held(self, *workers: WorkerId) -> set[int]:
        mine = [h for h in self.hands if not h.late and h.worker in (workers or (A, B, C))]
        return {offset for hand in mine for offset in hand.offsets}

    @rule(live=st.sets(workers))
    def orders_are_assigned(self, live: set[WorkerId]) -> None:
        suspects, waiting = self.suspects.failure_counts.keys(), self.todo - self.held()
        for order in self.rounds.assigner.orders(self.now, live, MODEL.version):
            offsets = {each.offset for each in order.batches}
            assert order.worker in live
            # No batch is ordered from two workers at once.
            assert offsets <= waiting
            assert not self.held(order.worker) & suspects  # a suspect travels alone
            assert not offsets & suspects or (len(offsets) == 1 and not self.held(order.worker))
            self.hands.append(_Hand(order.worker, offsets, alone=len(offsets) == 1))
            self.issued.append(order)
            waiting -= offsets
        # No live worker may take these batches.
        for offset in waiting:
            for worker in live:
                assert self.held(worker) & (suspects if offset not in suspects else self.todo)

    @rule(live=st.sets(workers), later_s=st.sampled_from([0.0, 0.1, 0.4]))
    def slow_orders_are_passed_on(self, live: set[WorkerId], later_s: float) -> None:
        self.now += later_s
        orders = self.rounds.assigner.relieve(self.now, live, MODEL.version)
        new = {each.offset for order in orders for each in order.batches}
        assert not new & self.suspects.failure_counts.keys()
        for hand in self.hands:
            if not hand.late and hand.offsets & new:
                # An order is reassigned completely or not at all.
                assert hand.offsets <= new
                hand.late = True
        for order in orders:
            offsets = {each.offset for each in order.batches}
            assert offsets <= self.todo
            assert order.worker in live
            assert not any(hand.worker == order.worker for hand in self.hands)  # it was idle
            self.issued.append(order)
        for order in orders:
            offsets = {each.offset for each in order.batches}
            self.hands.append(_Hand(order.worker, offsets, alone=len(offsets) == 1))

    @rule(data=st.data())
    def issued_order_is_answered(self, data: st.DataObject) -> None:
        if self.issued:
            self.reply(answer(data.draw(st.sampled_from(self.issued)), MODEL))

    @rule(worker=workers, offsets=some_offsets, short=st.booleans(), old=st.booleans())
    def arbitrary_reply_arrives(
        self, worker: WorkerId, offsets: list[int], *, short: bool, old: bool
    ) -> None:
        model = ModelId(3, 6) if old else MODEL
        reply = gradient(worker, model, map(batch, offsets))
        self.reply(replace(reply, samples=reply.samples - short))

    def reply(self, reply: Gradient) -> None:
        offsets = set(reply.batches)
        fits = reply.model == MODEL and 0 < len(offsets) == len(reply.batches)
        self.rounds.assigner.receive(reply, self.now)
        right = fits and offsets <= self.todo and reply.samples == SAMPLES * len(offsets)
        assert (self.rounds.count(reply, MODEL.version)[1] == "") == right
        if right:
            self.counted |= offsets
            self.done_with(offsets)
        elif fits:
            self.void(reply.worker, offsets)

    @rule(worker=workers, offsets=some_offsets)
    def data_is_unreadable(self, worker: WorkerId, offsets: list[int]) -> None:
        self.rounds.requeue(worker, offsets, MODEL.version)
        self.void(worker, set(offsets))

    @rule(worker=workers)
    def worker_leaves(self, worker: WorkerId) -> None:
        self.rounds.assigner.release(worker)
        self.void(worker, set(self.batches))

    @rule(worker=workers, offsets=some_offsets)
    def worker_fails(self, worker: WorkerId, offsets: list[int]) -> None:
        mine = [hand for hand in self.hands if hand.worker == worker]
        alone = {offset for hand in mine if hand.alone for offset in hand.offsets}
        self.blame(worker, set(offsets), alone, self.fail)

    def fail(self, worker: WorkerId, offsets: set[int]) -> tuple[Batch, ...]:
        return self.rounds.fail(worker, offsets, MODEL.version)

    @rule(worker=workers)
    def worker_is_lost(self, worker: WorkerId) -> None:
        mine = [hand for hand in self.hands if hand.worker == worker]
        everything = {offset for hand in mine for offset in hand.offsets}
        alone = everything if len(everything) == 1 and all(h.alone for h in mine) else set[int]()
        self.blame(worker, everything, alone, lambda who, _: self.rounds.worker_lost(who))

    def blame(
        self,
        worker: WorkerId,
        offsets: set[int],
        alone: set[int],
        fail: Callable[[WorkerId, set[int]], tuple[Batch, ...]],
    ) -> None:
        before = self.suspects.failure_counts
        mine = [hand for hand in self.hands if hand.worker == worker]
        blamed = {offset for hand in mine for offset in hand.offsets} & offsets
        poison = {each.offset for each in fail(worker, offsets)}
        counted_failures = {offset: before.get(offset, 0) + (offset in alone) for offset in blamed}
        assert self.suspects.failure_counts == before | counted_failures
        assert poison == {
            offset for offset, failures in counted_failures.items() if failures > LIMIT
        }
        self.void(worker, offsets)
        for offset in poison:
            assert self.rounds.settle(offset) == self.batches[offset]
        self.poison |= poison
        self.done_with(poison)

    @rule()
    def all_deadlines_pass(self) -> None:
        self.now += LATE_S
        assert bool(self.rounds.assigner.overdue(self.now)[0]) == bool(self.held())
        for hand in self.hands:
            hand.late = True

    def void(self, worker: WorkerId, offsets: set[int]) -> None:
        self.hands = [h for h in self.hands if h.worker != worker or not h.offsets & offsets]

    def done_with(self, offsets: set[int]) -> None:
        self.todo -= offsets
        for hand in self.hands:
            hand.offsets -= offsets
        self.hands = [hand for hand in self.hands if hand.offsets]

    @invariant()
    def each_batch_is_counted_at_most_once(self) -> None:
        assert self.round.counted.keys() == self.counted
        assert self.round.todo.keys() == self.todo
        assert self.round.samples == SAMPLES * len(self.counted)
        assert self.round.loss_sum == 2.0 * self.round.samples

    def teardown(self) -> None:
        """Let one reliable worker finish the rounds, after any history."""
        self.all_deadlines_pass()
        while self.round.todo:
            orders = self.rounds.assigner.orders(self.now, {A}, MODEL.version)
            assert orders
            for order in orders:
                self.reply(answer(order, MODEL))
        assert self.counted | self.poison == self.batches.keys()
        assert not self.counted & self.poison


def test_round_ends_with_exactly_its_batches_in_any_order_of_events() -> None:
    run_state_machine_as_test(_AnyRound, settings=settings(stateful_step_count=40))
