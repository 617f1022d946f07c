"""Thread that answers all waiting requests together, in one pass of the network.

More requests arrive during a pass. So the load determines the size of a batch, and no request waits
for a batch to fill. A request that cannot be answered does not affect the others.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.data.fields import Columns, concatenate
from common.errors import DollError, UnavailableError

if TYPE_CHECKING:
    from common.telemetry.metrics.serve import ServeMetrics
    from common.telemetry.metrics.serving import Watchdog
    from services.serve.served_model import Predicted, ServedModel

ROWS = 256
# Most waiting requests; further ones are refused.
MOST_WAITING = 1000
_BEAT_S = 1.0


class _Waiting(NamedTuple):
    """Request that is not answered yet."""

    columns: Columns
    rows: int
    # Id of the request.
    name: str
    future: asyncio.Future[Predicted]


class Answered(NamedTuple):
    """Request that was answered."""

    # Id of the request.
    name: str
    answer: Predicted
    # The shadow model's answer, which is not returned.
    shadow: Predicted | None


class Batches:
    """Thread that computes predictions.

    Args:
        model: Model whose answers are returned.
        shadow: Optional. Second model that computes the same requests afterwards. If unset, none.
        watchdog: Watchdog of the thread.
        note: Optional. Called in the thread with each answered batch; must be fast.
        rows: Maximum number of records per pass, unless a single request has more; limits the
            memory.
        ended: Called when the thread ends, also after an error.
    """

    def __init__(
        self,
        model: ServedModel,
        shadow: ServedModel | None = None,
        *,
        metrics: ServeMetrics,
        watchdog: Watchdog,
        note: Callable[[Sequence[Answered]], None] | None = None,
        ended: Callable[[], object],
        rows: int = ROWS,
    ) -> None:
        self._model = model
        self._rows = rows
        self._shadow = shadow
        self._metrics = metrics
        self._watchdog = watchdog
        self._note = note
        self._ended = ended
        self._waiting = queue.SimpleQueue[_Waiting | None]()
        # Request that was taken from the queue but did not fit into the previous batch.
        self._left: _Waiting | None = None
        self._thread = threading.Thread(target=self._run, name="predictions", daemon=True)
        self.fault: BaseException | None = None
        self._thread.start()

    async def predict(self, columns: Columns, name: str = "") -> Predicted:
        """Return the predictions for the records of a request.

        Raises:
            UnavailableError: If no version is loaded yet, or too many requests wait.
            TaskError: If the task raises on some of the records.
        """
        if self._waiting.qsize() > MOST_WAITING:
            raise UnavailableError("too many requests are waiting; try again later")
        if self.fault is not None:
            raise UnavailableError("the model server is shutting down")
        future = asyncio.get_running_loop().create_future()
        self._waiting.put(_Waiting(columns, len(next(iter(columns.values()))), name, future))
        answer: Predicted = await future
        return answer

    def close(self) -> None:
        """Answer all waiting requests, then end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._watchdog.beat()
                if batch:
                    self._answer(batch)
        except BaseException as fault:  # noqa: BLE001 -- the main thread raises it
            self.fault = fault
        self._ended()

    def _next(self) -> list[_Waiting] | None:
        """Return the requests of one pass, an empty list after a timeout, or None at the end."""
        first, self._left = self._left, None
        if first is None:
            try:
                first = self._waiting.get(timeout=_BEAT_S)
            except queue.Empty:
                return []
            if first is None:
                return None
        batch, rows = [first], first.rows
        while rows < self._rows:
            try:
                more = self._waiting.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._waiting.put(None)
                break
            if rows + more.rows > self._rows:
                self._left = more
                break
            batch.append(more)
            rows += more.rows
        return batch

    def _answer(self, batch: Sequence[_Waiting]) -> None:
        columns = concatenate([each.columns for each in batch])
        try:
            found = self._model.predict(columns)
        except DollError as error:
            # One request caused the error; the others are answered separately.
            if len(batch) > 1:
                for each in batch:
                    self._answer([each])
            else:
                _deliver_answers(batch, [error])
            return
        self._metrics.batch_records.observe(sum(each.rows for each in batch))
        answers = _split(found, batch)
        _deliver_answers(batch, answers)
        shadows: Sequence[Predicted | None] = [None] * len(batch)
        if self._shadow is not None:
            try:
                shadow = self._shadow.predict(columns)
            except DollError:
                # The shadow model has no version yet.
                pass
            else:
                self._metrics.shadow_difference.set(_difference(found, shadow))
                shadows = _split(shadow, batch)
        if self._note is not None:
            answered = zip(batch, answers, shadows, strict=True)
            self._note([Answered(asked.name, answer, other) for asked, answer, other in answered])


def _split(found: Predicted, batch: Sequence[_Waiting]) -> list[Predicted]:
    """Return the answer of each request."""
    ends = [0, *accumulate(each.rows for each in batch)]
    return [found.of(slice(*part)) for part in pairwise(ends)]


def _difference(found: Predicted, shadow: Predicted) -> float:
    """Return the mean absolute difference of the outputs that both models have; NaN if none."""
    differences = [
        np.abs(found.outputs[name] - shadow.outputs[name]).ravel()
        for name in found.outputs.keys() & shadow.outputs.keys()
        if found.outputs[name].shape == shadow.outputs[name].shape
    ]
    return float(np.concatenate(differences).mean()) if differences else float("nan")


def _deliver_answers(batch: Sequence[_Waiting], answers: Sequence[Predicted | DollError]) -> None:
    """Deliver all answers to the event loop in one call."""

    def deliver() -> None:
        for each, answer in zip(batch, answers, strict=True):
            # The caller has given up.
            if each.future.done():
                continue
            if isinstance(answer, DollError):
                each.future.set_exception(answer)
            else:
                each.future.set_result(answer)

    batch[0].future.get_loop().call_soon_threadsafe(deliver)
