"""Who owns which records: a pure fold over the control topic.

For each partition the ledger keeps one number, `claimed`, below which everything belongs to
exactly one accepted batch or has expired. Nothing else may influence a decision: not the time, not
who asks, not what happened to earlier batches. So every replay, on every machine, for ever, decides
the same; and duplicates, zombies, double owners after a rebalance are all one case: they change
nothing.

Offsets come again where a log lost its tail, or a topic was created anew. So a partition has
generations: an `Opened` record begins the next one, and claims of an earlier one fit no longer.

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
    """What became of one control record."""

    accepted: bool
    reason: str  # why not; empty where accepted
    batch: Batch | None = None  # what now waits for an update: nothing where it expired or is empty


class Ledger:
    """The fold: feed it every record of the control topic, in order, each offset once.

    Args:
        claimed: Where every partition of the job begins, or stood at `position`.
        position: Control offset of the next record to decide: each below has been decided.
        opened: What counted of `Opened` before `position`.
        known: What was known of the logs then.
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
        self.accepted = 0  # batches, by this ledger
        self.refused = 0  # claims

    @classmethod
    def of(cls, snapshot: Snapshot) -> Ledger:
        """The ledger of a snapshot, to go on with."""
        return cls(snapshot.claimed, snapshot.control_position, snapshot.opened, snapshot.known)

    @property
    def claimed(self) -> Positions:
        """A copy of the frontier of accepted records, by partition."""
        return dict(self._claimed)

    @property
    def opened(self) -> Openings:
        """A copy of what counted of `Opened`; a partition without any is of generation 0."""
        return dict(self._opened)

    @property
    def known(self) -> LogPositions:
        """A copy of what is known of the logs, after the last record that is claimed."""
        return dict(self._known)

    def generation(self, partition: Partition) -> int | None:
        """The generation in force; None for a partition that the job does not have."""
        if partition in self._opened:
            return self._opened[partition][-1].generation
        return 0 if partition in self._claimed else None

    def topic_ids(self, address: Address) -> dict[Partition, str]:
        """Return Kafka's ids of the topics that spans were claimed of, as far as they are known."""
        found = {span.place: topic_id_of(self._opened, span) for span in address}
        return {place: topic_id for place, topic_id in found.items() if topic_id}

    def end_in_log(self, span: Span) -> int:
        """Up to where an accepted span's offsets are still those of its records.

        Below its start if none are: the log was cut below, or its topic created anew.
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
        """What of an accepted span had records in its log, and is there no more; None: nothing."""
        end = span.known if span.known >= 0 else span.end
        start = max(span.start, self.end_in_log(span))
        return span._replace(start=start, end=end) if start < end else None

    def is_gone(self, span: Span) -> bool:
        """Whether records of an accepted span are in no log any more: it was cut below them."""
        return self.lost_part(span) is not None

    def decide(self, offset: int, record: ControlRecord | None) -> ClaimOutcome:
        """Decide the control record at `offset`; None stands for one that does not parse.

        Raises:
            ValueError: If `offset` was decided before: a caller that replays must start afresh.
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
        """Why a span cannot be claimed; empty where it can."""
        claimed = self._claimed.get(place)
        if claimed is None:
            return f"{place} is not of this job"
        generation = self.generation(place) if self._opened else 0
        if span.generation != generation:
            return f"{span} is of generation {span.generation}, not {generation}"
        if claimed != span.start:
            return f"{span} starts elsewhere than {claimed}"
        known = self._known.get(place)
        # Another's claim may have come between, of the log before it lost its tail.
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
        """Begin a partition's next generation; returns why not."""
        place = opened.partition
        if place.topic not in self._topics:
            return f"{place} is not of this job"
        if opened.after != self.generation(place):
            return f"{place} is of generation {self.generation(place)}, not {opened.after}"
        claimed = self._claimed.get(place, opened.start)
        known = self._known.get(place, LogPosition(claimed))
        if opened.topic_id == known.topic_id and opened.start > claimed:
            # Sent before the log lost more, and late: it would jump over records.
            return f"{place} is claimed up to {claimed}, below {opened.start}"
        self._claimed[place] = opened.start
        self._opened[place] = (*self._opened.get(place, ()), opened)
        self._known[place] = LogPosition(opened.start, opened.topic_id, opened.epoch)
        return ""
