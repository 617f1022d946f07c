"""Every alert uses existing metrics, fires when it should, and says what to do."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from doll.yaml_file import as_json, load_text
from tests.changes import once_changed
from tests.unit.deploy.promql import faults
from tests.unit.deploy.promtool import promtool

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/prometheus"
SEVERITIES = ("critical", "warning", "info")


class _Notes(msgspec.Struct, forbid_unknown_fields=True):
    summary: str
    description: str
    runbook_url: str


class _Alert(msgspec.Struct, forbid_unknown_fields=True, rename={"wait": "for", "name": "alert"}):
    name: str
    expr: str
    wait: str
    labels: dict[str, str]
    annotations: _Notes


class _Group(msgspec.Struct):
    name: str
    rules: list[_Alert]


class _Groups(msgspec.Struct):
    groups: list[_Group]


TEXT = (FOLDER / "alerts.yml").read_text()
ALERTS = [
    alert
    for group in msgspec.json.decode(as_json(load_text(TEXT)), type=_Groups).groups
    for alert in group.rules
]
each = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)


@each
def test_alert_uses_only_declared_metrics_and_labels(alert: _Alert) -> None:
    assert faults(alert.expr) == []


@each
def test_alert_has_severity_wait_summary_description_and_runbook(
    alert: _Alert,
) -> None:
    assert alert.labels["severity"] in SEVERITIES
    assert re.fullmatch(r"\d+m", alert.wait)
    assert not alert.annotations.summary.endswith(".")
    assert alert.annotations.description.endswith(".")
    assert alert.annotations.runbook_url == f"docs/howto/alerts.md#{alert.name.lower()}"


def test_alerts_guide_has_a_section_for_each_alert() -> None:
    guide = (ROOT / "docs/howto/alerts.md").read_text()
    sections = re.findall(r"^## (Doll\w+)\n\n\*\*Means\*\*", guide, re.MULTILINE)
    assert sections == [alert.name for alert in ALERTS]


def test_dashboards_name_only_existing_alerts() -> None:
    names = {alert.name for alert in ALERTS}
    texts = "".join(path.read_text() for path in (ROOT / "deploy/grafana").rglob("*.json"))
    spoken = set(re.findall(r"\bDoll[A-Z]\w+", texts))
    assert spoken
    assert spoken <= names


def test_prometheus_accepts_the_alert_rules() -> None:
    assert promtool("check", "rules", "alerts.yml", folder=FOLDER) == ""


def test_each_alert_has_a_test() -> None:
    tests = (FOLDER / "alerts_test.yml").read_text()
    untried = [alert.name for alert in ALERTS if f'alertname="{alert.name}"' not in tests]
    assert untried == []


# Prometheus needs seconds for this test.
@once_changed("deploy/prometheus/", "tests/unit/deploy/test_alerts.py")
def test_alerts_fire_when_expected_and_not_before() -> None:
    assert promtool("test", "rules", "alerts_test.yml", folder=FOLDER) == ""
