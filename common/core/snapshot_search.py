"""Where a candidate starts: the best snapshot, looked for where it is likeliest and cheapest first.

    hot       on the board: of the leader in force, unless the board was wiped
    all       checkpoints too: some minutes old, and slow to read
    genesis   what the job's specification makes

A snapshot is covered if the control and the updates topic still have all that it contains. Where
Kafka lost records that it had acknowledged, one that is not covered may know what no log can prove
any more; it is not trusted for part of it. The job is held until its owner says that it shall go on
from the best that both topics cover, and the Lead that does so has judged all of its time.

A leader publishes a hot snapshot as soon as it leads. So where the board has none of the leader in
force, the board was probably wiped, and that leader alive with all that it knows: then the lease is
left to it for one lifetime. Only if it does not come back, older snapshots have to do. Not so where
members hold the weights: a snapshot of any age is rolled forward to the newest update.

The history names the newest checkpoint that was read back complete. If the search finds neither
that checkpoint nor something better, the store may have answered wrongly, so the job waits and
searches again. The job's owner may decide otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from common.core.commands import FindSnapshots
from common.core.history import History  # noqa: TC001 -- NamedTuple reads it when run
from common.core.messages import GENESIS, ModelId
from common.core.snapshots import Snapshot, choose

if TYPE_CHECKING:
    from common.core.events import SnapshotsFound, Source, WantedChanged
    from common.core.messages import AuditRecord

LATE = 5  # lifetimes of a lease after which a wait counts as one of another time
# Time between two searches for a checkpoint that was not found. A list costs storage one request.
SEARCH_AGAIN_S = 10.0
# Time for which a torn checkpoint is read again before the one before it is used. A store shows
# all of an object within seconds of its write.
TORN_S = 60.0


class Chosen(NamedTuple):
    """Start here."""

    snapshot: Snapshot
    history: History
    above: int = -1  # an epoch that was used, of which the updates topic may know nothing any more
    loss: str = ""  # what was passed over, by the wish of the job's owner


class Lost(NamedTuple):
    """Kafka lost records, and better snapshots than any that is covered: its owner must decide."""

    reason: str


AWAITED = "a checkpoint is missing: "  # how the reason of a job begins that waits for one


class Missing(NamedTuple):
    """The checkpoint to start from was not found: search again `SEARCH_AGAIN_S` later."""

    reason: str


class Wait(NamedTuple):
    """Let the leader in force have the lease, if it is alive."""


class SnapshotSearch:
    """One replica's searches, one after the other.

    Args:
        lease_ttl_s: How long the leader in force is waited for.
        rolls: Whether members are to hold the weights: the board need not have a snapshot then.
    """

    def __init__(self, lease_ttl_s: float, *, rolls: bool = False) -> None:
        self.rolls = rolls
        self._lease_ttl_s = lease_ttl_s
        self._waits_until: float | None = None
        self._torn_hot = set[tuple[int, int, int]]()
        self._torn = set[tuple[int, int, int]]()
        self._torn_since: tuple[ModelId, float, float] | None = None  # first and last time
        self._lost = list[tuple[Snapshot, str]]()  # not covered, the best first
        self._stored: SnapshotsFound | None = None  # the last answer of storage
        self._limit: ModelId | None = None
        self.source: Source = "hot"

    def begin(self, limit: ModelId | None = None) -> FindSnapshots:
        """Look from the beginning.

        Args:
            limit: Of nothing later than this anybody has the weights any more.
        """
        self._lost, self._limit, self._stored = [], limit, None
        return self._look("hot" if limit is None else "all")

    def leave_out(self, snapshot: Snapshot) -> None:
        """Do not choose a snapshot of the current source again: its weights cannot be read."""
        (self._torn_hot if self.source == "hot" else self._torn).add(snapshot.rank)

    def found(  # noqa: PLR0911 -- one line per answer
        self, found: SnapshotsFound, request: WantedChanged, now: float
    ) -> Chosen | FindSnapshots | Lost | Missing | Wait:
        """Judge what was found; returns what to do now.

        Args:
            found: Of the source that was asked for last.
            request: The newest of the job's owner.
            now: The time.
        """
        whole = [_in_topics_of(each, found) for each in found.snapshots]
        torn = self._torn_hot if found.source == "hot" else self._torn
        whole = [each for each in whole if each.rank not in torn]
        if self._limit is not None:
            whole = [each for each in whole if each.made.version <= self._limit.version]
        why = {each.rank: _why_lost(each, found, request) for each in whole}
        lost = [(each, why[each.rank]) for each in whole if why[each.rank]]
        choice = _choose([each for each in whole if not why[each.rank]], found.updates)
        if found.source == "hot":
            if lost or found.end == 0:  # or nobody ever led
                return self._look("all")
            if choice is None and self.rolls:
                return self._look("all")
            if choice is None or (choice[1].epoch != choice[0].by and choice[1].slices is UNSET):
                return self._look("all") if self._waited(now) else Wait()
            if choice[0].name < (choice[1].checkpoint or GENESIS):
                return self._look("all")
        if found.source == "all":
            self._lost = sorted(lost, key=lambda each: each[0].rank, reverse=True)
            self._stored = found
        if choice is None:
            return self._look("genesis")
        missing = self._missing(*choice, now)
        asked = request.after_loss > choice[1].after_loss
        if missing and not (asked and (choice[0].by >= 0 or request.from_start)):
            option = " --from-start" if choice[0].by < 0 else ""
            return Missing(
                f"{missing}; a coordinator looks again every {SEARCH_AGAIN_S:g} s; `doll job resume"
                f" --after-loss{option}` goes on without it, from version {choice[0].made.version}"
            )
        return self._judged(*choice, found.unreadable or missing, request)

    def _missing(self, snapshot: Snapshot, history: History, now: float) -> str:
        """Say which checkpoint must be found before this snapshot may be used; empty if none."""
        stored, name = self._stored, history.checkpoint
        if stored is None:
            return ""
        if name is not None and snapshot.name < name:
            instead = self._why_not(name, stored, now)
            return instead and f"{AWAITED}{name.epoch}-{name.version}, but {instead}"
        if stored.storage_failed and snapshot.made != history.head:
            return f"{AWAITED}one of version {history.head.version} or below, but {stored.storage}"
        return ""

    def _why_not(self, name: ModelId, stored: SnapshotsFound, now: float) -> str:
        """Say why a checkpoint can't be used now; empty if nobody needs to wait for it."""
        there = any(each.name == name for each in stored.snapshots)
        torn = {rank for rank in self._torn if rank[:2] == name}
        if there and not torn:
            return ""  # Kafka lost records that it contains
        why = "its weights are torn" if there else stored.torn.get(name, "")
        if not why:
            return stored.storage or "nothing is there"
        if not self._is_torn_lately(name, now):
            return ""
        self._torn -= torn  # read its weights once more at the next search
        return f"{why} ({stored.storage})"

    def _is_torn_lately(self, name: ModelId, now: float) -> bool:
        """True if this checkpoint has been torn for less than `TORN_S`, at every search."""
        known, since, last = self._torn_since or (name, now, now)
        if known != name or now > last + 3 * SEARCH_AGAIN_S:
            since = now
        self._torn_since = (name, since, now)
        return now < since + TORN_S

    def _judged(
        self, snapshot: Snapshot, history: History, unreadable: str, request: WantedChanged
    ) -> Chosen | Lost:
        """Whether better ones, uncovered or unreadable, may be passed over for this snapshot."""
        asked = request.after_loss > history.after_loss
        if unreadable and snapshot.by < 0 and not (asked and request.from_start):
            return Lost(
                f"{unreadable}: bring them back and resume the job; or `doll job resume"
                " --after-loss --from-start` begins again with version 0: all records are read and"
                " trained again, as far as their topics keep them"
            )
        better = [
            (each, why)
            for each, why in self._lost
            if each.rank > snapshot.rank and each.by >= history.judged
        ]
        if not better:
            return Chosen(snapshot, history, loss=unreadable)
        best, why = better[0]
        if asked and (snapshot.by >= 0 or request.from_start):
            return Chosen(snapshot, history, best.by, f"version {best.made.version}: {why}")
        again = best.samples - snapshot.samples
        option, begins = "", "goes on from"
        if snapshot.by < 0:
            option, begins = " --from-start", "begins again with"
        return Lost(
            f"{why}; `doll job resume --after-loss{option}` {begins} version"
            f" {snapshot.made.version} (of {best.made.version}), the best that both topics cover:"
            f" {again:,} records are read and trained again, as far as their topics keep them"
        )

    def _look(self, source: Source) -> FindSnapshots:
        self.source = source
        return FindSnapshots(source)

    def _waited(self, now: float) -> bool:
        """Whether the leader in force had its time to come back."""
        until = self._waits_until
        if until is None or now > until + LATE * self._lease_ttl_s:
            self._waits_until = until = now + self._lease_ttl_s
        return now >= until


