"""The dashboards query existing metrics, and every panel has a description."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deploy.grafana.__main__ import DASHBOARDS, written
from deploy.grafana.panel import Dashboard, laid_out
from tests.prometheus import filled
from tests.unit.deploy.promql import faults, grouped
from tests.unit.deploy.promtool import promtool

FOLDER = Path(__file__).parents[3] / "deploy/grafana/dashboards"
EXPRESSIONS = [
    *(query.expression for each in DASHBOARDS for panel in each.panels for query in panel.queries),
    *(str(annotation["expr"]) for each in DASHBOARDS for annotation in each.annotations),
]
by_name = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)


def test_dashboard_files_are_up_to_date() -> None:
    texts = {path: path.read_text() for path in FOLDER.glob("*.json")}
    assert texts == written(), "python -m deploy.grafana"


def test_dashboards_have_unique_ids() -> None:
    ids = {path: json.loads(path.read_text())["uid"] for path in FOLDER.glob("*.json")}
    assert sorted(ids.values()) == ["doll-cost", "doll-learning", "doll-pipeline"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_query_uses_only_declared_metrics_and_labels(expression: str) -> None:
    assert faults(expression) == []


def test_prometheus_accepts_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"doll:{number}", "expr": filled(expression, "digits", 60)}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    groups = {"groups": [{"name": "dashboards", "rules": rules}]}
    (tmp_path / "rules.yml").write_text(json.dumps(groups))  # JSON is YAML
    assert promtool("check", "rules", "rules.yml", folder=tmp_path) == ""


@by_name
def test_every_panel_has_a_description_unit_and_source(dashboard: Dashboard) -> None:
    titles = [panel.title for panel in dashboard.panels]
    assert all(titles)
    assert len(titles) == len(set(titles))
    raw = json.loads((FOLDER / f"{dashboard.name}.json").read_text())
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in raw["panels"]:
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == source
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None


@by_name
def test_every_legend_label_is_kept_by_its_query(dashboard: Dashboard) -> None:
    for panel in dashboard.panels:
        for query in panel.queries:
            shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            assert shown <= grouped(query.expression), f"{panel.title}: {query.legend}"
            # Otherwise several lines would have the same name.
            assert grouped(query.expression) - {"job_name", "le"} <= shown, panel.title


@by_name
def test_panels_do_not_overlap(dashboard: Dashboard) -> None:
    taken = set[tuple[int, int]]()
    for panel, column, row in laid_out(dashboard.panels):
        cells = {
            (x, y) for x in range(column, column + panel.size) for y in range(row, row + panel.size)
        }
        assert not cells & taken, panel.title
        assert column + panel.size <= 24
        taken |= cells


def test_dashboard_offers_source_and_job_and_refreshes_often() -> None:
    for dashboard in DASHBOARDS:
        raw = dashboard.json()
        assert raw["refresh"] == "10s"
        templating = raw["templating"]
        assert isinstance(templating, dict)
        assert [variable["name"] for variable in templating["list"]] == ["datasource", "job_name"]
