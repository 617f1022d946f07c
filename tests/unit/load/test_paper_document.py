"""Pages whose sections can be replaced one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.spot.experiments.results import PoolUse, RunsSummary, SimulatedRun, Spread
from load.paper import plots
from load.paper.document import Section, interval, listed, percent, write

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.policy_names import StreamPolicyName


def section(title: str, words: str) -> Section:
    found = Section(title, {"said": words})
    found.say(words)
    return found


def test_rewriting_one_part_keeps_the_others(tmp_path: Path) -> None:
    order = ("first", "second")
    write(tmp_path, {"first": section("One", "old"), "second": section("Two", "kept")}, order, "#")
    write(tmp_path, {"first": section("One", "new")}, order, "#")
    text, data = (tmp_path / "README.md").read_text(), (tmp_path / "results.json").read_text()
    assert "old" not in text
    assert text.index("new") < text.index("kept")
    assert json.loads(data) == {"first": {"said": "new"}, "second": {"said": "kept"}}


def test_parts_are_in_order_regardless_of_when_they_were_written(tmp_path: Path) -> None:
    order = ("first", "second")
    write(tmp_path, {"second": section("Two", "b")}, order, "#")
    write(tmp_path, {"first": section("One", "a")}, order, "#")
    text = (tmp_path / "README.md").read_text()
    assert text.index("## One") < text.index("## Two")


def test_table_has_the_columns_of_its_head() -> None:
    found = Section("T")
    found.table(" | a | b", ["x | 1 | 2"])
    lines = found.blocks[0].splitlines()
    assert lines == ["|  | a | b |", "| --- | ---: | ---: |", "| x | 1 | 2 |"]


def test_paragraphs_are_wrapped_and_lists_indented() -> None:
    found = Section("T")
    found.point("word " * 60, "")
    lines = found.blocks[0].splitlines()
    assert all(len(line) <= 120 for line in lines)
    assert lines[0].startswith("- word")
    assert all(line.startswith("  word") for line in lines[1:])


def test_missed_goal_is_marked_and_recorded() -> None:
    found = Section("T")
    assert found.judge(reached=True, what="fine") == "reached"
    assert found.judge(reached=False, what="cost") == "NOT REACHED"
    assert found.missed == ["cost"]


@pytest.mark.parametrize(
    ("words", "joined"), [([], ""), (["a"], "a"), (["a", "b", "c"], "a, b and c")]
)
def test_listed_joins_words_as_in_a_sentence(words: list[str], joined: str) -> None:
    assert listed(words) == joined


def test_shares_are_written_in_percent() -> None:
    assert percent(0.80186, 2) == "80.19 %"
    assert percent(None) == "\N{EN DASH}"
    assert interval(0.5, 0.625, 0) == "[50, 62]"
    assert interval(None, None) == ""


def test_plots_are_small_enough_for_the_repository(tmp_path: Path) -> None:
    spread = Spread(0.8, 0.01, 0.79, 0.81)
    costs: dict[StreamPolicyName, float] = {"static": 0.9, "adaptive": 0.8, "pools": 0.5}
    groups = {
        f"group {number}": {f"series {each}": costs for each in range(30)} for number in range(4)
    }
    machines = (PoolUse("spot", 24.0, 1.0, 1, 0),)
    run = SimulatedRun(1, 0, True, 6000.0, 6400.0, 10.0, 30.0, machines)  # noqa: FBT003 -- finished
    one = RunsSummary.of([run, replace(run, runtime_s=7000.0)])
    curve = {"times_s": np.array([1.0, 10.0]), "dispersion": np.array([0.05, 0.001])}
    figures = {
        "bars.png": plots.bars([("static", spread, 0.695, 0.7986), ("drawn", spread, None, None)]),
        "series.png": plots.series(groups),
        "policies.png": plots.policies({"setting": {"static": one}}),
        "law.png": plots.dispersion({"64 workers": curve}, 1 / 20, 1 / 5120),
    }
    found = Section("T", figures=figures)
    write(tmp_path, {"part": found}, ("part",), "#")
    sizes = {name: (tmp_path / name).stat().st_size for name in figures}
    assert all(0 < size < 150_000 for size in sizes.values()), sizes
