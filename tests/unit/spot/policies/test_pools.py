"""Numbers of machines over several pools: orders as machines come and go, and reassignments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.machines import Offer
from common.spot.policies.policy import Decision, MachineCount, Situation
from common.spot.policies.pools import Pools, expected_serving
from common.spot.policies.spot import ready_usd_per_s
from common.spot.theory.billing import BY_NAME
from common.spot.theory.preemption import distribution_of_running
from common.spot.theory.work import Pool, Work

ON_DEMAND_POOL = Pool("on-demand", 0.286)
ALONE = Offer("on-demand")
A, B = Pool("a", 0.1, 0.9), Pool("b", 0.11, 0.9)
GRADIENT_S = 0.001
STREAMS = 10


def work(rates: list[float], factor: float = 1.05) -> Work:
    job = Work(np.array(rates), 4, 16, 100, 1.0)
    return replace(job, deadline_s=factor * job.undisturbed_s)


def seen(
    job: Work,
    pools: tuple[Pool, ...],
    now_s: float = 0.0,
    machines: dict[str, tuple[int, int]] | None = None,
) -> Situation:
    up = np.ones(job.workers, np.bool_)
    there = {Offer(name): MachineCount(*counts) for name, counts in (machines or {}).items()}
    return Situation(now_s, job, pools, GRADIENT_S, up, machines=there)


def hours(left_s: float, deadline_s: float) -> Work:
    """Return work of ten streams that takes this time without interruptions."""
    job = work([100.0] * STREAMS)
    return replace(job, updates=left_s * job.updates_per_s, deadline_s=deadline_s)


def asked(decision: Decision) -> dict[str, int]:
    return {offer.pool: count for offer, count in decision.machines.items()}


def decide(
    job: Work, last: Decision | None = None, *pools: Pool, **machines: tuple[int, int]
) -> Decision:
    given = {name.replace("on_demand", "on-demand"): counts for name, counts in machines.items()}
    situation = seen(job, (ON_DEMAND_POOL, *(pools or (A, B))), 0.0, given)
    return Pools().reconsider(situation, last)


PLENTY, ENOUGH = hours(3600, 7200), hours(3600, 3800)


@given(st.integers(1, 80), st.floats(0.02, 1.0), st.integers(1, 64), st.integers(0, 20))
def test_expected_serving_approximates_the_binomial_distribution(
    machines: int, share: float, streams: int, certain: int
) -> None:
    law = distribution_of_running(machines, share)
    exact = law @ np.minimum(np.arange(machines + 1) + certain, streams)
    assert expected_serving(machines, share, streams, certain) == pytest.approx(exact, abs=0.12)


def test_first_machines_are_of_the_pool_with_the_cheapest_ready_second() -> None:
    first = decide(PLENTY)
    assert asked(first) == {"a": STREAMS}
    assert first.counted
    assert first.plan.feasible
    slow = replace(A, start_up_s=300.0)
    assert asked(decide(PLENTY, None, slow, B)) == {"b": STREAMS}
    short_lives = replace(A, start_up_s=60.0, cycle_s=100.0), replace(B, start_up_s=60.0)
    assert asked(decide(PLENTY, None, *short_lives)).keys() == {"b"}


def test_ready_usd_per_s_includes_start_up_billing_and_speed() -> None:
    pool = Pool("p", 3.6, 0.5, 1800.0, 2.0, start_up_s=90.0, billing=BY_NAME["ec2"])
    paid = pool.billing.paid_share(900.0)
    assert ready_usd_per_s(pool) == pytest.approx(0.001 * paid * np.exp(0.1) / 2)
    assert ready_usd_per_s(replace(pool, availability=0.0)) == np.inf
    assert ready_usd_per_s(Pool("p", 3.6)) == pytest.approx(0.001)


def test_decision_stays_while_all_machines_run() -> None:
    first = decide(PLENTY)
    assert decide(PLENTY, first, a=(10, 0), b=(0, 0)) is first


def test_spot_machines_exceed_streams_if_some_are_always_starting() -> None:
    starting = replace(A, start_up_s=100.0), replace(B, start_up_s=100.0)
    more = asked(decide(hours(36_000, 37_500), None, *starting))
    assert 10 < more["a"] <= 15


def test_lost_machine_is_ordered_in_another_pool_immediately() -> None:
    first = decide(PLENTY)
    assert asked(decide(PLENTY, first, a=(7, 0), b=(0, 0))) == {"a": 7, "b": 3}


def test_pools_are_tried_in_turn_and_then_all_at_once() -> None:
    pools = A, B, Pool("c", 0.12, 0.9)
    none = {"a": (0, 0), "b": (0, 0), "c": (0, 0)}
    first = decide(PLENTY, None, *pools)
    second = decide(PLENTY, first, *pools, **none)
    third = decide(PLENTY, second, *pools, **none)
    everywhere = decide(PLENTY, third, *pools, **none)
    # One order stays in each pool without capacity. It succeeds once the pool has capacity again.
    assert asked(second) == {"a": 1, "b": 10}
    assert asked(third) == {"a": 1, "b": 1, "c": 10}
    assert asked(everywhere) == {"a": 10, "b": 10, "c": 10}
    # Two pools have capacity again: the machines of the more expensive one are released.
    assert asked(decide(PLENTY, everywhere, *pools, a=(0, 0), b=(0, 10), c=(0, 10))) == {"b": 10}


def test_surplus_machines_are_released_most_expensive_first() -> None:
    first = decide(PLENTY)
    assert asked(decide(PLENTY, first, a=(8, 0), b=(3, 2))) == {"a": 8, "b": 2}


def test_on_demand_substitutes_are_only_for_completely_lost_pools() -> None:
    soon_lost = tuple(replace(pool, cycle_s=600.0, start_up_s=80.0) for pool in (A, B))
    job = hours(3600, 3740)
    first = decide(job, None, *soon_lost)
    both = replace(first, machines={Offer("a"): 8, Offer("b"): 8})
    some_of_each = decide(job, both, *soon_lost, a=(4, 0), b=(4, 0), on_demand=(0, 0))
    one_of_them = decide(job, both, *soon_lost, a=(8, 0), b=(0, 0), on_demand=(0, 0))
    assert (some_of_each.on_demand, one_of_them.on_demand) == (0, 2)


def test_pools_of_equal_price_share_machines() -> None:
    alike = A, replace(A, name="b"), replace(A, name="c")
    first = decide(PLENTY, None, *alike)
    assert asked(first) == {"a": 4, "b": 3, "c": 3}
    lost = decide(PLENTY, first, *alike, a=(4, 0), b=(0, 0), c=(3, 0))
    assert asked(lost) == {"a": 6, "b": 1, "c": 4}


def test_orders_are_limited_by_the_capacity_of_a_pool() -> None:
    small = replace(A, capacity=4)
    first = decide(PLENTY, None, small, B)
    assert asked(first) == {"a": 4}
    assert asked(decide(PLENTY, first, small, B, a=(4, 0), b=(0, 0))) == {"a": 4, "b": 6}


def test_on_demand_machines_are_added_if_spot_misses_the_deadline() -> None:
    scarce = Pool("a", 0.1, 0.4)
    first = decide(ENOUGH, None, scarce)
    later = decide(ENOUGH, first, scarce, a=(6, 0), on_demand=(0, 0))
    assert asked(later)["a"] == 15
    assert 2 <= asked(later)["on-demand"] <= 8
    assert decide(PLENTY, later, scarce, a=(6, 0), on_demand=(3, 0)).on_demand == 0


def test_job_without_machines_waits_for_spot_while_time_allows() -> None:
    gone, job = {"a": (0, 0)}, hours(3600, 20_000)
    first = decide(job, None, A)
    assert asked(decide(job, first, A, **gone)) == {"a": 10} == asked(first)
    late = hours(3600, 3650)
    assert decide(late, first, A, **gone).on_demand == STREAMS
    # On-demand substitutes stay until spot machines are ready. Orders do not suffice.
    stands_in = decide(late, first, A, **gone)
    comes = decide(hours(3500, 4000), stands_in, A, a=(0, 10), on_demand=(10, 0))
    works = decide(hours(3500, 4000), comes, A, a=(10, 0), on_demand=(10, 0))
    assert (comes.on_demand, works.on_demand) == (10, 0)


def test_on_demand_machines_increase_as_the_reserve_runs_out() -> None:
    starting = replace(ON_DEMAND_POOL, start_up_s=90.0), A
    policy, there = Pools(), {"a": (10, 0), "on-demand": (0, 0)}
    on_demand = [
        policy.reconsider(
            seen(hours(3600, 3600 + slack_s), starting, machines=there), None
        ).on_demand
        for slack_s in (200, 90, 60, 20, -1)
    ]
    assert on_demand[0] == 0
    assert on_demand == sorted(on_demand)
    assert on_demand[-1] == STREAMS


def test_on_demand_substitutes_stay_until_spot_machines_are_ready() -> None:
    lost, first = {"a": (0, 0)}, decide(PLENTY, None, A)
    stands_in = decide(hours(3600, 3650), first, A, **lost)
    assert stands_in.on_demand == STREAMS
    # Substitutes stay, although less work means fewer losses to come. If they were released, they
    # would be ordered again a moment later.
    there = {"on_demand": (10, 0)}
    assert decide(hours(10, 5000), stands_in, A, **lost, **there).on_demand == STREAMS
    assert decide(hours(10, 5000), stands_in, A, a=(7, 3), **there).on_demand == 3
    assert decide(hours(10, 5000), stands_in, A, a=(10, 0), **there).on_demand == 0


def test_reserve_covers_more_losses_than_expected() -> None:
    # Machines live for an hour on average, so ten losses are expected in ten hours of work. The
    # reserve covers twenty.
    hourly = replace(A, availability=0.5, cycle_s=7200.0)
    starting = replace(ON_DEMAND_POOL, start_up_s=69.0), hourly
    first = Pools().reconsider(seen(hours(36_000, 40_000), starting), None)
    for losses, on_demand in ((15, STREAMS), (22, 0)):
        job = hours(36_000, 36_000 + losses * 79)
        situation = seen(job, starting, machines={"a": (0, 0)})
        assert Pools().reconsider(situation, first).on_demand == on_demand


def test_refused_on_demand_order_makes_the_plan_infeasible_until_filled() -> None:
    job, lost = hours(3600, 3615), {"a": (0, 0)}
    first = decide(PLENTY, None, A)
    wanted = decide(job, first, A, **lost, on_demand=(0, 0))
    refused = decide(job, wanted, A, **lost, on_demand=(3, 0))
    given = decide(job, refused, A, **lost, on_demand=(3, 7))
    assert [each.plan.feasible for each in (wanted, refused, given)] == [True, False, True]
    assert "too few machines" in refused.reason
    assert asked(refused) == asked(wanted)


def test_pool_that_is_too_expensive_or_too_slow_is_not_used() -> None:
    dear, slow = Pool("a", 0.3, 0.9), Pool("a", 0.01, 0.9, speed=1e-5)
    assert asked(decide(PLENTY, None, dear)) == {"on-demand": STREAMS}
    assert asked(decide(PLENTY, None, slow)) == {"on-demand": STREAMS}
    assert asked(Pools().reconsider(seen(PLENTY, (ON_DEMAND_POOL,)), None)) == {"on-demand": 10}


def test_unreachable_deadline_makes_the_plan_infeasible() -> None:
    late = decide(hours(3600, 3500), None, A)
    assert (late.plan.feasible, late.plan.binding) == (False, "infeasible")
    assert late.on_demand == STREAMS


def test_lagging_stream_gets_on_demand_only_when_needed_for_max_lag() -> None:
    pools = replace(ON_DEMAND_POOL, start_up_s=69.0), A
    policy, job = Pools(max_lag_s=300.0), hours(3600, 7200)

    def on_demand(
        waits_s: list[float],
        alone: tuple[int, int] = (0, 0),
        left: Work = job,
        behind_s: float = 0.0,
    ) -> int:
        served = STREAMS - len(waits_s)
        there = {"a": (served - alone[0], 0), "on-demand": alone}
        lag_s = np.array([*waits_s, behind_s, *[0.0] * (served - 1)])
        up = np.arange(STREAMS) >= len(waits_s)
        situation = replace(seen(left, pools, 0.0, there), lag_s=lag_s, up=up)
        decision = policy.reconsider(situation, first)
        assert asked(decision)["a"] == STREAMS
        return decision.on_demand

    first = policy.reconsider(replace(seen(job, pools), lag_s=np.zeros(STREAMS)), None)
    assert first.on_demand == 0
    assert on_demand([200.0, 100.0]) == 0
    assert on_demand([215.0, 100.0]) == 1
    assert on_demand([215.0, 100.0], (0, 1)) == 1
    assert on_demand([215.0, 100.0], (1, 0)) == 2  # it serves another stream
    assert on_demand([], (1, 0)) == 1
    assert on_demand([100.0], (1, 0), behind_s=215.0) == 1
    assert on_demand([], (1, 0), behind_s=215.0) == 1  # some lag remains
    assert on_demand([100.0, 100.0], left=hours(60, 80)) == 2  # the deadline bounds it, too


def test_reliable_machines_are_always_on_demand() -> None:
    situation = seen(PLENTY, (ON_DEMAND_POOL, A))
    assert asked(Pools(reliable=2).reconsider(situation, None)) == {"a": 10, "on-demand": 2}
