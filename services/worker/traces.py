"""A worker's spans of the traced batches. Other batches cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING

from common.core.messages import BatchReady, Claim, Failed, Reply, WorkerId

if TYPE_CHECKING:
    from common.core.order_queue import Compute
    from common.telemetry.tracing import Tracer


class BatchTraces:
    """One worker's spans in the traces of one job's batches. Safe to use from several threads.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(
        self, tracer: Tracer, job: str, worker: WorkerId, clock: Callable[[], float] = time
    ) -> None:
        self._tracer = tracer
        self._job = job
        self._worker = worker
        self._clock = clock

    def announced(self, claim: Claim) -> Callable[[], None]:
        """Trace a claim on its way to Kafka; return a function to call once it has arrived."""
        tracer, worker = self._tracer, self._worker
        if not isinstance(claim, BatchReady):
            return _nothing
        trace = tracer.trace(self._job, claim.address)
        if trace is None:
            return _nothing
        sent_s = self._clock()
        # The arrival is 0 if all records of the claim are bad.
        arrived_s = claim.first_arrival_s or sent_s
        tracer.span(
            trace,
            "batch.read",
            arrived_s,
            sent_s,
            worker=worker,
            records=claim.samples,
            skipped=sum(left_out.records for left_out in claim.skipped),
        )

        def delivered() -> None:
            tracer.span(trace, "batch.announce", sent_s, self._clock(), worker=worker)

        return delivered

    def answered(self, compute: Compute, received_s: float, reply: Reply, *, sent: bool) -> None:
        """Trace the answer to an order: one gradient of all its batches, or a failure.

        Args:
            compute: The order.
            received_s: When the order was received, in seconds since 1970.
            reply: The answer.
            sent: True if Redis accepted it.
        """
        error = f"{reply.reason}: {reply.detail}" if isinstance(reply, Failed) else ""
        if not error and not sent:
            error = "Redis is unavailable"
        for batch in compute.batches:
            trace = self._tracer.trace(self._job, batch.address)
            if trace is not None:
                self._tracer.span(
                    trace,
                    "batch.gradient",
                    received_s,
                    self._clock(),
                    error=error,
                    worker=self._worker,
                    epoch=compute.model.epoch,
                    version=compute.model.version,
                    batches=len(compute.batches),
                )


def _nothing() -> None:
    """Do nothing: the batch is not traced."""
