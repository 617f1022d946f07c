"""Refused requests are logged, and a flood of requests causes few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.runtime.refusals import Buckets, Refusals
from common.telemetry.logging import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def audited(caplog: pytest.LogCaptureFixture) -> list[Mapping[str, Any]]:
    """Return the fields of all audit lines so far."""
    return [fields_of(each) for each in caplog.records if each.getMessage() == "audit"]


def test_caller_may_burst_twice_its_rate_and_is_then_limited() -> None:
    buckets = Buckets(rate_per_s=10)
    assert [buckets.take("eve", 0.0) for _ in range(20)] == [0.0] * 20
    assert buckets.take("eve", 0.0) == pytest.approx(0.1)
    assert buckets.take("olga", 0.0) == 0.0
    assert buckets.take("eve", 0.1) == 0.0
    assert buckets.take("eve", 0.1) > 0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200).map(sorted), st.floats(0.5, 20))
def test_caller_never_exceeds_rate_plus_burst(times: list[float], rate: float) -> None:
    buckets = Buckets(rate)
    taken = sum(buckets.take("eve", now) == 0.0 for now in times)
    assert taken <= max(1.0, 2 * rate) + rate * (times[-1] - times[0]) + 1e-6


def test_caller_that_waits_the_returned_time_is_accepted() -> None:
    buckets = Buckets(rate_per_s=3)
    now = 0.0
    for _ in range(50):
        wait_s = buckets.take("eve", now)
        if wait_s:
            now += wait_s + 1e-9
            assert buckets.take("eve", now) == 0.0


def test_limited_number_of_callers_is_remembered_including_the_busiest() -> None:
    buckets = Buckets(rate_per_s=1, most=10)
    assert [buckets.take("busy", 0.0) for _ in range(2)] == [0.0, 0.0]
    for number in range(100):
        buckets.take(f"passer-by {number}", 0.0)
        assert buckets.take("busy", 0.0) > 0
    assert len(buckets) == 10


def test_refusals_from_many_addresses_log_one_line_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals()
    for second in range(10):
        for number in range(200):
            address = f"2001:db8::{second:x}:{number:x}"
            scope = _scope(address)
            refusals.log(scope, 401, float(second))
    lines = audited(caplog)
    assert len(lines) <= 12
    assert "199 more since the last line" in lines[-1]["reason"]


def _scope(address: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": "/v1/jobs",
        "headers": [],
        "client": (address, 1234),
    }
