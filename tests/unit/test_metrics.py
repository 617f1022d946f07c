"""What a scrape sees: metrics of jobs that are followed, and of a leader alone."""

from __future__ import annotations

from urllib.request import urlopen

import pytest
from prometheus_client import generate_latest

from common.errors import UserError
from common.metrics import Metrics


def scraped(metrics: Metrics) -> list[str]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


def test_the_age_of_a_checkpoint_is_that_of_the_moment_of_the_scrape() -> None:
    metrics, ages = Metrics(), iter((1.5, 2.5))
    metrics.follow("digits", lambda: next(ages))
    assert 'doll_checkpoint_age_seconds{job="digits"} 1.5' in scraped(metrics)
    assert 'doll_checkpoint_age_seconds{job="digits"} 2.5' in scraped(metrics)


def test_who_does_not_lead_tells_no_age() -> None:
    metrics = Metrics()
    metrics.follow("digits", lambda: None)
    metrics.follow("letters", lambda: 7.0)
    assert scraped(metrics) == [
        'doll_checkpoint_failures_total{job="digits"} 0.0',
        'doll_checkpoint_failures_total{job="letters"} 0.0',
        'doll_checkpoint_age_seconds{job="letters"} 7.0',
    ]


def test_failures_are_counted_until_the_job_is_forgotten() -> None:
    metrics = Metrics()
    metrics.follow("digits", lambda: None)
    metrics.checkpoint_failed("digits")
    metrics.checkpoint_failed("digits")
    assert scraped(metrics) == ['doll_checkpoint_failures_total{job="digits"} 2.0']
    metrics.forget("digits")
    assert scraped(metrics) == []


def test_metrics_are_served_and_say_what_they_mean() -> None:
    metrics = Metrics()
    metrics.follow("digits", lambda: 1.5)
    port = metrics.serve("127.0.0.1", 0)
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    assert "# HELP doll_checkpoint_age_seconds Since the newest checkpoint was made.\n" in text
    assert "# TYPE doll_checkpoint_age_seconds gauge\n" in text
    assert 'doll_checkpoint_age_seconds{job="digits"} 1.5\n' in text


def test_an_address_that_is_taken_is_refused_by_name() -> None:
    port = Metrics().serve("127.0.0.1", 0)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: .*; set DOLL_METRICS_PORT"):
        Metrics().serve("127.0.0.1", port)
