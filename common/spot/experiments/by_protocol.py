"""One run of an experiment through the production state machines, machine by machine.

The fleet and the policy run on the market's time grid, the protocol between its points. A slot is
one worker as long as the same machine serves it. The consumer group assigns streams. With `hold`,
each slot has its own stream, which waits while the slot has no machine, as in the paper. With
`reassign`, survivors take streams over once the group has noticed the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from common.config.synchronisation import SYNCHRONOUS
from common.core.messages import WorkerId
from common.core.spans import Partition
from common.spot.experiments.arrivals import SimulatedStream, arrivals_of, draw_rates
from common.spot.experiments.fleet import SimulatedFleet, pool_uses
from common.spot.experiments.policy_driver import PolicyDriver, Priors
from common.spot.experiments.preemption import STEP_S
from common.spot.experiments.protocol import (
    Delays,
    GradientTimeDraws,
    Learner,
    Protocol,
    SimulatedJob,
    VirtualTime,
)
from common.spot.experiments.results import SimulatedRun, Throughput
from common.spot.theory.lags import StreamLags
from common.spot.traces.files import traced

if TYPE_CHECKING:
    from common.spot.experiments.draws import Draws
    from common.spot.experiments.protocol import SimulatedMachine
    from common.spot.policies.policy import Policy

Array: TypeAlias = npt.NDArray[np.float64]
Indexes: TypeAlias = npt.NDArray[np.intp]

# A run is given up after this many times its deadline.
GIVE_UP_AFTER = 20.0
# Marks a slot without a machine. -1 marks a slot that its own machine serves.
NOBODY = -2
# Time until a preempted worker's partitions are read again: 2 to 4 s on a real broker.
TAKEOVER_S = 3.0


class HeldStreams:
    """Each slot reads its own stream.

    Args:
        pause: True if nothing arrives at a stream without a reader. Otherwise Kafka keeps its
            records.
    """

    def __init__(
        self, time: VirtualTime, streams: Sequence[SimulatedStream], *, pause: bool
    ) -> None:
        self._time = time
        self._streams = streams
        self._pause = pause
        if pause:
            for stream in streams:
                stream.stop(time.now)

    def join(self, slot: int, machine: SimulatedMachine) -> None:
        """Resume the slot's stream."""
        if self._pause:
            self._streams[slot].go_on(self._time.now)
        machine.own([self._streams[slot]])

    def leave(self, slot: int, machine: SimulatedMachine) -> None:
        """Leave the stream waiting."""
        del machine
        if self._pause:
            self._streams[slot].stop(self._time.now)


class Reassign:
    """Shares streams evenly among the current machines, and moves few of them."""

    def __init__(self, time: VirtualTime, streams: Sequence[SimulatedStream]) -> None:
        self._time = time
        self._streams = streams
        self._machines = dict[int, "SimulatedMachine"]()
        self._rebalancing = False

    def join(self, slot: int, machine: SimulatedMachine) -> None:
        """Share the streams again, at once unless a rebalance is pending."""
        self._machines[slot] = machine
        self._soon(0.0)

    def leave(self, slot: int, machine: SimulatedMachine) -> None:
        """Move the machine's streams to others once the group has noticed."""
        del machine
        del self._machines[slot]
        self._soon(TAKEOVER_S)

    def _soon(self, delay_s: float) -> None:
        if not self._rebalancing:
            self._rebalancing = True
            self._time.at(self._time.now + delay_s, self._rebalance)

    def _rebalance(self) -> None:
        self._rebalancing = False
        machines = list(self._machines.values())
        if not machines:
            return
        owned = {stream.partition for machine in machines for stream in machine.streams.values()}
        loose = [stream for stream in self._streams if stream.partition not in owned]
        least, more = divmod(len(self._streams), len(machines))
        # Machines with most streams keep most, so that only necessary moves happen.
        machines.sort(key=lambda machine: -len(machine.streams))
        shares = [least + (rank < more) for rank in range(len(machines))]
        for machine, share in zip(machines, shares, strict=True):
            too_many = list(machine.streams.values())[share:]
            if too_many:
                machine.disown([stream.partition for stream in too_many])
                loose += too_many
        for machine, share in zip(machines, shares, strict=True):
            lacking = share - len(machine.streams)
            if lacking > 0:
                taken, loose = loose[:lacking], loose[lacking:]
                machine.own(taken)


