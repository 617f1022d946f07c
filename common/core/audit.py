"""Proof from Kafka alone that every record was used once, with the spans of each version.

The audit folds the updates topic into the history and the control topic into the ledger. Every
batch of an update or a quarantine must be an accepted claim and must occur only once. The spans of
each partition must tile it without gap or overlap, from the start of the job to the settled
frontier. Records of a log that was cut, or of a topic that was recreated, are listed separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from common.core.history import History
from common.core.ledger import Ledger
from common.core.messages import (
    GENESIS,
    Batch,
    BatchReady,
    Lead,
    Opened,
    Replayed,
    Requeued,
    UpdateApplied,
)
from common.core.snapshots import genesis
from common.core.spans import LogPosition, Partition, Span

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, ControlRecord, Positions, Quarantined


class Flaw(NamedTuple):
    """A violation: a gap, an overlap, or an update of a batch that no worker claimed."""

    kind: str
    where: str


class Restart(NamedTuple):
    """A Lead that started at version 0 although updates were in force."""

    epoch: int
    taken_back: int  # updates
    # Description of the loss that the owner accepted. Empty if the owner was not asked.
    loss: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit of both topics."""

    # Effective updates, by version.
    updates: tuple[UpdateApplied, ...]
    # Quarantines in force.
    quarantined: tuple[Quarantined, ...]
    # Quarantines that operators ended. The same batch may be quarantined later.
    requeued: tuple[Requeued, ...]
    # Final quarantines, whose records were produced again.
    replayed: tuple[Replayed, ...]
    # Spans that Kafka deleted before a worker read them, even if no worker has claimed them yet.
    expired: tuple[Span, ...]
    # Spans that were trained and then lost: their log was cut or their topic recreated.
    lost: tuple[Span, ...]
    # Number of Lead records that counted.
    takeovers: int
    # Number of updates that a later Lead took back, or that came too late.
    taken_back: int
    # Number of samples in effective updates.
    trained: int
    # Number of records of accepted batches that did not decode, each counted once.
    skipped: int
    # Number of accepted samples without an update.
    unsettled: int
    # Settled frontier: the offset of each partition below which no record waits or is missing.
    settled: Positions
    flaws: tuple[Flaw, ...]
    restarts: tuple[Restart, ...] = ()

    @property
    def expired_records(self) -> int:
        """Number of records that Kafka deleted before they were trained, claimed or not."""
        batches = [each.batch for each in self.quarantined if each.expired]
        unread = sum(span.end - span.start for span in self.expired)
        return unread + sum(batch.samples for batch in batches)

    @property
    def switches(self) -> int:
        """Number of updates in another mode than the update before."""
        return sum(before.mode != after.mode for before, after in pairwise(self.updates))

    @property
    def lost_records(self) -> int:
        """Number of records that are in the model but no longer in Kafka, which lost them."""
        return sum(span.end - span.start for span in self.lost)


def audit(
    first: Positions,
    control: Iterable[tuple[int, ControlRecord | None]],
    updates: Iterable[tuple[int, AuditRecord | None]],
    starts: Mapping[Partition, int] | None = None,
    known: Mapping[Partition, LogPosition] | None = None,
) -> Audit:
    """Fold both topics and compare the results.

    Args:
        first: Start of every partition of the job.
        control: The whole control topic by offset, with None for records that do not parse.
        updates: The whole updates topic in the same form.
        starts: Current start of each log. Unclaimed records below it have expired.
        known: Positions of the logs at the submission of the job.
    """
    history, effective, operators, restarts, lead_count, void = _effective(updates)
    flaws = list[Flaw]()

    ledger = Ledger.of(genesis(first, known))
    accepted = dict[int, Batch]()
    # Spans settled without an update: expired, or without any record that decodes.
    spans = list[Span]()
    expired = list[Span]()
    skipped = 0
    for offset, record in control:
        decision = ledger.decide(offset, record)
        if not decision.accepted or record is None or isinstance(record, Opened):
            continue
        if isinstance(record, BatchReady):
            skipped += sum(left_out.records for left_out in record.skipped)
        else:
            expired += record.address
        if decision.batch is None:
            spans += record.address
        else:
            accepted[offset] = decision.batch.without_skipped()

    # A quarantine of a batch whose claim was lost is void: other batches contain its records.
    quarantined = tuple(
        record
        for offset, record in history.quarantined.items()
        if accepted.get(offset) == record.batch.without_skipped()
    )
    expired += [
        Span(*place, claimed, start)
        for place, claimed in sorted(ledger.claimed.items())
        if (start := (starts or {}).get(place, claimed)) > claimed
    ]

    settled = set[int]()
    lost = list[Span]()
    for what, batches in (
        *((f"version {update.version}", update.batches) for update in effective),
        *(("quarantine", (record.batch,)) for record in quarantined),
    ):
        for batch in batches:
            if batch.offset in settled:
                flaws.append(Flaw("used twice", f"batch {batch.offset} is used again in {what}"))
            if accepted.get(batch.offset) != batch.without_skipped():
                flaws.append(Flaw("never claimed", f"batch {batch.offset} of {what}"))
            settled.add(batch.offset)
            spans += batch.address
            if what != "quarantine":
                lost += filter(None, map(ledger.lost_part, batch.address))
    waiting = [span for o, b in accepted.items() if o not in settled for span in b.address]
    frontier, holes = _tile(
        _beginnings(first, ledger), _in_log(ledger, spans), _in_log(ledger, waiting)
    )
    return Audit(
        updates=tuple(effective),
        quarantined=quarantined,
        requeued=tuple(record for record in operators if isinstance(record, Requeued)),
        replayed=tuple(record for record in operators if isinstance(record, Replayed)),
        expired=tuple(expired),
        lost=tuple(lost),
        takeovers=lead_count,
        taken_back=void,
        trained=sum(update.samples for update in effective),
        skipped=skipped,
        unsettled=sum(b.samples for o, b in accepted.items() if o not in settled),
        settled=frontier,
        flaws=(*flaws, *_miscounted(effective), *holes),
        restarts=tuple(restarts),
    )


