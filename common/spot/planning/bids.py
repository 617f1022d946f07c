"""Current bids of `bidbrain` for a backlog, and their cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from common.errors import GivenError
from common.jobs.store import JobStore
from common.spot.machines import PriceHistory
from common.spot.policies.bidding import Bidding, BidSettings, odds_of
from common.spot.policies.policy import Decision, Situation
from common.spot.theory.billing import HOUR_S
from common.spot.theory.capacity import update_capacity_per_s

if TYPE_CHECKING:
    from common.kafka.port import Log
    from common.spot.planning.request import PlanRequest
    from common.spot.theory.work import Pool, Work

LIVE = "a stream cannot go faster than it arrives, and bidbrain bids for a backlog"


def check_bids(given: PlanRequest, open_log: Callable[[], Log]) -> None:
    """Reject a job without a backlog, and settings that do not apply to bids.

    Raises:
        GivenError: By the field, with the reason.
        NotFoundError: If the job does not exist.
        UnavailableError: If Kafka is unavailable and a job is named.
    """
    for field in ("rate_per_s", "rates_per_s"):
        if getattr(given, field) is not None:
            raise GivenError(
                (field,), f"{LIVE}; remove it, and set `workers` to the maximum number of machines"
            )
    for field in ("probability", "spot"):
        if getattr(given, field) is not None:
            raise GivenError(
                (field,),
                "does not apply to bidbrain, which minimizes cost and ignores the deadline;"
                " remove it",
            )
    if given.job:
        spec = JobStore(open_log()).get(given.job).spec
        if spec.on_preemption == "hold":
            held = "with on_preemption: hold, more machines cannot make a stream faster"
            raise GivenError(("job",), f"{given.job}: {held}")
        if spec.start_at == "latest":
            raise GivenError(("job",), f"{given.job}: {LIVE} (start_at: latest)")
    lacking = [name for name in ("workers", "gradient_s") if getattr(given, name) is None]
    if lacking:
        raise GivenError(tuple(lacking), "must be given for bidbrain")


def computed_per_s(workers: int, group_size: int, batch_size: int, gradient_s: float) -> float:
    """Return a worker's share of the records per second that all workers can compute."""
    machines = np.array([float(workers)])
    capacity = float(update_capacity_per_s(machines, group_size, gradient_s)[0])
    return capacity * group_size * batch_size / workers


def bids(work: Work, pools: tuple[Pool, ...], given: PlanRequest) -> Decision:
    """Return the decision of `bidbrain` at the beginning of a job.

    Args:
        work: The backlog. Of its rates, only the number is used: the maximum number of machines.
        pools: On-demand first.
        given: The request, with past prices of its pools.

    Raises:
        ParameterError: If a pool's past prices are shorter than an hour.
    """
    past = {pool.name: PriceHistory((0.0,), (pool.usd_per_hour,), HOUR_S) for pool in pools}
    now = {}
    for asked in given.pools or ():
        if asked.past_usd_per_hour is not None:
            times_s, usd_per_hour = zip(*asked.past_usd_per_hour, strict=True)
            past[asked.name] = PriceHistory(times_s, usd_per_hour, times_s[-1])
            now[asked.name] = usd_per_hour[-1]
    pools = tuple(replace(one, usd_per_hour=now.get(one.name, one.usd_per_hour)) for one in pools)
    nobody = np.zeros(work.workers, np.bool_)
    situation = Situation(
        now_s=0.0,
        work=work,
        pools=pools,
        gradient_s=given.gradient_s or 0.0,
        up=nobody,
        waiting=work.updates,
    )
    return Bidding(BidSettings(), odds_of(pools, past)).reconsider(situation, None)
