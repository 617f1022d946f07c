"""What a dashboard is made of, and the JSON in which Grafana 12 reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Json: TypeAlias = dict[str, object]

_SCHEMA = 41  # of Grafana 12
COLUMNS = 24
_SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_JOBS = "label_values(doll_model_version, job_name)"


class Query(NamedTuple):
    """A query, and what its lines are called."""

    expression: str
    legend: str


class ColourThreshold(NamedTuple):
    """From which value on something has a colour."""

    value: float | None  # None: from the least on
    color: str


class Annotation(NamedTuple):
    """Moments that are marked in all panels: those at which the query gives anything."""

    name: str
    expression: str
    title: str
    color: str


@dataclass(frozen=True)
class Panel:
    """One picture.

    Args:
        title: What is seen.
        description: What is normal, and what to do where it is not.
        unit: By Grafana's name.
        queries: Whose lines are drawn.
        kind: `stat` is the newest number, `states` is 0 or 1 along time.
        steps: Colours by value; lines are drawn at them.
        names: What 0 and 1 are called.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "states"] = "timeseries"
    steps: tuple[ColourThreshold, ...] = ()
    names: tuple[str, str] | None = None

    @property
    def width(self) -> int:
        """Columns."""
        return 4 if self.kind == "stat" else 8

    @property
    def height(self) -> int:
        """Rows."""
        return 4 if self.kind == "stat" else 8

    def json(self, number: int, column: int, row: int) -> Json:
        """As Grafana reads it, in its place."""
        kind = {"states": "state-timeline"}.get(self.kind, self.kind)
        return {
            "id": number,
            "type": kind,
            "title": self.title,
            "description": self.description,
            "datasource": _SOURCE,
            "gridPos": {"x": column, "y": row, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS[self.kind],
            "targets": [
                {
                    "refId": chr(ord("A") + place),
                    "datasource": _SOURCE,
                    "editorMode": "code",
                    "expr": query.expression,
                    "legendFormat": query.legend,
                    "range": True,
                }
                for place, query in enumerate(self.queries)
            ],
        }

    def _defaults(self) -> Json:
        steps = self.steps or (ColourThreshold(None, "green"),)
        lines = self.kind == "timeseries"
        defaults: Json = {
            "unit": self.unit,
            "color": {"mode": "palette-classic" if lines else "thresholds"},
            "thresholds": {"mode": "absolute", "steps": [step._asdict() for step in steps]},
        }
        if self.names is not None:
            options = {str(value): {"text": name} for value, name in enumerate(self.names)}
            defaults["mappings"] = [{"type": "value", "options": options}]
        if lines:
            defaults["custom"] = {
                "drawStyle": "line",
                "fillOpacity": 8,
                "lineWidth": 1,
                "showPoints": "auto",
                "spanNulls": False,
                "thresholdsStyle": {"mode": "dashed" if self.steps else "off"},
            }
        return defaults


_LEGEND: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True}
_OPTIONS: dict[str, Json] = {
    "timeseries": {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "states": {"legend": _LEGEND, "mergeValues": True, "rowHeight": 0.8, "showValue": "auto"},
}


@dataclass(frozen=True)
class Dashboard:
    """A page of panels, laid out from left to right.

    Args:
        name: Of the file; `doll-<name>` is its lasting id.
        title: As people see it.
        description: What it is for.
        panels: In order.
        annotations: Drawn into all of them.
    """

    name: str
    title: str
    description: str
    panels: tuple[Panel, ...]
    annotations: tuple[Annotation, ...] = field(default=())

    def json(self) -> Json:
        """As Grafana reads it."""
        return {
            "uid": f"doll-{self.name}",
            "title": self.title,
            "description": self.description,
            "tags": ["doll"],
            "schemaVersion": _SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,  # one cross-hair through all panels
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "type": "dashboards",
                    "title": "DOLL",
                    "tags": ["doll"],
                    "includeVars": True,
                    "keepTime": True,
                    "asDropdown": False,
                    "targetBlank": False,
                    "icon": "external link",
                }
            ],
            "templating": {"list": [_source_variable(), _job_variable()]},
            "annotations": {"list": [_annotation(each) for each in self.annotations]},
            "panels": [
                panel.json(number, *place)
                for number, (panel, place) in enumerate(laid_out(self.panels), 1)
            ],
        }


class GridPosition(NamedTuple):
    """Where a panel begins on the grid."""

    column: int
    row: int


def laid_out(panels: tuple[Panel, ...]) -> list[tuple[Panel, GridPosition]]:
    """Each panel with its place, from left to right in rows of 24 columns."""
    column = row = tallest = 0
    found = list[tuple[Panel, GridPosition]]()
    for panel in panels:
        if column + panel.width > COLUMNS:
            column, row, tallest = 0, row + tallest, 0
        found.append((panel, GridPosition(column, row)))
        column, tallest = column + panel.width, max(tallest, panel.height)
    return found


def _source_variable() -> Json:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "includeAll": False,
        "multi": False,
    }


def _job_variable() -> Json:
    return {
        "name": "job_name",
        "label": "Job",
        "type": "query",
        "datasource": _SOURCE,
        "definition": _JOBS,
        "query": {
            "qryType": 1,  # values of a label
            "query": _JOBS,
            "refId": "PrometheusVariableQueryEditor-VariableQuery",
        },
        "refresh": 2,  # whenever the time range changes: jobs come and go
        "sort": 1,
        "includeAll": False,
        "multi": False,
    }


def _annotation(annotation: Annotation) -> Json:
    return {
        "name": annotation.name,
        "datasource": _SOURCE,
        "enable": True,
        "expr": annotation.expression,
        "titleFormat": annotation.title,
        "iconColor": annotation.color,
    }
