"""The fold of the plans topic: which records count, what runs, and its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.thinned_samples import Thinned
from common.spot.machines import Offer
from common.spot.policies.policy import Hour
from common.spot.provisioning.fleet_ledger import PLANS_KEPT, REPLANS_KEPT, FleetLedger
from common.spot.provisioning.records import (
    LaunchRequested,
    OfferPrice,
    Planned,
    Priced,
    ReplanAsked,
    Reviewed,
    Settled,
    Started,
)
from common.spot.theory.billing import Billing
from tests.unit.spot.provisioning.examples import (
    PRICES,
    T0,
    ended,
    fold,
    lead,
    ordered,
    planned,
    priced,
    started,
)

if TYPE_CHECKING:
    from common.spot.provisioning.records import PlanRecord


def review(at_s: float, term: int = 0) -> Reviewed:
    return Reviewed(term, at_s, 0, 0.0, 0, 0, 0.0, 0.0, 1.0, {})


def settled(term: int = 0) -> Settled:
    return Settled(term, T0, "done", 1.0, 2.0, None)


def test_records_of_a_former_term_are_void() -> None:
    # offset   0          1          2          3          4
    # record   Lead(-1)  Ordered 1  Lead(0)   Ordered 2  Ordered 2
    #          c1        of 0       c2        of 0       of 2
    ledger = fold(
        [lead(), ordered(1), lead(0, "c2"), ordered(2, slot=1), ordered(2, term=2, slot=2)]
    )

    assert (ledger.term, ledger.head, ledger.position) == (2, 2, 5)
    assert [(rented.launch, rented.slot) for rented in ledger.open] == [(1, 0), (2, 2)]


def test_first_of_two_candidates_counts() -> None:
    ledger = fold([lead(), lead(-1, "c2")])

    assert ledger.term == 0


def test_launches_are_numbered_without_gaps_and_count_once() -> None:
    ledger = fold([lead()])

    assert not ledger.feed(1, ordered(2))
    assert ledger.feed(2, ordered(1, slot=3))
    assert not ledger.feed(3, ordered(1, slot=0))
    assert ledger.feed(4, ordered(2))
    assert {n: rented.slot for n, rented in ledger.machines.items()} == {1: 3, 2: 0}


def test_machine_starts_once_and_ends_once() -> None:
    ledger = fold([lead(), ordered(1)])

    assert not ledger.feed(2, started(7))
    assert ledger.feed(3, started(1, T0 + 1))
    assert not ledger.feed(4, started(1, T0 + 2))
    assert [rented.machine for rented in ledger.running] == ["m-1"]
    assert ledger.feed(5, ended(1, T0 + 5, "preempted"))
    assert not ledger.feed(6, ended(1, T0 + 9))
    assert not ledger.feed(7, started(1))
    rented = ledger.machines[1]
    assert (rented.started_s, rented.ended_s, rented.cause) == (T0 + 1, T0 + 5, "preempted")
    assert not ledger.open


def test_refused_order_costs_nothing() -> None:
    ledger = fold([lead(), priced(), ordered(1), ended(1, T0, "refused")])

    assert not ledger.open
    assert ledger.spent_usd(T0 + 3600) == 0


def test_plans_are_numbered_and_only_the_last_are_kept() -> None:
    ledger = fold([lead(), *(planned(number + 1) for number in range(2 * PLANS_KEPT))])

    assert not ledger.feed(ledger.position, planned(2 * PLANS_KEPT))
    assert len(ledger.plans) == PLANS_KEPT
    assert ledger.plan is not None
    assert ledger.plan.number == 2 * PLANS_KEPT


def test_replan_request_is_open_until_a_plan_answers_it() -> None:
    # A plan that was under way at the time of the request does not answer it.
    asked = ReplanAsked(T0, "ada")
    ledger = fold([lead(), asked, planned(1)])

    assert list(ledger.replans) == [1]
    answer = planned(2)
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    assert ledger.feed(3, Planned(**{**fields, "answers": 1}))
    assert not ledger.replans


def test_unanswered_replan_requests_are_bounded() -> None:
    ledger = fold([ReplanAsked(T0, "ada")] * (REPLANS_KEPT + 5))

    assert len(ledger.replans) == REPLANS_KEPT
    assert min(ledger.replans) == 5


def test_settled_term_ends_and_only_a_later_lead_starts_another() -> None:
    # offset   0      1        2          3          4
    # record   Lead  Settled  Ordered 1  Lead(0)   Lead(1)
    ledger = fold([lead(), settled()])

    assert ledger.settled is not None
    assert not ledger.feed(2, ordered(1))
    assert not ledger.feed(3, lead(0, "late"))
    assert ledger.feed(4, lead(1, "c2"))
    assert ledger.settled is None
    assert ledger.feed(5, ordered(1, term=4))


def test_unreadable_plan_record_is_ignored() -> None:
    ledger = fold([lead()])

    assert not ledger.feed(1, None)
    assert ledger.position == 2


def test_feed_of_an_earlier_position_raises() -> None:
    ledger = fold([lead()])

    with pytest.raises(ValueError, match="plan record 0 comes after 0"):
        ledger.feed(0, lead())


def test_ledger_has_the_latest_prices() -> None:
    ledger = fold([lead(), priced(), priced(at_s=T0 + 5, spot=0.5)])

    assert ledger.prices == {"on-demand": 1.0, "spot": 0.5}


def test_usd_per_hour_is_of_running_machines_at_current_prices() -> None:
    ledger = fold([lead(), priced(), ordered(1), ordered(2, pool="on-demand"), started(2)])

    assert ledger.usd_per_hour == 1.0


def test_last_review_is_kept_despite_thinning() -> None:
    ledger = FleetLedger()
    ledger.reviews = Thinned(2)
    ledger.feed(0, lead())
    for number in range(10):
        ledger.feed(1 + number, review(T0 + number))

    assert ledger.review is not None
    assert ledger.review.at_s == T0 + 9


def test_machines_of_a_mixed_pool_cost_their_own_prices() -> None:
    cheap, dear = ("c5.large", "1a"), ("c5.xlarge", "1b")
    offers = OfferPrice("spot", *cheap, 0.10), OfferPrice("spot", *dear, 0.30)
    ledger = fold(
        [
            lead(),
            Priced(0, T0, PRICES | {"spot": 0.10}, offers),
            ordered(1),
            Started(0, 1, T0, "m-1", *cheap),
            ordered(2),
            Started(0, 2, T0, "m-2", *dear),
            ordered(3),
            Started(0, 3, T0, "m-3", "c5.large", "1c", 0.13),  # no price is known
            Priced(0, T0 + 1800, {}, (OfferPrice("spot", *dear, 0.50),)),
        ]
    )

    assert ledger.spent_usd(T0 + 3600) == pytest.approx(0.10 + (0.30 + 0.50) / 2 + 0.13)
    assert ledger.usd_per_hour == pytest.approx(0.10 + 0.50 + 0.13)
    assert ledger.prices["spot"] == 0.10
    assert ledger.paid_usd_per_hour == pytest.approx(PRICES | {"spot": 0.73 / 3})


def test_bid_hours_end_per_machine_and_lost_bids_are_counted() -> None:
    hourly = Billing("hour", price="hour_start", hour_s=60.0)
    bid = Offer("spot", bid_usd_per_hour=0.3)

    def order(launch: int) -> LaunchRequested:
        return LaunchRequested(0, launch, T0, None, "spot", f"w{launch}", bid_usd_per_hour=0.3)

    records: list[PlanRecord] = [
        lead(),
        Priced(0, T0, PRICES),
        planned(),
        order(1),
        order(2),
        Started(0, 1, T0, "m-1"),
        Started(0, 2, T0 + 10, "m-2"),
        Priced(0, T0 + 65, {"spot": 0.5}),
    ]
    ledger = FleetLedger({"spot": hourly})
    for offset, record in enumerate(records):
        ledger.feed(offset, record)
    assert ledger.hours(T0 + 5) == {bid: Hour(T0 + 60, 0.25)}
    assert ledger.hours(T0 + 65) == {bid: Hour(T0 + 70, 0.25)}  # the second machine's hour
    assert ledger.hours(T0 + 75) == {bid: Hour(T0 + 120, 0.25)}

    ledger.feed(ledger.position, ended(1, T0 + 80, "preempted"))
    assert ledger.gone_bids == {bid: 1}
    assert ledger.hours(T0 + 85) == {bid: Hour(T0 + 130, 0.5)}
    ledger.feed(ledger.position, planned(2))
    ledger.feed(ledger.position, ended(2, T0 + 90))
    # The previous plan ordered this machine.
    assert not ledger.gone_bids
