"""Ports of rented machines: a fleet for one job, and prices of machines.

`common.spot.fleets` implements them for EC2 and for local processes. One contract suite
(tests/contract/test_fleet.py) checks both, and the in-memory fake (tests/memory_fleet.py). Errors
are those of `common.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias


class Offer(NamedTuple):
    """Machines at one price: those of a pool, of one type in it, or of one type in one zone.

    An order's offer may also have a bid. A known price belongs to the offer without a bid.
    """

    pool: str
    type: str = ""  # empty: any
    zone: str = ""  # empty: any
    bid_usd_per_hour: float | None = None  # None: no limit


def by_pool(usd_per_hour: Mapping[Offer, float]) -> dict[str, float]:
    """Keep only prices of whole pools."""
    return {offer.pool: usd for offer, usd in usd_per_hour.items() if not offer.type}


class LaunchRequest(NamedTuple):
    """Order of one machine with one worker on it."""

    # Number of the machine in the job, from 1.
    launch: int
    # A repeated request with the same token never gives another machine, however late it comes.
    token: str
    # The worker's slot in the job; None if it gets one later, or none.
    slot: int | None
    # Pool of the market, which decides the kind of machine and its billing.
    pool: str
    # Name of its worker.
    worker: str
    # Type of machine; empty for any type of the pool.
    type: str = ""
    zone: str = ""  # empty: any
    # Highest price; None for no limit.
    bid_usd_per_hour: float | None = None


class Refused(NamedTuple):
    """An order that gave no machine, and never will. Another try needs another order."""

    launch: int
    # True if there is no capacity just now; False if the order itself is impossible.
    capacity: bool
    reason: str


# A stopped machine has ended its work, but is paid for until it is released, for example its disk.
MachineState: TypeAlias = Literal["running", "stopped", "ended"]
EndCause: TypeAlias = Literal[
    "preempted",  # the provider took it back
    "released",  # we gave it back
    "failed",  # it ended by itself
]


class Machine(NamedTuple):
    """A machine of the job, found by its tags."""

    id: str  # the provider's own
    launch: int
    slot: int | None  # slot of its order
    pool: str
    worker: str
    state: MachineState
    # Beginning of the billed time, in seconds since 1970.
    started_s: float
    ended_s: float | None = None
    cause: EndCause | None = None  # cause of its end
    detail: str = ""  # the provider's words
    # Type that the provider reports; empty if it has no types.
    type: str = ""
    # Zone that the provider reports; empty if it has no zones.
    zone: str = ""
    # Actual price; None for its offer's price at the time.
    usd_per_hour: float | None = None


class Fleet(Protocol):
    """Machines that one job rents. For one thread at a time.

    Every call may raise `UnavailableError` if the provider is unavailable, and `OutsideError` if it
    refuses permanently (credentials, limits).
    """

    def launch(self, orders: Sequence[LaunchRequest]) -> tuple[Refused, ...]:
        """Request machines. `machines` lists those that are not refused, now or later.

        Repeated orders, from any process, launch nothing.
        """

    def release(self, machines: Sequence[str]) -> None:
        """Release machines by their ids. Their workers get a signal to leave.

        Ended and unknown machines are skipped.
        """

    def machines(self) -> tuple[Machine, ...]:
        """Return all running and stopped machines of the job, and recently ended ones, by launch.

        A machine that is no longer listed has ended for an unknown reason.
        """

    def close(self) -> None:
        """Close the connection. The machines stay."""


class PriceHistory(NamedTuple):
    """Past prices of a pool's machines: each price holds from its time on."""

    times_s: Sequence[float]  # ascending, from any origin
    usd_per_hour: Sequence[float]
    # End of the last price.
    until_s: float


class Prices(Protocol):
    """Prices of the market's pools. For one thread at a time."""

    def look(self) -> dict[Offer, float]:
        """Return USD per hour of a machine of each pool, and of its types and zones if they differ.

        Raises:
            UnavailableError: If the source is unavailable. Known prices stay valid.
            OutsideError: If it refuses.
        """

    def past(self) -> dict[str, PriceHistory]:
        """Return past prices of each pool's machines, as far back as they are known.

        Raises:
            UnavailableError: If the source is unavailable.
            OutsideError: If it refuses.
        """
