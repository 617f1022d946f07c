"""The ledger of claims: a pure fold over the control topic.

For each partition the ledger keeps one number, `claimed`, below which every record belongs to
exactly one accepted batch or has expired. Decisions depend on nothing else: not on the time, the
caller or the fate of earlier batches. Every replay on every machine therefore decides the same.
Duplicates, zombies and double owners after a rebalance are all one case: they change nothing.

Offsets are reused after a log lost its tail or a topic was recreated. So a partition has
generations: an `Opened` record begins the next one, and claims of earlier generations are refused.

    control   0: A p[0:10]   1: A p[10:20]   2: p opened at 15   3: B p[20:30]   4: B p[15:25]
    claimed   10             20              15                  15              25
              generation 0   generation 0    generation g        refused: of 0   of g
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from common.core.messages import Batch, BatchReady, Opened, topic_id_of
from common.core.spans import LogPosition, Partition, Span

if TYPE_CHECKING:
    from common.core.messages import ControlRecord, LogPositions, Openings, Positions
    from common.core.snapshots import Snapshot
    from common.core.spans import Address


class ClaimOutcome(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one control record."""

    accepted: bool
    # Reason for the refusal. Empty if accepted.
    reason: str
    # The batch that now waits for an update. None if it has expired or is empty.
    batch: Batch | None = None


class Ledger:
    """The fold. Feed it every record of the control topic once, in order.

    Args:
        claimed: The number `claimed` of every partition at `position`. At the job's beginning, the
            start of the partition.
        position: Control offset of the next record. All records below have been decided.
        opened: Openings that counted before `position`.
        known: Known positions in the logs at that time.
    """

    def __init__(
        self,
        claimed: Mapping[Partition, int],
        position: int = 0,
        opened: Mapping[Partition, tuple[Opened, ...]] | None = None,
        known: Mapping[Partition, LogPosition] | None = None,
    ) -> None:
        self._claimed = dict(claimed)
        self.position = position
        self._opened = dict(opened or {})
        self._known = dict(known or {})
        self._topics = {partition.topic for partition in claimed}
        # Number of accepted batches.
        self.accepted = 0
        # Number of refused claims.
        self.refused = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> Ledger:
        """Return the ledger of a snapshot."""
        return cls(snapshot.claimed, snapshot.control_position, snapshot.opened, snapshot.known)

    @property
    def claimed(self) -> Positions:
        """Copy of the frontier of accepted records, by partition."""
        return dict(self._claimed)

    @property
    def opened(self) -> Openings:
        """Copy of the openings that counted. A partition without any is of generation 0."""
        return dict(self._opened)

    @property
    def known(self) -> LogPositions:
        """Copy of the known positions after the last claimed record."""
        return dict(self._known)

    def generation(self, partition: Partition) -> int | None:
        """Return the generation in force, or None if the job does not have the partition."""
        if partition in self._opened:
            return self._opened[partition][-1].generation
        return 0 if partition in self._claimed else None

    def topic_ids(self, address: Address) -> dict[Partition, str]:
        """Return Kafka's ids of the topics that spans belong to, as far as they are known."""
        found = {span.place: topic_id_of(self._opened, span) for span in address}
        return {place: topic_id for place, topic_id in found.items() if topic_id}

    def end_in_log(self, span: Span) -> int:
        """Return the offset up to which an accepted span's offsets still belong to its records.

        The result is below the span's start if none do: the log was cut below it, or its topic
        recreated.
        """
        openings = self._opened.get(span.place)
        if openings is None:
            return span.end
        own = [at for at, each in enumerate(openings) if each.generation == span.generation]
        since = openings[own[0] :] if own else openings
        if len({each.topic_id for each in since} - {""}) > 1:
            return -1
        later = since[1:] if own else since
        return min([span.end, *(each.start for each in later)])

    def lost_part(self, span: Span) -> Span | None:
        """Return the part of an accepted span whose records are no longer in its log, or None."""
        end = span.known if span.known >= 0 else span.end
        start = max(span.start, self.end_in_log(span))
        return span._replace(start=start, end=end) if start < end else None

    def is_gone(self, span: Span) -> bool:
        """True if records of an accepted span are no longer in any log."""
        return self.lost_part(span) is not None

    def decide(self, offset: int, record: ControlRecord | None) -> ClaimOutcome:
        """Decide the control record at `offset`, or None for a record that does not parse.

        Raises:
            ValueError: If `offset` was decided before. A replay needs a new ledger.
        """
        if offset < self.position:
            raise ValueError(f"control record {offset} comes after {self.position - 1} was decided")
        self.position = offset + 1
        decision = self._decided(offset, record)
        if decision.batch is not None:
            self.accepted += 1
        elif not decision.accepted:
            self.refused += 1
        return decision

    def _decided(self, offset: int, record: ControlRecord | None) -> ClaimOutcome:
        if record is None:
            return ClaimOutcome(accepted=False, reason="does not parse")
        if isinstance(record, Opened):
            reason = self._open(record)
            return ClaimOutcome(accepted=not reason, reason=reason)
        spans = [(span, span.place) for span in record.address]
        for span, place in spans:
            if reason := self._why_not(span, place):
                return ClaimOutcome(accepted=False, reason=reason)
        for span, place in spans:
            self._claim(span, place)
        if not isinstance(record, BatchReady) or record.samples == 0:
            return ClaimOutcome(accepted=True, reason="")
        batch = Batch(offset, record.worker, record.address, record.samples, record.skipped)
        return ClaimOutcome(accepted=True, reason="", batch=batch)

    def _why_not(self, span: Span, place: Partition) -> str:
        """Return why a span cannot be claimed. Empty if it can."""
        claimed = self._claimed.get(place)
        if claimed is None:
            return f"{place} is no partition of this job"
        generation = self.generation(place) if self._opened else 0
        if span.generation != generation:
            return f"{span} is of generation {span.generation}, not {generation}"
        if claimed != span.start:
            return f"{span} must start at offset {claimed}"
        known = self._known.get(place)
        # Another worker may have claimed records of the log before it lost its tail.
        if known is not None and span.before != known.epoch and min(span.before, known.epoch) >= 0:
            return f"{span} follows a record of leader epoch {span.before}, not {known.epoch}"
        return ""

    def _claim(self, span: Span, place: Partition) -> None:
        self._claimed[place] = span.end
        before = self._known.get(place)
        if before is not None or span.known >= 0:
            topic_id = "" if before is None else before.topic_id
            known = span.known if span.known >= 0 else span.end
            self._known[place] = LogPosition(known, topic_id, span.epoch)

    def _open(self, opened: Opened) -> str:
        """Begin a partition's next generation. Return why not, or an empty text."""
        place = opened.partition
        if place.topic not in self._topics:
            return f"{place} is no partition of this job"
        if opened.after != self.generation(place):
            return f"{place} is of generation {self.generation(place)}, not {opened.after}"
        claimed = self._claimed.get(place, opened.start)
        known = self._known.get(place, LogPosition(claimed))
        if opened.topic_id == known.topic_id and opened.start > claimed:
            # A late opening from before the log lost more. It would skip records.
            return f"{place} is claimed up to {claimed}, below {opened.start}"
        self._claimed[place] = opened.start
        self._opened[place] = (*self._opened.get(place, ()), opened)
        self._known[place] = LogPosition(opened.start, opened.topic_id, opened.epoch)
        return ""
