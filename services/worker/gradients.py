"""A worker's gradient thread: receive triggers, compute at the newest model, send (Algorithm 2)."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from common.core.messages import Failed, Gradient
from common.core.order_queue import Assignments
from common.errors import CorruptError, UnavailableError, WireError
from common.wire.vectors import decode_sparse, encoded_bytes
from services.worker.compute import NoGradientError
from services.worker.traffic import TrafficCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import UnsetType

    from common.core.messages import (
        Batch,
        ModelId,
        Reply,
        UpdateTrigger,
        WorkerId,
    )
    from common.core.order_queue import Compute
    from services.worker.compute import OrderComputer, Shell

# Time after which the leader may have assigned the batch to another worker as well.
# Checking for that costs 0.2 ms.
SLOW_S = 0.1
# Longest wait for a trigger, and so the longest delay before the end of the job is noticed.
LISTEN_S = 0.25


class GradientLoop:
    """Carries out this worker's orders, one at a time.

    Args:
        worker: Name of this worker.
        compute: Computes the orders.
        shell: Parts of the process that the thread uses.
        digest: Digest of the model's layout. Triggers for another model are ignored.
    """

    def __init__(
        self,
        worker: WorkerId,
        compute: OrderComputer,
        shell: Shell,
        *,
        digest: str = "",
    ) -> None:
        self._id = worker
        self._digest = digest
        self._compute = compute
        self._board, self._log = shell.board, shell.logger
        self._measures, self._traces = shell.measures, shell.traces
        self._watchdog, self._wait = shell.watchdog, shell.wait
        self._round_began, self._stream = shell.round_began, shell.stream
        self._orders = Assignments(worker, shell.life)
        # Guards `_orders`.
        self._lock = threading.Lock()
        self._loaded: ModelId | None = None
        # Model that was missing in Redis, as reported to the leader.
        self._missing: ModelId | None = None
        self._board_outage, self._push = shell.outage, shell.push
        self._times = compute.times
        self._count = TrafficCounter(shell.measures)
        # When triggers were last received, in seconds since 1970.
        self._received_s = 0.0
        # Slices according to the leader that was last followed.
        self.slices: int | UnsetType = UNSET

    def turn(self) -> None:
        """Receive new triggers, then carry out one order."""
        self._watchdog.beat()
        self._listen(0.0 if len(self._orders) else LISTEN_S)
        received_s = self._received_s
        with self._lock:
            compute = self._orders.next()
        if compute is not None:
            load = partial(self._load, compute)
            answer = self._compute.answer(compute, load)
            reply: Reply
            if isinstance(answer, Failed):
                reply = answer
            else:
                vector = answer.found.sparse
                reply = Gradient(self._id, **answer.fields(compute), vector=vector)
            if isinstance(reply, Gradient) and reply.seconds > SLOW_S:
                # If the leader asked again meanwhile, this reply is the answer to both.
                self._listen(0.0)
            sent = self._send(reply, compute.reply_to)
            with self._lock:
                self._orders.done()
            self._traces.answered(compute, received_s, reply, sent=sent)

    def _listen(self, timeout_s: float) -> None:
        with self._lock:
            self._orders.listen(self._stream())
        try:
            triggers = self._board.triggers(
                self._orders.last_trigger, timeout_s, self._orders.stream
            )
            # Redis may answer reads and refuse writes.
            self._board_outage.quiet()
            self.slices = triggers[-1].slices if triggers else self.slices
            if any(trigger.digest not in (UNSET, self._digest) for trigger in triggers):
                triggers = [self._understood(trigger) for trigger in triggers]
            # Other triggers are for a group member.
            if triggers and self.slices is UNSET:
                self._received_s = time()
                for trigger in triggers:
                    size = len(trigger.weights or b"") + len(trigger.changes or b"")
                    self._count.moved(received=size)
                    if trigger.continues(self._loaded):
                        self._change(trigger)
                    elif trigger.model == self._missing:
                        self._catch_up(trigger.model)
                with self._lock:
                    self._orders.receive(triggers)
                self._round_began(triggers[-1].id.epoch, triggers[-1].unsettled)
        except UnavailableError as error:
            self._board_outage.met(error)
            self._wait(LISTEN_S)

    def _understood(self, trigger: UpdateTrigger) -> UpdateTrigger:
        """Remove a trigger's orders and changes if it is for another model.

        A previous process with this worker's name may have had the leader's model.
        """
        if trigger.digest in (UNSET, self._digest):
            return trigger
        return replace(trigger, orders=(), since=UNSET, changes=UNSET)

    def leave(self, *, finish: bool = True) -> None:
        """Start no further order, and inform the leader. Safe to call from any thread.

        Args:
            finish: True if there is time to finish the order under way.
        """
        with self._lock:
            worker_leaving, reply_to = self._orders.leave(finish=finish), self._orders.reply_to
        if worker_leaving is not None:
            self._send(worker_leaving, reply_to)

    def close(self) -> None:
        """Close the reader."""
        self._compute.close()
        self._times.log(self._log)

    def _send(self, reply: Reply, to: str) -> bool:
        """Send a reply. If it is lost, the leader asks again after the deadline of its round."""
        started = perf_counter()
        size = 0
        if isinstance(reply, Gradient):
            size, reply = encoded_bytes(reply.vector), replace(reply, traffic=self._count.traffic)
        if not self._push(reply, to):
            return False
        self._count.moved(sent=size)
        took_s = self._times.add("push", started)
        if isinstance(reply, Gradient):
            self._measures.stage_s.labels("push").observe(took_s)
        return True

    def _change(self, trigger: UpdateTrigger) -> None:
        """Change the loaded model to the trigger's. After an error it is fetched if needed."""
        started = perf_counter()
        self._loaded = None
        try:
            self._compute.computer.write(decode_sparse(memoryview(trigger.changes or b"")))
        except (WireError, CorruptError) as error:
            self._log.warning("changes_refused", reason=str(error))
            return
        self._loaded = trigger.model
        self._measures.stage_s.labels("fetch").observe(self._times.add("fetch", started))

    def _catch_up(self, model: ModelId) -> None:
        """Fetch the model that was missing, after the leader has put it completely.

        Another worker has this worker's order by now. But the next triggers contain only changes,
        which this worker can apply only if it has the model before them.
        """
        self._missing = None
        with suppress(NoGradientError):
            self._fetch(model, ())

    def _load(self, compute: Compute) -> None:
        """Load the model of an order unless it is loaded already."""
        if self._loaded == compute.model:
            return
        started = perf_counter()
        if compute.weights is None:
            self._fetch(compute.model, compute.batches)
        else:
            self._take(compute.model, compute.weights, compute.batches)
        self._measures.stage_s.labels("fetch").observe(self._times.add("fetch", started))

    def _fetch(self, model: ModelId, batches: Sequence[Batch]) -> None:
        try:
            weights = self._board.get_model(model)
        except UnavailableError as error:
            raise NoGradientError("model_missing", batches, str(error)) from error
        if weights is None:
            self._missing = model
            raise NoGradientError(
                "model_missing", batches, "Redis does not have this version of the model"
            )
        self._count.moved(received=len(weights))
        self._take(model, weights, batches)

    def _take(self, model: ModelId, weights: bytes, batches: Sequence[Batch]) -> None:
        self._loaded = None
        try:
            self._compute.computer.load(weights)
        except CorruptError as error:
            raise NoGradientError("model_missing", batches, str(error)) from error
        self._loaded = model
