"""A worker's orders: which gradients to compute next (Algorithm 2), by trigger alone.

Triggers may come late, twice or from a leader that no longer leads; within a stream of triggers the
ids never go back. They do after a leader whose Lead record Kafka lost, if its epoch was above that
of the next one. A trigger says at which versions gradients are awaited still: orders below are
void. What is computed next is computed at the newest model heard of, never older than its order's.
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

    While it waits, the model is that of its order; when it is begun, the newest.
    """

    model: ModelId
    batches: tuple[Batch, ...]
    weights: bytes | None  # where they travelled inside the trigger
    reply_to: str = ""  # the replica that asked
    local_rate: float = 0.0  # at which a copy of the weights is moved between the batches
    squared: bool = False  # the gradient is to say how large it is


class Assignments:
    """What one worker has been told to compute, and the one of these that is under way."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._stream = TriggerStream()
        self.last_trigger = _NOTHING  # the newest taken in: where to listen on
        self._model: ModelId | None = None  # of the newest trigger
        self._weights: bytes | None = None  # likewise
        self._awaits = 0  # likewise, the oldest version at which a gradient is awaited
        self.reply_to = ""  # the replica that posted it; empty where none was heard of
        self._queue = deque[Compute]()
        self._under_way: Compute | None = None
        self._left = False

    @property
    def stream(self) -> str:
        """The stream of triggers that it listens to."""
        return self._stream.name

    def __len__(self) -> int:
        return len(self._queue)

    def listen(self, stream: TriggerStream) -> None:
        """Listen to a leader's triggers; nothing of another stream, or a later one, counts.

        A leader's first triggers may be heard before its status is seen: what was heard is as good
        a witness of a later leader as the status before.
        """
        latest = max(self._stream.epoch, self.last_trigger.epoch)
        if stream.name != self._stream.name or (stream != self._stream and stream.epoch < latest):
            self.last_trigger = _NOTHING
            self._queue.clear()
        self._stream = stream

    def believed(
        self, triggers: Sequence[UpdateTrigger], slices: int | UnsetType
    ) -> Sequence[UpdateTrigger]:
        """All but the last ones by which others hold the weights, of a leader that is not known.

        A worker lets go of what it holds where the last trigger says that others hold the weights,
        and one may be forged. So such a one waits until the status of its leader is seen: another
        leader posts after it, or in another stream.

        Args:
            triggers: In their order.
            slices: Who held the weights so far, as `UpdateTrigger.slices` has it.
        """
        count = len(triggers)
        while count and not (
            triggers[count - 1].slices == slices
            or triggers[count - 1].id.epoch == self._stream.epoch
        ):
            count -= 1
        return triggers[:count]

    def receive(self, triggers: Iterable[UpdateTrigger]) -> None:
        """Take in triggers, in any order and number."""
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
                if order.worker == self._worker:
                    model, batches, to = trigger.model, order.batches, trigger.reply_to
                    self._add(Compute(model, batches, None, to, order.local_rate, order.squared))

    def next(self) -> Compute | None:
        """Begin the next order; none is begun after the worker said that it leaves."""
        self._under_way = None
        if self._queue and self._model is not None and not self._left:
            order = self._queue.popleft()
            if order.model is not self._model or self._weights is not None:
                order = replace(order, model=self._model, weights=self._weights)
            self._under_way = order
        return self._under_way

    def done(self) -> None:
        """The order under way has its answer."""
        self._under_way = None

    def leave(self, *, finish: bool = True) -> WorkerLeaving | None:
        """Give back what is not begun; returns what to tell the leader, if one was ever heard.

        Args:
            finish: Whether the order under way will still be answered.
        """
        self._left = True
        self._queue.clear()
        if self._model is None:
            return None
        batches = self._under_way.batches if self._under_way is not None and finish else ()
        return WorkerLeaving(self._worker, self._model, tuple(batch.offset for batch in batches))

    def _is_awaited(self, order: Compute) -> bool:
        """Whether the leader may still wait for it."""
        epoch, version = order.model
        return self._model is not None and epoch == self._model.epoch and version >= self._awaits

    def _add(self, compute: Compute) -> None:
        """Queue an order, or renew those that its batches wait in already."""
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
        """The same batches may be ordered again while the first order is not answered yet.

        Without this a slow fleet would compute everything twice, for ever: an order overdue is
        asked of somebody once more, who is then late for the next round. Should the first answer
        get lost, the leader asks again.
        """
        if not self._queue and self._under_way is None:
            return False
        awaited = [*self._queue]
        if self._under_way is not None and self._is_awaited(self._under_way):
            awaited.append(self._under_way)
        alike = [order for order in awaited if order.local_rate == compute.local_rate]
        offsets = {batch.offset for order in alike for batch in order.batches}
        return all(batch.offset in offsets for batch in compute.batches)
