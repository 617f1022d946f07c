"""Claims that a new leader reads again, and their batches that must not wait again.

A leader starts from a snapshot and replays the claims above its control position. If members hold
the weights, updates after the snapshot have used some of these batches. Others are quarantined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.core.history import History
    from common.core.messages import Batch
    from common.core.snapshots import Snapshot

CLAIMS_LOST = (
    "the control topic lost records that Kafka had acknowledged: the batch at offset {:,}, which"
    " an update contains, is missing; `doll job resume --after-loss` continues from the best"
    " snapshot that the control and the updates topic still cover, and trains on the records since"
    " then again"
)


class ReplayFilter:
    """Batches that are in the weights already, or quarantined, by control offset.

    Attributes:
        error: Reason why a person must decide how to continue. Usually empty.

    Args:
        snapshot: The snapshot that the leader starts from.
        history: The updates topic since that snapshot.
    """

    def __init__(self, snapshot: Snapshot, history: History) -> None:
        self._history = history
        self._used = {batch.offset: batch for batch in snapshot.used or ()}
        # No round begins before the claim at this offset is replayed.
        self.last_used = max(self._used, default=-1)
        self.error = ""
        # An operator requeued these batches, and no update has used them yet.
        self.requeued = {o: b for o, b in history.requeued.items() if o not in self._used}
        # Quarantined batches. Some of their claims are above the snapshot's control position and
        # still have to be replayed. Snapshots that are published before that must name these
        # batches, because the next leader's history begins after their quarantine.
        self._quarantined = {batch.offset: batch for batch in snapshot.quarantined}
        self._quarantined |= {o: record.batch for o, record in history.quarantined.items()}
        for offset in self.requeued:
            self._quarantined.pop(offset, None)

    @property
    def settled(self) -> set[int]:
        """Batches that are quarantined or requeued, and no longer suspected."""
        return self._quarantined.keys() | self.requeued.keys()

    def waiting(self, snapshot: Snapshot) -> list[Batch]:
        """Return the batches that wait when the leader begins."""
        waiting = {batch.offset: batch for batch in snapshot.waiting}
        # Requeued batches wait, too, unless their claim is still to be replayed.
        waiting |= {o: b for o, b in self.requeued.items() if o < snapshot.control_position}
        return [b for b in waiting.values() if not self._is_quarantined(b)]

    def admits(self, offset: int, batch: Batch | None) -> bool:
        """Return True if the batch of a claim must wait. Detects lost claims.

        Args:
            offset: Control offset of the claim.
            batch: The batch in the ledger's decision, or None.
        """
        quarantined = self._quarantined.get(offset)
        if quarantined is not None and quarantined != batch:
            # The control topic lost its tail, and has another claim at this offset now.
            del self._quarantined[offset]
            self._history.forget_batch(offset)
        used = False
        if self._used:
            used = batch is not None and self._used.get(offset) == batch.without_skipped()
            if offset in self._used and not used:
                self.error = CLAIMS_LOST.format(offset)
        return batch is not None and not (used or self._is_quarantined(batch))

    def why_lost(self, position: int, control_end: int) -> str:
        """Return which used claim was lost with the tail of the control topic. Usually empty."""
        lost = max(position, control_end) <= self.last_used
        return CLAIMS_LOST.format(self.last_used) if lost else ""

    def requeue(self, offset: int) -> None:
        """Process a requeue by an operator."""
        self._quarantined.pop(offset, None)

    def quarantined(self, position: int) -> tuple[Batch, ...]:
        """Return quarantined batches whose claims are still to be replayed, oldest first."""
        return tuple(self._quarantined[o] for o in sorted(self._quarantined) if o >= position)

    def used(self, position: int) -> tuple[Batch, ...]:
        """Return used batches whose claims are still to be replayed."""
        return tuple(batch for offset, batch in self._used.items() if offset >= position)

    def _is_quarantined(self, batch: Batch) -> bool:
        return self._quarantined.get(batch.offset) == batch
