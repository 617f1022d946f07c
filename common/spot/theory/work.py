"""The work to do, its deadline, and prices of machines: the inputs of every formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from common.spot.theory.billing import BY_THE_SECOND, HOUR_S, Billing
from common.spot.theory.errors import ParameterError, not_negative, positive, share

# (N_tot,) records per second of each worker's stream.
Rates: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The remaining work; at the beginning, all of it.

    Raises:
        ParameterError: If there is no worker, no arrivals at all, or a number is out of range.
    """

    # (N_tot,) lambda_A,n. Some streams may be silent, but not all.
    rates_per_s: Rates
    group_size: int  # K
    batch_size: int  # b
    # J(epsilon), the remaining updates.
    updates: float
    deadline_s: float  # theta, the remaining time
    # Sum of lambda_A,n: arrivals of all streams.
    records_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        rates = self.rates_per_s
        if rates.ndim != 1 or not len(rates):
            raise ParameterError("rates_per_s", f"must be one rate per worker, got {rates.shape}")
        total_per_s = float(rates.sum())
        object.__setattr__(self, "records_per_s", total_per_s)
        # Policies run often. If the minimum and the sum are finite, all rates are.
        fine = rates.min() >= 0 and total_per_s < np.inf
        if not fine and (wrong := np.flatnonzero(~(np.isfinite(rates) & (rates >= 0)))).size:
            worker = int(wrong[0])
            problem = f"must be numbers of at least 0, got {rates[worker]:g} for worker {worker}"
            raise ParameterError("rates_per_s", problem)
        if not total_per_s:
            raise ParameterError("rates_per_s", "must have a rate above 0, got only 0")
        positive("group_size", self.group_size)
        positive("batch_size", self.batch_size)
        not_negative("updates", self.updates)
        not_negative("deadline_s", self.deadline_s)

    @property
    def workers(self) -> int:
        """N_tot, one per stream."""
        return len(self.rates_per_s)

    @property
    def records(self) -> float:
        """J K b, the records of the remaining updates."""
        return self.updates * self.group_size * self.batch_size

    @property
    def undisturbed_s(self) -> float:
        """theta_0 = J K b / sum of lambda_A,n: the time without preemptions."""
        return self.records / self.records_per_s

    @property
    def updates_per_s(self) -> float:
        """lambda_U, if updates keep up with arrivals and nothing is preempted."""
        return self.records_per_s / (self.group_size * self.batch_size)

    def on_demand_only_usd(self, pool: Pool) -> float:
        """Return the cost of theta_0 with every worker on a machine of this pool."""
        return self.workers * self.undisturbed_s * pool.wanted_usd_per_s


def partial_batches_s(rates_per_s: Rates, batch_size: int) -> float:
    """Return the time in which as many records arrive as lie in incomplete batches on average.

    Just after an update began, each worker has 0 to b - 1 such records, uniformly, once the streams
    have drifted apart by about half a batch (lambda_A t c_A^2 > (b/2)^2). Only the worker whose
    batch completed the group has none. So there are (N - 1)(b - 1) / 2 records. Add the time to a
    runtime if all workers begin with empty batches. A job under way begins with as many such
    records as it ends with, so add nothing.
    """
    streams = int(np.count_nonzero(rates_per_s))
    return (streams - 1) * (batch_size - 1) / 2 / float(rates_per_s.sum())


@dataclass(frozen=True, slots=True)
class Pool:
    """Machines of one kind that can be rented in one place; a job's first pool is on-demand.

    Raises:
        ParameterError: If a number is out of range.
    """

    name: str
    usd_per_hour: float  # pi
    # alpha, share of the time that a machine is available; 1 if never preempted.
    availability: float = 1.0
    # Mean time from one preemption of a machine to its next.
    cycle_s: float = 1000.0
    # Speed of computing gradients, relative to the first pool.
    speed: float = 1.0
    # Number of machines at a time; None if unlimited.
    capacity: int | None = None
    # Time from the request to the first record, which is paid for.
    start_up_s: float = 0.0
    billing: Billing = BY_THE_SECOND
    # Price of traffic between its machines and the servers.
    transfer_usd_per_gb: float = 0.0
    gb_per_hour: float = 0.0  # traffic of a machine

    @classmethod
    def of(cls, said: Iterable[tuple[str, object]], **others: object) -> Pool:
        """Make a pool from those of a user's fields that a pool has, and from `others`."""
        given = {field: value for field, value in said if field in cls.__dataclass_fields__}
        return cls(**cast("dict[str, Any]", given | others))

    def __post_init__(self) -> None:
        not_negative(f"{self.name}.usd_per_hour", self.usd_per_hour)
        share(f"{self.name}.availability", self.availability)
        positive(f"{self.name}.cycle_s", self.cycle_s)
        positive(f"{self.name}.speed", self.speed)
        not_negative(f"{self.name}.start_up_s", self.start_up_s)
        not_negative(f"{self.name}.transfer_usd_per_gb", self.transfer_usd_per_gb)
        not_negative(f"{self.name}.gb_per_hour", self.gb_per_hour)
        if self.capacity is not None:
            not_negative(f"{self.name}.capacity", self.capacity)

    @property
    def usd_per_s(self) -> float:
        """Price of a second."""
        return self.usd_per_hour / HOUR_S

    @property
    def transfer_usd_per_s(self) -> float:
        """Price of a machine's traffic in a second."""
        return self.transfer_usd_per_gb * self.gb_per_hour / HOUR_S

    @property
    def wanted_usd_per_s(self) -> float:
        """Mean cost of a second with a wanted machine, available or not.

        Machines are interrupted after exponential times with the mean alpha * cycle, which makes
        some of their time free, but none of their traffic.
        """
        if self.availability == 1:
            return self.usd_per_s + self.transfer_usd_per_s
        paid = self.billing.paid_share(self.availability * self.cycle_s)
        return self.availability * (self.usd_per_s * paid + self.transfer_usd_per_s)

    def at_most(self, machines: int) -> int:
        """Limit a number of machines to the pool's capacity."""
        return machines if self.capacity is None else min(machines, self.capacity)


def gb_per_hour(update_mb: float, updates_per_s: float) -> float:
    """Return the traffic of a machine that takes part in every update."""
    return update_mb / 1e3 * updates_per_s * HOUR_S


@dataclass(frozen=True, slots=True)
class PaperMarket:
    """The paper's market: on-demand machines and one kind of spot machines."""

    on_demand: Pool  # pi_o
    spot: Pool  # pi_s, alpha


def market(
    on_demand_usd_per_hour: float, spot_usd_per_hour: float, availability: float
) -> PaperMarket:
    """Make the paper's market from its three numbers: pi_o, pi_s and alpha.

    Raises:
        ParameterError: If one is out of range. A spot price above the on-demand price is no error:
            then nothing is bought on spot.
    """
    positive("on_demand_usd_per_hour", on_demand_usd_per_hour)
    not_negative("spot_usd_per_hour", spot_usd_per_hour)
    share("availability", availability)
    return PaperMarket(
        Pool("on-demand", on_demand_usd_per_hour),
        Pool("spot", spot_usd_per_hour, availability),
    )
