"""What the tests of the log share: waiting, filling a topic, reading it back."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from common.core.spans import Partition
from common.ports import NewTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.ports import Log, LogRecord
    from tests.contract.log_fixtures import Rig

PATIENCE_S = 20.0


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Call until true; the call itself is expected to wait a little."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"


def filled(rig: Rig, topic: str, count: int) -> Partition:
    """A topic of one partition with records 0, 1, 2, ..., each saying its own offset."""
    rig.log.create_topics([NewTopic(topic)])
    for i in range(count):
        rig.writer.append(topic, b"%d" % i)
    assert rig.writer.flush(PATIENCE_S)
    return Partition(topic, 0)


def one_by_one(rig: Rig, topic: str, values: Iterable[bytes]) -> None:
    """Append records, each in a batch of its own."""
    for value in values:
        rig.writer.append(topic, value)
        assert rig.writer.flush(PATIENCE_S)


def everything(log: Log, partition: Partition) -> list[LogRecord]:
    """All records from the start on, by a tail."""
    bounds, records = log.bounds(partition), []
    with closing(log.tail(partition, bounds.start)) as tail:
        while tail.position() < bounds.end:
            records += tail.read(1_000, PATIENCE_S)
    return records
