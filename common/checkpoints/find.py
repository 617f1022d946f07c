"""What is kept of a job's model, and which of it a person wants: newest, best, a version."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from common.checkpoints.manifest import told
from common.checkpoints.snapshot_file import FoundSnapshot, from_bytes, from_store, in_hand
from common.checkpoints.store import CheckpointStore
from common.core.snapshots import choose
from common.errors import CorruptError, NotFoundError, UnavailableError, UserError
from common.learning.checkpoint import weights_in
from common.topics import names as topics
from common.topics.read import read_decoded
from common.wire.messages import decode_audit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from common.config.servers import Outside
    from common.core.messages import AuditRecord, ModelId, Vector
    from common.learning.checkpoint import Layout
    from common.ports.servers import Blobs, Board, Log

Wish: TypeAlias = int | Literal["newest", "best"]  # a version, or one of these
Tell: TypeAlias = "Callable[[str], object]"  # where a person hears what was left out
Updates: TypeAlias = "Sequence[tuple[int, AuditRecord | None]]"


class Model(NamedTuple):
    """A model that is kept."""

    made: ModelId  # the last update in it, and the leader that made it
    title: str  # for people: "the checkpoint 12-400"
    weights: Vector  # (P + B,) float32
    layout: Layout  # empty where an older program kept it


def wish_of(text: str) -> Wish:
    """Read which version a person wants.

    Raises:
        UserError: If it is none.
    """
    if text in ("newest", "best"):
        return "newest" if text == "newest" else "best"
    if not (text.isascii() and text.isdigit()):
        raise UserError(f'a version is a number, "newest" or "best", got "{text}"')
    return int(text)


def find_model(job: str, wish: Wish, outside: Outside, log: Log, tell: Tell) -> Model:
    """Find the model that is wanted, of what counts by the audit; needs no torch.

    Args:
        job: Its name; that there is such a job is for the caller to see.
        wish: Which version.
        outside: Its board and its storage; a board that is away is told and left out.
        log: Kafka.
        tell: Hears what was left out.

    Raises:
        NotFoundError: If there is none; names the versions that there are.
        CorruptError: If it holds no weights.
        FutureFormatError: If a newer program wrote a snapshot or a checkpoint.
        UnavailableError: If Kafka or storage is unavailable, or the board and it is not in storage.
    """
    kept, away = list[FoundSnapshot](), ""
    try:
        with closing(outside.open_board(job)) as board:
            kept += on_board(board, tell)
    except UnavailableError as error:
        away = str(error)
        tell(f"without the hot snapshots: {error}")
    if outside.settings.blobs:
        kept += in_storage(outside.open_blobs(), job, tell)
    else:
        tell("without checkpoints: DOLL_BLOBS names no object storage")
    # Read after what is kept: a snapshot is published only after its updates.
    updates = read_decoded(log, topics.updates_topic(job), decode_audit)
    try:
        found, trainer = pick(kept, updates, wish, tell)
    except NotFoundError as error:
        if away:
            raise UnavailableError(f"{error}; hot snapshots are not known: {away}") from error
        raise
    weights, layout = weights_in(trainer)
    return Model(found.snapshot.made, found.title, weights, layout)


def on_board(board: Board, tell: Tell) -> list[FoundSnapshot]:
    """Every hot snapshot that can be read; what cannot is told.

    Raises:
        FutureFormatError: If a newer program wrote one.
        UnavailableError: If the board is unavailable.
    """
    found = list[FoundSnapshot]()
    for data in board.snapshots():
        try:
            found.append(in_hand(from_bytes(data)))
        except CorruptError as error:
            tell(f"without a hot snapshot: {error}")
    return found


def in_storage(blobs: Blobs, job: str, tell: Tell) -> list[FoundSnapshot]:
    """Every checkpoint that can be read, newest first; what cannot is told.

    Raises:
        FutureFormatError: If a newer program wrote one.
        UnavailableError: If storage is unavailable.
    """
    found, unreadable = from_store(CheckpointStore(blobs, job))
    for name, reason in unreadable.items():
        tell(f"without the checkpoint {told(name)}: {reason}")
    return list(found.values())


def pick(
    kept: Iterable[FoundSnapshot], updates: Updates, wish: Wish, tell: Tell
) -> tuple[FoundSnapshot, bytes]:
    """The one that is wanted, of those whose updates count by the audit, and its trainer's part.

    One whose weights cannot be read is told and passed over, as a coordinator would.

    Raises:
        NotFoundError: If there is none; names the versions that there are.
    """
    counting = [stored for stored in kept if choose([stored.snapshot], updates) is not None]
    wanted = sorted(counting, key=lambda stored: stored.snapshot.rank, reverse=True)
    if wish == "best":
        wanted = [stored for stored in wanted if stored.snapshot.loss is not None]
        wanted.sort(key=lambda stored: stored.snapshot.loss or 0.0)  # of equals, the newest
    elif wish != "newest":
        wanted = [stored for stored in wanted if stored.snapshot.made.version == wish]
    for stored in wanted:
        try:
            return stored, stored.trainer()
        except CorruptError as error:
            tell(f"without {stored.title}: {error}")
            counting.remove(stored)
    versions = sorted({stored.snapshot.made.version for stored in counting})
    listed = ", ".join(map(str, versions)) or "none yet"
    what = f"no version {wish}" if isinstance(wish, int) else "no model"
    raise NotFoundError(f"{what} is kept that counts by the audit; kept: {listed}")
