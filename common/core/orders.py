"""A worker's orders: which gradients to compute next (Algorithm 2), by trigger alone.

Triggers may come late, twice or from a leader that no longer leads; the ids never go back. A newer
model makes orders for older ones void: nobody waits for them any more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import TriggerId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.messages import Batch, ModelId, UpdateTrigger, WorkerId


class Compute(NamedTuple):
    """Compute one gradient over these batches at exactly these weights, to send as one message."""

    model: ModelId
    batches: tuple[Batch, ...]
    weights: bytes | None  # where they travelled inside the trigger


class Orders:
    """What one worker has been told to compute and has not begun."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._heard = TriggerId(-1, 0)
        self._queue = deque[Compute]()

    @property
    def heard(self) -> TriggerId:
        """The newest trigger taken in: where to listen on."""
        return self._heard

    def __len__(self) -> int:
        return len(self._queue)

    def hear(self, triggers: Iterable[UpdateTrigger]) -> None:
        """Take in triggers, in any order and number."""
        for trigger in triggers:
            if trigger.id <= self._heard:
                continue
            self._heard = trigger.id
            if self._queue and self._queue[0].model != trigger.model:
                self._queue.clear()
            for order in trigger.orders:
                compute = Compute(trigger.model, order.batches, trigger.weights)
                if order.worker == self._worker and not self._knows(compute):
                    self._queue.append(compute)

    def next(self) -> Compute | None:
        """Take the next order off the queue."""
        return self._queue.popleft() if self._queue else None

    def drain(self) -> tuple[Compute, ...]:
        """Take all orders off the queue: the worker is leaving."""
        orders = tuple(self._queue)
        self._queue.clear()
        return orders

    def _knows(self, compute: Compute) -> bool:
        """The same batches may be ordered again while the first order still queues here."""
        offsets = {batch.offset for queued in self._queue for batch in queued.batches}
        return all(batch.offset in offsets for batch in compute.batches)
