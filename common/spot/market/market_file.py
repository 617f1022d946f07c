"""The market file: pools of machines, their prices and their provider.

DOLL_MARKET names it. The provisioner reads it to rent machines, the admin service to report prices.
The first pool is on-demand, the others may be preempted.

    fleet: process
    on_demand: {usd_per_hour: 0.286}
    spot:
      - {name: spot, usd_per_hour: {file: prices.csv.gz, speed: 60, start_s: 0}, availability: 0.9}
    process: {availability: 0.9, cycle_s: 60}

Paths in it are relative to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from common.errors import UserError
from common.spot.machines import Offer
from common.spot.market.billing_spec import BillingSpec  # noqa: TC001 -- pydantic reads it when run
from common.spot.theory.billing import BY_NAME, BY_THE_SECOND, Billing
from common.spot.traces.files import common_starts_s, starts_of, traced
from common.spot.traces.spec import Positive, Seconds, TraceSpec, WrittenPart

if TYPE_CHECKING:
    from pathlib import Path


Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
# Used as a tag of machines, a key of records and a label of metrics.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class OnDemandPool(WrittenPart):
    """Machines that are never preempted."""

    name: Name = "on-demand"
    # Prices by type, if there are several.
    usd_per_hour: Positive | dict[str, Positive]
    start_up_s: Seconds = 0.0
    # None for the billing of the fleet's provider.
    billing: BillingSpec | None = None
    # Price of traffic between machines and the servers.
    transfer_usd_per_gb: Seconds = 0.0
    # Types on EC2, any of which will do; empty for the type of the launch template.
    instance_types: tuple[str, ...] = ()

    @property
    def least_usd_per_hour(self) -> float:
        """Price of the pool's cheapest type, which EC2 gives first."""
        return min(self.prices().values())

    def prices(self) -> dict[Offer, float]:
        """Return the price of the pool, and of its types if they have their own."""
        if isinstance(self.usd_per_hour, float):
            return {Offer(self.name): self.usd_per_hour}
        types = self.instance_types or tuple(self.usd_per_hour)
        # Used for a type without a price of its own.
        dearest = max(self.usd_per_hour.values())
        found = {Offer(self.name, kind): self.usd_per_hour.get(kind, dearest) for kind in types}
        return found | {Offer(self.name): min(found.values())}

    @model_validator(mode="after")
    def _every_type_has_a_price(self) -> OnDemandPool:
        if not isinstance(self.usd_per_hour, float):
            for kind in self.instance_types or ("any type",) * (not self.usd_per_hour):
                if kind not in self.usd_per_hour:
                    raise ValueError(f"usd_per_hour: must have a price for {kind}")
        return self


class SpotPool(WrittenPart):
    """Machines of one kind that may be preempted. Several types or zones may form one pool."""

    name: Name = "spot"
    # A number, a recorded series that is replayed, or EC2's current price.
    usd_per_hour: Positive | TraceSpec | Literal["history"]
    # Assumed before any observation.
    availability: Annotated[float, Field(gt=0, lt=1)] = 0.9
    # Assumed mean time from one preemption to the next.
    cycle_s: Positive = 1000.0
    # Only for local processes: recorded number of machines, instead of `process.availability`.
    trace: TraceSpec | None = None
    # Only for local processes: price above which machines are taken away.
    bid_usd_per_hour: Positive | None = None
    # Speed of computing gradients, relative to an on-demand machine.
    speed: Positive = 1.0
    capacity: Count | None = None
    start_up_s: Seconds = 0.0
    # None for the billing of the fleet's provider.
    billing: BillingSpec | None = None
    # Price of traffic between machines and the servers.
    transfer_usd_per_gb: Seconds = 0.0
    instance_types: tuple[str, ...] = ()
    # Availability zones on EC2; empty for all. Prices are those in these zones. Machines start in
    # them unless the provider has subnets.
    zones: tuple[str, ...] = ()


class ProcessProvider(WrittenPart):
    """Local processes as machines, each preempted by its own chain, or all by a trace."""

    # Actual availability of spot machines.
    availability: Share | TraceSpec = 0.9
    # Mean time from one preemption to the next; not for traces.
    cycle_s: Positive = 60.0
    # Time between the notice (SIGTERM) and the end (SIGKILL); 0 for no notice.
    notice_s: Seconds = 0.0
    seed: int = Field(default=0, ge=0)


