"""Kept versions of a job's model, and the selection of one: newest, best, or by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from common.core.messages import AuditRecord, Evaluated, Vector
from common.core.snapshots import Snapshot, choose
from common.errors import CorruptError, NotFoundError, UnavailableError, UserError
from common.kafka import names as topics
from common.kafka.read import read_decoded
from common.learning.checkpoint import Kind, merged, save_weights, weights_in
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

# A version's number, or one of these words.
VersionSelector: TypeAlias = int | Literal["newest", "best"]
# Called with a sentence, for a person, about something that was left out.
ReportSkipped: TypeAlias = "Callable[[str], object]"
Updates: TypeAlias = "Sequence[tuple[int, AuditRecord | None]]"


class KeptModel(NamedTuple):
    """A kept model without its weights."""

    # Name to show to people, such as "the checkpoint 12-400".
    title: str
    snapshot: Snapshot
    # Loss and metrics on the test set, if the version was evaluated.
    test: dict[str, float]


class FoundModel(NamedTuple):
    """A kept model with its weights."""

    kept: KeptModel
    weights: Vector  # (P + B,) float32
    kind: Kind


def parse_version(text: str) -> VersionSelector:
    """Parse a version selector.

    Raises:
        UserError: If it is invalid.
    """
    if text in ("newest", "best"):
        return "newest" if text == "newest" else "best"
    if not (text.isascii() and text.isdigit()):
        raise UserError(f'version: must be a number, "newest" or "best", got "{text}"')
    return int(text)


def find_model(
    job: str, selector: VersionSelector, outside: Outside, log: Log, report_skipped: ReportSkipped
) -> FoundModel:
    """Find the selected model among kept ones whose update is still effective; needs no torch.

    Args:
        job: Id of the job. The caller checks that the job exists.
        selector: Version to find.
        outside: The job's board and storage. An unavailable board is reported and skipped.
        log: Kafka.
        report_skipped: Called with what was left out.

    Raises:
        NotFoundError: If there is no such model. The message lists the versions that exist.
        CorruptError: If the model holds no weights.
        FutureFormatError: If a newer program wrote a snapshot or a checkpoint.
        UnavailableError: If Kafka or storage is unavailable, or the board is and the model is not
            in storage.
    """
    with _looking(job, outside, log, report_skipped, on_board) as (kept, updates):
        found, trainer = pick(kept, updates, selector, report_skipped)
    return FoundModel(_kept(found, updates), *weights_in(trainer))


def whole_model(job: str, found: FoundModel, outside: Outside, about: Mapping[str, str]) -> bytes:
    """Write a model as safetensors, with its frozen tensors.

    Args:
        job: Id of the job.
        found: The model.
        outside: Object storage has the frozen tensors, if there are any.
        about: Metadata for the file.

    Raises:
        CorruptError: If the frozen tensors are not there.
        UserError: If the settings name no object storage, which has the frozen tensors.
        UnavailableError: If object storage is unavailable.
    """
    trained = save_weights(found.kind.layout, found.weights, about)
    if not found.kind.base:
        return trained
    return merged(trained, CheckpointStore(outside.open_blobs(), job).base(found.kind.base))


def find_kept(
    job: str, selector: VersionSelector, outside: Outside, log: Log, report_skipped: ReportSkipped
) -> KeptModel:
    """Find the selected model without reading its weights, so they may turn out to be incomplete.

    Raises:
        NotFoundError: If there is no such model. The message lists the versions that exist.
        FutureFormatError: If a newer program wrote a snapshot or a checkpoint.
        UnavailableError: If Kafka or storage is unavailable, or the board is and the model is not
            in storage.
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
    """Return kept models whose update is still effective, newest first, without their weights.

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
    """Yield all kept models and the updates topic.

    If a model is not found while the board is unavailable, it may exist there, so the error is
    UnavailableError.
    """
    kept, away = list[FoundSnapshot](), ""
    try:
        with closing(outside.open_board(job)) as board:
            kept += (each for each in look(board, report_skipped) if each.has_weights)
    except UnavailableError as error:
        away = str(error)
        report_skipped(f"hot snapshots are skipped: {error}")
    if outside.settings.blobs:
        kept += in_storage(outside.open_blobs(), job, report_skipped)
    else:
        report_skipped("checkpoints are skipped: DOLL_BLOBS names no object storage")
    try:
        # Updates are read after the kept models, because a snapshot is published only after its
        # updates.
        yield kept, read_decoded(log, topics.updates_topic(job), decode_audit)
    except NotFoundError as error:
        if away:
            raise UnavailableError(
                f"{error}; hot snapshots in Redis could not be read: {away}"
            ) from error
        raise


def _kept(found: FoundSnapshot, updates: Updates) -> KeptModel:
    made = found.snapshot.made
    evaluations = (each for _, each in reversed(updates) if isinstance(each, Evaluated))
    test = next((each.test for each in evaluations if each.test and each.model == made), {})
    return KeptModel(found.title, found.snapshot, test)


def on_board(board: Board, report_skipped: ReportSkipped) -> list[FoundSnapshot]:
    """Return every readable hot snapshot; unreadable ones are reported.

    A group leader's own snapshot has no weights, so it is replaced by the newest one with weights,
    if there is one.

    Raises:
        FutureFormatError: If a newer program wrote one.
        UnavailableError: If the board is unavailable.
    """
    found = list[FoundSnapshot]()
    for data in board.snapshots(whole=True):
        try:
            found.append(in_hand(from_bytes(data)))
        except CorruptError as error:
            report_skipped(f"a hot snapshot is skipped: {error}")
    return found


def heads_on_board(
    board: Board, report_skipped: ReportSkipped, head_bytes: int = HEAD_BYTES
) -> list[FoundSnapshot]:
    """Return what `on_board` returns, without reading all weights.

    Raises:
        FutureFormatError: If a newer program wrote one.
        UnavailableError: If the board is unavailable.
    """
    found = list[FoundSnapshot]()
    for data in board.snapshots(most=head_bytes, whole=True):
        try:
            saved = from_head(data, head_bytes)
        except CorruptError as error:
            report_skipped(f"a hot snapshot is skipped: {error}")
            continue
        # The head is longer than `head_bytes`, or the snapshot is torn.
        if saved is None:
            return on_board(board, report_skipped)
        found.append(in_hand(saved))
    return found


def in_storage(blobs: Blobs, job: str, report_skipped: ReportSkipped) -> list[FoundSnapshot]:
    """Return every readable checkpoint, newest first; unreadable ones are reported.

    Raises:
        FutureFormatError: If a newer program wrote one.
        UnavailableError: If storage is unavailable.
    """
    found = from_store(CheckpointStore(blobs, job))
    for name, reason in found.unreadable.items():
        report_skipped(f"the checkpoint {format_model_id(name)} is skipped: {reason}")
    return list(found.readable.values())


def pick(
    kept: Iterable[FoundSnapshot],
    updates: Updates,
    selector: VersionSelector,
    report_skipped: ReportSkipped,
) -> tuple[FoundSnapshot, bytes]:
    """Return the selected snapshot among those whose update is still effective.

    The second result is the trainer's part of the snapshot. A snapshot with unreadable weights is
    reported and skipped, as a coordinator would do.

    Raises:
        NotFoundError: If there is none. The message lists the versions that exist.
    """
    counting = [stored for stored in kept if choose([stored.snapshot], updates) is not None]
    for stored in _ranked(counting, selector):
        try:
            return stored, stored.trainer()
        except CorruptError as error:
            report_skipped(f"{stored.title} is skipped: {error}")
            counting.remove(stored)
    raise _not_kept(counting, selector)


def _ranked(counting: Iterable[FoundSnapshot], selector: VersionSelector) -> list[FoundSnapshot]:
    """Return the snapshots that match the selector, best first."""
    wanted = sorted(counting, key=lambda stored: stored.snapshot.rank, reverse=True)
    if selector == "newest":
        return wanted
    if selector != "best":
        return [stored for stored in wanted if stored.snapshot.made.version == selector]
    wanted = [stored for stored in wanted if stored.snapshot.loss is not None]
    # The sort is stable, so the newest of equally good ones comes first.
    return sorted(wanted, key=lambda stored: stored.snapshot.loss or 0.0)


def _not_kept(counting: Iterable[FoundSnapshot], selector: VersionSelector) -> NotFoundError:
    versions = sorted({stored.snapshot.made.version for stored in counting})
    listed = ", ".join(map(str, versions)) or "none yet"
    what = f"version {selector} of the model" if isinstance(selector, int) else "a model"
    return NotFoundError(f"{what} is not kept, or was rolled back; kept versions: {listed}")
