"""A leader's snapshots: hot ones in Redis, and checkpoints in object storage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic, time
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from common.core import events
from common.core.messages import GENESIS, ModelId, Positions
from common.core.snapshots import Snapshot, genesis
from common.errors import CorruptError, DollError, FutureFormatError, UnavailableError
from common.learning.checkpoint import model_in
from common.storage.snapshot_file import (
    FoundSnapshot,
    SnapshotFile,
    from_bytes,
    from_store,
    in_hand,
    is_sealed,
    to_bytes,
    to_parts,
)
from common.storage.store import CheckpointStore, format_model_id
from common.telemetry.outages import Outage
from services.coordinator.dead_letters import DeadLetters

if TYPE_CHECKING:
    from common.core import commands as do
    from common.jobs.store import JobRecord
    from common.redis.port import LeaderBoard
    from common.runtime.supervisor import Supervised, Supervisor
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.coordinator import CoordinatorMetrics
    from services.coordinator.replica import JobContext

FORGED = (
    "the snapshot was not written by a coordinator of this job and is ignored; another program may"
    " write to Redis"
)
# Pause between attempts while object storage is unavailable.
RETRY_S = 2.0


class _Made(NamedTuple):
    """A snapshot that becomes a checkpoint, and when it was made."""

    saved: SnapshotFile
    at_s: float
    # True if it is also stored in the form that members copy.
    state: bool


class Lasting(NamedTuple):
    """The checkpoints that a candidate found in storage."""

    found: list[FoundSnapshot]
    # Reason for each listed checkpoint that cannot be read.
    torn: dict[ModelId, str]
    # Where the candidate searched, and what it found.
    said: str
    # True if storage returned no list.
    failed: bool = False


class SnapshotStore:
    """Writes and finds one job's snapshots.

    Args:
        board: Holds the hot snapshots.
        checkpoints: Holds the checkpoints. None without object storage.
        steps: Runs uploads, which are slow.
        wake: Called after an upload.
        fail: Ends the job's part in this process with a fault.
        stored: Called with the version that is in storage in the form that members copy.
        verified: Called with the name of a checkpoint that was written and read back.
        clock: Seconds since 1970.
    """

    def __init__(  # noqa: PLR0913 -- what a store of snapshots is made of
        self,
        record: JobRecord,
        replica: str,
        board: LeaderBoard,
        checkpoints: CheckpointStore | None,
        *,
        logger: EventLogger,
        steps: Supervisor,
        metrics: CoordinatorMetrics,
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
        stored: Callable[[ModelId], None],
        verified: Callable[[ModelId], None],
        clock: Callable[[], float] = time,
    ) -> None:
        self._record = record
        self._replica = replica
        self._board = board
        self._checkpoints = checkpoints
        self._log = logger
        self._steps = steps
        self._metrics = metrics
        self._wake = wake
        self._fail = fail
        self._stored = stored
        self._verified = verified
        self._clock = clock
        self._outage = Outage(logger, "storage")
        # Checkpoints that were skipped, and why.
        self._unreadable = dict[ModelId, str]()
        # Reason if the hint (the name of the newest checkpoint) cannot be read; otherwise empty.
        self._hint = ""
        # First snapshot of the current leader.
        self._begun: ModelId | None = None
        # When the newest checkpoint was made.
        self._newest_s: float | None = None
        self._next: _Made | None = None
        # True after a leader began, until storage was listed.
        self._look = False
        # Guards `_begun`, `_newest_s`, `_next`, `_look` and `_busy`.
        self._lock = threading.Lock()
        self._busy = False
        # None until the first snapshot.
        self._running: Supervised | None = None

    # --- snapshots of a candidate -----------------------------------------------------------------

    def hot(self) -> list[FoundSnapshot]:
        """Return every hot snapshot that can be read completely.

        Raises:
            FutureFormatError: If a newer program wrote one.
            UnavailableError: If Redis is unavailable, because a better snapshot might be there.
        """
        found = list[FoundSnapshot]()
        for data in self._board.snapshots():
            try:
                # The seal is checked first: only a coordinator may claim that a newer program is
                # needed.
                if self._record.seal and not is_sealed(data, self._record.seal):
                    self._log.warning("hot_snapshot_forged", reason=FORGED)
                    continue
                found.append(self._with_weights(in_hand(from_bytes(data))))
            except CorruptError as error:
                self._log.warning("hot_snapshot_unreadable", reason=str(error))
        return found

    def _with_weights(self, hot: FoundSnapshot) -> FoundSnapshot:
        """Add the state that members have stored to a hot snapshot without weights."""
        snapshot, checkpoints = hot.snapshot, self._checkpoints
        if hot.has_weights or not snapshot.in_storage:
            return hot
        if snapshot.made == GENESIS:
            return hot._replace(trainer=self._origin)
        if checkpoints is None:
            return hot
        return hot._replace(trainer=partial(checkpoints.state, snapshot.made))

    def lasting(self) -> Lasting:
        """Return every readable checkpoint, without its weights; skip the others.

        Raises:
            FutureFormatError: If a newer program wrote one.
        """
        if self._checkpoints is None:
            return Lasting([], {}, "no object storage is configured; set DOLL_BLOBS")
        try:
            content = from_store(self._checkpoints)
        except FutureFormatError:
            raise
        # The error may be temporary, so the candidate waits.
        except DollError as error:
            return Lasting([], {}, f"{self._checkpoints.where}: {error}", failed=True)
        found, known = content.readable, self._unreadable
        self._unreadable = {name: known[name] for name in known.keys() & found.keys()}
        self._hint = content.hint
        for name, reason in content.unreadable.items():
            self._pass_over(name, reason)
        newest = max(found, default=None)
        listed = (
            f"{len(found)} readable checkpoints" if len(found) != 1 else "1 readable checkpoint"
        )
        listed += f", the newest {format_model_id(newest)}" if newest else ""
        said = "; ".join(filter(None, [f"{self._checkpoints.where} has {listed}", content.hint]))
        read = [
            stored._replace(trainer=partial(self._read, name, stored.trainer))
            for name, stored in found.items()
        ]
        return Lasting(read, content.torn, said)

    @property
    def unreadable(self) -> str:
        """Reasons why checkpoints were skipped as unreadable; empty without any.

        A job that started from version 0 without a word would lose what those checkpoints hold.
        """
        reasons = [
            f"{format_model_id(name)}: {why}" for name, why in sorted(self._unreadable.items())
        ]
        reasons += [self._hint] if self._hint else []
        if not reasons:
            return ""
        return f"there are checkpoints, but none can be used to continue ({'; '.join(reasons)})"

    def first(self, positions: Positions) -> FoundSnapshot:
        """Return version 0, which the job starts from if nothing was learned yet.

        Raises:
            CorruptError: If the job starts with other weights than the task's, and these differ
                from what was written.
            UnavailableError: If object storage, which has these weights, is unavailable.
        """
        data, of = self._origin(), self._begins_with
        title = "version 0" + (f", the weights of {of}" if of else "")
        return FoundSnapshot(title, genesis(positions, self._record.known), lambda: data)

    @property
    def _begins_with(self) -> str:
        """Source of the weights of version 0; empty if the task makes them."""
        origin, init = self._record.origin, self._record.spec.init
        return str(origin) if origin else init.shown if init else ""

    def _origin(self) -> bytes:
        of, origin = self._begins_with, self._record.origin
        if not of:
            return b""
        if self._checkpoints is None:
            raise CorruptError(
                f"the job starts with the weights of {of}, which are in object storage; set"
                " DOLL_BLOBS as it was when the job was submitted"
            )
        try:
            store = self._checkpoints
            return store.origin(store.init() if origin is None else origin.sha256)
        except CorruptError as error:
            raise CorruptError(f"the job starts with the weights of {of}: {error}") from error
        # The error may be temporary, so the candidate tries again.
        except DollError as error:
            raise UnavailableError(str(error)) from error

    def _read(self, name: ModelId, trainer: Callable[[], bytes]) -> bytes:
        try:
            weights = trainer()
        except CorruptError as error:
            self._pass_over(name, str(error))
            raise
        # If it was unreadable before, somebody has repaired it.
        self._unreadable.pop(name, None)
        return weights

    def _pass_over(self, name: ModelId, reason: str) -> None:
        self._unreadable[name] = reason
        self._log.warning("checkpoint_unreadable", name=format_model_id(name), reason=reason)

    # --- snapshots of a leader --------------------------------------------------------------------

    def put(self, saved: SnapshotFile, *, checkpoint: bool, state: bool = False) -> None:
        """Publish a snapshot. A checkpoint is uploaded later; if several wait, only the newest is.

        Args:
            saved: The snapshot.
            checkpoint: True if it becomes a checkpoint.
            state: True if it is also stored in the form that members copy.

        Raises:
            UnavailableError: If Redis is unavailable.
        """
        if self._checkpoints is not None:
            with self._lock:
                if self._begun is None or self._begun.epoch != saved.snapshot.by:
                    self._begun, self._newest_s, self._look = saved.name, self._clock(), True
                if checkpoint:
                    self._next = _Made(saved, self._clock(), state)
            if self._running is None:
                name = f"{self._record.spec.name} (checkpoints)"
                self._running = self._steps.begin(name, lambda _wake, _fault: self)
            self._running.wake()
        data = to_bytes(saved, self._record.seal)
        if not self._board.put_snapshot(saved.snapshot.by, data, self._replica):
            self._log.info("hot_snapshot_withheld", reason="another coordinator has the lease")

    def age_s(self) -> float | None:
        """Return the age of the newest checkpoint in seconds; None before a leadership.

        Until storage has named that checkpoint, the age counts from the beginning of the
        leadership.
        """
        newest_s = self._newest_s
        return None if newest_s is None else max(0.0, self._clock() - newest_s)

    @property
    def all_uploaded(self) -> bool:
        """True if the last checkpoint is uploaded."""
        with self._lock:
            return self._next is None and not self._busy

    def end(self) -> None:
        """Stop uploading. Checkpoints whose upload has not started are lost."""
        if self._running is not None:
            self._running.end()

    # --- turns ------------------------------------------------------------------------------------

    def turn(self) -> float | None:
        """Upload the newest waiting checkpoint."""
        with self._lock:
            made, look = self._next, self._look
            self._next, self._look, self._busy = None, False, made is not None
        if made is None and not look:
            return inf
        try:
            self._write(made)
            self._outage.over()
        except DollError as error:
            # Storage is unavailable or denies access; both may be temporary.
            self._metrics.checkpoint_failures.inc()
            self._outage.met(error)
            # Retry with the same checkpoint, unless a newer one arrives.
            with self._lock:
                self._next, self._look = self._next or made, True
            return monotonic() + RETRY_S
        except BaseException as fault:  # noqa: BLE001 -- raised again by the job's own actor
            self._fail(fault)
            return None
        finally:
            with self._lock:
                self._busy = False
            self._wake()
        # Another checkpoint may be waiting.
        return monotonic()

    def close(self) -> None:
        """Do nothing: the store owns no resources."""

    def _write(self, made: _Made | None) -> None:
        """Write a checkpoint, if there is one, read it back, and delete those beyond `keep`."""
        if self._checkpoints is None:
            return
        if made is not None:
            saved, name = made.saved, made.saved.name
            of, members = saved.snapshot.made, saved.snapshot.slices is not UNSET
            # Members have stored their state.
            if members:
                saved = saved._replace(trainer=self._checkpoints.state(of))
                self._offer(saved)
            elif made.state:
                self._checkpoints.put_state(of, saved.trainer)
                if self._checkpoints.state(of) != saved.trainer:
                    raise CorruptError(
                        f"the optimizer state of {format_model_id(of)}, read back, is not what was"
                        " written"
                    )
                saved = saved._replace(snapshot=replace(saved.snapshot, stored=(of,)))
            self._checkpoints.save(
                name,
                to_parts(saved),
                made.at_s,
                samples=saved.snapshot.samples,
                loss=saved.snapshot.loss,
            )
            try:
                self._checkpoints.verify(name)
            except CorruptError as error:
                where = (
                    f"the checkpoint {format_model_id(name)} was written but cannot be read back"
                )
                raise CorruptError(f"{where}: {error}") from error
            self._log.info("checkpoint_written", epoch=name.epoch, version=name.version)
            self._verified(name)
            self._checkpoints.keep_states(saved.snapshot.stored or (), self._begun, self._clock())
            if made.state:
                self._stored(of)
        kept = self._checkpoints.keep(
            self._record.spec.checkpoint.keep,
            None if made is None else made.saved.name,
            self._begun,
            self._clock(),
        )
        if kept:
            self._newest_s = kept[0].manifest.created_s

    def _offer(self, saved: SnapshotFile) -> None:
        """Offer weights that members have stored to evaluators; the leader has no copy of them."""
        if self._record.spec.evaluation is not None:
            self._board.offer_model(saved.snapshot.made, model_in(saved.trainer))


class _Unpublished(NamedTuple):
    """A snapshot that waits for dead letters."""

    saved: SnapshotFile
    checkpoint: bool = False
    # True if it is also stored in the form that members copy.
    state: bool = False


class SnapshotPublisher:
    """Copies a leader's weights, and publishes snapshots once their dead letters are delivered."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        replica, metrics = job.replica, job.observer.metrics
        self.store = SnapshotStore(
            job.record,
            replica.name,
            job.board,
            None if replica.blobs is None else CheckpointStore(replica.blobs, job.id),
            logger=job.log,
            steps=replica.steps,
            metrics=metrics,
            wake=job.inbox.wake,
            fail=job.fail,
            stored=self._stored,
            verified=self._verified,
        )
        self.dead_letters = DeadLetters(
            job.id,
            log=replica.log,
            spans=replica.spans,
            steps=replica.steps,
            metrics=metrics,
            logger=job.log,
            wake=job.inbox.wake,
            fail=job.fail,
        )
        # A checkpoint that the updates topic may not name yet.
        self.unnamed: ModelId | None = None
        self._copy = b""
        # When the weights were copied, in seconds since 1970.
        self._copied_at_s = 0.0
        # Version of the newest snapshot, and its time in seconds since 1970. Later snapshots of the
        # same version keep this time.
        self._version = GENESIS, 0.0
        self._unpublished: _Unpublished | None = None

    @property
    def all_stored(self) -> bool:
        """True if every snapshot is published and the last checkpoint is uploaded."""
        return self._unpublished is None and self.store.all_uploaded

    def begin(self, snapshot: Snapshot) -> None:
        """Start a leadership with a snapshot."""
        self._copy, self._version = b"", (snapshot.made, snapshot.made_at_s or time())

    def copy(self, _: do.CopyWeights) -> None:
        """Copy the weights in hand."""
        self._copy, self._copied_at_s = self._job.trainer.snapshot(), time()

    def take(self, command: do.PublishSnapshot) -> None:
        """Publish a snapshot with the copied weights, now or once dead letters are delivered."""
        snapshot = command.snapshot
        if snapshot.made != self._version[0]:
            self._version = snapshot.made, time() if self._job.members else self._copied_at_s
        snapshot = replace(snapshot, made_at_s=self._version[1])
        earlier = self._unpublished or _Unpublished(SnapshotFile(snapshot, b""))
        self._unpublished = _Unpublished(
            SnapshotFile(snapshot, self._copy),
            command.checkpoint or earlier.checkpoint,
            command.state or earlier.state,
        )
        self.publish()

    def publish(self) -> None:
        """Publish the waiting snapshot once its dead letters are delivered."""
        if self._unpublished is None or not self.dead_letters.all_delivered:
            return
        waited, self._unpublished = self._unpublished, None
        try:
            self.store.put(waited.saved, checkpoint=waited.checkpoint, state=waited.state)
        except UnavailableError as error:
            self._job.outage.met(error)

    def end_leadership(self) -> None:
        """Drop the waiting snapshot."""
        self._unpublished = None

    def close(self) -> None:
        """Stop writing dead letters and checkpoints."""
        self.dead_letters.end()
        self.store.end()

    def _stored(self, made: ModelId) -> None:
        self._job.inbox.put(self._job.inbox.leadership, events.StateStored(made))

    def _verified(self, name: ModelId) -> None:
        self.unnamed = name
        self._job.inbox.put(0, events.CheckpointVerified(name))
