"""Runs one experiment under several policies. Not for other commands: it brings scipy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from common.errors import UserError
from common.simulation.experiments.experiment import learner_of, simulate, simulate_full
from common.theory.policy import POLICY_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from common.simulation.experiments.learning import Point
    from common.simulation.experiments.outcome import Run
    from common.simulation.experiments.spec import Experiment


class Result(NamedTuple):
    """What came of one policy."""

    runs: tuple[Run, ...]
    curves: tuple[tuple[Point, ...], ...] = ()  # one per run, where something was learned


def with_policies(experiment: Experiment, names: Sequence[str]) -> dict[str, Experiment]:
    """Give an experiment each of these policies; its own where none is named.

    The policy `reassign` makes sense only where streams move to the survivors: it changes that,
    too.

    Raises:
        UserError: If there is no such policy.
    """
    variants = dict[str, "Experiment"]()
    for name in names or [experiment.policy.name]:
        if name not in POLICY_NAMES:
            raise UserError(f"--policy: must be one of {', '.join(POLICY_NAMES)}, got {name!r}")
        policy = experiment.policy.model_copy(update={"name": name})
        waits = "reassign" if name == "reassign" else experiment.on_preemption
        update = {"policy": policy, "on_preemption": waits}
        variants[name] = experiment.model_copy(update=update)
    return variants


def compare(
    variants: Mapping[str, Experiment],
    folder: Path,
    runs: int,
    seed: int,
    progress: Callable[[str, float], None],
) -> dict[str, Result]:
    """Run each variant so many times.

    Args:
        variants: By the name of their policy.
        folder: What their files are relative to.
        runs: Of each.
        seed: The same for all, so that they meet the same prices and preemptions.
        progress: Is told the policy and the share of its runs that is done.

    Raises:
        UserError: If a file cannot be read, or a number makes no sense.
    """
    results = dict[str, Result]()
    for name, experiment in variants.items():
        done = _Done(name, runs, progress)
        if experiment.learning is None:
            results[name] = Result(simulate(experiment, folder, runs, seed, done.all))
        else:
            results[name] = _learn(experiment, folder, seed, done)
        progress(name, 1.0)
    return results


class _Done:
    """Tells how much of one policy's runs is done, of all at once or one after the other."""

    def __init__(self, name: str, runs: int, tell: Callable[[str, float], None]) -> None:
        self._name = name
        self._tell = tell
        self.runs = runs
        self.index = 0

    def all(self, share: float) -> None:
        self._tell(self._name, share)

    def one(self, share: float) -> None:
        self._tell(self._name, (self.index + share) / self.runs)


def _learn(experiment: Experiment, folder: Path, seed: int, done: _Done) -> Result:
    runs, curves = list["Run"](), list[tuple["Point", ...]]()
    for index in range(done.runs):
        done.index = index
        learner = learner_of(experiment, folder, seed + index)
        runs.append(simulate_full(experiment, folder, seed + index, done.one, learner).run)
        curves.append(tuple(learner.curve) if learner is not None else ())
    return Result(tuple(runs), tuple(curves))
