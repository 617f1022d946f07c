"""The ports of rented machines: a fleet for one job, and what machines cost.

`common.spot.fleets` fulfils them with EC2 and with local processes. One contract suite
(tests/contract/test_fleet.py) holds both, and the fake in memory (tests/memory_fleet.py), to the
same behaviour. Errors are those of `common.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias


class Offer(NamedTuple):
    """What has a price: a pool's machines, those of one type, or of one type in one zone.

    Whoever asks for machines may say what they may cost at most; a price is of an offer without.
    """

    pool: str
    type: str = ""  # empty: whichever
    zone: str = ""  # likewise
    bid_usd_per_hour: float | None = None  # None: no limit


def by_pool(usd_per_hour: Mapping[Offer, float]) -> dict[str, float]:
    """Leave prices of whole pools."""
    return {offer.pool: usd for offer, usd in usd_per_hour.items() if not offer.type}


class LaunchRequest(NamedTuple):
    """One machine that shall be had, with one worker on it."""

    launch: int  # counts the machines ordered for the job, from 1
    token: str  # whoever gives the same token twice gets one machine, however late
    slot: int | None  # the worker's place in the job; None: it is given one later, or none
    pool: str  # of the market: what kind of machine, paid how
    worker: str  # the name of the worker on it
    type: str = ""  # of the machine; empty: whichever the pool has
    zone: str = ""  # likewise
    bid_usd_per_hour: float | None = None  # what it may cost at most; None: no limit


class Refused(NamedTuple):
    """An order that gave no machine, and never will: another try is another order."""

    launch: int
    capacity: bool  # whether there are none just now; else the order itself cannot be carried out
    reason: str


MachineState: TypeAlias = Literal["running", "ended"]
EndCause: TypeAlias = Literal[
    "preempted",  # the provider took it back
    "released",  # we gave it back
    "failed",  # it ended by itself
]


class Machine(NamedTuple):
    """A machine of the job, found by the tags that it carries."""

    id: str  # the provider's own
    launch: int
    slot: int | None  # as it was ordered for
    pool: str
    worker: str
    state: MachineState
    started_s: float  # since 1970: paid for from then on
    ended_s: float | None = None
    cause: EndCause | None = None  # of its end
    detail: str = ""  # in the provider's words
    type: str = ""  # of the machine that was given; empty: a pool has one
    zone: str = ""  # likewise
    usd_per_hour: float | None = None  # at which it was given; None: its offer's price of the time


class Fleet(Protocol):
    """Machines that one job rents. For one thread at a time.

    Every call may raise `UnavailableError` where the provider is away, and `OutsideError` where it
    refuses for good (credentials, limits).
    """

    def launch(self, orders: Sequence[LaunchRequest]) -> tuple[Refused, ...]:
        """Ask for machines; those that are not refused are found by `machines` sooner or later.

        An order that was given before, by whomever, brings nothing new about.
        """

    def release(self, machines: Sequence[str]) -> None:
        """Give machines back, by their ids; their workers are told to leave.

        Nothing happens to those that have ended, or that are unknown.
        """

    def machines(self) -> tuple[Machine, ...]:
        """All machines of the job that run, and those that ended lately, by launch.

        A machine that was there and is no longer named has ended, and nobody knows how.
        """

    def close(self) -> None:
        """Let go of the connection; the machines stay."""


class PriceHistory(NamedTuple):
    """What machines of a pool have cost: each price from its time on."""

    times_s: Sequence[float]  # ascending, from any origin
    usd_per_hour: Sequence[float]
    until_s: float  # when that of the last ends


class Prices(Protocol):
    """What machines of the market's pools cost. For one thread at a time."""

    def look(self) -> dict[Offer, float]:
        """USD per hour of one machine now: of each pool, and of its types and zones if they differ.

        Raises:
            UnavailableError: If the source is away; what was known stays true.
            OutsideError: If it refuses.
        """

    def past(self) -> dict[str, PriceHistory]:
        """Say what machines of each pool have cost until now, as far back as anybody knows.

        Raises:
            UnavailableError: If the source is away.
            OutsideError: If it refuses.
        """
