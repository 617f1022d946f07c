"""Choice of a rule: the first one that holds, kept long enough to avoid oscillation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from common.core import commands as do
from common.core import events
from common.core.job_completion import LOSS_WINDOW, Completion
from common.core.messages import Failed, Synchrony, UpdateApplied
from common.core.modes import FEWER, ModeSelector
from common.core.settings import CoordinatorSettings, Mode, RateSchedule, Rule
from common.core.snapshots import genesis
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import A, B, answer, gradient, of_kind, the
from tests.unit.core.test_leader import leading

if TYPE_CHECKING:
    from msgspec import UnsetType

    from common.core.settings import ScheduleKind

ROUNDS = 4
OWN = Mode(8)
MANY = Rule(Mode(8, staleness=1), workers_from=4)
IDLE = Rule(Mode(2, staleness=8, single_worker=True), busy_below=0.5)
SETTINGS = CoordinatorSettings(OWN, 16, rules=(MANY, IDLE), rule_rounds=ROUNDS)


class _Rounds:
    """Rounds that begin one after the other, with the times of their gradients."""

    def __init__(
        self, settings: CoordinatorSettings = SETTINGS, last: Synchrony | None = None
    ) -> None:
        self.modes = ModeSelector(settings, last)
        self.now = 0.0
        self.chosen = list[Mode]()

    def begin(self, live: int, *, busy: float = 1.0, count: int = 1) -> Mode:
        for _ in range(count):
            self.modes.pass_time(self.now, live)
            self.chosen.append(self.modes.mode(live))
            self.modes.begin(live)
            self.now += 1.0
            self.modes.computed(busy * live)
        return self.chosen[-1]


def test_first_rule_that_holds_is_chosen() -> None:
    assert _Rounds().begin(3) is OWN
    assert _Rounds().begin(4) is MANY.mode
    both = replace(SETTINGS, rules=(Rule(Mode(4), workers_from=2), MANY))
    assert _Rounds(both).begin(5) is both.rules[0].mode


def test_chosen_rule_is_kept_for_a_minimum_of_rounds() -> None:
    # live   3 3 3 3 | 4 4 4 4 | 3
    # rule   - - - -   M M M M   -       though four are there from the second round on
    rounds = _Rounds()
    rounds.begin(3)
    rounds.begin(4, count=ROUNDS - 1)
    rounds.begin(4)
    rounds.begin(3, count=ROUNDS)
    assert rounds.chosen == [*[OWN] * ROUNDS, *[MANY.mode] * ROUNDS, OWN]


def test_idle_workers_are_detected_after_a_minimum_of_rounds() -> None:
    rounds = _Rounds()
    assert rounds.begin(3, busy=0.4, count=ROUNDS) is OWN
    assert rounds.begin(3) is IDLE.mode


def test_time_without_batches_does_not_count_as_idle() -> None:
    rounds = _Rounds()
    for _ in range(2 * ROUNDS):
        rounds.begin(3, busy=0.9)
        rounds.modes.pass_time(rounds.now, 3)
        rounds.now += 100.0
        rounds.modes.pass_time(rounds.now, 0)
    assert rounds.modes.busy == pytest.approx(0.9)
    assert set(rounds.chosen) == {OWN}


def test_rule_for_idle_workers_is_kept_until_a_quarter_of_them_is_gone() -> None:
    rounds = _Rounds(replace(SETTINGS, rules=(IDLE,)))
    rounds.begin(16, busy=0.4, count=ROUNDS)
    assert rounds.begin(16, busy=0.95, count=100) is IDLE.mode
    assert rounds.begin(13, busy=0.95, count=100) is IDLE.mode
    assert rounds.begin(12) is OWN


def test_removed_rule_ends_at_once() -> None:
    rounds = _Rounds()
    assert rounds.begin(4) is MANY.mode
    rounds.modes.change(replace(SETTINGS, rules=(IDLE,)))
    assert rounds.begin(4) is OWN


def test_successor_continues_in_the_mode_of_the_last_update() -> None:
    # A successor does not know yet how many workers there are, nor how busy they are.
    rounds = _Rounds(last=Synchrony(2, 8, single_worker=True))
    assert rounds.begin(3, count=100) is IDLE.mode
    assert rounds.begin(2) is OWN
    # No rule has this mode any more.
    other = _Rounds(last=Synchrony(5))
    assert other.begin(4) is MANY.mode


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.0, 1.0), st.floats(0.0, 3.0)), max_size=120)
)
def test_rules_never_oscillate(steps: list[tuple[int, float, float]]) -> None:
    rounds = _Rounds()
    live_then = 0
    # Rounds begun since the newest choice.
    since = 0
    for live, busy, pause_s in steps:
        rounds.now += pause_s
        mode = rounds.begin(live, busy=busy)
        before = rounds.chosen[-2] if len(rounds.chosen) > 1 else mode
        if mode is not before:
            assert since >= ROUNDS
            assert before is not IDLE.mode or live <= FEWER * live_then
        if mode is not before or len(rounds.chosen) == 1:
            since, live_then = 0, live
        since += 1


# --- the leader -----------------------------------------------------------------------------------

TWO = Rule(Mode(1, staleness=2), workers_from=2)
BY_FLEET = changed(
    group_size=2, learning_rate=0.5, rules=(TWO,), rule_rounds=1, rate_by_group=True, bound=9
)


def updates(bench: Bench) -> list[tuple[int, float | None, UpdateApplied]]:
    """Return K, rate and record of each update."""
    applies = of_kind(bench.said, do.Apply)
    return [(len(a.update.batches), a.learning_rate, a.update) for a in applies]


def by_a_rule(settings: CoordinatorSettings) -> tuple[float | None, float | UnsetType]:
    """Return the rate and scale of an update by a rule, after one by the job's own mode."""
    bench = leading(settings, A)
    bench.announce(A, A, A)
    bench.compute()
    bench.see(A, B)
    bench.compute()
    (own, _, first), (group_size, rate, second) = updates(bench)
    assert (own, first.synchrony, first.scale) == (2, UNSET, UNSET)
    assert (group_size, second.synchrony) == (1, settings.rules[0].mode.synchrony())
    return rate, second.scale


