"""Output of the synchronisation benchmark, on less data than it measures."""

from __future__ import annotations

import pytest

from common.config.synchronisation import SYNCHRONOUS, SynchronisationSpec
from common.learning.optimizers import OptimizerSettings
from common.spot.experiments.protocol import SimulatedJob
from load.harness.rows import ratings_like
from load.synchronisation import GRADIENT_S, batches_per_s, damped_over_slots
from load.throughput.learning import Learning


def test_growing_fleet_learns_faster_with_damping_by_staleness() -> None:
    planted = Learning(
        "matrix-factorisation",
        {"users": 100, "items": 60, "rank": 6, "regularisation": 0.02},
        lambda: ratings_like(100, 60, 12_000),
        OptimizerSettings("sgd", 1.0),
        batch_size=32,
        workers=8,
        metric="squared_error",
        target=0.9,
        root=True,
    )

    assert damped_over_slots(planted, 1) < 0.75


@pytest.mark.parametrize(("staleness", "gain"), [(0, 1.5), (1, 2.4)])
def test_one_slow_worker_does_not_limit_the_throughput(staleness: int, gain: float) -> None:
    given = SynchronisationSpec(mode="stale", staleness=staleness) if staleness else SYNCHRONOUS
    all_slow = batches_per_s([0.25] * 8, SimulatedJob(8, 1, 60, GRADIENT_S), variation=0.0)

    found = batches_per_s([*[1.0] * 7, 0.25], SimulatedJob(8, 1, 60, GRADIENT_S, given))

    assert found > gain * all_slow
