"""A leader's snapshots: hot ones on the board, checkpoints in object storage by a thread apart."""

from __future__ import annotations

import threading
from time import time
from typing import TYPE_CHECKING

from common.core.messages import ModelId
from common.core.snapshots import genesis
from common.errors import CorruptError, UnavailableError
from common.saved import Saved, from_bytes, from_parts, to_bytes, to_parts
from common.telemetry import Outage

if TYPE_CHECKING:
    from common.checkpoints import CheckpointStore
    from common.core.messages import Positions
    from common.ports import Board
    from common.telemetry import EventLogger

RETRY_S = 2.0  # between attempts while object storage is away


class SnapshotStore:
    """Where one job's snapshots go, and come from.

    Args:
        board: For the hot ones.
        checkpoints: For the lasting ones, None where the settings name no object storage.
        keep: Checkpoints kept.
        logger: Bound to the job.
    """

    def __init__(
        self, board: Board, checkpoints: CheckpointStore | None, keep: int, logger: EventLogger
    ) -> None:
        self._board = board
        self._checkpoints = checkpoints
        self._keep = keep
        self._log = logger
        self._outage = Outage(logger, "checkpoints")
        self._next: Saved | None = None
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._upload, name="checkpoints", daemon=True)
        if checkpoints is not None:
            self._thread.start()

    def hot(self) -> list[Saved]:
        """Every hot snapshot that can be read whole.

        Raises:
            UnavailableError: If the board is away: a better one might be there.
        """
        found = list[Saved]()
        for data in self._board.snapshots():
            try:
                found.append(from_bytes(data))
            except CorruptError as error:
                self._log.warning("hot_snapshot_unreadable", reason=str(error))
        return found

    def lasting(self) -> list[Saved]:
        """Every checkpoint that can be read whole.

        Raises:
            UnavailableError: If object storage is away: a better one might be there.
        """
        found = list[Saved]()
        if self._checkpoints is None:
            return found
        for name in self._checkpoints.candidates():
            try:
                found.append(from_parts(self._checkpoints.load(name).parts))
            except CorruptError as error:
                self._log.warning("checkpoint_unreadable", name=tuple(name), reason=str(error))
        return found

    def first(self, positions: Positions) -> Saved:
        """What the job begins with, where nothing was learned yet."""
        return Saved(genesis(positions), b"")

    def put(self, saved: Saved, *, checkpoint: bool) -> None:
        """Publish a snapshot; a checkpoint is uploaded later, the newest where several wait.

        Raises:
            UnavailableError: If the board is away.
        """
        if checkpoint and self._checkpoints is not None:
            with self._changed:
                self._next = saved
                self._changed.notify_all()
        self._board.put_snapshot(saved.snapshot.by, to_bytes(saved))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the last checkpoint has arrived; False if it took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._busy, timeout_s)

    def close(self) -> None:
        """End the thread; what it has not begun is lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _upload(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                if self._next is None:
                    return
                saved, self._next, self._busy = self._next, None, True
            try:
                self._write(saved)
                self._outage.over()
            except UnavailableError as error:
                self._outage.met(error)
                self._again(saved)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _again(self, saved: Saved) -> None:
        """Try the same one later, unless a newer one has come by then."""
        with self._changed:
            self._next = self._next or saved
            self._changed.wait_for(lambda: self._closed, RETRY_S)

    def _write(self, saved: Saved) -> None:
        if self._checkpoints is None:
            return
        name = ModelId(saved.snapshot.by, saved.snapshot.made.version)
        self._checkpoints.save(name, to_parts(saved), time())
        self._checkpoints.keep(self._keep)
        self._log.info("checkpoint_written", epoch=name.epoch, version=name.version)
