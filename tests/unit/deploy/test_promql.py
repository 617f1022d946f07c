"""The query checker finds wrong queries, and accepts right ones."""

from __future__ import annotations

import pytest

from tests.unit.deploy.promql import faults, names


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("doll_lag", "there is no metric doll_lag"),
        ("doll_round_seconds", "there is no metric doll_round_seconds"),
        ("rate(doll_loss_count[5m])", "there is no metric doll_loss_count"),
        ('doll_loss{stream="a"}', "doll_loss has no label stream"),
        ("max by (stream) (doll_loss)", "doll_loss has no label stream to go by"),
        (
            "sum by (le) (rate(doll_round_seconds_sum[5m]))",
            "doll_round_seconds_sum has no label le to go by",
        ),
        ("rate(doll_loss[5m])", "rate of doll_loss, which is a gauge"),
        ("doll_updates_total", "nothing of doll_updates_total, which is a counter"),
        ("deriv(doll_updates_total[5m])", "deriv of doll_updates_total, which is a counter"),
    ],
)
def test_wrong_query_is_detected(query: str, fault: str) -> None:
    assert fault in faults(query)


@pytest.mark.parametrize(
    "query",
    [
        'sum by (job_name) (rate(doll_updates_total{job_name=~"a|b(c)"}[$__rate_interval])) > 1.05',
        "histogram_quantile(0.9, sum by (le, stage) (rate(doll_round_seconds_bucket[5m])))",
        "changes((max by (job_name) (doll_epoch))[1h:15s])",
        'up{job="worker"} == 0 or absent(doll_build_info{service="coordinator"})',
        "max by (instance) (doll_leading) unless on (job_name) (doll_job_paused == 1)",
    ],
)
def test_correct_query_passes(query: str) -> None:
    assert faults(query) == []


def test_all_metrics_of_a_query_are_found() -> None:
    query = (
        'sum by (job_name) (rate(doll_updates_total{job_name="x"}[5m])) / on (job_name) doll_loss'
    )
    assert names(query) == {"doll_updates_total", "doll_loss"}
