"""A worker's stream thread: poll, decode, batch, announce (Algorithm 1).

It never waits for a gradient. `common.core.worker_reading` decides, and this file carries out the
decisions in Kafka and in Redis.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING

from common.core import worker_messages as do
from common.core import worker_messages as events
from common.core.batching import DecodedRun
from common.core.liveness import LEAVING
from common.core.messages import BatchReady, Skipped
from common.core.spans import Partition
from common.errors import UnavailableError
from common.kafka.port import Fetched, LogEndReached, LogTruncated, OutOfRange
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import Unsettled
    from common.core.worker_messages import WorkerCommand
    from common.core.worker_reading import Worker
    from common.data.codecs import Codec
    from common.kafka.port import StreamEvent, StreamReader
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.worker import WorkerMetrics
    from services.worker.effects.board import WorkerBoard
    from services.worker.effects.claims import ClaimSender
    from services.worker.effects.schemas import OfPartition, SchemaGate
    from services.worker.rows import BatchCache
    from services.worker.time_lag import TimeLag

# Records of one poll; decoding them takes a few milliseconds at most.
POLL_RECORDS = 2000
# Longest wait for records, and so the longest delay before a rebalance is noticed.
POLL_S = 0.05


class WorkerInbox:
    """Receives triggers from other threads, because they may give room to read.

    `round_began` is safe to call from any thread; the rest belongs to the stream thread.

    Args:
        is_news: Returns True if a trigger deserves an immediate turn.
    """

    def __init__(self, is_news: Callable[[int, Unsettled | None], bool]) -> None:
        self._is_news = is_news
        # The newest trigger replaces all earlier ones.
        self._triggers = deque[events.RoundBegan](maxlen=1)
        self._woken = threading.Event()

    def round_began(self, epoch: int, unsettled: Unsettled | None) -> None:
        """Deliver a trigger's leader epoch and its counts of waiting batches."""
        self._triggers.append(events.RoundBegan(epoch, unsettled))
        if self._is_news(epoch, unsettled):
            self._woken.set()

    def take(self) -> events.RoundBegan | None:
        """Remove and return the newest trigger; None if there is no trigger."""
        self._woken.clear()
        return self._triggers.popleft() if self._triggers else None

    def wait(self, timeout_s: float) -> None:
        """Wait for a trigger, at most this long."""
        self._woken.wait(timeout_s)


