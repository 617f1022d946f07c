"""Writes predictions with their versions to a topic; answers do not wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

from common.errors import DeliveryError, OutsideError
from common.learning.named_outputs import OUTPUT

if TYPE_CHECKING:
    from common.kafka.port import Log
    from common.telemetry.metrics.serve import ServeMetrics
    from services.serve.batching import Answered
    from services.serve.served_model import Predicted


class PredictionWriter:
    """Writer of the topic, for the thread that computes.

    Args:
        topic: Topic of the predictions.

    Raises:
        UnknownTopicError: If the topic does not exist.
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(self, log: Log, topic: str, job: str, metrics: ServeMetrics) -> None:
        log.partitions(topic)
        self._topic = topic
        self._job = job
        self._metrics = metrics
        self._writer = log.writer(waits=False)

    def write(self, answered: Sequence[Answered]) -> None:
        """Write the answers of a batch, as far as Kafka accepts them."""
        for each in answered:
            rows = len(next(iter(each.answer.outputs.values())))

            def lost(_: DeliveryError, rows: int = rows) -> None:
                self._metrics.not_written.inc(rows)

            record = {"id": each.name, "job": self._job, "at_s": time(), **as_data(each.answer)}
            if each.shadow is not None:
                record["shadow"] = as_data(each.shadow)
            try:
                value = msgspec.json.encode(record)
                self._writer.append(self._topic, value, partition=None, on_failed=lost)
            except OutsideError:
                self._metrics.not_written.inc(rows)
        try:
            self._writer.poll()
        # `lost` was called for each record.
        except OutsideError:
            return

    def close(self) -> None:
        """Write waiting records if that takes little time."""
        self._writer.close()


def as_data(predicted: Predicted) -> dict[str, Any]:
    """Return an answer with its version, as JSON data: a list, or lists by name if named."""
    epoch, version = predicted.version.made
    outputs: Any = {name: values.tolist() for name, values in predicted.outputs.items()}
    if outputs.keys() == {OUTPUT}:
        outputs = outputs[OUTPUT]
    return {"version": version, "epoch": epoch, "outputs": outputs}
