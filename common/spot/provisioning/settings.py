"""Provisioning settings of a job, from its owner and the market file, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from common.spot.policies.bidding import BidSettings

if TYPE_CHECKING:
    from common.config.policy_names import PolicyName
    from common.spot.theory.billing import Billing
    from common.spot.theory.work import Pool


@dataclass(frozen=True, slots=True)
class ProvisionerSettings:
    """Settings of one job's provisioner. All times of day are in seconds since 1970."""

    job: str  # its id
    workers: int  # N_tot
    group_size: int  # K
    batch_size: int  # b
    # Beginning of the job's clock.
    submitted_s: float
    # On-demand first, with values assumed before any observation.
    pools: tuple[Pool, ...]
    # Number of partitions of all the job's streams; 0 if unknown.
    partitions: int = 0
    updates: float | None = None  # J; None: no limit
    loss: float | None = None  # epsilon, loss at which it stops; None: no limit
    deadline_at_s: float | None = None  # None: no deadline
    on_preemption: Literal["hold", "reassign"] = "reassign"
    policy: PolicyName = "adaptive"
    # Probability of meeting the deadline, for policies that have one.
    probability: float = 0.95
    # Time between reviews of the policy; None for the policy's own.
    review_s: float | None = None
    bidding: BidSettings = field(default_factory=BidSettings)  # settings of `bidbrain`
    # Settings of `pools`, see `Pools`.
    max_lag_s: float | None = None
    spot_up_to: float = 1.5
    reliable: int = 0
    # Megabytes that a machine moves for an update, before it is measured.
    update_mb: float = 0.0
    # True to use fewer workers if time x cost is less: see `autoscale`.
    balanced: bool = False

    # Time before a dead provisioner is replaced.
    lease_ttl_s: float = 10.0
    # Time between polls of the machines, which delays the notice of a preemption.
    look_s: float = 2.0
    # Time between polls of prices.
    prices_s: float = 30.0
    # Time after which a started machine that the provider does not list is lost, and a worker
    # without heartbeats is gone.
    grace_s: float = 15.0
    # Time after which a launched machine that the provider has never listed is lost.
    unseen_s: float = 120.0
    # Minimum times between Reviewed records; the shorter one for a changed warning.
    reviewed_s: float = 30.0
    warned_s: float = 5.0

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Names by index, as in a policy's places."""
        return tuple(pool.name for pool in self.pools)

    @property
    def billing(self) -> dict[str, Billing]:
        """Billing of each pool, for the ledger."""
        return {pool.name: pool.billing for pool in self.pools}
