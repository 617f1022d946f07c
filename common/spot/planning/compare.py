"""Runs one experiment under several policies, and returns the results as plain data.

This module needs scipy, so not every command imports it.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from common.spot.experiments.experiment import simulate
from common.spot.experiments.results import RunsSummary, SimulatedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from common.config.policy_names import PolicyName
    from common.spot.experiments.spec import Experiment


def with_policies(experiment: Experiment, names: Sequence[PolicyName]) -> dict[str, Experiment]:
    """Return the experiment with each of these policies; with its own if none is named."""
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
) -> dict[str, tuple[SimulatedRun, ...]]:
    """Run each variant several times.

    Args:
        variants: Experiments by the name of their policy.
        folder: Folder of their files.
        runs: Number of runs of each.
        seed: The same for all, so that they have the same prices and preemptions.
        progress: Called with the policy and the share of its runs that is done.

    Raises:
        UserError: If a file cannot be read, or a number is invalid.
    """
    results = dict[str, tuple[SimulatedRun, ...]]()
    for name, experiment in variants.items():
        report = partial(progress, name)
        results[name] = simulate(experiment, folder, runs, seed, report)
        report(1.0)
    return results


def as_data(
    experiment: Experiment, seed: int, results: Mapping[str, Sequence[SimulatedRun]]
) -> dict[str, Any]:
    """Return the results as plain data, by policy."""
    data: dict[str, Any] = {
        "experiment": experiment.name,
        "seed": seed,
        "summary": {name: RunsSummary.of(runs).as_dict() for name, runs in results.items()},
        "runs": {name: [run.as_dict() for run in runs] for name, runs in results.items()},
    }
    if experiment.learning is not None:
        data["curves"] = {
            name: [[asdict(point) for point in run.curve] for run in runs]
            for name, runs in results.items()
        }
    return data
