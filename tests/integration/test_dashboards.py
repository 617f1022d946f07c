"""Every query of every panel has a result for a small demo that a real Prometheus scrapes.

test_metrics.py checks on every change that services report every metric. Tests in tests/unit/deploy
check that queries use these metrics.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from deploy.grafana.__main__ import DASHBOARDS
from tests.changes import once_changed
from tests.integration.cluster import await_condition
from tests.prometheus import filled, finite
from tests.servers import lacking
from tests.watched import watched_demo

if TYPE_CHECKING:
    from pathlib import Path

    from tests.prometheus import Prometheus

RECORDS_PER_S = 400.0
PATIENCE_S = 120.0
KILLED_AFTER = 10  # updates
# The demo does not report these, because its coordinator aggregates.
OF_GROUPS = re.compile("doll_group_(members|left_out|collective|repair)_?")


def queries() -> dict[str, str]:
    """Each query with its panel and legend."""
    return {
        f"{dashboard.name}: {panel.title}: {query.legend}": query.expression
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
        if not OF_GROUPS.search(query.expression)
    }


@once_changed(
    *("deploy/grafana/", "deploy/prometheus/", "common/telemetry/"),
    *("tests/prometheus.py", "tests/watched.py", "tests/integration/test_dashboards.py"),
)
def test_every_panel_query_has_a_number_and_every_alert_is_evaluated(
    tmp_path: Path,
) -> None:
    # worker-1   ▏reads, computes▕ killed                 its machine is gone: Prometheus sees it
    # others     ▏reads, compute ────────────────────────▶
    # queries                         ? ? ? ? ? ? ? ? ? ?  until all have given a number
    program = shutil.which("prometheus")
    if program is None:
        lacking("prometheus was not found on PATH: install Debian's package of this name")
    with watched_demo(program, tmp_path / "demo", RECORDS_PER_S, coordinators=1) as demo:
        prometheus = demo.prometheus
        await_condition(
            lambda: number_of(prometheus, "max(doll_model_version)") >= KILLED_AFTER,
            "the job trains",
        )
        demo.workers[0].kill()
        empty = {
            name: filled(expression, demo.job, prometheus.rate_interval_s)
            for name, expression in queries().items()
        }

        def all_reported() -> bool:
            for name, query in list(empty.items()):
                if finite(prometheus.now(query)):
                    del empty[name]
            return not empty

        try:
            await_condition(all_reported, "every query returns a number", PATIENCE_S)
        except AssertionError:
            listed = "\n".join(f"{name}\n    {query}" for name, query in empty.items())
            pytest.fail(f"{len(empty)} queries give nothing:\n{listed}")
        await_condition(
            lambda: all(rule.health == "ok" for rule in prometheus.alerts()),
            "every alert was evaluated",
        )
        states = {rule.name: rule.state for rule in prometheus.alerts()}
        assert states["DollProcessDown"] == "pending", "a worker was killed less than 2 minutes ago"


def number_of(prometheus: Prometheus, query: str) -> float:
    """Return the result of a query. 0 if it is empty."""
    return max((line.points[0][1] for line in prometheus.now(query)), default=0.0)
