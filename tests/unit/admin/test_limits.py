"""Limits of requests per second, concurrent streams, and the size of a body."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.config.settings import Settings
from services.admin.service import Limits
from tests.unit.admin.conftest import World, problem

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def small() -> Iterator[World]:
    """A service with low limits."""
    limits = Limits(requests_per_s=0.001, streams=1)
    made = World(Settings(blobs="s3://memory", api_body_bytes=1024), limits=limits)
    yield made
    made.close()


def test_rate_limited_key_gets_a_retry_time(small: World) -> None:
    assert small.ask("GET", "/v1/jobs", key="viewer").status_code == 200
    again = small.ask("GET", "/v1/jobs", key="viewer")
    assert problem(again, 429) == "too many requests from this key"
    assert 0 < int(again.headers["retry-after"]) <= 1000
    assert small.ask("GET", "/v1/jobs", key="operator").status_code == 200


def test_wrong_keys_are_rate_limited_by_address(small: World) -> None:
    assert problem(small.ask("GET", "/v1/jobs", key="doll_guess-1"), 401)
    assert problem(small.ask("GET", "/v1/jobs", key="doll_guess-2"), 429)
    assert small.ask("GET", "/v1/jobs", key="viewer").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_body_returns_413_with_or_without_content_length(
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
def test_invalid_content_length_returns_400(small: World, length: str) -> None:
    answer = small.ask("GET", "/v1/jobs", key="viewer", headers={"Content-Length": length})
    assert problem(answer, 400) == "Content-Length: must be a number"


def test_number_of_event_streams_is_limited(small: World) -> None:
    small.service.streams = 1
    answer = small.ask("GET", "/v1/jobs/digits/events", key="viewer")
    assert problem(answer, 429) == "too many event streams are open"
    small.service.streams = 0
    assert problem(small.ask("GET", "/v1/jobs/digits/events", key="operator"), 404)
    assert small.service.streams == 0