class Ec2Provider(WrittenPart):
    """Amazon EC2, by a launch template whose user data starts a worker."""

    region: str
    launch_template: str  # its name
    launch_template_version: str = "$Default"
    subnets: tuple[str, ...] = ()  # empty: the template's
    # URL of an EC2 that is not Amazon's, for tests.
    endpoint: str = ""


class Market(WrittenPart):
    """All machines that can be rented."""

    fleet: Literal["process", "ec2"] = "process"
    on_demand: OnDemandPool
    spot: tuple[SpotPool, ...] = ()
    process: ProcessProvider = ProcessProvider()
    ec2: Ec2Provider | None = None
    # Beginning of the replay of recorded prices, in seconds since 1970. All processes that replay
    # them then see the same price at the same time. None for the last change of the market file.
    replayed_from_s: Seconds | None = None

    @property
    def pools(self) -> tuple[OnDemandPool | SpotPool, ...]:
        """All pools, on-demand first."""
        return (self.on_demand, *self.spot)

    def billing(self, pool: OnDemandPool | SpotPool) -> Billing:
        """Return the billing of a pool's machines."""
        if pool.billing is not None:
            return pool.billing.rules()
        return BY_NAME["ec2"] if self.fleet == "ec2" else BY_THE_SECOND

    def lag_problem(self, max_lag_s: float | None) -> str:
        """Return the reason why this lag cannot be kept; empty if it can."""
        start_up_s = self.on_demand.start_up_s
        if max_lag_s is None or max_lag_s >= start_up_s:
            return ""
        return (
            f"must be at least {start_up_s:g}, got {max_lag_s:g}: records of a lost machine wait"
            f" until an on-demand machine has started, which takes {start_up_s:g} s by the market"
            " file; increase or remove it"
        )

    @model_validator(mode="after")
    def _consistent(self) -> Market:
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"pools must have different names, got {name!r} twice")
        if self.fleet == "ec2" and self.ec2 is None:
            raise ValueError("ec2: must be given with `fleet: ec2`")
        for pool in self.spot:
            for field in ("trace", "bid_usd_per_hour"):
                if getattr(pool, field) is not None and self.fleet != "process":
                    raise ValueError(f"{pool.name!r}: {field}: needs `fleet: process`")
            price, bid = pool.usd_per_hour, pool.bid_usd_per_hour
            if bid is not None and isinstance(price, float) and price > bid:
                problem = f"must be at least the pool's price of {price:g}, got {bid:g}"
                raise ValueError(f"{pool.name!r}: bid_usd_per_hour: {problem}")
            if pool.usd_per_hour == "history" and self.ec2 is None:
                raise ValueError(
                    f"ec2: must be given, because the price of {pool.name!r} is `history`"
                )
            if pool.usd_per_hour == "history" and not pool.instance_types:
                problem = "must be given, because the pool's price is `history`"
                raise ValueError(f"{pool.name!r}: instance_types: {problem}")
        return self


def with_common_start(market: Market, folder: Path) -> Market:
    """Let recorded series without a start begin at the same second.

    Simultaneous events in several pools, such as an outage of all zones or prices that move
    together, then stay simultaneous in the replay.

    Args:
        market: The market as it was read.
        folder: Folder of its files.

    Raises:
        UserError: If a series is missing or invalid, by its pool and field.
    """
    series = [
        (pool, field, spec)
        for pool in market.spot
        for field in ("usd_per_hour", "trace")
        if isinstance(spec := getattr(pool, field), TraceSpec)
    ]
    for pool, field, spec in series:
        try:
            starts_of(spec, traced(spec, folder), (1,), np.random.default_rng())
        except UserError as error:
            raise UserError(f"market file: {pool.name}: {field}: {error}") from error
    start_s = common_starts_s([spec for *_, spec in series], folder, 1, market.process.seed)
    changes: dict[str, dict[str, TraceSpec]] = {}
    for pool, field, spec in series:
        if spec.start_s is None:
            begun = spec.model_copy(update={"start_s": float(start_s[0])})
            changes.setdefault(pool.name, {})[field] = begun
    spot = (pool.model_copy(update=changes.get(pool.name, {})) for pool in market.spot)
    return market.model_copy(update={"spot": tuple(spot)})
