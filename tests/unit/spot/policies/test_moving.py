"""If streams move to the survivors, the fewest machines that keep up run, despite losses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.spot.machines import Offer
from common.spot.policies.policy import Decision, MachineCount, Situation
from common.spot.policies.pools import Pools
from common.spot.theory.capacity import update_capacity_per_s
from common.spot.theory.work import Pool, Work

ALONE = Pool("on-demand", 0.286, start_up_s=69.0)
SPOT = Pool("spot", 0.158, 0.9, 1000.0, start_up_s=87.0)
GROUP_SIZE, BATCH_SIZE, STREAMS, RATE_PER_S = 20, 256, 64, 125.0
INTERVAL_S = GROUP_SIZE * BATCH_SIZE / STREAMS / RATE_PER_S  # seconds per update: 0.64
POOLS = ALONE, SPOT
# Seconds per gradient. With FAST_S, one machine keeps up with arrivals. SLOW_S takes four machines.
FAST_S, SLOW_S = 0.025, 0.1
STEP_S, REVIEW_S = 2.0, 10.0
MAX_LAG_S = 180.0
EXAMPLES = 20  # each some hundred decisions


def left(seconds: float, slack_s: float = 320.0) -> Work:
    """Return work that arrives within this time, with this slack before the deadline."""
    rates = np.full(STREAMS, RATE_PER_S)
    return Work(rates, GROUP_SIZE, BATCH_SIZE, seconds / INTERVAL_S, seconds + slack_s)


def seen(
    job: Work,
    gradient_s: float = FAST_S,
    pools: tuple[Pool, ...] = POOLS,
    waiting: float | None = 0.0,
    now_s: float = 0.0,
    **machines: tuple[int, int],
) -> Situation:
    up = np.ones(job.workers, np.bool_)
    there = {
        Offer(name.replace("_", "-")): MachineCount(*counts) for name, counts in machines.items()
    }
    return Situation(now_s, job, pools, gradient_s, up, waiting, machines=there)


def asked(decision: Decision) -> dict[str, int]:
    return {offer.pool: count for offer, count in decision.machines.items()}


def policy(max_lag_s: float | None = MAX_LAG_S, reliable: int = 0) -> Pools:
    return Pools("reassign", max_lag_s=max_lag_s, reliable=reliable)


@pytest.mark.parametrize(("gradient_s", "machines"), [(FAST_S, 1), (SLOW_S, 4)])
def test_moving_policy_orders_as_many_spot_machines_as_keep_up(
    gradient_s: float, machines: int
) -> None:
    first = policy().reconsider(seen(left(6400), gradient_s), None)
    assert asked(first) == {"spot": machines}
    assert first.plan.feasible
    assert first.plan.expected_runtime_s == pytest.approx(6400, rel=0.02)


def test_lost_machine_is_awaited_while_a_replacement_can_be_in_time() -> None:
    first = policy().reconsider(seen(left(6400)), None)

    def at(lag_s: float, **machines: tuple[int, int]) -> dict[str, int]:
        situation = seen(left(3000), FAST_S, POOLS, lag_s / INTERVAL_S, 0.0, **machines)
        return asked(policy().reconsider(situation, first))

    assert at(50, spot=(0, 1)) == {"spot": 1}
    assert at(100, spot=(0, 1)) == {"spot": 1, "on-demand": 1}
    # Both machines run until the lag is short enough to tolerate the loss of the spot machine.
    assert at(150, spot=(1, 0), on_demand=(1, 0)) == {"spot": 1, "on-demand": 1}
    assert at(50, spot=(1, 0), on_demand=(1, 0)) == {"spot": 1}
    assert at(50, spot=(0, 1), on_demand=(1, 0)) == {"spot": 1, "on-demand": 1}


def test_spot_is_replaced_by_on_demand_if_no_loss_is_tolerable() -> None:
    first = policy(60.0).reconsider(seen(left(6400)), None)
    assert asked(first) == {"on-demand": 1}
    coming = seen(left(3000), spot=(1, 0), on_demand=(0, 1))
    assert asked(policy(60.0).reconsider(coming, first)) == {"spot": 1, "on-demand": 1}
    ready = seen(left(3000), spot=(1, 0), on_demand=(1, 0))
    assert asked(policy(60.0).reconsider(ready, first)) == {"on-demand": 1}


def test_machines_are_on_demand_near_the_end_without_time_for_a_loss() -> None:
    first = policy().reconsider(seen(left(6400)), None)
    late = policy().reconsider(seen(left(100, slack_s=40), spot=(1, 0)), first)
    early = policy().reconsider(seen(left(3000, slack_s=40), spot=(1, 0)), first)
    assert (asked(late), asked(early)) == ({"spot": 1, "on-demand": 1}, {"spot": 1})


def test_excessive_lag_is_worked_off_by_more_machines() -> None:
    waiting = (MAX_LAG_S + 2 * 900.0) / INTERVAL_S
    more = policy().reconsider(seen(left(6400), waiting=waiting), None)
    capacity = update_capacity_per_s(np.array([float(more.spot)]), GROUP_SIZE, FAST_S)
    assert float(capacity[0]) * INTERVAL_S >= 3.0
    assert asked(policy(None).reconsider(seen(left(6400), waiting=waiting), None)) == {"spot": 1}


def test_arrived_backlog_is_worked_off_by_the_deadline() -> None:
    job = replace(left(6400), deadline_s=1000.0)
    late = policy(None).reconsider(seen(job), None)
    assert (late.plan.feasible, late.plan.binding) == (False, "infeasible")
    soon = policy(None).reconsider(seen(job, waiting=job.updates), None)
    assert soon.plan.feasible
    assert soon.spot > 6


def test_late_job_keeps_its_machines_and_orders_missing_ones_on_demand() -> None:
    first = policy().reconsider(seen(left(6400), SLOW_S), None)
    job = left(3000, slack_s=-2800)
    now = seen(job, SLOW_S, waiting=job.updates, spot=(3, 1), on_demand=(1, 0))
    late = policy().reconsider(now, first)
    assert asked(late) == {"spot": 4, "on-demand": GROUP_SIZE - 4}
    assert (late.plan.feasible, late.plan.binding) == (False, "infeasible")
    assert late.reason.startswith("too late for the deadline, as soon as possible")
    refusing = replace(now, refusing=frozenset({"on-demand"}))
    assert asked(policy().reconsider(refusing, late)) == {"spot": GROUP_SIZE - 1, "on-demand": 1}
    # Nothing moves later, when less work is left than all machines can do.
    end = left(20, slack_s=-19)
    there = seen(end, SLOW_S, waiting=end.updates, spot=(4, 0), on_demand=(16, 0))
    assert asked(policy().reconsider(there, late)) == asked(late)


def test_no_spot_machine_is_ordered_in_place_of_an_on_demand_one_that_starts() -> None:
    first = policy(60.0).reconsider(seen(left(6400)), None)
    assert asked(first) == {"on-demand": 1}
    starts = seen(left(6300), on_demand=(0, 1))
    assert asked(policy(60.0).reconsider(starts, first)) == {"on-demand": 1}


def test_gradients_too_slow_for_any_fleet_make_the_plan_infeasible() -> None:
    slow = policy().reconsider(seen(left(6400), 1.0), None)
    assert (slow.plan.feasible, slow.on_demand) == (False, GROUP_SIZE)


def test_reliable_machines_replace_spot_machines() -> None:
    assert asked(policy(reliable=1).reconsider(seen(left(6400), SLOW_S), None)) == {
        "spot": 3,
        "on-demand": 1,
    }
    assert asked(policy().reconsider(seen(left(6400), pools=(ALONE,)), None)) == {"on-demand": 1}


def test_faster_machines_are_ordered_in_smaller_numbers() -> None:
    fast = replace(SPOT, name="fast", speed=2.0)
    assert asked(policy().reconsider(seen(left(6400), SLOW_S, (ALONE, fast)), None)) == {"fast": 2}
    first = policy().reconsider(seen(left(6400), SLOW_S), None)
    mixed = seen(left(6400), SLOW_S, (ALONE, fast, SPOT), spot=(2, 0))
    assert asked(policy().reconsider(mixed, first)) == {"spot": 2, "fast": 1}


@dataclass
class SimulatedJob:
    """A job of a fixed length, with machines that start up, and are lost at given times."""

    gradient_s: float
    max_lag_s: float | None
    slack_s: float
    length_s: float = 2000.0
    starting: dict[str, list[float]] = field(default_factory=lambda: {"spot": [], "on-demand": []})
    ready: dict[str, int] = field(default_factory=lambda: {"spot": 0, "on-demand": 0})
    worst_lag_s: float = 0.0

    def run(self, losses_s: list[tuple[float, int]]) -> float:
        """Lose these numbers of spot machines at these times. Returns when the work is done."""
        rule, last, now_s, arrived, made = policy(self.max_lag_s), None, 0.0, 0.0, 0.0
        known: dict[str, tuple[int, int]] = {}
        updates, losses = self.length_s / INTERVAL_S, sorted(losses_s)
        while made < updates and now_s < 3 * self.length_s:
            job = replace(
                left(self.length_s),
                updates=updates - made,
                deadline_s=max(self.length_s + self.slack_s - now_s, 0.0),
            )
            self._start(now_s)
            counts = {
                pool: (self.ready[pool], len(self.starting[pool])) for pool in ("spot", "on-demand")
            }
            machines = {pool.replace("-", "_"): each for pool, each in counts.items()}
            if counts != known or now_s % REVIEW_S == 0:
                situation = seen(job, self.gradient_s, POOLS, arrived - made, now_s, **machines)
                last = rule.reconsider(situation, last)
                self._follow(asked(last), now_s)
                known = {pool: (self.ready[pool], len(self.starting[pool])) for pool in counts}
            if losses and losses[0][0] <= now_s:
                _, lost = losses.pop(0)
                self.starting["spot"] = self.starting["spot"][max(lost - self.ready["spot"], 0) :]
                self.ready["spot"] = max(self.ready["spot"] - lost, 0)
            arrived = min(arrived + STEP_S / INTERVAL_S, updates)
            works = np.array([float(sum(self.ready.values()))])
            capacity = float(update_capacity_per_s(works, GROUP_SIZE, self.gradient_s)[0])
            made = min(made + capacity * STEP_S, arrived)
            if arrived < updates:
                self.worst_lag_s = max(self.worst_lag_s, (arrived - made) * INTERVAL_S)
            now_s += STEP_S
        return now_s

    def _start(self, now_s: float) -> None:
        for pool, starting in self.starting.items():
            self.starting[pool] = [at_s for at_s in starting if at_s > now_s]
            self.ready[pool] += len(starting) - len(self.starting[pool])

    def _follow(self, wanted: dict[str, int], now_s: float) -> None:
        for pool, start_up_s in (("spot", SPOT.start_up_s), ("on-demand", ALONE.start_up_s)):
            there = self.ready[pool] + len(self.starting[pool])
            for _ in range(wanted.get(pool, 0) - there):
                self.starting[pool].append(now_s + start_up_s * (now_s > 0))
            for _ in range(there - wanted.get(pool, 0)):
                if self.starting[pool]:
                    self.starting[pool].pop()
                else:
                    self.ready[pool] -= 1


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from([FAST_S, SLOW_S]),
    st.floats(100.0, 400.0),
    st.lists(st.tuples(st.floats(0.0, 2000.0), st.integers(1, 5)), max_size=16),
)
def test_lag_stays_within_its_maximum_under_any_spot_losses(
    gradient_s: float, max_lag_s: float, losses_s: list[tuple[float, int]]
) -> None:
    simulated = SimulatedJob(gradient_s, max_lag_s, slack_s=1000.0)
    simulated.run(losses_s)
    assert simulated.worst_lag_s <= max_lag_s


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from([FAST_S, SLOW_S]),
    st.floats(20.0, 400.0),
    st.lists(st.tuples(st.floats(0.0, 2000.0), st.integers(1, 5)), max_size=16),
)
# The work is 4 s late, with losses in mid-run and one more shortly before the end.
@example(
    SLOW_S,
    20.0,
    [(70.0, 2), (240.0, 4), (490.0, 3), (500.0, 3), (1569.3, 4), (1570.0, 1), (1960.0, 5)],
)
def test_deadline_is_met_under_any_spot_losses(
    gradient_s: float, slack_s: float, losses_s: list[tuple[float, int]]
) -> None:
    """The job may be late if its slack is shorter than the replacement of a lost machine."""
    simulated = SimulatedJob(gradient_s, None, slack_s)
    replaced_s = REVIEW_S + ALONE.start_up_s
    assert simulated.run(losses_s) <= simulated.length_s + max(slack_s, replaced_s)
