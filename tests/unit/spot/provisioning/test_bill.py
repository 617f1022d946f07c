"""Cost of machines: exact for every order of prices and machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.machines import Offer
from common.spot.provisioning.bill import Bill, PriceCurve
from common.spot.theory.billing import BY_NAME, Billing, Preempted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from common.spot.provisioning.records import EndedBecause

HOUR_S = 3600.0
A, B = Offer("a"), Offer("b")
MINIMUM = {"a": Billing(minimum_s=60.0)}

times = st.integers(0, 5000).map(float)


class GivenPrice(NamedTuple):
    """A price as it was reported."""

    offer: Offer
    at_s: float
    usd_per_hour: float


class Ran(NamedTuple):
    """A machine. Without an end, it still runs."""

    offer: Offer
    started_s: float
    ended_s: float | None
    cause: EndedBecause


offers = st.builds(Offer, st.sampled_from("ab"), st.sampled_from(["", "x"]), st.just(""))
billings = st.builds(
    Billing,
    st.sampled_from(["second", "hour"]),
    st.sampled_from([0.0, 60.0]),
    st.sampled_from(["now", "hour_start"]),
    st.builds(Preempted, st.sampled_from([0.0, 300.0]), st.booleans()),
    st.sampled_from([HOUR_S, 60.0]),
)
prices = st.builds(GivenPrice, offers, times, st.integers(0, 100).map(float))
machines = st.builds(
    Ran,
    offers,
    times,
    st.none() | times,
    st.sampled_from(["preempted", "released", "failed", "lost"]),
)


def by_the_second(
    price_list: list[GivenPrice], ran: list[Ran], now_s: float, billing: Mapping[str, Billing]
) -> float:
    """Return the cost of these machines, added up second by second."""
    total = 0.0
    for machine in ran:
        rule = billing.get(machine.offer.pool, Billing())
        until_s = now_s
        if machine.ended_s is not None:
            gone_s = max(machine.ended_s, machine.started_s)
            if gone_s <= now_s:
                ran_s, preempted = gone_s - machine.started_s, machine.cause == "preempted"
                until_s = machine.started_s + float(rule.paid_s(ran_s, preempted=preempted))
        of_pool = Offer(machine.offer.pool)
        known = [price for price in price_list if price.offer == machine.offer]
        known = known or [price for price in price_list if price.offer == of_pool]
        for second in range(int(machine.started_s), int(until_s)):
            seen_s = second
            if rule.price == "hour_start":
                seen_s -= int(second - machine.started_s) % int(rule.hour_s)
            before = [price for price in known if price.at_s <= seen_s]
            if before:
                newest_s = max(price.at_s for price in before)
                total += [p.usd_per_hour for p in before if p.at_s == newest_s][-1] / HOUR_S
            elif known:
                first_s = min(price.at_s for price in known)
                total += [p.usd_per_hour for p in known if p.at_s == first_s][-1] / HOUR_S
    return total


@given(
    st.lists(prices, max_size=5),
    st.lists(machines, max_size=3),
    times,
    st.dictionaries(st.sampled_from("ab"), billings),
    st.randoms(use_true_random=False),
)
def test_bill_is_the_same_for_any_order_of_prices_and_machines(
    price_list: list[GivenPrice],
    ran: list[Ran],
    now_s: float,
    billing: dict[str, Billing],
    chance: Random,
) -> None:
    bill = Bill(billing)
    # Prices and machines arrive in any order, but each machine starts before it ends.
    waiting: list[tuple[int, int]] = [(0, n) for n in range(len(price_list))]
    waiting += [(1, n) for n in range(len(ran))]
    chance.shuffle(waiting)
    order = [price_list[n] for kind, n in waiting if kind == 0]
    for kind, n in waiting:
        if kind == 0:
            bill.price(*price_list[n])
        else:
            bill.started(n, ran[n].offer, ran[n].started_s)
            ended_s = ran[n].ended_s
            if ended_s is not None:
                bill.ended(n, ended_s, ran[n].cause)

    expected = by_the_second(order, ran, now_s, billing)
    assert bill.spent_usd(now_s) == pytest.approx(expected, abs=1e-9)


def test_late_price_changes_costs_already_summed() -> None:
    bill = Bill({})
    bill.price(A, 0.0, 3600.0)
    bill.started(1, A, 0.0)
    bill.ended(1, 10.0, "released")
    assert bill.spent_usd(20.0) == 10

    bill.price(A, 5.0, 7200.0)

    assert bill.spent_usd(20.0) == 15


def test_earliest_price_applies_to_machines_that_ended_before_it() -> None:
    bill = Bill({})
    bill.price(A, 100.0, 3600.0)
    bill.started(1, A, 0.0)
    bill.ended(1, 10.0, "released")
    assert bill.spent_usd(20.0) == 10

    bill.price(A, 50.0, 7200.0)

    assert bill.spent_usd(20.0) == 20


def test_end_without_a_start_costs_nothing() -> None:
    bill = Bill(MINIMUM)
    bill.price(A, 0.0, 3600.0)
    bill.ended(1, 10.0, "refused")

    assert bill.spent_usd(100.0) == 0


def test_price_curve_without_prices_costs_nothing() -> None:
    assert PriceCurve().cost_usd(0.0, 10.0) == 0


@pytest.mark.parametrize(
    ("cause", "until_s"), [("preempted", 10.0), ("released", 60.0), ("failed", 60.0)]
)
def test_only_a_preempted_machine_is_billed_without_the_minimum(
    cause: EndedBecause, until_s: float
) -> None:
    bill = Bill(MINIMUM)
    bill.price(A, 0.0, HOUR_S)
    for launch, ended_s in enumerate((10.0, 100.0)):
        bill.started(launch, A, 0.0)
        bill.ended(launch, ended_s, cause)

    assert bill.spent_usd(100.0) == until_s + 100.0


@pytest.mark.parametrize(
    ("billing", "lives", "usd"),
    [
        # Each life: (started, ended, cause). The first hour costs $0.158.
        ("ec2", [(0, 900, "preempted")], 0.0),
        ("ec2", [(0, 900, "released")], 0.0395),
        ("ec2", [(0, 30, "released")], 0.158 / 60),
        ("ec2", [(0, 5400, "preempted")], 0.237),
        ("ec2-2017", [(0, 900, "preempted")], 0.0),
        ("ec2-2017", [(0, 900, "released")], 0.158),
        ("ec2-2017", [(0, 5400, "preempted")], 0.158),
        # The second hour has its own price.
        ("ec2-2017", [(0, 5400, "failed")], 0.158 + 0.2),
        ("gce", [(0, 59, "preempted"), (0, 60, "preempted")], 0.158 / 60),
    ],
)
def test_bill_agrees_with_manual_calculation(
    billing: str, lives: list[tuple[float, float, EndedBecause]], usd: float
) -> None:
    bill = Bill({"a": BY_NAME[billing]})
    bill.price(A, 0.0, 0.158)
    bill.price(A, 3600.0, 0.2 if billing == "ec2-2017" else 0.158)
    for launch, (started_s, ended_s, cause) in enumerate(lives):
        bill.started(launch, A, started_s)
        bill.ended(launch, ended_s, cause)

    assert bill.spent_usd(10_000.0) == pytest.approx(usd)


def test_machines_of_a_pool_cost_the_price_of_their_type_and_zone() -> None:
    large, small = Offer("a", "c5.xlarge", "1a"), Offer("a", "c5.large", "1b")
    bill = Bill({})
    bill.price(A, 0.0, 0.05)
    bill.price(large, 0.0, 0.08)
    bill.price(Offer("a", "c5.large"), 0.0, 0.06)  # in any zone
    for launch, offer in enumerate((large, small, Offer("a", "m5.large", "1a"))):
        bill.started(launch, offer, 0.0)

    assert bill.spent_usd(3600.0) == pytest.approx(0.08 + 0.06 + 0.05)
