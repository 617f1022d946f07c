"""Decides which fetched records continue a partition, so that stale records are never used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import TopicPartition

from common.core.spans import LogPosition

if TYPE_CHECKING:
    from common.core.spans import Partition


class RunContinuation(NamedTuple):
    """The part of a run that continues the partition. If `again`, the rest must be refetched."""

    first: int
    last: int  # exclusive
    again: bool


class Cursor:
    """The position of one partition since its last placement, and what is known of the log below.

    A record left over from an earlier placement looks like a hole in the log, and the records
    before it would be lost. The client library drops such records itself; this class is a second
    safeguard. It leaves out records below the position, ends a run that goes backwards, and accepts
    the first hole after a placement only if a second fetch shows the same hole. From then on the
    partition is known to have holes (compaction, transactions), and they are accepted at once:
    every later record comes from a fetch at a position that was reached in order.
    """

    def __init__(self, partition: Partition, position: int | LogPosition) -> None:
        known = LogPosition.of(position)
        self.partition = partition
        self.position = known.offset
        # Empty if the id is unknown.
        self.topic_id = known.topic_id
        # Epoch of the last record below the position; -1 if unknown.
        self.epoch = known.epoch
        # The position at which a hole was seen last, and the next offset that the fetch had
        # instead.
        self._hole_at: tuple[int, int] | None = None
        self._has_holes = False

    @property
    def known(self) -> LogPosition:
        """The position with its topic id and epoch, for a reader that continues from here."""
        return LogPosition(self.position, self.topic_id, self.epoch)

    def target(self) -> TopicPartition:
        """Return where the client must continue, and the epoch that it must check before."""
        return TopicPartition(*self.partition, self.position, leader_epoch=self.epoch)

    def take(self, offsets: list[int]) -> RunContinuation:
        """Advance the position over the records that continue it.

        Args:
            offsets: Offsets of one fetch, in order; not empty.
        """
        count = len(offsets)
        if offsets == list(range(self.position, self.position + count)):
            self.position += count
            return RunContinuation(0, count, again=False)
        return self._take_slowly(offsets)

    def reach(self, end: int) -> bool:
        """Advance over offsets without records, up to the end that a fetch has reached.

        Returns:
            True if the records must be fetched again first. An end above the position shows a hole,
            which must be seen twice, too.
        """
        if end > self.position:
            if not self._believes(end):
                return True
            self.position = end
        return False

    def _take_slowly(self, offsets: list[int]) -> RunContinuation:
        first = next((i for i, at in enumerate(offsets) if at >= self.position), len(offsets))
        for i in range(first, len(offsets)):
            at = offsets[i]
            if at < self.position or (at > self.position and not self._believes(at)):
                return RunContinuation(first, i, again=True)
            self.position = at + 1
        return RunContinuation(first, len(offsets), again=False)

    def _believes(self, at: int) -> bool:
        seen_before = self._hole_at == (self.position, at)
        self._hole_at = (self.position, at)
        self._has_holes = self._has_holes or seen_before
        return self._has_holes
