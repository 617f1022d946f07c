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


def test_the_files_are_as_the_command_writes_them() -> None:
    texts = {path: path.read_text() for path in FOLDER.glob("*.json")}
    assert texts == written(), "python -m deploy.grafana"


def test_there_are_three_and_each_has_an_id_of_its_own() -> None:
    ids = {path: json.loads(path.read_text())["uid"] for path in FOLDER.glob("*.json")}
    assert sorted(ids.values()) == ["doll-cost", "doll-learning", "doll-pipeline"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_of_a_query_is_declared(expression: str) -> None:
    assert faults(expression) == []


def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"doll:{number}", "expr": filled(expression, "digits", 60)}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    groups = {"groups": [{"name": "dashboards", "rules": rules}]}
    (tmp_path / "rules.yml").write_text(json.dumps(groups))  # JSON is YAML
    assert promtool("check", "rules", "rules.yml", folder=tmp_path) == ""


@by_name
def test_every_panel_says_what_it_shows_in_which_unit_and_from_where(dashboard: Dashboard) -> None:
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
def test_every_label_in_a_legend_is_one_that_the_query_keeps(dashboard: Dashboard) -> None:
    for panel in dashboard.panels:
        for query in panel.queries:
            shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            assert shown <= grouped(query.expression), f"{panel.title}: {query.legend}"
            # Otherwise several lines would have the same name.
            assert grouped(query.expression) - {"job_name", "le"} <= shown, panel.title


@by_name
def test_no_panel_covers_another(dashboard: Dashboard) -> None:
    taken = set[tuple[int, int]]()
    for panel, column, row in laid_out(dashboard.panels):
        cells = {
            (x, y) for x in range(column, column + panel.size) for y in range(row, row + panel.size)
        }
        assert not cells & taken, panel.title
        assert column + panel.size <= 24
        taken |= cells


def test_a_person_can_choose_source_and_job_and_sees_it_soon() -> None:
    for dashboard in DASHBOARDS:
        raw = dashboard.json()
        assert raw["refresh"] == "10s"
        templating = raw["templating"]
        assert isinstance(templating, dict)
        assert [variable["name"] for variable in templating["list"]] == ["datasource", "job_name"]
