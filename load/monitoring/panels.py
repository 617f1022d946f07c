"""Reads dashboards as Grafana does: their panels, and queries with their variables filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Query(msgspec.Struct, frozen=True):
    """What a panel asks Prometheus, and what the lines that come of it are called."""

    expression: str = msgspec.field(name="expr")
    legend: str = msgspec.field(name="legendFormat")


class Place(msgspec.Struct, frozen=True):
    """Where a panel is, on a grid of 24 columns."""

    x: int
    y: int
    w: int
    h: int


class _Text(msgspec.Struct, frozen=True):
    text: str


class _Mapping(msgspec.Struct, frozen=True):
    options: dict[str, _Text]


class _Defaults(msgspec.Struct, frozen=True):
    unit: str
    mappings: tuple[_Mapping, ...] = ()


class _Fields(msgspec.Struct, frozen=True):
    defaults: _Defaults


class Panel(msgspec.Struct, frozen=True):
    """One picture."""

    title: str
    description: str
    type: str
    place: Place = msgspec.field(name="gridPos")
    fields: _Fields = msgspec.field(name="fieldConfig")
    queries: tuple[Query, ...] = msgspec.field(name="targets")

    @property
    def unit(self) -> str:
        """By Grafana's name."""
        return self.fields.defaults.unit

    @property
    def names(self) -> dict[str, str]:
        """What values are called."""
        mappings = self.fields.defaults.mappings
        return {value: it.text for each in mappings for value, it in each.options.items()}


class Annotation(msgspec.Struct, frozen=True):
    """Moments that are marked in all panels."""

    name: str
    expression: str = msgspec.field(name="expr")


class _Annotations(msgspec.Struct, frozen=True):
    list: tuple[Annotation, ...]


class Board(msgspec.Struct, frozen=True):
    """A dashboard."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    marked: _Annotations = msgspec.field(name="annotations")

    @property
    def annotations(self) -> tuple[Annotation, ...]:
        """What is drawn into all panels."""
        return self.marked.list


def read_board(path: Path) -> Board:
    """Read a dashboard's JSON."""
    return msgspec.json.decode(path.read_bytes(), type=Board)


def filled(expression: str, job: str, rate_interval_s: int) -> str:
    """A query as Prometheus gets it.

    Args:
        expression: As it stands in the dashboard.
        job: That a person has chosen.
        rate_interval_s: Four times the interval of scrapes.
    """
    return expression.replace("$job_name", job).replace("$__rate_interval", f"{rate_interval_s}s")