class ProtocolSimulation:
    """An experiment under way.

    Args:
        draws: One unused run.
        policy: Decides which machines run.
        beliefs: None if the policy knows the true rates and availability.
        learner: Computes gradients; None if nothing is learned.
        progress: Called each step with the share of the updates that is done.
    """

    def __init__(
        self,
        draws: Draws,
        policy: Policy,
        beliefs: Priors | None,
        learner: Learner | None,
        progress: Callable[[float], None],
    ) -> None:
        experiment, givens = draws.experiment, draws.givens
        self._draws = draws
        self._progress = progress
        self._time = VirtualTime()
        arrivals_rng, gradients_rng, speeds_rng = draws.rng.spawn(3)
        trace_spec = experiment.arrivals.trace
        trace = None if trace_spec is None else traced(trace_spec, draws.folder)
        rates_per_s = givens.rates_per_s[0]
        arrivals = arrivals_of(experiment.arrivals, rates_per_s, arrivals_rng, trace)
        streams = [SimulatedStream(Partition("s", n), each) for n, each in enumerate(arrivals)]
        self._streams = streams
        gradient = experiment.gradient
        records = givens.group_size * givens.batch_size
        self._protocol = Protocol(
            self._time,
            SimulatedJob(
                givens.group_size,
                givens.batch_size,
                givens.updates,
                records / float(rates_per_s.sum()),
                experiment.synchronisation or SYNCHRONOUS,
            ),
            streams,
            GradientTimeDraws(gradient.mean_s, gradient.variation, gradients_rng),
            learner or Learner(),
            Delays(link_s=experiment.link_s),
        )
        (self._speeds,) = draw_rates(experiment.speeds, givens.workers, 1, speeds_rng).tolist()
        self._group: HeldStreams | Reassign = Reassign(self._time, streams)
        if experiment.on_preemption == "hold":
            pause = experiment.while_preempted == "pause"
            self._group = HeldStreams(self._time, streams, pause=pause)
        size = 1, givens.workers, STEP_S, givens.slots_per_pool
        self._fleet = SimulatedFleet(givens.pools, *size, givens.rates_per_s)
        unknown = None if beliefs is None else (beliefs, self._seen)
        self._driver = PolicyDriver(policy, self._fleet, givens, unknown)
        self._machines = dict[int, "SimulatedMachine"]()  # keyed by slot
        self._lags = StreamLags(givens.workers, 0.0)
        # Pool slot of the fleet that serves each slot.
        self._served = np.full(givens.workers, NOBODY)
        # Slots of all workers so far.
        self._slots = dict[WorkerId, int]()
        self._steps = 0
        self._give_up_s = GIVE_UP_AFTER * float(givens.deadline_s[0])

    def run(self) -> SimulatedRun:
        """Run to the last update, or until the run is given up."""
        self._step()
        self._time.run()
        protocol, givens = self._protocol, self._draws.givens
        made = len(protocol.update_times_s)
        finished = made >= givens.updates
        end_s = protocol.update_times_s[-1] if finished else self._time.now
        last_step_s = (self._steps - 1) * STEP_S
        self._fleet.stop(np.array([0]), np.array([end_s - last_step_s]))
        return SimulatedRun(
            seed=self._draws.seed,
            index=0,
            finished=finished,
            runtime_s=end_s,
            deadline_s=float(givens.deadline_s[0]),
            updates=float(made),
            on_demand_only_usd=float(givens.on_demand_only_usd[0]),
            pools=pool_uses(self._fleet, 0),
            history=tuple(self._driver.history[0]),
            throughput=self._throughput(end_s),
        )

    def _throughput(self, end_s: float) -> Throughput:
        computed = np.zeros(self._draws.givens.workers)
        for worker, batches in self._protocol.computed.items():
            computed[self._slots[worker]] += batches
        total, staleness = float(computed.sum()), self._protocol.staleness or [0]
        shares = tuple((computed / max(total, 1.0)).tolist())
        return Throughput(total / end_s, float(np.mean(staleness)), max(staleness), shares)

    def _step(self) -> None:
        """Simulate a step of the market: prices, offers, decisions, machines."""
        now, before = self._time.now, self._time.now - STEP_S
        if now >= self._give_up_s:
            self._time.stop()
            return
        draws = self._draws
        made, updates = len(self._protocol.update_times_s), draws.givens.updates
        prices = [each.at(now) for each in draws.prices]
        changed = np.zeros(1, np.bool_)
        if self._steps:
            changed |= [any(each.changed(before, now)[0] for each in draws.prices)]
        left = np.array([max(float(updates - made), 1.0)])
        waiting = self._waiting(made)
        lag_s = None if waiting is None else self._lag_s(now)
        self._driver.consider(now, prices, changed, left, np.ones(1, np.bool_), waiting, lag_s)
        offered = [None if each is None else each(now) for each in draws.offers]
        self._fleet.step(now, offered, prices)
        self._follow()
        self._progress(made / updates)
        self._steps += 1
        self._time.at(self._steps * STEP_S, self._step)

    def _waiting(self, made: int) -> Array | None:
        """Return the number of updates whose records have arrived; None if streams pause."""
        experiment, givens = self._draws.experiment, self._draws.givens
        if (experiment.on_preemption, experiment.while_preempted) == ("hold", "pause"):
            return None
        records, _ = self._seen(np.array([0]))
        waiting: Array = records.sum(axis=1) / (givens.group_size * givens.batch_size) - made
        return waiting

    def _seen(self, _runs: Indexes) -> tuple[Array, Array]:
        """Return records and seconds of each stream of the only run."""
        observed = [stream.observed(self._time.now) for stream in self._streams]
        records, seconds = np.array(observed, np.float64).T
        return records[np.newaxis], seconds[np.newaxis]

    def _lag_s(self, now: float) -> Array:
        givens, since_s = self._draws.givens, self._fleet.unserved_since_s(0, now)
        speed = min(pool.speed for pool in givens.pools)
        loads = givens.rates_per_s[0] * givens.gradient_s / givens.batch_size / speed
        return self._lags.at(now, since_s, loads)[np.newaxis]

    def _follow(self) -> None:
        """Start and preempt machines as the fleet decides."""
        served = np.where(self._fleet.active[0], self._fleet.server[0], NOBODY)
        changed = np.flatnonzero(served != self._served).tolist()
        self._served = served
        for slot in changed:
            gone = self._machines.pop(slot, None)
            if gone is not None:
                self._protocol.preempt(gone)
                self._group.leave(slot, gone)
        for slot in changed:
            if served[slot] == NOBODY:
                continue
            speed = float(self._fleet.speeds[0, slot]) * self._speeds[slot]
            machine = self._protocol.join(speed)
            self._slots[machine.id] = slot
            self._machines[slot] = machine
            self._group.join(slot, machine)
