"""A short live run of a job under bids, with processes as machines: rows I and J.

Three pools are down at different times: one disappears for good, one has a price that crosses bids,
one comes and goes randomly. Afterwards the logs are compared with the provider's books: machines,
hours, cents and records. During the run, streams are observed: none may remain unread for long
while a machine could read it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from common.embedded.services import stop_all
from common.kafka.names import plans_topic
from common.kafka.opening import open_log
from common.kafka.read import read_decoded
from common.spot.connect import open_fleet
from common.spot.market.market_file import Market
from common.spot.plans import decode_plan
from common.spot.provisioning.records import (
    Ended,
    LaunchRequested,
    PlanRecord,
    Priced,
    Settled,
    Started,
)
from common.spot.theory.billing import HOUR_S
from common.testing.counting import ENTRYPOINT
from load.harness.counting import CountingJob, counting_spec
from load.harness.producers import Producers
from load.harness.stack import await_until, servers

if TYPE_CHECKING:
    from common.core.messages import Positions
    from common.core.spans import Partition
    from common.kafka.port import Log

JOB, RECORDS, BACKLOG, WORKERS = "bids", 12_000, 4_000, 3
# Duration of a gradient, so that the backlog lasts for several hours of the market.
BATCH_S = 0.02
# Time over which the producers write the other records.
SECONDS = 45.0
PATIENCE_S = 180.0
BILLED_HOUR_S = 10.0
CENT = 0.01
# Maximum time a partition may lie unread while a machine is ready.
UNREAD_S = 10.0
# Interval between checks of what is read.
_LOOK_S = 0.2
_HOURS = (
    f"{{per: hour, hour_s: {BILLED_HOUR_S}, price: hour_start, preempted: {{hour_refunded: true}}}}"
)
_MARKET = f"""
fleet: process
on_demand: {{usd_per_hour: 7200.0}}
spot:
  - name: goes
    usd_per_hour: 360.0
    trace: {{file: goes.csv, start_s: 0}}
    billing: {_HOURS}
  - {{name: moves, usd_per_hour: {{file: moves.csv, start_s: 0}}, billing: {_HOURS}}}
  - {{name: chance, usd_per_hour: 1500.0, billing: {_HOURS}}}
