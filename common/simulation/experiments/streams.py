"""A datastream in virtual time: a partition of a topic that fills by an arrival process.

Its own clock stands still while its source does: in the paper nothing arrives at a preempted worker
(section III-B.4); in Kafka the records would wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.batching import Run

if TYPE_CHECKING:
    from common.core.spans import Partition
    from common.simulation.experiments.arrivals import Arrivals

NEVER = float("inf")


class Stream:
    """One partition; offsets are the indexes of its arrivals."""

    def __init__(self, partition: Partition, arrivals: Arrivals) -> None:
        self.partition = partition
        self._arrivals = arrivals
        self._still_s = 0.0  # how long its clock has stood still so far
        self._stopped_at: float | None = None

    def stop(self, now: float) -> None:
        """Let its clock stand still from now on."""
        if self._stopped_at is None:
            self._stopped_at = now

    def go_on(self, now: float) -> None:
        """Let its clock run again."""
        if self._stopped_at is not None:
            self._still_s += now - self._stopped_at
            self._stopped_at = None

    def heard(self, now: float) -> tuple[int, float]:
        """How many records have come, and in how many seconds of its own clock."""
        heard_s = (now if self._stopped_at is None else self._stopped_at) - self._still_s
        return self._arrivals.count_until(heard_s), heard_s

    def there_at(self, offset: int) -> float:
        """When the record at an offset is there, if the clock runs on from now; else never."""
        time_s = self._arrivals.time_of(offset)
        if self._stopped_at is not None and time_s > self._stopped_at - self._still_s:
            return NEVER
        return time_s + self._still_s

    def read(self, position: int, samples: int, last_s: float) -> Run:
        """Read so many records, the last of which came at `last_s`; all of them must be there.

        Arrivals before its clock last stood still come out as late as that made the last one.
        """
        self._arrivals.forget_before(position)
        first_s = self._arrivals.time_of(position) + self._still_s
        return Run(self.partition, range(position, position + samples), (), first_s, last_s)
