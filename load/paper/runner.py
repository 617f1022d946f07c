"""What is asked for, and its simulations on a few processes, each once, with a progress bar."""

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

FEW = 12  # runs of each setting in the paper


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command was asked for."""

    runs: int
    seed: int
    quick: bool
    data: Path | None  # recorded traces and images; None: there are none
    scratch: Path  # for files that simulations read
    prices: Path | None = None  # of markets; None: those of the data
    availability: Path | None = None  # of zones; None: those of the data
    live: bool = False  # whether a job runs on processes, too


class Outcome(NamedTuple):
    """What the runs of a case gave."""

    runs: tuple[SimulatedRun, ...]  # without their histories
    changes: float  # decisions after the first, per run
    summary: RunsSummary  # of all runs

    @property
    def few(self) -> RunsSummary:
        """Of as many runs as the paper made."""
        return RunsSummary.of(self.runs[:FEW])


def _outcome(work: tuple[Experiment, Path, int, int]) -> Outcome:
    """Run an experiment; a function of the module, so that another process finds it by its name."""
    found = simulate(*work)
    runs = tuple(replace(run, history=()) for run in found)
    return Outcome(runs, sum(run.changes for run in found) / len(found), RunsSummary.of(runs))


Wanted = TypeVar("Wanted")
Got = TypeVar("Got")


class Runner:
    """Some processes and a bar.

    Args:
        processes: 1: everything happens in this one.
        show: Whether to draw the bar.
    """

    def __init__(self, asked: Asked, processes: int = 1, *, show: bool = False) -> None:
        self.asked = asked
        self._pool: Executor = ThreadPoolExecutor(1)
        if processes > 1:
            # Spawned: a fork of a process that has run torch's threads may stand still for ever.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, context)
        self._progress = progress.Progress(
            "{task.description}",
            *(progress.BarColumn(), progress.TaskProgressColumn(), progress.MofNCompleteColumn()),
            progress.TimeElapsedColumn(),
            "{task.fields[now]}",
            disable=not show,
        )
        self._done: dict[tuple[str, int], Outcome] = {}  # by name and number of runs

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._pool.shutdown(cancel_futures=True)

    def simulated(self, title: str, cases: Iterable[Case], runs: int = 0) -> dict[str, Outcome]:
        """Run all cases that have not been run before; give what came of each, by its name.

        The seed is the same for all of them, so all policies see the same rates and preemptions.

        Args:
            title: Of the bar.
            cases: What to simulate.
            runs: Of each, if not as many as were asked for.
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
        """What came of a case, which is run now if it has not been run before."""
        case = Case(setting, policy, change)
        (outcome,) = self.simulated(case.name, [case], runs).values()
        return outcome

    def plans(self, setting: Setting) -> list[Plan]:
        """Theorems 4 and 5 for each run of a setting, with the rates that it draws."""
        asked = self.asked
        works = setting.works(asked.runs, asked.seed, asked.scratch)
        return [plan(work, setting.market) for work in works]

    def map(
        self, title: str, do: Callable[[Wanted], Got], works: Mapping[str, Wanted]
    ) -> dict[str, Got]:
        """Do all of it; results are by name, in the order of the works."""
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
