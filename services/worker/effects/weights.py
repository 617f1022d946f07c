"""Publishes a group member's weights: in storage and in Redis."""

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

# Pause between attempts while storage is unavailable.
STORE_S = 1.0
# Pause between two transfers of weights to Redis, as a multiple of the time that the last one took.
# It limits large weights to a small share of the time under any settings of the job.
PAUSE = 20


class StateUploader:
    """Stores a member's state. A newer state replaces one that is not stored yet.

    Args:
        checkpoints: Receives the state.
        over: Set once the member has ended.
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
        # Guards the fields below.
        self._lock = threading.Lock()
        self._waiting: tuple[ModelId, Slices, bytes] | None = None
        self._runs = False

    def put(self, made: ModelId, slices: Slices, data: bytes) -> bool:
        """Set the state to store; return True if a thread must `run`."""
        with self._lock:
            self._waiting = made, slices, data
            begins, self._runs = not self._runs, True
            return begins

    def run(self) -> None:
        """Store the newest state, and retry until it is stored."""
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
    """Puts weights in Redis, with the leader's snapshots or as an offered version.

    `begin` is called with the member's lock held, `put` in a separate thread.

    Attributes:
        due: The leader's latest order, until it is begun.
    """

    def __init__(
        self, board: Board, count: TrafficCounter, times: StageTimes, logger: EventLogger
    ) -> None:
        self.due: ShareWeights | None = None
        self._board = board
        self._count = count
        self._times = times
        self._log = logger
        # When the transfer under way began; 0 if there is no transfer.
        self._began = 0.0
        # Earliest next transfer for hot snapshots.
        self._again_at = 0.0

    def begin(self, made: ModelId | None) -> ShareWeights | None:
        """Return the order to `put` now if it is due and for the version held; otherwise None."""
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
        """Put the weights in Redis."""
        try:
            if share.offered:
                self._board.offer_model(share.made, weights)
                self._count.moved(sent=len(weights))
            for hot in self._board.snapshots(share.by) if share.hot else ():
                whole = with_weights(hot, share.made, weights)
                # If None, the leader has put a newer snapshot.
                if whole is not None:
                    self._board.put_whole_snapshot(share.by, whole)
                    self._count.moved(sent=len(whole))
        except OutsideError as error:
            self._log.warning("weights_not_shared", version=share.made.version, reason=str(error))
        finally:
            took_s = self._times.add("share", self._began)
            self._again_at, self._began = perf_counter() + PAUSE * took_s, 0.0
