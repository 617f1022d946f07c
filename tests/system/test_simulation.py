"""The protocol in virtual time: under every fault that we know, every invariant holds."""

from __future__ import annotations

from dataclasses import replace

from common.simulation.cluster import Cluster
from common.simulation.scenario import from_seed
from common.simulation.seeds import run_seeds

SEEDS = 1000


def test_a_thousand_seeds_violate_nothing() -> None:
    outcomes = list(run_seeds(range(SEEDS)))
    failures = [
        f"{outcome.failure}  (python -m common.simulation --story {outcome.seed})"
        for outcome in outcomes
        if outcome.failure
    ]
    assert failures == []
    assert len(outcomes) == SEEDS
    assert sum(outcome.takeovers for outcome in outcomes) > SEEDS  # they did not pass idly


def test_a_seed_is_one_story() -> None:
    def told(seed: int) -> list[str]:
        lines = list[str]()
        Cluster(from_seed(seed), lambda now, text: lines.append(f"{now} {text}")).run()
        return lines

    assert told(7) == told(7)
    assert told(7) != told(8)


def test_without_faults_nothing_is_quarantined_and_one_leader_is_enough() -> None:
    calm = replace(from_seed(3), faults=(), lossy=0.0, copies=0.0, bad=frozenset(), poisons=())
    outcome = Cluster(calm).run()
    assert (outcome.failure, outcome.takeovers, outcome.quarantined) == ("", 1, 0)
