"""Keeps a served model up to date, from hot snapshots on the board or from checkpoints.

Only versions in a snapshot are served, because the next leader continues from the best of these.
While servers are unavailable, the last version keeps answering.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, time
from typing import TYPE_CHECKING

from common.errors import DollError, NotFoundError
from common.jobs.models import find_model, heads_on_board
from common.learning.checkpoint import weights_in
from common.storage.snapshot_file import from_bytes
from common.storage.store import CheckpointStore
from common.telemetry.logging import Changes, EventLogger
from common.telemetry.outages import Outage
from services.serve.served_model import ServedModel, Version

if TYPE_CHECKING:
    from common.core.messages import Vector
    from common.core.snapshots import Snapshot
    from common.jobs.servers import Outside
    from common.learning.checkpoint import Kind
    from common.redis.port import Board

# Seconds between polls of the board, which transfer a few kilobytes unless there is something new.
LOOK_S = 0.1
STORAGE_S = 2.0


class Follower:
    """Follows a job for one served model.

    Args:
        storage_s: Seconds between polls of the checkpoints.
    """

    def __init__(
        self,
        job: str,
        model: ServedModel,
        outside: Outside,
        logger: EventLogger,
        storage_s: float = STORAGE_S,
    ) -> None:
        self._storage_s = storage_s
        self._job = job
        self._model = model
        self._outside = outside
        self._log = logger
        self._board_away, self._storage_away = Outage(logger, "redis"), Outage(logger, "storage")
        self._changes = Changes()
        self._board: Board | None = None
        # Rank of the served snapshot.
        self._rank: tuple[int, int, int] | None = None
        # Newest and best checkpoint at the last poll of storage.
        self._found: object = None
        # Time of the next poll of storage.
        self._storage_at = 0.0

    def look(self) -> None:
        """Poll once, and serve a better version if there is one."""
        alias = self._model.alias
        if alias == "newest" and self._tried(self._look_at_board, self._board_away):
            return
        pinned = isinstance(alias, int) and self._rank is not None
        if not pinned and monotonic() >= self._storage_at:
            self._tried(self._look_into_storage, self._storage_away)
            self._storage_at = monotonic() + self._storage_s

    def close(self) -> None:
        """Close the connection."""
        if self._board is not None:
            self._board.close()

    def _tried(self, look: Callable[[], bool], outage: Outage) -> bool:
        """Return True if the poll succeeded and found a version that is served now."""
        try:
            found = look()
        except DollError as error:
            outage.met(error)
            return False
        outage.over()
        return found

    def _look_at_board(self) -> bool:
        if self._board is None:
            self._board = self._outside.open_board(self._job)
        heads = heads_on_board(self._board, self._passed_over)
        best = max(heads, key=lambda each: each.snapshot.rank, default=None)
        if best is None or not best.has_weights:
            return False
        better = self._is_better(best.snapshot)
        for data in self._board.snapshots(best.snapshot.by, whole=True) if better else ():
            saved = from_bytes(data)
            self._take(saved.snapshot, *weights_in(saved.trainer))
        self._model.confirm()
        return True

    def _look_into_storage(self) -> bool:
        """Look in storage for a version that the board lacks; slow if there is a new one."""
        if self._outside.settings.blobs:
            store = CheckpointStore(self._outside.open_blobs(), self._job)
            found = store.latest(), store.best()
            if found == self._found:
                self._model.confirm()
                return True
        else:
            found = None
        try:
            log = self._outside.open_log()
            model = find_model(self._job, self._model.alias, self._outside, log, self._passed_over)
        except NotFoundError as error:
            if isinstance(self._model.alias, int):
                self._passed_over(str(error))
            return False
        kept = model.kept
        if self._model.alias != "newest" or self._is_better(kept.snapshot):
            self._take(kept.snapshot, model.weights, model.kind)
        self._found = found
        self._model.confirm()
        return True

    def _is_better(self, snapshot: Snapshot) -> bool:
        return self._rank is None or snapshot.rank > self._rank

    def _take(self, snapshot: Snapshot, weights: Vector, kind: Kind) -> None:
        """Serve a snapshot.

        Raises:
            CorruptError: If the snapshot is not of this model.
            UnavailableError: If its frozen tensors cannot be read now.
        """
        version = Version(snapshot.made, snapshot.made_at_s or time())
        before = self._model.version
        self._model.load(version, weights, kind, self._read_base)
        self._rank = snapshot.rank
        if before is None or before.made.epoch != version.made.epoch:
            self._log.info("version_served", version=version.made.version, epoch=version.made.epoch)

    def _read_base(self, digest: str) -> bytes:
        return CheckpointStore(self._outside.open_blobs(), self._job).base(digest)

    def _passed_over(self, reason: str) -> None:
        if self._changes(reason, reason):
            self._log.warning("model_passed_over", reason=reason)
