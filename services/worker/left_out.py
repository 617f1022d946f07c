"""Why the leader gives this worker no work: in the log, and for `doll job show`."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from common.checkpoints.snapshot_file import from_head
from common.core.liveness import WORKER
from common.errors import CorruptError, FutureFormatError
from common.learning.checkpoint import difference, layout_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.messages import LeaderStatus, WorkerId
    from common.learning.checkpoint import Layout
    from common.ports.servers import Board
    from common.telemetry.logging import EventLogger

AGAIN_S = 10.0  # between reports on the board
TTL_S = 2.5 * AGAIN_S  # one report may be late
HEAD_BYTES = 1 << 20  # first bytes of a hot snapshot: the layout of ten thousand tensors


class LeftOut:
    """Reports that a worker's model is not the job's, and the first difference.

    Args:
        worker: This worker's name.
        layout: Layout of this worker's model.
        board: The job's.
        logger: Bound to the job and the worker.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        worker: WorkerId,
        layout: Layout,
        board: Board,
        logger: EventLogger,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._worker = worker
        self._layout = layout
        self._board = board
        self._log = logger
        self._clock = clock
        self._reported = ""
        self._again_at = float("-inf")

    def look(self, leader_status: LeaderStatus | None) -> None:
        """Report what the leader says of this worker, if that is news or some time ago.

        Raises:
            OutsideError: If Redis is unavailable.
        """
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
        """Return the first difference to the leader's model, if a hot snapshot shows it."""
        for data in self._board.snapshots(epoch, HEAD_BYTES, whole=True):
            try:
                head = from_head(data, HEAD_BYTES)
                found = "" if head is None else difference(layout_at(head.trainer), self._layout)
            except (CorruptError, FutureFormatError):
                continue
            if found:
                return f"the first difference: {found}"
        return ""
