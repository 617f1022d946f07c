"""A simulated job's settings, by revision, with times that make a few virtual seconds eventful."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.settings import CoordinatorSettings, WorkerSettings

if TYPE_CHECKING:
    from common.simulation.faults.world import World

BATCH_LINGER_S = 0.5
GROUP_LINGER_S = 0.7
LEASE_S = 1.0


def coordinator_settings(world: World, revision: int) -> CoordinatorSettings:
    """What a coordinator goes by that knows this revision.

    The learning rate is the revision's number: a step tells at which it was taken.
    """
    scenario, sizes = world.scenario, world.revisions[revision]
    return CoordinatorSettings(
        group_size=sizes.group_size,
        bound=sizes.bound,
        revision=revision,
        learning_rate=float(revision),
        group_linger_s=GROUP_LINGER_S if scenario.linger else None,
        on_missing=scenario.on_missing,
        deadline_floor_s=0.2,
        strikes=scenario.strikes,
        poison_in_a_row=scenario.in_a_row,
        hot_every_s=scenario.hot_s,
        checkpoint_every_s=1.5,
        checkpoint_every_updates=None,
        lease_ttl_s=LEASE_S,
    )


def worker_settings(world: World, revision: int) -> WorkerSettings:
    """What a worker goes by that knows this revision."""
    sizes = world.revisions[revision]
    linger_s = BATCH_LINGER_S if world.scenario.linger else None
    return WorkerSettings(sizes.batch_size, sizes.bound, linger_s, sizes.group_size)
