"""Records that lie in Kafka before any clock starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from common.kafka.port import Log, NewTopic
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from common.redis.port import Board

_FLUSH_S = 120.0
_REPORTS_EVERY = 10_000  # records between two rounds of delivery reports
_EMBEDDED_BYTES = 3 << 20  # of records per partition there: it keeps under 5 MB, with its overhead


def partitions_for(values: Sequence[bytes], records: int, *, embedded: bool) -> int:
    """How many partitions a backlog needs where the broker keeps little of each; else 4."""
    if not embedded:
        return 4
    return max(4, -(-records * len(values[0]) // _EMBEDDED_BYTES))


def produce(log: Log, topic: str, partitions: int, values: Sequence[bytes], records: int) -> None:
    """Write `records` records, evenly over a new topic; the values again and again in turn.

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
            raise NotMeasuredError(f"Kafka did not take {records:,} records in {_FLUSH_S:g} s")
    bounds = [log.bounds(partition) for partition in log.partitions(topic)]
    kept = sum(bound.end - bound.start for bound in bounds)
    if kept != records:
        raise NotMeasuredError(f"the broker keeps {kept:,} of {records:,} records")


def check_left(board: Board, records: int) -> None:
    """Make sure that a job has not claimed the whole backlog: from then on it would wait for more.

    Raises:
        NotMeasuredError: If it has.
    """
    leader_status = board.get_leader_status()
    if leader_status is not None and sum(leader_status.claimed.values()) >= records:
        raise NotMeasuredError(f"the backlog of {records:,} records was too small")
