"""PromQL for the job that a dashboard shows.

Counters are added up over processes. Gauges of a leader are told by one replica, and by two for the
moment of a takeover: their maximum is taken.
"""

from __future__ import annotations

_JOB = 'job_name="$job_name"'
_RATE = "$__rate_interval"  # Grafana's: four scrapes at least


def selected(metric: str, *matchers: str, suffix: str = "") -> str:
    """The job's series."""
    return f"{metric}{suffix}{{{', '.join((_JOB, *matchers))}}}"


def newest(metric: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """A gauge that one replica tells."""
    return f"max by ({_labels(by)}) ({selected(metric, *where)})"


def total(metric: str, *by: str) -> str:
    """A gauge that every process tells for itself, added up."""
    return f"sum by ({_labels(by)}) ({selected(metric)})"


def per_s(metric: str, *by: str) -> str:
    """A counter's growth per second."""
    return f"sum by ({_labels(by)}) (rate({selected(metric)}[{_RATE}]))"


def lately(metric: str, *by: str, window: str = "5m") -> str:
    """How much a counter has grown within a window: of what is rare."""
    return f"sum by ({_labels(by)}) (increase({selected(metric)}[{window}]))"


def quantile(share: float, metric: str, *by: str) -> str:
    """The quantile of a histogram."""
    buckets = f"rate({selected(metric, suffix='_bucket')}[{_RATE}])"
    return f"histogram_quantile({share}, sum by (le, {_labels(by)}) ({buckets}))"


def _labels(by: tuple[str, ...]) -> str:
    return ", ".join(("job_name", *by))
