"""Decides which fetched records continue a partition, so that no stale one is ever believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import TopicPartition

from common.core.spans import LogPosition

if TYPE_CHECKING:
    from common.core.spans import Partition


class RunContinuation(NamedTuple):
    """The part of a run that continues the partition, and whether the rest must be fetched anew."""

    first: int
    last: int  # exclusive
    again: bool


class Cursor:
    """The position of one partition since it was last placed, and what is known of the log below.

    A record left over from an earlier placement looks like a hole in the log, and the records
    before it would be lost. The client library throws such records out by itself; should it ever
    fail to, this is the second lock: records below the position are left out, a run that goes
    backwards ends there, and the first hole after a placement is believed only when a second fetch
    shows it again. From then on the partition is known to have holes (compaction, transactions) and
    they are believed at once, because every record since is from a fetch at a position reached in
    order.
    """

    def __init__(self, partition: Partition, position: int | LogPosition) -> None:
        known = LogPosition.of(position)
        self.partition = partition
        self.position = known.offset
        self.topic_id = known.topic_id  # empty: not known
        self.epoch = known.epoch  # of the last record below the position; -1: not known
        self._hole_at: tuple[int, int] | None = None  # (position, offset found there instead)
        self._has_holes = False

    @property
    def known(self) -> LogPosition:
        """Where it stands, as whoever goes on from here needs it."""
        return LogPosition(self.position, self.topic_id, self.epoch)

    def target(self) -> TopicPartition:
        """Where the client has to go on, and what it has to see to before that."""
        return TopicPartition(*self.partition, self.position, leader_epoch=self.epoch)

    def take(self, offsets: list[int]) -> RunContinuation:
        """Move the position over what continues it.

        Args:
            offsets: What one fetch gave, in the order it gave them; not empty.
        """
        count = len(offsets)
        if offsets == list(range(self.position, self.position + count)):
            self.position += count
            return RunContinuation(0, count, again=False)
        return self._take_slowly(offsets)

    def reach(self, end: int) -> bool:
        """Move over offsets that hold no record, up to the end that a fetch from here came to.

        Returns:
            Whether it must be fetched again first: likewise a hole, that of the log's end.
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
