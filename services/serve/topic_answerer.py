"""Answers the records of a topic into another topic, exactly once, even if processes are killed.

    group       ── which partitions ──▶ ┌──────────┐
    a topic     ── records          ──▶ │ answerer │ ── predictions, a position ──▶ one transaction
    positions   ── where it stands  ──▶ └──────────┘

The consumer group assigns partitions, and Kafka's transactional ids decide which process may write
for one. So Kafka refuses a process that was frozen for long, and no answer appears twice.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from common.core.spans import Assigned, Partition, Revoked
from common.errors import ExpiredError, OutsideError, TruncatedError, UserError
from common.kafka.names import positions_topic
from common.kafka.port import (
    LogRecord,
    NewRecord,
    NewTopic,
    StreamLog,
    Tail,
    TransactionalLog,
    Transactions,
)
from common.kafka.read import records_of
from common.learning.errors import TaskError
from common.telemetry.outages import Outage
from services.serve.predictions import as_data

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from common.data.fields import Columns
    from common.telemetry.logging import EventLogger
    from services.serve.protocol import Inputs
    from services.serve.served_model import ServedModel

# Records per transaction.
ROWS = 256
RETRY_S = 0.5
# Number of offsets before the end of the positions topic that are read first. They usually contain
# the last position. The last offset itself is a transaction's marker.
_NEAR_END = 100
# Name of the header with the address of the answered record.
_HEADER = "from"


class AnswererLog(StreamLog, TransactionalLog, Protocol):
    """`Log` with consumer groups and transactions."""


class Route(NamedTuple):
    """Job, source topic and target topic."""

    # Id of the job.
    job: str
    source: str
    to: str


class _Taken(NamedTuple):
    transactions: Transactions
    tail: Tail

    def close(self) -> None:
        self.tail.close()
        self.transactions.close()


class TopicAnswerer:
    """Partitions of a topic that the group assigns to this process. For one thread.

    Args:
        route: Job, source and target.
        model: Model that answers.
        inputs: Converter from records to the model's inputs.
        name: Name of this process in the group.
        retry_s: Seconds until a failed partition is taken again.

    Raises:
        UserError: If the topic of positions has fewer partitions than the source.
        UnknownTopicError: If a topic does not exist.
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(
        self,
        log: AnswererLog,
        route: Route,
        model: ServedModel,
        inputs: Inputs,
        name: str,
        logger: EventLogger,
        retry_s: float = RETRY_S,
    ) -> None:
        self._retry_s = retry_s
        self._log = log
        self._route = route
        self._model = model
        self._inputs = inputs
        self._logger = logger
        self._outage = Outage(logger, "kafka")
        self._positions = positions_topic(route.job, route.source, route.to)
        count = len(log.partitions(route.source))
        log.partitions(route.to)
        log.create_topics([NewTopic(self._positions, count, compacted=True)])
        if (had := len(log.partitions(self._positions))) < count:
            raise UserError(
                f"{self._positions}: must have at least {count} partitions, as {route.source} has,"
                f" got {had}; add partitions to it"
            )
        self._group = log.stream(self._positions, [route.source], name)
        # Partitions that the group assigns, and the earliest time when each may be taken.
        self._mine = dict[int, float]()
        self._taken = dict[int, _Taken]()

    def turn(self, wait_s: float) -> None:
        """Answer all available records, or wait for some."""
        ready, worked = self._model.version is not None, False
        for index in list(self._mine) if ready else ():
            try:
                worked |= self._answer(index)
                self._outage.quiet()
            except OutsideError as error:
                self._outage.met(error)
                self._drop(index)
                self._mine[index] = monotonic() + self._retry_s
        try:
            for event in self._group.poll(1, 0.0 if worked else wait_s):
                if isinstance(event, Assigned):
                    self._mine |= {each.index: monotonic() for each in event.partitions}
                elif isinstance(event, Revoked):
                    for place in event.partitions:
                        self._mine.pop(place.index, None)
                        self._drop(place.index)
        except OutsideError as error:
            self._outage.met(error)

    def close(self) -> None:
        """Leave the group; other processes answer the remaining records."""
        for index in list(self._taken):
            self._drop(index)
        self._group.close()

    def _answer(self, index: int) -> bool:
        """Answer some records of a partition; return True if there were any."""
        place = Partition(self._route.source, index)
        taken = self._taken.get(index)
        if taken is None:
            if monotonic() < self._mine[index]:
                return False
            taken = self._taken[index] = self._take(place)
        try:
            records = taken.tail.read(ROWS, 0.0)
        except (ExpiredError, TruncatedError) as error:
            bounds = self._log.bounds(place)
            at = bounds.start if isinstance(error, ExpiredError) else bounds.end
            self._logger.warning("records_passed_over", reason=str(error), until=at)
            taken.transactions.write([self._position(index, at)])
            raise
        if not records:
            return False
        answers = [
            NewRecord(
                self._route.to,
                msgspec.json.encode({"job": self._route.job, **answered}),
                record.key,
                ((_HEADER, f"{place}@{record.offset}".encode()),),
            )
            for record, answered in zip(records, self._answered(records), strict=True)
        ]
        taken.transactions.write([*answers, self._position(index, records[-1].offset + 1)])
        return True

    def _take(self, place: Partition) -> _Taken:
        """Read a partition's position, after its transactional id has fenced other processes."""
        transactions = self._log.transactions(f"{self._positions}.{place.index}")
        try:
            own = Partition(self._positions, place.index)
            found = list(records_of(self._log, own, _NEAR_END)) or list(records_of(self._log, own))
            at = int(found[-1].value or b"0") if found else self._log.bounds(place).start
            return _Taken(transactions, self._log.tail(place, at))
        except BaseException:
            transactions.close()
            raise

    def _drop(self, index: int) -> None:
        if (taken := self._taken.pop(index, None)) is not None:
            taken.close()

    def _position(self, index: int, offset: int) -> NewRecord:
        return NewRecord(self._positions, str(offset).encode(), b"position", (), index)

    def _answered(self, records: Sequence[LogRecord]) -> list[dict[str, Any]]:
        """Return an answer for each record, or the reason why it has no answer."""
        columns, wrong = self._inputs.decode([record.value for record in records])
        good = [number for number in range(len(records)) if number not in wrong]
        answered = {number: {"error": reason} for number, reason in wrong.items()}
        answered |= dict(zip(good, self._answers(columns, len(good)), strict=True))
        return [answered[number] for number in range(len(records))]

    def _answers(self, columns: Columns, count: int) -> list[dict[str, Any]]:
        if not count:
            return []
        try:
            found = self._model.predict(columns)
        except TaskError as error:
            if count == 1:
                return [{"error": str(error)}]
            rows = ({name: each[n : n + 1] for name, each in columns.items()} for n in range(count))
            return [answer for row in rows for answer in self._answers(row, 1)]
        return [as_data(found.of(number)) for number in range(count)]