def test_update_by_a_rule_records_its_mode_and_scales_its_step_by_k() -> None:
    assert by_a_rule(BY_FLEET) == (0.5, 0.5)


def test_step_of_a_rule_is_not_scaled_without_rate_by_group() -> None:
    assert by_a_rule(replace(BY_FLEET, rate_by_group=False)) == (0.5, UNSET)


def test_rule_may_set_its_own_learning_rate() -> None:
    named = replace(TWO, mode=replace(TWO.mode, learning_rate=0.125))
    assert by_a_rule(replace(BY_FLEET, rules=(named,))) == (0.125, UNSET)


def test_rule_is_not_damped() -> None:
    assert by_a_rule(changed(BY_FLEET, damped=True)) == (0.5, 0.5)


def test_incomplete_round_is_abandoned_when_its_rule_ends() -> None:
    # K=3 while three live: a0 b1 are counted, a2 has expired; two live, K=2
    three = Rule(Mode(3), workers_from=3)
    bench = leading(replace(QUIET, rules=(three,), rule_rounds=1))
    bench.announce(A, B, A)
    a, b = bench.orders
    both = [batch for batch in a.batches if batch.offset == 0]
    bench.feed(events.RepliesRead((Failed(A, bench.model, (0, 2), "unreadable"),)))
    bench.feed(events.RepliesRead((answer(b, bench.model), gradient(A, bench.model, both))))
    bench.feed(events.RepliesRead((Failed(B, bench.model, (2,), "expired"),)))
    assert of_kind(bench.said, do.Apply) == []
    bench.see(A, B)
    assert of_kind(bench.said, do.DiscardSum) == [do.DiscardSum(1)]
    update = the(bench.compute(), do.Apply).update
    assert sorted(batch.offset for batch in update.batches) == [0, 1]
    assert (update.synchrony, update.short) == (UNSET, "")


