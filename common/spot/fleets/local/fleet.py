"""Machines that are local processes (`common.spot.machines.Fleet`): a spot market for one computer.

    order ──▶ process, tagged ──▶ asked to leave ──▶ SIGKILL ──▶ ended
      │                           released: SIGTERM, and time to finish
      └──▶ refused                preempted: SIGTERM and as much notice as the market gives, or none

A machine survives the process that launched it. Machines are found in the process table by a
variable in their environment; their state is in files. The plans topic says which provisioner is in
charge. A token launches only once, even if an earlier provisioner wakes up and uses it.
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

# Longest time from a record to its process. It takes milliseconds unless the launcher was killed.
_APPEAR_S = 10.0
# Time that ended machines stay listed, as in EC2.
_LATELY_S = 3600.0
# Longest time between two polls of the processes. Ends are billed with this precision.
_LOOK_S = 0.5
# Number of free lanes to try. A machine without a slot is preempted like the slot with its lane's
# number. If each lane is down half of the time, all are down 1 time in 65,000.
_LANES = 16
# Shortest time between two polls.
_SOON_S = 0.05


class StartedProcess(Protocol):
    """A process that we started: our child, whose exit code only we receive."""

    @property
    def exit_code(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        ...

    def detach(self) -> None:
        """Detach from the process."""
        ...


# Starts a worker by name, in its own session, with these additional variables. Raises `OSError` if
# no process can be started.
Start: TypeAlias = "Callable[[str, Mapping[str, str]], StartedProcess]"


class LocalMarket(NamedTuple):
    """Supply of local machines."""

    given: Market
    # Times at which spot machines are taken away.
    schedule: PreemptionSchedule
    # Prices of the pools; None if machines report no price.
    prices: Prices | None = None


class ProcessFleet:
    """Processes with a job's tag, under one directory.

    A thread takes machines away in time, from the first call until `close`.

    Args:
        market: Its pools, their availability and prices.
        job: Id of the job.
        directory: Absolute path. The job's folder is in it.
        start: Starts a process.
        leave_s: Longest time between a release and the end.
        clock: Returns seconds since 1970.

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
        # Keyed by token.
        self._children: dict[str, StartedProcess] = {}
        # Time of the last poll of each running machine.
        self._seen_s: dict[str, float] = {}
        # Machines that were released before their process was found.
        self._unasked: set[str] = set()
        # Time of the next preemption, or of the next SIGKILL for a machine that is leaving.
        self._due_s = math.inf
        # Only one thread at a time polls and acts.
        self._turn = threading.Condition()
        self._watch: threading.Thread | None = None
        self._closed = False

    def launch(self, orders: Sequence[LaunchRequest]) -> tuple[Refused, ...]:
        """Start a process for each new order. Known orders change nothing.

        Raises:
            UnavailableError: If the directory cannot be used.
        """
        with self._acting() as now:
            return tuple(filter(None, [self._order(order, now) for order in orders]))

    def release(self, machines: Sequence[str]) -> None:
        """Send SIGTERM to machines, and SIGKILL `leave_s` later.

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
        """Return all running machines, and those that ended within the hour, by launch.

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
        """Stop taking machines away. They keep running."""
        with self._turn:
            self._closed = True
            self._turn.notify()
        if self._watch is not None:
            self._watch.join()
        for child in self._children.values():
            child.detach()

    @contextlib.contextmanager
    def _acting(self) -> Iterator[float]:
        with self._turn:
            if self._watch is None:
                self._watch = threading.Thread(target=self._take_away, name="fleet", daemon=True)
                self._watch.start()
            yield self._clock()
            # A new or released machine may be due before all others.
            self._turn.notify()

    def _take_away(self) -> None:
        """Take machines away when they are due."""
        with self._turn:
            while not self._closed:
                self._due_s = math.inf
                # The next caller receives the error.
                with contextlib.suppress(OutsideError):
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
            # Another process was faster.
            if not self._records.claim(order.token, record):
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
        """Choose a free lane for a machine without a slot; one that is up, if possible."""
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
        """Return why an order gives no machine, and True if the reason is lack of capacity."""
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
        """Take due machines away, and record ends; return the tokens of running machines."""
        found = self._table.find()
        records = self._records.read()
        for token, process in found.items():
            if token not in records or records[token].over:
                # It appeared after it was given up, or its record was deleted.
                end(process)
        running = set[str]()
        for token, record in records.items():
            if record.over:
                continue
            child = self._children.get(token)
            if token in found:
                running.add(token)
                self._urge(token, record, found[token], now)
            elif child is not None and child.exit_code is None:
                # It started after the table was read.
                running.add(token)
            else:
                self._miss(token, record, child, now)
        return running

    def _urge(self, token: str, record: OrderRecord, process: Process, now: float) -> None:
        """Take a machine away if it is due, or schedule it."""
        # Preemptions that were due while no fleet was running are skipped.
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
        """Record a machine's end, once its process cannot appear any more."""
        # An order whose process was never seen gets time for it to appear, unless it was released.
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
