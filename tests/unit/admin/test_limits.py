"""Limits: requests by the second, streams at once, the size of a body."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.settings import Settings
from services.admin.middleware.gate import Buckets
from tests.unit.admin.conftest import World, problem

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def small() -> Iterator[World]:
    """A service that takes little."""
    made = World(
        Settings(blobs="s3://memory", api_requests_per_s=0.001, api_body_bytes=1024, api_streams=1)
    )
    yield made
    made.close()


def test_a_caller_may_ask_twice_its_rate_at_once_and_then_by_the_second() -> None:
    buckets = Buckets(rate_per_s=10)
    assert [buckets.take("eve", 0.0) for _ in range(20)] == [0.0] * 20
    assert buckets.take("eve", 0.0) == pytest.approx(0.1)
    assert buckets.take("olga", 0.0) == 0.0
    assert buckets.take("eve", 0.1) == 0.0
    assert buckets.take("eve", 0.1) > 0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200).map(sorted), st.floats(0.5, 20))
def test_nobody_gets_more_than_the_rate_and_what_was_saved(times: list[float], rate: float) -> None:
    buckets = Buckets(rate)
    taken = sum(buckets.take("eve", now) == 0.0 for now in times)
    assert taken <= max(1.0, 2 * rate) + rate * (times[-1] - times[0]) + 1e-6


def test_whoever_waits_as_long_as_was_said_gets_in() -> None:
    buckets = Buckets(rate_per_s=3)
    now = 0.0
    for _ in range(50):
        wait_s = buckets.take("eve", now)
        if wait_s:
            now += wait_s + 1e-9
            assert buckets.take("eve", now) == 0.0


def test_only_so_many_callers_are_remembered_and_the_busiest_among_them() -> None:
    buckets = Buckets(rate_per_s=1, most=10)
    assert [buckets.take("busy", 0.0) for _ in range(2)] == [0.0, 0.0]
    for number in range(100):
        buckets.take(f"passer-by {number}", 0.0)
        assert buckets.take("busy", 0.0) > 0
    assert len(buckets) == 10


def test_a_key_that_asks_too_often_is_told_when_to_come_back(small: World) -> None:
    assert small.ask("GET", "/v1/jobs", key="viewer").status_code == 200
    again = small.ask("GET", "/v1/jobs", key="viewer")
    assert problem(again, 429) == "too many requests of this key"
    assert 0 < int(again.headers["retry-after"]) <= 1000
    assert small.ask("GET", "/v1/jobs", key="operator").status_code == 200


def test_who_guesses_keys_is_counted_by_address(small: World) -> None:
    assert problem(small.ask("GET", "/v1/jobs", key="doll_guess-1"), 401)
    assert problem(small.ask("GET", "/v1/jobs", key="doll_guess-2"), 429)
    assert small.ask("GET", "/v1/jobs", key="viewer").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(
    small: World, *, chunked: bool
) -> None:
    async def pieces() -> object:
        for _ in range(5):
            yield b" " * 300

    body = pieces() if chunked else b" " * 1500
    answer = small.ask(
        "POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json"}
    )
    assert problem(answer, 413) == "the body is larger than 1,024 bytes"


@pytest.mark.parametrize("length", ["9" * 5000, "x", "-1"])
def test_content_length_that_is_no_sensible_number_is_refused(small: World, length: str) -> None:
    answer = small.ask("GET", "/v1/jobs", key="viewer", headers={"Content-Length": length})
    assert problem(answer, 400) == "Content-Length is no number"


def test_streams_of_events_are_limited_apart(small: World) -> None:
    small.service.streams = 1
    answer = small.ask("GET", "/v1/jobs/digits/events", key="viewer")
    assert problem(answer, 429) == "too many streams of events are open"
    small.service.streams = 0
    assert problem(small.ask("GET", "/v1/jobs/digits/events", key="operator"), 404)
    assert small.service.streams == 0
