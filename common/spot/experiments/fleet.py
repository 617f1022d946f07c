"""Machines and their cost, for many runs at once on one grid of time.

Each pool has slots for machines, and a pool slot holds at most one machine. If machines are decided
by slot, the n-th pool slot belongs to the n-th slot of the job. If they are only counted, any pool
slot will do, and a job's slot is served by a machine that is up and serves no other. Only pool
slots that changed are computed again: some hundred of 64,000 in a step.

    orders ──▶ wanted ──┐
    offers ─────────────┴──▶ machine ──start-up──▶ up ──serves──▶ active
                                └─────────────────────▶ bill
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from common.spot.experiments.results import PoolUse
from common.spot.theory.billing import HOUR_S
from common.spot.theory.errors import ParameterError

if TYPE_CHECKING:
    from common.spot.policies.policy import Decision
    from common.spot.theory.work import Pool

Array: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Indexes: TypeAlias = npt.NDArray[np.intp]
T = TypeVar("T", bound=np.generic)

# Tolerance for times that are sums of steps: a start-up of five steps ends after five steps.
ROUNDING_S = 1e-9


class _PoolSlots:
    """Slots for a pool's machines. Arrays have one entry per pool slot of each run: (R M,)."""

    def __init__(self, pool: int, kind: Pool, slots: int) -> None:
        self.pool = pool
        self.kind = kind
        self.wanted = np.zeros(slots, np.bool_)
        # True for slots with a machine, which is paid for.
        self.has = np.zeros(slots, np.bool_)
        # Launch time of that machine.
        self.launched_s = np.zeros(slots)
        self.up = np.zeros(slots, np.bool_) if kind.start_up_s else self.has
        self.metered = not kind.billing.by_the_second
        # Cost of the machine so far.
        self.usd = np.zeros(slots if self.metered else 0)
        # Cost since the machine's current hour began.
        self.hour_usd = np.zeros_like(self.usd)
        # Price at the beginning of that hour.
        self.hour_usd_per_s = np.zeros_like(self.usd)
        # Launch times and pool slots, oldest first.
        self.starting = deque[tuple[float, Indexes]]()
        # Offer of the last step.
        self._offer: Flags | None = None
        # True if the last step launched or ended machines.
        self._changed = True

    def unmoved(self, offer: Flags | None) -> bool:
        """Return True if this offer, like the last one, changes nothing without new orders."""
        if self._changed:
            return False
        if offer is None or self._offer is None:
            return offer is self._offer
        return np.array_equal(self._offer, offer)

    def settled(self, offer: Flags | None, *, changed: bool) -> bool:
        """Record a step's offer and whether it changed machines; return the latter."""
        self._offer, self._changed = None if offer is None else offer.copy(), changed
        return changed

    def ready(self, now_s: float) -> bool:
        """Put machines whose start-up is over into service; return True if there were any."""
        any_ready = False
        while self.starting and self._ready_s(self.starting[0][0]) <= now_s:
            launched_s, slots = self.starting.popleft()
            # A machine that was lost meanwhile, and perhaps replaced, does not count.
            still = self.has[slots] & (self.launched_s[slots] == launched_s)
            self.up[slots[still]] = True
            any_ready |= bool(still.any())
        return any_ready

    def _ready_s(self, launched_s: float) -> float:
        return launched_s + self.kind.start_up_s - ROUNDING_S

    def launch(self, slots: Indexes, now_s: float, *, at_once: bool) -> None:
        """Put new machines into slots."""
        self.has[slots] = True
        self.launched_s[slots] = now_s
        if self.metered:
            self.usd[slots] = 0.0
        if at_once:
            self.up[slots] = True
        elif self.kind.start_up_s:
            self.starting.append((now_s, slots))

    def vacate(self, slots: Indexes) -> None:
        """Remove machines from slots."""
        self.has[slots] = False
        self.up[slots] = False

    def meter(self, slots: Indexes, usd_per_s: Array, seconds: float | Array) -> Array:
        """Charge machines for some seconds; return (n,) USD."""
        if self.kind.billing.price == "hour_start":
            usd_per_s = self.hour_usd_per_s[slots]
        usd = usd_per_s * seconds
        self.usd[slots] += usd
        self.hour_usd[slots] += usd
        return usd

    def begin_hours(self, slots: Indexes, usd_per_s: Array, now_s: float, step_s: float) -> None:
        """Begin the next hour of machines that are new, or whose last hour has just ended."""
        hour_s = self.kind.billing.hour_s
        begins = np.mod(now_s - self.launched_s[slots], hour_s) < step_s - ROUNDING_S
        self.hour_usd[slots[begins]] = 0.0
        self.hour_usd_per_s[slots[begins]] = usd_per_s[begins]

    def owed_usd(
        self, slots: Indexes, usd_per_s: Array, now_s: float | Array, *, preempted: bool
    ) -> Array:
        """Return the amount still due for machines that end; negative for a refund."""
        ran_s = now_s - self.launched_s[slots]
        paid_s = self.kind.billing.paid_s(ran_s, preempted=preempted)
        if not self.metered:
            return (paid_s - ran_s) * usd_per_s
        if self.kind.billing.price == "hour_start":
            usd_per_s = self.hour_usd_per_s[slots]
        given_back = np.where(paid_s > 0, self.hour_usd[slots], self.usd[slots])
        return np.where(paid_s < ran_s, -given_back, (paid_s - ran_s) * usd_per_s)


