"""`doll simulate` runs an experiment under one or several policies, and prints the results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from common.config.policy_names import STREAM_POLICIES
from common.spot.experiments.results import LearningPoint, PoolUse, RunsSummary, SimulatedRun
from common.spot.experiments.spec import Experiment
from common.spot.planning.compare import as_data, compare, with_policies
from services.cli import exits
from services.cli.commands.simulate import draw, title

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.unit.cli.conftest import World

# A shell makes its background processes ignore SIGINT.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("services.cli", run_name="__main__")
"""
PAPER = Path(__file__).parents[3] / "docs" / "examples" / "paper.yaml"
SMALL = """
name: small
workers: 4
rates: 50
group_size: 2
batch_size: 10
updates: 60
deadline_factor: 1.4
gradient: {mean_s: 0.01}
on_demand: {usd_per_hour: 0.286}
spot: [{usd_per_hour: 0.158, availability: 0.8, cycle_s: 20}]
"""


def run(
    cost_usd: float, runtime_s: float, *, finished: bool = True, deadline_s: float = 6720.0
) -> SimulatedRun:
    """Return a run with half of its cost and machine time on spot. On demand it would cost $10."""
    pools = (
        PoolUse("on-demand", cost_usd / 2, runtime_s, 1, 0),
        PoolUse("spot", cost_usd / 2, runtime_s, 3, 2),
    )
    return SimulatedRun(0, 0, finished, runtime_s, deadline_s, 10000.0, 10.0, pools)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def shown(experiment: Experiment, results: Mapping[str, tuple[SimulatedRun, ...]]) -> str:
    """Return the printed text, with single spaces."""
    from rich.console import Console  # noqa: PLC0415 -- only here

    console = Console(width=200, record=True, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(draw(experiment, as_data(experiment, 0, results)))
    return re.sub(r" +", " ", captured.get())


def test_example_experiment_is_that_of_the_paper() -> None:
    experiment = Experiment.load(PAPER)
    records = experiment.updates * experiment.group_size * experiment.batch_size
    assert records / (experiment.workers * 125) == 6400  # theta_0
    assert title(experiment, 12).startswith("paper: 64 workers, 125 records/s each, K=20, b=256")


def test_policies_are_compared_in_one_table_and_one_json_object(world: World, file: str) -> None:
    line = ("simulate", file, "--runs", "3", "--policy", "on-demand", "--policy", "static")
    data = json.loads(world.run(*line, "--json").stdout)
    assert (data["experiment"], data["seed"]) == ("small", 0)
    assert list(data["summary"]) == list(data["runs"]) == ["on-demand", "static"]
    assert [len(runs) for runs in data["runs"].values()] == [3, 3]
    assert data["summary"]["on-demand"]["spot_share"] == 0
    assert data["summary"]["static"]["cost_ratio"]["mean"] < 1
    table = world.run(*line).stdout
    assert re.search(r"^ *on-demand +0\.0*[1-9]\d\d±", table, re.MULTILINE)
    assert re.search(r"^ *static +0\.0*[1-9]\d\d±", table, re.MULTILINE)
    assert "3 runs" in table


def test_progress_is_written_to_stderr(world: World, file: str) -> None:
    result = world.run("simulate", file, "--runs", "2", "--json")
    assert "static" in result.stderr
    assert "100%" in result.stderr
    json.loads(result.stdout)


def test_same_seed_gives_the_same_result(world: World, file: str) -> None:
    line = ("simulate", file, "--runs", "2", "--json", "--seed")
    first, again, other = (world.run(*line, seed).stdout for seed in ("7", "7", "8"))
    assert first == again
    assert json.loads(first)["runs"] != json.loads(other)["runs"]


def test_interrupt_ends_a_simulation_and_its_process(file: str) -> None:
    Path(file).write_text(SMALL.replace("updates: 60", "updates: 100000000"))
    line = (sys.executable, "-c", INTERRUPTIBLE, "simulate", file, "--runs", "1000")
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stderr=pipe, stdout=pipe, start_new_session=True) as command:  # noqa: S603 -- our own command line
        while not (children := psutil.Process(command.pid).children()):
            time.sleep(0.01)
        # A terminal does the same.
        os.killpg(command.pid, signal.SIGINT)
        said = b"".join(command.communicate())
    assert command.returncode == 128 + signal.SIGINT
    assert b"Traceback" not in said
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_dead_simulation_process_is_reported_with_its_status(
    world: World, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = (sys.executable, "-c", "raise SystemExit(7)")
    monkeypatch.setattr("services.cli.commands.simulate.command_of", lambda *_: dies)
    said = world.run("simulate", file, code=exits.FAILED).stderr
    assert "error: the simulation process ended early with status 7" in said


def test_experiment_reads_files_relative_to_its_own(
    world: World, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(file)
    monkeypatch.chdir(path.parent)
    Path("prices.csv").write_text("seconds,usd\n0,0.158\n900,0.158\n")
    path.write_text(SMALL.replace("usd_per_hour: 0.158", "usd_per_hour: {file: prices.csv}"))
    traced = json.loads(world.run("simulate", path.name, "--json").stdout)
    assert traced["summary"]["static"]["cost_usd"]["mean"] > 0


def test_learning_experiment_reports_its_accuracy(world: World, tmp_path: Path) -> None:
    path = tmp_path / "learning.yaml"
    path.write_text(SMALL + "mode: protocol\nlearning: {evaluate_every: 20}\n")
    data = json.loads(world.run("simulate", str(path), "--runs", "2", "--json").stdout)
    curves = data["curves"]["static"]
    assert [[point["version"] for point in curve] for curve in curves] == [[0, 20, 40, 60]] * 2
    assert all(curve[-1]["accuracy"] > curve[0]["accuracy"] + 0.2 for curve in curves)


def test_progress_of_several_runs_never_decreases(file: str) -> None:
    reported = list[tuple[str, float]]()
    variants = with_policies(Experiment.load(Path(file)), ["static", "chance"])
    results = compare(variants, Path(file).parent, 2, 0, lambda *each: reported.append(each))
    assert list(results) == ["static", "chance"]
    for name in results:
        shares = [share for policy, share in reported if policy == name]
        assert shares == sorted(shares)
        assert shares[-1] == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("workers: 4", "workers: 0", "workers: must be at least 1, got 0"),
        ("updates:", "update:", 'unknown field "update" (did you mean "updates"?)'),
        ("deadline_factor: 1.4", "", "deadline_s, deadline_factor: give exactly one"),
    ],
)
def test_invalid_experiment_is_rejected(
    world: World, file: str, old: str, new: str, message: str
) -> None:
    Path(file).write_text(SMALL.replace(old, new))
    said = world.run("simulate", file, code=exits.REFUSED).stderr
    assert message in said
    assert said.count("\n") == 1


