"""Producers of the tools write each id once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from common.core.spans import Partition
from common.errors import UnavailableError
from common.jobs.store import JobRecord, by_stream
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from load.harness.counting import counting_spec
from load.harness.producers import Producers

if TYPE_CHECKING:
    from common.kafka.port import Log

RECORDS = 20
PLACE = Partition("s", 0)


class LogWithFailingWriter:
    """A log whose writers fail a number of times, as Kafka's do while a topic is unknown."""

    def __init__(self, log: MemoryLog, times: int) -> None:
        self._log = log
        self.times = times  # number of failures left

    def writer(self) -> Any:  # noqa: ANN401 -- a writer with one method replaced
        """Return a writer."""
        writer = self._log.writer()
        append = writer.append

        def append_or_fail(*arguments: Any, **more: Any) -> None:  # noqa: ANN401 -- of `append`
            if self.times:
                self.times -= 1
                raise UnavailableError("1/1 brokers are down")
            append(*arguments, **more)

        writer.append = append_or_fail  # type: ignore[method-assign]
        return writer


def test_producer_waits_until_kafka_knows_its_topic() -> None:
    log = MemoryLog()
    log.create_topics([NewTopic(PLACE.topic, 1)])
    away = LogWithFailingWriter(log, times=2)
    spec = counting_spec(
        RECORDS, 0.0, name="counting", streams=[PLACE.topic], batch_size=4, group_size=1
    )
    job = JobRecord(spec, "running", by_stream({PLACE: 0}), "", 0.0)
    producers = Producers(job, cast("Log", away), 1, lambda _: RECORDS)
    while producers.produced < RECORDS:
        producers.check()
    producers.stop()
    assert (away.times, log.bounds(PLACE).end) == (0, RECORDS)
