"""Which records of an update are predicted before the model learns from them.

At most so many of each stream, from as many of its batches as may be: neither the first partition
nor the first worker alone.

    batches of a stream   ┌────────────┐┌────────────┐┌──────┐
    sampled               ├──┤          ├──┤          ├┤          in proportion to their records
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.core.messages import Batch
    from common.core.spans import Span

MOST_PIECES = 16  # of a stream: each is a question to Kafka, of some milliseconds


class Piece(NamedTuple):
    """Consecutive records to read back."""

    span: Span
    skipped: frozenset[int]  # offsets in it that every reader leaves out, where the update says so


def sample(batches: Iterable[Batch], most: int) -> dict[str, tuple[Piece, ...]]:
    """Choose records of an update.

    Args:
        batches: Of the update.
        most: Records of one stream.

    Returns:
        By stream; each record is in one piece at most.
    """
    found = dict[str, list[Piece]]()
    for batch in batches:
        for span in batch.address:
            skipped = frozenset(
                offset
                for each in batch.skipped
                if (each.topic, each.partition) == (span.topic, span.partition)
                for offset in each.offsets
            )
            if len(skipped) < span.end - span.start:
                found.setdefault(span.topic, []).append(Piece(span, skipped))
    return {stream: _spread(pieces, most) for stream, pieces in found.items()}


def _spread(pieces: Sequence[Piece], most: int) -> tuple[Piece, ...]:
    """Take from the beginning of each piece in proportion to what it holds."""
    count = min(len(pieces), MOST_PIECES, most)
    pieces = [pieces[index * len(pieces) // count] for index in range(count)]
    whole = sum(map(_records, pieces))
    chosen, before = list[Piece](), 0
    for piece in pieces:
        after = before + _records(piece)
        share = min(most, whole)
        quota = share * after // whole - share * before // whole
        if quota:
            chosen.append(_cut(piece, quota))
        before = after
    return tuple(chosen)


def _records(piece: Piece) -> int:
    return piece.span.end - piece.span.start - len(piece.skipped)


def _cut(piece: Piece, quota: int) -> Piece:
    """The beginning of a piece that holds so many records."""
    span, skipped = piece
    offsets = (each for each in range(span.start, span.end) if each not in skipped)
    last = next(islice(offsets, quota - 1, None))
    return Piece(span._replace(end=last + 1), frozenset(o for o in skipped if o <= last))
