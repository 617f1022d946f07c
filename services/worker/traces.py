"""What a worker tells of the batches that are traced; of the others nothing is worked out."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING

from common.core.messages import BatchReady, Claim, Failed, Gradient, WorkerId

if TYPE_CHECKING:
    from common.core.order_queue import Compute
    from common.telemetry.tracing import Tracer


class BatchTraces:
    """One worker's part in the traces of one job's batches; may be shared between threads.

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
        """A claim goes to Kafka; returns what is to be called when it is there."""
        tracer, worker = self._tracer, self._worker
        if not isinstance(claim, BatchReady):
            return _nothing
        trace = tracer.trace(self._job, claim.address)
        if trace is None:
            return _nothing
        sent_s = self._clock()
        arrived_s = claim.first_arrival_s or sent_s  # 0: it has no records, only such as are bad
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

    def answered(
        self, compute: Compute, received_s: float, reply: Gradient | Failed, *, sent: bool
    ) -> None:
        """An order has its answer: one gradient of all its batches, or none.

        Args:
            compute: The order.
            received_s: When it was heard; since 1970.
            reply: What came of it.
            sent: Whether the board took it.
        """
        error = f"{reply.reason}: {reply.detail}" if isinstance(reply, Failed) else ""
        if not error and not sent:
            error = "the board is unavailable"
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
    """Tell nothing: it is not traced."""