def _choose(
    snapshots: list[Snapshot], updates: tuple[tuple[int, AuditRecord | None], ...]
) -> tuple[Snapshot, History] | None:
    """The best one to go on from: where no members hold the newest update, it has weights."""
    left = list(snapshots)
    while (choice := choose(left, updates)) is not None:
        snapshot, history = choice
        if snapshot.has_weights or history.slices is not UNSET:
            return choice
        left.remove(snapshot)
    return None


def _why_lost(snapshot: Snapshot, found: SnapshotsFound, request: WantedChanged) -> str:
    """Of which topic records are lost that it contains; empty where none are known to be.

    Claims of what updates used above its control position are known to be there once a leader has
    replayed them: where its owner says that something was lost, they may be what that was.
    """
    if snapshot.used and request.after_loss > snapshot.after_loss:
        return "the control topic lost records of updates that it contains"
    return found.lost.get(snapshot.rank, "")


def _in_topics_of(snapshot: Snapshot, found: SnapshotsFound) -> Snapshot:
    """A snapshot whose leader goes on in the topics that it was judged by, or not at all.

    They may be deleted and created anew before it leads.
    """
    return replace(
        snapshot,
        control_topic_id=found.control_topic_id or snapshot.control_topic_id,
        updates_topic_id=found.updates_topic_id or snapshot.updates_topic_id,
    )
