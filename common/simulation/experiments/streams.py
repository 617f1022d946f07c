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
KEPT = 128  # batches behind that may be read again: claims on their way when a machine was lost
AHEAD = 64  # batches whose times are looked up at once: one by one takes longer than the rest


class Stream:
    """One partition; offsets are the indexes of its arrivals."""

    def __init__(self, partition: Partition, arrivals: Arrivals) -> None:
        self.partition = partition
        self._arrivals = arrivals
        self._still_s = 0.0  # how long its clock has stood still so far
        self._stopped_at: float | None = None
        self._ahead = dict[int, tuple[float, float]]()  # by position
        self._ahead_samples = 0  # in each of those batches

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

    def full_at(self, position: int, samples: int) -> float:
        """When so many records are there from a position on, if the clock runs on; else never."""
        time_s = self._times(position, samples)[1]
        if self._stopped_at is not None and time_s > self._stopped_at - self._still_s:
            return NEVER
        return time_s + self._still_s

    def read(self, position: int, samples: int) -> Run:
        """Read so many records; all of them must be there.

        Arrivals before its clock last stood still come out as much later as it stood still.
        """
        first_s, last_s = self._times(position, samples)
        offsets = range(position, position + samples)
        return Run(self.partition, offsets, (), first_s + self._still_s, last_s + self._still_s)

    def _times(self, position: int, samples: int) -> tuple[float, float]:
        """When the first and the last of these records arrive, on its own clock."""
        found = self._ahead.get(position)
        if found is None or samples != self._ahead_samples:
            self._ahead_samples = samples
            self._arrivals.forget_before(max(position - KEPT * samples, 0))
            firsts = range(position, position + AHEAD * samples, samples)
            lasts = range(firsts.start + samples - 1, firsts.stop + samples - 1, samples)
            times = zip(
                self._arrivals.times_of(firsts), self._arrivals.times_of(lasts), strict=True
            )
            self._ahead = dict(zip(firsts, times, strict=True))
            found = self._ahead[position]
        return found
