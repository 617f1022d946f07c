"""Draws dashboards from Prometheus, for those who have no Grafana: the queries of their panels.

    python -m load.monitoring.dashboards    # runs a small demo, writes into docs/pictures
    python -m load.monitoring.dashboards --seconds 60 --out out

Exit status: 0 drawn; 2 there is no Prometheus.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from deploy.grafana.__main__ import DASHBOARDS
from deploy.grafana.panel import COLUMNS, Dashboard, Panel, Query, laid_out
from load.monitoring.prometheus import Line, Prometheus, filled
from load.monitoring.watched import watched_demo

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_ROOT = Path(__file__).parents[2]
_POINTS = 240  # along time
_CELL_INCHES = (0.7, 0.36)  # of Grafana's grid
_KILLED_AT, _BACK_AT = 0.5, 0.7  # a worker, in shares of the run
_SUFFIX = "suffix:"
_LEGEND_MOST = 10  # lines that a legend names


def main() -> int:
    """Run the demo and draw."""
    parser = argparse.ArgumentParser(
        prog="python -m load.monitoring.dashboards",
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python -m load.monitoring.dashboards --out out/dashboards --seconds 60",
    )
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "docs/pictures", help="default: docs/pictures"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of the demo; default: 120")
    parser.add_argument("--records", type=float, default=700.0, help="per second; default: 700")
    given = parser.parse_args()
    program = shutil.which("prometheus")
    if program is None:
        missing = "prometheus was not found on PATH: install Debian's package of this name"
        print(missing, file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="doll-dashboards-") as folder,
        watched_demo(program, Path(folder) / "demo", given.records) as demo,
    ):
        began_s = time.time()
        time.sleep(given.seconds * _KILLED_AT)
        demo.workers[0].kill()
        time.sleep(given.seconds * (_BACK_AT - _KILLED_AT))
        demo.workers[0].restart()
        time.sleep(given.seconds * (1 - _BACK_AT))
        for dashboard in sorted(DASHBOARDS, key=lambda each: each.name):
            path = given.out / f"dashboard-{dashboard.name}.png"
            drawn(dashboard, demo.prometheus, demo.job, began_s, time.time()).savefig(path, dpi=90)
            print(path)
    return 0


def drawn(
    dashboard: Dashboard, prometheus: Prometheus, job: str, first_s: float, last_s: float
) -> Figure:
    """A dashboard as a picture.

    Args:
        dashboard: Which.
        prometheus: Whom to ask.
        job: The one to show.
        first_s: From when on, in seconds since 1970.
        last_s: Until when.
    """
    step_s = max(1.0, (last_s - first_s) / _POINTS)

    def ask(query: Query) -> list[Line]:
        expression = filled(query.expression, job, prometheus.rate_interval_s)
        return prometheus.over_time(expression, first_s, last_s, step_s)

    places = laid_out(dashboard.panels)
    rows = max(place.row + panel.height for panel, place in places) + 2  # title, last times
    with mpl.rc_context({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(COLUMNS * _CELL_INCHES[0], rows * _CELL_INCHES[1]))
        figure.suptitle(
            f"{dashboard.title}: the dashboard's queries, drawn from Prometheus without Grafana; a"
            f" demo of {last_s - first_s:.0f} s",
            fontsize=10,
            x=0.01,
            ha="left",
        )
        for panel, place in places:
            left, width = (place.column + 0.85) / COLUMNS, (panel.width - 1.15) / COLUMNS
            bottom = 1 - (place.row + panel.height + 0.6) / rows
            axes = figure.add_axes((left, bottom, width, (panel.height - 2.0) / rows))
            axes.set_title(panel.title, loc="left", fontsize=8)
            if panel.kind == "stat":
                _state(axes, panel, ask)
            else:
                _course(axes, panel, ask, first_s)
    return figure


def _state(axes: Axes, panel: Panel, ask: Callable[[Query], list[Line]]) -> None:
    """The newest numbers."""
    axes.set_axis_off()
    told = list[str]()
    for query in panel.queries:
        for line in ask(query):
            value = line.points[-1][1]
            number = _said(value, panel, panel.unit)
            several = len(panel.queries) > 1 or "{{" in query.legend
            told.append(f"{_named(query, line)}: {number}" if several else number)
    text = "\n".join(told) or "no data"
    axes.text(0.0, 0.45, text, fontsize=16 if len(told) < 2 else 9, va="center")


def _course(axes: Axes, panel: Panel, ask: Callable[[Query], list[Line]], first_s: float) -> None:
    """Lines along time."""
    count = 0
    for query in panel.queries:
        for line in ask(query):
            times = [at_s - first_s for at_s, _ in line.points]
            values = [value for _, value in line.points]
            style = "steps-post" if panel.kind == "states" else "default"
            axes.plot(times, values, linewidth=1, label=_named(query, line), drawstyle=style)
            count += any(map(math.isfinite, values))
    if not count:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")
    elif count <= _LEGEND_MOST:
        axes.legend(fontsize=6, frameon=False, loc="upper left", ncols=2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), high + 0.35 * (high - min(low, 0.0)))  # room for the legend
    axes.grid(alpha=0.3)
    if panel.names:
        axes.set_yticks(range(len(panel.names)))
    unit = "none" if panel.unit.startswith(_SUFFIX) else panel.unit  # the title says it
    axes.yaxis.set_major_formatter(lambda value, _: _said(value, panel, unit))


def _named(query: Query, line: Line) -> str:
    """What Grafana would call it."""
    name = query.legend
    for label, value in line.labels.items():
        name = name.replace("{{" + label + "}}", value)
    return name


def _said(value: float, panel: Panel, unit: str) -> str:
    """What a panel calls a number, or the number in Grafana's unit."""
    if panel.names and value in (0, 1):
        return panel.names[int(value)]
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{100 * value:.4g} %"
    if unit == "currencyUSD":
        return f"${value:.3g}"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if 0 < abs(value) < 1 else f"{value:.4g} s"
    return f"{value:.4g}{unit.removeprefix(_SUFFIX) if unit.startswith(_SUFFIX) else ''}"


if __name__ == "__main__":
    sys.exit(main())
