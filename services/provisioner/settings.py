"""What a job's record and the market file say, as the provisioner's settings."""

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

# How often the provider is looked at: processes are there to be watched, and cost nothing to list;
# Amazon lets an account ask some times a second, for all its jobs together.
_LOOK_S = {"process": 0.5, "ec2": 5.0}
_PRICES_S = {"process": 1.0, "ec2": 60.0}
_REVIEWED_S = {"process": 2.0, "ec2": 30.0}
# Longer than a provisioner that lives may be silent: another thread calls its provider.
_LEASE_TTL_S = {"process": 3.0, "ec2": 10.0}


def provisioner_settings(record: JobRecord, market: Market) -> ProvisionerSettings:
    """Put together what a provisioner decides by.

    Raises:
        UserError: If the job has no provisioning, or asks for what its market cannot give.
        ParameterError: If a number makes no sense.
    """
    spec = record.spec
    asked = spec.provisioning
    if asked is None or spec.policy is None:
        raise UserError(f"the job {spec.name} has no `provisioning`: its workers start by hand")
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
    """What a machine moves for an update: the model to it, a gradient from it, uncompressed."""
    if not spec.task.name:
        return 0.0  # nobody knows how large the model of a task of one's own is
    return 2 * 4 * options_of(spec.task.name, spec.task_options).parameters / 1e6


def pools_of(market: Market) -> tuple[Pool, ...]:
    """What is believed of every pool before anything was seen; prices are asked before a plan.

    A pool whose price nobody has told yet is no bargain: it is taken for on-demand's.
    """
    alone_usd = market.on_demand.least_usd_per_hour
    found = []
    for pool in market.pools:
        priced = pool is not market.on_demand and isinstance(pool.usd_per_hour, float)
        usd_per_hour = pool.usd_per_hour if priced else alone_usd
        found.append(Pool.of(pool, usd_per_hour=usd_per_hour, billing=market.billing(pool)))
    return tuple(found)
