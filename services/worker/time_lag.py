"""Notices partitions that lag far behind the others in time: a model then learns two ages at once.

Only reported: what is read next never depends on timestamps, see `common.core.weighted_turns`.
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

LOOK_S = 2.0  # between two looks


class TimeLag:
    """The ages of what one worker reads."""

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
        """Records were read."""
        self._newest_s[fetched.partition] = fetched.last_arrival_s

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """Somebody else reads these now."""
        for partition in partitions:
            self._newest_s.pop(partition, None)
            self._far_behind.discard(partition)

    def due(self, now: float) -> bool:
        """Whether it is time for a look; if so, the next one is due later."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        return True

    def look(self, backlog: Mapping[Partition, int]) -> None:
        """Compare, and say what has changed.

        Args:
            backlog: Records that each partition is behind.
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
                    reason="its records are that much older than those of the other partitions",
                )
            elif lag_s <= FAR_BEHIND_S and partition in self._far_behind:
                self._far_behind.discard(partition)
                self._log.info("partition_caught_up", partition=str(partition))
