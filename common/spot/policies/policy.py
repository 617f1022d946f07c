"""A policy decides, from the state of a job and its market, which machines to run and why.

A slot is a worker's place, one for each stream. A decision has one of two forms:

    by slot   `places` has the pool of each slot's machine. The paper's policies decide so.
    counted   `machines` has the number of machines of each offer, whichever slots they serve: a
              slot gets any ready machine, and a spare one when that machine is lost.

Policies are pure. The caller keeps the last decision. A policy that changes nothing returns that
very object.

    estimates + prices + remaining work ──▶ reconsider ──▶ Decision ──▶ fleet
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

# Index of the on-demand pool, which is the first and never preempted.
ON_DEMAND = 0
# Time before the end of an hour, and its maximum share of the hour, at which a policy decides about
# the next one. A released machine takes a while to end, and a begun hour must be paid.
RENEWAL_S, RENEWAL_SHARE = 60.0, 1 / 20
NOWHERE = -1  # a slot without a machine

# (N_tot,) index of the pool of each slot, or NOWHERE.
Places: TypeAlias = npt.NDArray[np.int8]
Flags: TypeAlias = npt.NDArray[np.bool_]  # (N_tot,) one per slot


class Hour(NamedTuple):
    """The current hour of an offer's machines, which are paid by the hour or run under a bid."""

    ends_s: float
    usd_per_hour: float  # at its beginning


def renewal_s(hour_s: float) -> float:
    """Return the time before an hour's end at which a policy decides about the next one."""
    return min(RENEWAL_S, hour_s * RENEWAL_SHARE)


class MachineCount(NamedTuple):
    """Machines of one offer."""

    # Machines that are up, with a slot or as spares.
    ready: int = 0
    # Requested machines that are not up yet and were not refused.
    coming: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """All inputs of a policy."""

    now_s: float  # time since the job began
    # Remaining work, with current estimates of rates and updates.
    work: Work
    # On-demand first; current prices, and current estimates of availability.
    pools: tuple[Pool, ...]
    # mu_C, mean time of one gradient on a machine of the first pool.
    gradient_s: float
    # True for slots whose own machine runs now.
    up: Flags
    # Updates whose records have arrived already; None if unknown.
    waiting: float | None = None
    # Current machines. At time 0, no machine exists, and machines take time to start. A policy that
    # only counts `ready` ones would order the whole fleet twice.
    machines: Mapping[Offer, MachineCount] = field(default_factory=dict)
    # Hour of an offer's machines that ends first, for each offer that has hours.
    hours: Mapping[Offer, Hour] = field(default_factory=dict)
    # Pools that have just refused a machine.
    refusing: frozenset[str] = frozenset()
    # (N_tot,) age of the oldest record that waits in a slot's stream, even if the slot has a
    # machine again; 0 if none waits. None if unknown, or if streams pause with their machine.
    lag_s: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Machines to run until the next decision.

    If more machines of an offer run than are wanted, those without a slot are released first.
    """

    # Wanted number of machines of each offer.
    machines: Mapping[Offer, int]
    plan: Plan
    # Reason to decide now: first plan, price, estimates, outage.
    reason: str
    # Situation of the decision.
    basis: Situation
    places: Places = field(default_factory=lambda: np.zeros(0, np.int8))  # (0,) if counted

    @property
    def counted(self) -> bool:
        """True if machines have no fixed slots."""
        return not len(self.places)

    @property
    def pools(self) -> npt.NDArray[np.int8]:
        """(machines,) index of each machine's pool."""
        names = [pool.name for pool in self.basis.pools]
        at = np.array([names.index(offer.pool) for offer in self.machines], np.int8)
        return np.repeat(at, np.array([*self.machines.values()], np.int64))

    @property
    def spot(self) -> int:
        """Number of machines that may be preempted."""
        return sum(self.machines.values()) - self.on_demand

    @property
    def on_demand(self) -> int:
        """Number of machines on demand."""
        alone = self.basis.pools[ON_DEMAND].name
        return sum(count for offer, count in self.machines.items() if offer.pool == alone)


def by_slot(places: Places, plan: Plan, reason: str, basis: Situation) -> Decision:
    """Make a decision by slot, as the paper does."""
    at = places[places != NOWHERE].tolist()
    machines = Counter(Offer(basis.pools[pool].name) for pool in at)
    return Decision(machines, plan, reason, basis, places)


class Policy(ABC):
    """A decision maker; frozen, without state of its own."""

    __slots__ = ()
    name: ClassVar[str]
    """Name in records and metrics."""

    @property
    def review_s(self) -> float | None:
        """Time between reviews, besides every change of a price; None if there are no reviews."""
        return None

    @property
    def watches_outages(self) -> bool:
        """True if the policy decides whenever a machine comes or goes."""
        return False

    @property
    def plans_backlog(self) -> bool:
        """True if the policy plans the backlog, not only arrivals; see `waiting_for_policy`."""
        return False

    @abstractmethod
    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide again, or return `last` if nothing relevant has changed."""
