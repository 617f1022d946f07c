"""The catalogue: one line for each metric, as Prometheus wants names and labels to be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from common.telemetry.metrics.catalogue import CATALOGUE, UPDATES
from common.telemetry.metrics.meters import Meters

if TYPE_CHECKING:
    from common.telemetry.metrics.metric import Metric


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_is_named_as_its_kind_and_unit_ask(metric: Metric) -> None:
    assert re.fullmatch(r"doll_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.meaning.endswith(".")
    assert metric.unit
    assert metric.told_by
    assert "job" not in metric.labels, "Prometheus calls what it scrapes a job"
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    if metric.unit == "seconds":
        assert metric.name.endswith("_seconds")


def test_no_name_is_there_twice() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))


def test_a_service_makes_only_what_it_tells_and_as_what_it_is() -> None:
    with pytest.raises(ValueError, match="told by"):
        Meters("worker").counter(UPDATES)
    with pytest.raises(ValueError, match="is a counter"):
        Meters("coordinator").gauge(UPDATES)
