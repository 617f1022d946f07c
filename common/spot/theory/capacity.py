"""Proposition 1: the number of machines that keep up with arrivals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from common.spot.theory.work import Work

Array: TypeAlias = npt.NDArray[np.float64]

# Ratio of capacity to arrivals. At a load of 1 / 1.25 = 0.8, an update waits for about two others
# (M/D/1: load / (2 (1 - load))), and a gradient time that is underestimated by a fifth does no
# harm.
HEADROOM = 1.25
# Tolerance of a quotient that is an integer on paper: 20 / (20 / 3) is 3 rounds, not 4.
ROUNDING = 1e-9


def update_capacity_per_s(
    machines: Array, group_size: int, gradient_s: float, round_overhead_s: float = 0.0
) -> Array:
    """Return the updates per second of machines: 1 / (ceil(K / m) mu_C + overhead).

    The K gradients of an update are spread evenly. A machine computes its share in sequence, and
    the update waits for the last one. Without machines, the capacity is 0. Times are means: the
    slowest of K random ones takes longer, which the headroom covers.

    Args:
        machines: Any shape; sums of speeds, so not necessarily integers.
        group_size: K.
        gradient_s: mu_C.
        round_overhead_s: Overhead of each update.
    """
    busy = machines > 0
    rounds = np.ceil(
        np.divide(group_size, machines, out=np.ones(machines.shape), where=busy) - ROUNDING
    )
    return np.where(busy, 1 / (rounds * gradient_s + round_overhead_s), 0.0)


def machines_for_stability(work: Work, gradient_s: float, headroom: float = HEADROOM) -> int | None:
    """Return the fewest machines of speed 1 that keep up with arrivals (Proposition 1).

    K b / sum(lambda), the time from one group to the next, must be at least `headroom` times ceil(K
    / m) mu_C. None if not even a machine for each of the K gradients is enough.
    """
    return machines_for_rate(headroom * work.updates_per_s, work.group_size, gradient_s)


def machines_for_rate(updates_per_s: float, group_size: int, gradient_s: float) -> int | None:
    """Return the fewest machines of speed 1 that reach a rate of updates; None if none do."""
    rounds = math.floor(1 / (updates_per_s * gradient_s) + ROUNDING)
    return math.ceil(group_size / rounds) if rounds >= 1 else None


def waiting_for_policy(
    work: Work, waiting: float, gradient_s: float, *, backlog: bool
) -> tuple[Work, float | None]:
    """Convert the remaining work for a policy, which plans the backlog or only arrivals.

    A policy that plans only arrivals gets the work without the waiting records. But their gradients
    take time, too. So it gets at least as many updates as arrive while all machines compute the
    remaining gradients.

    Args:
        work: Remaining work, with waiting records.
        waiting: Updates whose records have arrived.
        gradient_s: mu_C.
        backlog: True if the policy plans the backlog, see `Policy.plans_backlog`.

    Returns:
        The work to plan, and the waiting updates; None for a policy that plans only arrivals.
    """
    waiting = min(max(waiting, 0.0), work.updates)
    if backlog:
        return work, waiting
    machines = np.array([float(work.workers)])
    capacity_per_s = float(update_capacity_per_s(machines, work.group_size, gradient_s).item())
    computed = work.updates * min(work.updates_per_s / capacity_per_s, 1.0)
    return replace(work, updates=max(work.updates - waiting, computed)), None
