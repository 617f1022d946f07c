"""Versions of the weights in storage: requests to members, and the results.

    requested ──▶ all of it is stored ──▶ a leader may fall back to it; its checkpoint is published
        │
        └── a storing member is gone, or lacks it ──▶ the current version is requested instead

A member copies its part at once and retries until it is stored. Updates continue meanwhile, and an
outage of the storage delays a backup but does not cancel it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from common.core import commands as do
from common.core.messages import GENESIS, Member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from common.core.messages import ModelId, Stored
    from common.core.snapshots import Snapshot

# Interval of repeated requests, because an answer may be lost.
AGAIN_S = 1.0
# Time after which a version is given up for a newer one.
PATIENCE_S = 30.0
# Number of stored versions that are remembered.
KEPT = 3


class Backups:
    """A leader's knowledge of stored versions.

    Args:
        stored: Versions in storage, oldest first. None of them can be taken back any more.
    """

    def __init__(self, stored: Iterable[ModelId]) -> None:
        self.stored = tuple(stored)[-KEPT:]
        # The version that members were requested to store.
        self.made = GENESIS
        # True if a checkpoint's version was given up, so that a new checkpoint is needed.
        self.overdue = False
        # Member that stores each slice.
        self._from: Sequence[Member] = ()
        # Slices that are not stored yet.
        self._left = frozenset[int]()
        self._asked_at = self._said_at = 0.0  # first and last request
        # The checkpoint whose version is to be stored.
        self._checkpoint: Snapshot | None = None
        # A later checkpoint.
        self._next: Snapshot | None = None

    @property
    def waits(self) -> bool:
        """True if a checkpoint waits for its version to be stored."""
        return self._checkpoint is not None or self._next is not None

    def take(self, checkpoint: Snapshot) -> Iterator[do.PublishSnapshot]:
        """Publish a checkpoint once its version is in storage."""
        self.overdue = False
        if checkpoint.made in self.stored:
            yield self._published(checkpoint)
        elif self._left:
            self._next = checkpoint
        else:
            self._checkpoint = checkpoint

    def receive(self, said: Stored) -> Iterator[do.PublishSnapshot]:
        """Process a report of stored slices. Empty slices mean that the member lacks them."""
        if said.made != self.made or not self._left:
            return
        if said.slices is UNSET:
            self._left = frozenset()
        elif said.slices:
            self._left -= frozenset(said.slices)
        elif Member(said.worker, said.life) in self._lacking:
            self._left, self.made = frozenset(), GENESIS
            return
        if self._left:
            return
        self.stored = (*self.stored, self.made)[-KEPT:]
        if self._checkpoint is not None and self._checkpoint.made == self.made:
            checkpoint, self._checkpoint = self._checkpoint, None
            yield self._published(checkpoint)

    def ask(
        self,
        made: ModelId,
        holders: Callable[[], Sequence[Member]],
        is_gone: Callable[[Member], bool],
        now: float,
        *,
        needed: bool,
    ) -> Sequence[Member]:
        """Return the member that must store each slice of `self.made`. Empty if none must now.

        Args:
            made: The current version.
            holders: Returns, for each slice, a member that can store it.
            is_gone: Returns True if a member is dead.
            now: Current time.
            needed: True if this version must be stored even without a checkpoint.
        """
        if self._left:
            given_up = now >= self._asked_at + PATIENCE_S or any(map(is_gone, self._lacking))
            if not (given_up or (needed and self.made != made)):
                if now < self._said_at + AGAIN_S:
                    return ()
                self._said_at = now
                return self._from
            self._left = frozenset()
        asked = [each for each in (self._next, self._checkpoint) if each is not None]
        # Members hold only the current version completely, so checkpoints of others are given up.
        newest = [each for each in asked if each.made == made]
        self._checkpoint, self._next = newest[0] if newest else None, None
        self.overdue |= bool(asked) and not newest
        if made in self.stored or not (newest or needed):
            return ()
        self.made, self._from = made, tuple(holders())
        self._left = frozenset(range(len(self._from)))
        self._asked_at = self._said_at = now
        return self._from

    @property
    def _lacking(self) -> frozenset[Member]:
        """Members that have not stored all their slices."""
        return frozenset(self._from[number] for number in self._left)

    def _published(self, checkpoint: Snapshot) -> do.PublishSnapshot:
        return do.PublishSnapshot(replace(checkpoint, stored=self.stored), checkpoint=True)

    def due(self) -> float:
        """Return the time of the next request."""
        return self._said_at + AGAIN_S if self._left else float("inf")