def _miscounted(updates: Iterable[UpdateApplied]) -> list[Flaw]:
    """Return flaws: updates with a wrong number of samples, or beyond their own K or staleness."""
    flaws = list[Flaw]()
    for update in updates:
        samples = sum(batch.samples for batch in update.batches)
        if update.samples != samples:
            where = (
                f"version {update.version} names {update.samples} samples, but its batches have"
                f" {samples}"
            )
            flaws.append(Flaw("miscounted", where))
        most = update.synchrony.staleness if update.synchrony else 0
        if update.staleness > most:
            where = (
                f"version {update.version} has a staleness of {update.staleness} updates, allowed"
                f" {most}"
            )
            flaws.append(Flaw("too stale", where))
        if update.synchrony and len(update.batches) > update.synchrony.group_size:
            where = f"version {update.version} has {len(update.batches)} batches"
            flaws.append(Flaw("too many", f"{where}, but K was {update.synchrony.group_size}"))
    return flaws


def _effective(
    updates: Iterable[tuple[int, AuditRecord | None]],
) -> tuple[History, list[UpdateApplied], list[Requeued | Replayed], list[Restart], int, int]:
    history, by_name = History(), dict[tuple[int, int], UpdateApplied]()
    operators = list[Requeued | Replayed]()
    restarts = list[Restart]()
    leads = seen = 0
    for offset, record in updates:
        made = history.head.version
        counts = history.feed(offset, record)
        match record:
            case UpdateApplied():
                seen += 1
                if counts:
                    by_name[record.epoch, record.version] = record
            case Lead():
                leads += counts
                if counts and made and record.base == GENESIS:
                    restarts.append(Restart(history.epoch, made, record.loss))
            case Requeued() | Replayed() if counts:
                operators.append(record)
            case _:
                pass
    effective = [by_name[model.epoch, model.version] for model in history.path[1:]]
    return history, effective, operators, restarts, leads, seen - len(effective)


def _beginnings(first: Positions, ledger: Ledger) -> Positions:
    """Return the job's start in the current logs, including partitions added later."""
    begin = dict(first)
    for place, openings in ledger.opened.items():
        topic_id = ""
        for each in openings:
            # This opening begins the first generation, when the job or the partition was new.
            if each.after is None:
                begin.setdefault(place, each.start)
            elif "" != topic_id != each.topic_id != "":
                begin[place] = each.start
            # The log may have been cut below the job's start.
            else:
                begin[place] = min(begin[place], each.start)
            topic_id = each.topic_id
    return begin


def _in_log(ledger: Ledger, spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the parts of accepted spans that are in the current logs."""
    for span in spans:
        end = ledger.end_in_log(span)
        if end > span.start:
            yield span._replace(end=end)


def _tile(
    first: Positions, spans: Iterable[Span], unsettled: Iterable[Span]
) -> tuple[Positions, list[Flaw]]:
    """Return the settled frontier, and the gaps and overlaps between spans.

    An unsettled span stops the frontier, but it is no gap.
    """
    by_place: dict[Partition, list[Span]] = {partition: [] for partition in first}
    flaws = list[Flaw]()
    waiting = set(unsettled)
    for span in (*spans, *waiting):
        if span.place in by_place:
            by_place[span.place].append(span)
        else:
            flaws.append(Flaw("foreign", f"{span} does not belong to this job"))
    frontier = dict(first)
    for place, found in by_place.items():
        furthest = Span(*place, first[place], first[place])
        # True while there is no hole and no waiting batch.
        whole = True
        for span in sorted(found):
            if span.start > furthest.end:
                flaws.append(Flaw("gap", f"{Span(*place, furthest.end, span.start)}"))
            elif span.start < furthest.end:
                flaws.append(Flaw("overlap", f"{furthest} and {span}"))
            whole = whole and span not in waiting and span.start <= furthest.end
            furthest = max(furthest, span, key=lambda each: each.end)
            if whole:
                frontier[place] = furthest.end
    return frontier, flaws
