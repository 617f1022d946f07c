"""What a job's owner and the market file say about its provisioning, as plain values."""

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
    """Settings of the provisioner of one job; all times of day are in seconds since 1970."""

    job: str  # its id
    workers: int  # N_tot
    group_size: int  # K
    batch_size: int  # b
    submitted_s: float  # the job's clock begins here
    pools: tuple[Pool, ...]  # on-demand first; what is believed of each before it was seen
    partitions: int = 0  # of all the job's streams; 0: nobody knows
    updates: float | None = None  # J; None: the job has no number of updates
    loss: float | None = None  # epsilon, at which it stops; None: at none
    deadline_at_s: float | None = None  # None: it has no deadline
    on_preemption: Literal["hold", "reassign"] = "reassign"
    policy: PolicyName = "adaptive"
    probability: float = 0.95  # of the deadline, where a policy promises one
    review_s: float | None = None  # how often the policy is asked; None: as it likes
    bidding: BidSettings = field(default_factory=BidSettings)  # of `bidbrain`
    # Of `pools`, see `Pools`:
    max_lag_s: float | None = None
    spot_up_to: float = 1.5
    reliable: int = 0
    update_mb: float = 0.0  # that a machine moves for an update, before that is measured
    balanced: bool = False  # ask it for fewer workers where time x cost is less: see `sizing`

    lease_ttl_s: float = 10.0  # how long a dead provisioner is waited for
    look_s: float = 2.0  # between looks at the machines: how late a preemption is noticed
    prices_s: float = 30.0  # between looks at prices
    grace_s: float = 15.0  # a machine that is not named for so long is lost
    unseen_s: float = 120.0  # likewise one that was launched and never named
    # Between Reviewed records at least; a warning that changes is told after the shorter one.
    reviewed_s: float = 30.0
    warned_s: float = 5.0

    @property
    def pool_names(self) -> tuple[str, ...]:
        """By index, as a policy's places mean them."""
        return tuple(pool.name for pool in self.pools)

    @property
    def billing(self) -> dict[str, Billing]:
        """How each pool is billed, as the ledger wants it."""
        return {pool.name: pool.billing for pool in self.pools}
