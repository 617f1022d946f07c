"""What machines cost: exact, in whatever order prices and machines are told of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.provisioning.costs import Bill, PriceCurve

if TYPE_CHECKING:
    from random import Random

    from common.provisioning.records import EndedBecause

HOUR_S = 3600.0
MINIMUM_S = {"a": 60.0}

times = st.integers(0, 1000).map(float)


class Told(NamedTuple):
    """A price, as it was told."""

    pool: str
    at_s: float
    usd_per_hour: float


class Ran(NamedTuple):
    """A machine; one without an end runs."""

    pool: str
    started_s: float
    ended_s: float | None
    cause: EndedBecause


prices = st.builds(Told, st.sampled_from("ab"), times, st.integers(0, 100).map(float))
machines = st.builds(
    Ran,
    st.sampled_from("ab"),
    times,
    st.none() | times,
    st.sampled_from(["preempted", "released", "failed", "lost"]),
)


def by_the_second(told: list[Told], ran: list[Ran], now_s: float) -> float:
    """The same sum, second by second, as slowly as one can."""
    total = 0.0
    for machine in ran:
        until_s = now_s
        if machine.ended_s is not None:
            gone_s = max(machine.ended_s, machine.started_s)
            if gone_s <= now_s:
                until_s = gone_s
                if machine.cause != "preempted":
                    until_s = max(gone_s, machine.started_s + MINIMUM_S.get(machine.pool, 0.0))
        of_pool = [price for price in told if price.pool == machine.pool]
        for second in range(int(machine.started_s), int(until_s)):
            before = [price for price in of_pool if price.at_s <= second]
            if before:
                newest_s = max(price.at_s for price in before)
                total += [p.usd_per_hour for p in before if p.at_s == newest_s][-1] / HOUR_S
            elif of_pool:
                first_s = min(price.at_s for price in of_pool)
                total += [p.usd_per_hour for p in of_pool if p.at_s == first_s][-1] / HOUR_S
    return total


@given(
    st.lists(prices, max_size=6),
    st.lists(machines, max_size=5),
    times,
    st.randoms(use_true_random=False),
)
def test_a_bill_is_the_sum_over_all_seconds_whatever_came_first(
    told: list[Told], ran: list[Ran], now_s: float, chance: Random
) -> None:
    bill = Bill(MINIMUM_S)
    # Prices and machines come in any order, but each machine starts before it ends.
    waiting: list[tuple[int, int]] = [(0, n) for n in range(len(told))]
    waiting += [(1, n) for n in range(len(ran))]
    chance.shuffle(waiting)
    order = [told[n] for kind, n in waiting if kind == 0]
    for kind, n in waiting:
        if kind == 0:
            bill.price(*told[n])
        else:
            bill.started(n, ran[n].pool, ran[n].started_s)
            ended_s = ran[n].ended_s
            if ended_s is not None:
                bill.ended(n, ended_s, ran[n].cause)

    assert bill.spent_usd(now_s) == pytest.approx(by_the_second(order, ran, now_s), abs=1e-9)


def test_a_price_of_the_past_changes_what_was_summed_already() -> None:
    bill = Bill({})
    bill.price("a", 0.0, 3600.0)
    bill.started(1, "a", 0.0)
    bill.ended(1, 10.0, "released")
    assert bill.spent_usd(20.0) == 10

    bill.price("a", 5.0, 7200.0)

    assert bill.spent_usd(20.0) == 15


def test_a_price_before_the_first_one_holds_for_what_ended_earlier_still() -> None:
    bill = Bill({})
    bill.price("a", 100.0, 3600.0)
    bill.started(1, "a", 0.0)
    bill.ended(1, 10.0, "released")
    assert bill.spent_usd(20.0) == 10

    bill.price("a", 50.0, 7200.0)

    assert bill.spent_usd(20.0) == 20


def test_an_end_without_a_start_costs_nothing() -> None:
    bill = Bill(MINIMUM_S)
    bill.price("a", 0.0, 3600.0)
    bill.ended(1, 10.0, "refused")

    assert bill.spent_usd(100.0) == 0


def test_a_curve_without_a_price_is_free() -> None:
    assert PriceCurve().cost_usd(0.0, 10.0) == 0


@pytest.mark.parametrize(
    ("cause", "until_s"), [("preempted", 10.0), ("released", 60.0), ("failed", 60.0)]
)
def test_what_the_provider_takes_back_is_paid_to_the_moment(
    cause: EndedBecause, until_s: float
) -> None:
    bill = Bill(MINIMUM_S)
    bill.price("a", 0.0, HOUR_S)
    for launch, ended_s in enumerate((10.0, 100.0)):
        bill.started(launch, "a", 0.0)
        bill.ended(launch, ended_s, cause)

    assert bill.spent_usd(100.0) == until_s + 100.0
