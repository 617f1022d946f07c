"""Metrics of a coordinator about a job that it follows."""

from __future__ import annotations

from prometheus_client import generate_latest

from common.telemetry.metrics.coordinator import CoordinatorMetrics, LeaderFigures


def scraped(metrics: CoordinatorMetrics) -> set[str]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_age_of_checkpoint_is_computed_at_each_scrape() -> None:
    ages = iter((1.5, 2.5, None))
    metrics = CoordinatorMetrics(lambda: next(ages))
    assert "doll_checkpoint_age_seconds 1.5" in scraped(metrics)
    assert "doll_checkpoint_age_seconds 2.5" in scraped(metrics)
    assert not any(line.startswith("doll_checkpoint_age") for line in scraped(metrics))


def test_replica_that_holds_a_job_without_leading_reports_it() -> None:
    metrics = CoordinatorMetrics()
    assert {"doll_leading 0.0"} <= scraped(metrics)
    assert not any(line.startswith("doll_job_held") for line in scraped(metrics))
    metrics.held = metrics.paused = True
    assert "doll_job_held 1.0" in scraped(metrics)
    assert not any(line.startswith("doll_job_paused") for line in scraped(metrics))
    metrics.leading = LeaderFigures(1, 2)
    assert {"doll_leading 1.0", "doll_job_held 1.0", "doll_job_paused 0.0"} <= scraped(metrics)
