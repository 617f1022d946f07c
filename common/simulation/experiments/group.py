"""Who reads which stream: a worker its own, or whoever is there (a consumer group).

`hold`: the stream of a preempted worker waits for it, as in the paper. `reassign`: survivors take
it over, once the group has noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.simulation.experiments.clock import VirtualTime
    from common.simulation.experiments.protocol import Machine
    from common.simulation.experiments.streams import Stream

TAKEOVER_S = 3.0  # until a preempted worker's partitions are read again: 2 to 4 s on a real broker


class Group(Protocol):
    """Gives streams to machines."""

    def join(self, slot: int, machine: Machine) -> None:
        """A slot's machine is there now."""
        ...

    def leave(self, slot: int, machine: Machine) -> None:
        """It is no longer."""
        ...


class Hold:
    """Each slot reads its own stream.

    Args:
        time: The clock.
        streams: One for each slot.
        pause: Whether nothing arrives at a stream while nobody reads it; else Kafka keeps it.
    """

    def __init__(self, time: VirtualTime, streams: Sequence[Stream], *, pause: bool) -> None:
        self._time = time
        self._streams = streams
        self._pause = pause
        if pause:
            for stream in streams:
                stream.stop(time.now)

    def join(self, slot: int, machine: Machine) -> None:
        """The stream goes on where it was."""
        if self._pause:
            self._streams[slot].go_on(self._time.now)
        machine.own([self._streams[slot]])

    def leave(self, slot: int, machine: Machine) -> None:
        """The stream waits."""
        del machine
        if self._pause:
            self._streams[slot].stop(self._time.now)


class Reassign:
    """Streams are shared out evenly among the machines that are there; few are moved.

    Args:
        time: The clock.
        streams: All of them.
    """

    def __init__(self, time: VirtualTime, streams: Sequence[Stream]) -> None:
        self._time = time
        self._streams = streams
        self._machines = dict[int, "Machine"]()
        self._rebalancing = False

    def join(self, slot: int, machine: Machine) -> None:
        """It gets its share: at once where nobody reads, as at the beginning."""
        self._machines[slot] = machine
        self._soon(0.0)

    def leave(self, slot: int, machine: Machine) -> None:
        """Its streams go to others once the group has noticed."""
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
        # Who has most keeps most: nothing is moved that need not be.
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
