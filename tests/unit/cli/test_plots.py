"""The figures of `--plot` carry the numbers, with labels that say their unit."""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from common.errors import UserError
from common.spot.experiments.results import Point
from common.spot.planning.plan import plan_told
from services.cli import exits
from services.cli.render import plots
from tests.unit.cli.test_plan import PAPER_REQUEST, no_log, options
from tests.unit.cli.test_simulate import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import World


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height, from the header that a PNG begins with."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_the_plan_figure_has_the_curve_the_deadline_and_the_plan() -> None:
    asked = PAPER_REQUEST.model_copy(update={"curve": 1000})
    found = plan_told(asked, no_log, 0.0)
    assert found.curve is not None
    figure = plots.plan_figure(found)
    cost, runtime, chance = figure.axes
    assert "USD" in cost.get_ylabel()
    assert runtime.get_ylabel().endswith(", s")
    assert "64 workers" in figure.get_suptitle()
    lines = {line.get_label(): line for line in cost.lines}
    assert np.asarray(lines["too late"].get_ydata()) == pytest.approx(found.curve.cost_usd)
    inside = np.asarray(lines["in time"].get_ydata(), np.float64)
    assert np.flatnonzero(np.isfinite(inside)).tolist() == list(range(31))
    spot, usd = lines["plan: 30 on spot"].get_data()
    assert np.ravel(spot).tolist() == [30]
    assert np.ravel(usd) == pytest.approx([found.expected_cost_usd])
    deadline = {line.get_label(): line for line in runtime.lines}["deadline"]
    assert set(np.asarray(deadline.get_ydata()).tolist()) == {6720.0}
    curve = {line.get_label(): line for line in chance.lines}["too late"]
    assert np.asarray(curve.get_ydata()) == pytest.approx(found.curve.in_time)


def test_a_file_of_the_plan_is_a_picture_of_readable_size(world: World, tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    world.run("plan", *options(), "--plot", str(file))
    width, height = size_of(file.read_bytes())
    assert 600 < width < 2000
    assert 400 < height < 2000


def test_runs_are_dots_by_policy_beside_the_deadline() -> None:
    runs = {"static": (run(1.0, 6700.0), run(1.1, 6800.0)), "chance": (run(2.0, 6600.0),)}
    figure = plots.runs_figure("paper", runs)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "runtime, s"
    assert axes.get_ylabel().startswith("cost, %")
    dots = {str(dots.get_label()): np.asarray(dots.get_offsets()) for dots in axes.collections}
    assert dots["static"] == pytest.approx(np.array([[6700, 10.0], [6800, 11.0]]))
    assert dots["chance"] == pytest.approx(np.array([[6600, 20.0]]))
    assert set(np.asarray(axes.lines[0].get_xdata()).tolist()) == {6720.0}
    assert figure.get_suptitle() == "paper"


def test_runs_with_deadlines_of_their_own_are_drawn_in_deadlines() -> None:
    figure = plots.runs_figure(
        "drawn", {"static": (run(1.0, 6700.0), run(1.0, 3000.0, deadline_s=2000.0))}
    )
    (axes,) = figure.axes
    assert "deadline" in axes.get_xlabel()
    dots = np.asarray(axes.collections[0].get_offsets())
    assert dots[:, 0] == pytest.approx([6700 / 6720, 1.5])
    assert set(np.asarray(axes.lines[0].get_xdata()).tolist()) == {1.0}


def test_runs_that_were_given_up_look_different() -> None:
    figure = plots.runs_figure(
        "p", {"static": (run(1.0, 6700.0), run(1.0, 9000.0, finished=False))}
    )
    labels = [dots.get_label() for dots in figure.axes[0].collections]
    assert labels == ["static", "static: given up"]


def test_what_was_learned_is_drawn_below() -> None:
    curve = (Point(0, 0.0, 0.1, 2.3), Point(20, 60.0, 0.8, 0.6))
    figure = plots.runs_figure("p", {"static": (run(1.0, 6700.0),)}, {"static": (curve,)})
    _, below = figure.axes
    assert below.lines[0].get_xydata() == pytest.approx(np.array([[0, 10], [60, 80]]))
    assert "accuracy" in below.get_ylabel()


def test_a_picture_that_cannot_be_kept_is_refused_beforehand(world: World, tmp_path: Path) -> None:
    for name, message in (("plan.gif", "must end with .png"), ("gone/plan.png", "no folder")):
        file = str(tmp_path / name)
        said = world.run("plan", *options(), "--plot", file, code=exits.REFUSED).stderr
        assert said.startswith("error: --plot: ")
        assert message in said
    (tmp_path / "plan.png").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        plots.save(plots.runs_figure("p", {"static": (run(1.0, 1.0),)}), tmp_path / "plan.png")


def test_without_matplotlib_it_is_told_how_to_get_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = str(tmp_path / "plan.png")
    said = world.run("plan", *options(), "--plot", file, code=exits.REFUSED).stderr
    assert said == "error: --plot: needs matplotlib: pip install 'doll[plots]'\n"
