"""Schedule of the turns of jobs, a state machine without threads.

    waiting ──due, or woken──▶ ready ──next──▶ running ──done──▶ waiting
                                 ▲                │
                                 └── woken during its turn ──┘

After `next` returns a job, it does not return the job again before `done`, so two turns of one job
never overlap. A wake-up during a turn makes another turn follow, so no message is left unread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, Literal, TypeVar

J = TypeVar("J")

# Stale entries that the heap may have, in addition to one per job, before it is rebuilt.
_STALE = 64


@dataclass(slots=True)
class _Place:
    """State of one job.

    Attributes:
        state: State in the diagram above.
        due: Time of the next turn while the job waits.
        woken: True if the job was woken during its turn.
    """

    state: Literal["waiting", "ready", "running"] = "ready"
    due: float = inf
    woken: bool = False


class TurnSchedule(Generic[J]):
    """Schedule of the turns of jobs, which must be hashable. For one thread at a time."""

    def __init__(self) -> None:
        self._places = dict[J, _Place]()
        # Ready jobs, the one that has been ready for longest first.
        self._ready = deque[J]()
        # Heap of due times. Stale entries of a job are skipped.
        self._dues = list[tuple[float, int, J]]()
        # Number of entries made so far, which breaks ties so that jobs are never compared.
        self._entries = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[J]:
        return iter(self._places)

    @property
    def ready(self) -> int:
        """Number of jobs that are ready."""
        return len(self._ready)

    def add(self, job: J) -> None:
        """Add a job. It is ready for its first turn."""
        self._places[job] = _Place()
        self._ready.append(job)

    def wake(self, job: J) -> bool:
        """Make a job ready, or ready again after its turn; True if it was waiting."""
        place = self._places.get(job)
        if place is None:
            return False
        if place.state == "waiting":
            self._make_ready(job, place)
            return True
        place.woken = place.woken or place.state == "running"
        return False

    def next(self, now: float) -> J | None:
        """Return the job that has been ready for longest; None if no job is ready."""
        while self._dues and self._dues[0][0] <= now:
            due, _, job = heappop(self._dues)
            place = self._places.get(job)
            if place is not None and place.state == "waiting" and place.due == due:
                self._make_ready(job, place)
        if not self._ready:
            return None
        job = self._ready.popleft()
        self._places[job].state = "running"
        return job

    def done(self, job: J, due: float) -> None:
        """End the turn of a job.

        Args:
            job: Job that `next` returned.
            due: Time of its next turn unless it is woken before; infinite to wait for a wake-up.
        """
        place = self._places[job]
        place.due = due
        if place.woken:
            self._make_ready(job, place)
            return
        place.state = "waiting"
        if due < inf:
            self._entries += 1
            heappush(self._dues, (due, self._entries, job))
            if len(self._dues) > 2 * len(self._places) + _STALE:
                self._sweep()

    def forget(self, job: J) -> None:
        """Remove a job after its last turn."""
        del self._places[job]

    def due(self) -> float:
        """Return the time of the first turn that is due; infinite if no job has a time.

        The time is too early if the job that would have been first was woken before.
        """
        return self._dues[0][0] if self._dues else inf

    def _make_ready(self, job: J, place: _Place) -> None:
        place.state, place.woken, place.due = "ready", False, inf
        self._ready.append(job)

    def _sweep(self) -> None:
        """Remove stale entries from the heap. A job leaves one each time that it is woken early."""
        kept = dict[J, tuple[float, int, J]]()
        for entry in self._dues:
            place = self._places.get(entry[2])
            if place is not None and place.state == "waiting" and place.due == entry[0]:
                kept[entry[2]] = entry
        self._dues = list(kept.values())
        heapify(self._dues)
