"""Receives the replies of all jobs' workers, and passes them to the jobs led here."""

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

# Replies read at once.
AT_ONCE = 64
# Longest wait of one turn, and so the longest delay before the actor notices its end.
WAIT_S = 0.5
# Pause between attempts while Redis is unavailable.
AWAY_S = 0.2


class ReplyReader:
    """Waits for the replies of all jobs on one connection, as an actor of its own."""

    def __init__(self, replies: Replies, logger: EventLogger) -> None:
        self._replies = replies
        self._outage = Outage(logger, "redis")
        self._lock = threading.Lock()
        self._led: dict[str, tuple[int, Callable[[list[Reply]], None]]] = {}

    def follow(self, job: str, epoch: int, receive: Callable[[list[Reply]], None]) -> None:
        """Pass replies for this epoch of a job to `receive`, and drop those for other epochs.

        Replies that arrive together are passed together, because each call wakes the job's actor.
        """
        with self._lock:
            self._led[job] = (epoch, receive)

    def forget(self, job: str) -> None:
        """Drop a job's replies from now on."""
        with self._lock:
            self._led.pop(job, None)

    def turn(self) -> float:
        """Wait up to `WAIT_S` for replies, and pass them on."""
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
        """Do nothing: each answer returns the connection to its pool."""


class SoundReplies:
    """Rejects malformed replies to one leader.

    Args:
        length: P + B, the number of values in a well-formed vector.
        metrics: Counts the rejected replies.
        logger: Bound to the job.
    """

    def __init__(self, length: int, metrics: CoordinatorMetrics, logger: EventLogger) -> None:
        self._length = length
        self._metrics = metrics
        self._log = logger

    def __call__(self, reply: Reply) -> Reply | None:
        """Return a well-formed reply, or a `Failed` in its place; None if it is malformed."""
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
