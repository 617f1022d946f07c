"""Search for the snapshot that a candidate starts from, in the likeliest and cheapest place first.

    hot       on the board: of the leader in force, unless the board was wiped
    all       checkpoints, too: some minutes old, and slow to read
    genesis   version 0, built from the job's specification

A snapshot is covered if the control topic and the updates topic still have all records that it
contains. After Kafka lost acknowledged records, an uncovered snapshot may contain decisions that no
log can prove, so no part of it is trusted. If it is better than any covered snapshot, the job is
held until its owner permits a start from the best covered one. The Lead that does so settles the
matter for all earlier snapshots.

A leader publishes a hot snapshot as soon as it leads. If the board has none of the leader in force,
the board was probably wiped, and that leader may still be alive with its state. So the candidate
leaves the lease to it for one lifetime, and uses older snapshots only if it does not come back. If
members hold the weights, this wait is unnecessary: a snapshot of any age is rolled forward to the
newest update.

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

# Number of lease lifetimes after which an earlier wait no longer counts.
LATE = 5
# Interval of searches for a missing checkpoint. A list costs one request to the storage.
SEARCH_AGAIN_S = 10.0
# A torn checkpoint is read again for this time before an older one is used. Stores show all of an
# object within seconds of its write.
TORN_S = 60.0


class Chosen(NamedTuple):
    """The snapshot to start from."""

    snapshot: Snapshot
    history: History
    # An epoch that was used, although the updates topic may have lost it.
    above: int = -1
    # Description of the better snapshots that the owner agreed to ignore.
    loss: str = ""


class Lost(NamedTuple):
    """Kafka lost records that the best snapshots contain. The owner must decide."""

    reason: str


# Start of the reason shown for a job that waits for a checkpoint.
AWAITED = "a checkpoint is missing: "


class Missing(NamedTuple):
    """The checkpoint to start from was not found. Search again after `SEARCH_AGAIN_S`."""

    reason: str


class Wait(NamedTuple):
    """Leave the lease to the leader in force, which may be alive."""


class SnapshotSearch:
    """Consecutive searches of one replica.

    Args:
        lease_ttl_s: Time to wait for the leader in force.
        rolls: True if members are to hold the weights. The board need not have a snapshot then.
    """

    def __init__(self, lease_ttl_s: float, *, rolls: bool = False) -> None:
        self.rolls = rolls
        self._lease_ttl_s = lease_ttl_s
        self._waits_until: float | None = None
        self._torn_hot = set[tuple[int, int, int]]()
        self._torn = set[tuple[int, int, int]]()
        # A torn checkpoint, and the first and last time that it was seen.
        self._torn_since: tuple[ModelId, float, float] | None = None
        # Uncovered snapshots, best first.
        self._lost = list[tuple[Snapshot, str]]()
        # Last answer of the storage.
        self._stored: SnapshotsFound | None = None
        self._limit: ModelId | None = None
        self.source: Source = "hot"

    def begin(self, limit: ModelId | None = None) -> FindSnapshots:
        """Begin a search.

        Args:
            limit: Newest version whose weights still exist. None if there is no limit.
        """
        self._lost, self._limit, self._stored = [], limit, None
        return self._look("hot" if limit is None else "all")

    def leave_out(self, snapshot: Snapshot) -> None:
        """Exclude a snapshot of the current source, because its weights cannot be read."""
        (self._torn_hot if self.source == "hot" else self._torn).add(snapshot.rank)

    def found(  # noqa: PLR0911 -- one line per answer
        self, found: SnapshotsFound, request: WantedChanged, now: float
    ) -> Chosen | FindSnapshots | Lost | Missing | Wait:
        """Evaluate the answer of a source and return the next step.

        Args:
            found: Answer of the current source.
            request: Newest request of the job's owner.
            now: Current time.
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
            # An empty updates topic means that there was no leader before.
            if lost or found.end == 0:
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
                f"{missing}; a coordinator searches again every {SEARCH_AGAIN_S:g} s; `doll job"
                f" resume --after-loss{option}` continues without it, from version"
                f" {choice[0].made.version}"
            )
        return self._judged(*choice, found.unreadable or missing, request)

    def _missing(self, snapshot: Snapshot, history: History, now: float) -> str:
        """Return which missing checkpoint forbids the use of this snapshot. Empty if none."""
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
        """Return why a checkpoint cannot be used now. Empty if the job need not wait for it."""
        there = any(each.name == name for each in stored.snapshots)
        torn = {rank for rank in self._torn if rank[:2] == name}
        if there and not torn:
            # The checkpoint is readable, but not covered: Kafka lost records that it contains.
            return ""
        why = "its weights are damaged" if there else stored.torn.get(name, "")
        if not why:
            return stored.storage or "nothing was found"
        if not self._is_torn_lately(name, now):
            return ""
        # The next search reads its weights again.
        self._torn -= torn
        return f"{why} ({stored.storage})"

    def _is_torn_lately(self, name: ModelId, now: float) -> bool:
        """True if this checkpoint was torn in every search, but for less than `TORN_S`."""
        known, since, last = self._torn_since or (name, now, now)
        if known != name or now > last + 3 * SEARCH_AGAIN_S:
            since = now
        self._torn_since = (name, since, now)
        return now < since + TORN_S

    def _judged(
        self, snapshot: Snapshot, history: History, unreadable: str, request: WantedChanged
    ) -> Chosen | Lost:
        """Choose this snapshot if better ones, uncovered or unreadable, may be ignored."""
        asked = request.after_loss > history.after_loss
        if unreadable and snapshot.by < 0 and not (asked and request.from_start):
            return Lost(
                f"{unreadable}: restore them and resume the job; or `doll job resume --after-loss"
                " --from-start` starts again from version 0: all records that the topics still"
                " have are trained again"
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
        option, begins = "", "continues from"
        if snapshot.by < 0:
            option, begins = " --from-start", "starts again from"
        return Lost(
            f"{why}; `doll job resume --after-loss{option}` {begins} version"
            f" {snapshot.made.version} (instead of {best.made.version}), the best that both topics"
            f" cover: {again:,} records are trained again if the topics still have them"
        )

    def _look(self, source: Source) -> FindSnapshots:
        self.source = source
        return FindSnapshots(source)

    def _waited(self, now: float) -> bool:
        """True if the leader in force has had time to come back."""
        until = self._waits_until
        if until is None or now > until + LATE * self._lease_ttl_s:
            self._waits_until = until = now + self._lease_ttl_s
        return now >= until


def _choose(
    snapshots: list[Snapshot], updates: tuple[tuple[int, AuditRecord | None], ...]
) -> tuple[Snapshot, History] | None:
    """Return the best usable snapshot. It needs weights unless members hold the newest update."""
    left = list(snapshots)
    while (choice := choose(left, updates)) is not None:
        snapshot, history = choice
        if snapshot.has_weights or history.slices is not UNSET:
            return choice
        left.remove(snapshot)
    return None


def _why_lost(snapshot: Snapshot, found: SnapshotsFound, request: WantedChanged) -> str:
    """Return the lost records that a snapshot contains. Empty if none are known.

    Updates above the snapshot's control position use claims that are known to exist only after a
    leader has replayed them. If the owner reports a loss, these claims may be what was lost.
    """
    if snapshot.used and request.after_loss > snapshot.after_loss:
        return "the control topic lost records of updates that the snapshot contains"
    return found.lost.get(snapshot.rank, "")


def _in_topics_of(snapshot: Snapshot, found: SnapshotsFound) -> Snapshot:
    """Tie a snapshot to the topics that it was evaluated with.

    They may be recreated before its candidate leads. The candidate then does not lead in the new
    topics.
    """
    return replace(
        snapshot,
        control_topic_id=found.control_topic_id or snapshot.control_topic_id,
        updates_topic_id=found.updates_topic_id or snapshot.updates_topic_id,
    )