def test_missing_experiment_file_is_named(world: World, tmp_path: Path) -> None:
    said = world.run("simulate", str(tmp_path / "gone.yaml"), code=exits.REFUSED).stderr
    assert "gone.yaml" in said


def test_unknown_policy_is_rejected_with_the_known_ones(world: World, file: str) -> None:
    said = world.run("simulate", file, "--policy", "statik", code=exits.REFUSED).stderr
    assert said.startswith("error: --policy: must be 'on-demand', 'static', ")
    assert said.endswith('got "statik"\n')


def test_simulation_of_the_whole_protocol_shows_throughput(world: World, file: str) -> None:
    path, mode = Path(file), "mode: protocol\nspeeds: [1, 1, 1, 0.5]\n"
    path.write_text(SMALL + mode + "synchronisation: {mode: stale, staleness: 2}\n")
    said = world.run("simulate", file, "--runs", "2").stdout
    assert "stale s=2" in said
    assert re.search(r"^static +[\d.]+ +[\d.]+ +\d+ +[\d.]+ to [\d.]+$", said, re.MULTILINE)
    data = json.loads(world.run("simulate", file, "--runs", "2", "--json").stdout)
    assert len(data["summary"]["static"]["throughput"]["shares"]) == 4
    assert {"batches_per_s", "mean_staleness", "largest_staleness"} < set(
        data["runs"]["static"][0]["throughput"]
    )


def test_unknown_synchronisation_field_of_an_experiment_is_named(world: World, file: str) -> None:
    Path(file).write_text(SMALL + "mode: protocol\nsynchronisation: {mode: stale, stalness: 1}\n")
    said = world.run("simulate", file, code=exits.REFUSED).stderr
    assert 'unknown field "synchronisation.stalness" (did you mean "staleness"?)' in said


def test_table_shows_means_intervals_and_deadline_hits() -> None:
    results = {"static": (run(4.0, 6700.0), run(6.0, 6800.0))}
    text = shown(Experiment.load(PAPER), results)
    half = RunsSummary.of(results["static"]).cost_usd
    assert half.high is not None
    assert f"5.00±{half.high - half.mean:.2f} 50.0±" in text
    assert "6,750±" in text
    assert "50 [9,91] 50.0 2.0 0.0" in text
    assert "given up" not in text


def test_single_run_has_no_interval() -> None:
    text = shown(Experiment.load(PAPER), {"static": (run(4.0, 6700.0),)})
    assert "static 4.00 40.0 6,700 100 [" in text
    assert ", 1 run\n" in text


def test_unfinished_runs_are_reported() -> None:
    results = {"static": (run(4.0, 6700.0), run(6.0, 9e4, finished=False))}
    assert "1 of 2" in shown(Experiment.load(PAPER), results)


def test_accuracy_is_that_of_the_last_evaluation(file: str) -> None:
    path = Path(file)
    path.write_text(SMALL + "mode: protocol\nlearning: {}\n")
    curve = (LearningPoint(0, 0.0, 0.1, 2.3), LearningPoint(20, 60.0, 0.875, 0.6))
    results = {"static": (replace(run(4.0, 6700.0), curve=curve),)}
    experiment = Experiment.load(path)
    assert "87.5" in shown(experiment, results)
    data: dict[str, Any] = as_data(experiment, 3, results)
    assert data["curves"]["static"][0][1] == {
        "version": 20,
        "at_s": 60.0,
        "accuracy": 0.875,
        "loss": 0.6,
    }


def test_help_has_an_example_and_names_all_policies(world: World) -> None:
    text = " ".join(world.run("simulate", "--help").stdout.split())
    assert "Example: doll simulate docs/examples/paper.yaml" in text
    for name in STREAM_POLICIES:
        assert name in text
