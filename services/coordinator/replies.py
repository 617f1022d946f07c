"""Takes what workers of all jobs sent to this replica, and hands it to the jobs that it leads."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from common.core.messages import Failed, Gradient, Reply
from common.core.vectors import numbers_in
from common.errors import UnavailableError
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.redis.port import Replies
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.coordinator import CoordinatorMetrics

AT_ONCE = 64  # replies that are taken at once
WAIT_S = 0.5  # longest wait of one turn: how soon it notices that it is over
AWAY_S = 0.2  # between attempts while the board is unavailable


class ReplyReader:
    """Waits for the replies of all jobs on one connection: an actor of its own."""

    def __init__(self, replies: Replies, logger: EventLogger) -> None:
        self._replies = replies
        self._outage = Outage(logger, "redis")
        self._lock = threading.Lock()
        self._led: dict[str, tuple[int, Callable[[list[Reply]], None]]] = {}

    def follow(self, job: str, epoch: int, receive: Callable[[list[Reply]], None]) -> None:
        """Hand replies to this epoch's leader of a job to `receive`; those to others are dropped.

        What came together it gets together: each time its actor is woken, in another thread.
        """
        with self._lock:
            self._led[job] = (epoch, receive)

    def forget(self, job: str) -> None:
        """It leads no longer."""
        with self._lock:
            self._led.pop(job, None)

    def turn(self) -> float:
        """Wait for replies, for a while."""
        try:
            came = dict[str, list[Reply]]()
            for job, reply in self._replies.pop(AT_ONCE, WAIT_S):
                came.setdefault(job, []).append(reply)
            for job, replies in came.items():
                with self._lock:
                    epoch, receive = self._led.get(job, (-1, None))
                own = [reply for reply in replies if reply.model.epoch == epoch]
                if receive is not None and own:
                    receive(own)
            self._outage.over()
        except UnavailableError as error:
            self._outage.met(error)
            return monotonic() + AWAY_S
        return monotonic()

    def close(self) -> None:
        """Its connection goes back to the pool with each answer."""


class SoundReplies:
    """Turns away replies to one leader that are not well-formed.

    Args:
        length: P + B, numbers in a well-formed vector.
        metrics: Where those are counted that are not well-formed.
        logger: Bound to the job.
    """

    def __init__(self, length: int, metrics: CoordinatorMetrics, logger: EventLogger) -> None:
        self._length = length
        self._metrics = metrics
        self._log = logger

    def __call__(self, reply: Reply) -> Reply | None:
        """What is to be believed of it; None: nothing."""
        if not isinstance(reply, Gradient):
            return reply
        if reply.vector is None or reply.vector.shape != (self._length,):
            self._metrics.replies_refused.labels("malformed").inc()
            found = None if reply.vector is None else reply.vector.shape
            self._log.warning(
                "gradient_malformed",
                epoch=reply.model.epoch,
                version=reply.model.version,
                worker=reply.worker,
                found=found,
                expected=(self._length,),
            )
            return None
        if not np.isfinite(numbers_in(reply.vector)).all():
            detail = "the vector received is not finite"
            return Failed(reply.worker, reply.model, reply.batches, "not_finite", detail)
        return reply
