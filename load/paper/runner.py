"""What is asked for, and its simulations on a few processes, each once, with a progress bar."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from common.simulation.experiments.experiment import simulate
from common.simulation.experiments.outcome import Summary
from load.paper.job import NOTHING, experiment

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from pathlib import Path

    from common.policies.policy import PolicyName
    from common.simulation.experiments.outcome import Run
    from common.simulation.experiments.spec import Experiment
    from load.paper.document import Section
    from load.paper.job import Setting, Variation

FEW = 12  # runs of each setting in the paper


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What an experiment gave."""

    runs: tuple[Run, ...]  # without their histories
    changes: float  # decisions after the first, per run

    @property
    def summary(self) -> Summary:
        """Of all runs."""
        return Summary.of(self.runs)

    @property
    def few(self) -> Summary:
        """Of as many runs as the paper made."""
        return Summary.of(self.runs[:FEW])


class Work(Protocol):
    """Something that a process can do by itself; its name tells two of them apart."""

    @property
    def name(self) -> str:
        """What the bar calls it."""
        ...


@dataclass(frozen=True, slots=True)
class Simulation:
    """An experiment to be run so many times; its name says all that differs from others'."""

    experiment: Experiment
    folder: Path  # of its traces
    runs: int
    seed: int

    @property
    def name(self) -> str:
        """The experiment's."""
        return self.experiment.name


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command was asked for."""

    runs: int
    seed: int
    quick: bool
    data: Path | None  # recorded traces and images; None: there are none
    scratch: Path  # for files that simulations read

    def simulation(
        self, setting: Setting, policy: PolicyName, change: Variation = NOTHING, runs: int = 0
    ) -> Simulation:
        """Make a simulation of one setting and policy; the same seed for all of them.

        So all policies see the same rates and preemptions.
        """
        wanted = experiment(setting, policy, change)
        return Simulation(wanted, self.scratch, runs or self.runs, self.seed)


def carry_out(simulation: Simulation) -> Outcome:
    """Run it; here rather than as a method, so that another process finds it by its name."""
    runs = simulate(simulation.experiment, simulation.folder, simulation.runs, simulation.seed)
    changes = sum(run.changes for run in runs) / len(runs)
    return Outcome(tuple(replace(run, history=()) for run in runs), changes)


def _say_nothing() -> None:
    """Discard what libraries print: HiGHS prints lines for its own authors, into our bar."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


Wanted = TypeVar("Wanted", bound=Work)
Got = TypeVar("Got")


class Runner:
    """Some processes and a bar.

    Args:
        processes: 1: everything happens in this one.
        show: Whether to draw the bar.
    """

    def __init__(self, processes: int = 1, *, show: bool = False) -> None:
        # Spawned: a fork of a process that has run torch's threads may stand still for ever.
        context = multiprocessing.get_context("spawn")
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            self._pool = ProcessPoolExecutor(processes, context, initializer=_say_nothing)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            disable=not show,
        )
        self._done: dict[Hashable, Outcome] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def simulated(self, title: str, simulations: Sequence[Simulation]) -> Mapping[str, Outcome]:
        """Run all that have not been run before; give what came of each, by its name."""
        keys = {(each.name, each.runs, each.seed): each for each in simulations}
        new = [each for key, each in keys.items() if key not in self._done]
        found = self.map(title, carry_out, new)
        self._done.update({(each.name, each.runs, each.seed): found[each.name] for each in new})
        return {name: self._done[name, runs, seed] for name, runs, seed in keys}

    def map(
        self, title: str, do: Callable[[Wanted], Got], works: Sequence[Wanted]
    ) -> dict[str, Got]:
        """Do all of it; results are by name."""
        if not works:
            return {}
        bar = self._progress.add_task(title, total=len(works), now="")
        found: dict[str, Got] = {}
        if self._pool is None:
            for work in works:
                self._progress.update(bar, now=work.name)
                found[work.name] = do(work)
                self._progress.advance(bar)
        else:
            waiting: dict[Future[Got], str] = {
                self._pool.submit(do, work): work.name for work in works
            }
            for future in as_completed(waiting):
                found[waiting[future]] = future.result()
                self._progress.update(bar, advance=1, now=waiting[future])
        self._progress.update(bar, now="")
        return {work.name: found[work.name] for work in works}


class Part(Protocol):
    """Does one part of the evaluation and says what it found."""

    def __call__(self, asked: Asked, runner: Runner) -> Section:
        """Do it."""
        ...
