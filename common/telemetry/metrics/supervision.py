"""What a process with many jobs tells of their turns: which fail, and which take long."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, TypeAlias

from common.telemetry.metrics import catalogue

if TYPE_CHECKING:
    from common.telemetry.metrics.meters import Meters

Kind: TypeAlias = Literal["fault", "unavailable"]

KINDS: tuple[Kind, ...] = ("fault", "unavailable")


class SupervisionMetrics:
    """Counts for `common.runtime.supervisor`; may be shared between threads."""

    def __init__(self, meters: Meters) -> None:
        self._faults = meters.counter(catalogue.JOB_FAULTS)
        self._slow = meters.counter(catalogue.SLOW_TURNS)
        self._longest = meters.gauge(catalogue.LONGEST_TURN)
        self._lock = threading.Lock()
        self._longest_s = dict[str, float]()

    def follow(self, job: str) -> None:
        """Report on a job, until `forget`."""
        for kind in KINDS:  # from now on there are zeros to count from
            self._faults.labels(job, kind)
        self._slow.labels(job)
        self._longest.labels(job).set(0.0)

    def failed(self, job: str, kind: Kind) -> None:
        """An exception ended a job's actor."""
        self._faults.labels(job, kind).inc()

    def slow_turn(self, job: str, took_s: float) -> None:
        """A turn took long."""
        self._slow.labels(job).inc()
        with self._lock:
            self._longest_s[job] = max(self._longest_s.get(job, 0.0), took_s)
            self._longest.labels(job).set(self._longest_s[job])

    def forget(self, job: str) -> None:
        """Report on a job no longer."""
        for each in (self._faults, self._slow, self._longest):
            each.remove_by_labels({"job_name": job})
        with self._lock:
            self._longest_s.pop(job, None)
