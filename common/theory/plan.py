"""A plan: how many machines of which kind, which workers they are, and what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Binding: TypeAlias = Literal[
    "deadline",  # one spot worker more and it would be missed (equation 23)
    "workers",  # every worker is spot already
    "cost",  # one spot worker more stretches the runtime by more than it saves (Theorem 5)
    "price",  # spot costs as much as on-demand, or more
    "availability",  # spot is never to be had
    "stability",  # fewer machines could not keep up with the arrivals (Proposition 1)
    "capacity",  # a pool has no more machines
    "infeasible",  # not even on-demand machines alone meet the deadline
]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to buy; where it is infeasible, what comes nearest: on-demand machines alone."""

    feasible: bool
    spot: int  # N_s, over all pools that may be preempted
    on_demand: int  # N_o
    spot_workers: npt.NDArray[np.int64]  # (N_s,) indexes into the rates; empty where none has one
    expected_cost_usd: float
    expected_runtime_s: float
    cost_ratio_to_on_demand: float  # against all workers on demand, which take theta_0
    binding: Binding
    reason: str  # a sentence for a person
