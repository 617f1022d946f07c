"""A worker process in virtual time: the production state machines on a machine that may vanish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core import commands as do
from common.core import events
from common.core.messages import Gradient
from common.core.orders import Orders
from common.core.worker import Worker
from common.simulation.experiments.delays import LOOK_S

if TYPE_CHECKING:
    from common.core.events import WorkerEvent
    from common.core.messages import UpdateTrigger, WorkerId
    from common.core.settings import WorkerSettings
    from common.core.spans import Partition
    from common.simulation.experiments.protocol import Protocol
    from common.simulation.experiments.streams import Stream


class Machine:
    """One worker from its start to its preemption.

    Args:
        protocol: What it is connected to.
        worker: Its id; a machine that comes back is another worker.
        settings: Of its stream side.
        speed: Of its gradients.
    """

    def __init__(
        self, protocol: Protocol, worker: WorkerId, settings: WorkerSettings, speed: float
    ) -> None:
        self.id = worker
        self.streams = dict["Partition", "Stream"]()
        self.gone = False
        self._protocol = protocol
        self._time = protocol.time
        self._batch_size = settings.batch_size
        self._speed = speed
        self._worker = Worker(worker, settings)
        self._orders = Orders(worker)
        self._computing = False
        self._posted = list["UpdateTrigger"]()
        self._reading = False
        self._awaited = dict["Partition", int]()  # the position whose batch is waited for
        self._tick_at = float("inf")
        self._looking = False

    def vanish(self) -> None:
        """Be preempted without notice."""
        self.gone = True

    # --- streams ------------------------------------------------------------------------------

    def own(self, streams: list[Stream]) -> None:
        """The group gives it these."""
        self.streams.update((stream.partition, stream) for stream in streams)
        self._feed(events.Assigned(tuple(stream.partition for stream in streams)))
        self._wake_when_due()

    def disown(self, partitions: list[Partition]) -> None:
        """The group takes these away."""
        for partition in partitions:
            del self.streams[partition]
            self._awaited.pop(partition, None)
        self._feed(events.Revoked(tuple(partitions)))

    def await_batches(self) -> None:
        """Wait for the next batch of each stream that is not waited for."""
        for stream in self.streams.values():
            self._await(stream)

    def _await(self, stream: Stream) -> None:
        """Read a batch of a stream as soon as it is full.

        A real consumer reads what is there; that batches are cut one stream at a time changes
        which records share a batch, not how many there are at any time.
        """
        position = self._worker.position(stream.partition)
        if position is None or not self._reading or self._awaited.get(stream.partition) == position:
            return
        full_at = stream.full_at(position, self._batch_size)
        if full_at == float("inf"):
            return  # it stands still: whoever lets it go on asks again
        self._awaited[stream.partition] = position
        self._time.at(full_at, self._read, stream, position)

    def _read(self, stream: Stream, position: int) -> None:
        if self.gone or self._awaited.get(stream.partition) != position:
            return
        del self._awaited[stream.partition]
        if not self._reading:
            return
        self._feed(events.Decoded(stream.read(position, self._batch_size)))
        self._await(stream)

    # --- orders -------------------------------------------------------------------------------

    def hear(self, trigger: UpdateTrigger) -> None:
        """A trigger was posted; like a real worker, it listens between two gradients."""
        self._posted.append(trigger)
        if not self._computing:
            self._listen()
            self._begin_next()

    def _listen(self) -> None:
        if self._posted:
            self._orders.hear(self._posted)
            self._posted.clear()
            if not self._reading:
                self._feed(events.RoundBegan())
                self._wake_when_due()

    def _begin_next(self) -> None:
        compute = self._orders.next()
        self._computing = compute is not None
        if compute is not None:
            seconds = self._protocol.gradient_times.draw(len(compute.batches), self._speed)
            computed = self._protocol.learner.gradient(compute.batches)
            gradient = Gradient(
                worker=self.id,
                model=compute.model,
                batches=tuple(batch.offset for batch in compute.batches),
                samples=sum(batch.samples for batch in compute.batches),
                loss_sum=computed.loss_sum,
                metric_sums={},
                seconds=seconds,
                vector=computed.vector,
            )
            self._time.at(self._time.now + seconds, self._computed, gradient)

    def _computed(self, gradient: Gradient) -> None:
        if self.gone:
            return
        self._listen()  # who asked for it again meanwhile has it now
        self._protocol.reply(gradient)
        self._orders.done()
        self._begin_next()

    # --- the state machine --------------------------------------------------------------------

    def delivered(self, number: int, offset: int) -> None:
        """An indicator got its offset."""
        if not self.gone:
            self._feed(events.Delivered(number, offset))

    def _wake_when_due(self) -> None:
        due = max(self._worker.due(), self._time.now)
        if due < self._tick_at:
            self._tick_at = due
            self._time.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if self.gone or due != self._tick_at:
            return
        self._tick_at = float("inf")
        self._feed(events.Tick())
        self._wake_when_due()

    def _look_until_reading(self) -> None:
        """See the standing as often as a real worker: it stands still until one gives it room."""
        if not self._looking:
            self._looking = True
            self._time.at(self._time.now, self._look)

    def _look(self) -> None:
        self._looking = False
        if not self.gone and not self._reading:
            self._feed(events.StandingSeen(self._protocol.look()))
        if not self.gone and not self._reading:
            self._looking = True
            self._time.at(self._time.now + LOOK_S, self._look)

    def _feed(self, event: WorkerEvent) -> None:
        for command in self._worker.on(event, self._time.now):
            match command:
                case do.Announce(number, claim):
                    self._protocol.announce(self, number, claim)
                case do.SetReading(reading):
                    self._reading = reading
                    if reading:
                        self.await_batches()
                    else:
                        self._look_until_reading()
                case do.Place(positions):
                    for partition in positions:
                        self._await(self.streams[partition])
                case do.DropRows(partition):
                    self._awaited.pop(partition, None)
                case do.LookAtStanding():
                    self._feed(events.StandingSeen(self._protocol.standing))
                case _:
                    pass  # rows, beats and commits have no counterpart here
