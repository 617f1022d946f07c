"""Machines that are local processes (`common.spot.machines.Fleet`): a spot market in a box.

    order ──▶ process, tagged ──▶ told to leave ──▶ SIGKILL ──▶ ended
      │                           released: SIGTERM, and time to finish
      └──▶ refused                preempted: SIGTERM and as much notice as the market gives, or none

What was launched survives whoever launched it: machines are found in the table of processes, by a
variable of their environment, and what must be remembered of them is in files. Who is in charge of
them the plans topic says; but a token launches once even if a predecessor wakes up and uses it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from common.errors import OutsideError
from common.spot.fleets.local.records import OrderRecord, OrderRecords
from common.spot.fleets.local.table import Table, ask_to_end, end
from common.spot.machines import Machine, Offer, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from common.spot.fleets.local.market import PreemptionSchedule
    from common.spot.fleets.local.table import Process
    from common.spot.machines import LaunchRequest, Prices
    from common.spot.market.market_file import Market

_APPEAR_S = 10.0  # from a record to its process: milliseconds, unless who began it was killed
_LATELY_S = 3600.0  # so long are machines named that ended, as EC2 does
_LOOK_S = 0.5  # longest time between two looks at what runs: an end is billed so exactly
_LANES = 16  # of free ones that are looked at: all are down where half are 1 time in 65,000
_SOON_S = 0.05  # likewise while one is ending


class StartedProcess(Protocol):
    """A process that we started: our child, whose exit code only we are told."""

    @property
    def exit_code(self) -> int | None:
        """How it ended, minus the signal that ended it; None while it runs."""
        ...

    def let_go(self) -> None:
        """Leave it to itself."""
        ...


# Starts a worker by name, in a session of its own, with these variables besides others; raises
# `OSError` where there cannot be another process.
Start: TypeAlias = "Callable[[str, Mapping[str, str]], StartedProcess]"


class LocalMarket(NamedTuple):
    """What local machines can be had."""

    given: Market
    schedule: PreemptionSchedule  # when spot machines are taken away
    prices: Prices | None = None  # of the pools; None: machines do not say what they cost


class ProcessFleet:
    """Processes with a job's tag, under one directory.

    A thread of its own takes machines away in time, from the first call until `close`.

    Args:
        market: Its pools, when they have machines, and for how much.
        job: Its id.
        directory: Absolute; one folder in it is the job's.
        start: How one is switched on.
        leave_s: Longest time between a release and the end.
        clock: Seconds since 1970.

    Raises:
        UnavailableError: If the directory cannot be used.
    """

    def __init__(
        self,
        market: LocalMarket,
        job: str,
        directory: Path,
        start: Start,
        leave_s: float,
        clock: Callable[[], float],
    ) -> None:
        given, self._schedule, self._prices = market
        self._spot = {pool.name: pool for pool in given.spot}
        self._pools = {pool.name for pool in given.pools}
        self._notice_s = given.process.notice_s
        self._start, self._leave_s, self._clock = start, leave_s, clock
        self._records = OrderRecords(directory / job / "machines")
        self._table = Table(job, directory)
        self._born_s = self._records.born_s(clock())
        self._children: dict[str, StartedProcess] = {}  # by token
        self._seen_s: dict[str, float] = {}  # when each that runs was last looked at
        self._unasked: set[str] = set()  # released before their process could be found
        self._due_s = math.inf  # when the next of them is to be taken away, or further
        self._turn = threading.Condition()  # one thread at a time looks and acts
        self._watch: threading.Thread | None = None
        self._closed = False

    def launch(self, orders: Sequence[LaunchRequest]) -> tuple[Refused, ...]:
        """Start a process for each order that is new; the others change nothing.

        Raises:
            UnavailableError: If the directory cannot be used.
        """
        with self._acting() as now:
            return tuple(filter(None, [self._order(order, now) for order in orders]))

    def release(self, machines: Sequence[str]) -> None:
        """Tell machines to leave, by SIGTERM; after some time they are made to.

        Raises:
            UnavailableError: If the directory cannot be used.
        """
        with self._acting() as now:
            self._look(now)
            found, records = self._table.find(), self._records.read()
            for token in machines:
                record = records.get(token)
                if record is not None and not record.over and record.leaving is None:
                    by_s = now + self._leave_s
                    self._change(token, record, leaving="released", leave_by_s=by_s)
                    if token in found:
                        ask_to_end(found[token])
                    else:
                        self._unasked.add(token)

    def machines(self) -> tuple[Machine, ...]:
        """All that run, and those that ended within the hour, by launch.

        Raises:
            UnavailableError: If the directory cannot be used.
        """
        with self._acting() as now:
            running = self._look(now)
            records = self._records.read()
        named = [
            _machine(token, record)
            for token, record in records.items()
            if (token in running and not record.over)
            or (record.ended_s is not None and record.ended_s > now - _LATELY_S)
        ]
        return tuple(sorted(named, key=lambda machine: (machine.launch, machine.id)))

    def close(self) -> None:
        """Take nothing away any more; the machines stay."""
        with self._turn:
            self._closed = True
            self._turn.notify()
        if self._watch is not None:
            self._watch.join()
        for child in self._children.values():
            child.let_go()

    @contextlib.contextmanager
    def _acting(self) -> Iterator[float]:
        with self._turn:
            if self._watch is None:
                self._watch = threading.Thread(target=self._take_away, name="fleet", daemon=True)
                self._watch.start()
            yield self._clock()
            self._turn.notify()  # what was launched or told to leave may be due before all else

    def _take_away(self) -> None:
        """Let machines go when their time has come, without waiting to be asked."""
        with self._turn:
            while not self._closed:
                self._due_s = math.inf
                with contextlib.suppress(OutsideError):  # whoever calls hears of it
                    self._look(self._clock())
                wait_s = self._due_s - self._clock()
                self._turn.wait(min(max(wait_s, _SOON_S), _LOOK_S))

    def _order(self, order: LaunchRequest, now: float) -> Refused | None:
        records = self._records.read()
        record = records.get(order.token)
        if record is None:
            usd_per_hour = None
            if self._prices is not None:
                usd_per_hour = self._prices.look().get(Offer(order.pool))
            record = OrderRecord(
                *(order.launch, order.slot, order.pool, order.worker, now),
                usd_per_hour=usd_per_hour,
                bid_usd_per_hour=order.bid_usd_per_hour,
                lane=self._lane(order, records.values(), now),
            )
            if not self._records.claim(order.token, record):  # somebody else was faster
                return None
            refused, capacity = self._refused(record, records.values(), now)
            if not refused:
                try:
                    environment = self._table.environment(order.token)
                    environment |= {"DOLL_TIER": "spot" if order.pool in self._spot else "reliable"}
                    self._children[order.token] = self._start(order.worker, environment)
                except OSError as error:
                    refused = f"cannot start a process: {error}"
            if refused:
                record = self._change(order.token, record, refused=refused, capacity=capacity)
        return Refused(order.launch, record.capacity, record.refused) if record.refused else None

    def _lane(self, order: LaunchRequest, records: Iterable[OrderRecord], now: float) -> int | None:
        """Choose whose times a machine without a slot follows: of one that can be had, if any."""
        if order.slot is not None or order.pool not in self._spot:
            return None
        taken = {
            each.schedule_slot for each in records if each.pool == order.pool and not each.over
        }
        free = [lane for lane in range(len(taken) + _LANES) if lane not in taken]
        return next((at for at in free if self._down_s(order, at, now) > now), free[0])

    def _refused(
        self, order: OrderRecord, records: Iterable[OrderRecord], now: float
    ) -> tuple[str, bool]:
        """Say why an order gives no machine, and whether that is for want of machines."""
        pool = order.pool
        if pool not in self._pools:
            return f"the market has no pool {pool!r}", False
        if pool in self._spot:
            if self._down_s(order, order.schedule_slot, now) <= now:
                slot = "" if order.slot is None else f" for slot {order.slot}"
                bid = order.bid_usd_per_hour
                limit = "" if bid is None else f" under a bid of ${bid:g}"
                return f"pool {pool!r} has no capacity{slot}{limit} at present", True
            there = sum(not record.over and record.pool == pool for record in records)
            capacity = self._spot[pool].capacity
            if capacity is not None and there >= capacity:
                return f"pool {pool!r} has {capacity} machines, all in use", True
        return "", True

    def _change(self, token: str, record: OrderRecord, **changes: object) -> OrderRecord:
        changed = replace(record, **changes)
        self._records.change(token, changed)
        return changed

    def _look(self, now: float) -> set[str]:
        """See what runs, by token, and what has ended; take away what is due."""
        found = self._table.find()
        records = self._records.read()
        for token, process in found.items():
            if token not in records or records[token].over:
                end(process)  # it appeared after it was given up, or its record was deleted
        running = set[str]()
        for token, record in records.items():
            if record.over:
                continue
            child = self._children.get(token)
            if token in found:
                running.add(token)
                self._urge(token, record, found[token], now)
            elif child is not None and child.exit_code is None:
                running.add(token)  # it was started since we looked for it
            else:
                self._miss(token, record, child, now)
        return running

    def _urge(self, token: str, record: OrderRecord, process: Process, now: float) -> None:
        """Take a machine away if that is due, or see when it will be."""
        # Nobody takes away what fell due while no fleet stood here, as if there had been no outage.
        since_s = self._seen_s.get(token, record.at_s if token in self._children else now)
        self._seen_s[token] = now
        if record.leaving is None:
            down_s = math.inf
            if record.pool in self._spot:
                down_s = self._down_s(record, record.schedule_slot, since_s)
            if down_s > now:
                self._due_s = min(self._due_s, down_s)
                return
            by_s = now + self._notice_s
            record = self._change(token, record, leaving="preempted", leave_by_s=by_s)
            if self._notice_s > 0:
                ask_to_end(process)
        if token in self._unasked:
            self._unasked.remove(token)
            ask_to_end(process)
        if record.leave_by_s <= now:
            end(process)
        self._due_s = min(self._due_s, record.leave_by_s)

    def _miss(
        self, token: str, record: OrderRecord, child: StartedProcess | None, now: float
    ) -> None:
        """Write down that a machine has ended, once it cannot appear any more."""
        # Only what runs is told to leave: whoever wrote that has seen it.
        seen = child is not None or token in self._seen_s or record.leaving is not None
        if not seen and now - record.at_s < _APPEAR_S:
            return
        if child is not None:
            detail = f"exit code {child.exit_code}"
        else:
            detail = "exit status unknown" if seen else "its process never started"
        cause = record.leaving or "failed"
        self._change(token, record, ended_s=now, cause=cause, detail=detail)
        self._children.pop(token, None)
        self._seen_s.pop(token, None)
        self._unasked.discard(token)

    def _down_s(self, order: LaunchRequest | OrderRecord, slot: int, at_s: float) -> float:
        bid = order.bid_usd_per_hour
        return self._schedule.next_down_s(order.pool, slot, at_s, self._born_s, bid)


def _machine(token: str, record: OrderRecord) -> Machine:
    return Machine(
        token,
        record.launch,
        record.slot,
        record.pool,
        record.worker,
        "running" if record.ended_s is None else "ended",
        record.at_s,
        record.ended_s,
        record.cause,
        record.detail,
        usd_per_hour=record.usd_per_hour,
    )
