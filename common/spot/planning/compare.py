"""Runs one experiment under several policies, and tells what came of it as plain data.

Not for every command: it brings scipy.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from common.spot.experiments.experiment import learner_of, simulate, simulate_by_protocol
from common.spot.experiments.results import LearningPoint, RunsSummary, SimulatedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from common.config.policy_names import PolicyName
    from common.spot.experiments.spec import Experiment


class Result(NamedTuple):
    """What came of one policy."""

    runs: tuple[SimulatedRun, ...]
    curves: tuple[tuple[LearningPoint, ...], ...] = ()  # one per run, where something was learned


def with_policies(experiment: Experiment, names: Sequence[PolicyName]) -> dict[str, Experiment]:
    """Give an experiment each of these policies; its own where none is named."""
    variants = dict[str, "Experiment"]()
    for name in names or [experiment.policy.name]:
        policy = experiment.policy.model_copy(update={"name": name})
        variants[name] = experiment.model_copy(update={"policy": policy})
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
        report = partial(progress, name)
        if experiment.learning is None:
            results[name] = Result(simulate(experiment, folder, runs, seed, report))
        else:
            results[name] = _learn(experiment, folder, runs, seed, report)
        report(1.0)
    return results


def as_data(experiment: Experiment, seed: int, results: Mapping[str, Result]) -> dict[str, Any]:
    """The results as plain data, by policy."""
    data: dict[str, Any] = {
        "experiment": experiment.name,
        "seed": seed,
        "summary": {name: RunsSummary.of(it.runs).as_dict() for name, it in results.items()},
        "runs": {name: [run.as_dict() for run in it.runs] for name, it in results.items()},
    }
    if experiment.learning is not None:
        data["curves"] = {
            name: [[asdict(point) for point in curve] for curve in it.curves]
            for name, it in results.items()
        }
    return data


def _learn(
    experiment: Experiment, folder: Path, runs: int, seed: int, report: Callable[[float], None]
) -> Result:
    found, curves = list[SimulatedRun](), list[tuple[LearningPoint, ...]]()
    for index in range(runs):

        def one(share: float, before: int = index) -> None:
            report((before + share) / runs)

        learner = learner_of(experiment, folder, seed + index)
        found.append(simulate_by_protocol(experiment, folder, seed + index, one, learner).run)
        curves.append(tuple(learner.curve) if learner is not None else ())
    return Result(tuple(found), tuple(curves))
