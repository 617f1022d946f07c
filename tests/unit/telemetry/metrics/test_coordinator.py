"""What a scrape sees: jobs that are followed, and of a leader alone."""

from __future__ import annotations

from common.telemetry.metrics.coordinator import CoordinatorMetrics


def scraped(metrics: CoordinatorMetrics) -> list[str]:
    lines = metrics.meters.exposed().decode().splitlines()
    return [line for line in lines if line.startswith("doll_checkpoint") and "_created" not in line]


def test_the_age_of_a_checkpoint_is_that_of_the_moment_of_the_scrape() -> None:
    metrics, ages = CoordinatorMetrics(), iter((1.5, 2.5))
    metrics.follow("digits", lambda: next(ages))
    assert 'doll_checkpoint_age_seconds{job_name="digits"} 1.5' in scraped(metrics)
    assert 'doll_checkpoint_age_seconds{job_name="digits"} 2.5' in scraped(metrics)


def test_who_does_not_lead_tells_no_age() -> None:
    metrics = CoordinatorMetrics()
    metrics.follow("digits", lambda: None)
    metrics.follow("letters", lambda: 7.0)
    assert scraped(metrics) == [
        'doll_checkpoint_failures_total{job_name="digits"} 0.0',
        'doll_checkpoint_failures_total{job_name="letters"} 0.0',
        'doll_checkpoint_age_seconds{job_name="letters"} 7.0',
    ]


def test_failures_are_counted_until_the_job_is_forgotten() -> None:
    metrics = CoordinatorMetrics()
    metrics.follow("digits", lambda: None)
    metrics.checkpoint_failed("digits")
    metrics.checkpoint_failed("digits")
    assert scraped(metrics) == ['doll_checkpoint_failures_total{job_name="digits"} 2.0']
    metrics.forget("digits")
    assert scraped(metrics) == []
