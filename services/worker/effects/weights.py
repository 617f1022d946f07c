"""Weights that a member of a group leaves where others find them: in storage, and on the board."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import TYPE_CHECKING

from msgspec import UNSET

from common.errors import OutsideError
from common.storage.hot_snapshot import with_weights
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.members.replica import ShareWeights
    from common.core.messages import ModelId, Slices
    from common.redis.port import Board
    from common.storage.store import CheckpointStore
    from common.telemetry.logging import EventLogger, StageTimes
    from services.worker.traffic import TrafficCounter

STORE_S = 1.0  # between attempts to reach storage
# Times as long as it took to put the weights on the board: not again before. Large ones make their
# way as seldom as that, whatever the job's settings say.
PAUSE = 20


class StateUploader:
    """Stores what a member is to store; the newest takes the place of what was not stored yet.

    Args:
        checkpoints: Where to.
        over: Set once the member has come to its end.
        logger: Bound to the job.
        stored: Called with the version and the slices that were stored.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        over: threading.Event,
        logger: EventLogger,
        stored: Callable[[ModelId, Slices], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._over = over
        self._stored = stored
        self._outage = Outage(logger, "storage")
        self._lock = threading.Lock()  # guards what follows
        self._waiting: tuple[ModelId, Slices, bytes] | None = None
        self._runs = False

    def put(self, made: ModelId, slices: Slices, data: bytes) -> bool:
        """Take in what is to be stored; returns True if a thread must `run`."""
        with self._lock:
            self._waiting = made, slices, data
            begins, self._runs = not self._runs, True
            return begins

    def run(self) -> None:
        """Store what is newest, and go on trying until it is there."""
        while True:
            with self._lock:
                waiting = self._waiting
                if waiting is None or self._over.is_set():
                    self._runs = False
                    return
            made, slices, data = waiting
            try:
                if slices is UNSET:
                    self._checkpoints.put_state(made, data)
                else:
                    self._checkpoints.put_slices(made, slices, data)
                self._outage.over()
            except OutsideError as error:
                self._outage.met(error)
                self._over.wait(STORE_S)
                continue
            with self._lock:
                if self._waiting is waiting:
                    self._waiting = None
            self._stored(made, slices)


class WeightsSharer:
    """Puts weights on the board, with snapshots of the leader's or as a version that is offered.

    `begin` is called with the member's lock held, `put` in a thread of its own.

    Attributes:
        due: What the leader has ordered last, until it is begun.
    """

    def __init__(
        self, board: Board, count: TrafficCounter, times: StageTimes, logger: EventLogger
    ) -> None:
        self.due: ShareWeights | None = None
        self._board = board
        self._count = count
        self._times = times
        self._log = logger
        self._began = 0.0  # 0: nothing is being put
        self._again_at = 0.0  # with hot snapshots, at the earliest

    def begin(self, made: ModelId | None) -> ShareWeights | None:
        """Return what to `put` now, if it is time for it and of the version that is held."""
        share, now = self.due, perf_counter()
        if share is None or self._began:
            return None
        if not share.offered and now < self._again_at:
            return None
        self.due = None
        if share.made != made:
            return None
        self._began = now
        return share

    def put(self, share: ShareWeights, weights: bytes) -> None:
        """Put the weights on the board."""
        try:
            if share.offered:
                self._board.offer_model(share.made, weights)
                self._count.moved(sent=len(weights))
            for hot in self._board.snapshots(share.by) if share.hot else ():
                whole = with_weights(hot, share.made, weights)
                if whole is not None:  # else the leader has put a newer one
                    self._board.put_whole_snapshot(share.by, whole)
                    self._count.moved(sent=len(whole))
        except OutsideError as error:
            self._log.warning("weights_not_shared", version=share.made.version, reason=str(error))
        finally:
            took_s = self._times.add("share", self._began)
            self._again_at, self._began = perf_counter() + PAUSE * took_s, 0.0
