"""Claims that a new leader reads a second time: which of their batches must not wait again.

A leader begins with a snapshot, and replays the claims above the snapshot's control position.
If members hold the weights, updates after the snapshot have used some of these batches; others are
quarantined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.core.history import History
    from common.core.messages import Batch
    from common.core.snapshots import Snapshot

CLAIMS_LOST = (
    "the control topic lost records that Kafka had acknowledged: the batch at {:,}, of which an"
    " update was made, is not there any more; `doll job resume --after-loss` goes on from the best"
    " snapshot that the control and the updates topic still cover: what was learned since is read"
    " and learned again"
)


class ReplayFilter:
    """Batches that are in the weights already, or quarantined, by control offset.

    Attributes:
        error: Why a person must decide how to go on; empty while nothing is wrong.

    Args:
        snapshot: What the leader starts from.
        history: What the updates topic says since that snapshot.
    """

    def __init__(self, snapshot: Snapshot, history: History) -> None:
        self._history = history
        self._used = {batch.offset: batch for batch in snapshot.used or ()}
        # No round begins before the claim at this offset is replayed.
        self.last_used = max(self._used, default=-1)
        self.error = ""
        # An operator took some batches back before they were used.
        self.requeued = {o: b for o, b in history.requeued.items() if o not in self._used}
        # Their claims may lie above the snapshot's control position and be replayed only now. What
        # this leader publishes before that must name them: its successor's history begins later.
        self._quarantined = {batch.offset: batch for batch in snapshot.quarantined}
        self._quarantined |= {o: record.batch for o, record in history.quarantined.items()}
        for offset in self.requeued:
            self._quarantined.pop(offset, None)

    @property
    def settled(self) -> set[int]:
        """Batches that are quarantined, or were taken back: nobody suspects them any more."""
        return self._quarantined.keys() | self.requeued.keys()

    def waiting(self, snapshot: Snapshot) -> list[Batch]:
        """Return the batches that wait when the leader begins."""
        waiting = {batch.offset: batch for batch in snapshot.waiting}
        # What was taken back since waits too, unless its claim is still to be replayed.
        waiting |= {o: b for o, b in self.requeued.items() if o < snapshot.control_position}
        return [b for b in waiting.values() if not self._is_quarantined(b)]

    def admits(self, offset: int, batch: Batch | None) -> bool:
        """Return True if the batch of a claim is to wait; notice claims that were lost.

        Args:
            offset: Of the claim.
            batch: What the ledger made of it; None if there is no batch.
        """
        quarantined = self._quarantined.get(offset)
        if quarantined is not None and quarantined != batch:
            # The control topic lost its tail, and another claim stands there now.
            del self._quarantined[offset]
            self._history.forget_batch(offset)
        used = False
        if self._used:
            used = batch is not None and self._used.get(offset) == batch.without_skipped()
            if offset in self._used and not used:
                self.error = CLAIMS_LOST.format(offset)
        return batch is not None and not (used or self._is_quarantined(batch))

    def why_lost(self, position: int, control_end: int) -> str:
        """Say which claim of a used batch was lost with the control topic's tail; mostly empty."""
        lost = max(position, control_end) <= self.last_used
        return CLAIMS_LOST.format(self.last_used) if lost else ""

    def requeue(self, offset: int) -> None:
        """An operator takes a batch out of quarantine."""
        self._quarantined.pop(offset, None)

    def quarantined(self, position: int) -> tuple[Batch, ...]:
        """Return quarantined batches whose claims are still to be replayed, oldest first."""
        return tuple(self._quarantined[o] for o in sorted(self._quarantined) if o >= position)

    def used(self, position: int) -> tuple[Batch, ...]:
        """Return used batches whose claims are still to be replayed."""
        return tuple(batch for offset, batch in self._used.items() if offset >= position)

    def _is_quarantined(self, batch: Batch) -> bool:
        return self._quarantined.get(batch.offset) == batch
