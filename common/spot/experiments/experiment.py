"""Runs an experiment in its mode."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from common.learning.torch_here import need_torch
from common.spot.experiments.analytic import Array, Conditions, simulate_analytically
from common.spot.experiments.bids import simulate_bids
from common.spot.experiments.by_protocol import ProtocolSimulation
from common.spot.experiments.draws import ROUND_OVERHEAD_S, Draws, draws_of
from common.spot.experiments.policy_driver import Priors
from common.spot.policies.bidding import BidSettings
from common.spot.policies.pools import Pools
from common.spot.policies.registry import policy_of
from common.spot.theory.capacity import update_capacity_per_s
from common.spot.theory.estimates import RatePrior
from common.spot.traces.files import starts_of, traced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.spot.experiments.learning import Sgd
    from common.spot.experiments.results import SimulatedRun
    from common.spot.experiments.spec import Experiment
    from common.spot.policies.policy import Policy

# A policy that learns rates begins with their mean, as if observed for this time.
KNOWN_S = 10.0
# Policies that learn unknown inputs. The others plan once.
LEARNS = frozenset({"adaptive", "pools"})


def simulate(
    experiment: Experiment,
    folder: Path,
    runs: int,
    seed: int,
    progress: Callable[[float], None] = lambda _share: None,
) -> tuple[SimulatedRun, ...]:
    """Run an experiment several times.

    Args:
        experiment: The experiment, in either mode.
        folder: Folder of its files.
        runs: R.
        seed: The same seed gives the same rates, prices, preemptions and records.
        progress: Called with the share done, from 0 to 1.

    Raises:
        UserError: If a file cannot be read, or a number is invalid.
    """
    if experiment.mode == "protocol":
        parts = [partial(_part, progress, index, runs) for index in range(runs)]
        return tuple(
            _by_protocol(experiment, folder, seed + index, part) for index, part in enumerate(parts)
        )
    draws = draws_of(experiment, folder, runs, seed)
    if experiment.policy.name == "bidbrain":
        settings = BidSettings(**experiment.policy.bidbrain.model_dump())
        return simulate_bids(draws.givens, settings, _conditions(draws), seed, progress)
    return simulate_analytically(
        draws.givens,
        _policy(experiment),
        _conditions(draws),
        seed,
        _beliefs(draws),
        progress,
    )


def _by_protocol(
    experiment: Experiment, folder: Path, seed: int, progress: Callable[[float], None]
) -> SimulatedRun:
    """Run an experiment once through the production state machines."""
    draws, learner = draws_of(experiment, folder, 1, seed), learner_of(experiment, folder, seed)
    policy, beliefs = _policy(experiment), _beliefs(draws)
    run = ProtocolSimulation(draws, policy, beliefs, learner, progress).run()
    return run if learner is None else replace(run, curve=tuple(learner.curve))


def learner_of(experiment: Experiment, folder: Path, seed: int) -> Sgd | None:
    """Make an experiment's learner; None if it learns nothing.

    Raises:
        UserError: If its data set cannot be read, or PyTorch is not installed.
    """
    if experiment.learning is None:
        return None
    need_torch("learning: a simulation that learns")
    from common.spot.experiments.learning import sgd_of  # noqa: PLC0415 -- torch takes long

    most = experiment.most_staleness
    return sgd_of(experiment.learning, folder, experiment.workers, most, seed)


def _policy(experiment: Experiment) -> Policy:
    spec = experiment.policy
    pools = Pools(experiment.on_preemption, spec.spot_up_to, spec.max_lag_s)
    return policy_of(spec.name, spec.probability, spec.spot, pools)


def _beliefs(draws: Draws) -> Priors | None:
    if draws.experiment.policy.name not in LEARNS:
        return None
    mean_per_s = float(draws.givens.rates_per_s.mean())
    return Priors(RatePrior(mean_per_s * KNOWN_S, KNOWN_S))


def _conditions(draws: Draws) -> Conditions:
    experiment, givens = draws.experiment, draws.givens
    reassigns = experiment.on_preemption == "reassign"
    capacity = partial(
        update_capacity_per_s,
        group_size=givens.group_size,
        gradient_s=givens.gradient_s,
        round_overhead_s=ROUND_OVERHEAD_S,
    )
    return Conditions(
        draws.prices,
        draws.offers,
        pace=_pace(draws),
        stream="reassign" if reassigns else experiment.while_preempted,
        capacity_per_s=capacity if reassigns else None,
        last_round_s=givens.gradient_s + ROUND_OVERHEAD_S,
        backlog=experiment.arrivals.process == "backlog",
    )


def _pace(draws: Draws) -> Callable[[float], Array] | None:
    """Return a function of time that gives (R,) values of the trace over their mean.

    Each run has its own start in the trace. None without a trace.
    """
    spec = draws.experiment.arrivals.trace
    if spec is None:
        return None
    trace = traced(spec, draws.folder)
    (rng,) = draws.rng.spawn(1)
    starts_s, mean = starts_of(spec, trace, (draws.givens.runs,), rng), trace.mean()
    return lambda now_s: trace.value_at(starts_s + now_s) / mean


def _part(progress: Callable[[float], None], index: int, runs: int, share: float) -> None:
    progress((index + share) / runs)
