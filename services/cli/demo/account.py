"""Where every record of a demo went: what was produced against what the audit proves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.audit import Audit
    from common.core.messages import Positions
    from common.core.spans import Partition, Span


@dataclass(frozen=True, slots=True)
class Account:
    """Counts of records."""

    produced: int
    trained: int
    skipped: int
    expired: int
    quarantined: int
    lost: int
    duplicated: int


def account(audit: Audit, first: Positions, ends: Positions) -> Account:
    """Compare an audit with what was produced.

    Args:
        audit: Of the whole job.
        first: Where each partition began.
        ends: The position after the last record produced, of each partition.
    """
    produced = sum(ends[place] - first[place] for place in first)
    expired = sum(span.end - span.start for span in audit.expired)
    quarantined = sum(record.batch.samples for record in audit.quarantined)
    used = audit.trained + audit.skipped + expired + quarantined
    duplicated = _overlap(_settled_spans(audit))
    # By number, and by place: a sum may be right though a partition was never read to its end.
    missing = produced - (used - duplicated)
    behind = sum(max(0, ends[place] - audit.settled.get(place, first[place])) for place in first)
    return Account(
        produced=produced,
        trained=audit.trained,
        skipped=audit.skipped,
        expired=expired,
        quarantined=quarantined,
        lost=max(missing, behind, 0),
        duplicated=duplicated,
    )


def _settled_spans(audit: Audit) -> Iterable[Span]:
    for update in audit.updates:
        for batch in update.batches:
            yield from batch.address
    for record in audit.quarantined:
        yield from record.batch.address
    yield from audit.expired


def _overlap(spans: Iterable[Span]) -> int:
    """How many positions are covered again, each time counted."""
    by_place: defaultdict[Partition, list[Span]] = defaultdict(list)
    for span in spans:
        by_place[span.place].append(span)
    again = 0
    for found in by_place.values():
        reached = 0
        for span in sorted(found):
            again += max(0, min(span.end, reached) - span.start)
            reached = max(reached, span.end)
    return again
