"""Proposition 1: how many machines keep up with what arrives, and what arrives while they do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from common.spot.theory.work import Work

Array: TypeAlias = npt.NDArray[np.float64]

# Capacity over arrivals. At a load of 1 / 1.25 = 0.8 an update waits for about two others (M/D/1:
# load / (2 (1 - load))), and a gradient time underestimated by a fifth is no harm.
HEADROOM = 1.25
ROUNDING = 1e-9  # 20 / (20 / 3) is 3 rounds, not 4


def update_capacity_per_s(
    machines: Array, group_size: int, gradient_s: float, round_overhead_s: float = 0.0
) -> Array:
    """Give how many updates a second machines can make: 1 / (ceil(K / m) mu_C + overhead).

    The K gradients of an update are spread evenly; a machine computes its share one after the
    other, and the update waits for the last. No machine makes no update. Theirs are mean times: the
    slowest of K random ones takes longer, which is for the headroom.

    Args:
        machines: Any shape; not necessarily integers, but sums of speeds.
        group_size: K.
        gradient_s: mu_C.
        round_overhead_s: Of each update.
    """
    busy = machines > 0
    rounds = np.ceil(
        np.divide(group_size, machines, out=np.ones(machines.shape), where=busy) - ROUNDING
    )
    return np.where(busy, 1 / (rounds * gradient_s + round_overhead_s), 0.0)


def machines_for_stability(work: Work, gradient_s: float, headroom: float = HEADROOM) -> int | None:
    """Give the machines of speed 1 with which updates keep up with arrivals (Proposition 1).

    K b / sum(lambda), the time from one group to the next, must be at least `headroom` times
    ceil(K / m) mu_C. None: not even a machine for each of the K gradients does.
    """
    return machines_for_rate(headroom * work.updates_per_s, work.group_size, gradient_s)


def machines_for_rate(updates_per_s: float, group_size: int, gradient_s: float) -> int | None:
    """Give the fewest machines of speed 1 that make so many updates; None: none do."""
    rounds = math.floor(1 / (updates_per_s * gradient_s) + ROUNDING)
    return math.ceil(group_size / rounds) if rounds >= 1 else None


def waiting_for_policy(
    work: Work, waiting: float, gradient_s: float, *, backlog: bool
) -> tuple[Work, float | None]:
    """Say to a policy what waits: some plan with it, the others for what is to arrive yet.

    What waits need not arrive any more; but its gradients take their time all the same. So the work
    of the others is as many updates as would take as long to arrive as what is left takes at least.

    Args:
        work: What is left, with what waits.
        waiting: Updates whose records have arrived.
        gradient_s: mu_C.
        backlog: Whether it plans with it, see `Policy`.
    """
    waiting = min(max(waiting, 0.0), work.updates)
    if backlog:
        return work, waiting
    machines = np.array([float(work.workers)])
    capacity_per_s = float(update_capacity_per_s(machines, work.group_size, gradient_s).item())
    computed = work.updates * min(work.updates_per_s / capacity_per_s, 1.0)
    return replace(work, updates=max(work.updates - waiting, computed)), None
