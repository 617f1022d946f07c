"""What is kept of a job's model, and which of it a person wants: newest, best, a version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from common.core.messages import AuditRecord, Evaluated, Vector
from common.core.snapshots import Snapshot, choose
from common.errors import CorruptError, NotFoundError, UnavailableError, UserError
from common.kafka import names as topics
from common.kafka.read import read_decoded
from common.learning.checkpoint import Layout, weights_in
from common.storage.snapshot_file import (
    HEAD_BYTES,
    FoundSnapshot,
    from_bytes,
    from_head,
    from_store,
    in_hand,
)
from common.storage.store import CheckpointStore, format_model_id
from common.wire.messages import decode_audit

if TYPE_CHECKING:
    from common.jobs.servers import Outside
    from common.kafka.port import Log
    from common.redis.port import Board
    from common.storage.port import Blobs

VersionSelector: TypeAlias = int | Literal["newest", "best"]  # a version, or one of these
ReportSkipped: TypeAlias = "Callable[[str], object]"  # where a person hears what was left out
Updates: TypeAlias = "Sequence[tuple[int, AuditRecord | None]]"


class KeptModel(NamedTuple):
    """A model that is kept, all but its weights."""

    title: str  # for people: "the checkpoint 12-400"
    snapshot: Snapshot
    test: dict[str, float]  # loss and metrics on the test set, if it was judged


class FoundModel(NamedTuple):
    """A model that is kept."""

    kept: KeptModel
    weights: Vector  # (P + B,) float32
    layout: Layout


def parse_version(text: str) -> VersionSelector:
    """Read which version a person wants.

    Raises:
        UserError: If it is none.
    """
    if text in ("newest", "best"):
        return "newest" if text == "newest" else "best"
    if not (text.isascii() and text.isdigit()):
        raise UserError(f'a version is a number, "newest" or "best", got "{text}"')
    return int(text)


def find_model(
    job: str, selector: VersionSelector, outside: Outside, log: Log, report_skipped: ReportSkipped
) -> FoundModel:
    """Find the model that is wanted, of what counts by the audit; needs no torch.

    Args:
        job: Its id; that there is such a job is for the caller to see.
        selector: Which version.
        outside: Its board and its storage; a board that is away is told and left out.
        log: Kafka.
        report_skipped: Hears what was left out.

    Raises:
        NotFoundError: If there is none; names the versions that there are.
        CorruptError: If it holds no weights.
        FutureFormatError: If a newer program wrote a snapshot or a checkpoint.
        UnavailableError: If Kafka or storage is unavailable, or the board and it is not in storage.
    """
    with _looking(job, outside, log, report_skipped, on_board) as (kept, updates):
        found, trainer = pick(kept, updates, selector, report_skipped)
    return FoundModel(_kept(found, updates), *weights_in(trainer))


def find_kept(
    job: str, selector: VersionSelector, outside: Outside, log: Log, report_skipped: ReportSkipped
) -> KeptModel:
    """The same without its weights, of which not one is read: whether they are whole is not known.

    Raises:
        NotFoundError: If there is none; names the versions that there are.
        FutureFormatError: If a newer program wrote a snapshot or a checkpoint.
        UnavailableError: If Kafka or storage is unavailable, or the board and it is not in storage.
    """
    with _looking(job, outside, log, report_skipped, heads_on_board) as (kept, updates):
        counting = [stored for stored in kept if choose([stored.snapshot], updates) is not None]
        wanted = _ranked(counting, selector)
        if not wanted:
            raise _not_kept(counting, selector)
    return _kept(wanted[0], updates)


def all_kept(
    job: str, outside: Outside, log: Log, report_skipped: ReportSkipped
) -> list[KeptModel]:
    """Every model that is kept, of what counts by the audit, newest first; no weights are read.

    Raises:
        FutureFormatError: If a newer program wrote a snapshot or a checkpoint.
        UnavailableError: If Kafka or storage is unavailable.
    """
    with _looking(job, outside, log, report_skipped, heads_on_board) as (kept, updates):
        counting = [stored for stored in kept if choose([stored.snapshot], updates) is not None]
    return [_kept(stored, updates) for stored in _ranked(counting, "newest")]


@contextmanager
def _looking(
    job: str,
    outside: Outside,
    log: Log,
    report_skipped: ReportSkipped,
    look: Callable[[Board, ReportSkipped], list[FoundSnapshot]],
) -> Iterator[tuple[list[FoundSnapshot], Updates]]:
    """All that is kept, and the updates topic; what only the board may have is not denied."""
    kept, away = list[FoundSnapshot](), ""
    try:
        with closing(outside.open_board(job)) as board:
            kept += (each for each in look(board, report_skipped) if each.has_weights)
    except UnavailableError as error:
        away = str(error)
        report_skipped(f"without the hot snapshots: {error}")
    if outside.settings.blobs:
        kept += in_storage(outside.open_blobs(), job, report_skipped)
    else:
        report_skipped("without checkpoints: DOLL_BLOBS names no object storage")
    try:
        # Read after what is kept: a snapshot is published only after its updates.
        yield kept, read_decoded(log, topics.updates_topic(job), decode_audit)
    except NotFoundError as error:
        if away:
            raise UnavailableError(f"{error}; hot snapshots are not known: {away}") from error
        raise


def _kept(found: FoundSnapshot, updates: Updates) -> KeptModel:
    made = found.snapshot.made
    evaluations = (each for _, each in reversed(updates) if isinstance(each, Evaluated))
    test = next((each.test for each in evaluations if each.test and each.model == made), {})
    return KeptModel(found.title, found.snapshot, test)


def on_board(board: Board, report_skipped: ReportSkipped) -> list[FoundSnapshot]:
    """Every hot snapshot that can be read, a leader's own where it has none with the weights.

    What cannot be read is told.

    Raises:
        FutureFormatError: If a newer program wrote one.
        UnavailableError: If the board is unavailable.
    """
    found = list[FoundSnapshot]()
    for data in board.snapshots(whole=True):
        try:
            found.append(in_hand(from_bytes(data)))
        except CorruptError as error:
            report_skipped(f"without a hot snapshot: {error}")
    return found


def heads_on_board(
    board: Board, report_skipped: ReportSkipped, head_bytes: int = HEAD_BYTES
) -> list[FoundSnapshot]:
    """The same, of which not all weights are read.

    Raises:
        FutureFormatError: If a newer program wrote one.
        UnavailableError: If the board is unavailable.
    """
    found = list[FoundSnapshot]()
    for data in board.snapshots(most=head_bytes, whole=True):
        try:
            saved = from_head(data, head_bytes)
        except CorruptError as error:
            report_skipped(f"without a hot snapshot: {error}")
            continue
        if saved is None:  # longer, or torn
            return on_board(board, report_skipped)
        found.append(in_hand(saved))
    return found


def in_storage(blobs: Blobs, job: str, report_skipped: ReportSkipped) -> list[FoundSnapshot]:
    """Every checkpoint that can be read, newest first; what cannot is told.

    Raises:
        FutureFormatError: If a newer program wrote one.
        UnavailableError: If storage is unavailable.
    """
    found = from_store(CheckpointStore(blobs, job))
    for name, reason in found.unreadable.items():
        report_skipped(f"without the checkpoint {format_model_id(name)}: {reason}")
    return list(found.readable.values())


def pick(
    kept: Iterable[FoundSnapshot],
    updates: Updates,
    selector: VersionSelector,
    report_skipped: ReportSkipped,
) -> tuple[FoundSnapshot, bytes]:
    """The one that is wanted, of those whose updates count by the audit, and its trainer's part.

    One whose weights cannot be read is told and passed over, as a coordinator would.

    Raises:
        NotFoundError: If there is none; names the versions that there are.
    """
    counting = [stored for stored in kept if choose([stored.snapshot], updates) is not None]
    for stored in _ranked(counting, selector):
        try:
            return stored, stored.trainer()
        except CorruptError as error:
            report_skipped(f"without {stored.title}: {error}")
            counting.remove(stored)
    raise _not_kept(counting, selector)


def _ranked(counting: Iterable[FoundSnapshot], selector: VersionSelector) -> list[FoundSnapshot]:
    """Those that will do, the best of them first."""
    wanted = sorted(counting, key=lambda stored: stored.snapshot.rank, reverse=True)
    if selector == "newest":
        return wanted
    if selector != "best":
        return [stored for stored in wanted if stored.snapshot.made.version == selector]
    wanted = [stored for stored in wanted if stored.snapshot.loss is not None]
    return sorted(wanted, key=lambda stored: stored.snapshot.loss or 0.0)  # of equals, the newest


def _not_kept(counting: Iterable[FoundSnapshot], selector: VersionSelector) -> NotFoundError:
    versions = sorted({stored.snapshot.made.version for stored in counting})
    listed = ", ".join(map(str, versions)) or "none yet"
    what = f"no version {selector}" if isinstance(selector, int) else "no model"
    return NotFoundError(f"{what} is kept that counts by the audit; kept: {listed}")