class Usage:
    """Usage of each pool in each run; arrays are (P, R).

    Attributes:
        usd: Cost of machines and traffic so far.
        machine_s: Seconds of machines, with start-up, without time that is billed but not used.
        wanted_s: Seconds that slots wanted a machine, offered or not.
        launches: Number of machines launched.
        preemptions: Number of machines that the pool took back.
        paid: Number of machines that are paid for now.
        wanted: Number of machines that are wanted now.
    """

    def __init__(self, pools: tuple[Pool, ...], runs: int) -> None:
        shape = (len(pools), runs)
        self.usd, self.machine_s, self.wanted_s = np.zeros((3, *shape))
        self.launches, self.preemptions = np.zeros((2, *shape), np.int64)
        self.paid, self.wanted = np.zeros((2, *shape))
        self._usd_per_s = np.zeros(shape)
        self._transfer = np.array([[pool.transfer_usd_per_s] for pool in pools])
        self._plain = np.array([[float(pool.billing.by_the_second)] for pool in pools])

    def price(self, usd_per_hour: Sequence[Array]) -> None:
        """Set the prices of the step that begins now."""
        self._usd_per_s[:] = usd_per_hour
        self._usd_per_s /= HOUR_S

    def usd_per_s(self, pool: int, runs: Indexes) -> Array:
        """Return (n,) prices of a machine of a pool in some runs."""
        prices: Array = self._usd_per_s[pool, runs]
        return prices

    def step(self, step_s: float) -> None:
        """Bill a step. `pay` bills machines that are not paid by the second."""
        self.usd += self.paid * (self._plain * self._usd_per_s + self._transfer) * step_s
        self.machine_s += self.paid * step_s
        self.wanted_s += self.wanted * step_s

    def stop(self, runs: Indexes, beyond_s: Array) -> None:
        """Bill or refund (n,) seconds beyond the last step, and end all machines."""
        usd_per_s = self._plain * self._usd_per_s[:, runs] + self._transfer
        self.usd[:, runs] += self.paid[:, runs] * usd_per_s * beyond_s
        self.machine_s[:, runs] += self.paid[:, runs] * beyond_s
        self.paid[:, runs] = self.wanted[:, runs] = 0

    def pay(self, pool: int, runs: Indexes, usd: Array) -> None:
        """Add n costs of a pool's machines to their runs, which may occur several times."""
        self.usd[pool] += np.bincount(runs, usd, minlength=self.usd.shape[1])


