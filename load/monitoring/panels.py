"""Reads dashboards as Grafana does: their panels, and queries with their variables filled in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


class Query(NamedTuple):
    """What a panel asks Prometheus, and what the lines that come of it are called."""

    expression: str
    legend: str


class Place(NamedTuple):
    """Where a panel is, on a grid of 24 columns."""

    x: int
    y: int
    w: int
    h: int


class Panel(NamedTuple):
    """One picture."""

    title: str
    type: str
    place: Place
    unit: str  # by Grafana's name
    names: dict[str, str]  # what values are called
    queries: tuple[Query, ...]


class Annotation(NamedTuple):
    """Moments that are marked in all panels."""

    name: str
    expression: str


class Board(NamedTuple):
    """A dashboard."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    annotations: tuple[Annotation, ...]


def read_board(path: Path) -> Board:
    """Read a dashboard's JSON."""
    raw = json.loads(path.read_bytes())
    marked = raw["annotations"]["list"]
    return Board(
        raw["uid"],
        raw["title"],
        tuple(map(_panel, raw["panels"])),
        tuple(Annotation(each["name"], each["expr"]) for each in marked),
    )


def _panel(raw: dict[str, Any]) -> Panel:
    shown = raw["fieldConfig"]["defaults"]
    return Panel(
        raw["title"],
        raw["type"],
        Place(**raw["gridPos"]),
        shown["unit"],
        {
            value: name["text"]
            for mapping in shown.get("mappings", ())
            for value, name in mapping["options"].items()
        },
        tuple(Query(each["expr"], each["legendFormat"]) for each in raw["targets"]),
    )


def filled(expression: str, job: str, rate_interval_s: int) -> str:
    """A query as Prometheus gets it.

    Args:
        expression: As it stands in the dashboard.
        job: That a person has chosen.
        rate_interval_s: Four times the interval of scrapes.
    """
    return expression.replace("$job_name", job).replace("$__rate_interval", f"{rate_interval_s}s")
