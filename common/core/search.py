"""Where a candidate starts: the best snapshot, looked for where it is likeliest and cheapest first.

    hot       on the board: of the leader in force, unless the board was wiped
    all       checkpoints too: some minutes old, and slow to read
    genesis   what the job's specification makes

A leader publishes a hot snapshot as soon as it leads. So where the board has none of the leader in
force, the board was probably wiped, and that leader alive with all that it knows: then the lease is
left to it for one lifetime. Only if it does not come back, older snapshots have to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from common.core.commands import FindSnapshots
from common.core.history import History  # noqa: TC001 -- NamedTuple reads it when run
from common.core.snapshots import Snapshot, choose

if TYPE_CHECKING:
    from common.core.events import SnapshotsFound, Source

LATE = 5  # lifetimes of a lease after which a wait counts as one of another time


class Chosen(NamedTuple):
    """Start here."""

    snapshot: Snapshot
    history: History


class Wait(NamedTuple):
    """Let the leader in force have the lease, if it is alive."""


class Search:
    """One replica's searches, one after the other.

    Args:
        lease_ttl_s: How long the leader in force is waited for.
    """

    def __init__(self, lease_ttl_s: float) -> None:
        self._lease_ttl_s = lease_ttl_s
        self._waits_until: float | None = None
        self._torn = set[tuple[int, int, int]]()
        self.source: Source = "hot"

    def begin(self) -> FindSnapshots:
        """Look from the beginning."""
        return self._look("hot")

    def leave_out(self, snapshot: Snapshot) -> None:
        """Never choose this one again: its weights cannot be read."""
        self._torn.add(snapshot.rank)

    def found(self, found: SnapshotsFound, now: float) -> Chosen | FindSnapshots | Wait:
        """Judge what was found; returns what to do now."""
        whole = [snapshot for snapshot in found.snapshots if snapshot.rank not in self._torn]
        choice = choose(whole, found.updates)
        if found.source == "hot":
            if found.end == 0:
                return self._look("genesis")  # nobody ever led
            if choice is None or choice[1].epoch != choice[0].by:
                return self._look("all") if self._waited(now) else Wait()
        if choice is None:
            return self._look("genesis")
        return Chosen(*choice)

    def _look(self, source: Source) -> FindSnapshots:
        self.source = source
        return FindSnapshots(source)

    def _waited(self, now: float) -> bool:
        """Whether the leader in force had its time to come back."""
        until = self._waits_until
        if until is None or now > until + LATE * self._lease_ttl_s:
            self._waits_until = until = now + self._lease_ttl_s
        return now >= until
