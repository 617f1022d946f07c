"""A policy: the state of a job and its market in, which machines shall run and why out.

A slot is a worker's place, one for each stream. A decision has one of two forms:

    by slot   `places` says of which pool the slot's machine is. The paper's policies decide so.
    counted   `machines` says how many of each offer there shall be, whichever slots they serve: a
              slot is seated on a ready machine, and passes to a spare one when that is lost.

Policies are pure: who asks keeps the last decision, and a policy that has nothing to change returns
that very object.

    estimates + prices + what is left ──▶ reconsider ──▶ Decision ──▶ fleet
                                              ▲              │
                                              └──── last ◀───┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.machines import Offer

if TYPE_CHECKING:
    from common.spot.theory.provisioning import Plan
    from common.spot.theory.work import Pool, Work

ON_DEMAND = 0  # the first pool is never preempted
# A machine that is given back takes a while to end, and its next hour would be paid.
RENEWAL_S, RENEWAL_SHARE = 60.0, 1 / 20
NOWHERE = -1  # a slot without a machine

Places: TypeAlias = npt.NDArray[np.int8]  # (N_tot,) index of the pool of each slot, or NOWHERE
Flags: TypeAlias = npt.NDArray[np.bool_]  # (N_tot,) one per slot


class Hour(NamedTuple):
    """The hour for which machines of an offer are had: paid at its beginning, or under a bid."""

    ends_s: float
    usd_per_hour: float  # at its beginning


def renewal_s(hour_s: float) -> float:
    """Say how long before an hour ends a policy is asked whether there shall be another."""
    return min(RENEWAL_S, hour_s * RENEWAL_SHARE)


class MachineCount(NamedTuple):
    """Machines of one offer, as they stand."""

    ready: int = 0  # started up: a slot is seated on it, or it is a spare
    coming: int = 0  # asked for and not ready; one that was refused is not coming


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """All that a policy may look at."""

    now_s: float  # since the job began
    work: Work  # what is left, with rates and updates as they are estimated now
    pools: tuple[Pool, ...]  # on-demand first; prices of now, availability as it is estimated now
    gradient_s: float  # mu_C, mean time of one gradient on the first pool
    up: Flags  # whether the slot's own machine runs now
    waiting: float | None = None  # updates whose records have arrived already; None: nobody knows
    # What there is. At time 0 that is nothing, and machines start up for a while: who looks at
    # `ready` alone orders the whole fleet twice.
    machines: Mapping[Offer, MachineCount] = field(default_factory=dict)
    hours: Mapping[Offer, Hour] = field(default_factory=dict)  # of those, the first that end
    refusing: frozenset[str] = frozenset()  # pools that have just refused a machine
    # (N_tot,) how old the oldest record is that waits in a slot's stream, whether or not it has a
    # machine again by now; 0: none waits. None: nobody knows, or streams pause with their machine.
    lag_s: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What shall run, until somebody decides otherwise.

    Where more machines of an offer run than are counted, those that serve no slot are given back
    first.
    """

    machines: Mapping[Offer, int]  # how many of each offer there shall be
    plan: Plan
    reason: str  # why now: first plan, price, estimates, outage
    basis: Situation  # what it was decided on
    places: Places = field(default_factory=lambda: np.zeros(0, np.int8))  # (0,): counted

    @property
    def counted(self) -> bool:
        """Whether it does not say which machine is for which slot."""
        return not len(self.places)

    @property
    def pools(self) -> npt.NDArray[np.int8]:
        """(machines,) index of the pool of each."""
        names = [pool.name for pool in self.basis.pools]
        at = np.array([names.index(offer.pool) for offer in self.machines], np.int8)
        return np.repeat(at, np.array([*self.machines.values()], np.int64))

    @property
    def spot(self) -> int:
        """Machines that may be preempted."""
        return sum(self.machines.values()) - self.on_demand

    @property
    def on_demand(self) -> int:
        """Machines on demand."""
        alone = self.basis.pools[ON_DEMAND].name
        return sum(count for offer, count in self.machines.items() if offer.pool == alone)


def by_slot(places: Places, plan: Plan, reason: str, basis: Situation) -> Decision:
    """Make a decision of the paper's form."""
    at = places[places != NOWHERE].tolist()
    machines = Counter(Offer(basis.pools[pool].name) for pool in at)
    return Decision(machines, plan, reason, basis, places)


class Policy(ABC):
    """Decides; frozen, without state of its own."""

    __slots__ = ()
    name: ClassVar[str]
    """What records and metrics call it."""

    @property
    def review_s(self) -> float | None:
        """How often it wants to be asked, beside every change of a price; None: never."""
        return None

    @property
    def watches_outages(self) -> bool:
        """Whether it wants to be asked whenever a machine goes or comes."""
        return False

    @property
    def plans_backlog(self) -> bool:
        """Whether it is told what waits; else that is work which has been done."""
        return False

    @abstractmethod
    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide anew, or return `last` where nothing that matters has changed."""
