"""A policy: the state of a job and its market in, what every slot shall run on and why out.

A slot is a worker's place, one for each stream. It runs on a machine of one pool; while that one is
preempted, an on-demand machine may stand in. Policies are pure: who asks keeps the last decision,
and a policy that has nothing to change returns that very object.

    estimates + prices + what is left ──▶ reconsider ──▶ Decision ──▶ fleet
                                              ▲              │
                                              └──── last ◀───┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from common.theory.provisioning import Plan
    from common.theory.work import Pool, Work

PolicyName: TypeAlias = Literal[
    "on-demand",  # section V's yardstick
    "static",  # Theorems 4 and 5, once
    "adaptive",  # section V-C
    "chance",  # the deadline with a probability
    "backfill",  # on-demand machines stand in during outages
    "reassign",  # survivors take streams over: as few machines as can keep up
    "pools",  # several kinds of spot machines
]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

ON_DEMAND = 0  # the first pool is never preempted
NOWHERE = -1  # a slot without a machine, by choice: `reassign` needs fewer than there are streams

Places: TypeAlias = npt.NDArray[np.int8]  # (N_tot,) index of the pool of each slot, or NOWHERE
Flags: TypeAlias = npt.NDArray[np.bool_]  # (N_tot,) one per slot


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """All that a policy may look at."""

    now_s: float  # since the job began
    work: Work  # what is left, with rates and updates as they are estimated now
    pools: tuple[Pool, ...]  # on-demand first; prices of now, availability as it is estimated now
    gradient_s: float  # mu_C, mean time of one gradient on the first pool
    up: Flags  # whether the slot's own machine runs now
    stands_in_s: npt.NDArray[np.float64]  # (N_tot,) how long a stand-in has run; NaN: there is none
    waiting: float | None = None  # updates whose records have arrived already; None: nobody knows


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What every slot shall run on, until somebody decides otherwise."""

    places: Places
    stand_ins: Flags  # an on-demand machine shall run in the slot beside what `places` says
    plan: Plan
    reason: str  # why now: first plan, price, estimates, outage
    basis: Situation  # what it was decided on


class Policy(Protocol):
    """Decides; frozen, without state of its own."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def review_s(self) -> float | None:
        """How often it wants to be asked, beside every change of a price; None: never."""
        ...

    @property
    def watches_outages(self) -> bool:
        """Whether it wants to be asked whenever a machine goes or comes."""
        ...

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide anew, or return `last` where nothing that matters has changed."""
        ...
