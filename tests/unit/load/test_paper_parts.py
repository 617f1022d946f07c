"""Parts of the reproduction on few runs, and the command that writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from load.paper import stated
from load.paper.__main__ import main, parse
from load.paper.accuracy import Lesson, learn
from load.paper.document import Section
from load.paper.equations import run as equations
from load.paper.explanations import explain_static
from load.paper.job import PAIRS, UPDATES, Case, Setting
from load.paper.runner import Asked, Runner
from load.paper.updates_law import FEW, FEW_LATER, MANY_LATER, SIGNIFICANT, Streams, p_value
from tests.changes import once_changed

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(name="asked")
def few_runs(tmp_path: Path) -> Asked:
    return Asked(12, 1, quick=True, data=None, scratch=tmp_path)


@pytest.mark.parametrize(
    ("streams", "t_s", "printed", "renewal"),
    [
        (FEW, 6400.0, False, True),
        (FEW_LATER, 64.0, False, True),
        (FEW, 64.0, False, False),
        (MANY_LATER, 5.0, True, False),
    ],
    ids=["the paper's job", "offset phases", "aligned phases", "many slow streams, a short time"],
)
def test_each_update_law_fits_only_its_regime(
    streams: Streams, t_s: float, *, printed: bool, renewal: bool
) -> None:
    (found,) = streams.sample(np.array([t_s]), 400, np.random.default_rng(1))
    assert (p_value(found, streams.printed(t_s)) >= SIGNIFICANT) is printed
    assert (p_value(found, streams.renewal(t_s)) >= SIGNIFICANT) is renewal


@once_changed(
    *("common/core/", "common/spot/policies/", "common/simulation/", "common/spot/theory/"),
    *("load/paper/", "tests/unit/load/test_paper_parts.py"),
)
def test_static_cost_equals_equations_16_and_22(asked: Asked) -> None:
    with Runner(asked) as runner:
        section = equations(runner)
    assert section.missed == []
    assert section.data["theorem 4 agrees"]
    for setting in (Setting(), Setting(rates="drawn")):
        assert abs(section.data[setting.key]["cost_off"]) < 0.01


def test_static_with_fewer_updates_costs_what_the_paper_states(asked: Asked) -> None:
    section = Section("T")
    with Runner(asked) as runner:
        explain_static(section, runner)
    (found,) = section.data["fewer updates"].values()
    assert found["updates"] < UPDATES
    assert found["cost_share"] == pytest.approx(stated.STATIC["equal"][PAIRS[0]], abs=0.005)


def test_runner_simulates_a_shared_case_once(asked: Asked) -> None:
    one = Case(Setting(), "static")
    with Runner(asked) as runner:
        first = runner.simulated("a", [one])[one.name]
        assert runner.simulated("b", [one, one])[one.name] is first
        assert runner.of(*one) is first


def test_lesson_with_real_gradients_gives_a_loss_curve(tmp_path: Path) -> None:
    curve = learn(Lesson("static", 0.9, 1.05, 10, "digits", tmp_path, 1))
    assert curve.updates == 10
    assert [point.version for point in curve.points] == list(range(11))
    assert curve.points[-1].loss < curve.points[0].loss


def test_command_can_write_a_single_part(tmp_path: Path) -> None:
    words = ["--quick", "--only", "theorem1", "--processes", "1", "--out", str(tmp_path)]
    assert main(words) == 0
    assert (tmp_path / "README.md").read_text().startswith("# Section V")
    assert list(json.loads((tmp_path / "results.json").read_text())) == ["theorem1"]


@pytest.mark.parametrize("words", [["--data", "nowhere"], ["--runs", "3"], ["--processes", "0"]])
def test_command_with_invalid_options_exits_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "--" in capsys.readouterr().err


def test_command_with_an_unknown_part_exits() -> None:
    with pytest.raises(SystemExit):
        parse(["--only", "figure 7"])
