"""One process of a join: which partitions it has, by its consumer group, and their turns.

    group    ── which partitions ──▶ ┌────────┐
    left     ── records          ──▶ │ joiner │ ── samples, dead letters,     ──▶ one transaction
    right    ── records          ──▶ └────────┘    what is kept, positions

The group only says who should have a partition; who writes for it, Kafka says by its transactional
id. A process that has lost one without a word, since it stood still for long, is refused when it
writes: it drops what it knows, and takes the partition anew if the group says that it is still its.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

from common.core.events import Assigned, Revoked
from common.errors import (
    DeliveryError,
    RecordTooLargeError,
    UnavailableError,
    UnknownTopicError,
    UserError,
)
from common.joining.machine import SIDES
from common.kafka.names import joins_topic
from common.ports.servers import Log, NewTopic
from common.telemetry.logging import Changes
from common.telemetry.outages import Outage
from services.joiner.partition import JoinedPartition, Shared

if TYPE_CHECKING:
    from common.core.spans import Partition
    from common.joining.records import JoinSpec
    from common.telemetry.metrics.joiner import JoinerMetrics

RETRY_S = 0.5  # until a partition is taken again
STAND_S = 15.0  # likewise, where a topic does not take a record: all that is kept is read anew
COMMIT_S = 5.0  # between two looks of lag tools
TOLD_S = 10.0  # between two lines about what was joined


def prepare(log: Log, spec: JoinSpec) -> int:
    """Make the topics of a join; returns how many partitions it has.

    Raises:
        UserError: If a side is not there, or both are not partitioned alike.
        OutsideError: If Kafka is unavailable or refuses.
    """
    try:
        left, right = (len(log.partitions(topic)) for topic in (spec.left, spec.right))
    except UnknownTopicError as error:
        raise UserError(f"--left, --right: {error}") from error
    if left != right:
        raise UserError(
            f"--left, --right: {spec.left} has {left} partitions and {spec.right} {right}: records"
            " of one key must be in partitions of the same number; write one of them to a topic of"
            " as many partitions as the other, by the same key and partitioner"
        )
    own = NewTopic(joins_topic(spec.to), left, compacted=True)
    log.create_topics([NewTopic(spec.to, left), own])
    if (had := len(log.partitions(own.name))) != left:
        raise UserError(
            f"--left, --right: {spec.left} and {spec.right} have {left} partitions, and had {had}"
            f" when the join to {spec.to} began: keys are in other partitions now; join to another"
            " topic"
        )
    return left


class Joiner:
    """Has the partitions that the group gives it.

    Args:
        name: Of this process, in the group.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        shared: Shared,
        metrics: JoinerMetrics,
        name: str,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._shared = shared
        self._metrics = metrics
        self._clock = clock
        self._outage = Outage(shared.logger, "kafka")
        spec = shared.spec
        self._group = shared.log.stream(joins_topic(spec.to), [spec.left], name)
        self._mine = dict[int, float]()  # that the group gives, and when each may be taken
        self._taken = dict[int, JoinedPartition]()
        self._commit_at = self._tell_at = clock()
        self._told_of = Changes()

    def turn(self, wait_s: float) -> bool:
        """Do what there is to do; waits for something where there is nothing.

        Returns:
            Whether there may be more.

        Raises:
            UserError: If the join makes no sense any more.
            OutsideError: If Kafka refuses.
        """
        try:
            for event in self._group.poll(1, wait_s):
                if isinstance(event, Assigned):
                    self._mine |= dict.fromkeys(_indices(event.partitions), self._clock())
                elif isinstance(event, Revoked):
                    for index in _indices(event.partitions):
                        self._mine.pop(index, None)
                        self._drop(index)
            self._outage.quiet()
        except UnavailableError as error:
            self._outage.met(error)
        worked = False
        for index in self._mine:
            try:
                worked |= self._turn_of(index)
            except RecordTooLargeError as error:
                self._stand(index, error)
            except (DeliveryError, UnavailableError) as error:
                if isinstance(error, DeliveryError):
                    self._shared.logger.warning(
                        "partition_lost", partition=index, reason=str(error)
                    )
                else:
                    self._outage.met(error)
                self._drop(index)
                self._mine[index] = self._clock() + RETRY_S
        self._tell()
        return worked

    def close(self) -> None:
        """Leave the group; what is not written is decided again by others."""
        for index in list(self._taken):
            self._drop(index)
        self._group.close()

    def _turn_of(self, index: int) -> bool:
        now = self._clock()
        taken = self._taken.get(index)
        if taken is None:
            if now < self._mine[index]:
                return False
            prepare(self._shared.log, self._shared.spec)  # partitions may have been added
            self._taken[index] = JoinedPartition(self._shared, index, now)
            return True
        worked = taken.turn(now)
        if (written := taken.write(now)) is not None:
            self._metrics.written(*written)
        return worked

    def _stand(self, index: int, error: RecordTooLargeError) -> None:
        """Let a partition wait whose samples a topic does not take: its operator may mend that."""
        reason = f"{error}: raise max.message.bytes of the topic"
        if self._told_of(f"partition {index}", reason):
            self._shared.logger.error("partition_waits", partition=index, reason=reason)
        self._drop(index)
        self._mine[index] = self._clock() + STAND_S

    def _drop(self, index: int) -> None:
        if (taken := self._taken.pop(index, None)) is not None:
            taken.close()

    def _tell(self) -> None:
        now = self._clock()
        waiting = {
            side: sum(each.waiting()[side] for each in self._taken.values()) for side in SIDES
        }
        self._metrics.stands(len(self._taken), waiting)
        if now >= self._commit_at + COMMIT_S:
            self._commit_at = now
            positions = chain(*(each.positions().items() for each in self._taken.values()))
            self._group.commit(dict(positions))
        if now < self._tell_at + TOLD_S:
            return
        self._tell_at = now
        stands = [each.known for each in self._taken.values() if each.known is not None]
        counts = {
            name: sum(getattr(each.known, name) for each in stands)
            for name in ("joined", "alone", "late_left", "late", "double", "unmatched")
        }
        counts["dead_letters"] = sum(each.dead_letters for each in stands)
        if self._told_of("joined", counts):
            self._shared.logger.info("samples_joined", **counts, waiting=waiting["left"])


def _indices(partitions: tuple[Partition, ...]) -> list[int]:
    return [partition.index for partition in partitions]