class SimulatedFleet:
    """All machines of all runs.

    By slot: a slot's own machine runs while its pool offers one. The machine is lost when the offer
    ends. With the next offer, another machine is launched, which is paid from then on and is up
    after its start-up, rounded up to the grid. The pool's billing decides the total price of a
    machine that ends. A stop that *we* request, also at the end, is no preemption. To move a slot
    to another pool means to stop one machine and to launch another.

    Counted: each pool runs as many machines as are wanted and offered, in any of its slots. A lost
    machine is replaced elsewhere at once. The slot that waits longest is served first, by the
    fastest machine. Of slots that wait equally long, the one with the highest rate is first.

    Machines launched in the very first step are up at once: the job's clock begins there.

    Attributes:
        active: (R, N) bool, slots with a working machine; changes with each step.
        counted: (R,) bool, True if machines are counted, not ordered by slot.
        server: (R, N) index of the pool slot whose machine serves a slot, counted over all pools;
            -1 if none does, or if machines are decided by slot.
        usage: Usage of all machines so far.

    Args:
        pools: On-demand first.
        runs: R.
        workers: N.
        step_s: Step of the grid.
        slots_per_pool: M, machines of one pool at a time; at least one for each worker.
        rates_per_s: (R, N) rates of the slots, which decide between slots that wait equally long.
    """

    def __init__(
        self,
        pools: tuple[Pool, ...],
        runs: int,
        workers: int,
        step_s: float,
        slots_per_pool: int = 0,
        rates_per_s: Array | None = None,
    ) -> None:
        self.pools = pools
        self.runs, self.workers, self.step_s = runs, workers, step_s
        self.slots_per_pool = max(slots_per_pool, workers)
        self.usage = Usage(pools, runs)
        shape = (runs, workers)
        self._pool_slots = [
            _PoolSlots(at, pool, runs * self.slots_per_pool) for at, pool in enumerate(pools)
        ]
        self._pool_speeds = np.array([pool.speed for pool in pools])
        self._counts = np.zeros((len(pools), runs), np.int64)
        self.counted = np.zeros(runs, np.bool_)
        self.server = np.full(shape, -1)
        self._waits_since_s = np.zeros(shape)
        self._rates_per_s = np.zeros(shape) if rates_per_s is None else rates_per_s
        self._ordered = True
        # None if machines must be counted again.
        self._machines: tuple[Indexes, Indexes] | None = None
        # Time of the last step.
        self._now_s: float | None = None
        self._speeds: Array | None = None
        self.active = np.zeros(shape, np.bool_)

    @property
    def speeds(self) -> Array:
        """(R, N) speeds of the slots against the first pool; 0 for idle ones."""
        if self._speeds is None:
            self._speeds = np.zeros(self.active.shape)
            for pool_slots in self._pool_slots:
                up = self._of_slots(pool_slots.up)
                np.maximum(self._speeds, up * pool_slots.kind.speed, out=self._speeds)
            runs = np.flatnonzero(self.counted)
            served = self.server[runs]
            speeds = self._pool_speeds[served // self.slots_per_pool]
            self._speeds[runs] = np.where(served >= 0, speeds, 0.0)
        return self._speeds

    def machines(self) -> tuple[Indexes, Indexes]:
        """Return (P, R) machines that are up, and machines that start up. Read-only."""
        if self._machines is None:
            shape = (self.runs, self.slots_per_pool)
            up = np.array(
                [pool_slots.up.reshape(shape).sum(axis=1) for pool_slots in self._pool_slots]
            )
            has = np.array(
                [pool_slots.has.reshape(shape).sum(axis=1) for pool_slots in self._pool_slots]
            )
            self._machines = up, has - up
        return self._machines

    def unserved_since_s(self, run: int, now_s: float) -> Array:
        """Return (N,) times since which slots have had no machine; now for those that have one."""
        since_s: Array = np.where(self.server[run] < 0, self._waits_since_s[run], now_s)
        return since_s

    def order(self, run: int, decision: Decision) -> None:
        """Set the machines that a run wants from the next step on."""
        self._ordered = True
        self.counted[run] = decision.counted
        if decision.counted:
            self._count(run, decision)
            return
        for pool_slots in self._pool_slots:
            wanted = self._of_slots(pool_slots.wanted)[run]
            np.equal(decision.places, pool_slots.pool, out=wanted)
            self.usage.wanted[pool_slots.pool, run] = np.count_nonzero(wanted)

    def _count(self, run: int, decision: Decision) -> None:
        names = [pool.name for pool in self.pools]
        self._counts[:, run] = 0
        for offer, count in decision.machines.items():
            self._counts[names.index(offer.pool), run] += count

    def step(
        self,
        now_s: float,
        offered: Sequence[Flags | None],
        usd_per_hour: Sequence[Array],
    ) -> Flags:
        """Simulate the step that begins now, bill all of it, and return the active slots.

        Args:
            now_s: Beginning of the step.
            offered: For each pool (R, N), True if a slot could have a machine; None if always.
            usd_per_hour: For each pool (R,), the price during the step.
        """
        self.usage.price(usd_per_hour)
        changed = False
        counted = np.flatnonzero(self.counted)
        for pool_slots, offer in zip(self._pool_slots, offered, strict=True):
            if self._ordered or not pool_slots.unmoved(offer):
                if counted.size:
                    self._choose(pool_slots, offer, counted)
                changed |= pool_slots.settled(offer, changed=self._settle(pool_slots, offer, now_s))
            changed |= pool_slots.ready(now_s)
        if changed:
            self._speeds = self._machines = None
            self.active[:] = self._of_slots(self._pool_slots[0].up)
            for pool_slots in self._pool_slots[1:]:
                np.logical_or(self.active, self._of_slots(pool_slots.up), out=self.active)
            self._serve(counted, now_s)
        self._ordered = False
        self._now_s = now_s
        self.usage.step(self.step_s)
        for pool_slots in self._pool_slots:
            if pool_slots.metered:
                having = np.flatnonzero(pool_slots.has)
                usd_per_s = self._prices(pool_slots, having)
                pool_slots.begin_hours(having, usd_per_s, now_s, step_s=self.step_s)
                self._pay(pool_slots, having, pool_slots.meter(having, usd_per_s, self.step_s))
        return self.active

    def stop(self, runs: Indexes, after_s: Array) -> None:
        """End runs. Their machines stop this long after the last step began, and cost no more.

        Args:
            runs: (n,) the runs.
            after_s: (n,) seconds. Time beyond the step is billed at the price of the last step.

        Raises:
            ParameterError: If there was no step yet.
        """
        if self._now_s is None:
            raise ParameterError("runs", "nothing runs before the first step")
        beyond_s = after_s - self.step_s
        self.usage.stop(runs, beyond_s)
        end_s, rest_s = np.zeros((2, self.runs))
        end_s[runs], rest_s[runs] = self._now_s + after_s, beyond_s
        slots = (runs[:, None] * self.slots_per_pool + np.arange(self.slots_per_pool)).ravel()
        for pool_slots in self._pool_slots:
            pool_slots.wanted[slots] = False
            having = slots[pool_slots.has[slots]]
            run = having // self.slots_per_pool
            if pool_slots.metered:
                metered = pool_slots.meter(having, self._prices(pool_slots, having), rest_s[run])
                self._pay(pool_slots, having, metered)
            self._settle_up(pool_slots, having, end_s[run], preempted=False)
            pool_slots.vacate(having)
        self._counts[:, runs], self.server[runs] = 0, -1
        self.active[runs] = self.counted[runs] = False
        self._speeds = self._machines = None

    def _of_slots(self, values: npt.NDArray[T]) -> npt.NDArray[T]:
        """Return an (R, N) view of (R M,): each run's first pool slots, one for each slot."""
        return values.reshape(self.runs, self.slots_per_pool)[:, : self.workers]

    def _padded(self, offer: Flags) -> Flags:
        """Pad an offer with fewer slots to (R, M)."""
        missing = self.slots_per_pool - offer.shape[1]
        return np.pad(offer, ((0, 0), (0, missing))) if missing else offer

    def _choose(self, pool_slots: _PoolSlots, offer: Flags | None, counted: Indexes) -> None:
        """Choose the pool slots that get machines, in runs that only count them."""
        shape = (self.runs, self.slots_per_pool)
        has = pool_slots.has.reshape(shape)[counted]
        can = np.ones_like(has) if offer is None else self._padded(offer)[counted]
        stay, count = has & can, self._counts[pool_slots.pool, counted]
        more = count - stay.sum(axis=1)
        free = can & ~has
        new = free & (np.cumsum(free, axis=1) <= more[:, np.newaxis])
        # If there are too many, remove machines that still start up, then idle ones, then others;
        # of each kind, the newest first.
        for row in np.flatnonzero(more < 0).tolist():
            first = int(counted[row]) * self.slots_per_pool
            here = np.flatnonzero(stay[row])
            serves = np.isin(
                pool_slots.pool * self.slots_per_pool + here, self.server[counted[row]]
            )
            newest = -pool_slots.launched_s[first + here]
            order = np.lexsort((newest, serves, pool_slots.up[first + here]))
            has[row, here[order[: -more[row]]]] = False
        pool_slots.wanted.reshape(shape)[counted] = has | new
        self.usage.wanted[pool_slots.pool, counted] = np.maximum(count, (has | new).sum(axis=1))

    def _serve(self, counted: Indexes, now_s: float) -> None:
        """Let machines that are up serve slots, until there are no more of either."""
        shape = (self.runs, self.slots_per_pool)
        up = np.concatenate(
            [pool_slots.up.reshape(shape)[counted] for pool_slots in self._pool_slots], axis=1
        )
        server, rows = self.server[counted], np.arange(len(counted))[:, np.newaxis]
        lost = (server >= 0) & ~up[rows, server]
        server[lost] = -1
        self._waits_since_s[counted] = np.where(lost, now_s, self._waits_since_s[counted])
        free = up.copy()
        serving, slots = np.nonzero(server >= 0)
        free[serving, server[serving, slots]] = False
        for row in np.flatnonzero((server < 0).any(axis=1) & free.any(axis=1)).tolist():
            run = counted[row]
            slots, machines = np.flatnonzero(server[row] < 0), np.flatnonzero(free[row])
            first = np.lexsort((-self._rates_per_s[run, slots], self._waits_since_s[run, slots]))
            speeds = self._pool_speeds[machines // self.slots_per_pool]
            fastest = machines[np.argsort(-speeds, kind="stable")]
            both = min(len(slots), len(machines))
            server[row, slots[first[:both]]] = fastest[:both]
        self.server[counted] = server
        self.active[counted] = server >= 0

    def _settle(self, pool_slots: _PoolSlots, offer: Flags | None, now_s: float) -> bool:
        """Launch and end machines of these pool slots; return True if anything changed."""
        if offer is None and not self._ordered:
            return False
        shall = (
            pool_slots.wanted
            if offer is None
            else pool_slots.wanted & self._padded(offer).reshape(-1)
        )
        slots = np.flatnonzero(shall ^ pool_slots.has)
        if not slots.size:
            return False
        comes = shall[slots]
        coming, leaving = slots[comes], slots[~comes]
        ours = ~pool_slots.wanted[leaving]
        self._settle_up(pool_slots, leaving[ours], now_s, preempted=False)
        if pool_slots.metered:
            self._settle_up(pool_slots, leaving[~ours], now_s, preempted=True)
        pool_slots.vacate(leaving)
        pool_slots.launch(coming, now_s, at_once=self._now_s is None)
        launched = self._per_run(coming)
        self.usage.launches[pool_slots.pool] += launched
        self.usage.preemptions[pool_slots.pool] += self._per_run(leaving[~ours])
        self.usage.paid[pool_slots.pool] += launched - self._per_run(leaving)
        return True

    def _settle_up(
        self, pool_slots: _PoolSlots, slots: Indexes, now_s: float | Array, *, preempted: bool
    ) -> None:
        if slots.size and (pool_slots.metered or pool_slots.kind.billing.minimum_s):
            prices = self._prices(pool_slots, slots)
            self._pay(
                pool_slots, slots, pool_slots.owed_usd(slots, prices, now_s, preempted=preempted)
            )

    def _prices(self, pool_slots: _PoolSlots, slots: Indexes) -> Array:
        """Return (n,) USD per second, of each slot's run."""
        return self.usage.usd_per_s(pool_slots.pool, slots // self.slots_per_pool)

    def _pay(self, pool_slots: _PoolSlots, slots: Indexes, usd: Array) -> None:
        self.usage.pay(pool_slots.pool, slots // self.slots_per_pool, usd)

    def _per_run(self, slots: Indexes) -> Indexes:
        return np.bincount(slots // self.slots_per_pool, minlength=self.runs)


def pool_uses(fleet: SimulatedFleet, run: int) -> tuple[PoolUse, ...]:
    """Return a run's usage of each pool."""
    usage = fleet.usage
    return tuple(
        PoolUse(
            pool.name,
            float(usage.usd[index, run]),
            float(usage.machine_s[index, run]),
            int(usage.launches[index, run]),
            int(usage.preemptions[index, run]),
        )
        for index, pool in enumerate(fleet.pools)
    )
