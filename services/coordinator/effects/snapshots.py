"""A leader's snapshots: hot ones on the board, checkpoints in object storage by a thread apart."""

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
    "no coordinator of this job wrote it: somebody else may write to Redis; it counts for nothing"
)
RETRY_S = 2.0  # between attempts while object storage is unavailable


class _Made(NamedTuple):
    """A snapshot that is to become a checkpoint, and when it was made."""

    saved: SnapshotFile
    at_s: float
    state: bool  # it is stored as members copy it, too


class Lasting(NamedTuple):
    """The checkpoints that a candidate found in storage."""

    found: list[FoundSnapshot]
    torn: dict[ModelId, str]  # listed, and why they cannot be read
    said: str  # where it looked, and what was there
    failed: bool = False  # True if storage gave no list


class SnapshotStore:
    """Where one job's snapshots go, and come from.

    Args:
        board: For the hot ones.
        checkpoints: For the lasting ones, None where the settings name no object storage.
        steps: Runs uploads, which take their time.
        wake: Told when an upload is done.
        fail: Ends the job's part in this process with a fault.
        stored: Told which version is in storage as members copy it.
        verified: Told the name of a checkpoint that was written and read back.
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
        self._unreadable = dict[ModelId, str]()  # checkpoints that were passed over, and why
        self._hint = ""  # what is wrong with the hint in storage
        self._begun: ModelId | None = None  # the first snapshot of the leader that writes here
        self._newest_s: float | None = None  # when the newest checkpoint was made
        self._next: _Made | None = None
        self._look = False  # a leader has begun: see what is there
        self._lock = threading.Lock()  # guards the four above
        self._busy = False
        self._running: Supervised | None = None  # from the first snapshot on

    # --- what a candidate finds --------------------------------------------------------------

    def hot(self) -> list[FoundSnapshot]:
        """Every hot snapshot that can be read whole.

        Raises:
            FutureFormatError: If a newer program wrote one.
            UnavailableError: If the board is unavailable: a better one might be there.
        """
        found = list[FoundSnapshot]()
        for data in self._board.snapshots():
            try:
                # First: nobody but a coordinator may say that a newer program is needed.
                if self._record.seal and not is_sealed(data, self._record.seal):
                    self._log.warning("hot_snapshot_forged", reason=FORGED)
                    continue
                found.append(self._with_weights(in_hand(from_bytes(data))))
            except CorruptError as error:
                self._log.warning("hot_snapshot_unreadable", reason=str(error))
        return found

    def _with_weights(self, hot: FoundSnapshot) -> FoundSnapshot:
        """Where members hold the weights, their own storage may have them."""
        snapshot, checkpoints = hot.snapshot, self._checkpoints
        if hot.has_weights or not snapshot.in_storage:
            return hot
        if snapshot.made == GENESIS:
            return hot._replace(trainer=self._origin)
        if checkpoints is None:
            return hot
        return hot._replace(trainer=partial(checkpoints.state, snapshot.made))

    def lasting(self) -> Lasting:
        """Every checkpoint, all but its weights; those that cannot be read are passed over.

        Raises:
            FutureFormatError: If a newer program wrote one.
        """
        if self._checkpoints is None:
            return Lasting([], {}, "no object storage is configured; set DOLL_BLOBS")
        try:
            content = from_store(self._checkpoints)
        except FutureFormatError:
            raise
        except DollError as error:  # it may be mended: whoever searches waits
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
        """Which checkpoints were passed over because they cannot be read; empty where none was.

        To begin again in silence would take back all that they hold.
        """
        reasons = [
            f"{format_model_id(name)}: {why}" for name, why in sorted(self._unreadable.items())
        ]
        reasons += [self._hint] if self._hint else []
        if not reasons:
            return ""
        return f"there are checkpoints, but none to go on from ({'; '.join(reasons)})"

    def first(self, positions: Positions) -> FoundSnapshot:
        """What the job begins with, where nothing was learned yet.

        Raises:
            CorruptError: If it is to begin with another job's weights, and these are not what was
                written.
            UnavailableError: If object storage is unavailable, which has these weights.
        """
        data, origin = self._origin(), self._record.origin
        title = "version 0" + (f", the weights of {origin}" if origin else "")
        return FoundSnapshot(title, genesis(positions, self._record.known), lambda: data)

    def _origin(self) -> bytes:
        origin = self._record.origin
        if origin is None:
            return b""
        if self._checkpoints is None:
            raise CorruptError(
                f"the job begins with the weights of {origin}, which are in object storage: set"
                " DOLL_BLOBS as it was when the job was submitted"
            )
        try:
            return self._checkpoints.origin(origin.sha256)
        except CorruptError as error:
            raise CorruptError(f"the job begins with the weights of {origin}: {error}") from error
        except DollError as error:  # it may be mended: whoever searches tries again
            raise UnavailableError(str(error)) from error

    def _read(self, name: ModelId, trainer: Callable[[], bytes]) -> bytes:
        try:
            weights = trainer()
        except CorruptError as error:
            self._pass_over(name, str(error))
            raise
        self._unreadable.pop(name, None)  # somebody brought it back
        return weights

    def _pass_over(self, name: ModelId, reason: str) -> None:
        self._unreadable[name] = reason
        self._log.warning("checkpoint_unreadable", name=format_model_id(name), reason=reason)

    # --- what a leader leaves ----------------------------------------------------------------

    def put(self, saved: SnapshotFile, *, checkpoint: bool, state: bool = False) -> None:
        """Publish a snapshot; a checkpoint is uploaded later, the newest where several wait.

        Args:
            saved: The snapshot.
            checkpoint: Whether it is one.
            state: Whether that is stored as members copy it, too.

        Raises:
            UnavailableError: If the board is unavailable.
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
            self._log.info("hot_snapshot_withheld", reason="another replica has the lease")

    def age_s(self) -> float | None:
        """Seconds since the newest checkpoint was made; None where there is nothing to tell.

        Until storage has said when that was, they count from the moment when the leader began.
        """
        newest_s = self._newest_s
        return None if newest_s is None else max(0.0, self._clock() - newest_s)

    @property
    def all_uploaded(self) -> bool:
        """Whether the last checkpoint has arrived."""
        with self._lock:
            return self._next is None and not self._busy

    def end(self) -> None:
        """Upload no more; what has not begun is lost."""
        if self._running is not None:
            self._running.end()

    # --- its turns ---------------------------------------------------------------------------

    def turn(self) -> float | None:
        """Upload the newest checkpoint that waits."""
        with self._lock:
            made, look = self._next, self._look
            self._next, self._look, self._busy = None, False, made is not None
        if made is None and not look:
            return inf
        try:
            self._write(made)
            self._outage.over()
        except DollError as error:
            # Storage is unavailable, or does not let us in: that may be mended.
            self._metrics.checkpoint_failures.inc()
            self._outage.met(error)
            with self._lock:  # the same one later, unless a newer one has come by then
                self._next, self._look = self._next or made, True
            return monotonic() + RETRY_S
        except BaseException as fault:  # noqa: BLE001 -- raised again by the job's own actor
            self._fail(fault)
            return None
        finally:
            with self._lock:
                self._busy = False
            self._wake()
        return monotonic()  # another may have come meanwhile

    def close(self) -> None:
        """There is nothing to let go of; for the supervisor."""

    def _write(self, made: _Made | None) -> None:
        """Write a checkpoint and read it back, if there is one; then delete those beyond `keep`."""
        if self._checkpoints is None:
            return
        if made is not None:
            saved, name = made.saved, made.saved.name
            of, members = saved.snapshot.made, saved.snapshot.slices is not UNSET
            if members:  # they have stored what they hold
                saved = saved._replace(trainer=self._checkpoints.state(of))
                self._offer(saved)
            elif made.state:
                self._checkpoints.put_state(of, saved.trainer)
                if self._checkpoints.state(of) != saved.trainer:
                    raise CorruptError(
                        f"the state of {format_model_id(of)} is not what was written"
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
                where = f"{format_model_id(name)} was written and cannot be read back"
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
        """Leave its weights for evaluators: no other version of members comes by here."""
        if self._record.spec.evaluation is not None:
            self._board.offer_model(saved.snapshot.made, model_in(saved.trainer))


class _Unpublished(NamedTuple):
    """A snapshot that waits for dead letters."""

    saved: SnapshotFile
    checkpoint: bool = False
    state: bool = False  # as members copy it, too


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
        # Times are seconds since 1970: of the copy of the weights, and of the version of the newest
        # snapshot, which keeps its time in later snapshots of it.
        self._copied_at_s = 0.0
        self._version = GENESIS, 0.0
        self._unpublished: _Unpublished | None = None

    @property
    def all_stored(self) -> bool:
        """True if every snapshot is published, and the last checkpoint uploaded."""
        return self._unpublished is None and self.store.all_uploaded

    def begin(self, snapshot: Snapshot) -> None:
        """A leadership begins with a snapshot."""
        self._copy, self._version = b"", (snapshot.made, snapshot.made_at_s or time())

    def copy(self, _: do.CopyWeights) -> None:
        """Copy the weights in hand."""
        self._copy, self._copied_at_s = self._job.trainer.snapshot(), time()

    def take(self, command: do.PublishSnapshot) -> None:
        """Publish a snapshot of the weights that were copied, now or later."""
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
        """Publish the snapshot that waits, once the dead letters that it leaves are delivered."""
        if self._unpublished is None or not self.dead_letters.all_delivered:
            return
        waited, self._unpublished = self._unpublished, None
        try:
            self.store.put(waited.saved, checkpoint=waited.checkpoint, state=waited.state)
        except UnavailableError as error:
            self._job.outage.met(error)

    def end_leadership(self) -> None:
        """Publish nothing of it any more."""
        self._unpublished = None

    def close(self) -> None:
        """Write no more letters, and upload no more."""
        self.dead_letters.end()
        self.store.end()

    def _stored(self, made: ModelId) -> None:
        self._job.inbox.put(self._job.inbox.leadership, events.StateStored(made))

    def _verified(self, name: ModelId) -> None:
        self.unnamed = name
        self._job.inbox.put(0, events.CheckpointVerified(name))
