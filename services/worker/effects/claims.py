"""Sends a worker's claims to the control topic."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from common.core import worker_messages as events
from common.core.messages import BatchReady
from common.core.spans import Partition
from common.kafka.names import control_topic
from common.telemetry.logging import StageTimes
from common.telemetry.outages import Outage
from common.wire import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.core.worker_messages import Announce
    from common.kafka.port import Log
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.worker import WorkerMetrics
    from services.worker.traces import BatchTraces

# Longest wait for the last claims of a worker that leaves.
FLUSH_S = 5.0


class ClaimSender:
    """Sends one worker's claims, and reports their offsets.

    Args:
        log: Kafka.
        job: Identifier of the job.
        logger: Bound to the job.
        measures: Metrics of the worker.
        traces: Traces of the worker's batches.
    """

    def __init__(
        self,
        log: Log,
        job: str,
        logger: EventLogger,
        measures: WorkerMetrics,
        traces: BatchTraces,
    ) -> None:
        self._source = log
        self._control = Partition(control_topic(job), 0)
        self._log = logger
        self._measures = measures
        self._traces = traces
        # Kafka may answer reads and refuse writes.
        self._outage = Outage(logger, "kafka")
        self._times = StageTimes()
        self._unsent = list["Announce"]()
        self._delivered = list[tuple[int, int | None]]()
        self._writer = log.writer()

    def add(self, order: Announce) -> None:
        """Count a claim, and send it with the other claims of this turn.

        Sent one by one, the claims would go in several requests, one per linger of the client. Each
        request costs the broker and every reader as much as one with all claims.
        """
        self._unsent.append(order)
        measures, claim = self._measures, order.claim
        if isinstance(claim, BatchReady):
            measures.batches_announced.inc()
            for span, count in zip(claim.address, order.counts, strict=True):
                measures.records_read.labels(span.topic).inc(count)
            for left_out in claim.skipped:
                measures.records_skipped.labels(left_out.topic).inc(left_out.records)
        else:
            for span in claim.address:
                measures.records_expired.labels(span.topic).inc(span.end - span.start)

    def send(self) -> None:
        """Send the claims that were added.

        Raises:
            UnknownTopicError: If the control topic does not exist any more.
            DeliveryError: If a claim was refused.
        """
        unsent, self._unsent = self._unsent, []
        for order in unsent:
            arrived, started = self._traces.announced(order.claim), perf_counter()
            self._writer.append(
                self._control.topic,
                wire.encode_claim(order.claim),
                on_delivered=partial(self._deliver, order.number, started, arrived),
            )

    def delivered(self) -> Iterator[events.Delivered]:
        """Run the available delivery reports, and yield the highest possible offset of each claim.

        Raises:
            UnavailableError: If Kafka knows neither the offset of a claim nor the end of the topic.
                A later call yields the rest.
            DeliveryError: If a claim was refused.
        """
        self._writer.poll()
        self._outage.watch(self._writer)
        self._outage.quiet()
        while self._delivered:
            number, offset = self._delivered[0]
            highest = self._source.bounds(self._control).end - 1 if offset is None else offset
            del self._delivered[0]
            yield events.Delivered(number, highest)

    def flush(self) -> None:
        """Wait for the sent claims, at most `FLUSH_S`.

        Raises:
            DeliveryError: If a claim was refused.
        """
        if not self._writer.flush(FLUSH_S):
            self._log.warning(
                "announcements_unsent",
                reason="Kafka is unavailable; other workers may claim the records",
            )

    def close(self) -> None:
        """Close the writer."""
        self._times.log(self._log)
        self._writer.close()

    def _deliver(
        self, number: int, started: float, arrived: Callable[[], None], offset: int | None
    ) -> None:
        took_s = self._times.add("indicator", started)
        self._measures.stage_s.labels("indicator").observe(took_s)
        arrived()
        self._delivered.append((number, offset))
