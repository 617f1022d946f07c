"""A short live run of a job under bids, on processes that are machines: rows I and J.

Three pools, each down at times of its own: one that goes for good, one whose price moves across
bids, one that comes and goes by chance. What the logs and the provider's books say afterwards is
held against each other: machines, hours, cents and records. While it runs, streams are watched:
none may lie unread for long while there is a machine to read it.
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
BATCH_S = 0.02  # of a gradient, so that the backlog lasts for some hours of the market
SECONDS = 45.0  # in which the other records come
PATIENCE_S = 180.0
BILLED_HOUR_S = 10.0
CENT = 0.01
UNREAD_S = 10.0  # for so long at most, while a machine is ready
_LOOK_S = 0.2  # between looks at what is read
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
    """What was wrong after a run."""

    twice: int  # launches of which there were two machines
    forgotten: int  # machines that ran on, or of which the log does not say the end
    cents: int  # by which the bill is off
    wrong: int  # records that were lost or used twice, and flaws of the audit
    evicted: int  # machines that the market took: nothing wrong
    unread: int  # partitions that lay unread for too long
    unread_s: float  # for how long any did: the longest


class Unread:
    """For how long partitions lay unread while a machine was ready.

    Records lie there, a worker is alive, and none of them becomes part of a batch: since the worker
    came, since the last batch, or since there are any, whichever is latest.

    Attributes:
        longest_s: Of each partition that was ever unread, in seconds.
    """

    def __init__(self) -> None:
        self.longest_s: dict[Partition, float] = {}
        self._since: dict[Partition, tuple[int, float]] = {}  # up to where read, and when it was

    def look(self, now_s: float, *, ready: bool, read: Positions, ends: Positions) -> None:
        """Take what is so now.

        Args:
            now_s: By a clock that never goes back.
            ready: Whether a worker is alive.
            read: Up to where records are part of batches.
            ends: Up to where there are records.
        """
        for place, end in ends.items():
            position = read.get(place, 0)
            if not ready or position >= end:
                self._since.pop(place, None)
                continue
            before, since_s = self._since.get(place, (position, now_s))
            # It lay there until now at most where something was read since the last look.
            self.longest_s[place] = max(self.longest_s.get(place, 0.0), now_s - since_s)
            self._since[place] = position, since_s if position == before else now_s


def measured() -> Found:
    """Run it, and look at what is left.

    Raises:
        NotMeasuredError: If it does not come to its end.
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
    """Make conditions that look at what is read whenever they are asked, not too often."""
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
    """All records of a job's plans topic that parse."""
    read = read_decoded(log, plans_topic(job), decode_plan)
    return [record for _, record in read if record is not None]


def bill_usd(records: Sequence[PlanRecord], hour_s: float) -> float:
    """Add up what machines cost: hours at the price of their beginning, evicted ones free.

    On-demand machines are paid by the second.
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
        if pool == "on-demand":  # at one price
            usd = next(usd for _, of, usd in prices if of == pool)
            total += usd * (end.at_s - begun_s) / HOUR_S
            continue
        while begun_s < end.at_s:
            _, _, usd = max(price for price in prices if price[1] == pool and price[0] <= begun_s)
            if end.cause != "preempted" or begun_s + hour_s <= end.at_s:
                total += usd * hour_s / HOUR_S
            begun_s += hour_s
    return total