process: {{availability: 0.9, cycle_s: 20}}
"""
_GOES = "seconds,machines\n0,1\n20,0\n100000,0\n"
_MOVES = "seconds,price\n0,900\n" + "".join(
    f"{at},{1800 - at % 14 * 90}\n" for at in range(7, 700, 7)
)


class Found(NamedTuple):
    """Errors found after a run."""

    # Launches that have two machines.
    twice: int
    # Machines that still run, or whose end is missing in the log.
    forgotten: int
    # Difference between the bill and the provider's books, in cents.
    cents: int
    # Lost records, records used twice, and flaws of the audit.
    wrong: int
    # Machines that the market evicted. This is no error.
    evicted: int
    # Partitions that lay unread for too long.
    unread: int
    # Longest time that a partition lay unread.
    unread_s: float


class Unread:
    """Measures how long partitions lie unread while a machine is ready.

    A partition lies unread while it has records, a worker is alive, and none of its records becomes
    part of a batch. The time counts from the worker's start, the last batch or the first record,
    whichever is latest.

    Attributes:
        longest_s: Longest time of each partition that was ever unread, in seconds.
    """

    def __init__(self) -> None:
        self.longest_s: dict[Partition, float] = {}
        # Position of each partition, and the time since which it has not moved.
        self._since: dict[Partition, tuple[int, float]] = {}

    def look(self, now_s: float, *, ready: bool, read: Positions, ends: Positions) -> None:
        """Record an observation.

        Args:
            now_s: Monotonic time.
            ready: True if a worker is alive.
            read: Positions up to which records are part of batches.
            ends: Ends of the logs.
        """
        for place, end in ends.items():
            position = read.get(place, 0)
            if not ready or position >= end:
                self._since.pop(place, None)
                continue
            before, since_s = self._since.get(place, (position, now_s))
            # If the partition was read since the last check, this is an upper bound.
            self.longest_s[place] = max(self.longest_s.get(place, 0.0), now_s - since_s)
            self._since[place] = position, since_s if position == before else now_s


def measured() -> Found:
    """Run the job, and compare the results.

    Raises:
        NotMeasuredError: If it does not reach its end.
    """
    with ExitStack() as parts:
        stack = parts.enter_context(servers("embedded", tasks=(ENTRYPOINT,), forks=True))
        folder = Path(parts.enter_context(TemporaryDirectory(prefix="doll-live-")))
        for name, text in (("goes", _GOES), ("moves", _MOVES)):
            (folder / f"{name}.csv").write_text(text)
        market = folder / "market.yaml"
        market.write_text(_MARKET)
        own = {"market": str(market), "fleet_directory": str(folder), "owner_pid": os.getpid()}
        settings = stack.settings.model_copy(update=own)
        stack = type(stack)(settings, stack.kafka, stack.logs, stack.pids, forks=True)
        log = parts.enter_context(closing(open_log(settings, "live")))
        bids = {"policy": "bidbrain", "workers": WORKERS}
        job = CountingJob(
            counting_spec(
                RECORDS,
                BATCH_S,
                name=JOB,
                streams=[f"{JOB}-a", f"{JOB}-b"],
                batch_size=16,
                group_size=4,
                batch_linger_s=0.3,
                group_linger_s=0.5,
                max_failures=1000,
                provisioning=bids | {"bidbrain": {"lambda_s": 0.5, "start_s": 0.5}},
            ),
            *(settings, log, 2),
        )
        more_per_s = (RECORDS - BACKLOG) / SECONDS
        producers = Producers(job.record, log, 1, lambda seconds: BACKLOG + more_per_s * seconds)
        services = [stack.start("coordinator", "c1"), stack.start("provisioner", "p1")]
        parts.callback(stop_all, services)
        unread = Unread()
        watched = _watching(unread, job, log)
        await_until(
            watched(lambda: producers.produced == RECORDS), PATIENCE_S, "all records are written"
        )
        producers.stop()
        await_until(
            watched(lambda: job.drained() and job.settled()), PATIENCE_S, "all records are used"
        )
        stack.stop_jobs(JOB)
        await_until(
            lambda: any(isinstance(record, Settled) for record in plans_of(log)),
            *(PATIENCE_S, "the machines are given back"),
        )
        with closing(open_fleet(settings, Market.load(market), JOB)) as fleet:
            machines = fleet.machines()
        proof = job.audit()
        wrong = len(job.unlearned(proof, RECORDS)) + len(proof.flaws)
        records = plans_of(log)
    launches = [machine.launch for machine in machines]
    ends = {record.launch: record for record in records if isinstance(record, Ended)}
    forgotten = [
        machine for machine in machines if machine.ended_s is None or machine.launch not in ends
    ]
    settled = next(record for record in reversed(records) if isinstance(record, Settled))
    return Found(
        twice=len(launches) - len(set(launches)),
        forgotten=len(forgotten),
        cents=round(abs(settled.spent_usd - bill_usd(records, BILLED_HOUR_S)) / CENT),
        wrong=wrong,
        evicted=sum(end.cause == "preempted" for end in ends.values()),
        unread=sum(longest_s > UNREAD_S for longest_s in unread.longest_s.values()),
        unread_s=max(unread.longest_s.values(), default=0.0),
    )


def _watching(
    unread: Unread, job: CountingJob, log: Log
) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Return a wrapper for conditions that also checks partitions, every `_LOOK_S` at most."""
    looked_s = -_LOOK_S

    def watched(condition: Callable[[], bool]) -> Callable[[], bool]:
        def asked() -> bool:
            nonlocal looked_s
            now_s = time.monotonic()
            if now_s - looked_s >= _LOOK_S:
                looked_s = now_s
                status = job.board.get_leader_status()
                unread.look(
                    now_s,
                    ready=bool(job.board.heartbeats()),
                    read={} if status is None else status.claimed,
                    ends=log.ends(job.places),
                )
            return condition()

        return asked

    return watched


def plans_of(log: Log, job: str = JOB) -> list[PlanRecord]:
    """Return all records of a job's plans topic that parse."""
    read = read_decoded(log, plans_topic(job), decode_plan)
    return [record for _, record in read if record is not None]


def bill_usd(records: Sequence[PlanRecord], hour_s: float) -> float:
    """Return the machines' cost.

    Machines on spot are paid by the hour, at the price of its beginning. An hour in which the
    machine is evicted is free. On-demand machines are paid by the second.
    """
    prices = [
        (record.at_s, pool, usd)
        for record in records
        if isinstance(record, Priced)
        for pool, usd in record.usd_per_hour.items()
    ]
    pools = {each.launch: each.pool for each in records if isinstance(each, LaunchRequested)}
    ends = {each.launch: each for each in records if isinstance(each, Ended)}
    starts = [each for each in records if isinstance(each, Started)]
    prices += [
        (each.at_s, pools[each.launch], each.usd_per_hour)
        for each in starts
        if each.usd_per_hour is not None
    ]
    total = 0.0
    for started in starts:
        end, pool, begun_s = ends[started.launch], pools[started.launch], started.at_s
        if pool == "on-demand":
            # The on-demand pool has a single price.
            usd = next(usd for _, of, usd in prices if of == pool)
            total += usd * (end.at_s - begun_s) / HOUR_S
            continue
        while begun_s < end.at_s:
            _, _, usd = max(price for price in prices if price[1] == pool and price[0] <= begun_s)
            if end.cause != "preempted" or begun_s + hour_s <= end.at_s:
                total += usd * hour_s / HOUR_S
            begun_s += hour_s
    return total
