"""Reports partitions whose records are far older than those of other partitions.

The model then learns from two ages at once. Timestamps never decide what is read next; see
`common.core.weighted_turns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from common.core.spans import Partition
from common.core.weighted_turns import FAR_BEHIND_S, behind_s

if TYPE_CHECKING:
    from common.kafka.port import Fetched
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.worker import WorkerMetrics

LOOK_S = 2.0  # seconds


class TimeLag:
    """Tracks the ages of the records that one worker reads."""

    def __init__(
        self, streams: tuple[str, ...], logger: EventLogger, measures: WorkerMetrics
    ) -> None:
        self._streams = streams
        self._log = logger
        self._measures = measures
        self._newest_s = dict[Partition, float]()
        self._far_behind = set[Partition]()
        self._look_at = float("-inf")

    def read(self, fetched: Fetched) -> None:
        """Note the age of fetched records."""
        self._newest_s[fetched.partition] = fetched.last_arrival_s

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """Forget partitions that another worker reads now."""
        for partition in partitions:
            self._newest_s.pop(partition, None)
            self._far_behind.discard(partition)

    def due(self, now: float) -> bool:
        """Return True if a comparison is due, and schedule the next one."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        return True

    def look(self, backlog: Mapping[Partition, int]) -> None:
        """Compare partitions, and report changes.

        Args:
            backlog: Number of unread records by partition.
        """
        behind = behind_s(self._newest_s, backlog)
        for stream in self._streams:
            worst_s = max((s for p, s in behind.items() if p.topic == stream), default=0.0)
            self._measures.stream_behind_s.labels(stream).set(worst_s)
        for partition in self._newest_s:
            lag_s = behind.get(partition, 0.0)
            if lag_s > FAR_BEHIND_S and partition not in self._far_behind:
                self._far_behind.add(partition)
                self._log.warning(
                    "partition_far_behind",
                    partition=str(partition),
                    behind_s=round(lag_s),
                    records=backlog[partition],
                    reason="the partition's records are older by this much than those of the other"
                    " partitions",
                )
            elif lag_s <= FAR_BEHIND_S and partition in self._far_behind:
                self._far_behind.discard(partition)
                self._log.info("partition_caught_up", partition=str(partition))
