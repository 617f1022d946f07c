"""Paid time of a machine, by the rules that providers publish."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.theory.billing import BY_NAME, HOUR_S, Billing, Preempted
from common.spot.theory.work import Pool, gb_per_hour

SUSE = Billing("hour", preempted=Preempted(HOUR_S, hour_refunded=True))

billings = st.builds(
    Billing,
    st.sampled_from(["second", "hour"]),
    st.sampled_from([0.0, 60.0]),
    st.sampled_from(["now", "hour_start"]),
    st.builds(Preempted, st.sampled_from([0.0, 60.0, 3600.0, 5000.0]), st.booleans()),
)


@pytest.mark.parametrize(
    ("billing", "ran_s", "taken_back_s", "given_back_s"),
    [
        (BY_NAME["ec2"], 10.0, 0.0, 60.0),
        (BY_NAME["ec2"], 900.0, 0.0, 900.0),
        (BY_NAME["ec2"], 3600.0, 3600.0, 3600.0),
        (BY_NAME["ec2"], 5000.0, 5000.0, 5000.0),
        (BY_NAME["ec2-2017"], 900.0, 0.0, 3600.0),
        (BY_NAME["ec2-2017"], 5000.0, 3600.0, 7200.0),
        (BY_NAME["gce"], 59.0, 0.0, 60.0),
        (BY_NAME["gce"], 61.0, 61.0, 61.0),
        (SUSE, 900.0, 0.0, 3600.0),
        (SUSE, 5000.0, 3600.0, 7200.0),
        (Billing(), 10.0, 10.0, 10.0),
        (Billing("hour"), 5000.0, 7200.0, 7200.0),
    ],
)
def test_paid_time_depends_on_who_ends_the_machine_and_when(
    billing: Billing, ran_s: float, taken_back_s: float, given_back_s: float
) -> None:
    assert billing.paid_s(ran_s, preempted=True) == taken_back_s
    assert billing.paid_s(ran_s, preempted=False) == given_back_s


@pytest.mark.parametrize(("mean_s", "share"), [(900, 0.09), (6480, 0.89), (32_400, 0.994)])
def test_ec2_charges_the_share_of_spot_time_after_the_first_hour(
    mean_s: float, share: float
) -> None:
    assert BY_NAME["ec2"].paid_share(mean_s) == pytest.approx(share, abs=0.003)


@given(billings, st.sampled_from([600.0, 3600.0, 30_000.0]))
def test_paid_share_agrees_with_many_simulated_machines(billing: Billing, mean_s: float) -> None:
    quantiles = (np.arange(20_000) + 0.5) / 20_000
    lives_s = -mean_s * np.log(quantiles)
    paid_s = billing.paid_s(lives_s, preempted=True)
    assert billing.paid_share(mean_s) == pytest.approx(paid_s.mean() / mean_s, rel=0.02, abs=2e-3)


def test_machine_that_is_never_preempted_is_paid_in_full() -> None:
    assert BY_NAME["ec2"].paid_share(math.inf) == 1.0
    assert Pool("od", 3600.0, billing=BY_NAME["ec2"]).wanted_usd_per_s == 1.0


def test_wanted_second_costs_its_available_and_charged_share() -> None:
    pool = Pool("spot", 3600.0, 0.9, 1000.0, billing=BY_NAME["ec2"])
    assert pool.wanted_usd_per_s == pytest.approx(0.9 * 5 * math.exp(-4))


def test_transfer_is_paid_for_the_whole_time_of_a_machine() -> None:
    # 230,000 weights there and back are 1.84 MB; 10,000 updates in 6,400 s; 20 workers
    moved = gb_per_hour(2 * 4 * 230_000 / 1e6, 10_000 / 6400)
    assert 20 * moved * 6400 / HOUR_S == pytest.approx(368)
    dear = Pool("zone", 0.0, transfer_usd_per_gb=0.02, gb_per_hour=moved)
    assert 20 * dear.wanted_usd_per_s * 6400 == pytest.approx(7.36)
    free = Pool("spot", 3600.0, 0.5, 900.0, billing=BY_NAME["ec2"])
    far = replace(free, transfer_usd_per_gb=0.02, gb_per_hour=moved)
    more = far.wanted_usd_per_s - free.wanted_usd_per_s
    assert more == pytest.approx(0.5 * 0.02 * moved / HOUR_S)
