"""The command's options, and its simulations on a few processes, each once, with a progress bar."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from rich import progress

from common.spot.experiments.experiment import simulate
from common.spot.experiments.results import RunsSummary, SimulatedRun
from common.spot.theory.provisioning import Plan, plan
from load.paper.job import NOTHING, Case, Setting, Variation, experiment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from common.config.policy_names import StreamPolicyName
    from common.spot.experiments.spec import Experiment

# Runs of each setting in the paper.
FEW = 12


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of the command."""

    runs: int
    seed: int
    quick: bool
    # Recorded traces and images. None without data.
    data: Path | None
    # Folder for files that simulations read.
    scratch: Path
    # Optional. Prices for markets. If unset, those of the data.
    prices: Path | None = None
    # Optional. Zones. If unset, those of the data.
    availability: Path | None = None
    # True to run a job on processes, too.
    live: bool = False


class Outcome(NamedTuple):
    """Results of a case."""

    runs: tuple[SimulatedRun, ...]  # without their histories
    # Mean number of decisions after the first of a run.
    changes: float
    summary: RunsSummary  # all runs

    @property
    def few(self) -> RunsSummary:
        """Summary of as many runs as the paper made."""
        return RunsSummary.of(self.runs[:FEW])


def _outcome(work: tuple[Experiment, Path, int, int]) -> Outcome:
    """Run an experiment. At module level, so that another process finds it by its name."""
    found = simulate(*work)
    runs = tuple(replace(run, history=()) for run in found)
    return Outcome(runs, sum(run.changes for run in found) / len(found), RunsSummary.of(runs))


Wanted = TypeVar("Wanted")
Got = TypeVar("Got")


class Runner:
    """Worker processes and a progress bar.

    Args:
        processes: Number of processes. With 1, everything runs in this one.
        show: Draw the bar.
    """

    def __init__(self, asked: Asked, processes: int = 1, *, show: bool = False) -> None:
        self.asked = asked
        self._pool: Executor = ThreadPoolExecutor(1)
        if processes > 1:
            # Spawned, because a fork of a process that has run torch's threads may deadlock.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, context)
        self._progress = progress.Progress(
            "{task.description}",
            *(progress.BarColumn(), progress.TaskProgressColumn(), progress.MofNCompleteColumn()),
            progress.TimeElapsedColumn(),
            "{task.fields[now]}",
            disable=not show,
        )
        # Outcomes by name and number of runs.
        self._done: dict[tuple[str, int], Outcome] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._pool.shutdown(cancel_futures=True)

    def simulated(self, title: str, cases: Iterable[Case], runs: int = 0) -> dict[str, Outcome]:
        """Run all cases that have not been run before. Returns the outcomes by name.

        The seed is the same for all of them, so all policies see the same rates and preemptions.

        Args:
            title: Title of the bar.
            cases: Cases to simulate.
            runs: Optional. Runs of each case. If unset, the command's number.
        """
        runs = runs or self.asked.runs
        wanted = {case.name: case for case in cases}
        new = {
            name: (experiment(*case), self.asked.scratch, runs, self.asked.seed)
            for name, case in wanted.items()
            if (name, runs) not in self._done
        }
        found = self.map(title, _outcome, new)
        self._done.update({(name, runs): outcome for name, outcome in found.items()})
        return {name: self._done[name, runs] for name in wanted}

    def of(
        self, setting: Setting, policy: StreamPolicyName, change: Variation = NOTHING, runs: int = 0
    ) -> Outcome:
        """Return the outcome of a case. Runs it if it has not been run before."""
        case = Case(setting, policy, change)
        (outcome,) = self.simulated(case.name, [case], runs).values()
        return outcome

    def plans(self, setting: Setting) -> list[Plan]:
        """Apply Theorems 4 and 5 to each run of a setting, with the rates that it draws."""
        asked = self.asked
        works = setting.works(asked.runs, asked.seed, asked.scratch)
        return [plan(work, setting.market) for work in works]

    def map(
        self, title: str, do: Callable[[Wanted], Got], works: Mapping[str, Wanted]
    ) -> dict[str, Got]:
        """Run all works. Returns the results by name, in the order of the works."""
        if not works:
            return {}
        bar = self._progress.add_task(title, total=len(works), now="")
        futures = {self._pool.submit(do, work): name for name, work in works.items()}
        found = dict[str, Got]()
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            self._progress.update(bar, advance=1, now=futures[future])
        self._progress.update(bar, now="")
        return {name: found[name] for name in works}
