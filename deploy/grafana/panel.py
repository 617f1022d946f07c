"""Parts of a dashboard, and their JSON for Grafana 12."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypeAlias

Json: TypeAlias = dict[str, object]
Steps: TypeAlias = Mapping[float | None, str]

_SCHEMA = 41  # Grafana 12
COLUMNS = 24
_SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_JOBS = "label_values(doll_model_version, job_name)"
_SOURCE_VARIABLE: Json = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "includeAll": False,
    "multi": False,
}
_JOB_VARIABLE: Json = {
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
    # Refresh whenever the time range changes, because the set of jobs changes.
    "refresh": 2,
    "sort": 1,
    "includeAll": False,
    "multi": False,
}


class Query(NamedTuple):
    """A query and the legend of its lines."""

    expression: str
    legend: str


_LEGEND: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True}


class Lines:
    """A panel of lines over time.

    Args:
        title: Title.
        description: Normal values, and what to do about others.
        queries: Queries whose lines are drawn.
        unit: Unit, by Grafana's name.
        steps: Colours by the value at which they begin. The colour of None is for lower values. A
            line is drawn at each value.
        names: Names of the values 0 and 1.
    """

    kind = "timeseries"
    size = 8  # columns, and rows
    options: ClassVar[Json] = {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}}

    def __init__(
        self,
        title: str,
        description: str,
        *queries: Query,
        unit: str = "none",
        steps: Steps | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        self.title, self.description, self.queries = title, description, queries
        self._unit, self._steps, self._names = unit, steps, names

    def json(self, number: int, column: int, row: int) -> Json:
        """Return the panel at a column and row, as JSON for Grafana."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": _SOURCE,
            "gridPos": {"x": column, "y": row, "w": self.size, "h": self.size},
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self.options,
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
        lines = self.kind == Lines.kind
        steps = self._steps or {None: "green"}
        colours = [{"value": value, "color": colour} for value, colour in steps.items()]
        defaults: Json = {
            "unit": self._unit,
            "color": {"mode": "palette-classic" if lines else "thresholds"},
            "thresholds": {"mode": "absolute", "steps": colours},
        }
        if self._names:
            options = {str(value): {"text": name} for value, name in enumerate(self._names)}
            defaults["mappings"] = [{"type": "value", "options": options}]
        if lines:
            defaults["custom"] = {
                "drawStyle": "line",
                "fillOpacity": 8,
                "lineWidth": 1,
                "showPoints": "auto",
                "spanNulls": False,
                "thresholdsStyle": {"mode": "dashed" if self._steps else "off"},
            }
        return defaults


class Stat(Lines):
    """A panel that shows the newest value."""

    kind = "stat"
    size = 4
    options: ClassVar[Json] = {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }


class States(Lines):
    """A panel that shows the times at which a value was 0 or 1."""

    kind = "state-timeline"
    options: ClassVar[Json] = {
        "legend": _LEGEND,
        "mergeValues": True,
        "rowHeight": 0.8,
        "showValue": "auto",
    }


class Dashboard:
    """A page of panels, laid out from left to right.

    Args:
        name: Name of the file. `doll-<name>` is the lasting id, and `DOLL: <name>` the title.
        description: Purpose of the dashboard.
        panels: Panels in order.
        annotations: Annotations drawn into all panels.
    """

    def __init__(
        self, name: str, description: str, *panels: Lines, annotations: tuple[Json, ...] = ()
    ) -> None:
        self.name, self.panels, self.annotations = name, panels, annotations
        self._description = description

    def json(self) -> Json:
        """Return the dashboard as JSON for Grafana."""
        return {
            "uid": f"doll-{self.name}",
            "title": f"DOLL: {self.name}",
            "description": self._description,
            "tags": ["doll"],
            "schemaVersion": _SCHEMA,
            "version": 1,
            "editable": True,
            # One cross-hair through all panels.
            "graphTooltip": 1,
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
            "templating": {"list": [_SOURCE_VARIABLE, _JOB_VARIABLE]},
            "annotations": {"list": list(self.annotations)},
            "panels": [
                panel.json(number, *place)
                for number, (panel, *place) in enumerate(laid_out(self.panels), 1)
            ],
        }


def laid_out(panels: tuple[Lines, ...]) -> list[tuple[Lines, int, int]]:
    """Return each panel with its column and row, from left to right in rows of 24 columns."""
    column = row = tallest = 0
    found = list[tuple[Lines, int, int]]()
    for panel in panels:
        if column + panel.size > COLUMNS:
            column, row, tallest = 0, row + tallest, 0
        found.append((panel, column, row))
        column, tallest = column + panel.size, max(tallest, panel.size)
    return found


def annotation(name: str, expression: str, title: str, color: str) -> Json:
    """Return an annotation that marks, in all panels, the moments when the query has a value."""
    return {
        "name": name,
        "datasource": _SOURCE,
        "enable": True,
        "expr": expression,
        "titleFormat": title,
        "iconColor": color,
    }
