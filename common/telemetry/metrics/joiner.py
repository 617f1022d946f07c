"""What a joiner tells: of the one join that it takes part in."""

from __future__ import annotations

from collections.abc import Mapping

from common.joining.machine import SIDES, Progress, Side
from common.telemetry.metrics import catalogue
from common.telemetry.metrics.meters import Meters

_SAMPLES = ("joined", "alone")
_RECORDS = ("late", "double", "unmatched", "late_left")
_DEAD_LETTER = "dead_letter"


class JoinerMetrics:
    """The metrics of one joiner."""

    def __init__(self, to: str) -> None:
        self.meters = Meters("joiner")
        self._to = to
        self._partitions = self.meters.gauge(catalogue.JOIN_PARTITIONS).labels(to)
        self._waiting = self.meters.gauge(catalogue.JOIN_WAITING)
        samples = self.meters.counter(catalogue.JOIN_SAMPLES)
        records = self.meters.counter(catalogue.JOIN_RECORDS)
        self._counters = {name: samples.labels(to, name) for name in _SAMPLES}
        self._counters |= {name: records.labels(to, name) for name in (*_RECORDS, _DEAD_LETTER)}

    def written(self, before: Progress, after: Progress, dead_letters: int) -> None:
        """A transaction was written, which brought one partition so far."""
        for name in (*_SAMPLES, *_RECORDS):
            self._counters[name].inc(getattr(after, name) - getattr(before, name))
        self._counters[_DEAD_LETTER].inc(dead_letters)

    def stands(self, partitions: int, waiting: Mapping[Side, int]) -> None:
        """So many partitions are joined here, and so many records of each side wait in them."""
        self._partitions.set(partitions)
        for side in SIDES:
            self._waiting.labels(self._to, side).set(waiting[side])
