"""A worker's queue of orders, filled by triggers alone (Algorithm 2).

Triggers may arrive late, twice or from a former leader. Within a stream of triggers the ids
increase, except after a leader whose Lead record Kafka lost and whose epoch was above the next one.
A trigger names the oldest version at which gradients are awaited, and orders below it are void.
Each order is computed at the newest known model, which is never older than the order's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from common.core.messages import TriggerId, TriggerStream, WorkerLeaving

if TYPE_CHECKING:
    from common.core.messages import Batch, ModelId, UpdateTrigger, WorkerId


_NOTHING = TriggerId(-1, 0)


class Compute(msgspec.Struct, frozen=True, gc=False):
    """Compute one gradient over these batches at exactly these weights, to send as one message.

    In the queue, `model` is that of the order. When the order begins, it is the newest.
    """

    model: ModelId
    batches: tuple[Batch, ...]
    # The weights, if the trigger contained them.
    weights: bytes | None
    # Name of the replica that sent the order.
    reply_to: str = ""
    # Rate of the local steps between the batches.
    local_rate: float = 0.0
    # True if the gradient must include its squared norm.
    squared: bool = False


class Assignments:
    """Orders of one worker, and the one in progress.

    Args:
        worker: Name of the worker.
        life: Token of this process. Orders for another process with the name are skipped.
    """

    def __init__(self, worker: WorkerId, life: str = "") -> None:
        self._worker = worker
        self._life = life
        self._stream = TriggerStream()
        # The newest trigger received, after which the worker continues to listen.
        self.last_trigger = _NOTHING
        # Model of the newest trigger.
        self._model: ModelId | None = None
        # Weights in the newest trigger.
        self._weights: bytes | None = None
        # Oldest version at which a gradient is awaited, by the newest trigger.
        self._awaits = 0
        # Name of the replica that posted the newest trigger. Empty if there was none.
        self.reply_to = ""
        self._queue = deque[Compute]()
        self._under_way: Compute | None = None
        self._left = False

    @property
    def stream(self) -> str:
        """The stream of triggers that the worker listens to."""
        return self._stream.name

    def __len__(self) -> int:
        return len(self._queue)

    def listen(self, stream: TriggerStream) -> None:
        """Listen to a leader's triggers, and drop those of another stream or a later leader.

        A leader's first triggers may arrive before its status, so a trigger proves a later leader
        as well as a status does.
        """
        latest = max(self._stream.epoch, self.last_trigger.epoch)
        if stream.name != self._stream.name or (stream != self._stream and stream.epoch < latest):
            self.last_trigger = _NOTHING
            self._queue.clear()
        self._stream = stream

    def believed(
        self, triggers: Sequence[UpdateTrigger], slices: int | UnsetType
    ) -> Sequence[UpdateTrigger]:
        """Return the triggers without the last ones that need confirmation by a leader's status.

        A worker drops its weights if the last trigger says that others hold them, and such a
        trigger may be forged. So a trigger of an unknown leader that changes the holders waits
        until that leader's status arrives. Triggers are not held up by a forged one, because the
        real leader posts after it, or in another stream.

        Args:
            triggers: Triggers in order.
            slices: Current layout of the weights, as in `UpdateTrigger.slices`.
        """
        count = len(triggers)
        while count and not (
            triggers[count - 1].slices == slices
            or triggers[count - 1].id.epoch == self._stream.epoch
        ):
            count -= 1
        return triggers[:count]

    def receive(self, triggers: Iterable[UpdateTrigger]) -> None:
        """Process triggers in any order and number."""
        for trigger in triggers:
            if trigger.id <= self.last_trigger:
                continue
            self.last_trigger = trigger.id
            self._model, self._weights = trigger.model, trigger.weights
            self._awaits = trigger.model.version if trigger.awaits is UNSET else trigger.awaits
            self.reply_to = trigger.reply_to
            if self._queue:
                self._queue = deque(filter(self._is_awaited, self._queue))
            for order in trigger.orders:
                if order.worker == self._worker and order.life in ("", self._life):
                    model, batches, to = trigger.model, order.batches, trigger.reply_to
                    self._add(Compute(model, batches, None, to, order.local_rate, order.squared))

    def next(self) -> Compute | None:
        """Begin the next order and return it. Return None after `leave`."""
        self._under_way = None
        if self._queue and self._model is not None and not self._left:
            order = self._queue.popleft()
            if order.model is not self._model or self._weights is not None:
                order = replace(order, model=self._model, weights=self._weights)
            self._under_way = order
        return self._under_way

    def done(self) -> None:
        """Record that the order in progress has been answered."""
        self._under_way = None

    def leave(self, *, finish: bool = True) -> WorkerLeaving | None:
        """Drop all orders that have not begun. Return a message if the worker knows a leader.

        Args:
            finish: True if the order in progress will still be answered.
        """
        self._left = True
        self._queue.clear()
        if self._model is None:
            return None
        batches = self._under_way.batches if self._under_way is not None and finish else ()
        return WorkerLeaving(self._worker, self._model, tuple(batch.offset for batch in batches))

    def _is_awaited(self, order: Compute) -> bool:
        """True if the leader may still wait for the order."""
        epoch, version = order.model
        return self._model is not None and epoch == self._model.epoch and version >= self._awaits

    def _add(self, compute: Compute) -> None:
        """Queue an order, or update the queued orders that contain its batches."""
        if not self._knows(compute):
            self._queue.append(compute)
            return
        again = {batch.offset for batch in compute.batches}
        self._queue = deque(
            replace(order, model=compute.model)
            if any(batch.offset in again for batch in order.batches)
            else order
            for order in self._queue
        )

    def _knows(self, compute: Compute) -> bool:
        """True if unanswered orders contain all batches of this order.

        Without this check a slow fleet would compute everything twice, for ever: an overdue order
        goes to another worker, which is then late for the next round. If the first answer is lost,
        the leader sends the order again.
        """
        if not self._queue and self._under_way is None:
            return False
        awaited = [*self._queue]
        if self._under_way is not None and self._is_awaited(self._under_way):
            awaited.append(self._under_way)
        alike = [order for order in awaited if order.local_rate == compute.local_rate]
        offsets = {batch.offset for order in alike for batch in order.batches}
        return all(batch.offset in offsets for batch in compute.batches)
