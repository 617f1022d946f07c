"""When each job has its turn: at its time, or when it is woken; a state machine without threads.

    waiting ──its time, or a wake-up──▶ ready ──next──▶ running ──done──▶ waiting
                                          ▲                │
                                          └── woken meanwhile: once more ──┘

A job is given out by `next` and not again before `done`: never two turns of one job at once. A
wake-up during its turn makes another turn follow, so what was left for it is always looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, Literal, TypeVar

J = TypeVar("J")

_STALE = 64  # entries of the heap that no longer count, beside as many as there are jobs


@dataclass(slots=True)
class _Place:
    """Where a job stands."""

    state: Literal["waiting", "ready", "running"] = "ready"
    due: float = inf
    woken: bool = False  # during its turn


class TurnSchedule(Generic[J]):
    """The turns of jobs, which are told apart by their hash; belongs to one thread at a time."""

    def __init__(self) -> None:
        self._places = dict[J, _Place]()
        self._ready = deque[J]()  # the longest first
        self._dues = list[tuple[float, int, J]]()  # a heap; old entries of a job are passed over
        self._entries = 0  # made so far: no two jobs are ever compared

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[J]:
        return iter(self._places)

    @property
    def ready(self) -> int:
        """How many wait for nothing but `next`."""
        return len(self._ready)

    def add(self, job: J) -> None:
        """A new job, whose first turn is now."""
        self._places[job] = _Place()
        self._ready.append(job)

    def wake(self, job: J) -> bool:
        """Let it have a turn soon; whether that makes it ready just now."""
        place = self._places.get(job)
        if place is None:
            return False
        if place.state == "waiting":
            self._make_ready(job, place)
            return True
        place.woken = place.woken or place.state == "running"
        return False

    def next(self, now: float) -> J | None:
        """Give out the job that has been ready for longest; None where none is."""
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
        """Its turn is over.

        Args:
            job: That was given out.
            due: When its next turn is, unless somebody wakes it before; infinite: only then.
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
        """Its last turn is over."""
        del self._places[job]

    def due(self) -> float:
        """When the first one that waits is due; infinite where none has a time.

        It may be earlier than that, where somebody woke who would have been the first.
        """
        return self._dues[0][0] if self._dues else inf

    def _make_ready(self, job: J, place: _Place) -> None:
        place.state, place.woken, place.due = "ready", False, inf
        self._ready.append(job)

    def _sweep(self) -> None:
        """Throw away what no longer counts: who is often woken leaves an entry each time."""
        kept = dict[J, tuple[float, int, J]]()
        for entry in self._dues:
            place = self._places.get(entry[2])
            if place is not None and place.state == "waiting" and place.due == entry[0]:
                kept[entry[2]] = entry
        self._dues = list(kept.values())
        heapify(self._dues)