class Stream:
    """One member of the job's consumer group.

    Args:
        machine: Makes the decisions.
        reader: Reads the job's streams as this member.
        claims: Sends claims.
        board: Sends heartbeats and reads the leader's status.
        gate: Delays records that cannot be decoded yet.
        codec: Decodes records.
        cache: Receives announced batches.
        time_lag: Reports partitions that lag far behind.
        logger: Bound to the job.
        measures: Metrics of the worker.
        clock: Monotonic time in seconds.
    """

    def __init__(  # noqa: PLR0913 -- the parts of the shell, each used once
        self,
        machine: Worker,
        reader: StreamReader,
        claims: ClaimSender,
        board: WorkerBoard,
        *,
        gate: SchemaGate,
        codec: Codec,
        cache: BatchCache,
        time_lag: TimeLag,
        logger: EventLogger,
        measures: WorkerMetrics,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.inbox = WorkerInbox(machine.is_news)
        self._machine = machine
        self._reader = reader
        self._claims = claims
        self._board = board
        self._gate = gate
        self._codec = codec
        self._cache = cache
        self._time_lag = time_lag
        self._log = logger
        self._measures = measures
        self._clock = clock
        # The truncations that were logged last.
        self._truncated = dict[Partition, LogTruncated]()
        self._outage = Outage(logger, "kafka")
        self._reading = False
        # The first event is being carried out.
        self._events = deque[events.WorkerEvent]()

    def turn(self) -> None:
        """Make due decisions, poll once, and process delivery reports.

        Raises:
            UnknownTopicError: If the control topic does not exist any more. Its records are lost,
                and the leader holds the job.
            DeliveryError: If an announcement was refused.
        """
        began = self.inbox.take()
        if began is not None:
            self._feed(began)
        if self._clock() >= self._machine.due():
            self._feed(events.Tick())
        self._claims.send()
        wait_s = min(max(self._machine.due() - self._clock(), 0.0), POLL_S)
        reads = self._reading and not self._gate.is_closed
        room = min(self._machine.room, POLL_RECORDS) if reads else 0
        happened = self._poll(room, wait_s if room else 0.0)
        for event in happened:
            self._see(event)
        for read in self._gate.ready():
            self._take(read)
        self._claims.send()
        if not room and not happened:
            # Wait for room.
            self.inbox.wait(wait_s)
        self._report_deliveries()
        if self._time_lag.due(self._clock()):
            self._time_lag.look(self._reader.lag())

    def resize(self, batch_size: int, bound: int, group_size: int) -> None:
        """Use a changed b, another limit of waiting batches and another largest K from now on."""
        self._log.info("batches_resized", batch_size=batch_size, bound=bound)
        self._feed(events.SizesChanged(batch_size, bound, group_size))
        self._claims.send()

    def leave(self) -> None:
        """Stop reading and report it. `close` leaves the group."""
        self._gate.clear()
        self._feed(events.Leaving())

    def close(self) -> None:
        """Leave the group and send what is announced.

        Raises:
            DeliveryError: If an announcement was refused. Everything is closed nevertheless.
        """
        with ExitStack() as closing:
            closing.callback(self._claims.close)
            self._gate.close()
            self._reader.close()
            self._claims.flush()

    # --- events -----------------------------------------------------------------------------------

    def _poll(self, room: int, wait_s: float) -> tuple[StreamEvent, ...]:
        try:
            happened = self._reader.poll(room, wait_s, self._machine.batch_size)
        except UnavailableError as error:
            self._outage.met(error)
            return ()
        if any(not isinstance(event, events.Revoked) for event in happened):
            self._outage.over()
        else:
            self._outage.quiet()
        return happened

    def _see(self, event: StreamEvent) -> None:
        match event:
            case events.Assigned(partitions):
                self._log.info("partitions_assigned", partitions=",".join(map(str, partitions)))
                self._feed(event)
            case events.Revoked(partitions):
                self._log.info("partitions_revoked", partitions=",".join(map(str, partitions)))
                self._time_lag.revoke(partitions)
                self._gate.drop(partitions)
                self._feed(event)
            case Fetched() | LogEndReached() | OutOfRange() | LogTruncated():
                self._gate.add(event)

    def _take(self, event: OfPartition) -> None:
        match event:
            case Fetched():
                self._time_lag.read(event)
                self._read(event)
            case LogEndReached(partition, end):
                self._feed(events.EndReached(partition, end))
            case OutOfRange(partition, bounds):
                self._log.warning("records_expired", partition=str(partition), start=bounds.start)
                self._feed(events.FellBehind(partition, bounds.start))
            case LogTruncated(partition, at, recreated):
                # The reader repeats this event at intervals.
                if self._truncated.get(partition) != event:
                    self._truncated[partition] = event
                    reason = (
                        "its topic was deleted and recreated"
                        if recreated
                        else f"Kafka lost the partition's records from offset {at} on"
                    )
                    self._log.error("stream_truncated", partition=str(partition), reason=reason)
                self._feed(events.Truncated(partition, recreated))

    def _read(self, fetched: Fetched) -> None:
        """Process the records above the position, in runs of one leader epoch."""
        position = self._machine.position(fetched.partition)
        begin = 0 if position is None else bisect_left(fetched.offsets, position)
        if begin:
            self._feed(events.RecordBelow(fetched.partition, fetched.epochs[begin - 1]))
        while begin < len(fetched.offsets):
            epoch = fetched.epochs[begin]
            # Leader epochs of one log never decrease.
            end = bisect_right(fetched.epochs, epoch, begin)
            self._feed(events.Decoded(self._decode(fetched, begin, max(end, begin + 1))))
            begin = max(end, begin + 1)

    def _decode(self, fetched: Fetched, begin: int, end: int) -> DecodedRun:
        """Decode a whole run at once."""
        decoded = self._codec.decode(fetched.values[begin:end])
        run = offsets = fetched.offsets[begin:end]
        skipped: tuple[Skipped, ...] = ()
        if decoded.skipped:
            offsets = [run[index] for index in decoded.kept.tolist()]
            skipped = tuple(
                Skipped(*fetched.partition, run[index], reason) for index, reason in decoded.skipped
            )
        first_s, last_s = fetched.first_arrival_s, fetched.last_arrival_s
        epoch = fetched.epochs[begin]
        rows = decoded.records
        return DecodedRun(fetched.partition, offsets, skipped, first_s, last_s, epoch, rows)

    def _report_deliveries(self) -> None:
        try:
            for event in self._claims.delivered():
                self._feed(event)
        except UnavailableError as error:
            self._outage.met(error)

    def _feed(self, event: events.WorkerEvent) -> None:
        """Process an event, then those that it caused: no decision interrupts another."""
        self._events.append(event)
        if len(self._events) > 1:
            # The event under way comes first.
            return
        while self._events:
            for command in self._machine.on(self._events[0], self._clock()):
                self._do(command)
            self._events.popleft()

    # --- commands ---------------------------------------------------------------------------------

    def _do(self, command: WorkerCommand) -> None:  # noqa: C901 -- one case per command
        match command:
            case do.Announce(_, claim, _, rows):
                if isinstance(claim, BatchReady) and claim.samples:
                    self._cache.put(claim.address, rows)
                self._claims.add(command)
            case do.Place(positions):
                placed = ",".join(f"{p}@{position.offset}" for p, position in positions.items())
                self._log.info("reading_from", positions=placed)
                self._gate.drop(positions)
                self._reader.place(positions)
            case do.Unplace(partition):
                self._gate.drop((partition,))
            case do.SetReading(reading, reason):
                self._reading = reading
                self._measures.reading.set(reading)
                if reading:
                    self._reader.resume()
                else:
                    self._reader.pause()
                    self._log.debug("reading_paused", reason=reason)
            case do.SendHeartbeat(status):
                missing = self._gate.missing if status != LEAVING else ""
                self._board.beat(missing or status)
            case do.ReadLeaderStatus():
                if (seen := self._board.leader_status()) is not None:
                    # Reports come first: a claim that the status has decided must be known as sent.
                    self._report_deliveries()
                    self._feed(seen)
            case do.Forget(addresses):
                self._cache.forget(addresses)
            case do.Commit(positions):
                self._reader.commit(positions)
