"""A worker's stream thread: poll, decode, batch, announce (Algorithm 1).

It never waits for a gradient. What to do is decided by `common.core.worker`; this file carries it
out on Kafka and on the board.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from contextlib import ExitStack
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, TypeAlias

from common.core import commands as do
from common.core import events
from common.core.batching import Run
from common.core.liveness import LEAVING
from common.core.messages import BatchReady, Claim, Skipped
from common.core.spans import Partition
from common.core.worker import Worker
from common.errors import UnavailableError
from common.kafka.names import control_topic, group_name
from common.ports.servers import EndReached, Fetched, OutOfRange, Truncated
from common.telemetry.logging import StageTimes
from common.telemetry.outages import Outage, OutageNotifier
from common.wire import messages as wire
from services.worker.time_lag import TimeLag

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from common.core.commands import WorkerCommand
    from common.core.messages import TriggerStream, Unsettled, WorkerId
    from common.core.settings import WorkerSettings
    from common.core.spans import Span
    from common.data.codecs import Codec
    from common.ports.servers import Board, Log, StreamEvent
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.worker import WorkerMetrics
    from services.worker.left_out import LeftOut
    from services.worker.rows import ArrivedRows, BatchCache
    from services.worker.schemas import SchemaFinder
    from services.worker.traces import BatchTraces

POLL_RECORDS = 2000  # of one poll: a few milliseconds of decoding at most
POLL_S = 0.05  # longest wait for records: how late a rebalance may be noticed
HEARTBEAT_TTL_S = 1.2  # four beats: one lost and one late are no death
FLUSH_S = 5.0  # for the last announcements when the worker leaves

_OfPartition: TypeAlias = Fetched | EndReached | OutOfRange | Truncated


class Stream:
    """One member of the job's consumer group.

    Args:
        job: The job's id.
        settings: Of the state machine.
        codec: Decodes records.
        schemas: Finds the schemas of those; None: they need none.
        arrived: Where decoded rows go.
        cache: Where announced batches go.
        hold: Whether its partitions wait for its return (`on_preemption: hold`).
        digest: Digest of its model's layout, for its heartbeats.
        left_out: Reports that the leader gives this worker no work.
        clock: Seconds that never go back.
    """

    def __init__(  # noqa: PLR0913 -- the parts of the shell, each used once
        self,
        worker: WorkerId,
        job: str,
        settings: WorkerSettings,
        *,
        codec: Codec,
        schemas: SchemaFinder | None = None,
        log: Log,
        board: Board,
        arrived: ArrivedRows,
        cache: BatchCache,
        logger: EventLogger,
        measures: WorkerMetrics,
        traces: BatchTraces,
        streams: tuple[str, ...],
        hold: bool,
        digest: str = "",
        left_out: LeftOut | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._id = worker
        self._machine = Worker(worker, settings)
        self._codec = codec
        self._schemas = schemas
        self._held = deque[_OfPartition]()  # of partitions; the first awaits a schema
        with ExitStack() as undo:
            self._writer = log.writer()
            undo.callback(self._writer.close)
            self._reader = log.stream(group_name(job), streams, worker, hold=hold)
            undo.pop_all()
        self._control = Partition(control_topic(job), 0)
        self._source = log
        self._clock = clock
        self._digest = digest
        self._left_out = left_out
        self._board = board
        self._arrived = arrived
        self._cache = cache
        self._log = logger
        self._measures = measures
        self._traces = traces
        self._time_lag = TimeLag(streams, logger, measures)
        self._truncated = dict[Partition, Truncated]()  # as told last
        self._kafka_outage = Outage(logger, "kafka")
        self._writer_outage = Outage(logger, "kafka")  # Kafka may answer reads and refuse writes
        self._board_outage = Outage(logger, "redis", clock)
        self._notifier = OutageNotifier(board, str(worker), str(logger.bound.get("job", "")), clock)
        self._delivered = list[tuple[int, int | None]]()
        self._unsent = list[tuple[int, Claim]]()  # by number: announced in this turn
        self._heard = deque[events.RoundBegan]()  # from another thread
        self._woken = threading.Event()  # by what was heard
        self._reading = False
        self._events = deque[events.WorkerEvent]()  # the first is being carried out
        self._times = StageTimes()

    def round_began(self, epoch: int, unsettled: Unsettled | None) -> None:
        """A trigger was heard, of which leader and with what of room; from any thread."""
        self._heard.append(events.RoundBegan(epoch, unsettled))
        if self._machine.is_news(epoch, unsettled):
            self._woken.set()

    def triggers(self) -> TriggerStream:
        """Where the leader's triggers are; for any thread."""
        return self._machine.triggers

    def topic_id(self, span: Span) -> str:
        """Kafka's id of the topic that a span was claimed of, empty if unknown; for any thread."""
        return self._machine.topic_id(span)

    def turn(self) -> None:
        """One turn of the loop: due decisions, one poll, delivery reports.

        Raises:
            UnknownTopicError: If the control topic is gone: what it held is lost, and the leader
                holds the job.
            DeliveryError: If an announcement was refused.
        """
        self._woken.clear()
        while len(self._heard) > 1:  # the newest says all that the others do
            self._heard.popleft()
        if self._heard:
            self._feed(self._heard.popleft())
        if self._clock() >= self._machine.due():
            self._feed(events.Tick())
        self._send_claims()
        wait_s = min(max(self._machine.due() - self._clock(), 0.0), POLL_S)
        room = min(self._machine.room, POLL_RECORDS) if self._reading and not self._held else 0
        try:
            happened = self._reader.poll(room, wait_s if room else 0.0, self._machine.batch_size)
            if any(not isinstance(event, events.Revoked) for event in happened):
                self._kafka_outage.over()
            else:
                self._kafka_outage.quiet()
        except UnavailableError as error:
            happened = ()
            self._kafka_outage.met(error)
        for event in happened:
            self._take(event)
        while self._held and self._is_ready(self._held[0]):
            self._come(self._held.popleft())
        self._send_claims()
        if not room and not happened:
            self._woken.wait(wait_s)  # for room
        self._report_deliveries()
        if self._time_lag.due(self._clock()):
            self._time_lag.look(self._reader.lag())

    def resize(self, batch_size: int, bound: int, group_size: int) -> None:
        """Announce batches of `batch_size`, for groups of K, from now on; up to `bound` wait."""
        self._log.info("batches_resized", batch_size=batch_size, bound=bound)
        self._feed(events.SizesChanged(batch_size, bound, group_size))
        self._send_claims()

    def leave(self) -> None:
        """Stop reading and say so; the group is left with `close`."""
        self._held.clear()
        self._feed(events.Leaving())

    def close(self) -> None:
        """Leave the group and send what is announced.

        Raises:
            DeliveryError: If an announcement was refused; everything is closed nevertheless.
        """
        with ExitStack() as closing:
            closing.callback(self._times.tell, self._log)
            closing.callback(self._writer.close)
            if self._schemas is not None:
                self._schemas.close()
            self._reader.close()
            if not self._writer.flush(FLUSH_S):
                self._log.warning(
                    "announcements_unsent", reason="Kafka is unavailable; their records are free"
                )

    # --- what happens -------------------------------------------------------------------------

    def _take(self, event: StreamEvent) -> None:
        match event:
            case events.Assigned(partitions):
                self._log.info("partitions_assigned", partitions=",".join(map(str, partitions)))
                self._feed(event)
            case events.Revoked(partitions):
                self._log.info("partitions_revoked", partitions=",".join(map(str, partitions)))
                self._time_lag.revoke(partitions)
                self._drop_held(partitions)
                self._feed(event)
            case Fetched() | EndReached() | OutOfRange() | Truncated():
                self._held.append(event)

    def _is_ready(self, event: _OfPartition) -> bool:
        """Whether it can come now; what comes after it waits until then, to keep the order."""
        if self._schemas is None or not isinstance(event, Fetched):
            return True
        return self._schemas.ready(event.values)

    def _drop_held(self, partitions: Collection[Partition]) -> None:
        """Forget what waits of these partitions: it was read from where they do not stand now."""
        self._held = deque(each for each in self._held if each.partition not in partitions)

    def _come(self, event: _OfPartition) -> None:
        match event:
            case Fetched():
                self._time_lag.read(event)
                self._read(event)
            case EndReached(partition, end):
                self._feed(events.EndReached(partition, end))
            case OutOfRange(partition, bounds):
                self._log.warning("records_expired", partition=str(partition), start=bounds.start)
                self._feed(events.FellBehind(partition, bounds.start))
            case Truncated(partition, at, recreated):
                if self._truncated.get(partition) != event:  # it tries again, now and then
                    self._truncated[partition] = event
                    reason = (
                        "its topic was deleted and created anew"
                        if recreated
                        else f"its log lost the records that it had from {at} on"
                    )
                    self._log.error("stream_truncated", partition=str(partition), reason=reason)
                self._feed(events.Truncated(partition, recreated))

    def _read(self, fetched: Fetched) -> None:
        """Take in what lies above the position, in runs of one leader epoch."""
        position = self._machine.position(fetched.partition)
        begin = 0 if position is None else bisect_left(fetched.offsets, position)
        if begin:
            self._feed(events.RecordBelow(fetched.partition, fetched.epochs[begin - 1]))
        while begin < len(fetched.offsets):
            epoch = fetched.epochs[begin]
            end = bisect_right(fetched.epochs, epoch, begin)  # of one log they never go back
            self._feed(events.Decoded(self._decode(fetched, begin, max(end, begin + 1))))
            begin = max(end, begin + 1)

    def _decode(self, fetched: Fetched, begin: int, end: int) -> Run:
        """Decode a whole run at once; rows go where the next announcement finds them."""
        decoded = self._codec.decode(fetched.values[begin:end])
        run = offsets = fetched.offsets[begin:end]
        skipped: tuple[Skipped, ...] = ()
        if decoded.skipped:
            offsets = [run[index] for index in decoded.kept.tolist()]
            skipped = tuple(
                Skipped(*fetched.partition, run[index], reason) for index, reason in decoded.skipped
            )
        if offsets:
            self._arrived.add(fetched.partition, decoded.records)
        first_s, last_s = fetched.first_arrival_s, fetched.last_arrival_s
        epoch = fetched.epochs[begin]
        return Run(fetched.partition, offsets, skipped, first_s, last_s, epoch)

    def _report_deliveries(self) -> None:
        self._writer.poll()
        self._writer_outage.watch(self._writer)
        self._writer_outage.quiet()
        delivered, self._delivered = self._delivered, []
        for index, (number, offset) in enumerate(delivered):
            try:
                highest = self._source.bounds(self._control).end - 1 if offset is None else offset
            except UnavailableError as error:
                self._kafka_outage.met(error)
                self._delivered = [*delivered[index:], *self._delivered]
                return
            self._feed(events.Delivered(number, highest))

    def _feed(self, event: events.WorkerEvent) -> None:
        """Take in an event, and then what came of it: no decision cuts into an earlier one's."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # one is being carried out: this one is next
        while self._events:
            for command in self._machine.on(self._events[0], self._clock()):
                self._do(command)
            self._events.popleft()

    # --- what to do ---------------------------------------------------------------------------

    def _count(self, claim: Claim, counts: tuple[int, ...]) -> None:
        """Count the records of a claim, of which `counts` decoded in each span of its address."""
        measures = self._measures
        if isinstance(claim, BatchReady):
            measures.batches_announced.inc()
            for span, count in zip(claim.address, counts, strict=True):
                measures.records_read.labels(span.topic).inc(count)
            for left_out in claim.skipped:
                measures.records_skipped.labels(left_out.topic).inc(left_out.records)
        else:
            for span in claim.address:
                measures.records_expired.labels(span.topic).inc(span.end - span.start)

    def _do(self, command: WorkerCommand) -> None:  # noqa: C901 -- one case per command
        match command:
            case do.Announce(number, claim, counts):
                if isinstance(claim, BatchReady) and claim.samples:
                    self._cache.put(claim.address, self._arrived.take(claim.address, counts))
                self._count(claim, counts)
                self._unsent.append((number, claim))
            case do.Place(positions):
                placed = ",".join(f"{p}@{position.offset}" for p, position in positions.items())
                self._log.info("reading_from", positions=placed)
                self._drop_held(positions)
                self._reader.place(positions)
            case do.DropRows(partition):
                self._drop_held((partition,))
                self._arrived.drop(partition)
            case do.SetReading(reading, reason):
                self._reading = reading
                self._measures.reading.set(reading)
                if reading:
                    self._reader.resume()
                else:
                    self._reader.pause()
                    self._log.debug("reading_paused", reason=reason)
            case do.Heartbeat(status):
                self._on_board(lambda: self._beat(status))
            case do.ReadLeaderStatus():
                self._on_board(self._look_at_leader_status)
            case do.Forget(addresses):
                self._cache.forget(addresses)
            case do.Commit(positions):
                self._reader.commit(positions)

    def _beat(self, status: str) -> None:
        if status != LEAVING and self._schemas is not None:
            status = self._schemas.missing or status
        self._board.beat(self._id, status, HEARTBEAT_TTL_S, self._digest)

    def _send_claims(self) -> None:
        """Announce all that a turn made at once.

        One by one they would go in as many requests as the turn takes lingers of the client, each
        of which costs the broker and whoever reads them as much as one with all.
        """
        unsent, self._unsent = self._unsent, []
        for number, claim in unsent:
            self._announce(number, claim)

    def _announce(self, number: int, claim: Claim) -> None:
        arrived = self._traces.announced(claim)
        started = perf_counter()

        def delivered(offset: int | None) -> None:
            self._measures.stage_s.labels("indicator").observe(
                self._times.add("indicator", started)
            )
            arrived()
            self._delivered.append((number, offset))

        self._writer.append(self._control.topic, wire.encode_claim(claim), on_delivered=delivered)

    def _look_at_leader_status(self) -> None:
        leader_status = self._board.get_leader_status()
        if self._left_out is not None:
            self._left_out.look(leader_status)
        self._notifier.notify()
        # First the reports: a claim that the leader's status has decided must be known as sent.
        self._report_deliveries()
        self._feed(events.LeaderStatusSeen(leader_status))

    def _on_board(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._board_outage.quiet()  # it may answer, and refuse what is written
        except UnavailableError as error:
            self._board_outage.met(error)
