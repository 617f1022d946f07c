"""A process answers scrapes, and says whether its loop turns."""

from __future__ import annotations

from http.client import HTTPConnection

import pytest

from common.errors import UserError
from common.metrics.coordinator import CoordinatorMetrics
from common.metrics.serving import STILL_S, Pulse, Pulses, serve
from common.testing.clock import HandClock

HERE = "127.0.0.1"


def asked(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection(HERE, port, timeout=10.0)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_metrics_are_served_and_say_what_they_mean() -> None:
    metrics = CoordinatorMetrics()
    metrics.follow("digits", lambda: 1.5)
    status, text = asked(serve(metrics.meters, Pulse(), HERE, 0), "/metrics")
    assert status == 200
    assert "# HELP doll_checkpoint_age_seconds Since the newest checkpoint was made.\n" in text
    assert "# TYPE doll_checkpoint_age_seconds gauge\n" in text
    assert 'doll_checkpoint_age_seconds{job_name="digits"} 1.5\n' in text
    assert 'doll_build_info{service="coordinator",version="' in text
    assert "process_cpu_seconds_total" in text


def test_a_process_whose_loop_stands_still_is_ill_until_it_turns_again() -> None:
    clock = HandClock()
    pulse = Pulse(clock)
    port = serve(CoordinatorMetrics().meters, pulse, HERE, 0)
    assert asked(port, "/healthz") == (200, "well\n")
    clock.advance(STILL_S)
    assert asked(port, "/healthz") == (503, "the loop has not turned for 60 s\n")
    pulse.beat()
    assert asked(port, "/healthz")[0] == 200


def test_each_loop_of_a_process_has_its_own_patience_until_it_ends() -> None:
    clock = HandClock()
    pulses = Pulses(clock)
    port = serve(CoordinatorMetrics().meters, pulses, HERE, 0)
    assert asked(port, "/healthz") == (200, "well\n")
    quick, slow = pulses.begin("quick", 1.0), pulses.begin("slow", 3.0)
    clock.advance(2.0)
    assert asked(port, "/healthz") == (503, "quick has not turned for 2 s\n")
    clock.advance(1.0)
    both = "quick has not turned for 3 s; slow has not turned for 3 s\n"
    assert asked(port, "/healthz") == (503, both)
    pulses.end(quick)
    pulses.end(quick)
    slow.beat()
    assert asked(port, "/healthz") == (200, "well\n")


def test_what_is_not_there_is_not_found() -> None:
    port = serve(CoordinatorMetrics().meters, Pulse(), HERE, 0)
    assert asked(port, "/")[0] == 404


def test_an_address_that_is_taken_is_refused_by_name() -> None:
    port = serve(CoordinatorMetrics().meters, Pulse(), HERE, 0)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: .*; set DOLL_METRICS_PORT"):
        serve(CoordinatorMetrics().meters, Pulse(), HERE, port)
