"""The provisioner's settings, from a job's record and the market file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UserError
from common.learning.task_options import options_of
from common.spot.policies.bidding import BidSettings
from common.spot.provisioning.settings import ProvisionerSettings
from common.spot.theory.work import Pool

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.spot.market.market_file import Market

# Time between polls of the provider. Processes are cheap to list. Amazon limits an account to a few
# requests a second for all of its jobs.
_LOOK_S = {"process": 0.5, "ec2": 5.0}
_PRICES_S = {"process": 1.0, "ec2": 60.0}
_REVIEWED_S = {"process": 2.0, "ec2": 30.0}
# Lifetime of the lease. It is longer than any pause of a live provisioner, because another thread
# calls the provider.
_LEASE_TTL_S = {"process": 3.0, "ec2": 10.0}


def provisioner_settings(record: JobRecord, market: Market) -> ProvisionerSettings:
    """Make a provisioner's settings.

    Raises:
        UserError: If the job has no provisioning, or requests what its market does not have.
        ParameterError: If a number is invalid.
    """
    spec = record.spec
    asked = spec.provisioning
    if asked is None or spec.policy is None:
        raise UserError(
            f"the job {spec.name} has no `provisioning`; its workers are started by hand"
        )
    if problem := market.lag_problem(asked.max_lag_s):
        raise UserError(f"the job {spec.name}: provisioning.max_lag_s: {problem}")
    deadline_s, bids = spec.stop.deadline_s, asked.bidbrain
    return ProvisionerSettings(
        job=record.id,
        workers=asked.workers,
        group_size=spec.group_size,
        batch_size=spec.batch_size,
        submitted_s=record.submitted_s,
        pools=pools_of(market),
        partitions=len(record.first),
        updates=spec.stop.updates,
        loss=spec.stop.loss,
        deadline_at_s=None if deadline_s is None else record.submitted_s + deadline_s,
        on_preemption=spec.on_preemption,
        policy=spec.policy,
        probability=asked.probability,
        review_s=asked.review_s,
        bidding=BidSettings() if bids is None else BidSettings(**bids.model_dump()),
        max_lag_s=asked.max_lag_s,
        spot_up_to=asked.spot_up_to,
        reliable=asked.reliable,
        update_mb=_update_mb(spec),
        balanced=spec.tuner is not None and spec.tuner.workers is not None,
        lease_ttl_s=_LEASE_TTL_S[market.fleet],
        look_s=_LOOK_S[market.fleet],
        prices_s=_PRICES_S[market.fleet],
        reviewed_s=_REVIEWED_S[market.fleet],
        warned_s=_REVIEWED_S[market.fleet],
    )


def _update_mb(spec: JobSpec) -> float:
    """Return an update's megabytes: the model to a machine, its gradient back, uncompressed."""
    if not spec.task.name:
        # The size of a user's own model is unknown.
        return 0.0
    return 2 * 4 * options_of(spec.task.name, spec.task_options).parameters / 1e6


def pools_of(market: Market) -> tuple[Pool, ...]:
    """Return every pool as it is assumed before any observation.

    Prices are polled before a plan. A spot pool without a known price is assumed to cost as much as
    on-demand.
    """
    alone_usd = market.on_demand.least_usd_per_hour
    found = []
    for pool in market.pools:
        priced = pool is not market.on_demand and isinstance(pool.usd_per_hour, float)
        usd_per_hour = pool.usd_per_hour if priced else alone_usd
        found.append(Pool.of(pool, usd_per_hour=usd_per_hour, billing=market.billing(pool)))
    return tuple(found)
