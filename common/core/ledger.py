"""Who owns which records: a pure fold over the control topic.

For each partition the ledger keeps one number, `claimed`, below which everything belongs to
exactly one accepted batch or has expired. Nothing else may influence a decision: not the time, not
who asks, not what happened to earlier batches. So every replay, on every machine, for ever, decides
the same; and duplicates, zombies, double owners after a rebalance are all one case: they change
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from common.core.messages import Batch, BatchReady

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.core.messages import Claim, Positions
    from common.core.spans import Partition


class Decision(msgspec.Struct, frozen=True):
    """What became of one control record."""

    accepted: bool
    reason: str  # why not; empty where accepted
    batch: Batch | None = None  # what now waits for an update: nothing where it expired or is empty


class Ledger:
    """The fold: feed it every record of the control topic, in order, each offset once.

    Args:
        claimed: Where every partition of the job begins, or stood at `position`.
        position: Control offset of the next record to decide.
    """

    def __init__(self, claimed: Mapping[Partition, int], position: int = 0) -> None:
        self._claimed = dict(claimed)
        self._position = position
        self.accepted = 0  # batches, by this ledger
        self.refused = 0  # claims

    @property
    def position(self) -> int:
        """Every control record below this offset has been decided."""
        return self._position

    @property
    def claimed(self) -> Positions:
        """A copy of the frontier of accepted records, by partition."""
        return dict(self._claimed)

    def decide(self, offset: int, claim: Claim | None) -> Decision:
        """Decide the control record at `offset`; None stands for one that does not parse.

        Raises:
            ValueError: If `offset` was decided before: a caller that replays must start afresh.
        """
        if offset < self._position:
            raise ValueError(
                f"control record {offset} comes after {self._position - 1} was decided"
            )
        self._position = offset + 1
        decision = self._decided(offset, claim)
        self.accepted += decision.batch is not None
        self.refused += not decision.accepted
        return decision

    def _decided(self, offset: int, claim: Claim | None) -> Decision:
        if claim is None:
            return Decision(accepted=False, reason="does not parse")
        ends = [(span.place, span.end) for span in claim.address]
        for (place, _), span in zip(ends, claim.address, strict=True):
            claimed = self._claimed.get(place)
            if claimed is None:
                return Decision(accepted=False, reason=f"{place} is not of this job")
            if claimed != span.start:
                return Decision(accepted=False, reason=f"{span} starts elsewhere than {claimed}")
        self._claimed.update(ends)
        if not isinstance(claim, BatchReady) or claim.samples == 0:
            return Decision(accepted=True, reason="")
        batch = Batch(offset, claim.worker, claim.address, claim.samples, claim.skipped)
        return Decision(accepted=True, reason="", batch=batch)
