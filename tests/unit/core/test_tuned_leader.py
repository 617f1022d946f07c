"""A leader whose K is tuned: its orders, its changes of K, and its updates' records."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import UNSET, structs

from common.core import commands as do
from common.core import events
from common.core.messages import ModelId, Synchrony
from common.core.modes import rate_scale
from common.core.settings import Mode, Rule
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import SAMPLES, A, B, answer, of_kind, the
from tests.unit.core.test_leader import leading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.core.messages import UpdateApplied

ROUNDS = 3
# Noise scale in batches. It is below the smallest K, so the tuner lowers K to 2.
NOISE = 1.0
TUNED = replace(
    QUIET,
    mode=Mode(4, learning_rate=0.5),
    bound=16,
    rule_rounds=ROUNDS,
    rate_by_group=True,
    group_sizes=(2, 8),
    hot_every_updates=1,
)


def square(batches: int, noise: float = NOISE) -> float:
    """Return the expected squared norm of the sum of this many batches' gradients, for |G| = 1."""
    samples = batches * SAMPLES
    return samples**2 + samples * noise * SAMPLES


def step(
    bench: Bench,
    batches: int = 4,
    *,
    says: bool = True,
    measured: bool = True,
    noise: float = NOISE,
) -> UpdateApplied:
    """Let two workers compute a round, and report the squared norm of its sum.

    Args:
        bench: The leader.
        batches: Batches that the workers claim first.
        says: False if the workers send no squared norms of their gradients.
        measured: False if the squared norm of the sum is not reported.
        noise: Noise scale in batches.
    """
    bench.announce(*[A, B] * (batches // 2))
    said = bench.feed(
        events.RepliesRead(
            tuple(
                structs.replace(
                    answer(order, bench.model),
                    square=square(len(order.batches), noise) if says else UNSET,
                )
                for order in bench.orders
            )
        )
    )
    apply = the(said, do.Apply)
    if apply.measured and measured:
        model = ModelId(apply.update.epoch, apply.update.version)
        bench.feed(events.Summed(model, square(len(apply.update.batches), noise)))
    return apply.update


def sizes(updates: Sequence[UpdateApplied]) -> list[int]:
    return [len(update.batches) for update in updates]


def moved() -> Bench:
    """Return a leader whose K was tuned from 4 to 2."""
    bench = leading(TUNED, A, B)
    assert sizes([step(bench) for _ in range(ROUNDS)]) == [4] * ROUNDS
    return bench


def test_tuner_sets_k_once_the_noise_is_known_and_the_update_records_it() -> None:
    bench = moved()
    update = step(bench, 2)
    assert update.synchrony == Synchrony(2)
    assert update.scale == pytest.approx(rate_scale(2, 4, NOISE))
    assert of_kind(bench.said, do.Apply)[-1].learning_rate == 0.5


def test_learning_rate_does_not_follow_k_without_rate_by_group() -> None:
    bench = leading(replace(TUNED, rate_by_group=False), A, B)
    for _ in range(ROUNDS):
        step(bench)
    assert step(bench, 2).scale is UNSET


def test_squared_gradients_are_requested_only_for_a_tuned_job() -> None:
    for settings, squared in ((TUNED, True), (replace(TUNED, group_sizes=None), False)):
        bench = leading(settings, A, B)
        bench.announce(A, B, A, B)
        assert {order.squared for order in bench.orders} == {squared}
        assert the(bench.compute(), do.Apply).measured is squared


def test_k_moves_at_once_if_enough_batches_wait() -> None:
    bench = leading(TUNED, A, B)
    for _ in range(ROUNDS - 1):
        step(bench)
    # Together with the four batches of `step`, these are two more than a round takes.
    bench.announce(A, B)
    assert step(bench).version == ROUNDS
    assert sum(len(order.batches) for order in bench.orders) == 2


def test_repeated_or_foreign_sum_does_not_count() -> None:
    bench = leading(TUNED, A, B)
    for _ in range(ROUNDS - 1):
        update = step(bench)
    last = ModelId(update.epoch, update.version)
    waiting = step(bench, measured=False)
    assert bench.machine.leader is not None
    for model in (last, last._replace(version=99), ModelId(update.epoch + 1, waiting.version)):
        bench.feed(events.Summed(model, square(4)))
        assert bench.machine.leader.mode == TUNED.mode
    bench.feed(events.Summed(ModelId(waiting.epoch, waiting.version), square(4)))
    assert bench.machine.leader.mode.group_size == 2


def test_k_does_not_move_without_squares_from_workers() -> None:
    bench = leading(TUNED, A, B)
    assert sizes([step(bench, says=False) for _ in range(2 * ROUNDS)]) == [4] * 2 * ROUNDS


def test_tuner_waits_while_a_rule_holds() -> None:
    many = Rule(Mode(4, staleness=1), workers_from=2)
    bench = leading(replace(TUNED, rules=(many,)), A, B)
    for _ in range(2 * ROUNDS):
        step(bench)
    assert bench.machine.leader is not None
    assert bench.machine.leader.mode == many.mode
    assert {apply.measured for apply in of_kind(bench.said, do.Apply)} == {False}


def test_successor_continues_with_k_of_the_last_update_and_measures_again() -> None:
    one = moved()
    step(one, 2)
    one.read_updates()
    two = Bench(TUNED, updates=one.updates, control=one.control, name="c2")
    two.lead(one.published[-1])
    two.see(A, B)
    update = step(two, 2, noise=100.0)
    assert update.synchrony == Synchrony(2)
    # K' / K, because the noise is still unknown.
    assert update.scale == 0.5
    for _ in range(ROUNDS - 1):
        step(two, 2, noise=100.0)
    assert sizes([step(two, 4, noise=100.0)]) == [4]


def test_successor_tunes_from_the_k_of_the_job_when_a_rule_ends() -> None:
    many = Rule(Mode(2, staleness=1), workers_from=2)
    settings = replace(TUNED, rules=(many,))
    one = leading(settings, A, B)
    # Together, the rounds have the batches of one update of the job's own K.
    for _ in range(2):
        assert step(one, 2).synchrony == many.mode.synchrony()
        one.read_updates()
    two = Bench(settings, updates=one.updates, control=one.control, name="c2")
    two.lead(one.published[-1])
    # The rule has too few workers and ends after its minimum time.
    two.see(A)
    leader = two.machine.leader
    assert leader is not None
    for _ in range(ROUNDS - 1):
        assert leader.mode == many.mode
        step(two, 2)
    assert leader.mode == settings.mode


def test_change_of_k_or_its_bounds_restarts_the_tuner() -> None:
    for settings in (changed(TUNED, group_size=6), replace(TUNED, group_sizes=(4, 8))):
        bench = moved()
        bench.feed(events.SettingsChanged(replace(settings, revision=1)))
        assert bench.machine.leader is not None
        assert bench.machine.leader.mode == settings.mode
    bench = moved()
    bench.feed(events.SettingsChanged(replace(TUNED, revision=1, stop_updates=99)))
    assert bench.machine.leader is not None
    assert bench.machine.leader.mode.group_size == 2