def test_update_limits_count_in_units_of_the_k_of_the_job() -> None:
    # By a rule, K is 1 instead of 2. Hot snapshots are at progress 1 and 2. The job ends at 2.
    # J          1    2    3    4
    # progress   0.5  1    1.5  2
    bench = leading(replace(BY_FLEET, stop_updates=2, hot_every_updates=1), A, B)
    bench.announce(A, A, A, A, A, A)
    while not bench.machine.finished:
        bench.compute()
        bench.read_updates()
    assert [update.progress for _, _, update in updates(bench)] == [0.5, 1.0, 1.5, 2.0]
    assert the(bench.said, do.Finish).reason == "2 updates applied"
    hot = [(snapshot.made.version, snapshot.progress) for snapshot in bench.published]
    assert hot == [(2, 1.0), (4, 2.0)]


def test_schedule_counts_in_units_of_the_k_of_the_job_across_a_takeover() -> None:
    # By a rule, K is 1 instead of 2. A successor starts from J=2 by the job's own K, because it has
    # not seen workers yet.
    # J                            1    2    3   │ 3: K=2, so twice the rate
    # progress before the update   0    0.5  1   │ 1
    schedule = RateSchedule("step", updates=1, factor=0.25)
    settings = replace(BY_FLEET, schedule=schedule, hot_every_updates=1)
    settings = replace(settings, mode=replace(settings.mode, learning_rate=1.0))
    one = leading(settings, A, B)
    one.announce(A, A, A, A)
    for _ in range(3):
        one.compute()
        one.read_updates()
    assert [update.rate for _, _, update in updates(one)] == [0.5, 0.5, 0.125]
    two = Bench(settings, updates=one.updates, control=one.control, name="c2")
    two.lead(one.published[-1])
    two.see(A, B)
    two.read_control()
    two.compute()
    assert [(size, update.rate) for size, _, update in updates(two)] == [(2, 0.25)]


@given(
    st.sampled_from(["constant", "step", "cosine", "inverse_sqrt"]),
    st.integers(0, 50),
    st.integers(1, 1000),
)
def test_schedule_rises_to_the_full_rate_and_never_falls_to_zero(
    kind: ScheduleKind, warmup: int, each: int
) -> None:
    schedule = RateSchedule(kind, warmup, each)
    shares = [schedule.share(float(progress)) for progress in range(warmup + 1)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    later = [schedule.share(warmup + each * n / 4) for n in (*range(50), 10**9)]
    assert later == sorted(later, reverse=True)
    assert 0 < later[-1] <= later[0] == 1.0


def test_schedule_matches_its_formula() -> None:
    assert RateSchedule("step", 2, 10, 0.5).share(31) == 0.25
    assert RateSchedule("cosine", 0, 10, final=0.2).share(5) == pytest.approx(0.6)
    assert RateSchedule("cosine", 0, 10, final=0.2).share(99) == pytest.approx(0.2)
    assert RateSchedule("inverse_sqrt", 5, 10).share(35) == 0.5
    assert [RateSchedule(warmup=4).share(done) for done in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]


@given(st.lists(st.tuples(st.integers(1, 12), st.floats(0.0, 9.0)), min_size=1, max_size=80))
def test_loss_window_counts_in_units_of_the_k_of_the_job(
    parts: list[tuple[int, float]],
) -> None:
    # Each part is a round: its number of batches and its loss. The job's own K is six.
    completion = Completion(QUIET, genesis({}))
    batches = list[float]()
    for size, loss in parts:
        completion.applied(UpdateApplied(1, 1, (), 1, loss), size / 6)
        batches += [loss] * size
    whole = len(batches) // 6
    assert len(completion.losses) == min(whole, LOSS_WINDOW)
    if whole <= LOSS_WINDOW:
        known = sum(completion.losses) * 6
        assert sum(batches[: whole * 6]) == pytest.approx(known, abs=9.0 * 12)


def test_successor_continues_with_the_rule_of_the_last_update() -> None:
    settings = replace(BY_FLEET, rule_rounds=9, hot_every_updates=1)
    one = leading(settings, A, B)
    one.announce(A, A)
    one.compute()
    # Each round is half an update of the job's own K.
    one.compute()
    one.read_updates()
    two = Bench(settings, updates=one.updates, control=one.control, name="c2")
    two.lead(one.published[-1])
    # Only one worker is alive.
    two.see(A)
    two.announce(A)
    two.compute()
    ((_, _, update),) = updates(two)
    assert update.synchrony == TWO.mode.synchrony()
