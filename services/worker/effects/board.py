"""A stream thread's traffic with Redis: heartbeats, leader status and reports."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from common.core import worker_messages as events
from common.core.liveness import ALIVE, WORKER, Heartbeat
from common.errors import CorruptError, UnavailableError, UserError
from common.learning.checkpoint import difference, digest_of, kind_at
from common.storage.hot_snapshot import first_weights
from common.telemetry.outages import Outage, OutageNotifier

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import LeaderStatus, WorkerId
    from common.learning.checkpoint import Layout
    from common.redis.port import Board
    from common.telemetry.logging import EventLogger

# Lifetime of a heartbeat: four intervals, so that one heartbeat may be lost and one may be late.
HEARTBEAT_TTL_S = 1.2
# Time between two reports in Redis.
AGAIN_S = 10.0
# Lifetime of a report in Redis: one report may be late.
TTL_S = 2.5 * AGAIN_S
# Bytes read of a hot snapshot: enough for the layout of ten thousand tensors.
HEAD_BYTES = 1 << 20
# A worker that starts before the job's first leader stores the base can meet another base later.
OTHER_BASE = (
    "the job's frozen tensors differ from this worker's; the worker starts again with the stored "
    "ones, for which it needs DOLL_BLOBS"
)


# A heartbeat without a device and without a token.
_PLAIN = Heartbeat(ALIVE)


class WorkerBoard:
    """Sends heartbeats, reads the leader's status, and reports this worker's problems.

    Args:
        worker: Name of this worker.
        board: The job's board in Redis.
        layout: Layout of this worker's model.
        base: Digest of its frozen tensors.
        logger: Bound to the job and the worker.
        clock: Monotonic time in seconds.
        own: Device and token of this process. The other fields are not used.
    """

    def __init__(
        self,
        worker: WorkerId,
        board: Board,
        layout: Layout,
        base: str,
        logger: EventLogger,
        clock: Callable[[], float] = monotonic,
        *,
        own: Heartbeat = _PLAIN,
    ) -> None:
        self._own = own
        self._worker = worker
        self._board = board
        self._layout = layout
        self._base = base
        self._digest = digest_of(layout, base)
        self._log = logger
        self._clock = clock
        self._outage = Outage(logger, "redis", clock)
        self._notifier = OutageNotifier(board, worker, self._outage.job, clock)
        # Why the leader leaves this worker out, as reported.
        self._reported = ""
        self._again_at = float("-inf")

    def beat(self, status: str) -> None:
        """Send a heartbeat."""
        try:
            self._board.beat(
                *(self._worker, status, HEARTBEAT_TTL_S, self._digest),
                *(self._own.device, self._own.life),
            )
            # Redis may answer reads and refuse writes.
            self._outage.quiet()
        except UnavailableError as error:
            self._outage.met(error)

    def leader_status(self) -> events.LeaderStatusSeen | None:
        """Read the leader's status and report problems; return None if Redis is unavailable."""
        try:
            found = self._board.get_leader_status()
            self._report_left_out(found)
            self._notifier.notify()
            self._outage.quiet()
        except UnavailableError as error:
            self._outage.met(error)
            return None
        return events.LeaderStatusSeen(found)

    def _report_left_out(self, leader_status: LeaderStatus | None) -> None:
        """Report why the leader leaves this worker out: at each change, and every `AGAIN_S`."""
        why = leader_status.left_out.get(self._worker, "") if leader_status is not None else ""
        if leader_status is None or not why:
            self._reported = ""
            return
        if self._reported and self._clock() < self._again_at:
            return
        reason = "; ".join(filter(None, (why, self._difference(leader_status.epoch))))
        if reason != self._reported:
            self._log.error("worker_left_out", reason=reason)
        self._reported, self._again_at = reason, self._clock() + AGAIN_S
        self._board.put_unable(WORKER + self._worker, reason, TTL_S)

    def _difference(self, epoch: int) -> str:
        """Return the first difference from the leader's model, or "" if no snapshot shows one.

        Raises:
            UserError: If only the frozen tensors differ.
        """
        for data in self._board.snapshots(epoch, HEAD_BYTES, whole=True):
            try:
                head = first_weights(data)
                kind = kind_at(head) if head else None
            except CorruptError:
                continue
            if kind is not None and (found := difference(kind.layout, self._layout)):
                return f"first difference: {found}"
            if kind is not None and kind.base != self._base:
                raise UserError(OTHER_BASE)
        return ""
