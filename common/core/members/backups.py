"""Versions of the weights in storage: which one members are asked to store, and what came of it.

    asked ──▶ all of it is stored ──▶ what a leader may fall back to; its checkpoint is published
      │
      └── who was to store it is gone, or lacks it ──▶ the version in force then is asked for

Who is asked copies at once what it is to store, and tries until that is done: so updates go on
meanwhile, and a storage that is away for a while delays a backup, and does not cost it.
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

AGAIN_S = 1.0  # after which they are asked once more: what was said may be lost
PATIENCE_S = 30.0  # after which a version is given up for a newer one
KEPT = 3  # newest versions that are remembered to be in storage


class Backups:
    """What a leader knows of them.

    Args:
        stored: Versions that are in storage, oldest first; none of them is taken back any more.
    """

    def __init__(self, stored: Iterable[ModelId]) -> None:
        self.stored = tuple(stored)[-KEPT:]
        self.made = GENESIS  # the version that members were asked to store
        self.overdue = False  # a checkpoint's version was given up: another one is to be taken
        self._from: Sequence[Member] = ()  # who was to store which slice of it
        self._left = frozenset[int]()  # slices of it that are not stored yet
        self._asked_at = self._said_at = 0.0  # first; last
        self._checkpoint: Snapshot | None = None  # whose version is to be stored
        self._next: Snapshot | None = None  # a later one

    @property
    def waits(self) -> bool:
        """Whether a checkpoint waits for its version to be stored."""
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
        """A member has stored something; or lacks what it was asked for, where that is empty."""
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
        """Whom to ask now, by slice, for `self.made`; nobody, where all were asked.

        Args:
            made: The version in force.
            holders: By slice who can store it.
            is_gone: Whether a member lives no more.
            now: The time.
            needed: Whether this version must be stored even without a checkpoint.
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
        newest = [each for each in asked if each.made == made]  # of others nobody holds all
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
        """Who has not stored all that it was asked for."""
        return frozenset(self._from[number] for number in self._left)

    def _published(self, checkpoint: Snapshot) -> do.PublishSnapshot:
        return do.PublishSnapshot(replace(checkpoint, stored=self.stored), checkpoint=True)

    def due(self) -> float:
        """When it wants to ask again."""
        return self._said_at + AGAIN_S if self._left else float("inf")
