"""PromQL for the job that a dashboard shows.

Counters are added up over processes. For gauges of a leader the maximum is used, because during a
takeover two replicas report them.
"""

from __future__ import annotations

_JOB = 'job_name="$job_name"'
# Grafana's variable: at least four scrapes.
_RATE = "$__rate_interval"


def selected(metric: str, *matchers: str, suffix: str = "") -> str:
    """Return a selector of the job's series."""
    return f"{metric}{suffix}{{{', '.join((_JOB, *matchers))}}}"


def newest(metric: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """Return the value of a gauge that only the leader reports."""
    return f"max by ({_labels(by)}) ({selected(metric, *where)})"


def total(metric: str, *by: str) -> str:
    """Return the sum of a gauge that every process reports for itself."""
    return f"sum by ({_labels(by)}) ({selected(metric)})"


def per_s(metric: str, *by: str) -> str:
    """Return a counter's growth per second."""
    return f"sum by ({_labels(by)}) (rate({selected(metric)}[{_RATE}]))"


def lately(metric: str, *by: str, window: str = "5m") -> str:
    """Return a counter's growth within a window, for rare events."""
    return f"sum by ({_labels(by)}) (increase({selected(metric)}[{window}]))"


def quantile(share: float, metric: str, *by: str) -> str:
    """Return the quantile of a histogram."""
    buckets = f"rate({selected(metric, suffix='_bucket')}[{_RATE}])"
    return f"histogram_quantile({share}, sum by (le, {_labels(by)}) ({buckets}))"


def _labels(by: tuple[str, ...]) -> str:
    return ", ".join(("job_name", *by))
