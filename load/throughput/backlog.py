"""A backlog of records, written to Kafka before any clock starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from common.kafka.port import Log, NewTopic
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from common.redis.port import Board

_FLUSH_S = 120.0
# Records between two polls for delivery reports.
_REPORTS_EVERY = 10_000
# Bytes of records per partition. The embedded broker keeps under 5 MB, overhead included.
_EMBEDDED_BYTES = 3 << 20


def partitions_for(values: Sequence[bytes], records: int, *, embedded: bool) -> int:
    """Return the number of partitions that hold a backlog: 4, or more on the embedded broker."""
    if not embedded:
        return 4
    return max(4, -(-records * len(values[0]) // _EMBEDDED_BYTES))


def produce(log: Log, topic: str, partitions: int, values: Sequence[bytes], records: int) -> None:
    """Write `records` records evenly over a new topic, repeating the values in turn.

    Raises:
        NotMeasuredError: If the broker took too long, or did not keep all of them.
    """
    log.create_topics([NewTopic(topic, partitions)])
    with closing(log.writer()) as writer:
        for number in range(records):
            writer.append(topic, values[number % len(values)], partition=number % partitions)
            if number % _REPORTS_EVERY == 0:
                writer.poll()
        if not writer.flush(_FLUSH_S):
            raise NotMeasuredError(f"Kafka did not accept {records:,} records in {_FLUSH_S:g} s")
    bounds = [log.bounds(partition) for partition in log.partitions(topic)]
    kept = sum(bound.end - bound.start for bound in bounds)
    if kept != records:
        raise NotMeasuredError(f"the broker keeps {kept:,} of {records:,} records")


def check_left(board: Board, records: int) -> None:
    """Make sure that a job has not claimed its whole backlog, so that it never waits for records.

    Raises:
        NotMeasuredError: If the whole backlog is claimed.
    """
    leader_status = board.get_leader_status()
    if leader_status is not None and sum(leader_status.claimed.values()) >= records:
        raise NotMeasuredError(f"the backlog of {records:,} records was too small")
